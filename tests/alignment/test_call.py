"""A twin of a module refers to its own parts, in whatever way the module reaches them, or the module is refused."""

from collections import OrderedDict, namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from inloop import InloopError, capture
from inloop.alignment.call import make_twin
from inloop.alignment.oracles import align_by_loss
from tests.alignment.exactness import assert_exact, per_example_losses, random_direction, relative_error, rule_names, x


class Holder(nn.Module):
    """Owns a parameter, so that it is run again as a whole, and reaches its layer by way of ``held``."""

    def __init__(self, hold):
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 5), nn.Parameter(torch.rand(5))
        self.held, self.take = hold(self)

    def twice(self, batch, factor=2.0):
        return factor * self.layer(batch)

    def forward(self, batch):
        return torch.tanh(self.take(self.held)(batch)) * self.scale


HELD = {
    "a list": lambda m: ([m.layer], lambda held: held[0]),
    "a tuple": lambda m: ((None, m.layer), lambda held: held[1]),
    "a dict": lambda m: ({"layer": m.layer}, lambda held: held["layer"]),
    "a list in a dict": lambda m: ({"layers": [(1, m.layer)]}, lambda held: held["layers"][0][1]),
    "a bound method of its own": lambda m: (m.twice, lambda held: held),
    "a bound method of its part": lambda m: (m.layer.forward, lambda held: held),
    "a partial of its part": lambda m: (partial(m.layer), lambda held: held),
    "a partial of a method": lambda m: (partial(m.twice, factor=3.0), lambda held: held),
    "a partial with its part": lambda m: (partial(apply_layer, m.layer), lambda held: held),
    "a parameter in a list": lambda m: ([m.layer.weight], lambda held: partial(torch.matmul, other=held[0])),
}


def apply_layer(layer, batch):
    return layer(batch) + 1


@pytest.mark.parametrize("retain", ["exact", "recompute"])
@pytest.mark.parametrize("hold", HELD)
def test_rewards_of_a_module_that_reaches_its_part_through(hold, retain):
    model = nn.Sequential(nn.Linear(5, 5), Holder(HELD[hold]), nn.Linear(5, 30)).double()
    assert rule_names(model)["1"] == "run again"
    if hold == "a parameter in a list":
        model[1].layer.bias.requires_grad_(False)
    assert_exact(model, x(5), retain=retain)


@pytest.mark.parametrize("hold", HELD)
def test_a_twin_computes_with_its_own_parameters(hold):
    module = Holder(HELD[hold]).double()
    doubled = {name: 2 * parameter.detach() for name, parameter in module.named_parameters()}
    twin, batch = make_twin(module, doubled), x(5)
    out = twin(batch)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    assert torch.equal(out, module(batch))
    if isinstance(module.held, (list, tuple, dict)):
        assert twin.held is not module.held  # what a forward pass writes into it stays there


Pair = namedtuple("Pair", "layer, factor")
OUT_OF_REACH = {
    "a function": lambda m: (lambda batch: m.layer(batch), lambda held: held),
    "a named tuple": lambda m: (Pair(m.layer, 2.0), lambda held: held.layer),
    "an ordered dict": lambda m: (OrderedDict(layer=m.layer), lambda held: held["layer"]),
    "an object": lambda m: (SimpleNamespace(layer=m.layer), lambda held: held.layer),
}


@pytest.mark.parametrize("moved", [False, True], ids=["at the same parameters", "after a step"])
@pytest.mark.parametrize("retain", ["exact", "half", "recompute"])
@pytest.mark.parametrize("hold", OUT_OF_REACH)
def test_a_part_that_is_reached_in_another_way_is_exact_or_refused_also_without_verify(hold, retain, moved):
    model = nn.Sequential(nn.Linear(5, 5), Holder(OUT_OF_REACH[hold]), nn.Linear(5, 30)).double()
    direction = random_direction(model)
    try:
        with capture(model, retain=retain) as tape:
            losses_N = per_example_losses(model(x(5)))
            losses_N.mean().backward(retain_graph=True)
        oracle_N = align_by_loss(model, losses_N, direction)
        if moved:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        rewards_N = tape.align(direction)
    except InloopError:
        return
    assert relative_error(rewards_N, oracle_N) < 1e-2
