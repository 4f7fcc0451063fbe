"""Files and data sets as a stream of rows; each row knows its file and line, for error messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...errors import DataError
from ...foreign import json_fault, told
from ...io import files_within


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it was read.

    Attributes:
        place: where it stands, for messages: ``file:line``, ``directory[index]``.
        fields: its columns.
        padded: whether the source fills absent fields with None, as Arrow does (a `datasets` folder,
            Parquet), so that a None there may be no field at all.
    """

    place: str
    fields: Mapping[str, Any]
    padded: bool = False


class RowError(DataError):
    """A row that cannot be used.

    Args:
        place: where it stands.
        reason: the kind of fault in a few words, the same for all rows that have it.
        detail: what is wrong with this one and what to do; ``reason`` where there is nothing to add.
    """

    def __init__(self, place: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{place}: {detail or reason}")
        self.place = place
        self.reason = reason


FORMS = (
    "JSON lines (.jsonl, .json), plain text (.txt, one document a line), either gzipped (.gz), Parquet, "
    "a directory that `datasets` saved or can load, or a data set's name on the hub"
)


def read_rows(source: str | Path, split: str | None = None) -> Iterator[Row | RowError]:
    """The rows of ``source``; a row that cannot be read is its error, and the ones after it follow.

    Args:
        source: a file or directory in one of `FORMS`, or ``NAME`` or ``NAME:CONFIGURATION`` on the hub.
        split: which split of a `datasets` directory or a data set of the hub that has several.

    Raises:
        DataError: not readable, not of a known form, or damaged as a whole.
    """
    path = Path(source)
    try:
        there, is_directory = path.exists(), path.is_dir()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {str(source)!r}: {error}") from None
    if is_directory:
        yield from _directory(path, split)
        return
    name = path.name.removesuffix(".gz")
    known = name.endswith((".jsonl", ".ndjson", ".json", ".txt", ".text", ".parquet"))
    if not there:
        if known or not _may_be_on_the_hub(str(source)):
            raise DataError(f"{source} does not exist; data is {FORMS}")
        yield from _hub(str(source), split)
        return
    if not known:
        raise DataError(f"{path}: no known form of data; data is {FORMS}")
    if not path.is_file():
        raise DataError(f"{path} is a device or a pipe, not a file; data is {FORMS}")
    if split is not None:
        raise DataError(f"{path} is a file, so there is no split {split!r} to choose")
    if name.endswith(".parquet"):
        yield from _parquet(path)
    elif name.endswith((".txt", ".text")):
        for line in _lines(path):
            yield line if isinstance(line, RowError) else Row(line[0], {"text": line[1]})
    else:
        yield from _json(path)


def _lines(path: Path) -> Iterator[tuple[str, str] | RowError]:
    number = 0
    try:
        with _opened(path) as file:
            for number, raw in enumerate(file, 1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as Windows' editors write it
                try:
                    line = raw.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    yield RowError(
                        f"{path}:{number}",
                        "not UTF-8 text",
                        f"not UTF-8 text ({error.reason} at byte {error.start})",
                    )
                    continue
                if line.strip():
                    yield f"{path}:{number}", line
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path}: damaged gzip file after line {number} ({error})") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else open(path, "rb")


def _json(path: Path) -> Iterator[Row | RowError]:
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        return
    second = next(lines, None)
    rest = lines if second is None else chain([second], lines)
    if not isinstance(first, RowError) and _opens_array(first[1], alone=second is None):
        yield from _array(path, first[1], rest)
        return
    yield _row(first)
    for line in rest:
        yield _row(line)


def _opens_array(line: str, *, alone: bool) -> bool:
    """Whether a file's first line begins an array of rows: one that is whole is a line of JSON lines."""
    if not line.lstrip().startswith("["):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    except RecursionError:
        return alone
    return alone


def _array(path: Path, first: str, lines: Iterator[tuple[str, str] | RowError]) -> Iterator[Row | RowError]:
    """A file that is one JSON array, as ShareGPT's are."""
    text = [first]
    for line in lines:
        if isinstance(line, RowError):
            raise line
        text.append(line[1])
    for index, value in enumerate(decoded(str(path), "\n".join(text))):
        place = f"{path}[{index}]"
        yield _mapping(place, value)


def _row(line: tuple[str, str] | RowError) -> Row | RowError:
    if isinstance(line, RowError):
        return line
    try:
        return _mapping(line[0], decoded(*line))
    except RowError as error:
        return error


def decoded(place: str, text: str, what: str = "") -> Any:
    """A JSON text's value; ``what`` names the field it stands in.

    Raises:
        RowError: it is no JSON, or JSON that Python cannot hold.
    """
    where = f"{what} is " if what else ""
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise RowError(place, f"{where}malformed JSON", f"{where}{json_fault(error)}") from None


def _mapping(place: str, value: Any) -> Row | RowError:
    if isinstance(value, dict):
        return Row(place, value)
    return RowError(
        place, "not a JSON object", f"a record is a JSON object, not {json.dumps(value, default=str)[:40]}"
    )


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install datasets") from None
    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for fields in batch.to_pylist():
                    yield Row(f"{path}[{index}]", fields, padded=True)
                    index += 1
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: damaged Parquet file after row {index}: {told(error)}") from error


def _directory(path: Path, split: str | None) -> Iterator[Row]:
    datasets = _datasets(str(path))
    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    if not saved and not any(files_within(path, ".parquet", ".jsonl", ".json")):
        raise DataError(f"{path} is a directory, but `datasets` did not save it; data is {FORMS}")
    try:
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:  # whatever a damaged folder makes pyarrow or datasets raise
        what = "damaged `datasets` directory" if saved else "a directory without a data set in it"
        raise DataError(f"{path}: {what}: {told(error)}{'' if saved else f'; data is {FORMS}'}") from error
    yield from _of_split(str(path), loaded, split)


def _may_be_on_the_hub(name: str) -> bool:
    """Whether ``name`` has the shape of a hub's name: ``owner/name`` or ``name``, and a configuration."""
    repository = name.partition(":")[0]
    parts = repository.split("/")
    return (
        1 <= len(parts) <= 2
        and not name.startswith((".", "/", "~"))
        and all(part and part.replace("-", "").replace("_", "").replace(".", "").isalnum() for part in parts)
    )


def _hub(name: str, split: str | None) -> Iterator[Row]:
    datasets = _datasets(name)
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # the hub's, the network's and the data set's own errors have no common class
        raise DataError(
            f"{name} is neither a file nor a directory, and cannot be loaded as a data set of the hub: "
            f"{told(error)}"
        ) from error
    yield from _of_split(name, loaded, split)


def _of_split(name: str, loaded: Any, split: str | None) -> Iterator[Row]:
    if hasattr(loaded, "keys"):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        if split not in loaded:
            wanted = "several splits; choose one" if split is None else f"no split {split!r}"
            raise DataError(f"{name} holds {wanted}: {', '.join(sorted(loaded))}")
        loaded = loaded[split]
    elif split is not None:
        raise DataError(f"{name} is a single data set, so there is no split {split!r} to choose")
    index = 0
    try:
        for index, fields in enumerate(loaded):
            yield Row(f"{name}[{index}]", fields, padded=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: damaged after row {index}: {told(error)}") from error


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(f"{name}: reading a data set needs pip install datasets") from None
    return datasets
