"""Files that are replaced whole, or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from inloop.errors import FileWriteError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a new file beside the old one, bring it to disk, then replace the old one.

    Raises:
        FileWriteError: If the write fails; the old file is unchanged.
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
        raise FileWriteError(f"{path} could not be written ({reason}); the old file is unchanged.") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
