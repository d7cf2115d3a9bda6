"""The domains of a run: rows to train on, and held-out rows."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inloop_lab.data.images import DataError
from inloop_lab.mixtures.settings import MixtureSettings
from inloop_lab.text.cache import tokens_of
from inloop_lab.text.domains import Rows, find_domains, split
from inloop_lab.text.tokens import Bytes, FromFile, Tokenizer


@dataclass(frozen=True)
class Domains:
    """All that a run reads.

    Attributes:
        training: By name, in the order of the names.
        held_out: The rows at the end of each.
        target: Rows that judge; None if the training data do.
        num_tokens: The size of the vocabulary.
        digest: Of all files and of the tokenizer.
    """

    training: dict[str, Rows]
    held_out: dict[str, Rows]
    target: Rows | None
    num_tokens: int
    digest: str


def load_domains(
    settings: MixtureSettings, cache: Path, progress: Callable[[int], None] = lambda number: None
) -> Domains:
    """Tokenise what is not in the cache yet, and cut rows.

    Raises:
        DataError: If a file cannot be read, or a domain has too little text.
    """
    tokenizer: Tokenizer = FromFile(Path(settings.tokenizer)) if settings.tokenizer else Bytes()
    training, held_out, digests = {}, {}, []
    for name, path in find_domains(Path(settings.data)).items():
        tokens = tokens_of(path, tokenizer, cache, progress)
        digests.append(f"{name} {tokens.digest}")
        training[name], held_out[name] = split(name, tokens, settings.length, settings.held_out)
    target = None
    if settings.target:
        path = Path(settings.target)
        if not path.exists():
            raise DataError(f"{path} does not exist. Needed is a file or a folder of text, as for a domain.")
        tokens = tokens_of(path, tokenizer, cache, progress)
        digests.append(f"target {tokens.digest}")
        target = Rows(tokens, settings.length)
        if not len(target):
            raise DataError(f"{path} has no row of text.")
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
    return Domains(training, held_out, target, tokenizer.size, digest)


def batch_of(rows: Rows, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and labels of some rows, [N, L] each."""
    found = rows.__getitems__(numbers.tolist())
    return torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])
