"""What is generated is up to date, and what is named exists."""

import importlib
import re

import pytest

from tests.documents.loading import ROOT, load_file
from tests.public_surface import find

PAPER_INDEX = (ROOT / "docs/paper-index.md").read_text()


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("splits/table.py", "| learned by gradient alignment (`gar`) | "),
        ("augment/table.py", "| OLA (learned), RA, no plain steps | "),
        ("cost/table.py", "| `gar` | "),
        ("hazards/table.py", "| gar, softmax, floor | "),
        ("exactness/compare.py", "| GPT-2 | "),
        ("optimizers/correlation.py", "| AdamW | fixed | "),
        ("models/table.py", "| transformers | "),
        ("settings/table.py", "| equal shares | default | "),
    ],
)
def test_the_tables_are_those_of_the_committed_runs(script, line):
    pages = load_file(ROOT / "results" / script).pages()
    assert len(pages) >= 2
    for path, text in pages.items():
        assert path.read_text() == text, f"{path} is not up to date: python results/{script}"
    assert any(line in text for text in pages.values())


def test_the_table_of_large_models():
    plan = importlib.import_module("benchmarks.plan")
    for path, text in plan.pages().items():
        assert path.read_text() == text, f"{path} is not up to date: python -m benchmarks.plan"


def test_the_page_on_the_command_line():
    written = load_file(ROOT / "docs/command_help.py")
    assert written.page() == (ROOT / "docs/command-line.md").read_text(), "python docs/command_help.py"


def test_the_tree_of_the_readme():
    """Every path in it exists, and every part of the package is in it, or in the architecture."""
    text = (ROOT / "README.md").read_text()
    (tree,) = (block for block in re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL) if "src/inloop/" in block)
    named = {(indent, name) for indent, name in re.findall(r"^( *)([\w./]+)", tree, flags=re.MULTILINE)}
    for indent, name in named:
        assert (ROOT / ("src/inloop" if indent else "") / name).exists(), name
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    for path in (ROOT / "src/inloop").iterdir():
        if path.suffix == ".py" and path.stem != "__init__":
            assert path.name in tree or re.search(rf"\b{path.stem}\b", architecture), path.name


def code_words(pattern):
    return sorted(set(re.findall(pattern, PAPER_INDEX)))


@pytest.mark.parametrize("name", code_words(r"`(inloop(?:_lab)?\.[\w.]+)`"))
def test_what_the_paper_index_calls_code_exists(name):
    find(name)


@pytest.mark.parametrize("path", code_words(r"`((?:tests|results)/[\w./-]+)`"))
def test_files_that_the_paper_index_names_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("row", [line for line in PAPER_INDEX.splitlines() if "`test_" in line])
def test_tests_that_the_paper_index_names_exist(row):
    in_files = re.findall(r"((?:`test_\w+`(?:, )?)+) in `(tests/[\w/]+\.py)`", row)
    named = [(name, file) for names, file in in_files for name in re.findall(r"test_\w+", names)]
    assert len(named) == len(re.findall(r"`test_\w+`", row)), "a test without its file"
    for name, file in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{name} in {file}"
