"""The engine on the device: one recorded step, aligned with a direction, against the CPU and against one backward pass for each example."""

import pytest
import torch

from inloop import capture
from inloop.alignment.oracles import align_by_loss
from tests.device.problems import PROBLEMS


def rewards_and_oracle(problem, device, **options):
    """Rewards of a random direction, by the engine and by one backward pass an example through the same graph, on the CPU."""
    model, (x, y) = problem.model().to(device), (column[:8].to(device) for column in problem.sources()[1])
    generator = torch.Generator().manual_seed(1)
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype).to(device)
        for name, p in model.named_parameters()
    }
    torch.manual_seed(0)
    with capture(model, **options) as tape:
        losses_N = problem.losses(model(x), y)
        losses_N.mean().backward(retain_graph=True)
    return tape.align(direction).cpu(), align_by_loss(model, losses_N, direction).cpu()


@pytest.mark.parametrize("retain", ["exact", "recompute"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_rewards_on_the_device_are_exact(problem, retain):
    of_device, oracle = rewards_and_oracle(PROBLEMS[problem], "cuda", retain=retain)
    of_cpu, _ = rewards_and_oracle(PROBLEMS[problem], "cpu", retain=retain)
    torch.testing.assert_close(of_device, of_cpu, rtol=1e-9, atol=1e-11)
    if problem != "convolutions":  # BatchNorm mixes examples, whose own losses then have other gradients
        torch.testing.assert_close(of_device, oracle, rtol=1e-9, atol=1e-11)


def test_half_precision_loses_little():
    half, oracle = rewards_and_oracle(PROBLEMS["gpt"], "cuda", retain="half")
    assert float((half - oracle).abs().max()) < 1e-3 * float(oracle.abs().max())
