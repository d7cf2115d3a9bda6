"""Writes the results of run.py as tables in README.md.

python results/models/table.py
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inloop_lab.page_block import with_block

COMMAND = "python results/models/table.py"
HERE = Path(__file__).parent
STATUSES = ("exact", "interact", "refused", "wrong", "crash")
LIBRARIES = ("transformers", "timm")
SHOWN = 160  # characters of a message
Row = dict[str, Any]


def read() -> list[Row]:
    """The last result of each family."""
    rows = [json.loads(line) for line in (HERE / "models.jsonl").read_text().splitlines()]
    last = {(row["library"], row["family"]): row for row in rows}
    return [last[key] for key in sorted(last)]


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)])


def totals(rows: Sequence[Row]) -> str:
    """How many families have each status, of those that train without inloop."""
    lines = []
    for library in LIBRARIES:
        of_library = [row for row in rows if row["library"] == library]
        trained = [row for row in of_library if row["status"] != "not built"]
        apart = [row for row in trained if not (row.get("interacts") or row["status"] == "interact")]
        learned = sum(row.get("learner", {}).get("status") == "ok" for row in trained)
        counts = Counter(row["status"] for row in trained)
        exact_apart = sum(row["status"] == "exact" for row in apart)
        lines.append(
            [
                library,
                str(len(trained)),
                *(share(counts[status], len(trained)) for status in STATUSES),
                share(exact_apart, len(apart)),
                share(learned, len(trained)),
                str(len(of_library) - len(trained)),
            ]
        )
    heads = [
        "library",
        "configurations",
        *STATUSES,
        "exact, of those whose examples do not interact",
        "learner trains",
        "not built",
    ]
    return as_table(heads, lines)


def share(count: int, whole: int) -> str:
    return f"{count} ({count / whole:.1%})" if whole else "0"


def differing(rows: Sequence[Row]) -> str:
    """The families that are refused, wrong or crash, in the check or with the learner."""
    lines = []
    for row in rows:
        learner = row.get("learner", {"status": ""})
        if row["status"] == "not built" or (row["status"] == "exact" and learner["status"] == "ok"):
            continue
        message = row["message"] or learner.get("message", "")
        has_fix = row.get("has_fix", learner.get("has_fix", False))
        property_of_model = "interact" if row.get("interacts") else "random" if row.get("random") else ""
        cells = [
            row["family"],
            row["class"],
            row["status"],
            learner["status"],
            property_of_model,
            "yes" if has_fix else "no",
        ]
        lines.append([row["library"], *cells, shown(message)])
    heads = ["library", "family", "class", "check", "learner", "examples", "has a fix", "message"]
    return as_table(heads, lines) if lines else "None."


def shown(message: str) -> str:
    """The beginning of a message, as a cell of a table."""
    cut = message if len(message) <= SHOWN else message[:SHOWN].rstrip() + " ..."
    return "`" + cut.replace("|", "/").replace("`", "'") + "`"


def exact(rows: Sequence[Row]) -> str:
    """The families that are exact."""
    paragraphs = []
    for library in LIBRARIES:
        found = [row for row in rows if row["library"] == library and row["status"] == "exact"]
        errors = {
            dtype: max((row["error"] for row in found if row["dtype"] == dtype), default=0)
            for dtype in ("float64", "float32")
        }
        largest = ", ".join(f"{error:.0e} in {dtype}" for dtype, error in errors.items() if error)
        names = ", ".join(f"{row['family']}{half(row)}" for row in found)
        paragraphs.append(f"{library}, largest relative error {largest}: {names}.")
    return "\n\n".join(paragraphs)


def half(row: Row) -> str:
    """A mark for a model of which the inputs reach less than half of the parameters."""
    if row["reached"] >= row["trainable"] / 2:
        return ""
    return f" ({row['reached']} of {row['trainable']} parameters)"


def not_built(rows: Sequence[Row]) -> str:
    """The families that do not train without inloop, with the first reason."""
    lines = [
        [row["library"], row["family"], shown(row["message"].split(" | ")[0])]
        for row in rows
        if row["status"] == "not built"
    ]
    return as_table(["library", "family", "first reason"], lines) if lines else "None."


def pages() -> dict[Path, str]:
    rows = read()
    blocks = {"totals": totals, "differing": differing, "exact": exact, "not built": not_built}
    texts = {}
    for path in (HERE / "README.md", HERE.parent.parent / "docs" / "guides" / "check-your-model.md"):
        text = path.read_text()
        for name, block in blocks.items():
            text = with_block(text, f"{COMMAND}, {name}", block(rows))
        texts[path] = text
    return texts


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
