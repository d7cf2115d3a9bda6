"""The split experiment: its numbers, its command, and a run that is killed and continued."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from inloop import cli
from inloop.atomic_files import write_atomically
from inloop.errors import FileWriteError, UsageError
from inloop_lab.data.digits import load_digits
from inloop_lab.networks.small import NETWORKS, make_network
from inloop_lab.runs.folder import RunFolder, RunFolderError
from inloop_lab.runs.seed import train_to_end
from inloop_lab.runs.summary import mean_and_interval, show_interval
from inloop_lab.splits.experiment import SplitExperiment, areas, hold_out
from inloop_lab.splits.settings import SplitSettings, with_defaults

QUICK = {"epochs": 4, "batch": 250}


@pytest.fixture(scope="module")
def data():
    return load_digits()


def quick(**options):
    return with_defaults("digits", **(QUICK | options))


def run_seed(settings, data, seed, *folder_and_display):
    return train_to_end(lambda: SplitExperiment(settings, data, seed), *folder_and_display)


# ------------------------------------------------------------------ numbers


def test_areas_are_those_of_table_1():
    uniform = [[0.1] * 10] * 10
    assert areas(uniform) == pytest.approx([0.9] * 10)
    never = [[0.0, *[1 / 9] * 9]] * 10
    assert areas(never) == pytest.approx([0.0, *[1.0] * 9])
    falling = [[0.1 - 0.01 * e, *[(0.9 + 0.01 * e) / 9] * 9] for e in range(10)]
    assert areas(falling)[0] == pytest.approx(9 * 0.055)
    assert areas([[0.3, 0.7]]) == pytest.approx([0.3, 0.7])


def test_intervals():
    mean, half = mean_and_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3
    assert half == pytest.approx(2.776 * (2.5 / 5) ** 0.5)
    assert show_interval(mean, half) == "3.000 ± 1.963"
    assert show_interval(*mean_and_interval([2.0])) == "2.000"


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_take_images_of_any_size(network):
    for shape in ((3, 32, 32), (1, 8, 8), (3, 9, 7)):
        assert make_network(network, shape, 5)(torch.randn(2, *shape)).shape == (2, 5)
    with pytest.raises(UsageError, match="network='vgg'"):
        make_network("vgg", (3, 32, 32), 10)


@pytest.mark.parametrize("network", ["fc", "fc-bn", "cnn-bn"])
def test_the_noisy_split_is_named_and_used_less(network, data):
    result = run_seed(with_defaults("digits", network=network), data, seed=0)
    assert result["named"] == [0]
    assert result["noisy_area"] < 0.75 < 0.9 < result["other_area"]
    assert result["sources"][0]["high"] < -0.02


@pytest.mark.slow
def test_the_demos_verdict_over_twenty_seeds(data):
    """The noisy split is named in 20 of 20 seeds; without noise at most 1 of 20 names any."""
    noisy = [run_seed(with_defaults("digits"), data, seed)["named"] for seed in range(20)]
    assert all(0 in named for named in noisy)
    assert sum(named != [0] for named in noisy) <= 1
    equal = [run_seed(with_defaults("digits", noise="none"), data, seed)["named"] for seed in range(20)]
    assert sum(bool(named) for named in equal) <= 1


def test_without_noise_none_is_named(data):
    results = [run_seed(with_defaults("digits", noise="none", epochs=30), data, seed) for seed in range(3)]
    assert [result["named"] for result in results] == [[], [], []]
    assert all(result["noisy_area"] is None for result in results)


def test_a_held_out_reference_is_in_no_split_and_favours_none(data):
    (held_x, _), rest = hold_out(data, 250)
    assert len(held_x) + len(rest.train_x) == len(data.train_x)
    # Against one small fixed set, equal splits do differ a little; a noisy one differs much more.
    equal, noisy = (
        run_seed(with_defaults("digits", noise=noise, reference="heldout", epochs=25), data, 0)
        for noise in ("none", "labels")
    )
    assert max(abs(source["advantage"]) for source in equal["sources"]) < 0.3
    assert noisy["sources"][0]["advantage"] < -1
    assert noisy["named"] == [0]


def test_baselines(data):
    none, oracle, nslr = (run_seed(quick(reward=reward), data, 0) for reward in ("none", "oracle", "nslr"))
    assert none["areas"] == pytest.approx([0.9] * 10)
    assert oracle["areas"] == pytest.approx([0.0, *[1.0] * 9])
    assert oracle["effective_epochs"][0] == 0
    assert nslr["areas"] != pytest.approx([0.9] * 10, abs=1e-6)  # its policy does move
    assert none["named"] == oracle["named"] == nslr["named"] == []


@pytest.mark.parametrize(
    "options", [{"reference": "previous"}, {"reference": "heldout"}, {"layers": "linear"}, {"optimizer": "adam"}]
)
def test_options_change_the_run(options, data):
    usual = {"network": "cnn-bn"}  # fc has nothing but linear layers
    assert run_seed(quick(**usual, **options), data, 0)["sources"] != run_seed(quick(**usual), data, 0)["sources"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "vgg"}, "network='vgg': allowed are fc, fc-bn"),
        ({"sources": 1}, "sources=1: allowed are whole numbers from 2"),
        ({"reward": "oracle", "noise": "none"}, "leaves out the noisy split"),
        ({"reward": "nslr", "reference": "previous"}, "reference='previous' is for reward='gar'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        SplitSettings(**options)


# ------------------------------------------------------------------ runs that are interrupted


@pytest.mark.parametrize("reward", ["gar", "nslr", "none"])
def test_a_continued_seed_equals_the_uninterrupted_one(reward, data, tmp_path):
    settings = quick(reward=reward)
    whole = run_seed(settings, data, 3)

    class Stop(Exception):
        pass

    def stop_after_two(progress):
        if progress.epoch == 2:
            raise Stop

    folder = RunFolder(tmp_path / "run", "splits", settings.as_dict())
    with pytest.raises(Stop):
        run_seed(settings, data, 3, folder.seed(3), stop_after_two)
    assert len((tmp_path / "run" / "seed-3" / "epochs.jsonl").read_text().splitlines()) == 2
    torch.manual_seed(77)
    assert run_seed(settings, data, 3, folder.seed(3)) == whole
    assert run_seed(settings, data, 3, folder.seed(3), stop_after_two) == whole  # finished: nothing is done again
    assert sorted(p.name for p in (tmp_path / "run" / "seed-3").iterdir()) == ["epochs.jsonl", "result.json"]


def test_a_killed_command_continues(tmp_path):
    command = [sys.executable, "-m", "inloop.cli", "run", "splits", "--seeds", "2", "--epochs", "25", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(out):
        return subprocess.run(
            [*command, "--out", str(out)], capture_output=True, check=True, text=True, env=environment
        )

    whole = run(tmp_path / "whole")
    killed = subprocess.Popen(
        [*command, "--out", str(tmp_path / "killed")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    deadline = time.time() + 60
    while not (tmp_path / "killed" / "seed-0" / "checkpoints").exists() and time.time() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "seed-1" / "result.json").exists()
    again = run(tmp_path / "killed")
    assert json.loads(again.stdout) == json.loads(whole.stdout)


def test_ctrl_c_exits_with_130(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(SplitExperiment, "train_epoch", interrupt)
    assert cli.main(["run", "splits", "--out", str(tmp_path / "run")]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(tmp_path):
    """A real limit on the size of files, in a process of its own: torch.save fails half-way."""
    script = """
import resource, signal, sys, torch
from pathlib import Path
from inloop.errors import FileWriteError
from inloop_lab.runs.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), "splits", {}).seed(0)
folder.save({"x": torch.zeros(10)}, [])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    folder.save({"x": torch.zeros(100_000)}, [{}])
except FileWriteError as error:
    print(error)
print(folder.load()[0]["x"].shape, sorted(p.name for p in folder.checkpoints.folder.iterdir()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    assert "step-00000001.pt could not be written" in done.stdout
    assert "torch.Size([10]) ['step-00000000.pt']" in done.stdout


def test_restart_removes_only_what_a_run_wrote(tmp_path, data):
    settings = quick(epochs=1).as_dict()
    outer = RunFolder(tmp_path / "run", "splits", settings)
    run_seed(quick(epochs=1), data, 0, outer.seed(0))
    (tmp_path / "run" / "notes.txt").write_text("keep me")
    RunFolder(tmp_path / "run" / "inner", "splits", settings)
    RunFolder(tmp_path / "run", "splits", settings, restart=True)
    assert (tmp_path / "run" / "notes.txt").exists()
    assert (tmp_path / "run" / "inner" / "settings.json").exists()
    assert not (tmp_path / "run" / "seed-0" / "result.json").exists()
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty", "splits", settings, restart=True)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "settings.json.new").write_text("{")  # killed at its very first write
    RunFolder(tmp_path / "killed", "splits", settings)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    write_atomically(path, lambda file: file.write(b"old"))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("inloop.atomic_files.os.fsync", full)
    with pytest.raises(FileWriteError, match="could not be written .*No space left.* the old file is unchanged"):
        write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_folder_of_something_else_is_refused(tmp_path):
    settings = quick().as_dict()
    RunFolder(tmp_path / "run", "splits", settings)
    RunFolder(tmp_path / "run", "splits", settings)  # the same run
    with pytest.raises(RunFolderError, match=r"belongs to another run \(network: 'fc-bn' there, 'fc' now\)"):
        RunFolder(tmp_path / "run", "splits", settings | {"network": "fc"})
    RunFolder(tmp_path / "run", "splits", settings | {"network": "fc"}, restart=True)
    for restart in (False, True):
        with pytest.raises(
            RunFolderError, match=r"holds a run of 'splits', not of 'augment'. Fix: name another with --out\.$"
        ):
            RunFolder(tmp_path / "run", "augment", settings, restart=restart)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("keep me")
    for restart in (False, True):
        with pytest.raises(RunFolderError, match="is no folder of a run"):
            RunFolder(tmp_path / "letters", "splits", settings, restart=restart)
    assert (tmp_path / "letters" / "dear.txt").exists()


def test_damaged_files_of_a_run_are_named(tmp_path):
    folder = RunFolder(tmp_path / "run", "splits", quick().as_dict()).seed(0)
    folder.save({}, [])
    folder.checkpoints.path(1).write_bytes(b"nonsense")
    with pytest.raises(
        RunFolderError, match=r"step-00000001.pt is no checkpoint .* of step 0, is whole.* Fix: remove the damaged"
    ):
        folder.load()
    folder.checkpoints.path(1).unlink()
    assert folder.load() == ({}, [])
    (folder.path / "result.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"result.json is damaged"):
        folder.result()


# ------------------------------------------------------------------ the command


def run_cli(capsys, *arguments):
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_is_all_there_is_on_standard_output(tmp_path, capsys):
    out = str(tmp_path / "run")
    code, printed, _ = run_cli(capsys, "run", "splits", "--epochs", "3", "--seeds", "2", "--out", out, "--json")
    assert code == 0
    result = json.loads(printed)
    assert list(result) == ["network", "reward", "noisy_area", "other_area", "test_accuracy", "named", "results"]
    assert [seed["seed"] for seed in result["results"]] == [0, 1]
    assert result["noisy_area"] == pytest.approx(sum(seed["noisy_area"] for seed in result["results"]) / 2)
    code, printed, _ = run_cli(capsys, "run", "splits", "--epochs", "3", "--seeds", "2", "--out", out)
    assert code == 0
    assert "fc-bn" in printed
    assert out in printed.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--data", "/no/such/place"], 1, "neither an .npz file nor a folder"),
        (["--sources", "1"], 2, "sources=1"),
        (["--seeds", "0"], 2, "--seeds 0"),
        (["--noise", "human"], 1, "digits has no human labels"),
        (["--sources", "1600", "--batch", "20"], 1, "cannot be split into 1600 sources"),
        (
            ["--reward", "oracle", "--accumulate", "5"],
            2,
            "--accumulate does nothing with --reward oracle; it is for gar, nslr",
        ),
        (["--reward", "nslr", "--layers", "linear"], 2, "--layers does nothing with --reward nslr; it is for gar"),
    ],
)
def test_bad_input_gets_one_clear_line_and_its_exit_code(arguments, code, message, tmp_path, capsys):
    found, out, err = run_cli(capsys, "run", "splits", *arguments, "--out", str(tmp_path / "run"))
    assert found == code
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_json_has_no_nan_and_paths_no_markup(tmp_path, capsys):
    arguments = ["run", "splits", "--batch", "1500", "--epochs", "1", "--seeds", "1"]
    code, printed, _ = run_cli(capsys, *arguments, "--out", str(tmp_path / "a[/b]"), "--json")
    assert code == 0
    assert "NaN" not in printed
    assert json.loads(printed)["results"][0]["sources"][0]["advantage"] is None  # there was no paid step
    code, printed, _ = run_cli(capsys, *arguments, "--out", str(tmp_path / "a[/b]"))
    assert code == 0
    assert "a[/b]" in printed
    (tmp_path / "file").write_text("")
    assert run_cli(capsys, *arguments, "--out", str(tmp_path / "file"))[0] == 1
    assert run_cli(capsys, "report", str(tmp_path / "a[/b]"))[0] == 0


def test_other_data_under_the_same_name_is_another_run(tmp_path, capsys):
    rng = np.random.default_rng(0)
    arguments = [
        "run",
        "splits",
        "--data",
        str(tmp_path / "d.npz"),
        "--epochs",
        "1",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    for expected in (0, 1):
        np.savez(tmp_path / "d.npz", x=rng.integers(0, 256, (200, 6, 6), dtype=np.uint8), y=rng.integers(0, 3, 200))
        code, _, error = run_cli(capsys, *arguments)
        assert code == expected
    assert "data_digest" in error


def test_wrong_options_exit_with_2():
    with pytest.raises(SystemExit) as error:
        cli.main(["run", "splits", "--network", "vgg"])
    assert error.value.code == 2


# ------------------------------------------------------------------ the report


def test_the_report_is_one_page_with_everything_escaped(tmp_path, capsys):
    runs = tmp_path / "runs"
    for reward in ("gar", "nslr", "none", "oracle"):
        name = f"<b>{reward}"  # a file name must not become markup
        arguments = ["--epochs", "3", "--seeds", "2", "--reward", reward, "--out", str(runs / name), "--json"]
        assert run_cli(capsys, "run", "splits", *arguments)[0] == 0
    code, printed, _ = run_cli(capsys, "report", str(runs))
    assert code == 0
    page = (runs / "report.html").read_text()
    assert printed.strip() == str(runs / "report.html")
    assert "<b>" not in page
    assert "&lt;b&gt;gar" in page
    assert page.count("<svg") == 1
    assert not re.search(r"(src|href)=\"(?!#)|url\((?!#)|@import", page)  # nothing is loaded from elsewhere
    assert {p.name for p in runs.glob("report-*")} == {"report-1-fc-bn.svg", "report-1-fc-bn.png"}
    for part in ("Which split hurts", "noisy split", "oracle", "0 (noisy)", "effective epochs"):
        assert part in page


def test_the_report_passes_over_what_is_no_run(tmp_path, capsys):
    arguments = ["--epochs", "2", "--seeds", "1", "--json", "--out"]
    for accumulate in ("1", "10"):
        run_cli(capsys, "run", "splits", "--accumulate", accumulate, *arguments, str(tmp_path / accumulate))
    (tmp_path / ".vscode").mkdir()
    (tmp_path / ".vscode" / "settings.json").write_text("// no JSON")
    (tmp_path / "1" / "seed-0 copy").mkdir()
    (tmp_path / "1" / "seed-0 copy" / "result.json").write_text("{}")
    assert run_cli(capsys, "report", str(tmp_path))[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h2>") == 2  # runs that differ in more than network and reward are apart


def test_a_seed_that_diverged_is_a_gap_in_the_report(tmp_path, capsys):
    out = tmp_path / "run"
    assert run_cli(capsys, "run", "splits", "--epochs", "2", "--seeds", "2", "--out", str(out))[0] == 0
    result = json.loads((out / "seed-1/result.json").read_text())
    result["epochs"][1]["loss"] = None
    (out / "seed-1/result.json").write_text(json.dumps(result))
    assert run_cli(capsys, "report", str(tmp_path))[0] == 0


def test_folders_are_named_after_what_is_unusual():
    usual = with_defaults("own.npz", 3000)
    assert usual.folder_name(usual) == "splits-own-fc-bn-gar-labels"
    assert with_defaults("own.npz", 3000, batch=100).folder_name(usual) == "splits-own-fc-bn-gar-labels-batch-100"


def test_a_report_on_nothing_is_refused(tmp_path, capsys):
    assert run_cli(capsys, "report", str(tmp_path))[0] == 1
    assert "holds no finished run" in run_cli(capsys, "report", str(tmp_path))[2]
    assert "is no folder" in run_cli(capsys, "report", str(tmp_path / "none"))[2]


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    hold = "import sys; from pathlib import Path; from inloop_lab.runs.folder import RunFolder\n"
    hold += "folder = RunFolder(Path(sys.argv[1]), 'splits', {}); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(RunFolderError, match=f"in use by another run .process {other.pid} on"):
        RunFolder(tmp_path / "run", "splits", {})
    other.kill()
    other.communicate()
    RunFolder(tmp_path / "run", "splits", {})
