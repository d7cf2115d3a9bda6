"""``inloop bench`` on the device: what is measured is there, and a device that is not there is refused."""

import json

import pytest
import torch

from inloop.cli import main
from inloop_lab.bench.devices import peak_bytes
from inloop_lab.bench.modes import MODES
from inloop_lab.bench.tasks import make_task

COMMAND = ["bench", "--models", "mlp", "--modes", "gar,metagradient", "--batch", "4", "--repeats", "2", "--json"]


@pytest.mark.usefixtures("processes_have_the_device")
def test_the_command_measures_on_the_device(capsys, tmp_path):
    out = tmp_path / "bench.json"
    assert main([*COMMAND, "--device", "cuda", "--out", str(out)]) == 0
    results = json.loads(capsys.readouterr().out)
    assert not results["skipped"]
    for row in results["results"]:
        assert row["device"] == "cuda"
        assert row["time_ratio"] > 0
        assert 1 < row["memory_ratio"] < 4
    assert main([*COMMAND, "--device", "cuda", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["results"] == results["results"]  # they are not measured again


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "jvp"])  # the pretend device has no forward mode
def test_every_mode_trains_on_the_device(mode):
    task = make_task("mlp", 4, "cuda")
    assert task.x.is_cuda
    assert task.y.is_cuda
    step = MODES[mode](task)
    first = task.losses(task.model(task.x)).mean().item()
    for _ in range(10):
        step()
    assert task.losses(task.model(task.x)).mean().item() < first


def test_a_task_is_the_same_on_every_device():
    here, there = make_task("mlp", 4), make_task("mlp", 4, "cuda")
    assert torch.equal(here.x, there.x.cpu())
    torch.testing.assert_close(here.model(here.x), there.model(there.x).cpu())


def test_peak_memory_is_that_of_the_device():
    """400,000 bytes that stay, exchanged in every step, and for a moment twice as much again."""

    def make_step():
        kept = [torch.zeros(100_000, device="cuda")]

        def step():
            a = torch.zeros(100_000, device="cuda")
            b = a + 1
            del a
            kept[0] = b

        return step

    before = torch.cuda.memory_allocated()
    assert peak_bytes(make_step, 1, 2, "cuda") == before + 1_200_000


def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert main([*COMMAND, "--device", "cuda:3"]) == 2
    assert "--device cuda:3: torch sees 1 GPU. Fix: use cuda:0." in capsys.readouterr().err
