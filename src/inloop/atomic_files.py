"""Files that are replaced at once, or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from inloop.errors import FileWriteError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the old file, make sure it is on disk, then take its place.

    Raises:
        FileWriteError: If that is not possible; what was there before is unchanged.
    """
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
        raise FileWriteError(f"{path} could not be written ({reason}); what was there before is unchanged.") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
