"""A run on a mixture of domains: it learns, continues where it was, and says what is wrong with its settings."""

import json
import random
from itertools import pairwise

import pytest
import torch

from inloop.cli import main
from inloop.errors import UsageError
from inloop_lab.mixtures.domains import load_domains
from inloop_lab.mixtures.experiment import MixtureExperiment, num_periods
from inloop_lab.mixtures.settings import MixtureSettings
from inloop_lab.runs.seed import train_to_end

SMALL = {"length": 16, "batch": 8, "steps": 8, "held_out": 2}


@pytest.fixture
def data(tmp_path):
    """Two languages of a few words, and their letters in random order."""
    folder = tmp_path / "data"
    folder.mkdir()
    draw = random.Random(0)
    letters = []
    for name, words in (("one", ["sun", "moon", "star"]), ("two", ["rot", "blau", "gelb"])):
        text = " ".join(draw.choices(words, k=700))
        (folder / f"{name}.txt").write_text(text)
        letters += text
    draw.shuffle(letters)
    (folder / "garbage.txt").write_text("".join(letters[: len(letters) // 2]))
    return folder


def make(data, tmp_path, seed=0, **given):
    settings = MixtureSettings(data=str(data), **SMALL | given)
    return MixtureExperiment(settings, load_domains(settings, tmp_path / "cache"), seed)


@pytest.mark.parametrize("mixture", ["uniform", "proportional", "tempered", "learned", "trail", "loss", "exp3"])
def test_every_mixture_trains(mixture, data, tmp_path):
    result = train_to_end(lambda: make(data, tmp_path, mixture=mixture))
    assert list(result["shares"]) == ["garbage", "one", "two"]
    assert sum(result["shares"].values()) == pytest.approx(1, abs=1e-5)
    assert len(result["epochs"]) == 8
    assert 0 < result["held_out_loss"] < 10


def test_the_oracle_never_draws_what_is_bad(data, tmp_path):
    experiment = make(data, tmp_path, mixture="oracle", bad="garbage")
    experiment.train_epoch()
    assert experiment.mixture.drawn_K[0] == 0
    assert experiment.shares() == [0.0, 0.5, 0.5]
    with pytest.raises(UsageError, match="the domains are garbage, one, two, and 'waste' is none"):
        make(data, tmp_path, mixture="oracle", bad="waste")


def test_a_run_continues_bit_for_bit(data, tmp_path):
    whole = make(data, tmp_path)
    for _ in range(4):
        whole.train_epoch()
        state = whole.state_dict()
    first = make(data, tmp_path)
    for _ in range(2):
        first.train_epoch()
        state = first.state_dict()
    again = make(data, tmp_path, seed=0)
    again.epochs = list(first.epochs)
    torch.manual_seed(99)
    again.load_state_dict(state)
    for _ in range(2):
        again.train_epoch()
        again.state_dict()
    assert again.epochs == whole.epochs
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_garbage_is_found(data, tmp_path):
    experiment = make(data, tmp_path, steps=300, batch=24, held_out=20)
    result = train_to_end(lambda: experiment)
    assert result["flagged"] == ["garbage"]
    assert result["shares"]["garbage"] < 0.1


def test_a_target_judges(data, tmp_path):
    (tmp_path / "target.txt").write_text("rot gelb blau " * 40)
    experiment = make(data, tmp_path, target=str(tmp_path / "target.txt"))
    experiment.train_epoch()
    assert experiment.epochs[0]["target"] > 0


def test_the_rate_rises_and_falls(data, tmp_path):
    experiment = make(data, tmp_path, steps=100)
    rates = [experiment._rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.1)
    assert all(one >= other for one, other in pairwise(rates[5:]))


def test_the_command(data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [
        "run",
        "mixture",
        "--data",
        str(data),
        "--length",
        "16",
        "--batch",
        "8",
        "--steps",
        "4",
        "--held-out",
        "2",
    ]
    assert main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["mixture"] == "learned"
    assert first["target_loss"] is None
    assert len(first["results"][0]["epochs"]) == num_periods(MixtureSettings(data="", steps=4)) == 4
    assert main([*command, "--json"]) == 0  # it is finished: nothing is trained again
    assert json.loads(capsys.readouterr().out) == first
    assert main(command) == 0
    assert "mean held-out loss of the domains" in capsys.readouterr().out
    assert (
        main([*command, "--steps", "5", "--out", "runs/mixture-data-learned-length-16-batch-8-steps-4-held_out-2"]) == 1
    )
    assert "belongs to another run (steps: 4 there, 5 now)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--mixture", "uniform", "--floor", "0.1"], 2, "--floor does nothing with --mixture uniform"),
        (["--mixture", "oracle"], 2, "mixture='oracle' leaves out the domains named by bad, and needs them"),
        (["--steps", "0"], 2, "steps=0: allowed are whole numbers from 1"),
        (["--held-out", "100000"], 1, "of which 100000 are to be held out"),
        (["--target", "missing.txt", "--held-out", "2"], 1, "missing.txt does not exist"),
        (["--tokenizer", "missing.json"], 1, "missing.json cannot be read"),
    ],
)
def test_wrong_usage_is_told_in_a_line(arguments, code, message, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "mixture", "--data", str(data), *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
