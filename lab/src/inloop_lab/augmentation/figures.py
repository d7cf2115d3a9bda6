"""Figures of a learned augmentation policy: keep probabilities, strengths, numbers, and images under it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from inloop.augment import AugmentPolicy, Space, apply


def _mean(results: Sequence[dict[str, Any]], what: str) -> "np.ndarray[Any, Any]":
    """Mean over seeds of each epoch's record of ``what``; first axis epochs."""
    mean: np.ndarray[Any, Any] = np.array([[epoch[what] for epoch in result["epochs"]] for result in results]).mean(
        axis=0
    )
    return mean


def policy_over_time(results: Sequence[dict[str, Any]]) -> Figure:
    """Keep probability and mean strength of each operation, and how many operations, by epoch; means over seeds."""
    operations = results[0]["operations"]
    keep_EA, strength_EA, number_ER = (_mean(results, what) for what in ("keep", "mean_strength", "number"))
    epochs = len(keep_EA)
    figure = Figure(figsize=(13, 1.4 + 0.24 * len(operations)), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(5, 5, 3))
    panels = (
        ("kept with probability", keep_EA, 0, 1, "viridis"),
        ("mean strength of 0..30", strength_EA, 5, 25, "coolwarm"),
    )
    for axis, (title, values_EA, low, high, colours) in zip(axes, panels, strict=False):
        image = axis.imshow(
            values_EA.T,
            aspect="auto",
            vmin=low,
            vmax=high,
            cmap=colours,
            extent=(0.5, epochs + 0.5, len(operations) - 0.5, -0.5),
        )
        axis.set(title=title, xlabel="epoch", yticks=range(len(operations)), yticklabels=operations)
        figure.colorbar(image, ax=axis, fraction=0.05)
    for r in range(number_ER.shape[1]):
        axes[2].plot(np.arange(1, epochs + 1), number_ER[:, r], label=f"{r + 1}")
    axes[2].set(title="how many operations", xlabel="epoch", ylabel="probability", ylim=(0, 1))
    axes[2].legend(frameon=False)
    return figure


def strengths_at_snapshots(result: dict[str, Any], most: int = 4) -> Figure | None:
    """The distribution over the 31 strengths of every operation, at up to ``most`` recorded epochs of one seed."""
    marked = [epoch for epoch in result["epochs"] if "strength" in epoch]
    chosen = _spread(marked, most)
    if not chosen:
        return None
    operations = result["operations"]
    figure = Figure(figsize=(13, 1.2 + 0.24 * len(operations)), layout="constrained")
    axes = figure.subplots(1, len(chosen), squeeze=False, sharey=True)[0]
    top = max(np.max(epoch["strength"]) for epoch in chosen)
    for axis, epoch in zip(axes, chosen, strict=True):
        image = axis.imshow(epoch["strength"], aspect="auto", vmin=0, vmax=top, cmap="magma")
        axis.set(
            title=f"epoch {epoch['epoch']}", xlabel="strength", yticks=range(len(operations)), yticklabels=operations
        )
    figure.colorbar(image, ax=axes[-1], fraction=0.05)
    return figure


def sample_sheets(result: dict[str, Any], space: Space, images: Tensor, most: int = 4, draws: int = 5) -> Figure | None:
    """Images as they are, and under the policy of up to ``most`` recorded epochs, with the same random numbers each."""
    chosen = _spread([epoch for epoch in result["epochs"] if "strength" in epoch], most)
    if not chosen or list(space.operations) != result["operations"]:
        return None
    figure = Figure(figsize=(13, 0.5 + 13 / (len(chosen) * draws + 1) * len(images)), layout="constrained")
    axes = figure.subplots(1, len(chosen) + 1, width_ratios=[1] + [draws] * len(chosen))
    _show(axes[0], "raw", images.unsqueeze(1))
    for axis, epoch in zip(axes[1:], chosen, strict=True):
        actions = policy_at(epoch, space).sample(len(images) * draws, torch.Generator().manual_seed(0))
        augmented = apply(images.repeat_interleave(draws, dim=0), actions)
        _show(axis, f"epoch {epoch['epoch']}", augmented.view(len(images), draws, *images.shape[1:]))
    return figure


def policy_at(epoch: dict[str, Any], space: Space) -> AugmentPolicy:
    """The policy, from its recorded probabilities."""
    policy = AugmentPolicy(space, numbers=tuple(range(1, len(epoch["number"]) + 1)))
    with torch.no_grad():
        policy.number_logits.copy_(torch.tensor(epoch["number"]).clamp_min(1e-6).log())
        policy.strength_logits.copy_(torch.tensor(epoch["strength"]).clamp_min(1e-6).log())
        policy.keep_logits.copy_(torch.tensor(epoch["keep"]).clamp(1e-6, 1 - 1e-6).logit())
    return policy


def _show(axis: Any, title: str, images_RC: Tensor) -> None:
    """Images in rows and columns as one, with thin white lines between."""
    framed = F.pad(images_RC, (0, 1, 0, 1), value=255)
    rows, columns, channels, height, width = framed.shape
    sheet = framed.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels).numpy()
    axis.imshow(sheet if channels == 3 else sheet[..., 0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axis.set_title(title, fontsize=10)
    axis.axis("off")


def _spread(items: list[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
