"""Builds the device's library from its source, once for each version of the source and of torch, into a directory of the user."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
TORCH = "2.13."  # the source uses what torch may change in any version
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-s", "-w"]


class CannotBuildError(Exception):
    """There is no device here; the message says why."""


def torch_directory() -> Path:
    """Where torch is, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def built_library() -> Path:
    """Return the path of the library; build it if this has not been done yet.

    Raises:
        CannotBuildError: Without a compiler, on another system than Linux, or with another torch than the source is written for.
    """
    version = importlib.metadata.version("torch")
    if not sys.platform.startswith("linux"):
        raise CannotBuildError(f"it needs Linux, and this is {sys.platform}")
    if not version.startswith(TORCH) or (torch_directory() / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuildError(f"it needs a build of torch {TORCH}* for the CPU; this is torch {version}")
    sources = sorted(SOURCE.iterdir())
    digest = hashlib.sha256(repr((version, FLAGS)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    library = _cache() / f"pretend-cuda-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        try:
            _compile([str(source) for source in sources if source.suffix == ".cpp"], library)
        except OSError as error:
            raise CannotBuildError(f"it cannot be kept: {error}") from error
    return library


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inloop-tests"


def _compile(sources: list[str], library: Path) -> None:
    """Compile to a file of this process, then rename it: another process sees the whole library or none."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise CannotBuildError(f"there is no C++ compiler: {compiler[0]} is not found (CXX= names another)")
    include = torch_directory() / "include"
    includes = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory) / library.name
        command = [*compiler, *FLAGS, *includes, *sources, "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            raise CannotBuildError(f"{compiler[0]} cannot compile it: {errors[0] if errors else 'it says nothing'}")
        made.replace(library)
