"""The excess of a loss over what the model expects: it tells wrong labels from hard examples."""

import math

import pytest
import torch
import torch.nn.functional as F

import inloop
from inloop.errors import BatchSizeError, UsageError
from inloop.step import Draw
from inloop.verdicts import SourceStatistics, Told, excess, told_by
from inloop.verdicts.excess import losses_and_expected
from inloop.verdicts.labels import MEMORY, LabelMeans
from inloop.verdicts.signs import median_of_others


def draws_of(n):
    """One draw of n examples."""
    return [Draw(torch.zeros(n, dtype=torch.long), (n,), inloop.MixturePolicy(2), 0)]


def losses_and_excess(logits, labels):
    losses, expected = (values_N.float() for values_N in losses_and_expected(logits, labels))
    return losses, losses - expected


def test_the_excess_is_minus_the_margin():
    torch.manual_seed(0)
    f, y = 3 * torch.randn(6, 5), torch.randint(5, (6,))
    losses, excess_N = losses_and_excess(f, y)
    p = f.softmax(dim=1)
    torch.testing.assert_close(losses, F.cross_entropy(f, y, reduction="none"))
    torch.testing.assert_close(excess_N, (p * f).sum(dim=1) - f[range(6), y])


def test_labels_below_zero_do_not_count():
    torch.manual_seed(0)
    f = torch.randn(3, 4, 5)
    y = torch.tensor([[1, 2, -100, -100], [0, 0, 0, 4], [-100] * 4])
    losses, excess_N = losses_and_excess(f, y)
    torch.testing.assert_close(losses[0], F.cross_entropy(f[0], y[0]))
    torch.testing.assert_close(losses[1], F.cross_entropy(f[1], y[1]))
    torch.testing.assert_close(excess_N[0], losses_and_excess(f[0, :2], y[0, :2])[1].mean())
    assert bool(losses[2].isnan())


def test_a_class_that_the_model_excludes():
    losses, excess_N = losses_and_excess(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), torch.tensor([0, 1]))
    torch.testing.assert_close(losses, torch.tensor([0.0, 2.0]).clamp_max(torch.log(torch.tensor(2.0))))
    torch.testing.assert_close(excess_N, torch.zeros(2))


@pytest.mark.parametrize("shape", [(7, 5), (7, 3, 5)])
def test_large_logits_are_taken_in_parts(monkeypatch, shape):
    torch.manual_seed(0)
    f, y = torch.randn(shape), torch.randint(5, shape[:-1])
    whole = told_by(None, f, y, draws_of(7))
    monkeypatch.setattr(excess, "_MOST_NUMBERS", 2 * shape[-1])
    parts = told_by(None, f, y, draws_of(7))
    torch.testing.assert_close(parts.own_N, whole.own_N)
    torch.testing.assert_close(parts.expected_N, whole.expected_N)
    torch.testing.assert_close(parts.losses_N, whole.losses_N)
    assert (parts.labels_N is None) == (len(shape) == 3)


def test_own_losses_are_kept():
    losses = torch.tensor([1.0, 2.0], requires_grad=True)
    found = told_by(losses, torch.zeros(2, 3), torch.tensor([0, 1]), draws_of(2))
    assert found.losses_N.tolist() == [1.0, 2.0]
    assert not found.losses_N.requires_grad


@pytest.mark.parametrize(
    ("logits", "labels", "error", "says"),
    [
        (torch.zeros(2, 3), None, UsageError, "no labels="),
        (None, torch.zeros(2).long(), UsageError, "no logits="),
        (torch.zeros(2, 3), torch.zeros(3).long(), BatchSizeError, r"\(2, 3\)"),
        (torch.zeros(2, 5, 3), torch.zeros(2, 3).long(), BatchSizeError, r"\[N, T, C\]"),
        (torch.zeros(1, 3), torch.zeros(1).long(), BatchSizeError, "for the step's 2 examples. Fix: torch.cat"),
        (torch.zeros(2), torch.zeros(2).long(), BatchSizeError, r"\(2,\)"),
        (torch.zeros(2, 3), torch.zeros(2), UsageError, "whole numbers"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), UsageError, "the label 3; the logits have 3 classes"),
    ],
)
def test_what_cannot_be_logits_and_labels_is_refused(logits, labels, error, says):
    with pytest.raises(error, match=says):
        told_by(None, logits, labels, draws_of(2))


def compared_by(means, values, labels, source):
    return torch.from_numpy(means.compare(values, labels, source))


class Sources:
    """Statistics of sources of six classes, told the logits and labels of many examples; ``add`` draws some for a source."""

    def __init__(self, num_sources=4, seed=0, drawn=None):
        self.generator = torch.Generator().manual_seed(seed)
        self.statistics = SourceStatistics(num_sources)
        self.drawn = num_sources if drawn is None else drawn

    def add(self, rounds=20, n=60, sharpness=1.0, wrong=(), only=None, overconfident=(), hard=()):
        """``wrong``: source and share of labels that are wrong; ``only``: sources that have a single class each."""
        for _ in range(rounds):
            for k in range(self.drawn):
                f = sharpness * torch.randn(n, 6, generator=self.generator)
                f = 0.2 * f if k in hard else f
                y = f.softmax(dim=1).multinomial(1, generator=self.generator)[:, 0]  # labels follow the predictions
                if only is not None:
                    kept = y == k
                    f, y = f[kept], y[kept]
                is_wrong = torch.rand(len(y), generator=self.generator) < dict(wrong).get(k, 0.0)
                y = torch.where(is_wrong, torch.randint(6, y.shape, generator=self.generator), y)
                f = 3 * f if k in overconfident else f
                losses, expected = losses_and_expected(f, y)
                self.statistics.signs.add(torch.full(y.shape, k), Told(losses, losses, expected, y))
        return self

    @property
    def surprising(self):
        return self.statistics.surprising().tolist()


def test_partly_wrong_labels_surprise_and_hard_examples_do_not():
    told = Sources().add(sharpness=3.0, wrong=[(1, 0.3)], hard=(2,))
    assert told.surprising == [False, True, False, False]
    assert told.statistics.signs.excess.mean_K[2].abs() < 0.05


def test_sources_whose_labels_do_not_surprise_are_ok():
    """Without a single reward: the interval of the advantage says nothing."""
    words = [v.word for v in Sources().add(sharpness=3.0, wrong=[(1, 0.3)]).statistics.verdicts()]
    assert words == ["ok", "different or partly wrong", "ok", "ok"]
    assert {v.word for v in Sources().add(rounds=1, sharpness=3.0).statistics.verdicts()} == {"undecided"}
    assert {v.word for v in Sources().add(sharpness=0.3).statistics.verdicts()} == {"undecided"}  # nothing is learned


def test_labels_that_are_told_give_a_stream_s_constant_prediction():
    """The labels of a stream cannot be counted beforehand."""
    told = Sources().add(sharpness=3.0, wrong=[(1, 1.0)])
    assert told.statistics.sources.label_counts() == [None] * 4
    constants = [v.losses.constant for v in told.statistics.verdicts()]
    assert constants == pytest.approx([math.log(6)] * 4, abs=0.01)
    assert told.statistics.not_learning().tolist() == [False, True, False, False]


def test_nothing_surprises_before_most_sources_have_learned_much():
    told = Sources().add(sharpness=3.0, wrong=[(1, 0.3)], hard=(0, 2, 3))
    assert told.surprising == [False] * 4


def test_three_of_seven_sources_may_be_wrong():
    told = Sources(7).add(sharpness=3.0, wrong=[(0, 0.4), (1, 0.4), (2, 0.4)])
    assert told.surprising == [True] * 3 + [False] * 4


def test_equal_sources_never_surprise():
    for seed in range(20):
        told = Sources(seed=seed)
        for _ in range(20):
            assert not any(told.add(rounds=1, n=30, sharpness=3.0).surprising)


def test_a_model_that_is_too_sure_of_all_sources_accuses_none():
    assert Sources().add(sharpness=2.0, overconfident=range(4)).surprising == [False] * 4


def test_sources_of_one_class_each_are_not_judged_by_how_hard_their_class_is():
    """Given the class, a calibrated model's excess is not 0: it is high for a class that is often taken for others."""
    told = Sources(6).add(sharpness=1.5, only=True, n=300)
    assert not any(told.surprising)
    assert not told.statistics.signs.compared_excess.number_K.any()


def test_with_too_few_examples_nothing_is_said():
    assert Sources().add(rounds=1, n=30, sharpness=3.0, wrong=[(0, 1.0)]).surprising == [False] * 4
    assert not SourceStatistics(3).surprising().any()


def test_values_are_compared_with_the_mean_of_their_label():
    torch.manual_seed(0)
    labels, source, values = torch.randint(3, (150,)), torch.randint(2, (150,)), torch.randn(150)
    values += labels
    compared = compared_by(LabelMeans(2), values, labels, source)
    for y in range(3):
        of_y = labels == y
        centred = values[of_y].double() - values[of_y].double().mean()
        for k in range(2):
            share_y, share = (source[of_y] == k).double().mean(), (source == k).double().mean()
            overlap = min(1.0, float((1 - share_y) / (1 - share)))
            torch.testing.assert_close(compared[of_y & (source == k)], overlap * centred[source[of_y] == k])


def test_the_mean_of_a_label_follows_its_recent_examples():
    means = LabelMeans(2)
    label, source = torch.zeros(10, dtype=torch.long), torch.arange(10) % 2
    for value in [0.0] * 200 + [1.0] * int(MEMORY):
        compared = compared_by(means, torch.full((10,), value), label, source)
    torch.testing.assert_close(compared, torch.zeros(10).double(), atol=1e-3, rtol=0)


def test_new_labels_and_missing_ones():
    means = LabelMeans(2)
    compared_by(means, torch.zeros(2), torch.tensor([0, 0]), torch.tensor([0, 1]))
    found = compared_by(
        means, torch.tensor([1.0, 3.0, 5.0, torch.nan]), torch.tensor([7, 7, -1, 7]), torch.tensor([0, 1, 0, 1])
    )
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0, torch.nan, torch.nan]).double(), equal_nan=True)
    assert compared_by(means, torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).long()).shape == (0,)


class Loop:
    """Three sources of four classes, which overlap; 3 in 10 labels of the last are drawn at random."""

    def __init__(self, seed=0, **options):
        torch.manual_seed(seed)
        centres = 2 * torch.randn(4, 8)

        def source(share_wrong):
            y = torch.randint(4, (2000,))
            x = centres[y] + torch.randn(2000, 8)
            return x, torch.where(torch.rand(2000) < share_wrong, torch.randint(4, (2000,)), y)

        sources = {"web": source(0), "books": source(0), "forum": source(0.3)}
        self.mixture = inloop.Mixture(sources, generator=torch.Generator().manual_seed(seed))
        self.policy = inloop.MixturePolicy(self.mixture)
        self.model = torch.nn.Linear(8, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        generator = torch.Generator().manual_seed(seed)
        self.learner = inloop.InLoop(self.model, self.policy, optimizer=self.optimizer, generator=generator, **options)

    def train(self, steps, tell_every=1):
        for t in range(steps):
            x, y = self.mixture.draw(self.learner.sample(96))
            scores = self.model(x)
            loss = F.cross_entropy(scores, y)
            loss.backward()
            self.learner.step(loss, **({"logits": scores, "labels": y} if t % tell_every == 0 else {}))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("reference", ["next", "trail"])
def test_a_source_with_some_wrong_labels_keeps_a_quarter_of_its_odds(reference):
    loop = Loop(reference=reference).train(200)
    assert [verdict.word for verdict in loop.learner.statistics.verdicts()][2] == "different or partly wrong"
    assert "forum: its labels often are not what the model expects" in str(loop.learner)
    share = loop.policy.probabilities()[2]
    assert 0.02 < share < 0.13  # a quarter to each of one: 1/9; rewards may lower it further


def test_logits_and_labels_may_be_told_in_some_steps_only():
    loop = Loop().train(600, tell_every=3)
    assert loop.learner.statistics.signs.losses.number_K.sum() == 200 * 96
    assert loop.learner.statistics.flagged() == [2]
    right, _, wrong = loop.policy.probabilities().tolist()
    assert wrong == pytest.approx(right / 4, rel=1e-4)  # a step that tells nothing moves nothing


def test_a_learner_that_only_watches_says_it_too():
    loop = Loop(update=False).train(200)
    assert loop.learner.statistics.flagged() == [2]
    torch.testing.assert_close(loop.policy.probabilities(), torch.full((3,), 1 / 3))


def test_what_the_logits_told_survives_a_resume():
    straight, saved = Loop(), Loop()
    straight.train(30).learner.state_dict()
    straight.train(30)
    state = saved.train(30).learner.state_dict()
    resumed = Loop()
    resumed.model.load_state_dict(saved.model.state_dict())
    resumed.optimizer.load_state_dict(saved.optimizer.state_dict())
    resumed.mixture.load_state_dict(saved.mixture.state_dict())
    resumed.learner.load_state_dict(state)
    resumed.train(30)
    ours, theirs = (loop.learner.statistics.state_dict() for loop in (resumed, straight))
    torch.testing.assert_close(ours["signs"], theirs["signs"], rtol=0, atol=0)
    assert str(resumed.learner) == str(straight.learner)


def test_the_median_of_the_others():
    torch.manual_seed(0)
    for n in (2, 3, 4, 7):
        values = torch.randn(n).double()
        values[torch.rand(n) < 0.2] = torch.nan
        values[-1] = torch.inf
        for k, median in enumerate(median_of_others(values).tolist()):
            others = sorted(v for j, v in enumerate(values.tolist()) if j != k and v == v)
            middle = (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2 if others else float("nan")
            assert median == pytest.approx(middle, nan_ok=True)


@pytest.mark.parametrize("num_sources", [2, 3, 5])
def test_sources_that_are_never_drawn_do_not_silence_the_others(num_sources):
    told = Sources(num_sources, drawn=2).add(sharpness=3.0, wrong=[(0, 0.3)])
    assert told.surprising == [True] + [False] * (num_sources - 1)


def accused(sources, model, optimizer, steps, seed):
    """The sources that a default learner ever found surprising."""
    mixture = inloop.Mixture(sources, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    learner = inloop.InLoop(model, inloop.MixturePolicy(mixture), optimizer=optimizer, generator=generator)
    found = set()
    for _ in range(steps):
        x, y = mixture.draw(learner.sample(64))
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        learner.step(loss, logits=scores, labels=y)
        optimizer.step()
        optimizer.zero_grad()
        found |= set(learner.statistics.surprising().nonzero().flatten().tolist())
    return found


def test_small_equal_sources_are_not_accused():
    """A model that cannot memorise; an example that is drawn again is no new evidence."""
    for seed in range(4):
        torch.manual_seed(seed)
        x, rule = torch.randn(200, 6), torch.randn(6, 3)
        y = (x @ rule).softmax(dim=1).multinomial(1)[:, 0]
        y = torch.where(torch.rand(200) < 0.1, torch.randint(3, (200,)), y)
        model = torch.nn.Linear(6, 3)
        sources = list(zip(x.split(20), y.split(20), strict=True))
        assert not accused(sources, model, torch.optim.SGD(model.parameters(), lr=0.3), 300, seed)


def test_a_large_source_is_not_accused_beside_memorised_ones():
    torch.manual_seed(0)
    sizes = [200, 200, 200, 200, 20_000]
    y = torch.randint(10, (sum(sizes),))
    x = 0.8 * torch.randn(10, 40)[y] + 1.5 * torch.randn(len(y), 40)
    model = torch.nn.Sequential(torch.nn.Linear(40, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    sources = list(zip(x.split(sizes), y.split(sizes), strict=True))
    assert not accused(sources, model, torch.optim.AdamW(model.parameters(), lr=3e-3), 800, 0)


def test_a_source_with_a_class_of_its_own_is_not_accused_beside_a_wrong_one():
    torch.manual_seed(0)
    signs = SourceStatistics(4).signs
    source = torch.arange(4).repeat_interleave(100)
    signs.losses.add(source, torch.full(source.shape, 5.0))
    for _ in range(20):
        source = torch.arange(4).repeat_interleave(50)
        y = torch.where(source == 3, 9, torch.randint(9, source.shape))
        excess_N = torch.where(source == 0, 2.0, -0.3) + torch.where(source == 3, 0.5, 0.0) + 0.1 * torch.randn(200)
        signs.add(source, Told(1 + excess_N, 1 + excess_N, torch.ones(200), y))
    assert signs.surprising().tolist() == [True, False, False, False]


def test_labels_of_small_types_and_a_process_without_examples():
    torch.manual_seed(0)
    f, y = torch.randn(3, 5), torch.tensor([0, 4, 2])
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert told_by(None, f, y.to(dtype), draws_of(3)).labels_N.tolist() == [0, 4, 2]
    for shape in ((0, 5), (0, 7, 5), (2, 0, 5)):
        found = told_by(None, torch.zeros(shape), torch.zeros(shape[:-1]).long(), draws_of(shape[0]))
        assert found.losses_N.shape == (shape[0],)


def test_an_excluded_class_does_not_spoil_ignored_labels():
    f = torch.tensor([[-torch.inf, 0.0, 0.0]]).expand(2, 3, 3)
    losses, _ = losses_and_expected(f, torch.tensor([[1, -100, 2], [-100, -100, 1]]))
    torch.testing.assert_close(losses, torch.full((2,), 2.0).log().double())
