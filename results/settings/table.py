"""Writes the runs as tables: README.md here, the project's README, and the page on when not to use it.

python results/settings/table.py
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from arms import ARMS
from compare import Gain, Runs, is_text, missed_marks
from run import FALSE_ALARMS, has_verdict, has_wrong_source, read

from inloop_lab.page_block import with_block
from inloop_lab.runs.summary import mean_and_interval, show_interval

COMMAND = "python results/settings/table.py"
HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
WORDS = {
    "a fc-bn": "one of ten splits with random labels; FC_BN, SGD, batch 1,000",
    "a fc": "the same; FC",
    "a cnn-bn": "the same; CNN_BN",
    "b group norm": "one of ten with random labels; AdamW, batch 128, GroupNorm",
    "b batch norm": "the same; BatchNorm",
    "c three of ten": "three of ten with random labels",
    "d human, one": "one of ten with labels that people got wrong (40%)",
    "d human, three": "three of ten with such labels",
    "e two sources, 30%": "two sources, the larger with 30% random labels",
    "e two sources, 60%": "two sources, the larger with 60% random labels",
    "e two sources, 100%": "two sources, all labels of the larger random",
    "f noise images": "one of ten with images of noise",
    "g shifted labels": "one of ten with labels shifted by one class",
    "h turned": "three of ten turned by 90 degrees, labels right",
    "h one class each": "one class a source",
    "h blurred": "three of ten blurred",
    "h grey": "three of ten grey",
    "i equal, batch 8": "ten equal splits, batch 8",
    "i equal, batch 32": "ten equal splits, batch 32",
    "i equal, batch 128": "ten equal splits, batch 128",
    "i equal, batch 1000": "ten equal splits, batch 1,000, FC_BN, SGD",
    "j duplicates": "one of ten with 500 images, each eight times",
    "k text and garbage": "eight domains of text, and bytes in random order; a small GPT",
    "l text": "the eight domains alone",
    "m five named": "clean, half wrong, blurred, imbalanced, duplicates",
    "n cats and dogs": "one of ten in which cats are called dogs, and dogs cats",
    "n other images": "one of ten with images of CIFAR-100, ten classes under each label",
    "n hundred classes": "CIFAR-100, one of ten with 40% random labels",
    "n inverted": "three of ten with inverted colours, labels right",
    "n covered": "three of ten with a covered middle, labels right",
}
LEARNED = tuple(ARMS)


def show(gain: Gain | None, setting: str) -> str:
    if gain is None:
        return ""
    digits = 3 if is_text(setting) else 1
    interval = f" ± {gain.interval:.{digits}f}" if len(gain.values) > 2 else ""
    return f"{gain.mean:+.{digits}f}{interval} ({len(gain.values)})"


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)])


def ordered(runs: Runs) -> list[str]:
    return [setting for setting in WORDS if setting in runs.settings]


def gains(runs: Runs, arms: Sequence[str], settings: Sequence[str], label: Callable[[str], str]) -> str:
    """The score of equal shares, and the paired difference of each arm to it."""
    rows = []
    for setting in settings:
        uniform = [row["score"] for row in runs.of(setting, "uniform")]
        cells = [show(runs.gain(setting, arm), setting) for arm in arms]
        rows.append([label(setting), f"{statistics.mean(uniform):.3f}" if uniform else "", *cells])
    return as_table(["setting", "equal shares", *arms], rows)


def verdicts(runs: Runs, arms: Sequence[str]) -> str:
    """In how many runs all wrong sources were flagged and called bad at the end, from which step on, and in how many a good one was flagged at any look."""
    rows = []
    for setting in ordered(runs):
        cells = []
        for arm in arms:
            if not runs.of(setting, arm):
                cells += ["", ""]
                continue
            flagged, number = runs.found(setting, arm, "fbd")
            bad, _ = runs.found(setting, arm, "b")
            first = runs.first_flag(setting, arm)
            since = "" if first is None else f", from step {first:.0f}"
            wrong = has_wrong_source(setting)
            cells += [
                f"{flagged}, {bad} bad, of {number}{since}" if wrong else "",
                f"{runs.false_alarms(setting, arm)[0]} of {number}",
            ]
        rows.append([f"{setting[0]}. {WORDS[setting]}", *cells])
    heads = [head for arm in arms for head in (f"{arm}: wrong sources flagged", "a good one flagged")]
    return as_table(["setting", *heads], rows)


def worst(runs: Runs, arms: Sequence[str]) -> str:
    """The gain on the source, or kind of image, that a model is worst at."""
    settings = [setting for setting in ordered(runs) if setting.startswith(("h", "l", "m"))]
    rows = [[f"{s[0]}. {WORDS[s]}", *(show(runs.gain_of_worst(s, arm), s) for arm in arms)] for s in settings]
    return as_table(["setting, worst source", *arms], rows)


def marks(runs: Runs) -> str:
    alarms = [runs.false_alarms(setting, "default") for setting in runs.settings if setting.startswith(FALSE_ALARMS)]
    found, number = (sum(column) for column in zip(*alarms, strict=True)) if alarms else (0, 0)
    lines = [f"- False alarms with equal sources (digits, batches of 8, 32, 128 and 1,000): {found} of {number} runs."]
    lines += [f"- Not reached: {mark}." for mark in missed_marks(runs, "default")]
    return "\n".join(lines)


def areas(runs: Runs) -> str:
    """Table 1 of the paper: nine times the mean share of the split with random labels over training; 0.90 for equal shares."""
    rows = []
    for setting, of_paper in (("a fc-bn", "0.61"), ("a fc", "0.65"), ("a cnn-bn", "0.69")):
        values = {arm: [9 * row["mean_shares"][0] for row in runs.of(setting, arm)] for arm in LEARNED}
        cells = [show_interval(*mean_and_interval(own), 2) + f" ({len(own)})" if own else "" for own in values.values()]
        rows.append([setting[2:], of_paper, *cells])
    return as_table(["area of the noisy split", "printed in the paper", *LEARNED], rows)


def seconds(runs: Runs) -> str:
    arms = ["uniform", *LEARNED, "oracle"]
    rows = []
    for setting in ordered(runs):
        of_arms = [[row["seconds"] for row in runs.of(setting, arm)] for arm in arms]
        rows.append([setting, *(f"{statistics.median(values):.0f}" if values else "" for values in of_arms)])
    return as_table(["seconds a run", *arms], rows)


def pages() -> dict[Path, str]:
    screened, final = (Runs(read(HERE / f"{stage}.jsonl")) for stage in ("screen", "final"))
    chosen = list(dict.fromkeys(row["arm"] for row in screened.rows if row["arm"] not in ("uniform", *ARMS)))
    blocks = {
        f"{COMMAND}, screening": gains(screened, ["default", "told nothing", *chosen], ordered(screened), lambda s: s),
        f"{COMMAND}, gains": gains(final, [*LEARNED, "oracle"], ordered(final), lambda s: f"{s[0]}. {WORDS[s]}"),
        f"{COMMAND}, verdicts": verdicts(final, ["default", "told nothing"]),
        f"{COMMAND}, worst": worst(final, [*LEARNED, "oracle"]),
        f"{COMMAND}, marks": marks(final),
        f"{COMMAND}, areas": areas(final),
        f"{COMMAND}, seconds": seconds(final),
        COMMAND: gains(
            final, ["default", "paper", "oracle"], [s for s in ordered(final) if has_verdict(s)], WORDS.__getitem__
        ),
    }
    texts = {}
    for page in (HERE / "README.md", PROJECT / "README.md", PROJECT / "docs" / "when-not-to-use-it.md"):
        text = page.read_text()
        for command, block in blocks.items():
            text = with_block(text, command, block)
        texts[page] = text
    return texts


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
