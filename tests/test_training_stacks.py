"""Whatever a training loop does, rewards are those of the plain loop, or there is an error that says what to do."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import inloop
from inloop import InLoop, MixturePolicy
from inloop.errors import UsageError, VerificationError
from tests.learners import make_learner


def make_net(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    ).to(dtype)


class Loop:
    """A model, its learner and its optimizer, on always the same batches."""

    def __init__(self, model=None, dtype=torch.float64, num_steps=5, optimizer=torch.optim.SGD, **options):
        self.model = make_net(dtype) if model is None else model
        self.learner = make_learner(
            self.model, MixturePolicy(3), generator=torch.Generator().manual_seed(0), update=False, **options
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (
                torch.randn(8, 6, generator=generator, dtype=torch.float64).to(dtype),
                torch.randint(3, (8,), generator=generator),
            )
            for _ in range(num_steps)
        ]

    def run(self, step):
        """Mean and spread of the rewards of every step that was rewarded."""
        rewards = []
        for x, y in self.batches:
            self.learner.sample(len(x))
            report = step(self, x, y)
            if report is not None and report.rewarded:
                rewards += [report.reward_mean, report.reward_std]
        return rewards


def plain_step(loop, x, y, forward=None):
    loss = F.cross_entropy((loop.model if forward is None else forward)(x), y)
    loop.optimizer.zero_grad()
    loss.backward()
    report = loop.learner.step(loss)
    loop.optimizer.step()
    return report


@pytest.fixture(scope="module")
def expected():
    rewards = Loop().run(plain_step)
    assert len(rewards) == 8
    return rewards


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = make_net(), reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.net[4](checkpoint(self.net[:4], x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("retain", ["exact", "recompute"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, retain, expected):
    assert Loop(Checkpointed(reentrant), retain=retain).run(plain_step) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("retain", ["exact", "recompute"])
def test_a_layer_before_a_reentrant_checkpoint(retain, expected):
    class Later(Checkpointed):
        def forward(self, x):
            return self.net[4](checkpoint(self.net[2:4], self.net[:2](x), use_reentrant=True))

    assert Loop(Later(True), retain=retain).run(plain_step) == pytest.approx(expected, rel=1e-9)


class Segments(nn.Module):
    """The same network, of which a module is checkpointed."""

    def __init__(self, reentrant):
        super().__init__()
        net = make_net()
        self.first, self.last = net[:4], net[4]
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.first, x.clone().requires_grad_(), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_is_kept_as_its_checkpoint_is(reentrant, expected):
    loop = Loop(Segments(reentrant))
    assert loop.run(plain_step) == pytest.approx(expected, rel=1e-9)
    calls = {call.name: call for call in loop.learner.reference.waiting.tape.calls}
    assert set(calls) == {"first", "last"}
    assert calls["first"].args[0].shape == (8, 6)


def test_two_micro_batches(expected):
    def step(loop, x, y):
        loop.learner.skip()
        loop.optimizer.zero_grad()
        for part in (slice(0, 5), slice(5, 8)):
            loop.learner.sample(len(x[part]))
            loss = F.cross_entropy(loop.model(x[part]), y[part], reduction="sum") / len(x)
            loss.backward()
        report = loop.learner.step(loss)
        loop.optimizer.step()
        return report

    assert Loop().run(step) == pytest.approx(expected, rel=1e-9)


def test_gradients_are_clipped_after_the_reward(expected):
    def step(loop, x, y):
        loss = F.cross_entropy(loop.model(x), y)
        loop.optimizer.zero_grad()
        loss.backward()
        report = loop.learner.step(loss)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1e9)
        loop.optimizer.step()
        return report

    assert Loop().run(step) == pytest.approx(expected, rel=1e-9)


def test_gradients_clipped_before_the_reward_are_named():
    def step(loop, x, y):
        loss = F.cross_entropy(loop.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
        loop.learner.step(loss)

    with pytest.raises(VerificationError, match="clipped or scaled"):
        Loop().run(step)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_any_optimizer(optimizer):
    assert len(Loop(optimizer=optimizer).run(plain_step)) == 8


def test_retained_graphs_and_gradients_on_the_side(expected):
    def step(loop, x, y):
        loss = F.cross_entropy(loop.model(x), y)
        loop.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        report = loop.learner.step(loss)
        torch.autograd.grad(loss, list(loop.model.parameters()))
        loop.optimizer.step()
        with loop.learner.paused():
            F.cross_entropy(loop.model(x), y).backward()
        loop.optimizer.zero_grad()
        return report

    assert Loop().run(step) == pytest.approx(expected, rel=1e-9)


def test_evaluation_between_steps(expected):
    def step(loop, x, y):
        loop.model.eval()
        with torch.no_grad():
            loop.model(x[:3])
        loop.model.train()
        return plain_step(loop, x, y)

    assert Loop().run(step) == pytest.approx(expected, rel=1e-9)


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_costs_its_batch_and_no_more(where, expected):
    loop = Loop()
    loop.batches.insert(2, loop.batches[0])
    count = iter(range(100))

    def explode(*_):
        raise RuntimeError("mine")

    def step(loop, x, y):
        if next(count) != 2:
            return plain_step(loop, x, y)
        handle = loop.model[2].register_forward_hook(
            explode if where == "forward" else lambda module, args, out: out.register_hook(explode) and None
        )
        with pytest.raises(RuntimeError, match="mine"):
            F.cross_entropy(loop.model(x), y).backward()
        handle.remove()
        loop.optimizer.zero_grad()
        loop.learner.skip()
        return None

    rewards = loop.run(step)
    # A backward pass that got as far as a layer has rewarded it in part: that step is given up.
    assert rewards == pytest.approx(expected if where == "forward" else expected[:2] + expected[4:], rel=1e-9)


# ------------------------------------------------------------------ precision


def test_autocast_with_bfloat16(expected):
    def step(loop, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = loop.model(x)
        loss = F.cross_entropy(outputs.float(), y)
        loop.optimizer.zero_grad()
        loss.backward()
        report = loop.learner.step(loss)
        loop.optimizer.step()
        return report

    assert Loop(dtype=torch.float32).run(step) == pytest.approx(expected, rel=0.2, abs=2e-3)


def scaled_step(scaler, poison=None):
    count = iter(range(100))

    def step(loop, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = loop.model(x)
        loss = F.cross_entropy(outputs.float(), y)
        loss = loss * float("inf") if next(count) == poison else loss
        loop.optimizer.zero_grad()
        scaler.scale(loss).backward()
        report = loop.learner.step(1.0, scaler=scaler)
        scaler.step(loop.optimizer)
        scaler.update()
        return report

    return step


def test_rewards_of_a_scaled_loss_are_those_of_the_loss(expected):
    rewards = [
        Loop(dtype=torch.float32).run(scaled_step(torch.amp.GradScaler("cpu", init_scale=scale)))
        for scale in (1.0, 4096.0)
    ]
    assert rewards[0] == pytest.approx(expected, rel=0.1, abs=1e-3)
    assert rewards[1] == pytest.approx(rewards[0], rel=0.05, abs=1e-3)


class Attends(nn.Module):
    """A module that is run again, and a bare parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(6, 24), nn.Linear(24, 3)
        self.attention, self.token = nn.MultiheadAttention(24, 2, batch_first=True), nn.Parameter(torch.randn(1, 1, 24))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.first(x).unsqueeze(1)], dim=1)
        return self.head(self.attention(x, x, x)[0][:, 0])


@pytest.mark.parametrize("retain", ["exact", "half", "recompute"])
def test_scaled_losses_of_modules_that_are_run_again(retain):
    """At the usual scale sums of contributions are far beyond what float16 can hold."""
    plain = Loop(Attends(), dtype=torch.float32).run(plain_step)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    loop = Loop(Attends(), dtype=torch.float32, retain=retain)
    assert loop.run(scaled_step(scaler)) == pytest.approx(plain, rel=0.1, abs=2e-3)
    assert loop.learner.num_dropped == 0


def test_a_step_that_the_scaler_skips_is_dropped():
    loop = Loop(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    rewards = loop.run(scaled_step(scaler, poison=2))
    assert scaler.get_scale() == 512.0
    assert len(rewards) == 4  # steps 2 and 5: neither the one before nor the one after can be rewarded
    assert loop.learner.num_dropped == 1


def test_an_unscaled_gradient_is_refused():
    loop = Loop(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu")
    x, y = loop.batches[0]
    loop.learner.sample(8)
    scaler.scale(F.cross_entropy(loop.model(x), y)).backward()
    scaler.unscale_(loop.optimizer)
    with pytest.raises(UsageError, match="unscale_"):
        loop.learner.step(1.0, scaler=scaler)


# ------------------------------------------------------------------ optimizers that do more


def test_sharpness_aware_minimisation_with_its_first_pass_paused():
    def step(loop, x, y):
        with loop.learner.paused():
            F.cross_entropy(loop.model(x), y).backward()
        moves = [0.05 * p.grad for p in loop.model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(loop.model.parameters(), moves, strict=True):
                parameter.add_(move)
        loop.optimizer.zero_grad()
        loss = F.cross_entropy(loop.model(x), y)
        loss.backward()
        report = loop.learner.step(loss)
        with torch.no_grad():
            for parameter, move in zip(loop.model.parameters(), moves, strict=True):
                parameter.sub_(move)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return report

    assert len(Loop().run(step)) == 8


def test_a_closure_that_runs_several_times_is_named():
    def step(loop, x, y):
        lbfgs = torch.optim.LBFGS(loop.model.parameters(), max_iter=3)

        def closure():
            lbfgs.zero_grad()
            loss = F.cross_entropy(loop.model(x), y)
            loss.backward()
            return loss

        return loop.learner.step(lbfgs.step(closure))

    with pytest.raises(UsageError, match="LBFGS"):
        Loop().run(step)


def test_an_optimizer_within_the_backward_pass_is_refused_by_name():
    loop = Loop()
    for parameter in loop.model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)

        def update(_, own=own):
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    x, y = loop.batches[0]
    loop.learner.sample(8)
    loss = F.cross_entropy(loop.model(x), y)
    loss.backward()
    with pytest.raises(UsageError, match="within the backward pass"):
        loop.learner.step(loss)


# ------------------------------------------------------------------ copies, parts, several learners


def test_copies_of_a_model_with_a_learner(expected):
    loop = Loop()
    for twin in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        F.cross_entropy(twin(loop.batches[0][0]), loop.batches[0][1]).backward()
    assert loop.run(plain_step) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_learner_itself_is_not_copied(copied):
    with pytest.raises(UsageError, match="state_dict"):
        copied(Loop().learner)


def test_two_learners_on_one_model(expected):
    loop = Loop()
    other = InLoop(loop.model, MixturePolicy(2), generator=torch.Generator().manual_seed(1), update=False)
    others = []

    def step(loop, x, y):
        other.sample(len(x))
        loss = F.cross_entropy(loop.model(x), y)
        loop.optimizer.zero_grad()
        loss.backward()
        report = loop.learner.step(loss)
        others.append(other.step(loss))
        loop.optimizer.step()
        return report

    assert loop.run(step) == pytest.approx(expected, rel=1e-9)
    assert [r.reward_mean for r in others[1:]] == pytest.approx(expected[::2], rel=1e-9)


def test_a_learner_over_a_part_of_a_model():
    whole, part = Loop(layers=["4"]), Loop()
    part.learner.close()
    part.learner = InLoop(part.model[4], MixturePolicy(3), generator=torch.Generator().manual_seed(0), update=False)
    assert part.run(plain_step) == pytest.approx(whole.run(plain_step), rel=1e-9)


def test_moving_a_model_to_another_type_between_steps():
    loop = Loop(dtype=torch.float32)
    loop.run(plain_step)
    loop.model.double()
    loop.batches = [(x.double(), y) for x, y in loop.batches]
    loop.optimizer.zero_grad()
    assert len(loop.run(plain_step)) == 10


# ------------------------------------------------------------------ compiled models


class Positions(nn.Module):
    """Looks up positions that all examples share."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(6, 8), nn.Embedding(4, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.head(self.tokens(x) + self.positions(torch.arange(x.shape[1])))


def rewards_of_one_step(model, x):
    model.zero_grad()
    with inloop.capture(model) as tape:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    return tape.align({name: torch.ones_like(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
class TestCompiledModels:
    def test_before_the_learner_is_attached(self, backend, expected):
        torch._dynamo.reset()
        loop = Loop(torch.compile(make_net(), backend=backend))
        assert loop.run(plain_step) == pytest.approx(expected, rel=1e-9)

    def test_after_the_learner_was_attached(self, backend, expected):
        torch._dynamo.reset()
        loop = Loop()
        compiled = torch.compile(loop.model, backend=backend)
        rewards = loop.run(lambda loop, x, y: plain_step(loop, x, y, compiled))
        assert rewards == pytest.approx(expected, rel=1e-9)

    def test_in_place(self, backend, expected):
        torch._dynamo.reset()
        loop = Loop()
        loop.model.compile(backend=backend)
        assert loop.run(plain_step) == pytest.approx(expected, rel=1e-9)

    def test_compiled_and_run_before_the_learner_is_attached(self, backend, expected):
        torch._dynamo.reset()
        model = torch.compile(make_net(), backend=backend)
        model(torch.randn(8, 6, dtype=torch.float64)).sum().backward()
        model.zero_grad()
        assert Loop(model).run(plain_step) == pytest.approx(expected, rel=1e-9)

    def test_shared_positions_looked_up_inside(self, backend):
        """The compiler fails on this model, if it traces hooks and a function mode together."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Positions().double()
        x = torch.randint(6, (5, 4))
        expected = rewards_of_one_step(model, x)
        assert torch.equal(rewards_of_one_step(torch.compile(model, backend=backend), x), expected)

    def test_evaluation_stays_compiled_in_one_graph(self, backend, recwarn):
        torch._dynamo.reset()
        graphs = []
        loop = Loop()
        compiled = torch.compile(loop.model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
        x = torch.randn(8, 6, dtype=torch.float64)
        loop.run(lambda loop, x, y: plain_step(loop, x, y, compiled))
        assert not graphs
        with torch.no_grad():
            out = compiled(x)
        assert len(graphs) == 1
        loop.learner.sample(8)
        with loop.learner.paused(), torch.no_grad():
            assert torch.equal(compiled(x + 1), loop.model(x + 1))
        assert len(graphs) == 1
        loop.learner.close()
        torch.testing.assert_close(out, loop.model(x))
        assert not [warning for warning in recwarn if "orrectness" in str(warning.message)]

    def test_the_last_recording_ends_uncompiled_execution(self, backend):
        torch._dynamo.reset()
        models = [make_net(), make_net()]
        compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend=backend)
        with inloop.capture(models[0]):
            with inloop.capture(models[1]):
                assert not compiled(torch.zeros(1))
            assert not compiled(torch.zeros(1))
        assert compiled(torch.zeros(1))
        forgotten = InLoop(models[0], MixturePolicy(2))
        forgotten.sample(2)
        assert not compiled(torch.zeros(1))
        del forgotten
        gc.collect()
        assert compiled(torch.zeros(1))

    def test_a_compiled_loop_around_the_learner_is_refused(self, backend):
        torch._dynamo.reset()
        loop = Loop()
        step = torch.compile(lambda: loop.learner.sample(8), backend=backend)
        with pytest.raises(UsageError, match="compile the model"):
            step()

    def test_with_a_bare_parameter(self, backend):
        torch._dynamo.reset()
        expected = Loop(Attends().double()).run(plain_step)
        loop = Loop(Attends().double())
        compiled = torch.compile(loop.model, backend=backend)
        assert loop.run(lambda loop, x, y: plain_step(loop, x, y, compiled)) == pytest.approx(expected, rel=1e-9)
