"""Files and data sets as a stream of records, each with the place an error message can point to."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...errors import DataError

FORMS = (
    "JSON lines (.jsonl, .json), plain text (.txt, one document a line), either gzipped (.gz), "
    "or a directory that `datasets` saved"
)

Record = tuple[str, Mapping[str, Any]]


def read_records(path: Path, split: str | None = None) -> Iterator[Record]:
    """The records of ``path`` and where each stands (``file:line``, ``directory[index]``).

    Args:
        path: a file or directory in one of `FORMS`.
        split: which split of a `datasets` directory that holds several.

    Raises:
        DataError: not readable, not of a known form, or malformed, with file and line.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; data is {FORMS}")
    if path.is_dir():
        yield from _data_set(path, split)
        return
    if split is not None:
        raise DataError(f"{path} is a file, so there is no split {split!r} to choose")
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        yield from _json(path)
    elif name.endswith((".txt", ".text")):
        for place, line in _lines(path):
            yield place, {"text": line}
    else:
        raise DataError(f"{path}: no known form of data; data is {FORMS}")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        with _opened(path) as file:
            for number, raw in enumerate(file, 1):
                line = raw.decode("utf-8").rstrip("\r\n")
                if line.strip():
                    yield f"{path}:{number}", line
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path}: damaged gzip file after line {number} ({error})") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else open(path, "rb")


def _json(path: Path) -> Iterator[Record]:
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        return
    if first[1].lstrip().startswith("["):
        yield from _array(path, [first[1], *(line for _, line in lines)])
        return
    yield _record(*first)
    for place, line in lines:
        yield _record(place, line)


def _array(path: Path, lines: list[str]) -> Iterator[Record]:
    """A file that is one JSON array, as ShareGPT's are."""
    for index, value in enumerate(_decoded(str(path), "\n".join(lines))):
        yield f"{path}[{index}]", _mapping(f"{path}[{index}]", value)


def _record(place: str, line: str) -> Record:
    return place, _mapping(place, _decoded(place, line))


def _decoded(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"{place}: malformed JSON: {error.msg} at {at}") from None


def _mapping(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: a record is a JSON object, not {json.dumps(value)[:40]}")
    return value


def _data_set(path: Path, split: str | None) -> Iterator[Record]:
    if not any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        raise DataError(f"{path} is a directory, but `datasets` did not save it; data is {FORMS}")
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(f"{path}: reading a `datasets` directory needs pip install datasets") from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged `datasets` directory: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        if split not in loaded:
            wanted = "several splits; choose one" if split is None else f"no split {split!r}"
            raise DataError(f"{path} holds {wanted}: {', '.join(sorted(loaded))}")
        loaded = loaded[split]
    elif split is not None:
        raise DataError(f"{path} is a single data set, so there is no split {split!r} to choose")
    for index, row in enumerate(loaded):
        yield f"{path}[{index}]", row
