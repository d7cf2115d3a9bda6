"""Finding out whose a row is: it leaves the model alone, and rows that are not the examples in order are refused."""

import copy
import gc
import random
import threading
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn
from torch.overrides import _get_current_function_mode_stack

from inloop import InLoop, InloopError, MixturePolicy, capture
from inloop.alignment.oracles import align_by_loss
from inloop.alignment.plan import make_plan
from inloop.alignment.probe import find_examples
from tests.alignment.architectures import D, Model, N, T
from tests.alignment.exactness import (
    assert_exact,
    relative_error,
    rewards_and_oracle,
    x,
)

pytestmark = pytest.mark.usefixtures("double_precision")


def linear(*sizes):
    return nn.Linear(*sizes)


# ------------------------------------------------------------------ training stays as it is


class Writes(nn.Module):
    """Its forward pass leaves traces: in its input, in a list, in a plain tensor, in Python's random state."""

    def __init__(self):
        super().__init__()
        self.layer, self.ema, self.seen = linear(D, 3), torch.zeros(D), []

    def forward(self, x, memory):
        x.mul_(2).sub_(1)
        self.ema.mul_(0.9).add_(x.mean(0))
        self.seen.append(1)
        memory.append(1)
        return self.layer(x + self.ema + random.random())


def test_finding_out_about_a_model_leaves_its_traces_alone():
    def passed(record):
        torch.manual_seed(0)
        random.seed(0)
        model, x, memory = Writes(), torch.randn(N, D), []
        if record:
            with capture(model, copy_inputs=True):
                model(x, memory).square().sum().backward()
        else:
            model(x, memory).square().sum().backward()
        return model.layer.weight.grad, x, model.ema, torch.tensor([len(model.seen), len(memory)]), random.random()

    for with_capture, without in zip(passed(True), passed(False), strict=True):
        assert torch.equal(torch.as_tensor(with_capture), torch.as_tensor(without))


def test_finding_out_where_the_examples_are_leaves_the_model_and_the_random_state_alone():
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    batch = x(5)
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = twin(batch)
    torch.manual_seed(0)
    with capture(model):
        out = model(batch)
    assert torch.equal(out, expected)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


def test_copies_of_the_model_are_released_at_once():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    seen = []

    class Counted(nn.Module):
        def forward(self, batch):
            seen.append(weakref.ref(self))
            return batch

    model.append(Counted())
    gc.disable()
    try:
        with capture(model):
            model(x(5)).sum().backward()
        assert len(seen) == 4  # three twins, and the model
        assert sum(ref() is not None for ref in seen) == 1
    finally:
        gc.enable()


def test_an_interrupt_leaves_no_mode_behind():
    def interrupt(m, x):
        raise KeyboardInterrupt

    model = Model(interrupt, layer=linear(D, D), gain=torch.randn(D))
    with pytest.raises(KeyboardInterrupt), capture(model):
        model(torch.randn(N, D))
    assert _get_current_function_mode_stack() == []


# ------------------------------------------------------------------ whose is a row?


class Sorts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cells, self.head = linear(D, D), nn.LSTM(D, D, batch_first=True), linear(D, 3)

    def forward(self, x, lengths):
        order = lengths.argsort(descending=True)
        packed = rnn.pack_padded_sequence(self.first(x[order]), lengths[order], batch_first=True)
        return self.head(self.cells(packed)[1][0][-1])[order.argsort()]


def folded(m, x):
    return m.head(torch.tanh(m.first(x.transpose(0, 1).flatten(0, 1)))).view(x.shape[1], len(x), -1).mean(0)


def masked(m, x, mask):
    x = x.transpose(0, 1)
    scores = torch.einsum("tnd,snd->nts", m.first(x), x) + mask
    return m.head(torch.einsum("nts,snd->tnd", scores.softmax(-1), x)).transpose(0, 1)


def noisy_in_training(m, x):
    if m.training:
        x = x + m.scale * torch.randn_like(x)
    return m.head(torch.tanh(m.first(x).transpose(0, 1) + m.places)).transpose(0, 1)


REFUSED = {
    "examples sorted inside": (Sorts(), (torch.randn(N, T, D), torch.tensor([2, 4, 1, 3, 4]))),
    "one layer in two layouts": (
        Model(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1) * m.layer(x), layer=linear(D, D)),
        (torch.randn(N, N, D),),
    ),
    "a learned mask for all, as long as there are examples": (
        Model(
            lambda m, x: m.head(m.attention(x, x, x, attn_mask=m.mask)[0]),
            attention=nn.MultiheadAttention(D, 2, batch_first=True),
            mask=torch.randn(N, N),
            head=linear(D, 90),
        ),
        (torch.randn(N, N, D),),
    ),
}


@pytest.mark.parametrize("retain", ["exact", "half", "recompute"])
@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_are_not_the_examples_in_order_are_refused(case, retain):
    model, inputs = REFUSED[case]
    inputs = [value.double() if value.is_floating_point() else value for value in inputs]
    with pytest.raises(InloopError, match="other rows of"):
        rewards_and_oracle(model.double(), *inputs, retain=retain)


def test_an_operation_is_named_by_its_parameter():
    def similarities(m, x):
        features = m.first(x)
        return (features @ features.T) * m.scale

    model = Model(similarities, first=linear(D, D), scale=nn.Parameter(torch.ones(())))
    with pytest.raises(InloopError, match="other rows of parameter 'scale' in the operation 'mul', of shape"):
        rewards_and_oracle(model.double(), torch.randn(N, D).double())


def test_a_head_that_starts_at_zero():
    model = Model(folded, first=linear(D, D), head=linear(D, 3))
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    assert_exact(model, torch.randn(N, T, D))


def test_small_inputs_and_then_others():
    model = Model(folded, first=linear(D, D), head=linear(D, 3))
    assert_exact(model, 1e-3 * torch.randn(N, T, D))
    assert_exact(model, torch.randn(N, T, D))


def test_sequences_of_another_length():
    forward = lambda m, x: m.head(torch.tanh(m.first(x.flatten(0, 1)))).view(*x.shape[:2], 3)  # noqa: E731
    model = Model(forward, first=linear(D, D), head=linear(D, 3))
    for shape in ((6, 4, D), (6, 5, D), (8, 3, D), (6, 1, D)):
        assert_exact(model, torch.randn(shape))


@pytest.mark.parametrize("length", [N, T])
def test_a_mask_over_positions_as_an_argument(length):
    model = Model(masked, first=linear(D, D), head=linear(D, 3))
    mask = torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
    assert_exact(model, torch.randn(N, length, D), mask)


@pytest.mark.parametrize("length", [N, T])
def test_operations_that_are_done_in_training_only(length):
    parts = {"scale": torch.randn(()), "places": torch.randn(length, 1, D)}
    assert_exact(Model(noisy_in_training, first=linear(D, D), head=linear(D, 9), **parts), torch.randn(N, length, D))


def test_a_flag_that_changes_the_layout():
    def forward(m, x, turned):
        return m.head(torch.tanh(m.first(x.transpose(0, 1) if turned else x))).transpose(0, int(turned))

    model = Model(forward, first=linear(D, D), head=linear(D, 3))
    x = torch.randn(N, N, D)
    for turned in (True, False):
        rewards_N, oracle_N = rewards_and_oracle(model, forward=lambda m, turned=turned: m(x, turned))
        assert relative_error(rewards_N, oracle_N) < 1e-9


# ------------------------------------------------------------------ models that are hard to copy


class PositionsFirst(nn.Module):
    """As many positions as examples, so that shapes cannot tell them apart."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.first(x.transpose(0, 1)).relu().mean(dim=0))


class AnswersOnce(PositionsFirst):
    """Refuses to be run by a twin."""

    owners: ClassVar = []

    def forward(self, x):
        if self.owners and self.owners[0] is not self:
            raise NotImplementedError("only once")
        return super().forward(x)


def rewards_and_truth(model, inner):
    torch.manual_seed(1)
    x, y = torch.randn(6, 6, 4, dtype=torch.float64), torch.randint(3, (6,))
    names = [name for name, _ in model.named_parameters()]
    direction = {name: torch.randn_like(p) for name, p in zip(names, inner.parameters(), strict=True)}
    with capture(model) as tape:
        F.cross_entropy(model(x), y).backward()
    inner_direction = dict(zip(dict(inner.named_parameters()), direction.values(), strict=True))
    losses_N = F.cross_entropy(inner(x), y, reduction="none")
    return tape.align(direction), align_by_loss(inner, losses_N, inner_direction)


@pytest.mark.parametrize(
    "attribute",
    [
        threading.Lock(),
        iter(range(3)),
        (number for number in range(3)),
        {"last": torch.ones(2, dtype=torch.float64, requires_grad=True) * 2},
    ],
    ids=["a lock", "an iterator", "a generator", "what a pass left"],
)
def test_a_model_with_something_that_cannot_be_copied_is_tried_too(attribute):
    model = PositionsFirst().double()
    model.held = model.first.held = attribute
    rewards_N, expected_N = rewards_and_truth(model, model)
    torch.testing.assert_close(rewards_N, expected_N)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_model_is_tried_too():
    torch._dynamo.reset()
    inner = PositionsFirst().double()
    rewards_N, expected_N = rewards_and_truth(torch.compile(inner, backend="eager"), inner)
    torch.testing.assert_close(rewards_N, expected_N)


def test_trying_a_compiled_model_compiles_nothing():
    torch._dynamo.reset()
    graphs = []
    model = torch.compile(PositionsFirst(), backend=lambda graph, _: graphs.append(graph) or graph.forward)
    layouts = find_examples(model, "", ((torch.randn(6, 6, 4),), {}), None, make_plan(model)).layouts
    assert layouts[("_orig_mod.first", 0)].axis == 1
    assert not graphs


def test_a_model_that_cannot_be_tried_is_warned_of(caplog):
    model = AnswersOnce().double()
    AnswersOnce.owners[:] = [model]
    rewards_and_truth(model, model)
    assert (
        "could not find out where the examples are in the outputs of the model's layers (NotImplementedError: only once)"
        in caplog.text
    )


class CountsPasses(nn.Module):
    """Takes the number of the step; its positions are first, so that it is watched in every step."""

    passes: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, step):
        self.passes.append(step)  # of the trials, too
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


def test_a_number_that_counts_steps_is_not_tried_for_ever():
    model = CountsPasses()
    learner = InLoop(model, MixturePolicy(2), update=False)
    for step in range(40):
        learner.sample(4)
        loss = model(torch.randn(4, 5, 3), step).square().mean()
        loss.backward()
        learner.step(loss)
        model.zero_grad()
    assert model.passes.count(1) > 1
    assert [model.passes.count(step) for step in range(30, 40)] == [1] * 10
