"""A folder that a run writes to as it goes, such that it can be killed at any moment and continued.

settings.json          what the run is; another run is refused
samples.npz            a few training images, for augmentation runs
seed-0/epochs.jsonl    a line for each finished epoch
seed-0/checkpoint.pt   everything that continuing needs, as of the last finished epoch
seed-0/result.json     only when the seed is finished
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from inloop.errors import InloopError


class RunFolderError(InloopError):
    """A folder that cannot be used for this run."""


class RunFolder:
    """The folder of one run. Files are replaced atomically: a full disk or a kill leaves the old one."""

    def __init__(
        self,
        path: Path,
        kind: str,
        settings: dict[str, Any],
        restart: bool = False,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.defaults = defaults or {}  # of settings that a folder from before they existed does not name
        described = {"experiment": kind, **settings}
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file. Fix: name a folder with --out.")
        begun = path.exists() and any(not entry.name.endswith(".new") for entry in path.iterdir())
        if begun:
            self._refuse_foreign(described, same_settings=not restart)
        if begun and restart:
            self._remove_own_files()
        if restart or not begun:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "settings.json", lambda file: file.write(_json(described)))

    def _remove_own_files(self) -> None:
        """Only what a run writes: there may be other things in the folder."""
        for seed in self.path.glob("seed-*"):
            if re.fullmatch(r"seed-\d+", seed.name):
                for name in ("epochs.jsonl", "checkpoint.pt", "result.json"):
                    (seed / name).unlink(missing_ok=True)

    def _refuse_foreign(self, described: dict[str, Any], same_settings: bool) -> None:
        try:
            found = self.defaults | dict(json.loads((self.path / "settings.json").read_text()))
        except (OSError, ValueError, TypeError):
            raise RunFolderError(
                f"{self.path} is not empty and is no folder of a run (no readable settings.json). Fix: name another with --out."
            ) from None
        different = {name for name in described | found if described.get(name) != found.get(name)}
        if found.get("experiment") != described["experiment"] or (same_settings and different):
            what = ", ".join(f"{n}: {found.get(n)!r} there, {described.get(n)!r} now" for n in sorted(different))
            raise RunFolderError(
                f"{self.path} belongs to another run ({what}). Fix: name another folder with --out, or --restart to begin anew."
            )

    def keep_samples(self, images: Tensor) -> None:
        """A few images, to show in the report what was done to them."""
        write_atomically(self.path / "samples.npz", lambda file: np.savez_compressed(file, images=images.numpy()))

    def seed(self, seed: int) -> "SeedFolder":
        return SeedFolder(self.path / f"seed-{seed}")


class SeedFolder:
    """What one seed of a run has written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)

    def result(self) -> dict[str, Any] | None:
        result: dict[str, Any] | None = _read_json(self.path / "result.json")
        return result

    def finish(self, result: dict[str, Any]) -> None:
        write_atomically(self.path / "result.json", lambda file: file.write(_json(result)))
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def save(self, state: dict[str, Any], epochs: list[dict[str, Any]]) -> None:
        """Keep the state after an epoch, and a line for each epoch so far."""
        write_atomically(self.path / "epochs.jsonl", lambda file: file.write(b"".join(_json(e, None) for e in epochs)))
        write_atomically(self.path / "checkpoint.pt", lambda file: torch.save({"state": state, "epochs": epochs}, file))

    def load(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The last saved state and epochs; None if there is none."""
        try:
            saved = torch.load(self.path / "checkpoint.pt", weights_only=True)
            return saved["state"], saved["epochs"]
        except FileNotFoundError:
            return None
        except Exception as error:
            raise RunFolderError(
                f"{self.path / 'checkpoint.pt'} cannot be read ({type(error).__name__}). Fix: remove it to run this seed again."
            ) from None


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the old file, make sure it is on disk, then take its place."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        reason = str(error).splitlines()[0]
        raise RunFolderError(f"{path} could not be written ({reason}); the one before it is still there.") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _json(value: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(value, indent=indent) + "\n").encode()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise RunFolderError(f"{path} is damaged. Fix: remove it to run this seed again.") from None
