"""Actions: drawn by seed, ahead of their step or elsewhere, each with the policy that drew them."""

import pytest
import torch
import torch.nn.functional as F

from inloop import InLoop, Mixture, MixturePolicy
from inloop.errors import UsageError
from inloop.updates.reinforce import normalise
from tests.training import Run, make_net


def test_each_update_is_taken_at_the_policy_that_drew():
    """φ moves between drawing and rewarding; the gradient of log p belongs to the φ of then."""
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
    for t in range(4):  # step t draws by scores[t] and is rewarded in step t + 1
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
    assert other.learner.num_announced == 0


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
        assert run.learner.num_announced == 0
    assert int(report.rewards.count_K.sum()) == int(keep.sum())


@pytest.mark.parametrize("n", [-3, 2.5, None])
def test_only_whole_numbers_of_examples_are_sampled(n):
    with pytest.raises(UsageError, match="whole number from 0; got"):
        Run().learner.sample(n)


def test_actions_that_the_policy_cannot_have_drawn_are_refused_at_once():
    run = Run()
    F.cross_entropy(run.model(torch.randn(3, 16)), torch.randint(0, 4, (3,))).backward()
    with pytest.raises(UsageError, match="has the choices 0 to 3"):
        run.learner.use(torch.tensor([0, 1, 9]))
    with pytest.raises(UsageError, match="got list"):
        run.learner.use([0, 1, 2])
