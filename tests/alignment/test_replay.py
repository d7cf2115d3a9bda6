"""A model, or a checkpointed part of one, that is run again when it is aligned: the rewards are those of what was kept."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import inloop
from inloop import InLoop, MixturePolicy
from inloop.errors import UnsupportedLayerError
from inloop.references import Next
from tests.alignment.exactness import assert_exact, per_example_losses, relative_error
from tests.alignment.replayed import (
    MODELS,
    Block,
    Given,
    HoldsMethod,
    Late,
    Nested,
    Net,
    Normalised,
    Recurrent,
    Residual,
    Scaled,
    SequenceFirst,
    Tied,
    bytes_kept,
    make,
    rewards_of,
)

# ------------------------------------------------------------------ the model as a whole


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_rewards_are_exact(name, reduction):
    model, x = make(name)
    assert_exact(model, x, retain="recompute", reduction=reduction)


@pytest.mark.parametrize("layers", [None, ["conv", "head"]])
@pytest.mark.parametrize("affine", [False, True])
def test_recomputing_with_batchnorm_equals_what_was_kept(layers, affine):
    torch.manual_seed(3)
    model, x = Residual(nn.BatchNorm2d).double(), torch.randn(5, 3, 8, 8).double()
    direction = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    rewards = {}
    for retain in ("exact", "recompute"):
        torch.manual_seed(5)
        twin = copy.deepcopy(model)
        with inloop.capture(twin, layers=layers, retain=retain, batchnorm_affine=affine, verify=True) as tape:
            per_example_losses(twin(x)).mean().backward()
        rewards[retain] = tape.align(direction)
    assert relative_error(rewards["recompute"], rewards["exact"]) < 1e-12


def test_recomputing_leaves_the_model_and_the_random_state_alone():
    model, x = Residual(nn.BatchNorm2d), torch.randn(5, 3, 8, 8)
    with inloop.capture(model, retain="recompute") as tape:
        per_example_losses(model(x)).mean().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    tape.align(gradients)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


def replayed_batches(tape, direction):
    """How many examples the first layer sees in each replay."""
    sizes = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: sizes.append(len(out)) if isinstance(module, nn.Linear) else None
    )
    tape.align(direction)
    handle.remove()
    return sizes


class Masked(nn.Module):
    """Its second argument is no batch, though it may have as many rows."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 4), nn.Dropout(dropout)

    def forward(self, x, mask):
        return torch.einsum("st,ntd->nsd", mask, self.dropout(self.linear(x)))


@pytest.mark.parametrize(
    ("positions", "dropout", "expected"), [(5, 0.0, [1, 3, 3, 3, 1]), (10, 0.0, [10]), (5, 0.5, [10])]
)
def test_examples_are_recomputed_in_parts_where_that_is_the_same(positions, dropout, expected):
    torch.manual_seed(1)
    model = Masked(dropout).double()
    x, mask = torch.randn(10, positions, 3).double(), torch.rand(positions, positions).double()
    assert_exact(model, x, mask, retain="recompute")
    model.zero_grad()
    with inloop.capture(model, retain="recompute") as tape:
        per_example_losses(model(x, mask)).mean().backward()
    sizes = replayed_batches(tape, {name: parameter.grad for name, parameter in model.named_parameters()})
    if positions == 10:
        sizes = [size for size in sizes if size != 1]  # the attempt with one example
    assert sizes == expected


class Watched(Next):
    """Notes where the first weight of each step is, before the step waits."""

    def __init__(self):
        super().__init__()
        self.places = []

    def match(self, current, now):
        (call,) = current.tape.calls
        self.places.append(call.layer[0].weight.data_ptr())
        return super().match(current, now)


def test_one_copy_of_the_parameters_at_a_time():
    """The copy for step t+1 is made when that for step t is not needed any more."""
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    learner = inloop.InLoop(
        model, inloop.MixturePolicy(2), reference=Watched(), record=inloop.Recording(retain="recompute")
    )
    for _ in range(2):
        learner.sample(4)
        loss = model(torch.randn(4, 50)).square().mean()
        loss.backward()
        learner.step(loss)
        assert learner.reference.places[-1] == model[0].weight.data_ptr()
        (call,) = learner.reference.waiting.tape.calls
        assert call.layer[0].weight.data_ptr() != model[0].weight.data_ptr()
        model.zero_grad()


def test_recomputing_computes_no_gradients_of_weights_but_the_first():
    """They would be a third of the backward pass."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    with inloop.capture(model, retain="recompute") as tape:
        model(torch.randn(4, 3)).square().mean().backward()
    direction = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.profiler.profile(record_shapes=True) as profile:
        tape.align(direction)
    products = [tuple(map(tuple, event.input_shapes[:2])) for event in profile.events() if event.name == "aten::mm"]
    assert ((5, 1), (1, 3)) in products  # the first layer's, of an example at a time
    assert ((5, 1), (1, 5)) not in products
    assert ((2, 1), (1, 5)) not in products


def test_a_model_that_returns_its_loss_cannot_be_recomputed():
    class WithLoss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = nn.Sequential(WithLoss(3, 2))
    recording = inloop.capture(model, retain="recompute")
    with pytest.raises(UnsupportedLayerError, match="returned a scalar"), recording:
        model(torch.randn(4, 3)).backward()


# ------------------------------------------------------------------ checkpointed modules: kept as their checkpoints are from the second step on


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Block, Scaled, Recurrent, Normalised, Tied, Nested])
def test_rewards_are_those_without_checkpoints(kind, reentrant):
    calls = []
    plain = rewards_of(Net(kind, None))
    checkpointed = rewards_of(Net(kind, reentrant), seen=calls)
    torch.testing.assert_close(checkpointed, plain, rtol=1e-9, atol=1e-13)
    assert {call.name for call in calls} == {"first", "blocks.0", "blocks.1", "blocks.2", "head"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_random_numbers_are_those_of_the_step(reentrant):
    make = lambda: Block(dropout=0.5)  # noqa: E731
    torch.testing.assert_close(rewards_of(Net(make, reentrant)), rewards_of(Net(make, None)), rtol=1e-9, atol=1e-13)


def test_layers_that_do_not_count_and_frozen_segments():
    def choose(name, module):
        return "up" not in name

    plain, net = Net(Block, None), Net(Block, False)
    for frozen in (plain, net):
        frozen.blocks[1].requires_grad_(False)
    calls = []
    expected = rewards_of(plain, layers=choose)
    torch.testing.assert_close(rewards_of(net, layers=choose, seen=calls), expected, rtol=1e-9, atol=1e-13)
    assert not any("up" in name for call in calls for name in call.parameter_names.values())


def test_what_is_kept_of_a_segment_does_not_grow_with_its_depth():
    sizes = []
    for depth in (1, 8):
        calls = []
        rewards_of(Net(lambda depth=depth: nn.Sequential(*(Block() for _ in range(depth))), False), seen=calls)
        sizes.append(bytes_kept(calls))
    assert sizes[0] == sizes[1]


def test_hugging_face_gradient_checkpointing():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.1)
    rewards = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).double().train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        learner = InLoop(model, MixturePolicy(2), generator=torch.Generator().manual_seed(0), update=False)
        for number in range(4):
            torch.manual_seed(number)
            ids = torch.randint(20, (4, 8))
            learner.sample(4)
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            rewards.append(learner.step(loss).reward_mean)
            model.zero_grad()
        names = {call.name for call in learner.reference.waiting.tape.calls}
        assert ("transformer.h.0" in names) == checkpoints
    assert rewards[5:8] == pytest.approx(rewards[1:4], rel=1e-9)


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize("positions", [4, 8])
@pytest.mark.parametrize("reentrant", [True, False])
def test_examples_that_are_not_first_in_a_segment(reentrant, positions, kind):
    expected = rewards_of(SequenceFirst(None, kind), positions=positions)
    rewards = rewards_of(SequenceFirst(reentrant, kind), positions=positions)
    torch.testing.assert_close(rewards, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("verify", ["first", False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_of_a_segment_that_is_used_elsewhere_later(reentrant, verify):
    expected = rewards_of(Late(Block, None), steps=7, verify=verify)
    torch.testing.assert_close(
        rewards_of(Late(Block, reentrant), steps=7, verify=verify), expected, rtol=1e-9, atol=1e-13
    )


def test_several_micro_batches_in_one_backward_pass():
    def accumulated(reentrant):
        net = Net(Block, reentrant).double()
        learner = InLoop(net, MixturePolicy(2), generator=torch.Generator().manual_seed(0), update=False)
        means = []
        for step in range(3):
            torch.manual_seed(step)
            total = 0.0
            for _ in range(2):
                learner.sample(8)
                total = total + net(torch.randn(8, 4, 3, dtype=torch.float64)).square().mean() / 2
            total.backward()
            means.append(learner.step(total).reward_mean)
            net.zero_grad()
        return means[1:]

    assert accumulated(False) == pytest.approx(accumulated(None), rel=1e-9)
    with pytest.raises(UnsupportedLayerError, match="Several micro-batches"):
        accumulated(True)


def test_a_segment_that_holds_a_method_of_its_own():
    calls = []
    expected = rewards_of(Net(HoldsMethod, None))
    torch.testing.assert_close(rewards_of(Net(HoldsMethod, False), seen=calls), expected, rtol=1e-9, atol=1e-13)
    assert "blocks.0" in {call.name for call in calls}


def test_a_parameter_that_goes_into_a_segment():
    torch.testing.assert_close(rewards_of(Given(True)), rewards_of(Given(False)), rtol=1e-9, atol=1e-13)


def test_a_segment_with_a_users_hook_is_given_up(caplog):
    def hooked(reentrant):
        net = Net(Block, reentrant)
        net.blocks[1].up.register_forward_hook(lambda module, args, output: output * 2)
        return net

    calls = []
    expected = rewards_of(hooked(None), steps=5)
    rewards = rewards_of(hooked(False), steps=5, seen=calls)
    torch.testing.assert_close(rewards[-2:], expected[-2:], rtol=1e-9, atol=1e-13)
    assert "blocks.1.up" in {call.name for call in calls}
    assert "cannot be run again as a whole" in caplog.text


def test_a_checkpoint_around_all_that_is_recorded():
    net, expected = Net(Block, None).double(), rewards_of(Net(Block, None))
    learner = InLoop(net, MixturePolicy(2), generator=torch.Generator().manual_seed(0), update=False)
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    means = []
    for _ in range(4):
        x = torch.randn(8, 4, 3, generator=generator, dtype=torch.float64)
        learner.sample(8)
        loss = checkpoint(net, x, use_reentrant=False).square().mean()
        loss.backward()
        means.append(learner.step(loss).reward_mean)
        optimizer.step()
        optimizer.zero_grad()
    assert means[1:] == pytest.approx(expected.mean(dim=1).tolist(), rel=1e-9)
