"""The section "processes" of the check on GPUs, over gloo on the CPU in place of NCCL."""

import pytest
import torch
from benchmarks.gpu import processes
from benchmarks.gpu.findings import attempt
from benchmarks.gpu.problems import PROBLEMS


@pytest.mark.parametrize("wrapper", processes.WRAPPERS)
def test_two_processes_have_the_rewards_of_one(wrapper):
    finding = processes.look("cpu", "gloo", wrapper, ("mlp", "gpt"))
    assert finding.verdict == "ok", finding
    assert 0 <= finding.numbers["error of gpt"] < 1e-12
    assert "2 processes over gloo" in finding.found


def test_processes_with_another_reward_are_wrong(monkeypatch):
    def write_rewards(function, folder, *arguments):
        rewards = processes.train(processes.Training(PROBLEMS["mlp"], "cpu"), slice(None))
        rewards[-1, -1] *= 1.001
        for rank, part in enumerate(rewards.chunk(2, dim=1)):
            torch.save(part, processes.file_of(folder, "mlp", rank))

    monkeypatch.setattr(processes, "run_in_processes", write_rewards)
    assert processes.look("cpu", "gloo", "DistributedDataParallel", ("mlp",)).verdict == "WRONG"


def test_an_error_in_a_process_names_the_model():
    arguments = ("cpu", "gloo", "DistributedDataParallel", ("no such model",))
    finding = attempt("processes", "a case", processes.look, *arguments)
    assert finding.verdict == "WRONG"
    assert finding.found == "ProcessRaisedException: RuntimeError: no such model: KeyError: 'no such model'"


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs")
def test_with_fewer_than_two_gpus_it_is_skipped():
    (finding,) = processes.check("cuda")
    assert finding.verdict == "skipped"
    assert finding.found.startswith("it needs 2 GPUs, and torch sees ")
