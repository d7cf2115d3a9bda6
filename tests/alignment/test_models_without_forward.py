"""Models without a forward pass of their own: their parts are called, by a method or a function. Their own parameters must not be forgotten."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.alignment.oracles import align_by_loss
from inloop.errors import VerificationError


class Pair(nn.Module):
    """Two layers, a parameter of its own, and no forward pass."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 6), nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def scores(self, x):
        return self.decode(self.encode(x).relu()) * self.temperature.exp()


def dict_of_parts():
    return nn.ModuleDict({"decode": nn.Linear(5, 3), "own": nn.ParameterDict({"scale": nn.Parameter(torch.ones(3))})})


def list_of_parts():
    return nn.ModuleList([nn.Linear(5, 3), nn.ParameterList([nn.Parameter(torch.ones(3))])])


CASES = {
    "method": (Pair, lambda model, x: model.scores(x)),
    "dict": (dict_of_parts, lambda model, x: model["decode"](x) * model["own"]["scale"]),
    "list": (list_of_parts, lambda model, x: model[0](x) * model[1][0]),
}


def losses(scores, batch):
    return F.cross_entropy(scores, batch[1], reduction="none")


@pytest.fixture
def batch():
    return torch.randn(4, 5, dtype=torch.float64), torch.randint(3, (4,))


@pytest.mark.parametrize(("make", "scores"), CASES.values(), ids=CASES)
def test_a_parameter_that_nothing_follows_is_refused(make, scores, batch, caplog):
    model = make().double()
    with pytest.raises(VerificationError, match="outside of the model's forward pass"), inloop.capture(model):
        losses(scores(model, batch[0]), batch).mean().backward()
    report = inloop.check(model, batch, lambda model, batch: losses(scores(model, batch[0]), batch))
    assert not report.ok


def test_a_forward_pass_on_the_instance_is_followed(batch):
    model = Pair().double()
    model.forward = model.scores
    direction = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    with inloop.capture(model) as tape:
        losses_N = losses(model(batch[0]), batch)
        losses_N.mean().backward(retain_graph=True)
    torch.testing.assert_close(tape.align(direction), align_by_loss(model, losses_N, direction), rtol=1e-9, atol=1e-12)


def test_without_parameters_of_its_own_its_parts_are_enough(batch, caplog):
    model = nn.ModuleDict({"encode": nn.Linear(5, 6), "decode": nn.Linear(6, 3)}).double()
    report = inloop.check(model, batch, lambda m, b: losses(m["decode"](m["encode"](b[0]).relu()), b))
    assert report.ok
    assert report.max_relative_error < 1e-9
