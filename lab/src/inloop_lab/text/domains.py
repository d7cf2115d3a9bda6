"""Domains as datasets: rows of one length, each of one document, and a held-out end of each domain.

A row has L inputs and, one place on, L labels. The last row of a document is shorter; it is filled up, and the labels there are -100, which count
nowhere.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from inloop_lab.data.images import DataError
from inloop_lab.text.cache import Tokens

IGNORED = -100


def find_domains(folder: Path) -> dict[str, Path]:
    """The domains of a folder by name: each file and each folder in it is one.

    Raises:
        DataError: If there are fewer than two, or two have one name.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. Needed is one that has a file or a folder for each domain.")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or (path.is_file() and path.suffix not in (".txt", ".jsonl", ".parquet")):
            continue
        name = path.name if path.is_dir() else path.stem
        if name in found:
            raise DataError(f"{folder} has two domains named '{name}': {found[name].name} and {path.name}.")
        found[name] = path
    if len(found) < 2:
        raise DataError(
            f"{folder} has {len(found)} domains; at least 2 are needed. A domain is a .txt, .jsonl or .parquet file, or a folder of them."
        )
    return found


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The rows ``first`` to ``last`` of a domain, as (inputs [L], labels [L]).

    Args:
        last: None for all.
    """

    def __init__(self, tokens: Tokens, length: int, first: int = 0, last: int | None = None) -> None:
        self.tokens, self.length = tokens, length
        sizes = np.diff(tokens.ends, prepend=0)
        self._rows_before = np.concatenate(
            ([0], np.cumsum(-(-(sizes - 1) // length)))
        )  # a document of one token has none
        self.first = first
        self.last = int(self._rows_before[-1]) if last is None else last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self.first + index
        document = int(np.searchsorted(self._rows_before, row, side="right")) - 1
        start = int(self.tokens.ends[document - 1]) if document else 0
        start += (row - int(self._rows_before[document])) * self.length
        end = min(start + self.length + 1, int(self.tokens.ends[document]))
        values = torch.from_numpy(self.tokens.values[start:end].astype(np.int64))
        x = torch.zeros(self.length, dtype=torch.long)
        y = torch.full((self.length,), IGNORED)
        x[: len(values) - 1], y[: len(values) - 1] = values[:-1], values[1:]
        return x, y

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


def split(name: str, tokens: Tokens, length: int, held_out: int) -> tuple[Rows, Rows]:
    """The rows to train on, and the last ``held_out`` rows of a domain.

    Raises:
        DataError: If nothing is left to train on.
    """
    everything = Rows(tokens, length)
    if len(everything) <= held_out:
        raise DataError(
            f"Domain '{name}' has {len(everything)} rows of {length} tokens, of which {held_out} are to be held out. Fix: more text, shorter rows, or fewer "
            "held-out rows."
        )
    cut = len(everything) - held_out
    return Rows(tokens, length, 0, cut), Rows(tokens, length, cut)
