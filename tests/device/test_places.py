"""Policies, actions, generators, statistics and states live on the CPU. Whatever is given on the device is moved there, once."""

import io

import pytest
import torch

from inloop import InLoop, Mixture, MixturePolicy, Reinforce
from inloop.errors import UsageError
from tests.device.pretend_cuda.watching import host_synchronisations
from tests.device.problems import PROBLEMS
from tests.device.runs import Run, assert_same_rewards

# ------------------------------------------------------------------ what users give


def reference_run():
    """With everything on the CPU but the model."""
    return Run("cuda", update=lambda run: Reinforce(accumulate=1)).train(6)


def test_a_policy_on_the_device_is_moved():
    run = Run("cuda", policy=lambda run: MixturePolicy(run.mixture).cuda(), update=lambda run: Reinforce(accumulate=1))
    assert_same_rewards(run.train(6), reference_run())
    assert not run.learner.policy.scores.is_cuda
    assert not run.learner.sample(3).is_cuda


def test_a_generator_on_the_device_gives_choices_on_the_cpu():
    chosen = []
    for _ in range(2):
        run = Run("cuda", generator=torch.Generator("cuda").manual_seed(3)).train(3)
        chosen.append(run.learner.sample(50))
    assert torch.equal(*chosen)
    assert not chosen[0].is_cuda


@pytest.mark.parametrize("selection", ["replacement", "passes"])
def test_a_mixtures_generator_may_be_on_the_device(selection):
    def draw():
        generator = torch.Generator("cuda").manual_seed(3)
        return Mixture(PROBLEMS["mlp"].sources(), selection, generator).draw(torch.zeros(9, dtype=torch.long))

    for column, other in zip(draw(), draw(), strict=True):
        assert torch.equal(column, other)


def use(run, actions):
    """Train a step on actions that were chosen elsewhere."""
    run.learner.use(actions)
    x, y = run.mixture.draw(actions)
    run.backward(x.cuda(), y.cuda())
    run.learn()
    run.move()


@pytest.mark.parametrize("options", [{}, {"part": 0.5}], ids=["whole", "part"])
def test_actions_on_the_device_are_moved_once(options):
    runs = [Run("cuda", update=lambda run: Reinforce(accumulate=1), **options) for _ in range(2)]
    for run, device in zip(runs, ("cuda", "cpu"), strict=True):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(5)
        for _ in range(6):
            use(run, torch.randint(3, (12,), generator=generator).to(device))
    assert_same_rewards(*runs)
    with host_synchronisations() as counted:
        runs[0].learner.use(torch.zeros(12, dtype=torch.long, device="cuda"))
    assert len(counted) <= 1 + 1, str(counted)  # the first of them is to make the actions here


def test_a_mixture_moves_actions():
    drawn = [Run("cpu").mixture.draw(torch.tensor([0, 1, 2, 2]).to(device)) for device in ("cpu", "cuda")]
    for column, other in zip(*drawn, strict=True):
        assert torch.equal(column, other)


@pytest.fixture
def default_device():
    """The device as the default for new tensors, as some users have it."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def test_new_tensors_may_be_on_the_device_by_default(default_device):
    run = Run("cuda", update=lambda run: Reinforce(accumulate=1)).train(6)
    assert not run.learner.policy.scores.is_cuda
    assert not run.learner.sample(3).is_cuda
    printed = str(run.learner)
    torch.set_default_device(None)
    other = reference_run()
    assert_same_rewards(run, other)
    assert printed == str(other.learner)


def test_default_generators_go_with_a_default_device(default_device):
    problem = PROBLEMS["mlp"]
    mixture, model = Mixture(problem.sources()), problem.model().cuda()
    learner = InLoop(model, MixturePolicy(mixture))
    for _ in range(3):
        x, y = mixture.draw(learner.sample(6))
        loss = problem.loss(model(x.cuda()), y.cuda())
        loss.backward()
        report = learner.step(loss)
        model.zero_grad()
    assert report.rewarded


def test_a_report_is_on_the_cpu():
    reports = []
    Run("cuda", callback=lambda run: reports.append).train(3)
    summary = reports[-1].rewards
    assert not any(tensor.is_cuda for tensor in (summary.count_K, summary.mean_K, summary.std_K))


# ------------------------------------------------------------------ states


def reloaded(state, location):
    """The state as it comes from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location=location)


LEARNERS = {
    "next": {},
    "trail": {"reference": "trail"},
    "previous": {"reference": "previous"},
    "Reinforce": {"update": lambda run: Reinforce(accumulate=3)},
    "optimizer": {"knows_optimizer": True},
    "told": {"tells": True},
}


@pytest.mark.parametrize("location", ["cuda", "cpu"])
@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("announced", [False, True], ids=["", "announced"])
def test_a_state_continues_wherever_it_was_loaded(location, learner, announced):
    """Also with a batch that was announced before saving, and into a learner whose last step waits for its reward."""
    options = LEARNERS[learner]
    first = Run("cuda", **options).train(4)
    if announced:
        first.learner.sample(12)
    state = first.learner.state_dict()
    runs = []
    for loaded in (reloaded(state, location), state):
        run = Run("cuda", **options).train(2)
        run.learner.load_state_dict(loaded)
        torch.manual_seed(1)
        num_before = len(run.rewards)
        if announced:
            x, y = (column[:12].cuda() for column in run.problem.sources()[0])
            run.backward(x, y)
            run.learn()
            run.move()
        run.train(4)
        assert len(run.rewards) >= num_before + 3
        runs.append(run)
    assert_same_rewards(*runs)
    assert str(runs[0].learner) == str(runs[1].learner)


def test_a_mixtures_state_continues_wherever_it_was_loaded():
    mixture = Run("cuda").train(2).mixture
    state = reloaded(mixture.state_dict(), "cuda")
    expected = mixture.draw(torch.tensor([0, 1, 2]))
    other = Run("cuda").mixture
    other.load_state_dict(state)
    for column, drawn in zip(expected, other.draw(torch.tensor([0, 1, 2])), strict=True):
        assert torch.equal(column, drawn)
    assert not other.drawn_K.is_cuda


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("to_none", [False, True], ids=["zero", "None"])
@pytest.mark.parametrize(
    "options",
    [{}, {"reference": "trail"}, {"part": 0.5}, {"problem": PROBLEMS["lstm"]}, {"problem": PROBLEMS["embedding"]}],
    ids=["next", "trail", "part", "lstm", "embedding"],
)
def test_cleared_gradients_are_refused_with_the_fix(options, to_none):
    run = Run("cuda", **options).train(3)
    run.backward(*run.draw())
    run.optimizer.zero_grad(set_to_none=to_none)
    with pytest.raises(UsageError, match="they were cleared before learner.step"):
        run.learn()


@pytest.mark.parametrize("fused", [False, True])
def test_a_forgotten_step_is_noticed_though_fused_optimizers_raise_no_versions(fused, caplog):
    run = Run("cuda", make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused))
    weight = run.model[0].weight
    for _ in range(4):
        run.backward(*run.draw())
        before = weight._version
        run.optimizer.step()
        assert (weight._version == before) == fused
        run.optimizer.zero_grad()
    run.passes.clear()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "or used by the optimizer, without learner.step (2 time(s) in a row)" in warning.getMessage()
    run.optimizer.zero_grad()
    run.train(3)
    assert run.learner.num_dropped == 0


def test_a_step_after_a_fused_optimizers_is_refused():
    run = Run("cuda", make_optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True), knows_optimizer=True)
    run.train(3)
    run.backward(*run.draw())
    run.optimizer.step()
    with pytest.raises(UsageError, match=r"learner\.step was called after optimizer\.step"):
        run.learn()
