"""Every trainer's example, against the real package, learns to avoid the poisoned source."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["with_lightning", "with_transformers", "with_accelerate"])
def test_the_bad_source_is_left(name):
    example = load(name)
    shares = example.main()
    assert int(shares.argmin()) == example.BAD
    assert shares[example.BAD] < 0.5 / len(shares)


def test_accelerate_continues_from_its_checkpoint(tmp_path):
    example = load("with_accelerate")
    whole = example.main(40, str(tmp_path))
    again = example.main(40, str(tmp_path), resume=True)
    assert torch.equal(whole, again)


def torchrun(folder, *options, processes=2, restarts=0):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"),
        *(f"--max-restarts={restarts}", str(ROOT / "examples" / "with_torchrun.py"), "--out", str(folder), *options),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def shares_in(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(share) for share in re.findall(r"0\.\d+", done.stdout.split("shares of the sources:")[1])]


def test_torchrun_goes_on_after_a_process_has_died(tmp_path):
    """Whether the other process says that it lost this one is up to torchrun, which may end it first; tests/distributed has that."""
    whole = shares_in(torchrun(tmp_path / "whole", "--steps", "60"))
    done = torchrun(tmp_path / "died", "--steps", "60", "--die-at", "50", restarts=1)
    assert "continuing from step 40 with 2 processes" in done.stdout
    assert shares_in(done) == whole
    assert whole[1] == min(whole)


def test_torchrun_goes_on_with_another_number_of_processes_and_sharded(tmp_path):
    dead = torchrun(tmp_path / "run", "--steps", "60", "--die-at", "50")
    assert dead.returncode != 0
    done = torchrun(tmp_path / "run", "--steps", "60", "--shard", processes=4)
    assert "continuing from step 40 with 4 processes" in done.stdout
    whole = shares_in(torchrun(tmp_path / "whole", "--steps", "60"))
    assert shares_in(done) == pytest.approx(whole, abs=2e-3)
