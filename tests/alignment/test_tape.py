"""What can be asked of a tape, and calls that do not belong to one batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.alignment.kept import ExampleGradients
from inloop.alignment.oracles import align_by_loss
from inloop.errors import BatchSizeError, OverwrittenTensorError
from tests.alignment.exactness import labels, random_direction, small_net, x


def test_several_directions_on_one_tape():
    model = small_net()
    with capture(model) as tape:
        F.cross_entropy(model(x(5)), labels()).backward()
    first, second = random_direction(model), random_direction(model)
    both = {name: first[name] + 2 * second[name] for name in first}
    torch.testing.assert_close(tape.align(both), tape.align(first) + 2 * tape.align(second))


def test_two_backward_passes_through_one_forward_add_up():
    model = small_net()
    with capture(model, reduction="sum", verify=True) as tape:
        out = model(x(5))
        out.square().sum().backward(retain_graph=True)
        out.sum().backward()
    direction = random_direction(model)
    torch.testing.assert_close(tape.align(direction), align_by_loss(model, _again(model, tape), direction))


def _again(model, tape):
    out = model(tape.calls[-1].args[0])
    return (out.square() + out).sum(dim=1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_empty_batch(reduction):
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(9, 2))
    with capture(model, reduction=reduction) as tape:
        model(torch.randn(0, 2, 5)).sum().backward()
    assert tape.align(random_direction(model)).shape == (0,)


def test_a_recorded_tensor_that_was_overwritten_is_named():
    model = small_net()
    batch = x(5)
    with capture(model) as tape:
        model(batch).sum().backward()
    batch.copy_(x(5))
    with pytest.raises(OverwrittenTensorError, match=r"layer '0' \(Linear\).*copy_inputs=True"):
        tape.align(random_direction(model))


class Chosen(nn.Module):
    """Some rows go through a layer, others do not: whose they are cannot be known."""

    def __init__(self):
        super().__init__()
        self.first, self.expert = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, batch):
        hidden = self.first(batch)
        chosen = hidden[:, 0] > hidden[:, 0].median()
        return hidden.index_put((chosen,), self.expert(hidden[chosen]))


def test_layers_that_disagree_on_the_number_of_examples_are_named():
    model = Chosen().double()
    with pytest.raises(BatchSizeError, match=r"'first' saw 6 rows, layer 'expert' 3"), capture(model):
        model(x(5)).sum().backward()


def test_two_passes_of_different_size_are_named():
    model = small_net()
    message = "'2' was called with 6 and with 2 examples in one micro-batch"
    with pytest.raises(BatchSizeError, match=message), capture(model):
        model(x(5)).sum().backward()
        model(x(5)[:2]).sum().backward()


@pytest.mark.usefixtures("nothing_is_small")
def test_magnitudes_are_kept_for_the_guard_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(5, 9, 3)
    kept = []
    for verify in (True, False):
        with capture(model, verify=verify) as tape:
            model(x).square().mean().backward()
        kept.append([call.sizes for call in tape.calls if isinstance(call, ExampleGradients)])
    assert any(kept[0])
    assert not any(kept[1])
