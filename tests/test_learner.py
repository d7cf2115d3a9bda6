"""The learner in a plain loop: timing, options, state, and what happens when a step goes wrong."""

import copy
import gc
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import Bernoulli, Categorical, InLoop, Mixture, MixturePolicy, Product, Recording, refusals
from inloop.alignment.oracles import align_by_loss
from inloop.errors import BatchSizeError, OverwrittenTensorError, UnsupportedLayerError, UsageError, VerificationError
from inloop.rewards import Reward
from inloop.updates.reinforce import normalise
from tests.alignment.architectures import UnseenProduct
from tests.learners import make_learner
from tests.training import Run, make_net, make_sources


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def rewards_of(run):
    return [report.reward_mean for report in run.reports]


# ------------------------------------------------------------------ timing


def test_step_t_is_paid_with_the_gradient_of_step_t_plus_one():
    """The reported rewards are <∇l_i(θ_t), ∇L(θ_{t+1})>, by brute force in float64."""
    run = Run(net=make_net().double(), sources=[(x.double(), y) for x, y in make_sources()])
    expected, previous = [], None
    for _ in range(5):
        actions = run.learner.sample(16)
        x, y = run.mixture.draw(actions)
        losses_N = F.cross_entropy(run.model(x), y, reduction="none")
        losses_N.mean().backward(retain_graph=True)
        g = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        run.learner.step(losses_N.mean())
        if previous is not None:
            model_before, x_before, y_before = previous
            losses_before = F.cross_entropy(model_before(x_before), y_before, reduction="none")
            expected.append(align_by_loss(model_before, losses_before, g))
        previous = copy.deepcopy(run.model), x, y
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)  # the reference is the gradient before clipping
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert [report.rewarded for report in run.reports] == [False, True, True, True, True]
    for report, rewards_N in zip(run.reports[1:], expected, strict=True):
        assert report.reward_mean == pytest.approx(float(rewards_N.mean()), rel=1e-9)
        assert report.reward_std == pytest.approx(float(rewards_N.std()), rel=1e-9)


def test_the_policy_first_moves_after_accumulate_paid_steps():
    run = Run(accumulate=3).train(8)
    assert [report.updated for report in run.reports] == [False, False, False, True, False, False, True, False]
    assert torch.equal(run.reports[2].probabilities, torch.full((4,), 0.25))
    assert not torch.equal(run.reports[3].probabilities, torch.full((4,), 0.25))


def test_start_after_only_delays_the_policy():
    run = Run(accumulate=1, start_after=4).train(7)
    assert [report.updated for report in run.reports] == [False] * 5 + [True, True]
    assert all(report.rewarded for report in run.reports[1:])
    assert rewards_of(run)[1:5] == rewards_of(Run(update=False).train(7))[1:5]


def test_watching_reports_rewards_and_changes_nothing():
    run = Run(update=False).train(6)
    assert torch.equal(run.policy.scores, torch.zeros(4))
    assert not any(report.updated for report in run.reports)
    assert all(report.rewarded and report.rewards.count_K.sum() == 64 for report in run.reports[1:])


def test_interleaving_pays_every_second_step_and_samples_neutrally_in_between():
    policy = Product({"source": MixturePolicy(4), "operation": Categorical(3, neutral=1)})
    run = Run(policy=policy, accumulate=1, interleave=True)
    neutral_steps = []
    for _ in range(6):
        actions = run.learner.sample(32)
        neutral_steps.append(bool((actions["operation"] == 1).all()))
        x, y = run.mixture.draw(actions)
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        if neutral_steps[-1]:
            assert run.learner._recorder.tape is None  # a plain step is not recorded
        run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert neutral_steps == [False, True] * 3
    assert [report.rewarded for report in run.reports] == [False, True] * 3
    assert set(run.reports[1].rewards) == {"source", "operation"}


def test_previous_pays_at_once_with_the_gradient_before():
    run = Run(net=make_net().double(), sources=[(x.double(), y) for x, y in make_sources()], reference="previous")
    gradients, expected = None, []
    for _ in range(3):
        x, y = run.mixture.draw(run.learner.sample(8))
        losses_N = F.cross_entropy(run.model(x), y, reduction="none")
        losses_N.mean().backward(retain_graph=True)
        run.learner.step(losses_N.mean())
        if gradients is not None:
            expected.append(float(align_by_loss(run.model, losses_N, gradients).mean()))
        gradients = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert [report.rewarded for report in run.reports] == [False, True, True]
    assert rewards_of(run)[1:] == pytest.approx(expected, rel=1e-9)


def test_a_held_out_reference_is_evaluated_after_the_step():
    held_out_x, held_out_y = make_sources(seed=1)[0]
    net = make_net()
    calls = []

    def held_out_loss():
        calls.append(copy.deepcopy(net))
        return F.cross_entropy(net(held_out_x), held_out_y)

    run = Run(net=net, reference=held_out_loss)
    x, y = run.mixture.draw(run.learner.sample(16))
    before = copy.deepcopy(net)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    run.learner.step(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    after = copy.deepcopy(net)
    run.step()
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(calls[0].parameters(), after.parameters(), strict=True))
    g = torch.autograd.grad(F.cross_entropy(after(held_out_x), held_out_y), list(after.parameters()))
    direction = dict(zip(dict(after.named_parameters()), g, strict=True))
    rewards_N = align_by_loss(before, F.cross_entropy(before(x), y, reduction="none"), direction)
    assert rewards_of(run)[1] == pytest.approx(float(rewards_N.mean()), rel=1e-4)


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_an_optimizer_that_steps_before_the_learner_is_told_that_a_held_out_loss_comes_too_late(
    optimizer_first, caplog
):
    refusals.warn_once.cache_clear()
    held_out_x, held_out_y = make_sources(seed=1)[0]
    net = make_net()
    run = Run(net=net, reference=lambda: F.cross_entropy(net(held_out_x), held_out_y))
    for _ in range(3):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if optimizer_first:
            run.optimizer.step()
        run.learner.step(loss)
        if not optimizer_first:
            run.optimizer.step()
        run.optimizer.zero_grad()
    assert ("before optimizer.step()" in caplog.text) == optimizer_first
    refusals.warn_once.cache_clear()


def test_next_step_loss_is_minus_the_next_loss():
    run = Run(reward="nslr", accumulate=2)
    losses = []
    for _ in range(4):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(run.model(x), y)
        losses.append(float(loss.detach()))
        loss.backward()
        run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert rewards_of(run)[1:] == pytest.approx([-value for value in losses[1:]])
    assert [report.updated for report in run.reports] == [False, False, True, False]
    assert not any(report.reward_std for report in run.reports[1:])


def test_micro_batches_are_one_step():
    """Accumulating the gradient over micro-batches gives the rewards of the whole batch."""
    sources = [(x.double(), y) for x, y in make_sources()]
    whole, parts = (Run(net=make_net().double(), sources=sources, accumulate=1) for _ in range(2))
    batch = whole.mixture.draw(whole.learner.sample(12))
    actions = whole.learner._sampler.waiting[0].actions
    for number in range(3):
        if number:
            whole.learner.use(actions)
        x, y = batch
        loss = F.cross_entropy(whole.model(x), y)
        loss.backward()
        whole.learner.step(loss)
        whole.optimizer.step()
        whole.optimizer.zero_grad()

        total = 0.0
        for part in (slice(0, 5), slice(5, 12)):
            parts.learner.sample(len(x[part]))
            parts.learner._sampler.waiting[-1].actions.copy_(actions[part])
            loss = F.cross_entropy(parts.model(x[part]), y[part], reduction="sum") / 12
            loss.backward()
            total += loss.detach()
        parts.learner.step(total)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    assert rewards_of(parts)[1:] == pytest.approx(rewards_of(whole)[1:], rel=1e-9)
    torch.testing.assert_close(parts.policy.scores, whole.policy.scores)


def test_own_rewards_join_in():
    class Constant(Reward):
        needs_tape = False
        normalisation = "none"

        def __call__(self, step, reference):
            return torch.full((step.num_examples,), 3.0)

    run = Run(reward=Constant()).train(2)
    assert run.reports[1].reward_mean == 3.0


def test_reports_carry_what_a_user_wants_to_see():
    run = Run(accumulate=1).train(3)
    report = run.reports[-1]
    assert report.step == 3
    assert report.lag == 0
    assert report.num_dropped == 0
    assert report.dropped is None
    torch.testing.assert_close(report.probabilities, run.policy.probabilities())
    assert report.rewards.mean_K.shape == report.rewards.std_K.shape == (4,)
    assert run.learner.num_steps == 3


def test_lag_counts_the_updates_between_drawing_and_using():
    run = Run(accumulate=1).train(3)
    ahead = [run.learner.draw(8) for _ in range(3)]  # as a loader does
    for lag, draw in enumerate(ahead):
        run.learner.use(draw)
        x, y = run.mixture.draw(draw.actions)
        F.cross_entropy(run.model(x), y).backward()
        assert run.learner.step(1.0).lag == lag
        run.optimizer.zero_grad()
    with pytest.raises(UsageError, match="without actions"):  # all are used up
        run.learner.step(1.0)


def test_choices_that_were_made_elsewhere_are_announced():
    run, other = Run(accumulate=1), Run(accumulate=1)
    for _ in range(3):
        x, y = run.mixture.draw(actions := run.learner.sample(16))
        other.learner.use(actions.clone())
        for each in (run, other):
            loss = F.cross_entropy(each.model(x), y)
            loss.backward()
            each.learner.step(loss)
            each.optimizer.step()
            each.optimizer.zero_grad()
    assert torch.equal(run.policy.scores, other.policy.scores)
    assert other.learner.num_waiting == 0


def test_several_callbacks_get_every_report():
    first, second = [], []
    Run(callback=[first.append, second.append]).train(3)
    Run(callback=None).train(3)
    assert len(first) == 3
    assert first == second


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cleared_first", [False, True])
def test_a_learner_whose_step_is_never_called_warns_and_keeps_nothing(cleared_first, fused, caplog):
    """Fused optimizers do not raise the versions of tensors."""
    run = Run()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01, fused=fused)
    for _ in range(4):
        x, y = run.mixture.draw(run.learner.sample(16))
        if cleared_first:
            run.optimizer.zero_grad()
        F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
        if not cleared_first:
            run.optimizer.zero_grad()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "or used by the optimizer, without learner.step (2 time(s) in a row)" in warning.getMessage()
    assert run.learner.num_waiting == 1
    run.optimizer.zero_grad()
    assert not run.train(3).reports[-1].dropped


def test_nothing_is_recorded_outside_of_a_step():
    run = Run().train(3)
    for _ in range(5):  # the model is trained on by somebody else
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(torch.randn(8, 16)), torch.randint(3, (8,))).backward()
        assert run.learner._recorder.tape is None
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert [report.rewarded for report in run.train(3).reports[-3:]] == [True, True, True]


def test_gradients_that_are_cleared_between_passes_are_refused():
    run = Run(verify=False).train(2)
    run.learner.sample(8)
    for _ in range(2):  # as a closure of LBFGS does
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(torch.randn(8, 16)), torch.randint(3, (8,)))
        loss.backward()
    with pytest.raises(UsageError, match="cleared between two backward passes of one step"):
        run.learner.step(loss)


def replace_by_weight_norm(net):
    nn.utils.parametrizations.weight_norm(net[0])


def add_a_parameter(net):
    net[0].extra = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("change", [replace_by_weight_norm, add_a_parameter])
def test_a_model_that_has_changed_is_refused_by_name(change):
    run = Run(net=nn.Sequential(nn.Linear(16, 4))).train(2)
    change(run.model)
    with pytest.raises(UsageError, match="The model has changed since"):
        run.train(1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reward": "nslr", "normalisation": "step"}, "normalisation='step' leaves nothing"),
        ({"reward": "nslr", "normalisation": "center"}, "normalisation='center' leaves nothing"),
        ({"reward": "nslr", "part": 0.5}, "part= is about recorded layers, of which NextStepLoss"),
        ({"reward": "loss", "layers": ["0"]}, "layers= is about recorded layers, of which ExampleLoss"),
        ({"reward": "nslr", "retain": "half"}, "retain= is about recorded layers"),
    ],
)
def test_options_that_a_reward_makes_no_use_of_are_refused(options, named):
    with pytest.raises(UsageError, match=named):
        Run(**options)


def test_a_penalty_may_be_differentiated_after_the_learners_step():
    run = Run(accumulate=1)
    for _ in range(5):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        report = run.learner.step(loss)
        (1e-3 * sum(parameter.square().sum() for parameter in run.model.parameters())).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert report.rewarded
    assert report.num_dropped <= 1  # until it is known that there is more than one pass


def test_a_part_of_a_draw_may_be_trained_on():
    run = Run()
    for _ in range(4):
        x, y = run.mixture.draw(actions := run.learner.draw(16).actions)
        keep = torch.arange(16) % 3 > 0
        run.learner.use(actions[keep])
        loss = F.cross_entropy(run.model(x[keep]), y[keep])
        loss.backward()
        report = run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert run.learner.num_waiting == 0
    assert int(report.rewards.count_K.sum()) == int(keep.sum())


def test_micro_batches_under_one_draw_are_counted_in_the_error():
    run = Run()
    for part in run.learner.sample(64).chunk(4):
        x, y = run.mixture.draw(part)
        loss = F.cross_entropy(run.model(x), y) / 4
        loss.backward()
    with pytest.raises(BatchSizeError, match=r"for \[64\] example\(s\), the model saw \[16\] .*in 4 backward passes"):
        run.learner.step(loss)


def test_a_reference_function_that_calls_backward_is_refused():
    def held_out_loss():
        loss = run.model(torch.randn(8, 16)).square().mean()
        loss.backward()
        return loss

    run = Run(reference=held_out_loss)
    with pytest.raises(UsageError, match="has called backward on its loss"):
        run.train(3)


@pytest.mark.parametrize("n", [-3, 2.5, None])
def test_only_whole_numbers_of_examples_are_sampled(n):
    with pytest.raises(UsageError, match="whole number from 0; got"):
        Run().learner.sample(n)


def test_interleaving_with_the_previous_gradient_never_pays_plain_steps():
    run = Run(reference="previous", interleave=True, accumulate=1).train(6)
    assert [report.rewarded for report in run.reports] == [False, False, True, False, True, False]


def test_gradients_that_really_are_zero_are_no_mistake():
    """Dead units leave gradients of zero at the outputs of layers that have none at their weights."""
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    with torch.no_grad():
        net[0].bias.fill_(-1e3)
    run = Run(net=net).train(3)
    assert run.reports[-1].rewarded
    assert run.reports[-1].reward_mean == 0


def test_tiny_gradients_are_no_mistake():
    """A saturated loss: gradients whose squares are zero in float32."""
    net = nn.Linear(16, 4)
    run = Run([(x, torch.zeros(len(x), dtype=torch.long)) for x, _ in make_sources()], net=net, lr=0.0)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([60.0, 0.0, 0.0, 0.0]))
    for _ in range(3):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        assert 0 < net.weight.grad.abs().max() < 1e-20
        report = run.learner.step(loss)
        run.optimizer.zero_grad()
    assert report.rewarded


def test_sampling_ahead_while_interleaving_is_refused_clearly():
    run = Run(interleave=True).train(1)
    ahead = run.learner.sample(8)
    run.learner.num_steps += 1
    x, y = run.mixture.draw(actions := run.learner.sample(8))
    assert ahead is not actions
    F.cross_entropy(run.model(x), y).backward()
    with pytest.raises(UsageError, match="right before each batch"):
        run.learner.step(1.0)


def test_an_empty_batch_is_not_paid():
    run = Run(accumulate=1, reduction="sum").train(3)
    run.learner.sample(0)
    run.model(torch.zeros(0, 16)).sum().backward()
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run.learner.step(0.0)
    run.optimizer.zero_grad()
    assert not run.step().rewarded
    assert run.step().rewarded


def test_options_reach_what_they_are_for():
    by_seed = [
        InLoop(make_net(), MixturePolicy(4), generator=torch.Generator().manual_seed(s)).sample(50) for s in (1, 1, 2)
    ]
    assert torch.equal(by_seed[0], by_seed[1])
    assert not torch.equal(by_seed[0], by_seed[2])
    policy = MixturePolicy(4)
    frozen = Run(policy=policy, accumulate=1, optimizer=torch.optim.SGD(policy.parameters(), lr=0.0)).train(4)
    assert torch.equal(frozen.policy.scores, torch.zeros(4))
    assert frozen.reports[-1].updated
    assert Run().learner.update.optimizer.defaults["lr"] == 0.1
    by_mean, by_sum = Run().train(2), Run(reduction="sum").train(2)
    assert by_mean.reports[1].reward_mean == pytest.approx(64 * by_sum.reports[1].reward_mean, rel=1e-5)
    copying = Run(copy_inputs=True)
    x, y = copying.mixture.draw(copying.learner.sample(8))
    F.cross_entropy(copying.model(x), y).backward()
    copying.learner.step(1.0)
    x.zero_()
    copying.optimizer.zero_grad()
    assert copying.step().rewarded


def test_a_frozen_part_of_a_policy_stays():
    policy = Product({"source": MixturePolicy(4), "operation": Categorical(3)})
    policy.factors["operation"].requires_grad_(False)
    run = Run(policy=policy, accumulate=1).train(5)
    assert run.reports[-1].updated
    assert torch.equal(policy.factors["operation"].logits, torch.zeros(3))
    assert not torch.equal(policy.factors["source"].scores, torch.zeros(4))


# ------------------------------------------------------------------ learning


@pytest.mark.parametrize("seed", range(4))
def test_a_poisoned_source_is_pushed_down(seed):
    run = Run(make_sources(5, poisoned=2, seed=seed), seed=seed).train(200, batch_size=256)
    p_K = run.policy.probabilities()
    assert int(p_K.argmin()) == 2
    assert p_K[2] < 0.03
    assert interval_of_advantage(run)[1][2] < 0  # and its rewards say why


@pytest.mark.parametrize("seed", range(4))
def test_among_equal_sources_the_rewards_single_out_none(seed):
    run = Run(make_sources(5, seed=seed), seed=seed).train(200, batch_size=256)
    low_K, high_K = interval_of_advantage(run)
    assert (low_K < 0).all()
    assert (high_K > 0).all()


def interval_of_advantage(run):
    """Mean over steps of (source's mean reward - step's mean) / step's std: +- 4 standard errors."""
    advantage_TK = torch.stack([(r.rewards.mean_K - r.reward_mean) / r.reward_std for r in run.reports if r.rewarded])
    mean_K = advantage_TK.nanmean(dim=0)
    error_K = (advantage_TK - mean_K).square().nanmean(dim=0).sqrt() / len(advantage_TK) ** 0.5
    return mean_K - 4 * error_K, mean_K + 4 * error_K


def test_a_composed_policy_learns_its_harmful_operation():
    """Operation 2 shuffles the features of an example; the policy over source x operation learns to leave it."""
    policy = Product({"source": MixturePolicy(4), "operation": Categorical(3, neutral=0), "keep": Bernoulli()})
    run = Run(policy=policy, accumulate=2)
    for _ in range(300):
        actions = run.learner.sample(64)
        x, y = run.mixture.draw(actions)
        x = torch.where((actions["operation"] == 2)[:, None], x.flip(1), x)
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    operations = policy.probabilities()["operation"]
    assert int(operations.argmin()) == 2
    assert operations[2] < 0.1


# ------------------------------------------------------------------ bad steps


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_dropped_counted_and_logged(what, caplog):
    run = Run(accumulate=1).train(3)
    before = run.policy.scores.detach().clone()
    x, y = run.mixture.draw(run.learner.sample(16))
    loss = F.cross_entropy(run.model(x), y)
    if what == "loss":
        loss = loss * float("nan")
    loss.backward()
    if what == "gradient":
        run.model[0].weight.grad[0, 0] = float("inf")
    with caplog.at_level(logging.WARNING, logger="inloop"):
        report = run.learner.step(loss)
    run.optimizer.zero_grad()
    assert not report.rewarded
    assert report.num_dropped == 1
    assert report.dropped == {"loss": "the loss is nan", "gradient": "the gradient of '0.weight' is not finite"}[what]
    assert report.dropped in caplog.text
    assert torch.equal(run.policy.scores, before)
    assert run.learner.reference.waiting is None
    assert not run.step().rewarded  # there is nothing left to pay
    assert run.step().updated
    assert run.policy.scores.isfinite().all()


def test_rewards_that_are_not_finite_never_reach_the_policy():
    class Broken(Reward):
        needs_tape = False
        normalisation = "step"

        def __call__(self, step, reference):
            return torch.tensor([float("nan")] + [1.0] * (step.num_examples - 1))

    run = Run(reward=Broken(), accumulate=1).train(3)
    assert torch.equal(run.policy.scores, torch.zeros(4))
    assert run.reports[1].dropped == "a reward is not finite"
    assert run.learner.num_dropped == 2


def test_step_without_sample():
    run = Run()
    F.cross_entropy(run.model(run.sources[0][0]), run.sources[0][1]).backward()
    with pytest.raises(UsageError, match=r"without actions. Fix: call learner.sample\(n\)"):
        run.learner.step(1.0)


def test_step_before_backward():
    run = Run()
    x, y = run.mixture.draw(run.learner.sample(8))
    loss = F.cross_entropy(run.model(x), y)
    with pytest.raises(UsageError, match=r"Fix: call loss.backward\(\) before it"):
        run.learner.step(loss)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_too_early(set_to_none):
    run = Run().train(2)
    x, y = run.mixture.draw(run.learner.sample(8))
    loss = F.cross_entropy(run.model(x), y)
    loss.backward()
    run.optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.raises(UsageError, match=r"cleared before learner.step. Fix: call optimizer.zero_grad\(\) after"):
        run.learner.step(loss)


def test_training_another_model():
    run = Run()
    other = copy.deepcopy(run.model)
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    x, y = run.mixture.draw(run.learner.sample(8))
    F.cross_entropy(other(x), y).backward()
    with pytest.raises(UsageError, match="on the model that the learner has"):
        run.learner.step(1.0)


def test_a_batch_of_another_size_than_the_actions():
    run = Run()
    x, y = run.mixture.draw(run.learner.sample(8))
    F.cross_entropy(run.model(x[:5]), y[:5]).backward()
    with pytest.raises(BatchSizeError, match=r"actions are for \[8\] example\(s\), the model saw \[5\]"):
        run.learner.step(1.0)
    run.optimizer.zero_grad()
    run.train(3)  # and the learner goes on
    assert run.reports[-1].rewarded


def test_an_overwritten_batch_leaves_no_half_updated_policy():
    run = Run(accumulate=1).train(3)
    x, y = run.mixture.draw(run.learner.sample(8))
    loss = F.cross_entropy(run.model(x), y)
    loss.backward()
    run.learner.step(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    x.zero_()
    before = run.learner.update.state_dict(), run.policy.scores.detach().clone()
    with pytest.raises(OverwrittenTensorError):
        run.step()
    assert torch.equal(run.policy.scores, before[1])
    assert run.learner.update.state_dict()["steps"] == before[0]["steps"]
    assert run.learner.reference.waiting is None
    run.optimizer.zero_grad()
    run.train(2)
    assert run.reports[-1].rewarded


def test_gradients_that_are_never_cleared_are_noticed_on_the_second_step():
    run = Run()
    run.optimizer.zero_grad = lambda: None
    with pytest.raises(VerificationError, match=r"(?s)step before were not cleared.*The learner has been closed"):
        run.train(2)


def probe(run, n=64):
    F.cross_entropy(run.model(torch.randn(n, 16)), torch.randint(0, 4, (n,))).backward()


@pytest.mark.parametrize("sampled", [False, True])
def test_a_batch_that_was_given_up_is_forgotten(sampled):
    """A probe, or a step that was skipped after backward: it is on the tape, but its gradients were cleared."""
    run = Run(accumulate=1).train(4)
    if sampled:
        run.learner.sample(64)
    probe(run)
    run.optimizer.zero_grad()
    run.train(3)
    assert run.reports[-1].rewards.count_K.sum() == 64
    # A pass of an announced batch has judged the step before in part; from then on steps are aligned when learner.step is called.
    assert [report.rewarded for report in run.reports[1:]] == [True, True, True, not sampled, True, True]
    with_probe, without = Run(accumulate=1), Run(accumulate=1)
    for _ in range(4):
        probe(with_probe, 5)
        with_probe.optimizer.zero_grad()
        with_probe.step()
        without.step()
    assert rewards_of(with_probe)[2:] == rewards_of(without)[2:]


def test_a_pass_that_does_not_belong_to_the_step_is_noticed_whenever_it_comes():
    """A kind of step that was not seen before is verified: here one with a side pass for an adversarial example."""
    run = Run().train(4)
    x, y = run.mixture.draw(run.learner.sample(64))
    x.requires_grad_()
    torch.autograd.grad(F.cross_entropy(run.model(x), y), x)
    loss = F.cross_entropy(run.model(x), y)
    loss.backward()
    with pytest.raises(VerificationError, match="learner.paused"):
        run.learner.step(loss)


def test_skip_forgets_a_batch_whose_forward_failed():
    run = Run(accumulate=1).train(3)
    run.learner.sample(64)
    with pytest.raises(RuntimeError):
        run.model(torch.randn(64, 99))
    run.learner.skip()
    run.train(2)
    assert run.reports[-1].rewards.count_K.sum() == 64
    run.learner.sample(64)
    with pytest.raises(BatchSizeError, match=r"learner.skip\(\)"):
        run.step()


def test_freezing_and_unfreezing_in_the_middle_of_a_run():
    run = Run(accumulate=1, verify=True).train(3)
    run.model[0].requires_grad_(False)
    run.train(3)
    assert run.reports[-1].rewarded
    run.model[0].requires_grad_(True)
    run.train(3)
    assert run.reports[-1].rewarded
    assert run.learner.num_dropped == 0


def test_actions_that_the_policy_cannot_have_drawn_are_refused_at_once():
    run = Run()
    F.cross_entropy(run.model(torch.randn(3, 16)), torch.randint(0, 4, (3,))).backward()
    with pytest.raises(UsageError, match="has the choices 0 to 3"):
        run.learner.use(torch.tensor([0, 1, 9]))
    with pytest.raises(UsageError, match="got list"):
        run.learner.use([0, 1, 2])


@pytest.mark.parametrize(
    ("held_out_loss", "got"),
    [
        (lambda: 1.0, "float"),
        (lambda: None, "NoneType"),
        (lambda: torch.zeros(3, requires_grad=True) + 0, r"a tensor of shape \(3,\)"),
        (lambda: torch.tensor(1.0), r"a tensor of shape \(\)"),
    ],
)
def test_a_reference_function_that_returns_no_loss(held_out_loss, got):
    run = Run(reference=held_out_loss).train(1)
    with pytest.raises(UsageError, match=f"returned {got}. It must take no argument and return a scalar loss"):
        run.step()


def test_a_model_that_does_not_add_up_is_named_and_the_learner_closed():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(16, 4)
            self.bypassed = nn.Parameter(torch.ones(4))

        def forward(self, batch):
            return UnseenProduct.apply(self.used(batch), self.bypassed)

    run = Run(net=Functional())
    with pytest.raises(VerificationError, match="'bypassed'"):
        run.step()
    assert num_hooks(run.model) == 0
    with pytest.raises(UsageError, match="This learner is closed"):
        run.learner.sample(3)


def test_verify_on_every_step_sees_a_later_penalty():
    run = Run(verify=True).train(2)
    x, y = run.mixture.draw(run.learner.sample(8))
    loss = F.cross_entropy(run.model(x), y) + 0.1 * run.model[2].weight.square().sum()
    loss.backward()
    with pytest.raises(VerificationError, match="'2.weight'"):
        run.learner.step(loss)
    assert Run(verify=False).train(2).reports[-1].rewarded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "best"}, "reward='best': allowed are 'gar', 'nslr', 'loss'"),
        ({"reference": "last"}, "reference='last': allowed are 'next', 'previous', a function"),
        ({"reference": "previous", "reward": "nslr"}, "is a gradient, of which NextStepLoss makes no use"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"normalisation": "all"}, "normalisation='all'"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"layers": ["nope"]}, "names 'nope'"),
        ({"verify": "always"}, "verify='always': allowed are 'first', True and False"),
        ({"start_after": -1}, "start_after=-1"),
        ({"callback": [print, 3]}, "allowed are a function of a StepReport, and a list of them"),
        (
            {"optimizer": torch.optim.SGD(make_net().parameters())},
            "must hold the policy's parameters and no others",
        ),
    ],
)
def test_bad_arguments_are_named_and_leave_no_hooks(options, message):
    net = make_net()
    with pytest.raises(UsageError, match=message):
        make_learner(net, MixturePolicy(3), **options)
    assert num_hooks(net) == 0


def test_arguments_of_the_wrong_kind_are_named():
    with pytest.raises(UsageError, match=r"InLoop\(MixturePolicy, Sequential\): the first argument is the model"):
        InLoop(MixturePolicy(3), make_net())
    with pytest.raises(UsageError, match=r"a loss of shape \(2,\); the step's scalar loss is needed"):
        run = Run()
        run.learner.sample(2)
        run.learner.step(torch.zeros(2))
    with pytest.raises(UsageError, match="no state of an InLoop learner: it has no"):
        Run().learner.load_state_dict(make_net().state_dict())


def test_a_layer_that_is_refused_leaves_no_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.EmbeddingBag(4, 4, mode="sum", scale_grad_by_freq=True))
    with pytest.raises(UnsupportedLayerError, match=r"'1' \(EmbeddingBag\)"):
        InLoop(model, MixturePolicy(3))
    assert num_hooks(model) == 0


# ------------------------------------------------------------------ lifetime and state


def test_close_takes_everything_off():
    run = Run().train(2)
    assert num_hooks(run.model) == 2
    run.learner.close()
    assert num_hooks(run.model) == 0
    assert run.learner.reference.waiting is None
    with InLoop(run.model, MixturePolicy(4)):
        assert num_hooks(run.model) > 0
    assert num_hooks(run.model) == 0


def test_a_forgotten_learner_takes_its_hooks_along():
    net = make_net()
    Run(net=net).train(2)
    gc.collect()
    assert num_hooks(net) == 0


def test_paused_passes_leave_no_trace():
    plain, with_pause = Run(accumulate=1), Run(accumulate=1)
    for _ in range(4):
        plain.step()
        with_pause.step()
        with with_pause.learner.paused():
            F.cross_entropy(with_pause.model(torch.randn(3, 16)), torch.randint(4, (3,))).backward()
        with_pause.optimizer.zero_grad()
    assert torch.equal(plain.policy.scores, with_pause.policy.scores)
    assert rewards_of(plain)[1:] == rewards_of(with_pause)[1:]


def test_step_inside_paused_is_refused_and_changes_nothing():
    run, other = Run(accumulate=1), Run(accumulate=1)
    for _ in range(3):
        x, y = run.mixture.draw(run.learner.sample(64))
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        with pytest.raises(UsageError, match="inside learner.paused"), run.learner.paused():
            run.learner.step(loss)
        run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        other.step()
    assert rewards_of(run)[1:] == rewards_of(other)[1:]


def test_evaluation_between_steps_leaves_no_trace():
    plain, evaluating = Run(accumulate=1), Run(accumulate=1)
    for _ in range(4):
        plain.step()
        evaluating.step()
        evaluating.model.eval()
        evaluating.model(torch.randn(9, 16))
        evaluating.model.train()
    assert torch.equal(plain.policy.scores, evaluating.policy.scores)


def test_the_tape_is_freed_when_it_is_paid():
    run = Run().train(2)
    tape = run.learner.reference.waiting.tape
    assert tape.calls
    run.step()
    assert tape.calls == []


def test_two_learners_on_one_model():
    run = Run(accumulate=1)
    other = InLoop(run.model, MixturePolicy(4), update=False, record=Recording(layers=["2"]))
    for _ in range(3):
        actions = run.learner.sample(16)
        other.sample(16)
        x, y = run.mixture.draw(actions)
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.learner.step(loss)
        report = other.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert report.rewarded
    assert report.reward_mean != run.reports[-1].reward_mean


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reference": "previous"},
        {"interleave": True},
        {"reward": "nslr"},
        {"reward": "nslr", "normalisation": "window"},
    ],
    ids=str,
)
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(options, tmp_path):
    def checkpoint(run):
        return {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "learner": run.learner.state_dict(),
            "mixture": run.mixture.generator.get_state(),
        }

    uninterrupted = Run(accumulate=3, **options).train(11)
    torch.save(checkpoint(uninterrupted), tmp_path / "state.pt")
    uninterrupted.train(12)

    continued = Run(accumulate=3, seed=99, **options).train(2)
    state = torch.load(tmp_path / "state.pt", weights_only=True)  # executes no code
    continued.model.load_state_dict(state["model"])
    continued.optimizer.load_state_dict(state["optimizer"])
    continued.learner.load_state_dict(state["learner"])
    continued.mixture.generator.set_state(state["mixture"])
    continued.train(12)

    assert torch.equal(continued.policy.scores, uninterrupted.policy.scores)
    assert not torch.equal(continued.policy.scores, torch.zeros(4))
    for name, value in uninterrupted.model.state_dict().items():
        assert torch.equal(continued.model.state_dict()[name], value)
    assert str(rewards_of(continued)[-12:]) == str(rewards_of(uninterrupted)[-12:])
    assert continued.reports[-1].step == 23
    waited = options.get("reference") != "previous"  # "previous" leaves nothing to wait for
    assert continued.reports[2].rewarded is not waited


def test_an_announced_draw_survives_with_the_policy_that_made_it(tmp_path):
    def train_on(run):
        x, y = run.mixture.draw(run.learner._sampler.waiting[0].actions)
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        report = run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return report

    run = Run(accumulate=1).train(3)
    ahead = run.learner.draw(32)
    run.train(2)  # the policy moves
    run.learner.use(ahead)
    run.learner.num_dropped = 7
    states = run.learner, run.model, run.optimizer
    torch.save([*(part.state_dict() for part in states), run.mixture.generator.get_state()], tmp_path / "state.pt")
    other = Run(accumulate=1, seed=8)
    learner, model, optimizer, generator = torch.load(tmp_path / "state.pt", weights_only=True)
    other.learner.load_state_dict(learner)
    other.model.load_state_dict(model)
    other.optimizer.load_state_dict(optimizer)
    other.mixture.generator.set_state(generator)
    first, second = train_on(run), train_on(other)
    assert first.lag == second.lag > 0
    assert first.num_dropped == second.num_dropped == 7
    run.train(2)
    other.train(2)
    assert torch.equal(run.policy.scores, other.policy.scores)


def test_a_state_that_does_not_fit_changes_nothing():
    run, other = Run(accumulate=1).train(3), Run(make_sources(5), accumulate=1).train(3)
    before = run.policy.scores.detach().clone(), run.learner.num_steps
    with pytest.raises(
        UsageError, match=r"of a policy with \{'scores': \[5\]\}; this one, a MixturePolicy, has \{'scores': \[4\]\}"
    ):
        run.learner.load_state_dict(other.learner.state_dict() | {"num_steps": 99})
    assert torch.equal(run.policy.scores, before[0])
    assert run.learner.num_steps == before[1]
    state = run.learner.state_dict()
    with pytest.raises(UsageError, match=r"no state of an InLoop learner: it has no \['recording'\]"):
        run.learner.load_state_dict({name: part for name, part in state.items() if name != "recording"})
    run.train(2)
    assert not torch.equal(state["policy"]["scores"], run.policy.scores)  # a copy, not a view of what goes on


def test_saving_after_every_step_is_noticed(caplog):
    run = Run().train(1)
    run.learner.state_dict()
    assert caplog.text == ""
    run.train(1)
    run.learner.state_dict()
    assert "called after every step, nothing is ever rewarded" in caplog.text


def test_each_update_is_taken_at_the_policy_that_drew():
    """φ moves between drawing and paying; the gradient of log p belongs to the φ of then."""
    policy = MixturePolicy(4)
    run = Run(policy=policy, accumulate=1, optimizer=torch.optim.SGD(policy.parameters(), lr=0.5))
    scores, actions = [policy.scores.detach().clone()], []
    rewards = []
    original = run.learner.reward
    run.learner.reward = type("Spy", (), {"needs_tape": True, "__call__": lambda _, *a: spy(original(*a))})()

    def spy(rewards_N):
        rewards.append(rewards_N)
        return rewards_N

    for _ in range(5):
        run.step()
        scores.append(policy.scores.detach().clone())
    generator = torch.Generator().manual_seed(0)
    for t in range(4):  # step t draws by scores[t] and is paid in step t + 1
        drawn_by = MixturePolicy(4)
        drawn_by.load_state_dict({"scores": scores[t]})
        actions = drawn_by.sample(64, generator)
        (gradient,) = torch.autograd.grad((normalise(rewards[t]) * drawn_by.log_prob(actions)).sum(), [drawn_by.scores])
        torch.testing.assert_close(scores[t + 2] - scores[t + 1], 0.5 * gradient, rtol=1e-4, atol=1e-5)


def test_the_same_seed_gives_the_same_run():
    first, second = Run(accumulate=1).train(6), Run(accumulate=1).train(6)
    assert torch.equal(first.policy.scores, second.policy.scores)
    torch.manual_seed(5)
    by_torch_seed = InLoop(first.model, MixturePolicy(4)).sample(20)
    assert torch.equal(InLoop(first.model, MixturePolicy(4)).sample(20), by_torch_seed)
    torch.manual_seed(6)
    assert not torch.equal(InLoop(first.model, MixturePolicy(4)).sample(20), by_torch_seed)


def test_mixture_and_learner_draw_independently_without_arguments():
    """Every example of every source is drawn sooner or later; with generators of one seed most never would be."""
    sources = [(torch.arange(100 * k, 100 * (k + 1)),) for k in range(3)]
    mixture, learner = Mixture(sources), InLoop(make_net(), MixturePolicy(3))
    (drawn,) = mixture.draw(learner.sample(6000))
    assert len(drawn.unique()) == 300


def test_batchnorm_is_warned_of_once(caplog):
    refusals.warn_once.cache_clear()
    for _ in range(2):
        InLoop(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), MixturePolicy(2)).close()
    assert len([line for line in caplog.messages if "mixes the examples" in line]) == 1
    refusals.warn_once.cache_clear()
    InLoop(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), MixturePolicy(2)).close()
    assert len([line for line in caplog.messages if "mixes the examples" in line]) == 1
