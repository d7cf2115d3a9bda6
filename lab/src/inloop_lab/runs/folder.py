"""The folder of a run, which can be killed at any moment and continued.

settings.json          the settings of the run; another run is refused
.lock                  held by the process that runs
samples.npz            a few training images, for augmentation runs
seed-0/epochs.jsonl    a line for each finished epoch
seed-0/checkpoints/    the states after the last two finished epochs
seed-0/result.json     only when the seed is finished
"""

import json
import math
import os
import re
import shutil
import socket
import weakref
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map_only

from inloop.atomic_files import write_atomically
from inloop.checkpoints import Checkpoints
from inloop.errors import CheckpointError, InloopError

try:
    import fcntl
except ImportError:  # Windows: without locks
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"


class RunFolderError(InloopError):
    """A folder that cannot be used for this run."""


class RunFolder:
    """The folder of one run. Files are replaced atomically: a full disk or a kill leaves the old one."""

    def __init__(
        self,
        path: Path,
        experiment: str,
        settings: dict[str, Any],
        restart: bool = False,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.defaults = defaults or {}  # values of settings that an older folder does not name
        described = {"experiment": experiment, **settings}
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file. Fix: name a folder with --out.")
        files = {entry.name for entry in path.iterdir()} if path.exists() else set()
        begun = any(name != _LOCK and not name.endswith(".new") for name in files)
        if begun:
            self._refuse_foreign(described, same_settings=not restart)
        path.mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, _locked(path).close)
        if begun and restart:
            self._remove_own_files()
        if restart or not begun:
            write_atomically(path / "settings.json", lambda file: file.write(_json(described)))

    def _remove_own_files(self) -> None:
        """Remove only the files of a run: the folder may hold others."""
        for seed in self.path.glob("seed-*"):
            if re.fullmatch(r"seed-\d+", seed.name):
                for name in ("epochs.jsonl", "result.json"):
                    (seed / name).unlink(missing_ok=True)
                shutil.rmtree(seed / "checkpoints", ignore_errors=True)

    def _refuse_foreign(self, described: dict[str, Any], same_settings: bool) -> None:
        try:
            found = self.defaults | dict(json.loads((self.path / "settings.json").read_text()))
        except (OSError, ValueError, TypeError):
            raise RunFolderError(
                f"{self.path} is not empty and is no folder of a run (no readable settings.json). Fix: name another with --out."
            ) from None
        if found.get("experiment") != described["experiment"]:
            raise RunFolderError(
                f"{self.path} holds a run of {found.get('experiment')!r}, not of {described['experiment']!r}. Fix: name another with --out."
            )
        different = {name for name in described | found if described.get(name) != found.get(name)}
        if same_settings and different:
            what = ", ".join(f"{n}: {found.get(n)!r} there, {described.get(n)!r} now" for n in sorted(different))
            raise RunFolderError(
                f"{self.path} belongs to another run ({what}). Fix: name another folder with --out, or --restart to begin anew."
            )

    def keep_samples(self, images: Tensor) -> None:
        """Keep a few images, which the report shows under the policy."""
        write_atomically(self.path / "samples.npz", lambda file: np.savez_compressed(file, images=images.numpy()))

    def seed(self, seed: int) -> "SeedFolder":
        return SeedFolder(self.path / f"seed-{seed}")


class SeedFolder:
    """The files of one seed of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        path.mkdir(exist_ok=True)

    def result(self) -> dict[str, Any] | None:
        result: dict[str, Any] | None = _read_json(self.path / "result.json")
        return result

    def finish(self, result: dict[str, Any]) -> None:
        write_atomically(self.path / "result.json", lambda file: file.write(_json(result)))
        shutil.rmtree(self.checkpoints.folder, ignore_errors=True)

    def save(self, state: dict[str, Any], epochs: list[dict[str, Any]]) -> None:
        """Keep the state after an epoch, and a line for each epoch so far."""
        write_atomically(
            self.path / "epochs.jsonl",
            lambda file: file.write(b"".join(_json(as_json_numbers(epoch), None) for epoch in epochs)),
        )
        self.checkpoints.save(len(epochs), {"state": state, "epochs": epochs})

    def load(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The last saved state and epochs; None if there is none."""
        try:
            found = self.checkpoints.load()
        except CheckpointError as error:
            raise RunFolderError(
                f"{error} Fix: remove the damaged file to continue from the one before it, if there is one."
            ) from None
        return None if found is None else (found[1]["state"], found[1]["epochs"])


def _locked(path: Path) -> TextIO:
    """Return the open lock of a folder, which is free again when the file is closed or the process ends, however it ends.

    Raises:
        RunFolderError: If another process holds it.
    """
    file = (path / _LOCK).open("a+")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip()
        if holder != _own_name():
            file.close()
            raise RunFolderError(
                f"{path} is in use by another run{f' ({holder})' if holder else ''}. Fix: wait for it to end, or name another folder with --out."
            ) from None
        return file
    file.truncate(0)
    file.write(_own_name())
    file.flush()
    return file


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def as_json_numbers(value: Any) -> Any:
    """Floats rounded; None for nan and infinity, which JSON lacks."""
    return tree_map_only(float, lambda number: round(number, 6) if math.isfinite(number) else None, value)


def _json(value: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise RunFolderError(f"{path} is damaged. Fix: remove it to run this seed again.") from None
