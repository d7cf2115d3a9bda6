"""Writes the numbers of `run.sh` as tables: README.md here, the project's README, and the page on cost.

python results/cost/table.py
"""

import json
from pathlib import Path

from inloop_lab.page_block import with_block

COMMAND = "python results/cost/table.py"
HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
MIXED = ("gpt-6+bf16", "vit-tiny+bf16", "wrn-16-4+bf16")
MODELS = ("wrn-16-4", "wrn-28-10", "wrn-16-4-gn", "wrn-28-10-gn", "vit-tiny", "gpt-6", "mlp")
OURS = ("gar", "gar-interleaved", "gar-part", "gar-trail", "gar-half", "gar-recompute")
OTHERS = ("metagradient", "metagradient-unrolled", "higher", "torchopt", "vmap", "jvp", "opacus", "backpack")


def read(name: str) -> tuple[dict[tuple[str, str], dict], list[dict]]:
    """Measured rows by model and mode, and the skipped rows."""
    parts = json.loads((HERE / name).read_text())
    return {(row["model"], row["mode"]): row for row in parts["results"]}, parts["skipped"]


def cell(row: dict | None) -> str:
    return "" if row is None else f"{row['time_ratio']:.2f} / {row['memory_ratio']:.2f}"


def table(rows: dict[tuple[str, str], dict], modes: tuple[str, ...]) -> str:
    models = [model for model in MODELS if any((model, mode) in rows for mode in modes)]
    heads = [
        f"{model}, batch {next(row['batch'] for (name, _), row in rows.items() if name == model)}" for model in models
    ]
    lines = [f"| time / memory | {' | '.join(heads)} |", "|---|" + "---|" * len(models)]
    for mode in modes:
        cells = [cell(rows.get((model, mode))) for model in models]
        if any(cells):
            lines.append(f"| `{mode}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def under_autocast() -> str:
    """Time and memory in bfloat16, beside float32, and how exact rewards are there."""
    rows, _ = read("bench.json")
    errors = {row["model"]: row for row in json.loads((HERE / "autocast_error.json").read_text())["results"]}
    lines = []
    for model in MIXED:
        plain = model.removesuffix("+bf16")
        found = errors.get(plain) or errors[f"{plain}-gn"]
        lines.append(
            f"| {plain} | {cell(rows.get((plain, 'gar')))} | {cell(rows.get((model, 'gar')))} | {cell(rows.get((model, 'gar-interleaved')))} | "
            f"{found['inloop_median']:.4f} ({found['inloop_largest']:.4f}) | {found['brute_force_median']:.4f} ({found['brute_force_largest']:.4f}) |"
        )
    note = (
        "Time / memory as ratios to plain training under the same autocast (`inloop bench --models gpt-6+bf16`). Errors of rewards under autocast against float32, as shares of the rewards' standard "
        "deviation within a batch, median (largest), of inloop and of one backward pass for each example under the same autocast (`python -m benchmarks.autocast_error`; the residual network has "
        "GroupNorm there)."
    )
    heads = "| model | float32, `gar` | bfloat16, `gar` | bfloat16, `gar-interleaved` | error of inloop | error of brute force |"
    return "\n".join([note, "", heads, "|---|---|---|---|---|---|", *lines])


def overhead() -> str:
    """Kernels, waits and the host's time."""
    found = json.loads((HERE / "overhead.json").read_text())
    lines = [
        f"| {row['model']} | {'yes' if row['told'] else 'no'} | {row['kernels_plain']} | {row['kernels']} ({row['kernels'] / row['kernels_plain']:.2f}) | {row['host_syncs']} |"
        for row in found["models"]
    ]
    times = [
        f"| {'now' if name == 'now' else f'before ({name})'} | {own['host_us_per_call']:.0f} | {own['host_us_per_step']:.0f} |"
        for name, own in found["took_turns"].items()
    ]
    note = (
        "A step without and with a learner that knows its AdamW, told logits and labels or not, on the pretend device (`python -m benchmarks.overhead`). *Kernels*: torch operations that compute, of "
        "forward, backward and `learner.step`. *Waits*: how often the learner makes the host wait for the device."
    )
    below = "The host's time that a learner adds, in microseconds, one thread, medians of 200 steps, now and before it was made fast, alternated:"
    return "\n".join(
        [
            note,
            "",
            "| model | told logits | kernels of a plain step | with a learner | waits |",
            "|---|---|---|---|---|",
            *lines,
            "",
            below,
            "",
            "| code | for each layer call | for the step beside them |",
            "|---|---|---|",
            *times,
        ]
    )


def without_trimming() -> str:
    """Interleaving while the allocator keeps freed memory."""
    rows, _ = read("bench.json")
    kept, _ = read("untrimmed.json")
    lines = [
        f"| `{mode}` | {cell(rows.get(('gpt-6', mode)))} | {cell(kept.get(('gpt-6', mode)))} |"
        for mode in ("gar", "gar-interleaved")
    ]
    note = (
        "gpt-6, as it is, and with `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` at 8000000000. With interleaving the tape is freed and filled again every second step. The C library gives its memory "
        "back to the system in between, and has to ask for it again; on a GPU torch keeps what is freed."
    )
    return "\n".join([note, "", "| time / memory | as it is | freed memory kept |", "|---|---|---|", *lines])


def spread(rows: dict[tuple[str, str], dict]) -> str:
    lines = ["| model | mode | time: median (quartiles) | repeats | seconds | peak MB |", "|---|---|---|---|---|---|"]
    for (model, mode), row in sorted(rows.items(), key=lambda item: (*MODELS, *MIXED).index(item[0][0])):
        low, high = row["time_ratio_quartiles"]
        lines.append(
            f"| {model} | {mode} | {row['time_ratio']:.2f} ({low:.2f} to {high:.2f}) | {row['repeats']} | "
            f"{row['seconds']:.3f} | {row['peak_bytes'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


def added_time(rows: dict[tuple[str, str], dict]) -> str:
    """How much less time gradient alignment adds than the direct meta-gradient."""
    parts = []
    for model in MODELS:
        ours, theirs = rows.get((model, "gar")), rows.get((model, "metagradient"))
        if ours and theirs and ours["time_ratio"] > 1:
            factor = (theirs["time_ratio"] - 1) / (ours["time_ratio"] - 1)
            parts.append(f"{model} {factor:.1f}")
    return ", ".join(parts)


def half_error() -> str:
    lines = [
        f"| {row['model']} | {row['batch']} | {row['median']:.1e} | {row['largest']:.1e} |"
        for row in json.loads((HERE / "half_error.json").read_text())["results"]
    ]
    heads = "| model | batch | median error | largest error |"
    note = "As a share of the rewards' standard deviation within the batch, after ten steps (`python -m benchmarks.half_error`)."
    return "\n".join([note, "", heads, "|---|---|---|---|", *lines])


def scaling() -> str:
    lines = [
        f"| {row['model']} | {row['batch']} | {row['time_ratio']:.2f} | {row['memory_ratio']:.2f} |"
        for row in json.loads((HERE / "scaling.json").read_text())["results"]
    ]
    return "\n".join(["| model | batch | time | memory |", "|---|---|---|---|", *lines])


def checkpointing() -> str:
    result = json.loads((HERE / "checkpointing.json").read_text())
    lines = [
        f"| {row['kind']} | {row['time_ratio']:.2f} | {row['memory_ratio']:.2f} | {row['peak_bytes'] / 1e6:.0f} |"
        for row in result["rows"]
    ]
    note = (
        f"{result['model']} at batch {result['batch']}, every block checkpointed (`python -m benchmarks.checkpointing`); ratios to plain training "
        "without checkpoints, from the fifth step on."
    )
    return "\n".join([note, "", "| | time | memory | peak MB |", "|---|---|---|---|", *lines])


def layer_subsets() -> str:
    """How well a few layers' reward stands for the reward of all, and their share of the tape."""
    results = json.loads((HERE / "layer_subsets.json").read_text())["results"]
    sets = list(dict.fromkeys(row["layers"] for result in results for row in result["rows"]))
    lines = [f"| layers | {' | '.join(result['model'] for result in results)} |", "|---" * (len(results) + 1) + "|"]
    for name in sets:
        cells = []
        for result in results:
            found = [row for row in result["rows"] if row["layers"] == name]
            shown = [f"{found[0][name]:.2f}" for name in ("correlation", "kept")] if found else []
            cells.append(" / ".join(shown))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    note = (
        f"Correlation of a few layers' reward with the reward of all, within a step, and the share of the whole tape that these layers keep. Means over {results[0]['steps'] - 21} steps, early in training "
        "on CIFAR-10 and on text (`python -m benchmarks.layer_subsets`)."
    )
    return "\n".join([note, "", *lines])


def first_step() -> str:
    """What the first step of a learner takes: it probes the model and verifies itself."""
    lines = [
        f"| {row['model']} | {row['plain_first_seconds']:.2f} | {row['first_seconds']:.2f} | {row['steady_seconds']:.2f} | {row['time_ratio']:.1f} | {row['memory_ratio']:.2f} |"
        for row in json.loads((HERE / "first_step.json").read_text())["results"]
    ]
    note = (
        "The first step finds out where the examples are in each layer's output, which takes up to three more passes through the model, and verifies that the examples add up to every gradient "
        "(`python -m benchmarks.first_step`). Seconds of the first step without and with a learner, and of a later step with one; time and peak memory of the first step with a learner, as ratios to a "
        "first step without."
    )
    heads = "| model | first, plain | first, learner | later, learner | time | memory |"
    return "\n".join([note, "", heads, "|---|---|---|---|---|---|", *lines])


def knows_optimizer() -> str:
    """What ``optimizer=`` costs, with AdamW."""
    lines = []
    for row in json.loads((HERE / "optimizer.json").read_text())["results"]:
        low, high = row["difference_quartiles"]
        lines.append(
            f"| {row['model']} | {row['learner']:.2f} | {row['knows_optimizer']:.2f} | {row['difference']:+.3f} ({low:+.3f} to {high:+.3f}) | {row['repeats']} |"
        )
    note = (
        "Time of a step with AdamW, as ratios to the same step without a learner: a learner without `optimizer=`, and one with it. They take turns in one process; the difference is the median over "
        "turns, with quartiles (`python -m benchmarks.optimizer_cost`). The product with AdamW's step sizes is one pass over the parameters, which only a model of few examples' work notices."
    )
    heads = "| model | learner | with `optimizer=` | difference | repeats |"
    return "\n".join([note, "", heads, "|---|---|---|---|---|", *lines])


def redesign() -> str:
    """The engine before and after its redesign, alternated in one run."""
    lines = []
    for row in json.loads((HERE / "redesign.json").read_text())["results"]:
        old, new = row["old"], row["new"]
        low, high = new["difference_quartiles"]
        lines.append(
            f"| {row['model']} | {row['mode']} | {row['repeats']} | {old['time_ratio']:.3f} | {new['time_ratio']:.3f} | {new['difference']:+.3f} ({low:+.3f} to {high:+.3f}) "
            f"| {old['memory_ratio']:.3f} | {new['memory_ratio']:.3f} |"
        )
    note = (
        "Ratios to plain training of the code before the redesign (3d46fe7) and after it (14ff9b3), which took turns in one run; the difference is the median over turns, with quartiles (`python -m "
        "benchmarks.alternate old=... new=...`). Two rows were measured again with more repeats, since their first differences were above 0.03 with quartiles on both sides of it. The old engine used the memory of gradients "
        "again within a backward pass; without that it took 0.003 more (-0.071 to +0.071; wrn-16-4, `gar`, nine repeats, two threads), so the redesign left it out."
    )
    heads = "| model | mode | repeats | time before | after | difference | memory before | after |"
    return "\n".join([note, "", heads, "|---|---|---|---|---|---|---|---|", *lines])


def all_modes() -> str:
    rows, _ = read("bench.json")
    return table(rows, (*OURS, *OTHERS))


def in_brief() -> str:
    """The models that people know, and one mode of each kind."""
    rows, _ = read("bench.json")
    known = {key: row for key, row in rows.items() if key[0] in ("wrn-16-4", "wrn-28-10", "vit-tiny", "gpt-6")}
    return table(known, ("gar", "gar-part", "gar-trail", "gar-half", "vmap", "opacus", "metagradient", "higher"))


def in_full() -> str:
    rows, skipped = read("bench.json")
    parts = {
        "All modes: time / memory, as ratios to plain training": all_modes(),
        "How many times less time `gar` adds than `metagradient`": added_time(rows),
        "Spread": spread(rows),
        'What `retain="half"` does to rewards': half_error(),
        "Under autocast in bfloat16": under_autocast(),
        "Kernels, waits and the host's time": overhead(),
        "Interleaving and the allocator": without_trimming(),
        "Scaling of `gar`": scaling(),
        "Activation checkpointing": checkpointing(),
        "A few layers for all": layer_subsets(),
        "The first step": first_step(),
        "Rewards that know the optimizer": knows_optimizer(),
        "Before and after the redesign": redesign(),
        "Not measured": "\n".join(f"- {row['model']}, {row['mode']}: {row['error']}" for row in skipped),
    }
    return "\n\n".join(f"## {title}\n\n{content}" for title, content in parts.items() if content)


def pages() -> dict[Path, str]:
    """The pages, with the tables of the committed numbers."""
    contents = {
        PROJECT / "README.md": in_brief(),
        PROJECT / "docs" / "cost.md": all_modes(),
        HERE / "README.md": in_full(),
    }
    pages = {path: with_block(path.read_text(), COMMAND, content) for path, content in contents.items()}
    cost = PROJECT / "docs" / "cost.md"
    with_layers = with_block(pages[cost], f"{COMMAND} layers", layer_subsets())
    with_first = with_block(with_layers, f"{COMMAND} first", first_step())
    gpu = PROJECT / "docs" / "gpu.md"
    with_overhead = with_block(gpu.read_text(), f"{COMMAND} overhead", overhead())
    return pages | {
        cost: with_block(with_first, f"{COMMAND} autocast", under_autocast()),
        gpu: with_overhead,
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
