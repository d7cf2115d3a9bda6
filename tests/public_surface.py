"""What is public is what docs/reference.md documents: every name there with its signature.

python -m tests.public_surface          writes tests/public_surface.txt
"""

import importlib
import inspect
import re
from pathlib import Path

REFERENCE = Path(__file__).parents[1] / "docs" / "reference.md"
SNAPSHOT = Path(__file__).with_suffix(".txt")
DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)(\(\))?\n(?:   :members: (.*)\n)?", flags=re.MULTILINE)


def documented():
    """(name, whether users do not make it themselves, members) of each entry."""
    entries = DIRECTIVE.findall(REFERENCE.read_text())
    return [(name, bool(received), members.split(", ") if members else []) for name, received, members in entries]


def find(name):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def line(name, thing):
    if inspect.ismodule(thing):
        classes = inspect.getmembers(thing, lambda member: inspect.isclass(member) and member.__module__ == name)
        return f"{name}: {', '.join(sorted(found for found, _ in classes))}"
    if isinstance(thing, property):
        return name
    signature = inspect.signature(thing)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    bare = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return name + re.sub(r"<function (\S+) at 0x\w+>", r"\1", str(bare))


def surface():
    lines = []
    for name, received, members in documented():
        thing = find(name)
        lines.append(name if received else line(name, thing))
        _, _, attributes = (inspect.getdoc(thing) or "").partition("Attributes:\n")
        lines += [f"    {attribute}" for attribute in re.findall(r"^ {4}(\w+): ", attributes, flags=re.MULTILINE)]
        lines += [f"    {line(member, getattr(thing, member))}" for member in members]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(surface())
