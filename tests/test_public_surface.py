"""Public names are few, documented, and do not change by accident; importing them is quick."""

import inspect
import subprocess
import sys

import inloop
import inloop.augment
from tests.public_surface import SNAPSHOT, documented, surface


def test_the_public_surface_is_the_one_on_record():
    assert surface() == SNAPSHOT.read_text(), "if it is meant to change: python -m tests.public_surface"


def test_every_name_of_the_package_is_documented():
    names = {f"inloop.{name}" for name, value in vars(inloop).items() if _is_own(name, value)}
    names |= {f"inloop.augment.{name}" for name in inloop.augment.__all__ if name != "SPACES"}
    assert not names - ({name for name, *_ in documented()} | {"inloop.InloopError"})
    assert len([name for name in names if name.count(".") == 1]) < 20


def _is_own(name, value):
    return not name.startswith("_") and not inspect.ismodule(value)


IMPORT = """
import sys, time
import torch
start = time.perf_counter()
import inloop
took = time.perf_counter() - start
heavy = {"matplotlib", "rich", "PIL", "transformers", "lightning", "accelerate", "scipy", "pandas"}
print(took, *sorted(heavy & set(sys.modules)))
"""


def test_importing_takes_little_beyond_torch_and_needs_no_extras():
    """The fastest of three, as other tests run beside this one."""
    outputs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert all(len(output) == 1 for output in outputs), outputs
    assert min(float(output[0]) for output in outputs) < 1.5
