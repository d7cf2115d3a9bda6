"""What is saved of a learner, and runs that continue from it."""

import pytest
import torch
import torch.nn.functional as F

import inloop
from inloop.errors import UsageError
from tests.training import Run, make_sources, rewards_of


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


def drop_a_step(run):
    x, y = run.mixture.draw(run.learner.sample(16))
    loss = F.cross_entropy(run.model(x), y) * float("nan")
    loss.backward()
    assert run.learner.step(loss).dropped
    run.optimizer.zero_grad()


def test_an_announced_draw_survives_with_the_policy_that_made_it(tmp_path):
    def train_on(run):
        x, y = run.mixture.draw(ahead.actions)
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        report = run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return report

    run = Run(accumulate=1).train(3)
    drop_a_step(run)
    ahead = run.learner.draw(32)
    run.train(2)  # the policy moves
    run.learner.use(ahead)
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
    assert first.num_dropped == second.num_dropped == 1
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


def test_whether_steps_are_aligned_early_is_part_of_the_state():
    run = Run().train(3)
    assert run.learner.state_dict()["recording"]["early"] == "on"
    other = Run()
    other.learner.load_state_dict(run.learner.state_dict())
    assert other.learner.state_dict()["recording"]["early"] == "on"


def test_the_state_of_another_update_rule_is_refused():
    run = Run().train(3)
    with pytest.raises(UsageError, match="of another update rule than NoUpdate"):
        Run(update=False).learner.load_state_dict(run.learner.state_dict())


def test_states_of_another_model_or_optimizer_are_refused():
    """Their statistics and verdicts would go on as if it were the same run."""

    def state_of(width=4, optimizer=torch.optim.AdamW):
        model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 2))
        return inloop.InLoop(model, inloop.MixturePolicy(2), optimizer=optimizer(model.parameters()))

    learner = state_of()
    learner.load_state_dict(state_of().state_dict())
    with pytest.raises(UsageError, match=r"another model, .*policy.load_state_dict\(state\['policy'\]\)"):
        learner.load_state_dict(state_of(width=5).state_dict())
    with pytest.raises(UsageError, match="a learner with SGD; this one has AdamW"):
        learner.load_state_dict(state_of(optimizer=torch.optim.SGD).state_dict())


def test_a_state_of_other_sources_is_refused_by_their_names():
    def learner(names):
        mixture = inloop.Mixture({name: (torch.randn(6, 4), torch.zeros(6).long()) for name in names})
        return inloop.InLoop(torch.nn.Linear(4, 3), inloop.MixturePolicy(mixture))

    state = learner(["web", "books"]).state_dict()
    learner(["web", "books"]).load_state_dict(state)
    with pytest.raises(UsageError, match="sources web, books; the policy has books, web"):
        learner(["books", "web"]).load_state_dict(state)
