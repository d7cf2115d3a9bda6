"""The benchmark measures what it says: tasks, modes, memory, the command."""

import json

import pytest
import torch

from inloop.cli import main
from inloop.errors import UsageError
from inloop_lab.bench.memory import peak_bytes
from inloop_lab.bench.modes import MODES
from inloop_lab.bench.overhead import find_regressions as find_more_overhead
from inloop_lab.bench.peers import PEERS
from inloop_lab.bench.regression import find_regressions
from inloop_lab.bench.tasks import MODELS, make_task
from inloop_lab.bench.worker import ALL_MODES, make_step


@pytest.mark.parametrize("model", [model for model in MODELS if "28" not in model])
def test_tasks_have_a_loss_for_each_example(model):
    task = make_task(model, 2)
    losses = task.losses(task.model(task.x))
    assert losses.shape == (2,)
    assert losses.isfinite().all()


@pytest.mark.parametrize("model", ["mlp", "vit-tiny", "gpt-6", "wrn-16-4-gn"])
def test_every_layer_of_the_models_has_a_rule(model):
    """None goes through the fallback, so what is measured is the engine."""
    from inloop.alignment.plan import make_plan

    assert all(site.rule is not None for site in make_plan(make_task(model, 2).model).sites)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, in its forward mode
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains(mode):
    task = make_task("mlp", 4)
    first = task.losses(task.model(task.x)).mean().item()
    step = MODES[mode](task)
    for _ in range(30):
        step()
    assert task.losses(task.model(task.x)).mean().item() < first


def test_a_library_that_is_missing_is_named():
    for mode, (package, _) in PEERS.items():
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(ModuleNotFoundError, match=f"{package} is not installed"):
                make_step("mlp", mode, 4)


def test_peak_memory_counts_what_is_alive_at_once():
    """400,000 bytes that stay, exchanged in every step, and for a moment twice as much again."""

    def make_step():
        kept = [torch.zeros(100_000)]

        def step():
            a = torch.zeros(100_000)
            b = a + 1
            del a
            kept[0] = b
            torch.zeros(100_000)

        return step

    assert 1_200_000 <= peak_bytes(make_step) < 1_210_000


def test_the_command_prints_one_json_object(capsys):
    code = main(
        ["bench", "--models", "mlp", "--modes", "gar,opacus", "--batch", "8", "--repeats", "2", "--json", "--overhead"]
    )
    captured = capsys.readouterr()
    assert code == 0
    result = json.loads(captured.out)
    row = result["results"][0]
    assert {"model", "mode", "batch", "time_ratio", "memory_ratio", "seconds", "peak_bytes"} <= set(row)
    assert (row["model"], row["mode"], row["batch"]) == ("mlp", "gar", 8)
    assert row["memory_ratio"] > 1
    assert len(result["results"]) + len(result["skipped"]) == 2
    overhead = result["overhead"]
    assert {"host_us_per_call", "host_us_per_step"} <= overhead.keys()
    for row in overhead["models"]:
        assert row["kernels_plain"] < row["kernels"] < 3 * row["kernels_plain"]
        assert "host_syncs" in row


def test_more_kernels_and_waits_than_before_are_named():
    before = {"models": [{"model": "mlp", "told": False, "device": "cuda", "kernels": 37, "host_syncs": 1}]}
    before |= {"host_us_per_call": 40.0, "host_us_per_step": 400.0}
    now = json.loads(json.dumps(before))
    assert find_more_overhead(now, before) == []
    now["models"][0] |= {"kernels": 38, "host_syncs": 2}
    now["host_us_per_call"] = 70.0
    assert find_more_overhead(now, before) == [
        "mlp: kernels 38, was 37",
        "mlp: host_syncs 2, was 1",
        "host_us_per_call: 70, was 40",
    ]
    now["models"][0]["device"] = "cpu"  # another device: nothing to compare with
    assert find_more_overhead(now, before) == ["host_us_per_call: 70, was 40"]


def test_a_step_under_autocast_is_measured(capsys):
    assert main(["bench", "--models", "gpt-1@8+bf16", "--modes", "gar,vmap", "--batch", "2", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert "gpt-1@8+bf16" in out
    assert "vmap is not measured under autocast" in out


@pytest.mark.parametrize(
    "arguments", [("--models", "huge"), ("--modes", "magic"), ("--repeats", "0"), ("--batch", "1")]
)
def test_wrong_usage(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err


def test_the_figure_has_every_measured_mode(tmp_path):
    from inloop_lab.bench.show import write_bench_figure

    rows = [
        {"model": "mlp", "mode": mode, "batch": 8, "time_ratio": 1.5, "memory_ratio": 1.2} for mode in ALL_MODES
    ] + [{"model": "mlp", "mode": "x", "batch": 8, "error": "no"}]
    write_bench_figure(rows, tmp_path / "bench.svg")
    text = (tmp_path / "bench.svg").read_text()
    assert all(mode in text for mode in ALL_MODES)


ROW = {
    "model": "mlp",
    "mode": "gar",
    "batch": 4,
    "time_ratio": 1.3,
    "time_ratio_quartiles": [1.25, 1.35],
    "memory_ratio": 1.2,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"time_ratio": 1.4, "time_ratio_quartiles": [1.38, 1.5]}, []),  # within the noise of both
        ({"time_ratio": 1.5, "time_ratio_quartiles": [1.45, 1.55]}, ["mlp gar, batch 4: 1.50 x time, was 1.30"]),
        ({"memory_ratio": 1.3}, ["mlp gar, batch 4: 1.300 x memory, was 1.200"]),
        ({"memory_ratio": 1.1, "time_ratio_quartiles": [1.0, 1.1]}, []),
        ({"error": "OSError: gone"}, ["mlp gar, batch 4: does not work any more: OSError: gone"]),
        ({"batch": 8, "memory_ratio": 9.0}, []),  # was not measured before
    ],
)
def test_a_regression_is_worse_than_noise(changes, expected):
    assert find_regressions([ROW | changes], [ROW]) == expected


def test_bench_keeps_results_and_compares_them(tmp_path, capsys):
    out = tmp_path / "deep" / "bench.json"
    command = ["bench", "--models", "mlp", "--batch", "4", "--repeats", "1", "--out", str(out), "--json"]
    assert main([*command, "--modes", "gar"]) == 0
    first = json.loads(capsys.readouterr().out)["results"]
    assert main([*command, "--modes", "gar,gar-half"]) == 0
    both = json.loads(capsys.readouterr().out)["results"]
    assert both[0] == first[0] == json.loads(out.read_text())["results"][0]
    assert [row["mode"] for row in both] == ["gar", "gar-half"]
    better = json.loads(out.read_text())
    better["results"][0]["memory_ratio"] /= 2
    other = tmp_path / "better.json"
    other.write_text(json.dumps(better))
    assert main([*command, "--modes", "gar", "--against", str(other)]) == 1
    assert "worse: mlp gar" in capsys.readouterr().err


def test_results_that_are_none(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert main(["bench", "--models", "mlp", "--modes", "gar", "--against", str(path)]) == 2
    assert "no results of `inloop bench --json`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch 0: allowed are whole numbers from 2"),
        (["--repeats", "0"], "--repeats 0: allowed are whole numbers from 1"),
        (["--models", "vgg"], "'vgg': allowed are wrn-16-4"),
        (["--device", "tpu"], "--device tpu: allowed are cpu, cuda, and cuda:N for the GPU with the number N."),
    ],
)
def test_bad_options_are_named(options, message, capsys):
    assert main(["bench", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(capsys):
    assert main(["bench", "--device", "cuda"]) == 2
    assert "sees no GPU. Fix: use --device cpu, or install" in capsys.readouterr().err


def test_results_of_another_device_are_not_compared():
    slower = ROW | {"device": "cuda", "memory_ratio": 9.0}
    assert find_regressions([slower], [ROW]) == []
    assert len(find_regressions([slower], [ROW | {"device": "cuda"}])) == 1


def test_other_sizes_of_the_families():
    assert make_task("gpt-2@64", 2).x.shape == (2, 64)
    assert len(make_task("wrn-10-1").x) == 32
    with pytest.raises(UsageError, match="allowed are wrn-16-4"):
        make_task("gpt-x")


@pytest.mark.usefixtures("nothing_is_small")
def test_a_step_needs_little_more_memory_and_a_part_of_it_less():
    """What the first step tried out must be gone, without waiting for Python's collector of cycles."""
    task = lambda: make_task("wrn-10-1", 8)  # noqa: E731
    plain, whole, part = (
        peak_bytes(lambda mode=mode: mode(task())) for mode in map(MODES.get, ("plain", "gar", "gar-part"))
    )
    assert whole < 1.5 * plain
    assert part < plain + 0.6 * (whole - plain)
