"""Checkpoints: written whole or not at all, and without code.

A file is a line of text, ``inloop checkpoint 1 <sha256 of the rest>``, and then the output of ``torch.save``. It is written beside its place
and moved there when it is on disk, so that a kill or a full disk leaves the old file. Reading checks the digest and unpacks tensors,
numbers, strings and containers only.
"""

import hashlib
import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from inloop.atomic_files import write_atomically
from inloop.distributed import rank
from inloop.errors import CheckpointError, UsageError

_FORMAT = 1
_HEADER = re.compile(rb"inloop checkpoint (\d+) ([0-9a-f]{64})\n")


class Checkpoints:
    """The newest few checkpoints of a run, by step, in a folder of their own.

    Args:
        folder: Made if it is missing.
        keep: The number of checkpoints to keep.

    Example:
        >>> import tempfile
        >>> checkpoints = Checkpoints(tempfile.mkdtemp())
        >>> checkpoints.load() is None
        True
        >>> checkpoints.save(10, {"model": torch.nn.Linear(1, 1).state_dict(), "seen": 320})
        >>> step, state = checkpoints.load()
        >>> step, state["seen"]
        (10, 320)
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: allowed are whole numbers from 1; with 2 there is one to go back to.")
        self.folder = Path(folder)
        if self.folder.is_file():
            raise UsageError(f"{folder} is a file; a folder is needed, which may be missing yet.")
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        names = (re.fullmatch(r"step-(\d+)\.pt", path.name) for path in self.folder.glob("step-*.pt"))
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        """The path of a step's checkpoint, even if there is none."""
        return self.folder / f"step-{step:08d}.pt"

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save ``state`` (the state_dicts of model, optimizer, learner, loader, ...) of ``step``, and delete the oldest.

        Checkpoints of later steps are deleted, too: the run has gone back. Of several processes only the first writes.

        Raises:
            CheckpointError: If ``state`` holds something that could not be read again.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: allowed are whole numbers from 0.")
        if not isinstance(state, Mapping):
            raise UsageError(f"state is a {type(state).__name__}; needed is a dict of states.")
        if rank() != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(self.path(step), dict(state))
        for later in (one for one in self.steps() if one > step):  # the run has gone back
            self.path(later).unlink(missing_ok=True)
        for old in self.steps()[: -self.keep]:
            self.path(old).unlink(missing_ok=True)

    def load(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest checkpoint, or of the one of ``step``; None if there is none yet.

        Raises:
            CheckpointError: If it is damaged, or not written by inloop; the message names the last whole one before it.
        """
        steps = self.steps()
        if step is None and not steps:
            return None
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; it has {steps or 'none'}.")
        chosen = steps[-1] if step is None else step
        try:
            return chosen, read_checkpoint(self.path(chosen))
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._offer(chosen)}") from None

    def _offer(self, step: int) -> str:
        for earlier in reversed([one for one in self.steps() if one < step]):
            try:
                read_checkpoint(self.path(earlier))
            except CheckpointError:
                continue
            return f"The one before it, of step {earlier}, is whole: load(step={earlier}) continues from there."
        return "There is no whole one before it."


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path``, atomically."""
    content = io.BytesIO()
    try:
        torch.save(state, content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: the state cannot be saved ({str(error).splitlines()[0]}). Fix: save tensors, numbers, strings and containers of them."
        ) from None
    _unpacked(content.getbuffer(), path)  # fails here rather than when a run continues
    digest = hashlib.sha256(content.getbuffer()).hexdigest()

    def write(file: BinaryIO) -> None:
        file.write(f"inloop checkpoint {_FORMAT} {digest}\n".encode())
        file.write(content.getbuffer())

    write_atomically(path, write)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state that :func:`write_checkpoint` wrote.

    Raises:
        CheckpointError: If the file is missing, damaged, or not written by inloop.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    header = _HEADER.match(content)
    if not content:
        raise CheckpointError(f"{path} is empty: it was not written to its end, or was damaged later.")
    if header is None:
        raise CheckpointError(f"{path} is no checkpoint of inloop: it begins with {content[:24]!r}.")
    if int(header[1]) != _FORMAT:
        raise CheckpointError(f"{path} has the format {int(header[1])}; this version of inloop reads {_FORMAT}.")
    rest = memoryview(content)[header.end() :]
    if hashlib.sha256(rest).hexdigest().encode() != header[2]:
        raise CheckpointError(f"{path} is damaged: its content does not have the digest of its first line.")
    return _unpacked(rest, path)


def _unpacked(content: memoryview, path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path}: the state has something other than tensors, numbers, strings and containers of them; reading that might execute code "
            f"({reason}). Fix: convert it (float(x), array.tolist(), str(path))."
        ) from None
    except Exception as error:  # a file that ends early, or that is no archive
        raise CheckpointError(
            f"{path} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}."
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, and a dict of states is needed.")
    return state
