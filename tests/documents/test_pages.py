"""Every page's code runs as printed, from top to bottom, and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.alignment.rules import _RULES
from inloop.augment import registry
from inloop.cli import main
from tests.training import make_sources

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+")


def blocks(page):
    """(language, text) of each fenced block, in order."""
    return BLOCK.findall((ROOT / page).read_text())


def with_python(folder):
    pages = sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.md") if "_build" not in path.parts)
    return [str(page) for page in pages if any(language == "python" for language, _ in blocks(page))]


@pytest.fixture
def clean_registries():
    saved = [(table, dict(table)) for table in (_RULES, registry._operations, registry._names)]
    yield
    for table, content in saved:
        table.clear()
        table.update(content)


def assert_printed(printed, promised):
    """The same words, and numbers up to what another processor may round differently. (Hugging Face's Trainer prints how fast it was.)"""
    printed = re.sub(r"^\{'train_runtime.*\n", "", printed, flags=re.MULTILINE)
    assert NUMBER.sub("#", printed).strip() == NUMBER.sub("#", promised).strip()
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, promised)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.03)


NEEDS_TRAINERS = pytest.param(
    "docs/guides/trainers.md", marks=[pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
)


@pytest.mark.usefixtures("clean_registries")
@pytest.mark.parametrize(
    "page", [NEEDS_TRAINERS if page == "docs/guides/trainers.md" else page for page in with_python("docs")]
)
def test_the_code_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, promised = {}, blocks(page)
    for place, (language, code) in enumerate(promised):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        follows, text = promised[place + 1] if place + 1 < len(promised) else ("", "")
        assert_printed(printed.getvalue(), text if follows == "text" else "")


def test_no_line_of_code_is_too_long_for_the_page():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    for page in [*pages, ROOT / "README.md"]:
        lines = [line for _, text in blocks(page) for line in text.splitlines()]
        assert max(map(len, lines), default=0) <= 98, page


def test_most_pages_have_code():
    assert len(with_python("docs")) >= 10


def after_the_diff(diff):
    """The file that a diff leads to: removed lines left out, markers cut off."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def test_the_loop_of_the_readme():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"inloop": inloop, "F": F, "model": model, "optimizer": optimizer}
    names |= {"sources": make_sources(4, poisoned=2), "num_steps": 200, "batch_size": 256}
    (diff,) = (text for language, text in blocks("README.md") if language == "diff")
    exec(after_the_diff(diff), names)
    assert sum(line.startswith("+") for line in diff.splitlines()) == 5
    assert int(names["learner"].policy.probabilities().argmin()) == 2


def test_the_readme_has_no_other_code_than_its_loop_its_commands_and_its_tree():
    assert [language for language, _ in blocks("README.md")] == ["diff", "sh", "text"]


def test_the_screen_of_inloop_check(monkeypatch, capsys):
    """What does not depend on the machine: parameters, shapes, rules and what is kept."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["check", "check_model:make"]) == 0

    def rows(text):
        return re.findall(r"^(\S+) +(\d+(?:x\d+)?) +(\S.*?) +\S+e[+-]\d+ +(\d+ B) +\d+%$", text, flags=re.MULTILINE)

    shown = rows(capsys.readouterr().out)
    assert len(shown) == 7
    assert rows((ROOT / "docs/guides/check-your-model.md").read_text()) == shown
