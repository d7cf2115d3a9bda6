"""What is recorded of a model, whatever it does with its outputs, and what is left alone."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.alignment import gradients_of
from inloop.alignment.capture import Recording, make_recorder
from tests.alignment.exactness import N, assert_exact, labels, random_direction, small_net, x


def test_in_place_activations():
    assert_exact(small_net(), x(5))


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(6, 6), nn.InstanceNorm1d(5, affine=True), nn.Conv1d(5, 5, 1), nn.LayerNorm(6), nn.Embedding(9, 6)],
    ids=lambda layer: type(layer).__name__,
)
def test_outputs_changed_in_place_also_where_they_are_views(layer):
    """Linear with a bias returns a view for inputs of three axes; changing a view in place takes its hooks away."""

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = copy.deepcopy(layer), nn.Linear(6, 2)

        def forward(self, batch):
            hidden = self.first(batch)
            hidden += 1
            hidden[:, 0] *= 2
            return self.last(hidden.relu_())

    assert_exact(InPlace().double(), torch.randint(0, 9, (N, 5)) if isinstance(layer, nn.Embedding) else x(5, 6))


def test_attention_followed_by_an_in_place_residual():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, batch):
            out = self.attention(batch, batch, batch, need_weights=False)[0]
            out += batch
            return out.relu_()

    assert_exact(Block().double(), x(5, 6))


def test_a_convolutional_net():
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, groups=2), nn.PReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 3)),
    ).double()
    assert_exact(model, x(2, 6, 6))


def test_a_module_called_several_times():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)
            self.again = self.layer  # registered twice

        def forward(self, batch):
            for _ in range(3):
                batch = torch.tanh(self.layer(batch))
            return self.again(batch)

    assert_exact(Shared().double(), x(5))


def test_frozen_parameters_are_left_out():
    model = small_net()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert_exact(model, x(5))
    with capture(model) as tape:
        model(x(5)).sum().backward()
    assert [(call.name, list(call.parameter_names)) for call in tape.calls] == [("2", ["weight"])]


def test_parameters_unfrozen_later_are_recorded():
    model = small_net()
    model[0].requires_grad_(False)
    recorder = make_recorder(model, Recording())
    model[0].requires_grad_(True)
    tape = recorder.start("mean")
    F.cross_entropy(model(x(5)), labels()).backward()
    tape.verify(gradients_of(model))
    assert {call.name for call in tape.calls} == {"0", "2"}


def test_a_batch_of_one():
    assert_exact(small_net(), x(5)[:1])


def test_the_tape_is_not_kept_alive_by_the_graph():
    model = small_net()
    recorder = make_recorder(model, Recording())
    recorder.start("mean")
    loss = model(x(5)).sum()
    tape = weakref.ref(recorder.tape)
    recorder.stop()
    gc.collect()
    assert tape() is None
    loss.backward()


def test_a_user_who_keeps_outputs_does_not_keep_the_tapes():
    """A common debugging hook stores activations on the module; each holds its graph, which must not hold old calls."""
    model = small_net()
    recorder = make_recorder(model, Recording())
    model[0].register_forward_hook(lambda module, args, out: setattr(module, "activation", out))
    alive = []
    for _ in range(4):
        tape = recorder.start("mean")
        model(x(5)).sum().backward()
        alive.append([weakref.ref(call.dout) for call in tape.calls])
        del tape
    recorder.stop()
    gc.collect()
    assert sum(reference() is not None for references in alive for reference in references) <= 2


def test_user_hooks_do_not_fire_and_running_statistics_do_not_move():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.LSTM(4, 3, batch_first=True)).double()
    model = nn.Sequential(model[0], model[1], nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)).double()
    fired = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: fired.append("forward"))
        module.register_forward_pre_hook(lambda *_: fired.append("before"))
    with capture(model, batchnorm_affine=True, verify=True) as tape:
        model(x(5)).square().sum().backward()
        fired.clear()
        before = copy.deepcopy(model.state_dict())
    tape.align(random_direction(model))
    assert fired == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_users_hook_that_changes_the_output_comes_after_the_layer():
    model = small_net()
    model[0].register_forward_hook(lambda module, args, out: 3 * out)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert_exact(model, x(5))


def test_the_gradients_of_a_parameter_that_is_unfrozen_later_are_followed():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    recorder = make_recorder(model, Recording())
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)
        tape = recorder.start("mean")
        model(torch.randn(4, 3)).sum().backward()
        recorder.stop()
        assert ("0.weight" in tape.reached) is not frozen
    recorder.remove()
