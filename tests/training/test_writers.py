"""Metrics on disk: no step twice, none missing, no torn line."""

import logging

from relpos_jax.training import writers


def test_a_resumed_file_goes_on_where_the_run_does(tmp_path):
    with writers.Writer(tmp_path, 0) as writer:
        for step in (1, 2, 3, 4):
            writer.write(step, {"loss": step / 3})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # a kill amid a line
    with writers.Writer(tmp_path, 2) as writer:
        writer.write(3, {"loss": 9.0})
    lines = writers.read(path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1]["loss"] == 2 / 3 and lines[2]["loss"] == 9.0


def test_a_torn_line_alone_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}')
    writers.truncate(path, 10)
    assert [line["step"] for line in writers.read(path)] == [1]
    writers.truncate(tmp_path / "absent", 10)
    assert not (tmp_path / "absent").exists()


def test_flush_puts_lines_on_disk(tmp_path):
    with writers.Writer(tmp_path, 0) as writer:
        writer.write(1, {"loss": 1.0})
        writer.flush()
        assert len(writers.read(tmp_path / "metrics.jsonl")) == 1


def test_a_failing_board_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    class Broken:
        def __init__(self, *_, **__):
            pass

        def add_scalar(self, *_):
            raise OSError("disk full")

    class Package:
        SummaryWriter = Broken

    monkeypatch.setattr(writers, "tensorboardX", Package)
    with caplog.at_level(logging.WARNING):
        with writers.Writer(tmp_path, 0) as writer:
            writer.write(1, {"loss": 1.0})
            writer.write(2, {"loss": 1.0})
    assert caplog.text.count("disk full") == 1
    assert len(writers.read(tmp_path / "metrics.jsonl")) == 2


def test_works_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "tensorboardX", None)
    with writers.Writer(tmp_path, 0) as writer:
        writer.write(1, {"loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
