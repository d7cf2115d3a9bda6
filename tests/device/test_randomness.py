"""Random numbers of the device: what runs again draws the same ones, and what only looks at a model draws none of the training's."""

import pytest
import torch
from torch import nn

import inloop
from inloop import MetaGradient
from tests.device.problems import PROBLEMS
from tests.device.runs import Run, held_out_loss
from tests.test_metagradient import KeepsGradients, Temperature


def meta_gradients(device, computation):
    """Gradients of a learned temperature's logarithm, through a model with dropout."""
    torch.manual_seed(0)
    problem = PROBLEMS["mlp"]
    model, temperature = problem.model().to(device), Temperature().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    learner = MetaGradient(
        model, temperature, optimizer, meta_optimizer=KeepsGradients(temperature.parameters()), computation=computation
    )
    for columns in problem.sources():
        x, y = (column[:8].to(device) for column in columns)
        learner.step(lambda phi, x=x, y=y: problem.loss(phi(model(x)), y))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([gradient.cpu() for (gradient,) in learner.meta_optimizer.seen])


def test_a_meta_gradient_that_is_reused_is_that_of_the_cpu():
    torch.testing.assert_close(meta_gradients("cuda", "reuse"), meta_gradients("cpu", "reuse"), rtol=1e-9, atol=0)


def test_a_meta_gradient_that_is_unrolled_is_that_of_the_cpu():
    torch.testing.assert_close(meta_gradients("cuda", "unroll"), meta_gradients("cpu", "unroll"), rtol=1e-9, atol=0)


@pytest.mark.parametrize("problem", ["mlp", "lstm", "attention", "checkpointed"])
@pytest.mark.parametrize("options", [{}, {"record": inloop.Recording(retain="recompute")}], ids=["exact", "recompute"])
def test_a_learner_leaves_the_generators_to_the_training(problem, options):
    """Losses with dropout are those without a learner."""
    run = Run("cuda", PROBLEMS[problem], **options).train(5)
    without = Run("cuda", PROBLEMS[problem])
    for _ in range(5):
        x, y = without.mixture.draw(without.learner.draw(12).actions)  # nothing is recorded of these
        without.backward(x.cuda(), y.cuda())
        without.move()
    losses = torch.stack([loss for loss, *_ in without.passes])
    torch.testing.assert_close(torch.stack(run.losses), losses, rtol=1e-9, atol=0)


def example_losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch_on_device():
    return tuple(column[:8].cuda() for column in PROBLEMS["mlp"].sources(dtype=torch.float32)[1])


def test_a_model_on_the_device_is_checked():
    report = inloop.check(PROBLEMS["mlp"].model(torch.float32).cuda(), batch_on_device(), example_losses)
    assert report.ok
    assert report.max_relative_error < 1e-9
    assert report.dtype == "float64"


def test_a_check_leaves_the_generators_to_the_training():
    torch.cuda.manual_seed(0)
    before = torch.cuda.get_rng_state()
    inloop.check(PROBLEMS["mlp"].model(torch.float32).cuda(), batch_on_device(), example_losses)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_held_out_loss_moves_no_buffers():
    run, other = (Run("cuda", PROBLEMS["convolutions"], **options) for options in ({"reference": held_out_loss}, {}))
    buffers, others = (dict(each.train(4).model.named_buffers()) for each in (run, other))
    torch.testing.assert_close(buffers, others)
