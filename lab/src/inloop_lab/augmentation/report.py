"""The report on runs of the augmentation experiment: Table 2, paired differences, and the learned policies."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import torch

from inloop.augment import SPACES
from inloop.reporting.html import html_figure, html_table, note
from inloop_lab.augmentation.figures import policy_over_time, sample_sheets, strengths_at_snapshots
from inloop_lab.augmentation.settings import OLA_OPTIONS, SEARCHES_A_SPACE, AugmentSettings, with_augment_defaults
from inloop_lab.runs.finished import FinishedRun, comparable, read_runs
from inloop_lab.runs.summary import mean_and_interval, show_interval

# Table 2 of the paper: test accuracy and the half width of its 95% interval, in per cent, WRN-28-10, 5 seeds.
PAPER: dict[tuple[str, str, str | None], tuple[float, float | None]] = {
    ("cifar10", "pba", None): (97.4, None),
    ("cifar10", "fast-aa", None): (97.3, None),
    ("cifar10", "aa", None): (97.4, None),
    ("cifar10", "ra", "ra"): (97.3, None),
    ("cifar10", "ua", "wl"): (97.61, 0.16),
    ("cifar10", "ua", "ra"): (97.51, 0.18),
    ("cifar10", "ola", "wl"): (97.39, 0.15),
    ("cifar10", "ola", "ra"): (97.56, 0.07),
    ("cifar100", "pba", None): (83.3, None),
    ("cifar100", "fast-aa", None): (82.7, None),
    ("cifar100", "aa", None): (82.9, None),
    ("cifar100", "ra", "ra"): (83.3, None),
    ("cifar100", "ua", "wl"): (83.20, 0.34),
    ("cifar100", "ua", "ra"): (83.40, 0.09),
    ("cifar100", "ola", "wl"): (84.30, 0.40),
    ("cifar100", "ola", "ra"): (83.54, 0.14),
}
_ORDER = ("none", "pba", "fast-aa", "aa", "ra", "ta", "ua", "ola")


def augment_sections(folder: Path) -> list[str]:
    """A section for each group of runs that differ in the augmentation only; writes the figures to ``folder``."""
    groups = comparable(read_runs(folder, "augment", AugmentSettings().as_dict()), _title)
    if not groups:
        return []
    heading = (
        "<h1>How are the images augmented?</h1><p>Networks trained with fixed augmentation, or with augmentation learned in the same run (OLA) from "
        "the alignment of each augmented example's gradient with the next step's.</p>"
    )
    sections = enumerate(groups, start=1)
    return [heading, *(_section(title, runs, folder / f"report-augment-{k}") for k, (title, runs) in sections)]


def _title(run: FinishedRun) -> str:
    """The settings that comparable runs share."""
    s = run.settings
    images = f"{s['examples']} images" if s["examples"] else "all images"
    flip = "flip" if s["flip"] else "no flip"
    judged = f", judged by {s['validation']} validation images" if s["validation"] else ""
    return (
        f"{s['data']}, {s['network']}, {images}, batch {s['batch']}, {s['epochs']} epochs, learning rate {s['learning_rate']:g} after "
        f"{s['warmup']} epochs, weight decay {s['weight_decay']:g}, clip {s['clip']:g}, crop {s['padding']}, {flip}, Cutout {s['cutout']}{judged}"
    )


def _section(title: str, runs: Sequence[FinishedRun], path: Path) -> str:
    runs = sorted(runs, key=lambda run: (_ORDER.index(run.settings["augment"]), run.settings["space"], run.name))
    parts = [f"<h2>{escape(title)}</h2>", _table_2(runs), _details(runs)]
    for number, run in enumerate((run for run in runs if run.settings["augment"] == "ola"), start=1):
        parts += _learned(run, path.with_name(f"{path.name}-ola-{number}"))
    return "".join(parts)


def _table_2(runs: Sequence[FinishedRun]) -> str:
    """The paper's layout: the UA baseline above the method, the learned method on two spaces; ours, then the paper's."""
    by_cell: dict[tuple[str, str, str | None], list[FinishedRun]] = {}
    for run in runs:
        if _is_plain(run):
            by_cell.setdefault(_cell(run), []).append(run)
    columns: list[tuple[str, str, str | None]] = [
        ("PBA", "pba", None),
        ("Fast AA", "fast-aa", None),
        ("AA", "aa", None),
    ]
    columns += [("RA", "ra", "ra"), ("OLA (WL)", "ola", "wl"), ("OLA (RA)", "ola", "ra")]
    rows = []
    for name, of_row in (
        ("UA baseline", lambda method: "ua" if method == "ola" else None),
        ("method", lambda method: method),
    ):
        cells = [_both(by_cell, of_row(method), space) for _, method, space in columns]
        rows.append([name, *cells])
    beside = (
        " In brackets: the paper's numbers, with all training images and its full recipe." if _has_paper(runs) else ""
    )
    text = (
        f"The layout of the paper's Table 2: a learned method (OLA) on two search spaces, WideLong and RandAugment's, above it UniformAugment "
        f"(UA) on the same space; policies of others beside them. Accuracy in per cent, mean over seeds ± 95% interval.{beside}"
    )
    return html_table(["", *(name for name, _, _ in columns)], rows) + note(text)


def _cell(run: FinishedRun) -> tuple[str, str, str | None]:
    s = run.settings
    return s["data"], s["augment"], s["space"] if s["augment"] in SEARCHES_A_SPACE else None


def _is_plain(run: FinishedRun) -> bool:
    """Whether all of OLA's options have their defaults, as in the paper's rows."""
    usual = AugmentSettings().as_dict()
    return all(run.settings[name] == usual[name] for name in OLA_OPTIONS) or run.settings["augment"] != "ola"


def _has_paper(runs: Sequence[FinishedRun]) -> bool:
    return any(_cell(run) in PAPER for run in runs)


def _both(runs: dict[tuple[str, str, str | None], list[FinishedRun]], method: str | None, space: str | None) -> str:
    if method is None:
        return "-"
    data = next(iter(runs))[0] if runs else ""
    paper = PAPER.get((data, method, space))
    ours = [_per_cent(_accuracy(run)) for run in runs.get((data, method, space), [])]
    theirs = [] if paper is None else [f"[{paper[0]}{'' if paper[1] is None else f' ± {paper[1]}'}]"]
    return "<br>".join(ours + theirs) or "-"


def _accuracy(run: FinishedRun) -> tuple[float, float] | None:
    return run.interval("test_accuracy") or run.interval("validation_accuracy")


def _per_cent(value: tuple[float, float] | None) -> str:
    return "" if value is None else show_interval(100 * value[0], 100 * value[1], 2)


def _details(runs: Sequence[FinishedRun]) -> str:
    """Every run, with its paired differences to no operations and to UA on the same space."""
    none = next((run for run in runs if run.settings["augment"] == "none"), None)
    baselines = {run.settings["space"]: run for run in runs if run.settings["augment"] == "ua"}
    rows = []
    for run in runs:
        s = run.settings
        space = s["space"] if s["augment"] in SEARCHES_A_SPACE else ""
        seconds = [epoch["seconds"] for result in run.results for epoch in result["epochs"]]
        rows.append(
            [
                f'<span title="{escape(run.name)}">{escape(s["augment"])} {escape(str(space))}</span>',
                escape(", ".join(_special(run))),
                _per_cent(_accuracy(run)),
                _difference(run, none),
                _difference(run, baselines.get(s["space"])) if space else "",
                f"{len(run.results)}",
                f"{float(np.median(seconds)):.2f}",
            ]
        )
    head = ["augmentation", "options", "accuracy", "against none", "against ua", "seeds", "seconds an epoch"]
    text = (
        "Differences are paired: the same seed has the same initial network, the same order of images and the same crops; with a held-out "
        "reference a tenth of the images is not trained on, so there only the network is the same. Seconds: the median "
        "over epochs; other work may have shared the machine."
    )
    return html_table(head, rows) + note(text)


def _special(run: FinishedRun) -> list[str]:
    """The options that are not the default and matter for this augmentation."""
    usual = with_augment_defaults(run.settings["data"]).as_dict()
    own = {"ra": ("ra_operations", "ra_strength"), "ola": OLA_OPTIONS}.get(run.settings["augment"], ())
    return [
        f"{name} {run.settings[name]}" for name in own if run.settings[name] != usual[name] or name.startswith("ra_")
    ]


def _difference(run: FinishedRun, other: FinishedRun | None) -> str:
    """Mean paired difference of accuracies over the seeds that both have."""
    if other is None or other is run:
        return ""
    judged = "validation_accuracy" if run.settings["validation"] else "test_accuracy"
    theirs = {result["seed"]: result[judged] for result in other.results}
    pairs = [100 * (result[judged] - theirs[result["seed"]]) for result in run.results if result["seed"] in theirs]
    if not pairs:
        return ""
    mean, half_width = mean_and_interval(pairs)
    return f"{mean:+.2f}" + ("" if math.isnan(half_width) else f" ± {half_width:.2f}")


def _learned(run: FinishedRun, path: Path) -> list[str]:
    """Heat maps of the policy over time and, if the run kept some images, sheets of them under it."""
    options = ", ".join(_special(run))
    heading = f"<h3>Learned policy: space {escape(run.settings['space'])} {escape(f'({options})') if options else ''} ({escape(run.name)})</h3>"
    parts = [heading, html_figure(policy_over_time(run.results), path.with_name(f"{path.name}-policy"))]
    parts.append(note("Means over seeds. A strength is drawn only where the operation is kept."))
    first = run.results[0]
    if (figure := strengths_at_snapshots(first)) is not None:
        parts += [
            html_figure(figure, path.with_name(f"{path.name}-strengths")),
            note("Distribution over strengths, one seed."),
        ]
    samples = run.path / "samples.npz"
    if samples.is_file():
        with np.load(samples, allow_pickle=False) as arrays:
            images = torch.from_numpy(arrays["images"])
        if (sheet := sample_sheets(first, SPACES[run.settings["space"]], images)) is not None:
            parts += [
                html_figure(sheet, path.with_name(f"{path.name}-samples")),
                note("Training images under the policy, before crop and Cutout."),
            ]
    return parts
