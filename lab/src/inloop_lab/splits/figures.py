"""Figures of the split experiment: the three panels of the paper's Figure 2."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inloop_lab.runs.finished import FinishedRun
from inloop_lab.splits.noise import noisy_split

NOISY_COLOUR, OTHER_COLOUR = "#c1272d", "#0b6e99"
_REWARD_COLOURS = {
    "gar": "#0b6e99",
    "nslr": "#b8860b",
    "none": "#777777",
    "oracle": "#3a7d44",
    "loss": "#a03050",
    "exp3": "#7a5ba6",
}


def figure_2(runs: Sequence[FinishedRun]) -> Figure:
    """Split probabilities over epochs for each reward that learns them, with a band over seeds, and training losses; of one network."""
    by_reward = {run.settings["reward"]: run for run in runs}
    learned = [reward for reward in ("nslr", "gar", "loss", "exp3") if reward in by_reward]
    figure = Figure(figsize=(4.2 * (len(learned) + 1), 3.4), layout="constrained")
    axes = figure.subplots(1, len(learned) + 1, squeeze=False)[0]
    for axis, reward in zip(axes, learned, strict=False):
        _probabilities(axis, by_reward[reward], reward.upper())
    _losses(axes[-1], by_reward)
    return figure


def _probabilities(axis: Axes, run: FinishedRun, title: str) -> None:
    p_SEK = np.array([[epoch["probabilities"] for epoch in result["epochs"]] for result in run.results])
    epochs = np.arange(1, p_SEK.shape[1] + 1)
    for split in range(p_SEK.shape[2]):
        noisy = split == noisy_split(run.settings["noise"])
        colour = NOISY_COLOUR if noisy else OTHER_COLOUR
        mean_E, std_E = p_SEK[:, :, split].mean(axis=0), p_SEK[:, :, split].std(axis=0)
        label = "noisy split" if noisy else "other splits" if split == p_SEK.shape[2] - 1 else None
        axis.plot(epochs, mean_E, color=colour, linewidth=2 if noisy else 1, alpha=1 if noisy else 0.6, label=label)
        axis.fill_between(
            epochs, mean_E - std_E, mean_E + std_E, color=colour, alpha=0.25 if noisy else 0.06, linewidth=0
        )
    axis.axhline(1 / p_SEK.shape[2], color="black", linewidth=0.6, linestyle=":")
    axis.set(title=title, xlabel="epoch", ylabel="probability", ylim=(0, None))
    axis.legend(frameon=False, loc="lower left")


def _losses(axis: Axes, by_reward: dict[str, FinishedRun]) -> None:
    for reward, run in by_reward.items():
        # A loss that was not finite is None in a result, and a gap in the figure.
        loss_SE = np.array([[epoch["loss"] for epoch in result["epochs"]] for result in run.results], dtype=float)
        axis.plot(np.arange(1, loss_SE.shape[1] + 1), loss_SE.mean(axis=0), color=_REWARD_COLOURS[reward], label=reward)
    axis.set(title="training loss", xlabel="epoch", ylabel="cross-entropy")
    axis.legend(frameon=False)
