"""Text of TensorFlow Datasets, read without TensorFlow.

The sets are stored as array_record: TFDS's default, tfrecord, needs TensorFlow. Where
a set is not prepared and nothing can be downloaded, `load` says so within seconds; TFDS
by itself tries for minutes.
"""

import contextlib
import difflib
import importlib
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relpos_jax.data import text_sets
from relpos_jax.data.text_files import Record, UnusableFile

# The text features of the sets for language modelling, the first present is taken.
FEATURES = ("text", "book_text", "content", "document", "article")
# The first present is held out. `validation` comes first: `test` is for the last word.
HELD_OUT_SPLITS = ("validation", "test")

_SECONDS = 3.0  # for each host to answer
_RECORDS = 64  # read at once: a record may be a whole book


class TextSource(NamedTuple):
    """A prepared set.

    Attributes:
      splits: its names.
      records: split to a function that yields its records anew, in order.
      description: what it is, and which version.
      identity: JSON values that tell it from other sets.
    """

    splits: tuple[str, ...]
    records: Callable[[str], Iterator[Record]]
    description: str
    identity: Mapping[str, Any]


def open_set(name: str, *, data_dir: str | Path | None = None) -> TextSource:
    """Opens a set, and prepares it where that has not been done.

    The records of `text_sets` are pieces of one text; those of other sets are
    documents, and a newline stands between two of them.

    Args:
      name: `NAME` or `NAME/CONFIG`.
      data_dir: where TFDS keeps its sets; None takes its own default.

    Raises:
      ValueError: no such set, or no text in it.
      RuntimeError: the set is not prepared as array_record and cannot be prepared here.
    """
    # Half a second, and most runs need none of it.
    import tensorflow_datasets as tfds

    builder = find(name, data_dir)
    if not builder.is_prepared():
        prepare(name, builder)
    own = name in text_sets.SETS
    feature = "text" if own else _text_feature(tfds, name, builder.info.features)
    splits = builder.info.splits

    def records(split: str) -> Iterator[Record]:
        try:
            source = builder.as_data_source(split=split)
        except NotImplementedError as error:
            raise RuntimeError(
                f"tfds:{name} is prepared under {builder.data_path} in a format that "
                f"cannot be read here ({error}): {_advice(name, builder)}"
            ) from error
        return _own_records(source) if own else _records(source, feature)

    sizes = {
        split: [info.num_examples, info.num_bytes] for split, info in splits.items()
    }
    facts = {}
    if own:
        facts = {k: dict(v) for k, v in (builder.info.metadata or {}).items()}
    identity = {"tfds": builder.info.full_name, "splits": sizes, "facts": facts}
    description = f"TensorFlow Datasets {builder.info.full_name}, feature {feature!r}"
    return TextSource(tuple(splits), records, description, identity)


def held_out_split(source: TextSource, name: str, wanted: str | None) -> str | None:
    """Returns the split to hold out, None for none.

    Args:
      source: the set.
      name: its name, for messages.
      wanted: a split's name; None takes the first of `HELD_OUT_SPLITS` that there is.

    Raises:
      ValueError: no split `train`, or none of the name wanted.
    """
    if "train" not in source.splits:
        raise ValueError(
            f"tfds:{name} has no split 'train': it has {sorted(source.splits)}"
        )
    if wanted is not None and wanted not in source.splits:
        raise ValueError(
            f"tfds:{name} has no split {wanted!r}: it has {sorted(source.splits)}"
        )
    found = [split for split in HELD_OUT_SPLITS if split in source.splits]
    return wanted or next(iter(found), None)


def find(name: str, data_dir: str | Path | None = None) -> Any:
    """Returns a set's builder.

    Raises:
      ValueError: there is no such set; names the nearest.
    """
    import tensorflow_datasets as tfds

    base = name.split("/")[0].split(":")[0]
    # TFDS imports its older modules in one go, and stops at the first whose own needs
    # are missing; those after it, such as wiki40b, then seem not to exist.
    with contextlib.suppress(ImportError):
        importlib.import_module("tensorflow_datasets.text")
    arguments = {"file_format": "array_record"}
    if data_dir is not None:
        arguments["data_dir"] = str(Path(data_dir).expanduser())
    if name in text_sets.SETS:
        from relpos_jax.data import builders  # registers them

        return builders.BUILDERS[name](**arguments)
    if not base.isidentifier():
        raise _unknown(tfds, base)
    try:
        return tfds.builder(name, **arguments)
    except tfds.core.DatasetNotFoundError:  # its message lists some 250 names
        raise _unknown(tfds, base) from None
    except (ValueError, RuntimeError, ImportError) as error:  # an unknown config, say
        raise ValueError(f"tfds:{name} cannot be opened: {_short(error)}") from error


def _unknown(tfds, base: str) -> ValueError:
    known = set(tfds.list_builders(with_community_datasets=False))
    near = difflib.get_close_matches(base, known | set(text_sets.SETS), n=5)
    nearest = f"; nearest names: {', '.join(near)}" if near else ""
    return ValueError(
        f"TensorFlow Datasets {tfds.__version__} knows no set {base!r}{nearest}"
    )


def prepare(name: str, builder: Any) -> None:
    """Downloads a set and stores it as array_record, or says quickly why it cannot.

    Raises:
      UnusableFile: a file of one of the sets of `text_sets` is not what it should be.
      RuntimeError: anything else that went wrong.
    """
    import tensorflow_datasets as tfds

    given = getattr(builder, "given", None)
    start = f"tfds:{name} is not prepared under {builder.data_path}, and"
    own = text_sets.SETS.get(name)
    urls = [own.url] if own else builder.url_infos or {}
    unreachable = None if given else _unreachable_host(urls)
    if unreachable:
        raise RuntimeError(
            f"{start} nothing can be downloaded: {unreachable}. "
            f"{_advice(name, builder)}"
        )
    try:
        with _no_retries():
            # Ready-made copies in TFDS's own storage are tfrecord.
            config = tfds.download.DownloadConfig(try_download_gcs=False)
            builder.download_and_prepare(download_config=config)
    except UnusableFile:
        raise
    except Exception as error:  # whatever a set's own code raises
        raise RuntimeError(
            f"{start} preparing it failed with {type(error).__name__}: "
            f"{_short(error)}. {_advice(name, builder)}"
        ) from error


def _advice(name: str, builder) -> str:
    if own := text_sets.SETS.get(name):
        return (
            f"Get {own.url} where that works, unpack it, and say python -m "
            f"experiments.prepare_data --dataset={name} --manual_dir=FOLDER; or take "
            "'stdlib' or 'file:PATH'"
        )
    return (
        f"Prepare it where that works, by tfds.builder({name!r}, "
        f"file_format='array_record').download_and_prepare(), and put the copy under "
        f"{builder.data_path}; or take 'stdlib' or 'file:PATH'"
    )


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]}..."


@contextlib.contextmanager
def _no_retries() -> Iterator[None]:
    """Makes TFDS give a download up at its first failure, not after minutes."""
    from tensorflow_datasets.core.download import downloader

    before, downloader.MAX_RETRIES = downloader.MAX_RETRIES, 0
    try:
        yield
    finally:
        downloader.MAX_RETRIES = before


def _unreachable_host(urls) -> str | None:
    """Says which host of these addresses does not answer; None where all do.

    Asked of the proxy where one is set. Sets that record no address are tried at the
    storage that TFDS itself uses.
    """
    proxies = urllib.request.getproxies()
    hosts = set()
    for url in urls or ["https://storage.googleapis.com"]:
        address = urllib.parse.urlsplit(url)
        proxy = proxies.get(address.scheme) or proxies.get("all")
        if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
            address = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        if address.hostname:
            port = address.port or {"http": 80, "ftp": 21}.get(address.scheme, 443)
            hosts.add((address.hostname, port))
    for host, port in sorted(hosts):
        problem = _connect(host, port)
        if problem:
            return f"{host} is not reachable ({problem})"
    return None


def _connect(host: str, port: int) -> str | None:
    """Opens and closes a connection; returns what went wrong, if anything did."""
    result = []

    def attempt():
        try:
            socket.create_connection((host, port), timeout=_SECONDS).close()
            result.append(None)
        except (OSError, UnicodeError) as error:  # the latter for no host name
            result.append(str(error))

    # A thread, since looking up a name knows no time limit.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return result[0] if result else f"no answer in {_SECONDS:g} s"


def _text_feature(tfds, name: str, features) -> str:
    """Returns the name of the feature that holds the text."""
    texts = [
        key
        for key, feature in features.items()
        if isinstance(feature, tfds.features.Text)
    ]
    for key in FEATURES:
        if key in texts:
            return key
    if len(texts) == 1:
        return texts[0]
    raise ValueError(
        f"tfds:{name} has no text to model: needed one of the text features "
        f"{', '.join(FEATURES)}, or a single one; found {texts or list(features)}"
    )


def _records(source, feature: str) -> Iterator[Record]:
    """Yields a document a record; a newline ends each but the last."""
    for row, record in _rows(source):
        text = record[feature]
        text = text.encode("utf-8") if isinstance(text, str) else text
        end = b"\n" if row + 1 < len(source) else b""
        yield Record(text + end, begins=True)


def _own_records(source) -> Iterator[Record]:
    for _, record in _rows(source):
        yield Record(record["text"], begins=bool(record["begins"]))


def _rows(source) -> Iterator[tuple[int, dict]]:
    for first in range(0, len(source), _RECORDS):
        rows = range(first, min(first + _RECORDS, len(source)))
        yield from zip(rows, source.__getitems__(list(rows)), strict=True)
