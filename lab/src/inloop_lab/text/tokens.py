"""From bytes to the numbers that a language model sees: the bytes themselves, or those of a tokenizer file."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from inloop_lab.data.images import DataError
from inloop_lab.text.documents import Piece


class Tokenizer(Protocol):
    """Turns pieces of documents into tokens.

    Attributes:
        digest: The same for equal tokenizers only.
        size: How many tokens there are.
    """

    digest: str
    size: int

    def encode(self, piece: Piece) -> "np.ndarray[Any, Any]": ...


class Bytes:
    """Each byte is a token."""

    digest, size = "bytes", 256

    def encode(self, piece: Piece) -> "np.ndarray[Any, Any]":
        return np.frombuffer(piece.content, dtype=np.uint8)


class FromFile:
    """A tokenizer of the package tokenizers, from its file tokenizer.json."""

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            raise DataError(f"{path} takes the package tokenizers. Fix: pip install tokenizers")
        from tokenizers import Tokenizer as Loaded

        try:
            content = path.read_bytes()
            self._tokenizer = Loaded.from_str(content.decode())
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).") from None
        except Exception as error:  # tokenizers raises nothing more special
            raise DataError(f"{path} is no tokenizer file of the package tokenizers ({error}).") from None
        self.digest = hashlib.sha256(content).hexdigest()
        self.size = self._tokenizer.get_vocab_size()

    def encode(self, piece: Piece) -> "np.ndarray[Any, Any]":
        try:
            text = piece.content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{piece.place_of(error.start)}: no UTF-8. Fix: convert the file, or train on bytes, without a tokenizer."
            ) from None
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)


def smallest_type(size: int) -> "np.dtype[Any]":
    """The type that holds the tokens 0 to size - 1."""
    return np.dtype(np.min_scalar_type(max(1, size - 1)))
