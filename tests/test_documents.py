"""The code in README and CONTRIBUTING runs as printed; the examples do what they say."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.alignment.rules import _RULES
from inloop.cli import main
from tests.alignment.exactness import assert_exact
from tests.training import make_sources

ROOT = Path(__file__).parent.parent


def blocks(document, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


def after_the_diff(diff):
    """The file that a diff leads to: removed lines left out, markers cut off."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def test_the_loop_of_the_readme_runs_as_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = make_sources(4, poisoned=2)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    names = {
        "inloop": inloop,
        "F": F,
        "torch": torch,
        "model": model,
        "sources": sources,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "num_steps": 200,
        "batch_size": 256,
    }
    (loop,) = blocks("README.md", "diff")
    exec(after_the_diff(loop), names)
    assert "tensor(" in capsys.readouterr().out
    assert int(names["policy"].probabilities().argmin()) == 2
    names["learner"].close()
    names["batches_with_a_source_tag"] = [(*names["mixture"].draw(tag), tag) for tag in torch.randint(0, 4, (20, 64))]
    names["network"] = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(900, 4))
    names["image_optimizer"] = torch.optim.SGD(names["network"].parameters(), lr=0.1)
    names["image_batches"] = [
        (torch.randint(256, (32, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 4, (32,))) for _ in range(6)
    ]
    for block in blocks("README.md", "python"):
        model.zero_grad()
        exec(block, names)
    assert names["rewards_K"].shape == (4,)
    assert names["rewards_K"].isfinite().all()
    assert names["rewards_N"].shape == (256,)
    assert {name: len(part) for name, part in names["actions"].items()} == {
        "source": 64,
        "operation": 64,
        "strength": 64,
    }
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000000.pt"]


def test_the_blocks_of_contributing_run_as_printed():
    saved = dict(_RULES)
    try:
        names = {}
        for block in blocks("CONTRIBUTING.md", "python"):
            exec(block, names)
        for layer in (names["Shift"](5), names["Gate"](5)):
            assert_exact(layer.double(), torch.randn(4, 5, dtype=torch.float64))
        actions = names["learner"].sample(8)
        assert actions.shape == (8,)
    finally:
        _RULES.clear()
        _RULES.update(saved)


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_find_bad_source_prints_what_the_readme_shows(capsys):
    probabilities = load_example("find_bad_source").main()
    assert probabilities[3] < 0.02
    (shown,) = (block for block in blocks("README.md", "text") if block.startswith("step"))
    printed = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("step")}
    for line in shown.splitlines():  # up to what another processor may round differently
        assert shares(line) == pytest.approx(shares(printed[line.split()[1]]), abs=0.01)


def shares(line):
    return [float(word.rstrip("*")) for word in line.split()[2:]]


def test_example_weights():
    learned, wrong = load_example("example_weights").main(steps=250)
    assert learned[wrong].mean() < 0.6 < learned[~wrong].mean()


@pytest.mark.parametrize("seed", [0])
def test_label_smoothing(seed):
    clean, noisy = load_example("label_smoothing").main(seed=seed)
    assert noisy > 2 * clean


def test_learn_augmentation():
    keep = load_example("learn_augmentation").main(steps=300)
    assert max(keep["flip_ud"], keep["invert"], keep["blot"]) < 0.1
    assert min(keep["identity"], keep["auto_contrast"], keep["sharpness"]) > 0.1


@pytest.mark.parametrize(
    ("experiment", "line"),
    [("splits", "| fc-bn, gar | "), ("augment", "| OLA (learned), RA, no plain steps | "), ("cost", "| `gar` | ")],
)
def test_the_tables_are_those_of_the_committed_runs(experiment, line):
    spec = importlib.util.spec_from_file_location("table", ROOT / "results" / experiment / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.pages().items():
        assert path.read_text() == text, f"{path} is not up to date: python results/{experiment}/table.py"
        assert line in text


def test_the_check_of_the_readme(monkeypatch, capsys):
    """What does not depend on the machine: parameters, shapes, rules and what is kept."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["check", "check_model:make"]) == 0

    def rows(text):
        return re.findall(r"^(\S+) +(\d+(?:x\d+)?) +(\S.*?) +\S+e[+-]\d+ +(\d+ B) +\d+%$", text, flags=re.MULTILINE)

    shown = rows(capsys.readouterr().out)
    assert len(shown) == 7
    assert rows((ROOT / "README.md").read_text()) == shown
