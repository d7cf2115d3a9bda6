"""What each signal sees of each source, with equal shares and a policy that does not move: a figure and its numbers.

    INLOOP_DATA=FOLDER python results/settings/signals.py [--seeds 100]

Four signals: the advantage by the next step (through the optimizer), the advantage by a trail, the mean loss, and the mean excess of the loss over the entropy
of the model's prediction. It continues after an interruption; signals.json has a row for each setting and seed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from problems import SETTINGS, inputs, losses_from

import inloop
from inloop.reporting.html import as_svg

HERE = Path(__file__).parent
OUT = HERE / "signals.json"
SHOWN = {
    "i equal, batch 128": "equal",
    "b group norm": "random labels, 1 of 10",
    "c three of ten": "random labels, 3 of 10",
    "d human, one": "human errors, 1 of 10",
    "d human, three": "human errors, 3 of 10",
    "e two sources, 60%": "60% wrong, 1 of 2",
    "f noise images": "noise images",
    "g shifted labels": "shifted labels",
    "h turned": "turned",
    "h grey": "grey",
    "h one class each": "one class each",
    "m five named": "five named",
    "k text and garbage": "text and garbage",
}
SIGNALS = {
    "next": "advantage, next step",
    "trail": "advantage, trail",
    "loss": "loss,\nabove the median source",
    "excess": "excess of the loss,\nabove the median source",
}


def run(setting: str, seed: int) -> dict[str, Any]:
    """Train once with equal shares, watched by two learners."""
    problem = SETTINGS[setting](seed, False)
    torch.manual_seed(seed)
    model = problem.make_model()
    optimizer = problem.make_optimizer(model)
    mixture = inloop.Mixture(list(problem.sources), generator=torch.Generator().manual_seed(seed + 1000))
    generator = torch.Generator().manual_seed(seed + 2000)
    by_next = inloop.InLoop(
        model, inloop.MixturePolicy(mixture), optimizer=optimizer, update=False, generator=generator
    )
    by_trail = inloop.InLoop(model, inloop.MixturePolicy(mixture), reference="trail", update=False)
    for _ in range(problem.steps):
        actions = by_next.sample(problem.batch)
        by_trail.use(actions)
        x, y = mixture.draw(actions)
        scores = model(inputs(x))
        loss = losses_from(scores, y).mean()
        loss.backward()
        by_next.step(loss, logits=scores, labels=y)
        by_trail.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    seen = by_next.statistics
    assert seen is not None
    assert by_trail.statistics is not None
    values = {
        "next": seen.advantages.estimate()[0],
        "trail": by_trail.statistics.advantages.estimate()[0],
        "loss": seen.signs.losses.mean_K - seen.signs.losses.mean_K.median(),
        "excess": seen.signs.compared_excess.mean_K.nan_to_num(0.0)
        - seen.signs.compared_excess.mean_K.nan_to_num(0.0).median(),
    }
    by_next.close()
    by_trail.close()
    return {
        "setting": setting,
        "seed": seed,
        "wrong": list(problem.wrong),
        **{name: [round(value, 4) for value in values_K.tolist()] for name, values_K in values.items()},
    }


def figure(rows: list[dict[str, Any]]) -> Figure:
    """A panel for each signal: a row for each setting, a mark for each source."""
    drawing = Figure(figsize=(11, 4.6), layout="constrained")
    panels = drawing.subplots(1, len(SIGNALS), sharey=True)
    for panel, (signal, title) in zip(panels, SIGNALS.items(), strict=True):
        for place, setting in enumerate(SHOWN):
            for row in (row for row in rows if row["setting"] == setting):
                for k, value in enumerate(row[signal]):
                    is_wrong = k in row["wrong"]
                    color, marker = ("tab:red", "x") if is_wrong else ("tab:blue", "|")
                    panel.plot(value, place, marker, color=color, markersize=7, markeredgewidth=1.3)
        panel.axvline(0, color="grey", linewidth=0.6, zorder=0)
        panel.set_title(title, fontsize=9)
        panel.tick_params(labelsize=8)
    panels[0].set_yticks(range(len(SHOWN)), list(SHOWN.values()))
    panels[0].invert_yaxis()
    drawing.supxlabel("red: wrong sources, blue: right ones; standard deviations of rewards, nats", fontsize=8)
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="100")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(OUT.read_text())["results"] if OUT.exists() else []
    for seed in map(int, options.seeds.split(",")):
        for setting in SHOWN:
            if (setting, seed) not in {(row["setting"], row["seed"]) for row in rows}:
                rows.append(run(setting, seed))
                OUT.write_text(json.dumps({"results": rows}) + "\n")
                print(f"{setting}, seed {seed}", flush=True)
    (HERE / "signals.svg").write_text(as_svg(figure(rows)))


if __name__ == "__main__":
    main()
