"""The report on runs of the split experiment: Table 1, Figure 2, and the bad splits."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from inloop.references import Reference
from inloop.report import describe_collapse, effective_number, is_collapsing
from inloop.reporting.html import html_figure, html_table, note
from inloop_lab.runs.finished import FinishedRun, comparable, read_runs
from inloop_lab.runs.summary import mean_and_interval, show_interval
from inloop_lab.splits.figures import figure_2
from inloop_lab.splits.noise import noisy_split
from inloop_lab.splits.settings import SplitSettings, with_defaults

# Table 1 of the paper: area of the noisy split and of the others, CIFAR-10, 10 seeds.
PAPER = {
    ("fc-bn", "gar"): (0.61, 0.93),
    ("fc-bn", "nslr"): (0.96, 0.89),
    ("fc", "gar"): (0.65, 0.93),
    ("fc", "nslr"): (0.86, 0.90),
    ("cnn-bn", "gar"): (0.69, 0.92),
    ("cnn-bn", "nslr"): (0.92, 0.90),
}
_REWARD_ORDER = ("gar", "nslr", "loss", "exp3", "none", "oracle")


def split_sections(folder: Path) -> list[str]:
    """A section for each group of runs that differ in network and reward only; writes the figures to ``folder``."""
    groups = comparable(read_runs(folder, "splits", SplitSettings().as_dict()), _title)
    if not groups:
        return []
    heading = (
        "<h1>Which split hurts?</h1><p>Equal splits of a data set; one of them may be noisy. A policy learns, while the model trains, "
        "how often to use each.</p>"
    )
    sections = enumerate(groups, start=1)
    return [heading, *(_section(title, runs, folder / f"report-{k}") for k, (title, runs) in sections)]


def _title(run: FinishedRun) -> str:
    s = run.settings
    return (
        f"{s['data']}, noise: {s['noise']}, {s['sources']} splits, batch {s['batch']}, {s['epochs']} epochs, {s['optimizer']}, "
        f"reference: {s['reference']}, accumulate: {s['accumulate']}, layers: {s['layers']}"
    )


def _section(title: str, runs: Sequence[FinishedRun], figure_path: Path) -> str:
    runs = sorted(runs, key=lambda run: (run.settings["network"], _REWARD_ORDER.index(run.settings["reward"])))
    parts = [f"<h2>{escape(title)}</h2>", _table_1(runs)]
    for network in dict.fromkeys(run.settings["network"] for run in runs):
        of_network = [run for run in runs if run.settings["network"] == network]
        figure = figure_2(of_network)
        parts += [
            f"<h3>{escape(network)}</h3>",
            html_figure(figure, figure_path.with_name(f"{figure_path.name}-{network}")),
        ]
        parts += [_verdicts(run) for run in of_network if run.settings["reward"] == "gar"]
        parts += [_warning(run) for run in of_network if _collapsed(run)]
    return "".join(parts)


def _table_1(runs: Sequence[FinishedRun]) -> str:
    k = runs[0].settings["sources"]
    papers = [_papers_numbers(run) for run in runs]
    beside = any(papers)
    rows = []
    for run, paper in zip(runs, papers, strict=True):
        noisy, other = (f"{paper[0]:.2f}", f"{paper[1]:.2f}") if paper else ("", "")
        rows.append(
            [
                escape(run.settings["network"]),
                escape(run.settings["reward"]),
                *([_show(run.interval("noisy_area")), noisy][: 2 if beside else 1]),
                *([_show(run.interval("other_area")), other][: 2 if beside else 1]),
                _show(run.interval("test_accuracy")),
                f"{len(run.results)}",
            ]
        )
    paper_column = ["paper"] if beside else []
    head = ["network", "reward", "noisy split", *paper_column, "other splits", *paper_column, "test accuracy", "seeds"]
    text = (
        f"Area: {k - 1} times the mean over epochs of the split's probability (trapezoid); used equally often it is "
        f"{(k - 1) / k:.2f}. Mean over seeds ± 95% interval. none: every split equally often; oracle: never the noisy one."
    )
    return html_table(head, rows) + note(text)


def _papers_numbers(run: FinishedRun) -> tuple[float, float] | None:
    s = run.settings
    papers = with_defaults("cifar10", network=s["network"], reward=s["reward"]).as_dict()
    return PAPER.get((s["network"], s["reward"])) if all(s[name] == value for name, value in papers.items()) else None


def _verdicts(run: FinishedRun) -> str:
    rows = []
    noisy = noisy_split(run.settings["noise"])
    for split in range(run.settings["sources"]):
        of_seeds = [result["sources"][split] for result in run.results]
        times = sum(verdict["bad"] for verdict in of_seeds)
        last = [result["epochs"][-1]["probabilities"][split] for result in run.results]
        seen = [result["effective_epochs"][split] for result in run.results]
        verdict = f'<span class="bad">bad in {times} of {len(of_seeds)}</span>' if times else ""
        advantages = [verdict["advantage"] for verdict in of_seeds if verdict["advantage"] is not None]
        half_widths = [(v["high"] - v["low"]) / 2 for v in of_seeds if v["low"] is not None]
        rows.append(
            [
                f"{split}{' (noisy)' if split == noisy else ''}",
                _show(mean_and_interval(last)),
                _show(mean_and_interval(advantages)) if advantages else "",
                f"± {sum(half_widths) / len(half_widths):.3f}" if half_widths else "",
                "" if None in seen else f"{sum(seen) / len(seen):.1f}",
                verdict,
            ]
        )
    head = ["split", "probability, last epoch", "advantage", "within a seed, typically", "effective epochs", "verdict"]
    text = (
        "Advantage: how much higher the split's examples were rewarded than all others, in standard deviations of a step's "
        "rewards; ± over seeds, and the half width of a single seed's own interval. A split is called bad if its whole interval, "
        f"corrected for the number of splits, is below -{Reference.least_effect}."
    )
    return f"<h3>Which split hurts ({escape(run.name)})</h3>" + html_table(head, rows) + note(text)


def _collapsed(run: FinishedRun) -> bool:
    return any(is_collapsing(result["epochs"][-1]["probabilities"]) for result in run.results)


def _warning(run: FinishedRun) -> str:
    worst = min((result["epochs"][-1]["probabilities"] for result in run.results), key=effective_number)
    return f'<p class="warning">{escape(run.name)}: {escape(describe_collapse(worst))}</p>'


def _show(value: tuple[float, float] | None) -> str:
    return "" if value is None or math.isnan(value[0]) else show_interval(*value)
