"""``inloop report``: one self-contained page on the split runs in a folder, and its figures as files beside it."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from inloop.lab.figures import as_svg, figure_2
from inloop.lab.run_folder import write_atomically
from inloop.lab.split_runs import SplitRun, experiments, read_runs
from inloop.lab.split_settings import with_defaults
from inloop.lab.summary import mean_and_interval, show_interval
from inloop.report import describe_collapse, effective_number, is_collapsing

# Table 1 of the paper: area of the noisy split and of the others, CIFAR-10, 10 seeds.
PAPER = {
    ("fc-bn", "gar"): (0.61, 0.93),
    ("fc-bn", "nslr"): (0.96, 0.89),
    ("fc", "gar"): (0.65, 0.93),
    ("fc", "nslr"): (0.86, 0.90),
    ("cnn-bn", "gar"): (0.69, 0.92),
    ("cnn-bn", "nslr"): (0.92, 0.90),
}
_REWARD_ORDER = ("gar", "nslr", "none", "oracle")

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
h3 { font-size: 1rem; margin-top: 1.6rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
th:first-child, td:first-child, .text { text-align: left; } th { font-weight: 600; }
svg { max-width: 100%; min-width: 40rem; height: auto; } .bad { color: #c1272d; font-weight: 600; } .note { color: #666; font-size: .9rem; }
.warning { background: #fff4e0; border-left: 4px solid #e0a030; padding: .4rem .8rem; }
"""


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` and the figures; returns the page's path."""
    runs = read_runs(folder)
    sections = []
    for number, (title, group) in enumerate(experiments(runs).items(), start=1):
        sections.append(_section(title, group, folder / f"report-{number}"))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>inloop: splits</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Which split hurts?</h1>"
        "<p>Equal splits of a data set, of which one may be noisy; a policy learns, while the model trains, how often each is used."
        f"</p>{''.join(sections)}</body></html>\n"
    )
    target = folder / "report.html"
    write_atomically(target, lambda file: file.write(page.encode()))
    return target


def _section(title: str, runs: Sequence[SplitRun], figure_path: Path) -> str:
    runs = sorted(runs, key=lambda run: (run.settings["network"], _REWARD_ORDER.index(run.settings["reward"])))
    parts = [f"<h2>{escape(title)}</h2>", _table_1(runs)]
    for network in dict.fromkeys(run.settings["network"] for run in runs):
        of_network = [run for run in runs if run.settings["network"] == network]
        figure = figure_2(of_network)
        svg = as_svg(figure)
        name = f"{figure_path.name}-{network}"
        write_atomically(figure_path.with_name(f"{name}.svg"), lambda file, svg=svg: file.write(svg.encode()))  # type: ignore[misc]
        figure.savefig(figure_path.with_name(f"{name}.png"), dpi=150)
        parts += [f"<h3>{escape(network)}</h3>", f'<div class="wide">{svg}</div>']
        parts += [_sources(run) for run in of_network if run.settings["reward"] == "gar"]
        parts += [_warning(run) for run in of_network if _collapsed(run)]
    return "".join(parts)


def _table_1(runs: Sequence[SplitRun]) -> str:
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
    note = (
        f"Area: {k - 1} times the mean over epochs of the split's probability (trapezoid); used equally often it is "
        f"{(k - 1) / k:.2f}. Mean over seeds ± 95% interval. none: every split equally often; oracle: never the noisy one."
    )
    return _html_table(head, rows) + f'<p class="note">{note}</p>'


def _papers_numbers(run: SplitRun) -> tuple[float, float] | None:
    s = run.settings
    papers = with_defaults("cifar10", network=s["network"], reward=s["reward"]).as_dict()
    return PAPER.get((s["network"], s["reward"])) if all(s[name] == value for name, value in papers.items()) else None


def _sources(run: SplitRun) -> str:
    rows = []
    for source in range(run.settings["sources"]):
        of_seeds = [result["sources"][source] for result in run.results]
        times = sum(verdict["bad"] for verdict in of_seeds)
        last = [result["epochs"][-1]["probabilities"][source] for result in run.results]
        seen = [result["effective_epochs"][source] for result in run.results]
        verdict = f'<span class="bad">bad in {times} of {len(of_seeds)}</span>' if times else ""
        advantages = [verdict["advantage"] for verdict in of_seeds if verdict["advantage"] is not None]
        half_widths = [(v["high"] - v["low"]) / 2 for v in of_seeds if v["low"] is not None]
        rows.append(
            [
                f"{source}{' (noisy)' if source == run.noisy else ''}",
                _show(mean_and_interval(last)),
                _show(mean_and_interval(advantages)) if advantages else "",
                f"± {sum(half_widths) / len(half_widths):.3f}" if half_widths else "",
                "" if None in seen else f"{sum(seen) / len(seen):.1f}",
                verdict,
            ]
        )
    head = ["source", "share, last epoch", "advantage", "within a seed, typically", "effective epochs", "verdict"]
    note = (
        "Advantage: how much higher the source's examples were rewarded than all others, in standard deviations of a step's "
        "rewards; ± over seeds, and the half width of a single seed's own interval. A source is called bad if its whole interval, "
        "corrected for the number of sources, is below -0.02."
    )
    return f"<h3>Which source hurts ({escape(run.name)})</h3>" + _html_table(head, rows) + f'<p class="note">{note}</p>'


def _collapsed(run: SplitRun) -> bool:
    return any(is_collapsing(result["epochs"][-1]["probabilities"]) for result in run.results)


def _warning(run: SplitRun) -> str:
    worst = min((result["epochs"][-1]["probabilities"] for result in run.results), key=effective_number)
    return f'<p class="warning">{escape(run.name)}: {escape(describe_collapse(worst))}</p>'


def _show(value: tuple[float, float] | None) -> str:
    return "" if value is None or math.isnan(value[0]) else show_interval(*value)


def _html_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Cells are HTML already."""
    header = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'
