"""A learner on the device has the rewards of the same run on the CPU, whatever is trained and however it is recorded."""

import pytest
import torch

from inloop import Mixture, Recording, Reinforce
from inloop.errors import UsageError
from inloop.references import OtherHalf, Previous, Trail
from tests.device.problems import PROBLEMS
from tests.device.runs import Run, assert_same_as_on_the_cpu, assert_same_rewards, held_out_loss


@pytest.mark.parametrize("knows_optimizer", [False, True])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_kind_of_model(problem, knows_optimizer):
    assert_same_as_on_the_cpu(PROBLEMS[problem], knows_optimizer=knows_optimizer)


@pytest.mark.parametrize("retain", ["exact", "recompute"])
@pytest.mark.parametrize(
    "reference",
    [
        "next",
        lambda run: Previous(),
        lambda run: Trail(decay=0.5),
        held_out_loss,
    ],
    ids=["next", "previous", "trail", "held-out"],
)
@pytest.mark.parametrize("problem", ["mlp", "convolutions"])
def test_every_reference(problem, reference, retain):
    assert_same_as_on_the_cpu(PROBLEMS[problem], reference=reference, record=Recording(retain=retain))


def test_other_half():
    assert_same_as_on_the_cpu(reference=lambda run: OtherHalf(), micro_batches=2)


OPTIONS = {
    "part": {"part": 0.5},
    "verified": {"record": Recording(verify=True)},
    "not verified": {"record": Recording(verify=False)},
    "copied inputs": {"record": Recording(copy_inputs=True)},
    "affine BatchNorm": {"record": Recording(batchnorm_affine=True)},
    "interleaved": {"interleave": True},
    "micro-batches": {"micro_batches": 2},
    "scaler": {"scaler": True},
    "sources on the device": {"on_device": True},
    "told": {"tells": True},
    "Reinforce": {"update": lambda run: Reinforce(accumulate=1)},
    "next loss": {"update": lambda run: Reinforce(accumulate=1), "reward": "nslr"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("problem", ["mlp", "convolutions"])
def test_every_option(problem, options):
    assert_same_as_on_the_cpu(PROBLEMS[problem], num_steps=8, **OPTIONS[options])


def test_half_precision_of_the_tape():
    assert_same_as_on_the_cpu(PROBLEMS["convolutions"], record=Recording(retain="half"), tolerance=1e-3)


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        fused_adamw,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    ],
    ids=["fused AdamW", "foreach AdamW", "Adam", "fused SGD", "RMSprop"],
)
@pytest.mark.parametrize("reference", ["next", "previous", "trail"])
def test_every_optimizer(make_optimizer, reference):
    tolerance = 1e-4 if make_optimizer is fused_adamw else 1e-9  # see the next test
    options = {"make_optimizer": make_optimizer, "knows_optimizer": True, "reference": reference}
    assert_same_as_on_the_cpu(tolerance=tolerance, **options)


def test_a_count_of_steps_on_the_device_loses_no_precision():
    assert_same_as_on_the_cpu(make_optimizer=fused_adamw, knows_optimizer=True)


@pytest.mark.parametrize(("dtype", "scaler"), [(torch.bfloat16, False), (torch.float16, True)])
@pytest.mark.parametrize("problem", ["mlp", "convolutions", "gpt"])
def test_mixed_precision_changes_rewards_by_rounding_only(problem, dtype, scaler):
    mixed = Run("cuda", PROBLEMS[problem], dtype=torch.float32, autocast=dtype, scaler=scaler).train(4)
    exact = Run("cuda", PROBLEMS[problem], dtype=torch.float32).train(4)
    assert_same_rewards(mixed, exact, tolerance=0.2)


def test_a_learner_continues_from_its_state():
    def saved(run):
        return {"learner": run.learner.state_dict(), "mixture": run.mixture.state_dict()}

    def run():
        return Run("cuda", update=lambda run: Reinforce(accumulate=2))

    whole, first = run().train(4), run().train(4)
    saved(whole)
    state, drawn = saved(first), torch.cuda.get_rng_state()
    second = run()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.learner.load_state_dict(state["learner"])
    second.mixture.load_state_dict(state["mixture"])
    torch.cuda.set_rng_state(drawn)
    second.train(4)
    torch.cuda.set_rng_state(drawn)
    whole.train(4)
    assert len(second.rewards) == 3
    for rewards_N, others_N in zip(second.rewards, whole.rewards[-3:], strict=True):
        assert torch.equal(rewards_N, others_N)
    assert torch.equal(second.learner.policy.scores, whole.learner.policy.scores)


def test_a_mixture_draws_the_same_batches_from_sources_on_the_device():
    actions = torch.randint(3, (20,))
    of_cpu, of_device = (Run(device, on_device=True).mixture.draw(actions) for device in ("cpu", "cuda"))
    for column, other in zip(of_device, of_cpu, strict=True):
        assert column.is_cuda
        assert torch.equal(column.cpu(), other)


def test_sources_on_different_devices_are_named():
    on_cpu, on_device, _ = Run("cpu").problem.sources()
    mixture = Mixture([on_cpu, tuple(column.cuda() for column in on_device)])
    with pytest.raises(UsageError, match="cuda"):
        mixture.draw(torch.tensor([0, 1, 1]))
