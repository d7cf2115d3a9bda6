"""Writes the tables of the augmentation experiment, from the JSON files beside it, into the pages that have them.

python results/augment/table.py
"""

import json
import math
import statistics
from pathlib import Path

from inloop_lab.page_block import with_block
from inloop_lab.runs.summary import mean_and_interval, show_interval

COMMAND = "python results/augment/table.py"
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ARMS = {
    "none": "crop and flip only",
    "ua-ra": "UniformAugment, RA",
    "ua-wl": "UniformAugment, WideLong",
    "ta-ra": "TrivialAugment, RA",
    "ta-wl": "TrivialAugment, WideLong",
    "ra-ra": "RandAugment, RA",
    "ra-wl": "RandAugment, WideLong",
    "ola-ra": "OLA (learned), RA, no plain steps",
    "ola-wl": "OLA (learned), WideLong, no plain steps",
    "ola-ra-paper": "OLA (learned), RA, the paper's way",
}
TRIALS = {
    "none": "crop and flip only",
    "ua-ra": "UniformAugment, RA",
    "ra-ra-1-14": "RandAugment, RA, 1 operation of strength 14",
    "ra-ra-2-7": "RandAugment, RA, 2 operations of strength 7",
    "ra-ra-2-14": "RandAugment, RA, 2 operations of strength 14",
    "ra-wl-1-7": "RandAugment, WideLong, 1 operation of strength 7",
    "ra-wl-1-14": "RandAugment, WideLong, 1 operation of strength 14",
    "ola-ra": "OLA, RA, the paper's way",
    "ola-ra-slow": "OLA, RA, its learning rate 0.02",
    "ola-ra-no-plain": "OLA, RA, no plain steps",
    "ola-ra-slow-no-plain": "OLA, RA, its learning rate 0.02, no plain steps",
    "ola-ra-centred": "OLA, RA, rewards centred only",
    "ola-ra-heldout": "OLA, RA, judged by a held-out set",
}

WHY = (
    "The reward is an example's effect on the loss of the next training batch. Augmented images are harder to fit, and their benefit, less "
    "memorising, does not show in that loss. So the policy drops operations as training goes on, most of all where the next "
    "batch is plain (the paper's way), and the network fits its training images nearly as well as without augmentation. In the RA space, "
    "where all operations help, that costs their benefit. In WideLong uniform augmentation is too much for 4,000 images and 50 epochs, so "
    "it helps there. Within one way of learning, how much is kept explains little of how seeds differ. "
    "A held-out reference would see memorising, but did not help in its one validation run; the reason was not studied."
)


def read(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def accuracies(run: dict) -> dict[int, float]:
    judged = "test_accuracy" if run["test_accuracy"] is not None else "validation_accuracy"
    return {result["seed"]: 100 * result[judged] for result in run["results"]}


def difference(run: dict, name: str) -> str:
    """Mean paired difference to another run, in points, over the seeds of both."""
    other = read(name)
    ours, theirs = accuracies(run), accuracies(other)
    pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    mean, half_width = mean_and_interval(pairs)
    return f"{mean:+.2f}" if math.isnan(half_width) else f"{mean:+.2f} ± {half_width:.2f}"


def comparison() -> str:
    lines = ["| | test accuracy, % | against none, paired | against UA, same space | seeds |", "|---|---|---|---|---|"]
    for name, label in ARMS.items():
        run = read(name)
        accuracy = show_interval(*mean_and_interval(list(accuracies(run).values())), 2)
        space = run["space"]
        against_none = "" if name == "none" else difference(run, "none")
        against_ua = "" if name == "none" or name.startswith("ua") else difference(run, f"ua-{space}")
        lines.append(f"| {label} | {accuracy} | {against_none} | {against_ua} | {len(run['results'])} |")
    return "\n".join(lines)


def verdict() -> str:
    """Whether OLA beats UniformAugment here."""
    parts = []
    for name, label in ARMS.items():
        run = read(name)
        if name.startswith("ola"):
            parts.append(f"{label.removeprefix('OLA (learned), ')}: {difference(run, 'ua-' + run['space'])}")
    return (
        f"Against UniformAugment in the same space, in points of accuracy, OLA is: {'; '.join(parts)}. So at this scale it does **not** beat "
        "UniformAugment where all operations help, and does where many harm; why is in [results](../results/augment.md)."
    )


def choices() -> str:
    lines = ["| | accuracy on 4,000 other training images, %, one seed |", "|---|---|"]
    for name, label in TRIALS.items():
        lines.append(f"| {label} | {next(iter(accuracies(read(f'validation-{name}')).values())):.2f} |")
    return "\n".join(lines)


def harmful() -> str:
    run = read("harmful")
    lines = [
        "| how it learns | identity | shift_one | erase | flip_ud | harmful at most 0.1 | and below every benign one |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in run["options"]:
        results = [result for result in run["results"] if result["variant"] == variant]
        if not results:
            continue
        cells = []
        for name in ("identity", "shift_one", "erase", "flip_ud"):
            values = [result["keep"][name] for result in results]
            cells.append(f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        counts = [f"{sum(result[what] for result in results)} of {len(results)}" for what in ("dropped", "ranked")]
        lines.append(f"| {variant} | {' | '.join(cells)} | {' | '.join(counts)} |")
    return "\n".join(lines)


def speed() -> str:
    run = read("speed")
    lines = [
        "| policy | inloop, ms | Pillow, ms | ratio | Pillow with conversion from and to tensors, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['policy']} | {row['inloop_ms']:.2f} | {row['pillow_ms']:.2f} | {row['ratio']:.2f} | "
        f"{row['pillow_with_conversion_ms']:.2f} | {row['ratio_with_conversion']:.2f} |"
        for row in run["policies"]
    ]
    return "\n".join(lines)


def operations() -> str:
    run = read("speed")
    lines = ["| operation | inloop, ms | Pillow, ms | kornia, ms |", "|---|---|---|---|"]
    for row in run["operations"]:
        kornia = f"{row['kornia_ms']:.2f}" if "kornia_ms" in row else ""
        lines.append(f"| {row['operation']} | {row['inloop_ms']:.2f} | {row['pillow_ms']:.2f} | {kornia} |")
    return "\n".join(lines)


def amount(epoch: dict) -> float:
    """How many operations an image is expected to go through: the number drawn times the mean probability of being kept."""
    drawn = sum((r + 1) * p for r, p in enumerate(epoch["number"]))
    return drawn * statistics.mean(epoch["keep"])


def why() -> str:
    """How much OLA augments in the course of training, and how well it fits the training images."""
    at = (1, 5, 10, 25, 50)
    lines = [
        f"| | operations an image, after epoch {', '.join(map(str, at))} | loss at the end, training images | its correlation with accuracy |",
        "|---|---|---|---|",
    ]
    for name, label in ARMS.items():
        run = read(name)
        loss = statistics.mean(result["epochs"][-1]["loss"] for result in run["results"])
        amounts, correlation = "", ""
        if name.startswith("ola"):
            means = [statistics.mean(amount(r["epochs"][epoch - 1]) for r in run["results"]) for epoch in at]
            amounts = ", ".join(f"{value:.2f}" for value in means)
            total = [statistics.mean(map(amount, r["epochs"])) for r in run["results"]]
            if len(total) > 2:
                correlation = f"{statistics.correlation(total, list(accuracies(run).values())):+.2f}"
        lines.append(f"| {label} | {amounts} | {loss:.2f} | {correlation} |")
    return "\n".join([*lines, "", WHY])


def learned() -> str:
    """OLA's policies at the end: mean keep probabilities over seeds."""
    lines = ["| operation | OLA, RA: kept | OLA, WideLong: kept |", "|---|---|---|"]
    runs = {space: read(f"ola-{space}") for space in ("ra", "wl")}
    keep: dict[str, dict[str, float]] = {"ra": {}, "wl": {}}
    for space, run in runs.items():
        for a, name in enumerate(run["results"][0]["operations"]):
            keep[space][name] = statistics.mean(result["epochs"][-1]["keep"][a] for result in run["results"])
    for name in keep["wl"]:
        cells = [f"{keep[space][name]:.2f}" if name in keep[space] else "" for space in ("ra", "wl")]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def cost() -> str:
    run = read("cost")
    return (
        f"A step of OLA takes {run['time_ratio']:.2f} times as long as one of UniformAugment ({run['network']}, batch {run['batch']}, "
        f"{run['threads']} threads, medians of {run['repeats']} alternating pairs of steps; `python -m benchmarks.ola_cost`)."
    )


def preset() -> str:
    run = read("preset")
    first, *others = run["steps"]
    return (
        f"`python -m benchmarks.paper_recipe --steps {len(run['steps'])}` on random images: {run['network']}, batch {run['batch']}, "
        f"{run['parameters'] / 1e6:.1f} million parameters, {run['policy_parameters']} of the policy; {run['peak_gigabytes']:.1f} GB at most, "
        f"{first['seconds']:.0f} s for the first step, {others[-1]['seconds']:.0f} s for the last, which rewarded the one before it and moved the policy. "
        "A whole run of 200 epochs (39,000 steps) is beyond our 2 CPU cores, so none of Table 2's own rows was reproduced."
    )


def speed_in_brief() -> str:
    run = read("speed")
    row = run["policies"][0]
    return (
        f"Augmenting {run['batch']} images under a new WideLong policy takes {row['inloop_ms']:.1f} ms, Pillow {row['pillow_ms']:.1f} ms for the same "
        f"operations one image at a time, and {row['pillow_with_conversion_ms']:.1f} ms with conversion from and to tensors ({run['threads']} "
        "threads; `python -m benchmarks.augment_speed`)."
    )


def harmful_in_brief() -> str:
    run = read("harmful")
    passed = []
    for variant in run["options"]:
        results = [result for result in run["results"] if result["variant"] == variant]
        if len(results) == 5 and all(result["dropped"] and result["ranked"] for result in results):
            passed.append(variant)
    return (
        "On the digits, operations that harm (erasing the image, turning it upside down) are kept with a probability of at most 0.1, and less "
        f"than every benign one, in 5 of 5 seeds with: {'; '.join(passed)}. The paper's own way does so in most seeds, not in all. What else "
        "matters, and that benign operations fade, too, is in [results](../results/augment.md)."
    )


def in_brief() -> str:
    return "\n\n".join((comparison(), verdict(), harmful_in_brief(), cost(), speed_in_brief()))


def in_full() -> str:
    parts = {
        "CIFAR-10 with 4,000 training images": comparison(),
        "What was chosen on other training images": choices(),
        "What OLA learned: keep probabilities at the end, mean over seeds": learned(),
        "How much OLA augments, and how well it fits": why(),
        "What OLA costs": cost(),
        "The paper's full recipe": preset(),
        "Operations that harm": harmful(),
        "Speed of augmenting 256 images of 32 x 32 under WideLong": speed(),
        "Single operations on 256 images": operations(),
    }
    return "\n\n".join(f"## {title}\n\n{content}" for title, content in parts.items())


def pages() -> dict[Path, str]:
    """The pages, with the tables of the committed numbers."""
    contents = {ROOT / "docs" / "guides" / "learn-augmentation.md": in_brief(), HERE / "README.md": in_full()}
    return {path: with_block(path.read_text(), COMMAND, content) for path, content in contents.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
