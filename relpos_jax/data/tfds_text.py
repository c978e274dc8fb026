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
from collections.abc import Iterator
from pathlib import Path

# The text features of the sets for language modelling, the first present is taken.
FEATURES = ("text", "book_text", "content", "document", "article")
# The first present is held out. `validation` comes first: `test` is for the last word.
HELD_OUT_SPLITS = ("validation", "test")

_SECONDS = 3.0  # for each host to answer
_RECORDS = 1024  # read at once


def load(
    name: str, *, data_dir: str | Path | None = None, max_bytes: int | None = None
) -> tuple[list[bytes], str]:
    """Reads a set's text, its documents joined by a newline.

    Args:
      name: `NAME` or `NAME/CONFIG`.
      data_dir: where TFDS keeps its sets; None takes its own default.
      max_bytes: no more than about as many bytes of a split are read.

    Returns:
      The parts, and a description. The parts are the text of `train` and of the first
      split of `HELD_OUT_SPLITS` that there is, or of `train` alone.

    Raises:
      ValueError: no such set, no text in it, or no split `train`.
      RuntimeError: the set is not prepared as array_record and cannot be prepared here.
    """
    # Half a second, and most runs need none of it.
    import tensorflow_datasets as tfds

    builder = _find(tfds, name, data_dir)
    if not builder.is_prepared():
        _prepare(tfds, name, builder)
    feature = _text_feature(tfds, name, builder.info.features)
    splits = builder.info.splits
    if "train" not in splits:
        raise ValueError(f"tfds:{name} has no split 'train': it has {sorted(splits)}")
    chosen = ["train"] + [split for split in HELD_OUT_SPLITS if split in splits][:1]
    try:
        sources = [builder.as_data_source(split=split) for split in chosen]
    except NotImplementedError as error:
        raise RuntimeError(
            f"tfds:{name} is prepared under {builder.data_path} in a format that "
            f"cannot be read here ({error}): {_advice(name, builder)}"
        ) from error
    parts = [_join(source, feature, max_bytes) for source in sources]
    return parts, (
        f"TensorFlow Datasets {builder.info.full_name}, feature {feature!r} of splits "
        f"{', '.join(chosen)}"
    )


def _find(tfds, name: str, data_dir):
    """Returns the set's builder."""
    base = name.split("/")[0].split(":")[0]
    # TFDS imports its older modules in one go, and stops at the first whose own needs
    # are missing; those after it, such as wiki40b, then seem not to exist.
    with contextlib.suppress(ImportError):
        importlib.import_module("tensorflow_datasets.text")
    arguments = {"file_format": "array_record"}
    if data_dir is not None:
        arguments["data_dir"] = str(Path(data_dir).expanduser())
    try:
        return tfds.builder(name, **arguments)
    except tfds.core.DatasetNotFoundError:
        # Its message is the whole list of some 250 names.
        known = set(tfds.list_builders(with_community_datasets=False))
        near = difflib.get_close_matches(base, known, n=5)
        nearest = f"; nearest names: {', '.join(near)}" if near else ""
        raise ValueError(
            f"TensorFlow Datasets {tfds.__version__} knows no set {base!r}{nearest}"
        ) from None
    except (ValueError, RuntimeError, ImportError) as error:  # an unknown config, say
        raise ValueError(f"tfds:{name} cannot be opened: {_short(error)}") from error


def _prepare(tfds, name: str, builder):
    """Downloads a set and stores it as array_record, or says quickly why it cannot."""
    start = f"tfds:{name} is not prepared under {builder.data_path}, and"
    unreachable = _unreachable_host(builder.url_infos or {})
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
    except Exception as error:  # whatever a set's own code raises
        raise RuntimeError(
            f"{start} preparing it failed with {type(error).__name__}: "
            f"{_short(error)}. {_advice(name, builder)}"
        ) from error


def _advice(name: str, builder) -> str:
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


def _join(source, feature: str, max_bytes: int | None) -> bytes:
    """Joins the records' texts by newlines, as many as `max_bytes` needs."""
    documents, size = [], 0
    for first in range(0, len(source), _RECORDS):
        rows = range(first, min(first + _RECORDS, len(source)))
        for record in source.__getitems__(list(rows)):
            text = record[feature]
            text = text.encode("utf-8") if isinstance(text, str) else text
            documents.append(text)
            size += len(text) + 1
        if max_bytes is not None and size > max_bytes:
            break
    return b"\n".join(documents)
