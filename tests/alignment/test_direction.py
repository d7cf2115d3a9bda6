"""A direction must fit the model; what does not fit is named."""

import pytest
import torch
from torch import nn

from inloop import capture
from inloop.errors import DirectionError


@pytest.fixture
def model():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    return model


@pytest.fixture
def tape(model):
    with capture(model) as tape:
        model(torch.randint(0, 5, (3, 2))).square().sum().backward()
    return tape


def direction_of(model):
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def test_a_missing_entry(model, tape):
    direction = direction_of(model)
    del direction["1.bias"]
    with pytest.raises(DirectionError, match=r"no entry for 1 trainable parameter\(s\), the first is '1.bias'"):
        tape.align(direction)


def test_an_unknown_entry(model, tape):
    with pytest.raises(DirectionError, match=r"'1.wieght', which is no parameter.*Did you mean '1.weight'\?"):
        tape.align(direction_of(model) | {"1.wieght": torch.zeros(4, 4)})


def test_a_shape_that_does_not_fit(model, tape):
    with pytest.raises(DirectionError, match=r"'1.weight' has shape \(4,\); the parameter has \(4, 4\)"):
        tape.align(direction_of(model) | {"1.weight": torch.zeros(4)})


def test_no_dict_at_all(tape):
    with pytest.raises(DirectionError, match="dict from parameter names to tensors; got list"):
        tape.align([torch.zeros(4, 4)])


def test_none_means_zero(model, tape):
    direction = direction_of(model)
    zero = tape.align(direction | {"1.weight": torch.zeros(4, 4)})
    torch.testing.assert_close(tape.align(direction | {"1.weight": None}), zero)
    assert torch.equal(tape.align(dict.fromkeys(direction)), torch.zeros(3))


def test_a_tied_parameter_may_be_given_under_any_of_its_names(model, tape):
    direction = direction_of(model)
    assert "2.weight" not in direction
    other = {("2.weight" if name == "0.weight" else name): value for name, value in direction.items()}
    assert torch.equal(tape.align(other), tape.align(direction))
    assert torch.equal(tape.align(other | direction), tape.align(direction))


def test_a_tied_parameter_given_twice_with_different_values(model, tape):
    with pytest.raises(DirectionError, match="tied parameter '0.weight' twice"):
        tape.align(direction_of(model) | {"2.weight": torch.zeros(5, 4)})


def test_entries_of_frozen_parameters_are_ignored_and_not_needed(model):
    model[1].requires_grad_(False)
    with capture(model) as tape:
        model(torch.randint(0, 5, (3, 2))).square().sum().backward()
    direction = direction_of(model)
    with_frozen = tape.align(direction)
    without = {name: value for name, value in direction.items() if not name.startswith("1")}
    assert torch.equal(tape.align(without), with_frozen)
