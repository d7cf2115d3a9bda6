"""The documents of a domain, read piece by piece, since a file may be larger than memory.

.txt                a file is a document
.jsonl              a line is an object; its "text" is a document
.parquet            a value of the column "text" is a document (needs pyarrow)
a folder            all files below it, by name; or what ``Dataset.save_to_disk`` of Hugging Face wrote (needs datasets)
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inloop_lab.data.images import DataError

COLUMN = "text"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document.

    Attributes:
        content: In UTF-8, if the file is.
        ends: Whether the document ends with it.
        path: The file.
        place: The byte of the file at which it begins, or its line or row.
    """

    content: bytes
    ends: bool
    path: Path
    place: int | str

    def place_of(self, byte: int) -> str:
        """The place of one of its bytes, for messages."""
        return f"{self.path}, {self.place}" if isinstance(self.place, str) else f"{self.path}, byte {self.place + byte}"


def files_of(domain: Path) -> list[Path]:
    """The files of a domain, in the order of their names; of a dataset of Hugging Face, its folder.

    Raises:
        DataError: If there are none.
    """
    if domain.is_file() or _is_saved_dataset(domain):
        return [domain]
    files = sorted(path for path in domain.rglob("*") if path.suffix in _READERS and path.is_file())
    if not files:
        raise DataError(f"{domain} has no file that ends in {', '.join(_READERS)}.")
    return files


def documents(domain: Path) -> Iterator[Piece]:
    """All documents of a domain, as pieces of at most about a megabyte.

    Raises:
        DataError: If a file cannot be read.
    """
    for path in files_of(domain):
        read = _read_saved_dataset if path.is_dir() else _READERS[path.suffix]
        try:
            yield from read(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror or error}).") from None


def _read_text(path: Path) -> Iterator[Piece]:
    """Pieces end with a line, so that no word is cut; a longer line is cut between characters."""
    with path.open("rb") as file:
        rest, position = b"", 0
        while chunk := file.read(_CHUNK):
            content = rest + chunk
            end = content.rfind(b"\n") + 1 or _end_of_characters(content)
            yield Piece(content[:end], False, path, position)
            rest, position = content[end:], position + end
        yield Piece(rest, True, path, position)


def _end_of_characters(content: bytes) -> int:
    """Where the last whole character of UTF-8 ends: bytes that continue one begin with the bits 10."""
    start = len(content) - 1
    while start > max(0, len(content) - 4) and content[start] & 0xC0 == 0x80:
        start -= 1
    return start or len(content)


def _read_lines(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: no JSON ({error}).") from None
            text = found.get(COLUMN) if isinstance(found, dict) else None
            yield _whole(text, path, f"line {number}")


def _read_parquet(path: Path) -> Iterator[Piece]:
    _refuse_missing("pyarrow", path)
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if COLUMN not in file.schema_arrow.names:
            raise DataError(f"{path} has the columns {', '.join(file.schema_arrow.names)}; needed is '{COLUMN}'.")
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=[COLUMN]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield _whole(text, path, f"row {number}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read ({str(error).splitlines()[0]}).") from None


def _read_saved_dataset(path: Path) -> Iterator[Piece]:
    _refuse_missing("datasets", path)
    import datasets

    found = datasets.load_from_disk(str(path))
    if COLUMN not in found.column_names:
        raise DataError(f"{path} has the columns {', '.join(found.column_names)}; needed is '{COLUMN}'.")
    for number, text in enumerate(found[COLUMN], start=1):
        yield _whole(text, path, f"row {number}")


def _whole(text: Any, path: Path, place: str) -> Piece:
    if not isinstance(text, str):
        raise DataError(f"{path}, {place}: '{COLUMN}' is missing, or no text.")
    try:
        return Piece(text.encode(), True, path, place)
    except UnicodeEncodeError:  # JSON may hold half of a surrogate pair
        raise DataError(f"{path}, {place}: the text is not valid Unicode.") from None


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _refuse_missing(package: str, path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise DataError(f"{path} takes the package {package}. Fix: pip install {package}")


_READERS: dict[str, Callable[[Path], Iterator[Piece]]] = {
    ".txt": _read_text,
    ".jsonl": _read_lines,
    ".parquet": _read_parquet,
}
