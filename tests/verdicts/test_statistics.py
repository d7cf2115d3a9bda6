"""A learner's table: share, examples, epochs, advantage, losses, and a verdict in words."""

import math

import pytest
import torch
import torch.nn.functional as F

import inloop
from inloop.mixture.labels import label_of
from inloop.verdicts import LossEvidence, SourceStatistics
from inloop.verdicts.losses import SourceLosses, constant_losses
from inloop.verdicts.verdict import word_for
from tests.training import make_net
from tests.verdicts.test_advantage import statistics_of


class Loop:
    """Three sources of four classes; the labels of the last are random. The second is small."""

    def __init__(self, seed=0, **options):
        torch.manual_seed(seed)
        centres = 3 * torch.randn(4, 8)

        def source(size):
            y = torch.randint(4, (size,))
            return centres[y] + torch.randn(size, 8), y

        wrong = source(400)[0], torch.randint(4, (400,))
        sources = {"web": source(400), "books": source(20), "forum": wrong}
        self.mixture = inloop.Mixture(sources, generator=torch.Generator().manual_seed(seed))
        self.model = torch.nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(seed)
        self.learner = inloop.InLoop(
            self.model, inloop.MixturePolicy(self.mixture), update=False, generator=generator, **options
        )

    def train(self, steps, with_losses=True):
        for _ in range(steps):
            x, y = self.mixture.draw(self.learner.sample(48))
            losses = F.cross_entropy(self.model(x), y, reduction="none")
            losses.mean().backward()
            self.learner.step(losses.mean(), losses=losses if with_losses else None)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


def test_the_table_of_a_learner_names_the_bad_source():
    loop = Loop().train(200)
    web, books, forum = loop.learner.statistics.verdicts()
    assert (web.word, books.word, forum.word) == ("ok", "seen too often", "bad")
    head, columns, *rows = str(loop.learner).splitlines()
    assert head == repr(loop.learner)
    assert columns.split()[:5] == ["source", "share", "examples", "epochs", "advantage"]
    assert rows[2].split()[0] == "forum"
    assert rows[2].split()[-1] == "bad"
    assert rows[4] == "forum: does not learn, and most others do (a constant prediction has a loss of 1.40)"
    assert forum.losses.constant == pytest.approx(math.log(4), abs=0.01)
    assert web.losses.recent < web.losses.first
    assert web.epochs == pytest.approx(web.examples / 400)
    assert web.examples + books.examples + forum.examples == 200 * 48


def test_without_losses_a_source_is_flagged_and_no_more():
    words = [verdict.word for verdict in Loop().train(200, with_losses=False).learner.statistics.verdicts()]
    assert words == ["ok", "seen too often", "flagged"]


def test_statistics_are_a_part_of_the_learner_s_state():
    loop, other = Loop().train(100), Loop()
    other.learner.load_state_dict(loop.learner.state_dict())
    assert str(other.learner.statistics) == str(loop.learner.statistics)


def test_a_policy_without_sources_has_no_table():
    learner = inloop.InLoop(make_net(), inloop.augment.AugmentPolicy())
    assert learner.statistics is None
    assert str(learner) == repr(learner)


def test_a_product_has_the_table_of_its_sources():
    mixture = Loop().mixture
    policy = inloop.Product({"source": inloop.MixturePolicy(mixture), "other": inloop.Bernoulli()})
    learner = inloop.InLoop(make_net(), policy)
    assert learner.statistics is not None
    assert learner.statistics.sources.names == ["web", "books", "forum"]


@pytest.mark.parametrize(
    ("recent", "others_learn", "word"),
    [
        (2.5, True, "bad"),
        (1.0, True, "different or partly wrong"),
        (2.29, True, "bad"),  # below the constant prediction by less than two errors
        (2.5, False, "flagged"),  # nothing learns yet
        (math.nan, True, "flagged"),
    ],
)
def test_losses_refine_a_flag(recent, others_learn, word):
    losses = LossEvidence(first=2.4, recent=recent, error=0.01, constant=2.3, others_learn=others_learn)
    assert word_for(-0.3, -0.1, math.nan, math.nan, losses, 0.02) == word
    assert word_for(-0.3, 0.1, math.nan, math.nan, losses, 0.02) == "undecided"


def test_a_source_of_a_single_label_cannot_be_called_bad():
    losses = LossEvidence(first=2.4, recent=1.0, error=0.01, constant=0.0, others_learn=True)
    assert word_for(-0.3, -0.1, math.nan, math.nan, losses, 0.02) == "flagged"


def test_a_source_that_is_worse_than_a_constant_prediction_is_bad_whatever_its_rewards_say():
    losses = LossEvidence(first=2.4, recent=2.9, error=0.01, constant=2.3, others_learn=True, worse_than=2.3)
    assert word_for(-0.3, 0.3, math.nan, math.nan, losses, 0.02) == "bad"
    assert word_for(math.nan, math.nan, math.nan, math.nan, losses, 0.02) == "bad"


@pytest.mark.parametrize(
    ("recent", "not_learning"),
    [
        ((1.0, 2.9), (False, True)),  # of two sources one learns and the other does not
        ((2.2, 2.9), (False, False)),  # nothing has learned much yet
        ((1.0, 1.5, 2.9), (False, False, True)),
        ((1.0, 2.9, 2.9), (False, False, False)),  # who is right?
        ((1.0, 1.0, 1.0, 2.9, 2.9), (False, False, False, True, True)),
    ],
)
def test_a_source_does_not_learn_while_most_others_do(recent, not_learning):
    labels = torch.arange(10).repeat(20)
    statistics = SourceStatistics(inloop.Mixture([(torch.zeros(200, 1), labels) for _ in recent]))
    source_N = torch.arange(len(recent)).repeat_interleave(200)
    statistics.signs.losses.add(source_N, torch.tensor(recent)[source_N] + 0.1 * torch.randn(len(source_N)))
    assert statistics.not_learning().tolist() == list(not_learning)
    words = [verdict.word for verdict in statistics.verdicts()]
    assert [word == "bad" for word in words] == list(not_learning)


@pytest.mark.parametrize("persist", [False, True])
def test_rewards_that_persist_are_no_more_certain_than_their_examples_are_many(persist):
    """A source of 100 examples whose rewards happen to be lower by 0.2, the same in each step."""
    sizes = [(torch.zeros(n, 1), torch.zeros(n).long()) for n in (100, 10_000)]
    statistics = SourceStatistics(inloop.Mixture(sizes), least_effect=0.1, rewards_persist=persist)
    torch.manual_seed(0)
    for _ in range(2000):
        statistics.drawn_K += 50
        means = torch.tensor([-0.2, 0.0]) + 0.1 * torch.randn(2)
        statistics.advantages.add(torch.tensor([50, 50]), means, 1.0)
    assert statistics.verdicts()[0].flagged != persist


def test_recent_losses_are_a_mean_over_all_and_then_over_some():
    losses = SourceLosses(2)
    losses.add(torch.tensor([0, 0, 1]), torch.tensor([1.0, 3.0, 5.0]))
    assert losses.mean_K.tolist() == [2.0, 5.0]
    losses.add(torch.tensor([0, 0]), torch.tensor([5.0, 7.0]))
    assert losses.mean_K.tolist() == pytest.approx([4.0, 5.0])
    assert losses.first_K.tolist() == [4.0, 5.0]
    for _ in range(10_000):
        losses.add(torch.tensor([0]), torch.tensor([1.0]))
    assert float(losses.mean_K[0]) == pytest.approx(1.0, abs=1e-3)
    losses.add(torch.tensor([0]), torch.tensor([math.nan]))
    assert float(losses.mean_K[0]) == pytest.approx(1.0, abs=1e-3)


def test_printed_it_has_a_row_for_each_source():
    mixture = Loop().mixture
    statistics = statistics_of([-0.3, 0.0, 0.3], sources=mixture)
    head, *rows = str(statistics).splitlines()
    assert head.split() == ["source", "share", "examples", "epochs", "advantage", "95%", "interval", "verdict"]
    assert [row.split()[0] for row in rows] == ["web", "books", "forum", "web:", "books:"]
    assert rows[3] == "web: pulls against the others; look at it"
    assert str(SourceStatistics(2)).splitlines() == [
        "source  examples  advantage  verdict",
        "0              0             undecided",
        "1              0             undecided",
        "0, 1: too few steps",
    ]


@pytest.mark.parametrize("drawn", [[600, 600, 0], [600, 600, 1]])
def test_a_source_that_is_never_drawn_does_not_make_the_others_seen_too_often(drawn):
    sources = [(torch.zeros(100, 2), torch.zeros(100, dtype=torch.long))] * 3
    statistics = SourceStatistics(inloop.Mixture(sources))
    statistics.drawn_K.copy_(torch.tensor(drawn))
    assert "seen too often" not in [verdict.word for verdict in statistics.verdicts()]
    statistics.drawn_K.copy_(torch.tensor([6000, 100, 100]))
    assert statistics.verdicts()[0].word == "undecided"  # all sources were seen 21 times on average
    statistics.drawn_K.copy_(torch.tensor([600, 10, 10]))
    assert [verdict.word for verdict in statistics.verdicts()] == ["undecided", "undecided", "undecided"]


def test_the_source_that_does_not_learn():
    statistics = Loop().train(100).learner.statistics
    assert statistics.not_learning().tolist() == [False, False, True]
    assert not Loop().learner.statistics.not_learning().any()  # nothing is known
    assert not Loop().train(100, with_losses=False).learner.statistics.not_learning().any()


def test_constant_losses():
    """Of own frequencies, and of those of all sources: a source of a single label has none of its own."""
    own_K, pooled_K = constant_losses([torch.tensor([5, 5]), torch.tensor([0, 10]), None])
    assert own_K[:2].tolist() == pytest.approx([math.log(2), 0.0])
    assert pooled_K[:2].tolist() == pytest.approx([-0.5 * math.log(0.25 * 0.75), -math.log(0.75)])
    assert bool(own_K[2].isnan())


@pytest.mark.parametrize(
    ("example", "label"),
    [
        ((torch.zeros(2), torch.tensor(3)), [3]),
        ((torch.zeros(2), 3), [3]),
        ({"input_ids": [1], "labels": [2, -100]}, [2, -100]),
        ((torch.zeros(2), 0.5), None),
        ((torch.zeros(2), torch.zeros(2)), None),
        (torch.zeros(2), None),
        ((torch.tensor([4, 5]),), [4, 5]),
        ({"input_ids": [1, 2]}, [1, 2]),
        ((torch.zeros(2, 2, dtype=torch.uint8),), None),  # an image
        ((torch.zeros(2), "cat"), None),
    ],
)
def test_labels_of_examples(example, label):
    found = label_of(example)
    assert (None if found is None else found.flatten().tolist()) == label


@pytest.mark.parametrize(("loss_of_others", "found"), [(0.95, False), (0.5, True)])
def test_nothing_is_dropped_for_its_loss_before_most_sources_have_learned_much(loss_of_others, found):
    constant = math.log(4)
    statistics = Loop().learner.statistics
    for _ in range(10):
        source_N = torch.arange(3).repeat_interleave(100)
        losses_N = torch.tensor([loss_of_others, loss_of_others, 1.2])[source_N] * constant
        statistics.signs.losses.add(source_N, losses_N)
    assert statistics.not_learning().tolist() == [False, False, found]
