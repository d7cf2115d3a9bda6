"""The tokens of a domain in a file, written once, and read row by row afterwards: they may be larger than memory."""

import array
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from inloop.atomic_files import write_atomically
from inloop_lab.data.images import DataError
from inloop_lab.text.documents import documents, files_of
from inloop_lab.text.tokens import Tokenizer, smallest_type


class TokenFile:
    """The numbers in a file, read slice by slice. It is not mapped: of pages that are read here and there the system would keep many."""

    def __init__(self, path: Path, dtype: "np.dtype[Any]") -> None:
        self.path, self.dtype = path, dtype
        self.size = path.stat().st_size // dtype.itemsize

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> "np.ndarray[Any, Any]":
        start, end, _ = part.indices(self.size)
        return np.fromfile(self.path, self.dtype, count=max(0, end - start), offset=start * self.dtype.itemsize)


class Tokens:
    """The tokens of a domain, one document after the other.

    Attributes:
        values: All tokens; a slice of them is an array.
        ends: Where each document ends in them.
        digest: Of the files they were made of, and of the tokenizer.
    """

    def __init__(self, values: Any, ends: Any, digest: str) -> None:
        self.values, self.ends, self.digest = values, ends, digest


def tokens_of(
    domain: Path, tokenizer: Tokenizer, cache: Path, progress: Callable[[int], None] = lambda n: None
) -> Tokens:
    """The tokens of a domain, from the cache if its files and the tokenizer are those of then.

    Args:
        cache: A folder, made if it is missing.
        progress: Called with the number of bytes of each piece.

    Raises:
        DataError: If a file cannot be read, or the domain is empty.
        FileWriteError: If the disk is full.
    """
    digest = digest_of(domain, tokenizer)
    cache.mkdir(parents=True, exist_ok=True)
    tokens, ends = cache / f"{domain.stem}-{digest}.tokens", cache / f"{domain.stem}-{digest}.ends"
    if not ends.exists():  # it is written last
        _write(domain, tokenizer, tokens, ends, progress)
    return Tokens(
        TokenFile(tokens, smallest_type(tokenizer.size)),
        np.fromfile(ends, dtype=np.int64),
        digest,
    )


def digest_of(domain: Path, tokenizer: Tokenizer) -> str:
    """Of the names, sizes and times of a domain's files, and of the tokenizer."""
    known = [tokenizer.digest]
    for path in files_of(domain):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            state = file.stat()
            known += [file.relative_to(domain.parent).as_posix(), str(state.st_size), str(state.st_mtime_ns)]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]


def _write(domain: Path, tokenizer: Tokenizer, tokens: Path, ends: Path, progress: Callable[[int], None]) -> None:
    ends_of_documents = array.array("q")
    dtype = smallest_type(tokenizer.size)

    def write(file: BinaryIO) -> None:
        count = 0
        for piece in documents(domain):
            values = tokenizer.encode(piece).astype(dtype, copy=False)
            file.write(values.tobytes())
            count += len(values)
            if piece.ends and count > (ends_of_documents[-1] if ends_of_documents else 0):
                ends_of_documents.append(count)
            progress(len(piece.content))
        if not count:
            raise DataError(f"{domain} is empty: it has no text.")

    write_atomically(tokens, write)
    write_atomically(ends, lambda file: file.write(ends_of_documents.tobytes()))
