"""Checkpointed modules: kept as their checkpoints are from the second step on, with the same rewards as without checkpoints."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from inloop import InLoop, MixturePolicy
from inloop.errors import UnsupportedLayerError
from tests.learners import make_learner

WIDTH = 6


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Scaled(Block):
    """With a bare parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x + super().forward(x) * self.scale


class Recurrent(nn.Module):
    """With a module that has no rule."""

    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.gru(x)[0])


class Normalised(nn.Module):
    """Examples depend on each other."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4)

    def forward(self, x):
        return F.relu(self.norm(self.inner(x)))


class Tied(Block):
    """Shares a layer with all others of its kind."""

    shared = None

    def __init__(self):
        super().__init__()
        Tied.shared = Tied.shared or nn.Linear(WIDTH, 12)
        self.up = Tied.shared


class Nested(nn.Module):
    """With a checkpoint within."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(checkpoint(self.inner, x, use_reentrant=False))


class Net(nn.Module):
    def __init__(self, make_block, reentrant):
        super().__init__()
        torch.manual_seed(0)
        Tied.shared = None
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(dim=1))


def rewards_of(net, steps=4, seen=None, positions=4, **options):
    """Rewards of every step, as the learner hands them on."""
    net.double()
    learner = make_learner(net, MixturePolicy(2), generator=torch.Generator().manual_seed(0), update=False, **options)
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    rewards = []
    reward = learner.reward
    learner.reward = type(reward)()
    learner.reward.__class__ = type(
        "Kept", (type(reward),), {"__call__": lambda self, *a: rewards.append(reward(*a)) or rewards[-1]}
    )
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(8, positions, 3, generator=generator, dtype=torch.float64)
        learner.sample(8)
        loss = net(x).square().mean()
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    if seen is not None:
        seen.extend(learner.reference.waiting.tape.calls)
    return torch.stack(rewards)


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


def bytes_kept(calls):
    """Without parameters: a segment has copies of its own."""
    kept = {}
    for call in calls:
        own = {value.data_ptr() for value in call.layer.parameters()} if hasattr(call, "layer") else set()
        for tensor in call.tensors():
            if tensor.data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(kept.values())


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


class SequenceFirst(nn.Module):
    """Examples are second within the segments, and as many as positions."""

    def __init__(self, checkpoints, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.block = (
            nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0) if kind == "attention" else Block(dropout=0.1)
        )
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.first(x).transpose(0, 1)
        x = self.block(x) if self.checkpoints is None else checkpoint(self.block, x, use_reentrant=self.checkpoints)
        return self.head(x.transpose(0, 1)).mean(dim=1)


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize("positions", [4, 8])
@pytest.mark.parametrize("reentrant", [True, False])
def test_examples_that_are_not_first_in_a_segment(reentrant, positions, kind):
    expected = rewards_of(SequenceFirst(None, kind), positions=positions)
    rewards = rewards_of(SequenceFirst(reentrant, kind), positions=positions)
    torch.testing.assert_close(rewards, expected, rtol=1e-9, atol=1e-13)


class Late(Net):
    """From the fourth step on a layer of a segment is used outside of it, too."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        block = self.blocks[0]
        x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        x = x + block.up(x)[..., :WIDTH] if self.calls > 3 else x
        return self.head(x.mean(dim=1))


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


class HoldsMethod(Block):
    def __init__(self):
        super().__init__()
        self.chosen = self.one_way

    def one_way(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + self.chosen(x)


def test_a_segment_that_holds_a_method_of_its_own():
    calls = []
    expected = rewards_of(Net(HoldsMethod, None))
    torch.testing.assert_close(rewards_of(Net(HoldsMethod, False), seen=calls), expected, rtol=1e-9, atol=1e-13)
    assert "blocks.0" in {call.name for call in calls}


class Given(nn.Module):
    """A parameter goes into the segment from outside."""

    def __init__(self, checkpoints):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.pos = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2), nn.Parameter(torch.randn(4, WIDTH))
        self.block, self.checkpoints = Block(), checkpoints

    def shifted(self, x, pos):
        return self.block(x + pos)

    def forward(self, x):
        x = self.first(x)
        run = self.shifted
        x = run(x, self.pos) if not self.checkpoints else checkpoint(run, x, self.pos, use_reentrant=False)
        return self.head(x.mean(dim=1))


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


def test_two_learners_on_layers_that_form_their_own_gradients():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    learners = [InLoop(net, MixturePolicy(2), update=False) for _ in range(2)]
    for _ in range(3):
        for learner in learners:
            learner.sample(8)
        loss = net(torch.randn(8, 20, 3, dtype=torch.float64)).square().mean()
        loss.backward()
        means = [learner.step(loss).reward_mean for learner in learners]
        net.zero_grad()
    assert means[0] == pytest.approx(means[1], rel=1e-12)
