"""Writes the tables on hazards, from the JSON files beside it, into README.md here and docs/when-not-to-use-it.md, and a figure.

python results/hazards/table.py
"""

import json
import statistics
from collections import Counter
from pathlib import Path

from matplotlib.figure import Figure

from inloop.reporting.html import as_svg
from inloop_lab.page_block import with_block

COMMAND = "python results/hazards/table.py"
HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
WHAT = {
    "three turned": "digits; three of ten sources turned by ninety degrees, labels right",
    "three contradict": "digits; three of ten sources with another numbering of the classes",
    "one digit each": "digits; each source holds one class",
    "text": "text; eight domains, and a ninth source of bytes in random order",
}
ODD = {"three turned": (7, 8, 9), "three contradict": (7, 8, 9), "one digit each": (), "text": (0,)}


def read(name: str) -> list[dict]:
    return json.loads((HERE / f"{name}.json").read_text())["results"]


def mean_over(runs: list[dict], value: str, sources: list[int]) -> float:
    return statistics.mean(run[value][k] for run in runs for k in sources)


def row(kind: str, arm: str, runs: list[dict]) -> str:
    """Shares and held-out quality of the odd sources and of the others, and the sources called bad."""
    odd = list(ODD[kind])
    others = [k for k in range(len(runs[0]["shares"])) if k not in odd]
    quality, digits = ("held_out_loss", 2) if kind == "text" else ("held_out_accuracy", 3)
    share = f"{sum(mean_over(runs, 'shares', [k]) for k in odd):.2f}" if odd else ""
    largest = statistics.mean(max(run["shares"]) for run in runs)
    of_odd = f"{mean_over(runs, quality, odd):.{digits}f}" if odd and kind != "text" else ""
    named = [
        f"{statistics.mean(len(set(run['named']) & set(group)) for run in runs):.1f}" if group else ""
        for group in (odd, others)
    ]
    worst = [(max if kind == "text" else min)(run[quality][k] for k in others) for run in runs]
    return (
        f"| {arm} | {share} | {largest:.2f} | {mean_over(runs, quality, others):.{digits}f} | {statistics.mean(worst):.{digits}f} "
        f"| {of_odd} | {named[0]} | {named[1]} |"
    )


def different() -> str:
    parts = []
    results = read("digits") + read("text")
    for kind, what in WHAT.items():
        runs = [run for run in results if run["kind"] == kind]
        seeds = len({run["seed"] for run in runs})
        quality = "loss" if kind == "text" else "accuracy"
        lines = [
            f"**{what[0].upper()}{what[1:]}** ({seeds} seeds).",
            "",
            f"| | share of the odd | largest share | {quality} on the others | on the worst of them | on the odd | odd called bad{f', of {len(ODD[kind])}' if ODD[kind] else ''} | others, of {len(runs[0]['shares']) - len(ODD[kind])} |",
            "|---|---|---|---|---|---|---|---|",
        ]
        arms = dict.fromkeys(run["arm"] for run in runs)
        lines += [row(kind, arm, [run for run in runs if run["arm"] == arm]) for arm in arms]
        if kind == "text":
            lines += ["", who_was_called_bad(runs)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def who_was_called_bad(runs: list[dict]) -> str:
    """By name, over all arms and seeds."""
    times = Counter(run["names"][source] for run in runs for source in run["named"])
    parts = [f"{name} in {count}" for name, count in times.most_common()]
    return f"Called bad, of {len(runs)} runs: {', '.join(parts)}."


def few_sources(data: str) -> str:
    """Two sources, one partly mislabelled, judged by the next batch and by a validation set."""
    runs = read(f"few-sources-{data}")
    lines = [
        "| wrong labels | judge | share of the source at the end: mean (largest) | called bad | accuracy |",
        "|---|---|---|---|---|",
    ]
    judges = {"uniform": "none, equal shares", "gar": "next batch", "gar, held-out": "validation set"}
    for wrong in sorted({run["wrong"] for run in runs}):
        for arm, judge in judges.items():
            of_arm = [run for run in runs if run["wrong"] == wrong and run["arm"] == arm]
            if not of_arm:
                continue
            shares = [run["share"] for run in of_arm]
            lines.append(
                f"| {wrong:.0%} | {judge} | {statistics.mean(shares):.2f} ({max(shares):.2f}) | {sum(run['called_bad'] for run in of_arm)} of {len(of_arm)} "
                f"| {statistics.mean(run['accuracy'] for run in of_arm):.3f} |"
            )
    return "\n".join(lines)


def few() -> str:
    return (
        "Digits, a perceptron; 360 images with right labels, 1,139 with a share of random ones.\n\n"
        f"{few_sources('digits')}\n\n"
        "CIFAR-10, a small convolutional network with BatchNorm, Adam; 5,000 images with right labels, 15,000 with a share of random ones.\n\n"
        f"{few_sources('cifar10')}"
    )


def batches() -> str:
    lines = [
        "| batch | noisy split's area | it is the least used | called bad | equal splits: smallest area | largest area | called bad |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch in (8, 32, 128, 250):
        noisy, equal = read(f"batch-{batch}-labels"), read(f"batch-{batch}-none")
        least = sum(run["areas"][0] == min(run["areas"]) for run in noisy)
        named = sum(0 in run["named"] for run in noisy)
        wrongly = sum(bool(run["named"]) for run in equal)
        lines.append(
            f"| {batch} | {statistics.mean(run['noisy_area'] for run in noisy):.2f} | {least} of {len(noisy)} | {named} of {len(noisy)} "
            f"| {min(min(run['areas']) for run in equal):.2f} | {max(max(run['areas']) for run in equal):.2f} | {wrongly} of {len(equal)} |"
        )
    note = (
        "Digits in ten splits, `fc-bn`, the same number of examples for each batch size; left the first split has random labels, right all are equal, where an area of "
        "0.90 would be right for each."
    )
    return "\n".join([note, "", *lines])


def batchnorm() -> str:
    lines = ["| batch | difference, share of the rewards' norm | correlation |", "|---|---|---|"]
    lines += [
        f"| {run['batch']} | {run['difference']:.2f} | {run['correlation']:.3f} |"
        for run in read("batchnorm")
        if run["network"] == "fc-bn"
    ]
    largest = max(run["difference"] for run in read("batchnorm") if run["network"] == "fc")
    note = f"Digits, one hidden layer with BatchNorm, rewards by path against rewards by loss. (Without BatchNorm the difference is at most {largest:.0e}.)"
    return "\n".join([note, "", *lines])


PARTS = {"different": different, "few": few, "batches": batches, "batchnorm": batchnorm}


def figure() -> Figure:
    """Rewards both ways without and with BatchNorm, and how much they differ by batch size."""
    runs = read("batchnorm")
    drawn = Figure(figsize=(10, 3.3), layout="constrained")
    axes = drawn.subplots(1, 3)
    for axis, network, title in zip(axes, ("fc", "fc-bn"), ("without BatchNorm", "with BatchNorm"), strict=False):
        by_path, by_loss = next(run["rewards"] for run in runs if run["network"] == network and run["batch"] == 64)
        axis.axline((0, 0), slope=1, color="#999999", linewidth=0.8)
        axis.scatter(by_loss, by_path, s=14, color="#0b6e99", alpha=0.7)
        axis.set(title=title, xlabel="reward by loss", ylabel="reward by path (inloop)")
    for network, colour in (("fc", "#777777"), ("fc-bn", "#c1272d")):
        points = [(run["batch"], run["difference"]) for run in runs if run["network"] == network]
        axes[2].plot(*zip(*points, strict=True), marker="o", color=colour, label=network)
    axes[2].set(title="difference, share of the norm", xlabel="batch", xscale="log", ylim=(-0.02, None))
    axes[2].set_xticks([8, 32, 128, 512], ["8", "32", "128", "512"], minor=False)
    axes[2].minorticks_off()
    axes[2].legend(frameon=False)
    return drawn


def pages() -> dict[Path, str]:
    """The two pages and the figure, from the committed numbers."""
    own, guide = HERE / "README.md", DOCS / "when-not-to-use-it.md"
    titles = {
        "different": "Sources that are different",
        "few": "Few sources, one of them partly wrong",
        "batches": "Small batches",
        "batchnorm": "BatchNorm",
    }
    everything = "\n\n".join(f"## {titles[name]}\n\n{part()}" for name, part in PARTS.items())
    text = guide.read_text()
    for name, part in PARTS.items():
        text = with_block(text, f"{COMMAND} {name}", part())
    texts = {own: with_block(own.read_text(), COMMAND, everything), guide: text}
    return texts | {DOCS / "figures" / "batchnorm.svg": as_svg(figure())}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content)
