"""The check that users run on their GPU, run on the pretend one: all sections but that of several processes, for which there is none."""

import getpass
import json
import socket

import pytest
import torch
from benchmarks.gpu import cost, exactness
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.findings import without_private_names
from benchmarks.gpu.precisions import PRECISIONS
from benchmarks.gpu.problems import PROBLEMS
from benchmarks.gpu.streams import STREAMS

from inloop.errors import VerificationError
from inloop.rewards import GradientAlignment


@pytest.fixture
def check(tmp_path, capsys):
    """Run the check; returns its exit code, the report, and what it printed."""

    def run(*arguments):
        out = tmp_path / "report.json"
        code = main([*arguments, "--out", str(out)])
        return code, json.loads(out.read_text()), capsys.readouterr().out

    return run


@pytest.fixture
def one_case(monkeypatch):
    """Look at one model in one precision only."""
    for of_all, name in ((PROBLEMS, "mlp"), (PRECISIONS, "float32")):
        for other in set(of_all) - {name}:
            monkeypatch.delitem(of_all, other)


def give_the_first_example_more(monkeypatch):
    """A learner whose first example is rewarded a tenth of the largest reward too much."""
    right = GradientAlignment.__call__

    def wrong(reward, step, judge):
        rewards_N = right(reward, step, judge).clone()
        rewards_N[0] += 0.1 * rewards_N.abs().max()
        return rewards_N

    monkeypatch.setattr(GradientAlignment, "__call__", wrong)


def test_rewards_are_right_in_every_precision(check):
    code, report, printed = check("--only", "rewards")
    assert code == 0
    assert report["ok"]
    assert "Nothing is wrong." in printed
    errors = {row["case"]: row["numbers"]["error"] for row in report["findings"]}
    assert set(errors) == {f"{problem}, {precision}" for problem in PROBLEMS for precision in PRECISIONS}
    for problem in PROBLEMS:
        assert errors[f"{problem}, float64"] < 1e-12
        assert errors[f"{problem}, float32"] < 1e-5
        assert errors[f"{problem}, float32"] < errors[f"{problem}, TF32"] < 4e-2  # it is allowed, and rounds
        assert errors[f"{problem}, float32"] < errors[f"{problem}, bfloat16"] < 1e-1
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.usefixtures("one_case")
def test_a_wrong_reward_is_seen(check, monkeypatch):
    give_the_first_example_more(monkeypatch)
    code, report, printed = check("--only", "rewards")
    assert code == 1
    assert not report["ok"]
    (row,) = report["findings"]
    assert row["verdict"] == "WRONG"
    assert row["numbers"]["error"] == pytest.approx(0.1, abs=0.05)
    assert "WRONG" in printed
    assert "1 of 1 WRONG." in printed


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_precision_hides_rewards_of_other_examples(precision, monkeypatch):
    right = GradientAlignment.__call__
    monkeypatch.setattr(GradientAlignment, "__call__", lambda reward, step, judge: right(reward, step, judge).roll(1))
    for problem in PROBLEMS.values():
        error, own = exactness.errors(problem, "cuda", PRECISIONS[precision], "as they are")
        assert error > exactness.NEVER_RIGHT
        assert exactness.allowed(PRECISIONS[precision], own) <= exactness.NEVER_RIGHT


@pytest.mark.usefixtures("one_case")
def test_steps_that_are_refused_are_wrong(check, monkeypatch):
    def refuse(*args, **kwargs):
        raise VerificationError("Parameter '0.weight': its gradient has another norm.")

    monkeypatch.setattr(exactness, "errors", lambda *args: (0.0, 0.0))
    monkeypatch.setattr("inloop.alignment.tape.verify_calls", refuse)
    code, report, _ = check("--only", "rewards")
    assert code == 1
    assert "step 1 is refused: VerificationError: Parameter '0.weight'" in report["findings"][0]["found"]


def test_streams_have_the_rewards_of_the_default_stream(check):
    code, report, _ = check("--only", "streams")
    assert code == 0
    assert [row["case"] for row in report["findings"]] == list(STREAMS)
    assert all(set(row["numbers"]) == {f"error of {problem}" for problem in PROBLEMS} for row in report["findings"])


@pytest.mark.usefixtures("one_case")
def test_rewards_that_differ_on_a_stream_are_seen(check, monkeypatch):
    right = GradientAlignment.__call__

    def wrong(reward, step, judge):
        return right(reward, step, judge) * (1 + 1e-6 * (torch.cuda.current_stream().stream_id > 0))

    monkeypatch.setattr(GradientAlignment, "__call__", wrong)
    code, report, _ = check("--only", "streams")
    assert code == 1
    assert {row["case"]: row["verdict"] for row in report["findings"]} == {
        "one side stream": "WRONG",
        "forward on a side stream": "ok",  # the learner is on the default stream
        "backward on a side stream": "WRONG",
        "steps take turns": "WRONG",
    }


@pytest.mark.usefixtures("processes_have_the_device")
def test_the_cost_is_measured(check, monkeypatch):
    monkeypatch.setattr(cost, "SMALL_MODELS", {"gpt-1@16": 4})
    code, report, printed = check("--only", "cost", "--quick")
    assert code == 0
    (row,) = report["findings"]
    assert row["numbers"]["time_ratio"] > 0
    assert 1 < row["numbers"]["memory_ratio"] < 3
    assert 1 < row["numbers"]["kernel_ratio"] < 3
    assert row["numbers"]["more_synchronisations"] == 1
    assert "+1 host syncs" in printed


def test_a_host_that_waits_too_often_is_seen(check, monkeypatch):
    numbers = dict.fromkeys(("time_ratio", "memory_ratio", "seconds", "peak_bytes"), 1.0)
    monkeypatch.setattr(cost, "SMALL_MODELS", {"mlp": 4})
    monkeypatch.setattr(cost, "measure_model", lambda *args: [numbers])
    finish = cost.Loop.gradients

    def gradients(loop):
        finish(loop)
        if loop.learner is not None:
            next(loop.model.parameters()).sum().item()

    monkeypatch.setattr(cost.Loop, "gradients", gradients)
    code, report, _ = check("--only", "cost", "--quick")
    assert code == 1
    assert report["findings"][0]["verdict"] == "WRONG"
    assert report["findings"][0]["numbers"]["more_synchronisations"] == 2


def test_what_cannot_be_measured_is_wrong(check, monkeypatch):
    """The processes that measure have no device here."""
    monkeypatch.setattr(cost, "SMALL_MODELS", {"mlp": 4})
    code, report, _ = check("--only", "cost", "--quick")
    assert code == 1
    assert report["findings"][0]["found"].startswith("RuntimeError: ")


def test_one_gpu_has_no_processes(check):
    code, report, printed = check("--only", "processes")
    assert code == 0
    assert report["findings"][0]["verdict"] == "skipped"
    assert "it needs 2 GPUs, and torch sees 1" in printed


def test_the_report_has_versions_and_results_and_nothing_else(check, tmp_path):
    _, report, _ = check("--only", "processes")
    assert set(report) == {"versions", "gpus", "ok", "findings"}
    assert report["gpus"] == ["pretend CUDA device"]
    assert set(report["versions"]) == {"inloop", "torch", "cuda", "cudnn", "python", "system"}
    text = without_private_names(f"no file {tmp_path / 'x.py'}, at {socket.gethostname()}, says {getpass.getuser()}")
    assert text == "no file <path>, at <host>, says <user>"
    assert without_private_names("1.5 and/or 2 x N/W") == "1.5 and/or 2 x N/W"


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "report.json"
    assert main(["--out", str(out)]) == 2
    assert "sees no GPU, so there is nothing to test. Fix: " in capsys.readouterr().err
    assert not out.exists()


def test_an_error_in_a_case_does_not_end_the_check(check, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("cuDNN error")

    monkeypatch.setattr(exactness, "errors", fail)
    code, report, _ = check("--only", "rewards")
    assert code == 1
    assert {row["found"] for row in report["findings"]} == {"RuntimeError: cuDNN error"}
    assert len(report["findings"]) == len(PROBLEMS) * len(PRECISIONS)
