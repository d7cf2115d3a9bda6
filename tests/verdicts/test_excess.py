"""The excess of a loss over what the model expects: it tells wrong labels from hard examples."""

import pytest
import torch
import torch.nn.functional as F

import inloop
from inloop.errors import BatchSizeError, UsageError
from inloop.verdicts import SourceStatistics, evidence_of, excess
from inloop.verdicts.excess import losses_and_excess
from inloop.verdicts.labels import MEMORY, LabelMeans


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
    whole = evidence_of(None, f, y)
    monkeypatch.setattr(excess, "_MOST_NUMBERS", 2 * shape[-1])
    parts = evidence_of(None, f, y)
    torch.testing.assert_close(parts.excess_N, whole.excess_N)
    torch.testing.assert_close(parts.losses_N, whole.losses_N)
    assert (parts.labels_N is None) == (len(shape) == 3)


def test_own_losses_are_kept():
    losses = torch.tensor([1.0, 2.0], requires_grad=True)
    found = evidence_of(losses, torch.zeros(2, 3), torch.tensor([0, 1]))
    assert found.losses_N.tolist() == [1.0, 2.0]
    assert not found.losses_N.requires_grad


@pytest.mark.parametrize(
    ("logits", "labels", "error", "says"),
    [
        (torch.zeros(2, 3), None, UsageError, "no labels="),
        (None, torch.zeros(2).long(), UsageError, "no logits="),
        (torch.zeros(2, 3), torch.zeros(3).long(), BatchSizeError, r"\(2, 3\)"),
        (torch.zeros(2, 5, 3), torch.zeros(2, 3).long(), BatchSizeError, r"\[N, ..., C\]"),
        (torch.zeros(2), torch.zeros(2).long(), BatchSizeError, r"\(2,\)"),
        (torch.zeros(2, 3), torch.zeros(2), UsageError, "whole numbers"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), UsageError, "the label 3; the logits have 3 classes"),
    ],
)
def test_what_cannot_be_logits_and_labels_is_refused(logits, labels, error, says):
    with pytest.raises(error, match=says):
        evidence_of(None, logits, labels)


class Told:
    """Statistics of sources of six classes, told the logits and labels of many examples; ``add`` draws some for a source."""

    def __init__(self, num_sources=4, seed=0, first_loss=5.0):
        self.generator = torch.Generator().manual_seed(seed)
        self.statistics = SourceStatistics(num_sources)
        source = torch.arange(num_sources).repeat_interleave(100)
        self.statistics.losses.add(source, torch.full(source.shape, first_loss))

    def add(self, rounds=20, n=60, sharpness=1.0, wrong=(), only=None, overconfident=(), hard=()):
        """``wrong``: source and share of labels that are wrong; ``only``: sources that have a single class each."""
        for _ in range(rounds):
            for k in range(len(self.statistics.sources)):
                f = sharpness * torch.randn(n, 6, generator=self.generator)
                f = 0.2 * f if k in hard else f
                y = f.softmax(dim=1).multinomial(1, generator=self.generator)[:, 0]  # labels follow the predictions
                if only is not None:
                    kept = y == k
                    f, y = f[kept], y[kept]
                is_wrong = torch.rand(len(y), generator=self.generator) < dict(wrong).get(k, 0.0)
                y = torch.where(is_wrong, torch.randint(6, y.shape, generator=self.generator), y)
                f = 3 * f if k in overconfident else f
                found = evidence_of(None, f, y)
                source = torch.full(y.shape, k)
                self.statistics.losses.add(source, found.losses_N)
                self.statistics.excess.add(source, found.excess_N)
                compared = self.statistics.labels.compare(found.excess_N, y, source)
                self.statistics.compared_excess.add(source, compared)
        return self

    @property
    def surprising(self):
        return self.statistics.surprising().tolist()


def test_partly_wrong_labels_surprise_and_hard_examples_do_not():
    told = Told().add(sharpness=3.0, wrong=[(1, 0.3)], hard=(2,))
    assert told.surprising == [False, True, False, False]
    assert told.statistics.excess.mean_K[2].abs() < 0.05


def test_nothing_surprises_before_most_sources_have_learned_much():
    told = Told(first_loss=0.5).add(sharpness=3.0, wrong=[(1, 0.3)])
    assert told.surprising == [False] * 4


def test_three_of_seven_sources_may_be_wrong():
    told = Told(7).add(sharpness=3.0, wrong=[(0, 0.4), (1, 0.4), (2, 0.4)])
    assert told.surprising == [True] * 3 + [False] * 4


def test_equal_sources_never_surprise():
    for seed in range(20):
        told = Told(seed=seed)
        for _ in range(20):
            assert not any(told.add(rounds=1, n=30, sharpness=3.0).surprising)


def test_a_model_that_is_too_sure_of_all_sources_accuses_none():
    assert Told().add(sharpness=2.0, overconfident=range(4)).surprising == [False] * 4


def test_sources_of_one_class_each_are_not_judged_by_how_hard_their_class_is():
    """Given the class, a calibrated model's excess is not 0: it is high for a class that is often taken for others."""
    told = Told(6).add(sharpness=1.5, only=True, n=300)
    assert not any(told.surprising)
    assert float(told.statistics.compared_excess.mean_K.abs().max()) < 1e-9


def test_with_too_few_examples_nothing_is_said():
    assert Told().add(rounds=1, n=30, sharpness=3.0, wrong=[(0, 1.0)]).surprising == [False] * 4
    assert not SourceStatistics(3).surprising().any()


def test_values_are_compared_with_the_mean_of_their_label():
    torch.manual_seed(0)
    labels, source, values = torch.randint(3, (150,)), torch.randint(2, (150,)), torch.randn(150)
    values += labels
    compared = LabelMeans(2).compare(values, labels, source)
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
        compared = means.compare(torch.full((10,), value), label, source)
    torch.testing.assert_close(compared, torch.zeros(10).double(), atol=1e-3, rtol=0)


def test_new_labels_and_missing_ones():
    means = LabelMeans(2)
    means.compare(torch.zeros(2), torch.tensor([0, 0]), torch.tensor([0, 1]))
    found = means.compare(
        torch.tensor([1.0, 3.0, 5.0, torch.nan]), torch.tensor([7, 7, -1, 7]), torch.tensor([0, 1, 0, 1])
    )
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0, torch.nan, torch.nan]).double(), equal_nan=True)
    assert means.compare(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).long()).shape == (0,)


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

    def train(self, steps, **given):
        for _ in range(steps):
            x, y = self.mixture.draw(self.learner.sample(96))
            scores = self.model(x)
            loss = F.cross_entropy(scores, y)
            loss.backward()
            self.learner.step(loss, logits=scores, labels=y)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("reference", ["next", "trail"])
def test_a_source_with_some_wrong_labels_keeps_a_quarter_of_its_odds(reference):
    loop = Loop(reference=reference).train(200)
    assert [verdict.word for verdict in loop.learner.statistics.verdicts()][2] == "different or partly wrong"
    assert "forum: learns, but its labels often are not what the model expects" in str(loop.learner)
    share = loop.policy.probabilities()[2]
    assert 0.02 < share < 0.13  # a quarter to each of one: 1/9; rewards may lower it further


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
    for name in ("excess", "compared_excess", "losses", "labels"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
    assert str(resumed.learner) == str(straight.learner)
