"""Writes the tables of the split experiment, from the JSON files beside it, into the pages that have them, and the README's figure.

python results/splits/table.py
"""

import json
from pathlib import Path

from inloop.reporting.html import as_svg
from inloop_lab.page_block import with_block
from inloop_lab.runs.finished import FinishedRun
from inloop_lab.runs.summary import mean_and_interval, show_interval
from inloop_lab.splits.figures import figure_2
from inloop_lab.splits.report import PAPER

COMMAND = "python results/splits/table.py"
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OTHER_NOISE = {
    f"fc-bn-{reward}-{noise}": f"{words}, {reward}"
    for noise, words in (("human", "labels of people, 40% wrong"), ("images", "images of pure noise"))
    for reward in ("gar", "none", "oracle")
}
READINGS = {
    "reading-cnn-bn-linear": "2 x 2 average, linear layer only",
    "reading-cnn-bn-literal-all": "map at its full size, all layers",
    "reading-cnn-bn-maxpool-all": "2 x 2 maximum, all layers",
    "reading-cnn-bn-stride2-all": "stride 2, all layers",
    "reading-cnn-bn-stride2-linear": "stride 2, linear layer only",
    "reading-cnn-bn-stride3-all": "stride 3, all layers",
    "reading-cnn-bn-stride3-linear": "stride 3, linear layer only",
    "reading-cnn-bn-detached-all": "BatchNorm's statistics constant, all layers",
    "reading-cnn-bn-detached-linear": "BatchNorm's statistics constant, linear layer only",
}
STUDIES = {
    "fc-bn-gar": "as in Table 1: batch 1,000, 10 splits, judged by the next batch (10 seeds)",
    "study-batch-100": "batch 100",
    "study-batch-250": "batch 250",
    "study-batch-500": "batch 500",
    "study-sources-5": "5 splits",
    "study-sources-20": "20 splits",
    "study-sources-50": "50 splits",
    "study-reference-previous": "judged by the step before",
    "study-reference-heldout": "judged by a held-out set",
    "study-optimizer-adam": "the model trained by Adam",
}


def interval(run: dict, quantity: str) -> str:
    return show_interval(*mean_and_interval([result[quantity] for result in run["results"]]))


def read(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def row(name: str, label: str, paper: tuple[float, float] | None = None) -> str:
    run = read(name)
    named = sum(0 in result["named"] for result in run["results"])
    wrongly = sum(any(source != 0 for source in result["named"]) for result in run["results"])
    seeds = len(run["results"])
    verdict = f"{named} of {seeds}" + (f" (others in {wrongly})" if wrongly else "") if run["reward"] == "gar" else ""
    papers = (f"{paper[0]:.2f}", f"{paper[1]:.2f}") if paper else ("", "")
    return (
        f"| {label} | {interval(run, 'noisy_area')} | {papers[0]} | {interval(run, 'other_area')} | {papers[1]} "
        f"| {interval(run, 'test_accuracy')} | {verdict} |"
    )


def table(rows: list[str]) -> str:
    head = "| | noisy split | paper | other splits | paper | test accuracy | called bad |"
    if not any(
        cell.strip() for line in rows for cell in (line.split("|")[3], line.split("|")[5])
    ):  # the paper has none of these
        head, *rows = (
            "|".join(part for k, part in enumerate(line.split("|")) if k not in (3, 5)) for line in (head, *rows)
        )
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def main_table() -> str:
    rows = [
        row(f"{network}-{reward}", f"{network}, {reward}", PAPER.get((network, reward)))
        for network in ("fc-bn", "fc", "cnn-bn")
        for reward in ("gar", "nslr", "loss", "exp3", "none", "oracle")
        if network != "cnn-bn" or reward not in ("loss", "exp3")  # not run
    ]
    linear = row("cnn-bn-gar-linear", "cnn-bn, gar, linear layer only", PAPER["cnn-bn", "gar"])
    return table([*rows, linear])


def mean_share(run: dict) -> str:
    """The noisy split's share over training: its area, without the factor that makes it 0.90 for equal use."""
    shares = [result["noisy_area"] / (len(result["areas"]) - 1) for result in run["results"]]
    return show_interval(*mean_and_interval(shares))


def last_share(run: dict) -> str:
    return show_interval(*mean_and_interval([result["epochs"][-1]["probabilities"][0] for result in run["results"]]))


def called_bad(run: dict) -> str:
    return f"{sum(0 in result['named'] for result in run['results'])} of {len(run['results'])}"


def in_brief() -> str:
    """One network, with the learned mixture and the simple ones."""
    labels = {
        "gar": "learned by gradient alignment (`gar`)",
        "none": "uniform",
        "nslr": "learned by the next loss (`nslr`)",
        "loss": "softmax of the losses",
        "exp3": "bandit on the losses (Exp3)",
        "oracle": "oracle: never the noisy split",
    }
    lines = [
        "| mixture | mean share of the noisy split | in the last epoch | test accuracy |",
        "|---|---|---|---|",
    ]
    for reward, label in labels.items():
        run = read(f"fc-bn-{reward}")
        lines.append(f"| {label} | {mean_share(run)} | {last_share(run)} | {interval(run, 'test_accuracy')} |")
    gar, fc, cnn = read("fc-bn-gar"), read("fc-gar"), read("cnn-bn-gar")
    others = (
        f"By its rewards the noisy split is flagged in {called_bad(gar)} seeds. Without BatchNorm the mean share is {mean_share(fc)} ({called_bad(fc)}). On the paper's "
        f"convolutional network, a single channel in front of BatchNorm, it does not work: {mean_share(cnn)} ({called_bad(cnn)})."
    )
    return "\n".join([*lines, "", others])


def figure() -> str:
    """The shares that GAR learns, and training losses between uniform sampling and the oracle."""
    runs = [
        FinishedRun(HERE, {"reward": reward, "noise": "labels"}, read(f"fc-bn-{reward}")["results"])
        for reward in ("gar", "none", "oracle")
    ]
    drawn = figure_2(runs)
    shares, losses = drawn.axes
    shares.set(title="share of each split, as learned", ylabel="share")
    for line, label in zip(losses.lines, ("learned", "uniform", "oracle"), strict=True):
        line.set_label(label)
    losses.legend(frameon=False)
    return as_svg(drawn)


def other_noise() -> str:
    """The results on noise that is not in the paper."""
    human, images = read("fc-bn-gar-human"), read("fc-bn-gar-images")
    named = sum(0 in result["named"] for result in human["results"])
    return (
        f"Beyond the paper (fc-bn): with labels that people got wrong in one split (CIFAR-10N, 40% wrong) its area is "
        f"{interval(human, 'noisy_area')}, though its rewards suffice to call it bad in only {named} of {len(human['results'])} seeds. "
        f"Images of pure noise with their labels are *not* found: {interval(images, 'noisy_area')}, more than their share."
    )


def nslr_moves() -> str:
    """NSLR's policy is not simply stuck: the areas of single splits in single seeds."""
    run = read("fc-bn-nslr")
    all_areas = [area for result in run["results"] for area in result["areas"]]
    noisiest = sum(result["areas"][0] == min(result["areas"]) for result in run["results"])
    return (
        f"NSLR's policy does move: on fc-bn the area of a single split in a single seed lies between {min(all_areas):.2f} and "
        f"{max(all_areas):.2f}. But it moves at random; the noisy split is the least used one in {noisiest} of {len(run['results'])} "
        "seeds. As the loss hardly changes from step to step, its walk is decided by which splits happened to be drawn, so the "
        "same seed walks nearly the same way on fc and fc-bn."
    )


def other_tables() -> str:
    tables = {
        "Other noise in one split (fc-bn)": OTHER_NOISE,
        "Readings of CNN_BN, 3 seeds": READINGS,
        "What matters (fc-bn, gar, 3 seeds)": STUDIES,
    }
    return "\n".join(
        f"## {title}\n\n{table([row(name, label) for name, label in labels.items()])}\n"
        for title, labels in tables.items()
    )


def pages() -> dict[Path, str]:
    """The pages and the figure, from the committed numbers."""
    everything = f"## Table 1 of the paper\n\n{main_table()}\n\n{nslr_moves()}\n\n{other_tables()}".rstrip()
    contents = {
        ROOT / "README.md": in_brief(),
        ROOT / "docs" / "results.md": f"{in_brief()}\n\n{other_noise()}",
        ROOT / "docs" / "guides" / "find-a-bad-source.md": main_table(),
        HERE / "README.md": everything,
    }
    texts = {path: with_block(path.read_text(), COMMAND, content) for path, content in contents.items()}
    return texts | {HERE / "shares.svg": figure()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
