"""A finding: one line of the table, which is right, wrong, or skipped for a reason."""

import getpass
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "WRONG", "skipped"]
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/]+[\w.@+~-]+){2,}[\\/]*")
_LONGEST = 300


@dataclass(frozen=True)
class Finding:
    """The result of one case.

    Attributes:
        section: The part of the check, as "rewards".
        case: What was tried in it, as "mlp, float32".
        found: What was found, in words.
        limit: What is allowed; empty if anything is.
        numbers: What was measured, for the report.
    """

    section: str
    case: str
    found: str
    limit: str = ""
    verdict: Verdict = "ok"
    numbers: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The finding without numbers that JSON lacks (infinite ones, and those that are none)."""
        numbers = {name: value if _is_finite(value) else str(value) for name, value in self.numbers.items()}
        return asdict(self) | {"numbers": numbers}


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def judged(right: bool) -> Verdict:
    return "ok" if right else "WRONG"


def worst_of(section: str, case: str, errors: Mapping[str, float], tolerance: float, remark: str = "") -> Finding:
    """The finding that the largest error of some models is allowed, or not."""
    worst = max(errors, key=lambda model: errors[model])
    return Finding(
        section,
        case,
        f"error {errors[worst]:.1e} ({worst}){remark}",
        f"error {tolerance:.0e}",
        judged(errors[worst] <= tolerance),
        {f"error of {model}": error for model, error in errors.items()},
    )


def failed(section: str, case: str, error: Exception) -> Finding:
    """What raises an error is wrong: each case is one that inloop says it can do."""
    return Finding(section, case, describe(error), "no error", "WRONG")


def skipped(section: str, case: str, reason: str) -> Finding:
    return Finding(section, case, reason, verdict="skipped")


def attempt(section: str, case: str, look: Callable[..., Finding], *arguments: object) -> Finding:
    """``look(*arguments)``, or the finding that it fails: the cases after it are tried all the same."""
    try:
        return look(*arguments)
    except Exception as error:  # any error is a finding
        return failed(section, case, error)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Name what was tried in errors of the block."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{what}: {describe(error)}") from error


def describe(error: Exception) -> str:
    """The kind of an error and the first line of its message, without names that are nobody's business.

    Of an error in another process the message is a traceback, and its last line is what matters.
    """
    text = str(error).strip()
    lines = text.splitlines() or [""]
    line = lines[-1] if "Traceback (most recent call last)" in text else lines[0]
    return without_private_names(f"{type(error).__name__}: {line}")[:_LONGEST]


def without_private_names(text: str) -> str:
    """A text without paths, and without the names of this machine and its user: the report is meant to be published."""
    text = _PATH.sub("<path>", text)
    for name, shown in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if name:
            text = re.sub(rf"\b{re.escape(name)}\b", shown, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return ""
