"""Recording: what is written, what is left alone, what leaves no trace, and what is refused."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.alignment import gradients_of
from inloop.alignment.capture import Recording, make_recorder
from inloop.alignment.oracles import align_by_loss
from inloop.errors import BatchSizeError, OverwrittenTensorError, UsageError, VerificationError
from tests.alignment.architectures import UnseenProduct
from tests.alignment.exactness import assert_exact, random_direction

N = 6


def x(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


def small_net():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)).double()


def labels(n=N):
    return torch.randint(0, 3, (n,))


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# ------------------------------------------------------------------ models


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


class Tied(nn.Module):
    """An embedding whose table is also the output layer's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 5)
        self.head = nn.Linear(5, 9)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)).cumsum(1))


def test_tied_weights():
    assert_exact(Tied().double(), torch.randint(0, 9, (N, 4)))


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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_empty_batch(reduction):
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(9, 2))
    with capture(model, reduction=reduction) as tape:
        model(torch.randn(0, 2, 5)).sum().backward()
    assert tape.align(random_direction(model)).shape == (0,)


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


# ------------------------------------------------------------------ which layers count


def test_layers_by_name_and_by_predicate():
    model = nn.Sequential(small_net(), nn.Linear(3, 2).double())
    direction = random_direction(model)

    def rewards(layers):
        with capture(model, layers=layers, verify=True) as tape:
            model.zero_grad()
            model(x_fixed).square().sum().backward()
        return tape.align(direction)

    x_fixed = x(5)
    torch.testing.assert_close(rewards(["0", "1"]), rewards(None))
    torch.testing.assert_close(rewards(["0"]) + rewards("1"), rewards(None))
    torch.testing.assert_close(rewards(lambda name, module: name == "1"), rewards(["1"]))
    assert not torch.allclose(rewards(["0.0"]), rewards(["0"]))


def test_a_part_of_a_tied_parameter():
    model = Tied().double()
    with capture(model, layers=["head"], verify=True) as tape:  # the other use is left out, so nothing can add up
        model(torch.randint(0, 9, (N, 4))).sum().backward()
    assert {call.name for call in tape.calls} == {"head"}


def test_a_layer_that_does_not_exist_is_named():
    with pytest.raises(UsageError, match="'encodr', which is no module"), capture(nn.Linear(2, 2), layers=["encodr"]):
        pass
    with pytest.raises(UsageError, match=r"Did you mean '0'\?"), capture(small_net(), layers=["0."]):
        pass


def test_a_part_of_a_black_box_cannot_be_chosen():
    model = nn.Sequential(nn.MultiheadAttention(4, 2, batch_first=True))
    with (
        pytest.raises(UsageError, match=r"part of '0' \(MultiheadAttention\).*small module"),
        capture(model, layers=["0.out_proj"]),
    ):
        pass


# ------------------------------------------------------------------ nothing is left behind


def test_evaluation_and_abandoned_forward_passes_leave_nothing():
    model = small_net()
    with capture(model) as tape:
        with torch.no_grad():
            model(x(5))
        model.eval()(x(5))
        model(x(5)).sum()
    assert tape.calls == []
    with pytest.raises(UsageError, match="Nothing was recorded"):
        tape.align(random_direction(model))


def test_hooks_leave_with_the_context_also_after_an_exception():
    model = nn.Sequential(small_net(), nn.LSTM(3, 2, batch_first=True).double())
    with pytest.raises(RuntimeError, match="mine"), capture(model):
        assert num_hooks(model) > 0
        raise RuntimeError("mine")
    assert num_hooks(model) == 0
    with pytest.raises(RuntimeError), capture(model):
        model(torch.randn(3, 4, 99))
    assert num_hooks(model) == 0


def test_a_backward_pass_after_the_context_is_not_recorded():
    model = small_net()
    with capture(model) as tape:
        out = model(x(5)).sum()
    out.backward()
    assert tape.calls == []


def test_nothing_is_written_on_the_users_modules():
    model = small_net()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with capture(model) as tape:
        model(x(5)).sum().backward()
    tape.align(random_direction(model))
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_a_forgotten_recorder_takes_its_hooks_along():
    model = small_net()
    recorder = make_recorder(model, Recording())
    recorder.start("mean")
    assert num_hooks(model) > 0
    del recorder
    gc.collect()
    assert num_hooks(model) == 0


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


def test_hooks_do_nothing_in_copies_of_the_model():
    model = small_net()
    with capture(model) as tape:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(x(5)).sum().backward()
        assert tape.calls == []
        model(x(5)).sum().backward()
        assert len(tape.calls) == 2


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


# ------------------------------------------------------------------ what is refused


def test_a_recorded_tensor_that_was_overwritten_is_named():
    model = small_net()
    batch = x(5)
    with capture(model) as tape:
        model(batch).sum().backward()
    batch.copy_(x(5))
    with pytest.raises(OverwrittenTensorError, match=r"layer '0' \(Linear\).*copy_inputs=True"):
        tape.align(random_direction(model))


def test_copied_inputs_may_be_overwritten():
    model = small_net()
    batch = x(5)
    direction = random_direction(model)
    with capture(model, copy_inputs=True) as tape:
        model(batch).sum().backward()
    expected = tape.align(direction)
    batch.copy_(x(5))
    assert torch.equal(tape.align(direction), expected)


def test_a_penalty_in_the_loss_is_named():
    model = small_net()
    with pytest.raises(VerificationError, match=r"(?s)'0.weight'.*penalty"), capture(model, verify=True):
        (F.cross_entropy(model(x(5)), labels()) + 0.01 * model[0].weight.square().sum()).backward()
    assert num_hooks(model) == 0


def test_gradients_that_were_there_before_are_named():
    model = small_net()
    model(x(5)).sum().backward()
    with pytest.raises(VerificationError, match="zero_grad"), capture(model, verify=True):
        model(x(5)).sum().backward()


def test_weights_used_where_nothing_can_be_seen_are_named():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(5, 5)
            self.bypassed = nn.Linear(5, 3)

        def forward(self, batch):
            return UnseenProduct.apply(self.used(batch), self.bypassed.weight[0])

    model = Hidden().double()
    with (
        pytest.raises(VerificationError, match=r"'bypassed.weight'.*without calling its module"),
        capture(model, verify=True),
    ):
        model(x(5)).square().sum().backward()


class Chosen(nn.Module):
    """Some rows go through a layer, others do not: whose they are cannot be told."""

    def __init__(self):
        super().__init__()
        self.first, self.expert = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, batch):
        hidden = self.first(batch)
        chosen = hidden[:, 0] > hidden[:, 0].median()
        return hidden.index_put((chosen,), self.expert(hidden[chosen]))


def test_layers_that_disagree_on_the_number_of_examples_are_named():
    model = Chosen().double()
    with capture(model) as tape:
        model(x(5)).sum().backward()
    with pytest.raises(BatchSizeError, match=r"'first' saw 6 rows, layer 'expert' 3"):
        tape.align(random_direction(model))


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5))

    def forward(self, batch):
        return batch * self.gain


class SharedGain(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.other, self.head = nn.Parameter(torch.randn(5)), Holder(), nn.Linear(5, 40)

    def forward(self, batch):
        return self.head(self.other(batch) + self.positions * self.other.gain)


def test_parameters_that_are_left_out_are_as_they_were():
    """Though the optimizer changes them in place before the reward is known."""
    torch.manual_seed(0)
    model = SharedGain().double()
    direction = random_direction(model) | {"other.gain": None}
    with capture(model, layers=lambda name, module: name != "other", reduction="sum") as tape:
        losses_N = model(x(5)).square().sum(dim=1)
        losses_N.sum().backward(retain_graph=True)
    oracle_N = align_by_loss(model, losses_N, direction)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(tape.align(direction), oracle_N)


class Positions(nn.Module):
    """The usual transformer start, with the positions looked up once for all examples or once for each."""

    def __init__(self, length, shared):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(length, 4)
        self.head = nn.Linear(4, 3)
        self.shared = shared

    def forward(self, ids):
        positions = torch.arange(ids.shape[1])
        return self.head(
            torch.tanh(self.tokens(ids) + self.positions(positions if self.shared else positions.expand_as(ids)))
        )

    def embed(self, ids, positions):
        """The positions are given, and cannot be told from data."""
        return self.head(torch.tanh(self.tokens(ids) + self.positions(positions)))


@pytest.mark.parametrize("length", [5, N])
def test_positions_shared_by_all_examples(length):
    """Also where there are as many positions as examples, which no count of rows can tell."""
    ids = torch.randint(0, 9, (N, length))
    assert_exact(Positions(length, shared=False).double(), ids)
    assert_exact(Positions(length, shared=True).double(), ids)
    model = Positions(length, shared=True).double()
    with capture(model) as tape:
        model.embed(ids, torch.arange(length)).square().sum().backward()
    with pytest.raises(BatchSizeError, match=r"positions.expand\(N, -1\)"):
        tape.align(random_direction(model))


def test_two_passes_of_different_size_are_named():
    model = small_net()
    with capture(model) as tape:
        model(x(5)).sum().backward()
        model(x(5)[:2]).sum().backward()
    with pytest.raises(BatchSizeError, match="'2' was called with 6 and with 2 examples in one micro-batch"):
        tape.align(random_direction(model))


def test_an_unknown_reduction_is_named():
    with pytest.raises(UsageError, match="reduction='max'"), capture(small_net(), reduction="max"):
        pass


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


def test_copies_of_the_model_are_let_go_at_once():
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
