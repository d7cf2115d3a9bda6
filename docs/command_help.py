"""Writes the page on the command line from what `inloop COMMAND --help` prints.

python docs/command_help.py
"""

import argparse
import os
from pathlib import Path

COMMANDS = ("check", "report", "run splits", "run augment", "run mixture", "bench")
HEAD = """# The command line

In a clone, `pip install -e ".[cli]"` installs what `inloop check` and `inloop report` need; `inloop run` and `inloop bench` are part of the lab, which
`pip install -e ".[lab]" -e lab` installs too. Without its extra a command says what to install. Long work shows its progress; the same command again continues an interrupted run and
does not redo what is finished (`--restart` begins anew); Ctrl-C exits with code 130 and everything saved. `--json` prints one JSON object and
nothing else. Exit codes: 0; 1 for a failure; 2 for wrong usage. What follows is what `--help` prints.

`inloop bench --device cuda` measures on a GPU: models and batches are there, the clock stops when the GPU has done its work, and memory is
`torch.cuda.max_memory_allocated`. Ratios on different devices are never compared: a file of `--out` or `--against` keeps them apart.
"""


def help_of(command: str, parser: argparse.ArgumentParser) -> str:
    for word in command.split():
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = commands.choices[word]
    return parser.format_help()


def page() -> str:
    os.environ["COLUMNS"] = "92"
    os.environ["NO_COLOR"] = "1"
    from inloop.cli import _parser

    parts = [f"## inloop {command}\n\n```text\n{help_of(command, _parser())}```\n" for command in COMMANDS]
    return "\n".join([HEAD, *parts])


def write_page(path: Path) -> None:
    """Only if it has changed, so that nothing is built anew in vain."""
    text = page()
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    write_page(Path(__file__).parent / "command-line.md")
