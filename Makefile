# make study      trains and evaluates the default study and writes its report
# make test       runs the tests, without the slow ones
# make test-all   runs all tests
# make lint       checks style and formatting
# make clean      removes the environment and the caches; results in runs/ stay
#
# Each target makes the environment it needs on first use. Variables:
#   PYTHON=python3.12   the Python that the environment is made from (3.11 or newer)
#   CONSTRAINTS=        installs the newest versions that setup.py allows, where the
#                       tested ones do not exist for your Python
#   WORKDIR=…           where `make study` writes, runs/quick by default
#   PYTEST_ARGS=…       more arguments for pytest, such as "-n 2"

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
WORKDIR ?= runs/quick
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: venv study test test-all lint clean

venv: $(INSTALLED)

# The stamp comes last, so that an interrupted install is taken up again.
$(INSTALLED): setup.py $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "relpos_jax needs Python 3.11 or newer, and $(PYTHON) is" \
	    "`$(PYTHON) --version 2>&1`; say 'make PYTHON=python3.12 …'" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check \
	  $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[test]'
	touch $@

study: $(INSTALLED)
	$(BIN)/python -m experiments.extrapolate \
	  --config=configs/extrapolate.py:quick --workdir=$(WORKDIR)

# The models' tests run twice: Flax is to drop its graph mode, and nothing here may
# depend on it.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)
	NNX_GRAPH_MODE=false $(BIN)/python -m pytest tests/models/test_decoder.py $(PYTEST_ARGS)

test-all: export RELPOS_JAX_TEST_OPTIMISED = 1
test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m '' $(PYTEST_ARGS)
	NNX_GRAPH_MODE=false $(BIN)/python -m pytest tests/models/test_decoder.py $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .ruff_cache .hypothesis build dist \
	  *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
