"""The device's library is built once for all; where it cannot be, the reason is a sentence."""

import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.device.pretend_cuda.building import CannotBuildError, built_library

COMPILER = """#!/bin/sh
echo called >> "$(dirname "$0")/calls"
while [ "$1" != -o ]; do shift; done
printf half > "$2"; sleep 0.2; printf whole > "$2"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that takes its time, and a cache that is empty."""
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", f"{path} -some-option")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_two_builds_at_once_leave_one_whole_library(compiler):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: built_library(), range(2))
    assert first == second
    assert first.read_text() == "whole"
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    calls = (compiler.parent / "calls").read_text()
    assert built_library() == first
    assert (compiler.parent / "calls").read_text() == calls  # it is not built again


def test_errors_of_the_compiler_are_told(compiler):
    compiler.write_text("#!/bin/sh\necho 'device.h:3: error: no such thing' >&2; exit 1")
    with pytest.raises(CannotBuildError, match=r"cannot compile it: device\.h:3: error: no such thing"):
        built_library()


def test_without_a_compiler_there_is_no_device(compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotBuildError, match="there is no C\\+\\+ compiler: no-such-compiler is not found"):
        built_library()


def test_another_torch_has_no_device(compiler, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.6.0")
    with pytest.raises(
        CannotBuildError, match=r"it needs a build of torch 2\.13\.\* for the CPU; this is torch 2\.6\.0"
    ):
        built_library()


def test_a_cache_that_cannot_be_written_is_told(compiler, monkeypatch):
    Path(compiler.parent / "cache").write_text("a file, not a folder")
    with pytest.raises(CannotBuildError, match="it cannot be kept"):
        built_library()
