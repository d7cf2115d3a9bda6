"""The loader: choices in this process, stateless workers, a lag that is known, and resuming bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset

from inloop import InLoop, Mixture, MixturePolicy, Reinforce
from inloop.errors import UsageError
from tests.learners import make_learner
from tests.training import make_net, make_sources


class Rows(Dataset):
    """A map-style dataset, so that workers have something to fetch."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


class RowStream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return zip(self.x, self.y.tolist(), strict=True)


class Training:
    def __init__(self, sources, seed=0, num_batches=None, num_workers=0, batch_size=16, **options):
        self.model = make_net(seed=seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.reports, self.batches = [], []
        torch.manual_seed(seed)
        self.learner = make_learner(
            self.model, MixturePolicy(len(sources)), accumulate=2, callback=self.reports.append, **options
        )
        self.mixture = Mixture(sources)
        self.loader = self.mixture.loader(self.learner, batch_size, num_batches=num_batches, num_workers=num_workers)

    def run(self, stop_after=None):
        for done, (actions, (x, y)) in enumerate(self.loader, start=1):
            self.batches.append((actions.clone(), x.clone()))
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.learner.step(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if done == stop_after:
                break
        return self

    def state(self):
        return [
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.learner.state_dict(),
            self.loader.state_dict(),
        ]

    def load(self, state):
        parts = (self.model, self.optimizer, self.learner, self.loader)
        for part, saved in zip(parts, state, strict=True):
            part.load_state_dict(saved)


SOURCES = {
    "tensors": lambda: make_sources(3, size=60),
    "datasets": lambda: [Rows(*source) for source in make_sources(3, size=60)],
    "streams": lambda: [Rows(*make_sources(3, size=60)[0]), *[RowStream(*s) for s in make_sources(3, size=25)[1:]]],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_examples_come_from_the_sources_that_the_actions_name(kind):
    sources = SOURCES[kind]()
    training = Training(sources, num_batches=5, num_workers=2 if kind != "tensors" else 0).run()
    assert len(training.batches) == 5
    owner = {tuple(row.tolist()): k for k, s in enumerate(sources) for row in (s[0] if isinstance(s, tuple) else s.x)}
    for actions, x in training.batches:
        assert [owner[tuple(row.tolist())] for row in x] == actions.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_change_of_the_policy_takes_effect_after_what_is_on_order(num_workers):
    training = Training(SOURCES["datasets"](), num_batches=14, num_workers=num_workers).run()
    most = max(report.lag for report in training.reports)
    # Two workers with two batches each on order: up to 4 batches, in which the policy moves every second step.
    assert most == {0: 0, 2: 2}[num_workers]
    assert all(report.rewarded for report in training.reports[1:])


@pytest.mark.parametrize("kind", ["datasets", "streams"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_continued_run_equals_the_uninterrupted_one_with_workers_and_prefetch(kind, num_workers, tmp_path):
    uninterrupted = Training(SOURCES[kind](), num_batches=16, num_workers=num_workers)
    iterator = iter(uninterrupted.loader)

    def advance(training, batches, steps):
        for _ in range(steps):
            actions, (x, y) = next(batches)
            training.batches.append((actions, x))
            loss = F.cross_entropy(training.model(x), y)
            loss.backward()
            training.learner.step(loss)
            training.optimizer.step()
            training.optimizer.zero_grad()

    advance(uninterrupted, iterator, 6)
    torch.save(uninterrupted.state(), tmp_path / "state.pt")
    advance(uninterrupted, iterator, 10)

    continued = Training(SOURCES[kind](), seed=3, num_batches=16, num_workers=num_workers)
    continued.load(torch.load(tmp_path / "state.pt", weights_only=True))
    advance(continued, iter(continued.loader), 10)
    for (actions, x), (other_actions, other_x) in zip(continued.batches, uninterrupted.batches[6:], strict=True):
        assert torch.equal(actions, other_actions)
        assert torch.equal(x, other_x)
    assert torch.equal(continued.learner.policy.scores, uninterrupted.learner.policy.scores)
    assert torch.equal(continued.mixture.drawn_K, uninterrupted.mixture.drawn_K)
    assert continued.learner.policy.scores.abs().max() > 0


@pytest.mark.parametrize("kind", ["datasets", "streams"])
def test_what_is_on_order_when_the_loop_is_left_comes_first_in_the_next(kind):
    whole = Training(SOURCES[kind](), num_batches=8, num_workers=2).run()
    in_two = Training(SOURCES[kind](), num_batches=8, num_workers=2).run(stop_after=3)
    assert in_two.mixture.drawn_K.sum() == 3 * 16  # what is on order is not counted as used
    in_two.run()
    assert len(in_two.batches) == 8
    for (_, x), (_, other) in zip(whole.batches, in_two.batches, strict=True):
        assert torch.equal(x, other)


def test_interleaving_through_the_loader():
    training = Training(SOURCES["datasets"](), num_batches=8, num_workers=2, interleave=True).run()
    assert [report.rewarded for report in training.reports] == [False, True] * 4


class Augmented(Rows):
    def __getitem__(self, index):
        return self.x[index] + 0.01 * torch.rand(()), int(self.y[index])


def test_random_transforms_in_workers_follow_the_seed_and_do_not_repeat():
    def first_batch(seed, skip=0):
        training = Training([Augmented(*s) for s in make_sources(2, size=1)], seed=seed, num_batches=9, num_workers=1)
        training.run(stop_after=skip) if skip else None
        return training.run(stop_after=1).batches[-1][1]

    assert torch.equal(first_batch(0), first_batch(0))
    assert not torch.equal(first_batch(0).sort(dim=0).values, first_batch(1).sort(dim=0).values)
    assert not torch.equal(first_batch(0).sort(dim=0).values, first_batch(0, skip=2).sort(dim=0).values)


def test_saving_between_a_batch_and_its_step_is_refused():
    training = Training(SOURCES["datasets"](), num_batches=4)
    next(iter(training.loader))
    with pytest.raises(UsageError, match=r"save after learner.step"):
        training.loader.state_dict()


def test_a_loader_that_has_ended_says_so_instead_of_giving_nothing():
    training = Training(SOURCES["datasets"](), num_batches=4)
    assert len(training.loader) == 4
    training.run(stop_after=1)
    assert len(training.loader) == 3
    state = training.loader.state_dict()
    training.run()
    with pytest.raises(
        UsageError, match="has yielded all of its num_batches=4, which counts over its life, not by epoch"
    ):
        next(iter(training.loader))
    training.loader.load_state_dict(state)
    assert len(list(training.loader)) == 3
    with pytest.raises(TypeError, match="has no end"):
        len(Training(SOURCES["datasets"]()).loader)


def test_the_loader_does_not_touch_torchs_own_generator():
    training = Training(SOURCES["datasets"](), num_batches=3, num_workers=1)
    before = torch.get_rng_state()
    training.run()
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_arguments_are_named():
    sources = make_sources(3)
    learner = InLoop(make_net(), MixturePolicy(2))
    with pytest.raises(UsageError, match="chooses among 2 sources, the mixture has 3"):
        Mixture(sources).loader(learner, 8)
    learner = InLoop(make_net(), MixturePolicy(3))
    for options, message in (
        ({"batch_size": 0}, "batch_size=0: allowed are whole numbers from 1"),
        ({"batch_size": 4, "num_workers": -1}, "num_workers=-1"),
        ({"batch_size": 4, "prefetch": 0}, "prefetch=0"),
    ):
        with pytest.raises(UsageError, match=message):
            Mixture(sources).loader(learner, **options)


class Marked(Dataset):
    """Every example says which source it is from."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.full((16,), float(self.source)), 0


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, 2), (1, 2), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("change_after", [1, 2, 7])
def test_a_change_of_the_policy_reaches_the_data_after_exactly_the_batches_on_order(
    num_workers, prefetch, change_after
):
    model = make_net(seed=0)
    policy = MixturePolicy(2, form="softmax")
    learner = InLoop(
        model, policy, update=Reinforce(accumulate=1, optimizer=torch.optim.SGD(policy.parameters(), lr=0.0))
    )
    with torch.no_grad():
        policy.scores.copy_(torch.tensor([50.0, -50.0]))
    loader = Mixture([Marked(0), Marked(1)]).loader(learner, 4, num_workers=num_workers, prefetch=prefetch)
    first_of_the_new = None
    for number, (actions, (x, _)) in enumerate(loader, start=1):
        assert torch.equal(x[:, 0].long(), actions)
        if first_of_the_new is None and bool((actions == 1).all()):
            first_of_the_new = number
            break
        assert bool((actions == 0).all())
        model(x).square().mean().backward()
        learner.step(1.0)
        model.zero_grad()
        if number == change_after:
            with torch.no_grad():
                policy.scores.copy_(torch.tensor([-50.0, 50.0]))
        assert number < 30
    assert loader.batches_ahead == num_workers * prefetch
    assert first_of_the_new == change_after + loader.batches_ahead + 1


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, 2), (1, 2), (1, 4), (2, 2), (2, 4)])
def test_log_probabilities_are_those_of_the_policy_that_drew(num_workers, prefetch):
    """Of every action that is paid: at the parameters of its draw, however many updates ago that was; and the lag is that number."""
    torch.manual_seed(0)
    model = make_net(seed=0)
    policy = MixturePolicy(3)
    history, lags = [policy.scores.detach().clone()], []
    learner = InLoop(model, policy, callback=lambda report: lags.append(report.lag), update=Reinforce(accumulate=1))
    add, paid = learner.update.add, []

    def watch(draws, rewards_N):
        for draw in draws:
            expected = MixturePolicy(3)
            with torch.no_grad():
                expected.scores.copy_(history[draw.version])
            assert torch.equal(draw.policy.log_prob(draw.actions), expected.log_prob(draw.actions))
            paid.append(draw.version)
        updated = add(draws, rewards_N)
        history.append(policy.scores.detach().clone())
        return updated

    learner.update.add = watch
    sources = [Rows(x, y) for x, y in make_sources(3)]
    loader = Mixture(sources).loader(learner, 8, num_workers=num_workers, prefetch=prefetch, num_batches=25)
    for _, (x, y) in loader:
        F.cross_entropy(model(x), y).backward()
        learner.step(1.0)
        model.zero_grad()
    assert len(paid) == 24
    assert len({tuple(scores.tolist()) for scores in history}) == 25
    # Step t is the (t-1)-th that pays, and its batch was drawn when those on order before it were not used yet.
    assert lags == [min(max(step - 2, 0), loader.batches_ahead) for step in range(1, 26)]
