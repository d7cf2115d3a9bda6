"""How the cost of gradient alignment scales with the size of the problem: batch, width, depth, sequence length.

    python -m benchmarks.scaling [--repeats 10] [--out results/cost/scaling.json]

Every point is the ratio to plain training at the same size; it should stay flat. Results are written one by one, and points
in the file are not measured again.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from inloop.reporting.html import as_svg
from inloop_lab.bench.measure import measure_model
from inloop_lab.bench.show import describe, read_bench, write_bench

AXES = {
    "batch size (wrn-16-2)": [("wrn-16-2", batch, batch) for batch in (16, 32, 64, 128)],
    "width (wrn-10-k, batch 32)": [(f"wrn-10-{width}", 32, width) for width in (1, 2, 4, 8)],
    "depth (wrn-d-2, batch 32)": [(f"wrn-{depth}-2", 32, depth) for depth in (10, 16, 22, 28)],
    "sequence length (gpt-2, batch 8)": [(f"gpt-2@{length}", 8, length) for length in (64, 128, 256, 512)],
}


def draw(rows: list[dict]) -> Figure:
    known = {(row["model"], row["batch"]): row for row in rows if "error" not in row}
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axis, (title, points) in zip(figure.subplots(2, 2).flat, AXES.items(), strict=True):
        measured = [(size, known[model, batch]) for model, batch, size in points if (model, batch) in known]
        sizes = [size for size, _ in measured]
        for quantity, marker in (("time_ratio", "o"), ("memory_ratio", "s")):
            values = [row[quantity] for _, row in measured]
            axis.plot(sizes, values, marker=marker, label=quantity.partition("_")[0])
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_ylim(1, 2.5)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("ratio to plain training")
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/cost/scaling.json"))
    options = parser.parse_args()
    rows = read_bench(options.out) if options.out.exists() else []
    for points in AXES.values():
        for model, batch, _ in points:
            if not any((row["model"], row["batch"]) == (model, batch) for row in rows):
                rows.extend(measure_model(model, ["gar"], batch, options.repeats))
                print(f"batch {batch}: {describe(rows[-1])}", flush=True)
                write_bench(rows, options.out)
    options.out.with_suffix(".svg").write_text(as_svg(draw(rows)))


if __name__ == "__main__":
    main()
