"""The effect of BatchNorm on per-example rewards: by path (as in inloop) against by loss, on the digits.

    python results/hazards/batchnorm.py

writes batchnorm.json beside this file. After 100 steps of training, the gradient of the next batch rewards one batch: once the
gradient through each example's own activations (by path), once the gradient of each example's own loss (by loss). Without
BatchNorm the two are equal. The difference is a share of the rewards' norm; the figure shows the rewards of one batch.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop.alignment import gradients_of
from inloop.alignment.oracles import align_by_loss
from inloop.datasets import digits
from inloop_lab.networks.small import make_network

HERE = Path(__file__).parent
BATCHES = (8, 16, 32, 64, 128, 256, 512)


def trained(network: str, x: Tensor, y: Tensor, steps: int = 100) -> nn.Module:
    model = make_network(network, (1, 8, 8), 10).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,))
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def both(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Rewards of one batch by path and by loss, in the direction of another batch's gradient."""
    first, second = torch.randperm(len(x))[: 2 * batch].chunk(2)
    model.zero_grad()
    F.cross_entropy(model(x[second]), y[second]).backward()
    direction = {name: g.clone() for name, g in gradients_of(model).items()}
    model.zero_grad()
    with inloop.capture(model, batchnorm_affine=True) as tape:
        F.cross_entropy(model(x[first]), y[first]).backward()
    by_loss = align_by_loss(model, F.cross_entropy(model(x[first]), y[first], reduction="none"), direction)
    return tape.align(direction), by_loss


def main() -> None:
    torch.manual_seed(0)
    images, labels = digits()
    images = images.double()
    results = []
    for network in ("fc", "fc-bn"):
        model = trained(network, images, labels)
        for batch in BATCHES:
            differences, correlations = [], []
            for _ in range(10):
                by_path, by_loss = both(model, images, labels, batch)
                differences.append(float((by_path - by_loss).norm() / by_loss.norm()))
                correlations.append(float(torch.corrcoef(torch.stack([by_path, by_loss]))[0, 1]))
            results.append(
                {
                    "network": network,
                    "batch": batch,
                    "difference": sum(differences) / len(differences),
                    "correlation": sum(correlations) / len(correlations),
                    "rewards": [[round(float(r), 6) for r in rewards] for rewards in (by_path, by_loss)]
                    if batch == 64
                    else None,
                }
            )
            print(results[-1]["network"], batch, results[-1]["difference"], results[-1]["correlation"], flush=True)
    (HERE / "batchnorm.json").write_text(json.dumps({"results": results}, indent=1))


if __name__ == "__main__":
    main()
