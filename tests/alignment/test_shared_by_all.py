"""What all examples share: positions and classes that are no buffers, with as many rows as there are examples, and with others."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inloop import InloopError, capture
from inloop.alignment.oracles import align_by_loss
from inloop.errors import BatchSizeError
from tests.alignment.exactness import N, assert_exact, random_direction, rewards_and_oracle

pytestmark = pytest.mark.usefixtures("double_precision")
D, CLASSES = 4, 6
KEPT = torch.arange(N)


@functools.lru_cache
def cached_positions(length):
    return torch.arange(length)


class ZeroShot(nn.Module):
    """Images are compared with texts of classes, which are kept in some way."""

    def __init__(self, classes, keep):
        super().__init__()
        self.image, self.text, self.deep = nn.Linear(D, CLASSES), nn.Linear(7, 5), nn.Linear(5, CLASSES)
        texts = torch.randn(classes, 7)
        self.texts = {"attribute": texts, "list": [texts], "dict": {"a": {"b": texts}}}.get(keep, texts.numpy())
        self.keep = keep

    def kept(self):
        if self.keep == "list":
            return self.texts[0]
        return self.texts["a"]["b"] if self.keep == "dict" else torch.as_tensor(self.texts)

    def forward(self, x):
        return self.image(x) @ self.deep(torch.tanh(self.text(self.kept()))).T


@pytest.mark.parametrize("classes", [N, N + 1])
@pytest.mark.parametrize("keep", ["attribute", "list", "dict", "numpy"])
def test_texts_of_classes(classes, keep):
    assert_exact(ZeroShot(classes, keep), torch.randn(N, D))


class Positions(nn.Module):
    def __init__(self, length, make):
        super().__init__()
        self.table, self.scale, self.head = nn.Embedding(length, D), nn.Parameter(torch.randn(D)), nn.Linear(D, 3)
        self.ids, self.make = torch.arange(length), make

    def forward(self, x):
        return self.head(torch.tanh(x + self.table(self.make(self)) * self.scale))


@pytest.mark.parametrize("length", [N, N + 1])
@pytest.mark.parametrize("make", ["attribute", "global", "cached"])
def test_positions(length, make):
    ways = {
        "attribute": lambda model: model.ids,
        "global": lambda model: KEPT if length == N else model.ids,
        "cached": lambda model: cached_positions(length),
    }
    assert_exact(Positions(length, ways[make]), torch.randn(N, length, D))


@pytest.mark.parametrize("length", [N, N + 1])
def test_a_parameter_of_no_layer_meets_what_is_shared(length):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.head, self.grid = nn.Parameter(torch.randn(D)), nn.Linear(D, 3), torch.randn(length, D)

        def forward(self, x):
            return self.head(x + self.scale * self.grid)

    assert_exact(Scaled(), torch.randn(N, length, D))


def test_an_input_that_does_not_count_examples_is_shared():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(6, 3), nn.Linear(3, 2)

        def forward(self, x, ids):
            return self.head(x + self.table(ids).mean(dim=0))

    for retain in ("exact", "half", "recompute"):
        found, oracle = rewards_and_oracle(Shared(), torch.randn(8, 3), torch.arange(6), retain=retain)
        torch.testing.assert_close(found, oracle, rtol=2e-3 if retain == "half" else 1e-9, atol=0)


# ------------------------------------------------------------------ what cannot be right


class GivenTexts(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(D, 5), nn.Linear(7, 5)

    def forward(self, x, texts):
        return self.image(x) @ self.text(texts).T


def test_as_many_texts_as_examples_among_the_inputs_are_refused():
    model, x = GivenTexts(), torch.randn(N, D)
    with pytest.raises(InloopError, match="in a buffer of the model"), capture(model):
        model(x, torch.randn(N, 7)).square().mean().backward()
    assert_exact(model, x, torch.randn(N + 1, 7))


def test_examples_that_are_moved_on_and_back_are_refused():
    class Rolls(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(D, 3), nn.Linear(D, 3)

        def forward(self, x):
            return self.first(x) + self.second(x.roll(1, 0)).roll(-1, 0)

    for n in (2, 3, 4, 5, 8):
        model = Rolls()
        with pytest.raises(InloopError, match="other rows of 'second'"), capture(model):
            model(torch.randn(n, D)).square().mean().backward()


def test_parts_that_a_method_calls_are_warned_of_once(caplog):
    class Sorts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(D, 8), nn.Linear(8, 3)

        def encode(self, x):
            order = x.sum(dim=1).argsort()
            return self.second(self.first(x)[order])[order.argsort()]

    with caplog.at_level(logging.WARNING, logger="inloop"):
        model = Sorts()
        with capture(model):
            for _ in range(2):
                model.encode(torch.randn(N, D)).square().mean().backward()
    assert caplog.text.count("parts of the model ('first', 'second')") == 1


def test_a_checkpoint_is_no_part_that_is_called_by_itself(caplog):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.scale = nn.Sequential(nn.Linear(D, D)), nn.Parameter(torch.randn(D))
            self.head = nn.Linear(D, 3)

        def forward(self, x, checkpointed=True):
            hidden = checkpoint(self.block, x, use_reentrant=True) if checkpointed else self.block(x)
            return self.head(hidden * self.scale).square().sum(dim=1)

    model, x = Checkpointed(), torch.randn(N, D, requires_grad=True)
    direction = random_direction(model)
    with caplog.at_level(logging.WARNING, logger="inloop"), capture(model) as tape:
        model(x).mean().backward()
    assert "parts of the model" not in caplog.text
    oracle_N = align_by_loss(model, model(x, checkpointed=False), direction)
    torch.testing.assert_close(tape.align(direction), oracle_N)


ROWS = {
    "folded": lambda model, x: model(x.flatten(0, 1)),
    "in two calls": lambda model, x: torch.cat([model(x[:3, 0]), model(x[3:, 0])]),
    "one by one": lambda model, x: torch.cat([model(part) for part in x[:, 0].split(1)]),
}


@pytest.mark.parametrize("way", ROWS)
def test_another_number_of_rows_than_the_examples_that_are_given_is_refused(way):
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(BatchSizeError), capture(model, num_examples=N):
        ROWS[way](model, torch.randn(N, 5, D)).square().mean().backward()
