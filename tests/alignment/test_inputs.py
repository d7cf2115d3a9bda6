"""The inputs of a model: any container, packed sequences, a batch of one; and models that are used through a method."""

import logging
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from inloop import InLoop, MixturePolicy, capture
from inloop.alignment.inputs import copied, exchanged, neighbours, num_examples_of, tensors_of
from inloop.errors import BatchSizeError, UnsupportedLayerError

N = 5


pytestmark = pytest.mark.usefixtures("double_precision")


def rewards_and_truth(model, losses):
    """The rewards of all examples along a random direction, and those of one backward pass for each."""
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters() if p.requires_grad}
    with capture(model, reduction="sum") as tape:
        losses(model).sum().backward()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    truth = []
    for loss in losses(model):
        own = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        pairs = zip(own, direction.values(), strict=True)
        truth.append(sum((g * along).sum() for g, along in pairs if g is not None))
    return tape.align(direction), torch.stack(truth)


def assert_exact(model, losses):
    torch.testing.assert_close(*rewards_and_truth(model, losses), rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------ containers


@dataclass
class Batch:
    ids: Tensor
    name: str = "batch"


@dataclass(frozen=True, slots=True)
class Slots:
    ids: Tensor


class Anything:
    def __init__(self, ids):
        self.ids, self.itself = ids, self


Pair = namedtuple("Pair", "ids label")
CONTAINERS = {
    "dataclass": Batch,
    "slots": Slots,
    "object": Anything,
    "namedtuple": lambda ids: Pair(ids, 3),
    "mapping": lambda ids: UserDict(ids=ids),
    "ordered": lambda ids: OrderedDict(ids=ids),
    "list": lambda ids: [None, [ids]],
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_examples_are_exchanged_in_any_container(kind):
    ids = torch.arange(N)
    replaced = torch.tensor([True, False, False, True, False])
    given = (CONTAINERS[kind](ids), torch.tensor(1)), {"options": "no tensor"}
    assert num_examples_of(given) == N
    changed = exchanged(given, neighbours(replaced))
    assert type(changed[0][0]) is type(given[0][0])
    assert tensors_of(changed)[0].tolist() == [4, 1, 2, 2, 4]
    assert tensors_of(given)[0] is ids
    assert ids.tolist() == list(range(N))
    tensors_of(copied(given))[0].add_(1)
    assert ids.tolist() == list(range(N))


def test_inputs_without_tensors():
    assert num_examples_of(((nn.Linear(2, 2), "x", 3), {})) is None
    assert exchanged((("x",), {"y": [1]}), torch.arange(2)) == (("x",), {"y": [1]})


class PositionsFirst(nn.Module):
    """[N, T] to [N, T, 7], with positions first inside."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7)

    def forward(self, batch):
        ids = batch.ids if hasattr(batch, "ids") else batch
        return self.encode(ids)

    def encode(self, ids):
        return self.head(torch.tanh(self.layer(self.table(ids).transpose(0, 1))).cumsum(0)).transpose(0, 1)


def token_losses(out, ids):
    return F.cross_entropy(out.flatten(0, 1), ids.flatten(), reduction="none").view(len(ids), -1).mean(dim=1)


@pytest.mark.parametrize("make", [Batch, Anything])
def test_as_many_positions_as_examples_in_an_object(make):
    ids = torch.randint(7, (N, N))
    assert_exact(PositionsFirst(), lambda model: token_losses(model(make(ids)), ids))


def test_a_packed_sequence_as_it_comes():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 6), nn.Linear(6, 4)

        def forward(self, packed):
            out, _ = pad_packed_sequence(self.rnn(packed)[0])  # [T, N, 6], with T = N
            return self.head(out)

    x, lengths = torch.randn(N, N, 6), torch.tensor([5, 3, 4, 2, 5])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    assert num_examples_of(packed) == N
    assert isinstance(exchanged(((packed,), {}), torch.arange(N).flip(0))[0][0], PackedSequence)
    assert_exact(Recurrent(), lambda model: model(packed).square().sum(dim=(0, 2)))


# ------------------------------------------------------------------ training only


class Reorders(nn.Module):
    """Its layers see the examples in another order, in training only."""

    def __init__(self, order):
        super().__init__()
        self.order, self.first, self.second = order, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        order = self.order(len(x)) if self.training else torch.arange(len(x))
        return self.second(torch.tanh(self.first(x[order])))[order.argsort()]


@pytest.mark.parametrize("order", [torch.randperm, lambda n: torch.arange(n).flip(0)])
def test_another_order_in_training_is_refused(order):
    model = Reorders(order)
    with (
        pytest.raises(UnsupportedLayerError, match="of the batch's 5 examples are exchanged, other rows"),
        capture(model),
    ):
        model(torch.randn(N, 4)).sum().backward()
    assert_exact(model.eval(), lambda model: model(torch.ones(N, 4).cumsum(0)).square().sum(dim=1))


def test_random_numbers_that_mix_the_examples_are_judged_by_brute_force():
    """The layer's rows are right, though exchanging examples changes the others' random numbers."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            torch.manual_seed(int(x.detach().sum() * 1e6) % 1000)
            return self.second(torch.tanh(self.first(x)) + torch.randn(6))

    batch = torch.randn(N, 4)
    assert_exact(Noisy(), lambda model: model(batch).square().sum(dim=1))


# ------------------------------------------------------------------ how many examples


class OneByOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return torch.cat([self.second(torch.tanh(self.first(row))) for row in x.split(1)])


def test_examples_one_after_the_other_are_refused():
    model = OneByOne()
    with pytest.raises(BatchSizeError, match="given 5 examples, and its layers saw 1 at a time"), capture(model):
        model(torch.randn(N, 4)).sum().backward()
    learner = InLoop(model, MixturePolicy(2))
    learner.sample(N)
    model(torch.randn(N, 4)).sum().backward()
    with pytest.raises(BatchSizeError, match="Fix: give the layers the whole batch at once"):
        learner.step(1.0)


class Folds(nn.Module):
    """Folds examples and positions into one axis."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 6), nn.Linear(6, 7)

    def forward(self, ids):
        return self.layer(self.table(ids.flatten()).tanh()).view(*ids.shape, 7)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(7, 6), nn.LSTM(6, 6), nn.Linear(6, 7)

    def forward(self, ids):
        return self.head(self.rnn(self.table(ids).transpose(0, 1))[0]).transpose(0, 1)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.scale, self.head = nn.Embedding(7, 6), nn.Parameter(torch.rand(6)), nn.Linear(6, 7)
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, ids):
        x = self.table(ids).transpose(0, 1) * self.scale
        return self.head(self.attention(x, x, x)[0]).transpose(0, 1)


@pytest.mark.parametrize("make", [PositionsFirst, Folds, Recurrent, Attends])
@pytest.mark.parametrize("length", [1, 4, 5])
def test_a_first_batch_of_one(make, length):
    model = make()
    for n in (1, 1, N, 1):
        ids = torch.randint(7, (n, length))
        assert_exact(model, lambda model, ids=ids: token_losses(model(ids), ids))


@pytest.mark.parametrize("make", [PositionsFirst, Folds, Recurrent, Attends])
def test_a_learner_whose_first_batch_has_one_example(make):
    """One example shows nothing of where examples are, so the next batch must."""
    reports = []
    model = make()
    learner = InLoop(model, MixturePolicy(2), update=False, callback=reports.append)
    batches = [torch.randint(7, (n, 5)) for n in (1, N, N)]
    gradients = []
    for ids in batches:
        learner.sample(len(ids))
        loss = token_losses(model(ids), ids).mean()
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        learner.step(loss)
        model.zero_grad()
    losses = token_losses(model(batches[1]), batches[1])
    own = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    truth = [sum((g * along).sum() for g, along in zip(row, gradients[2].values(), strict=True)) for row in own]
    assert reports[2].reward_mean == pytest.approx(float(torch.stack(truth).mean()), rel=1e-9)
    assert reports[2].reward_std == pytest.approx(float(torch.stack(truth).std()), rel=1e-9)


def test_a_first_tensor_of_length_one_beside_a_batch_is_no_batch_of_one():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, time, x):
            return self.layer(x) * time

    model, x = Timed(), torch.randn(N, 4)
    with capture(model, reduction="sum") as tape:
        model(torch.ones(1), x).square().sum().backward()
    assert len(tape.align({name: p.grad for name, p in model.named_parameters()})) == N


# ------------------------------------------------------------------ methods


class Module(nn.Module):
    """Trained through a method that calls a part, as a LightningModule is."""

    def __init__(self):
        super().__init__()
        self.net = PositionsFirst()

    def training_step(self, ids):
        return token_losses(self.net(ids), ids)


def test_a_part_that_a_method_calls_is_tried():
    ids = torch.randint(7, (N, N))
    assert_exact(Module(), lambda model: model.training_step(ids))


def test_layers_that_a_method_calls_are_warned_of(caplog):
    ids = torch.randint(7, (N, N))
    with caplog.at_level(logging.WARNING, logger="inloop"):
        found, truth = rewards_and_truth(PositionsFirst(), lambda model: token_losses(model.encode(ids), ids))
    assert caplog.text.count("are called one after the other, and not all by its forward pass") == 1
    assert not torch.allclose(found, truth)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="inloop"), capture(PositionsFirst()) as tape:
        token_losses(PositionsFirst()(ids), ids).sum().backward()
    assert not tape.seen
    assert not caplog.text


def test_the_first_input_of_a_part_need_not_be_the_batch():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleDict({"q": nn.Linear(6, 6), "x": nn.Linear(6, 6)})

        def forward(self, queries, x):
            return torch.tanh(self.net["x"](x)) @ queries.T

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.queries = Decoder(), torch.randn(3, 6)

        def loss(self, x):
            return self.decoder(self.queries, x).square().sum(dim=1)

    model = Model()
    model.decoder.net["q"].requires_grad_(False)
    x = torch.randn(N, 6)
    assert_exact(model, lambda model: model.loss(x))
