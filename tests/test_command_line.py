"""The command without its extras, what other packages add to it, and the report on a run of one's own."""

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop import cli
from inloop.policies import Shares
from inloop.reporting import page
from tests.training import make_sources

LAB = Path(__file__).parents[1] / "lab"


@pytest.fixture
def no_lab(monkeypatch):
    for module in (cli, page):
        monkeypatch.setattr(module, "entry_points", lambda group: [])


def run_cli(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ------------------------------------------------------------------ extras


@pytest.mark.usefixtures("no_lab")
@pytest.mark.parametrize("arguments", [["run"], ["run", "splits", "--seeds", "2"], ["bench", "--help"]], ids=str)
def test_a_command_of_the_lab_says_what_to_install(arguments, capsys):
    line = f'inloop: `inloop {arguments[0]}` is part of the lab. Fix: in a clone of inloop, pip install -e ".[lab]" -e lab\n'
    assert run_cli(capsys, *arguments) == (2, "", line)


@pytest.mark.usefixtures("no_lab")
def test_help_lists_the_commands_of_the_lab(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["--help"])
    assert error.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert 'run run an experiment; part of the lab: in a clone of inloop, pip install -e ".[lab]" -e lab' in shown
    assert "bench time and memory of a training step; part of the lab" in shown


@pytest.mark.usefixtures("no_lab")
def test_wrong_options_are_refused_without_the_lab_too(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["check", "a:b", "--quick"])
    assert error.value.code == 2
    assert "unrecognized arguments: --quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "absent", "needs"),
    [
        (["check", "a:b"], ["rich"], "rich"),
        (["report", "runs"], ["matplotlib"], "matplotlib"),
        (["run", "splits"], ["rich", "PIL"], "rich and pillow"),
    ],
    ids=str,
)
def test_a_package_that_is_missing_is_named_with_its_extra(arguments, absent, needs, monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name in absent else object())
    line = f'inloop: This command needs {needs}. Fix: pip install "inloop[cli]"\n'
    assert run_cli(capsys, *arguments) == (2, "", line)


def add_hello(commands):
    hello = commands.add_parser("hello")
    hello.set_defaults(run=lambda options: 7, needs=())


def sections_on_letters(folder):
    return [f"<h1>{len(list(folder.glob('*.txt')))} letters</h1>"]


def test_other_packages_add_commands_and_sections(monkeypatch, capsys, tmp_path):
    entries = {
        "inloop.commands": [EntryPoint("hello", f"{__name__}:add_hello", "inloop.commands")],
        "inloop.reports": [EntryPoint("letters", f"{__name__}:sections_on_letters", "inloop.reports")],
    }
    for module in (cli, page):
        monkeypatch.setattr(module, "entry_points", lambda group: entries[group])
    assert run_cli(capsys, "hello")[0] == 7
    (tmp_path / "dear.txt").write_text("keep me")
    assert run_cli(capsys, "report", tmp_path)[0] == 0
    assert "<h1>1 letters</h1>" in (tmp_path / "report.html").read_text()


def test_the_lab_has_the_version_of_the_library():
    described = (LAB / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+?)"', described, flags=re.MULTILINE)[1] == inloop.__version__
    assert f'"inloop[cli]=={inloop.__version__}"' in described


# ------------------------------------------------------------------ a report on a run of one's own


def train(path, policy=None, names=None, steps=60):
    torch.manual_seed(0)
    mixture = inloop.Mixture(make_sources(4, poisoned=2))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = inloop.Records(path, mixture=mixture, names=names)
    learner = inloop.InLoop(
        model,
        policy or inloop.MixturePolicy(4),
        callback=records,
        update=None if policy is not None else inloop.Reinforce(accumulate=2),
    )
    for _ in range(steps):
        x, y = mixture.draw(learner.sample(128))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    learner.close()
    return learner.policy


@pytest.mark.usefixtures("no_lab")
def test_the_report_on_a_file_of_records(tmp_path, capsys):
    policy = train(tmp_path / "run.jsonl", names=["web", "books", "<b>code", "talks"])
    code, printed, _ = run_cli(capsys, "report", tmp_path / "run.jsonl")
    assert (code, printed.strip()) == (0, str(tmp_path / "run.html"))
    text = (tmp_path / "run.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "run.html", "run-shares.svg", "run-shares.png"}
    assert "Steps 1 to 60, 60 of them recorded; 0 dropped" in text
    assert "<b>" not in text
    assert "&lt;b&gt;code" in text
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", text)]
    assert [float(row[1]) for row in rows] == [0.25] * 4
    assert [float(row[2]) for row in rows] == pytest.approx(policy.probabilities().tolist(), abs=6e-4)
    rewards = [float(row[4]) for row in rows]
    assert rewards.index(min(rewards)) == 2
    assert all(float(row[6]) > 0 for row in rows)
    assert "collapsing" not in text


@pytest.mark.usefixtures("no_lab")
def test_the_report_on_a_folder_takes_every_file_of_records(tmp_path, capsys):
    train(tmp_path / "first.jsonl", steps=5)
    product = inloop.Product({"source": inloop.MixturePolicy(4), "style": inloop.Categorical(3)})
    train(tmp_path / "deeper" / "second.jsonl", product, steps=5)
    (tmp_path / "other.jsonl").write_text('{"epoch": 1}\n[2]\nno JSON\n')
    assert run_cli(capsys, "report", tmp_path)[0] == 0
    text = (tmp_path / "report.html").read_text()
    assert re.findall("<h1>(.*?)</h1>", text) == ["second.jsonl", "first.jsonl"]
    assert re.findall("<h2>(.*?)</h2>", text) == ["source", "style", "Shares"]
    assert (tmp_path / "report-records-1-shares-2.svg").exists()
    assert (tmp_path / "report-records-2-shares.png").exists()


@pytest.mark.usefixtures("no_lab")
def test_a_collapse_is_shown_but_not_of_shares_that_never_moved(tmp_path, capsys):
    train(tmp_path / "fixed.jsonl", Shares([0.97, 0.01, 0.01, 0.01]), steps=5)
    run_cli(capsys, "report", tmp_path / "fixed.jsonl")
    assert "collapsing" not in (tmp_path / "fixed.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "fixed.jsonl").read_text().splitlines()]
    lines[0] |= {f"probability/{source}": 0.25 for source in range(4)}
    (tmp_path / "moved.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_cli(capsys, "report", tmp_path / "moved.jsonl")
    assert "the policy is collapsing" in (tmp_path / "moved.html").read_text()


@pytest.mark.usefixtures("no_lab")
def test_runs_of_the_lab_without_the_lab(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "settings.json").write_text('{"experiment": "splits"}')
    code, _, error = run_cli(capsys, "report", tmp_path)
    assert code == 2
    assert error.endswith(
        'holds runs of the lab; reporting on them needs the lab. Fix: in a clone of inloop, pip install -e ".[lab]" -e lab.\n'
    )
    train(tmp_path / "run.jsonl", steps=3)
    assert run_cli(capsys, "report", tmp_path)[0] == 0
    assert "The folder also holds runs of the lab" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("no_lab")
def test_nothing_to_report_on_is_said(tmp_path, capsys):
    assert "is no folder or file" in run_cli(capsys, "report", tmp_path / "none")[2]
    (tmp_path / "notes.txt").write_text("hello")
    assert "has no lines of inloop.Records" in run_cli(capsys, "report", tmp_path / "notes.txt")[2]
    code, _, error = run_cli(capsys, "report", tmp_path)
    assert code == 1
    assert "holds no finished run and no file of inloop.Records. Fix: train with callback=inloop.Records(" in error
