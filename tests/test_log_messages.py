"""What the library logs says from whom it comes."""

import ast
from pathlib import Path

import inloop

LEVELS = {"debug": 0, "info": 0, "warning": 0, "error": 0, "exception": 0, "critical": 0, "log": 1}  # where the text is


def log_messages():
    """(file and line, the beginning of the text) of every call of a logger in the library."""
    root = Path(inloop.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("log", "logger", "logging")):
                continue
            text = node.args[LEVELS[node.func.attr]]
            text = text.values[0] if isinstance(text, ast.JoinedStr) else text
            yield f"{path.relative_to(root)}:{node.lineno}", text.value if isinstance(text, ast.Constant) else None


def test_every_log_message_begins_with_the_name_of_the_library():
    messages = dict(log_messages())
    assert len(messages) >= 8
    assert [where for where, text in messages.items() if not str(text).startswith("inloop: ")] == []
