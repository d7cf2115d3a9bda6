"""The learned policy (Algorithm 2) and the fixed ones, against their definitions."""

import itertools
import math

import pytest
import torch

from inloop import InLoop, Reinforce
from inloop.augment import (
    SPACES,
    AugmentPolicy,
    AutoAugment,
    FastAutoAugment,
    PopulationBasedAugment,
    RandAugment,
    TrivialAugment,
    UniformAugment,
    apply,
    make_space,
)
from inloop.augment.registry import get_operation, operation_with_code
from inloop.errors import UsageError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randomised(policy, seed=0):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator(seed)))
    return policy.double()


def by_hand(policy, number, choice, keep, strength):
    """log p of one example, factor by factor, as the paper states it."""
    r = policy.numbers.tolist()[number]
    total = math.log(policy.number_logits.softmax(0)[number].item())
    for i in range(r):
        a = choice[i]
        total -= math.log(len(policy.space) - (0 if policy.replacement else i))
        p = policy.keep_logits.sigmoid()[a].item()
        total += math.log(p if keep[i] else 1 - p)
        if keep[i]:
            total += math.log(policy.strength_logits.softmax(1)[a, strength[i]].item())
    return total


@pytest.mark.parametrize("replacement", [False, True])
def test_log_prob_is_that_of_algorithm_2(replacement):
    policy = randomised(AugmentPolicy("wl", replacement=replacement))
    actions = policy.sample(64, generator(1))
    expected = [
        by_hand(policy, *(actions[name][i].tolist() for name in ("number", "choice", "keep", "strength")))
        for i in range(64)
    ]
    torch.testing.assert_close(policy.log_prob(actions), torch.tensor(expected, dtype=torch.float64))


def test_probabilities_of_all_outcomes_add_up_to_one():
    """Over every number, ordered draw, keep decision and strength (strengths that are not drawn count once)."""
    policy = randomised(AugmentPolicy(make_space(["identity", "rotate", "invert"]), numbers=(1, 2)))
    with torch.no_grad():  # only three strengths have a chance
        policy.strength_logits[:, 3:] = -torch.inf
    total = 0.0
    for number, r in enumerate((1, 2)):
        for choice in itertools.permutations(range(3), r):
            for keep in itertools.product((False, True), repeat=r):
                for strength in itertools.product(*(range(3) if kept else (0,) for kept in keep)):
                    pad = [0] * (2 - r)
                    actions = {
                        "number": torch.tensor([number]),
                        "choice": torch.tensor([[*choice, *pad]]),
                        "keep": torch.tensor([[*keep, *pad]]).bool(),
                        "strength": torch.tensor([[*strength, *pad]]),
                    }
                    total += policy.log_prob(actions).exp().item()
    assert total == pytest.approx(1, abs=1e-12)


def test_samples_have_the_policys_frequencies():
    policy = randomised(AugmentPolicy("ra", numbers=(1, 3)), seed=3)
    n = 40_000
    actions = policy.sample(n, generator(5))
    number = torch.bincount(actions["number"], minlength=2) / n
    torch.testing.assert_close(number.double(), policy.number_logits.softmax(0), atol=0.01, rtol=0)
    used = torch.arange(3) < policy.numbers[actions["number"]].unsqueeze(1)
    for a in range(len(policy.space)):
        drawn = used & (actions["choice"] == a)
        kept = actions["keep"][drawn].double().mean()
        assert kept.item() == pytest.approx(policy.keep_logits.sigmoid()[a].item(), abs=0.03)
    strengths = torch.bincount(actions["strength"][actions["choice"] == 3], minlength=31).double()
    torch.testing.assert_close(strengths / strengths.sum(), policy.strength_logits.softmax(1)[3], atol=0.02, rtol=0)
    # uniform, and each operation at most once
    assert all(len(set(row)) == 3 for row in actions["choice"][:200].tolist())
    first = torch.bincount(actions["choice"][:, 0], minlength=14) / n
    torch.testing.assert_close(first, torch.full((14,), 1 / 14), atol=0.01, rtol=0)


def test_the_record_says_what_was_drawn():
    policy = AugmentPolicy("wl")
    actions = policy.sample(500, generator())
    used = torch.arange(4) < policy.numbers[actions["number"]].unsqueeze(1)
    signs = set()
    for i, j in itertools.product(range(500), range(4)):
        name = policy.space.operations[actions["choice"][i, j]]
        done = bool(used[i, j] and actions["keep"][i, j])
        assert actions["operation"][i, j].item() == (get_operation(name).code if done else 0)
        plain = policy.space.magnitudes[name][actions["strength"][i, j]]
        assert abs(actions["magnitude"][i, j].item()) == pytest.approx(plain)
        if plain and get_operation(name).signed:
            signs.add(actions["magnitude"][i, j].item() > 0)
        else:
            assert actions["magnitude"][i, j].item() == plain
    assert signs == {True, False}
    assert 0 <= actions["center"].min() < 0.05 < 0.95 < actions["center"].max() < 1


def test_size_of_the_policies():
    assert sum(p.numel() for p in AugmentPolicy("wl").parameters()) == 612
    assert sum(p.numel() for p in AugmentPolicy("ra").parameters()) == 452


def test_plain_steps_leave_images_alone():
    images = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(apply(images, AugmentPolicy("wl").neutral(8)), images)


def test_summary_by_operation():
    policy = AugmentPolicy(make_space(["identity", "invert"]), numbers=(1,))
    actions = {
        **policy.neutral(4),
        "choice": torch.tensor([[0], [1], [1], [1]]),
        "keep": torch.tensor([[True], [True], [False], [True]]),
    }
    summary = policy.summarise(actions, torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert summary["kept"].count_K.tolist() == [1, 2]
    assert summary["kept"].mean_K.tolist() == [1.0, 4.0]
    assert summary["dropped"].count_K.tolist() == [0, 1]


def test_a_learner_drops_the_operation_that_erases():
    """Random images, whose class is in their mean: black ones tell nothing."""
    from inloop.augment import register_operation

    register_operation("to_black", lambda images, magnitude_N: torch.zeros_like(images))
    torch.manual_seed(0)
    policy = AugmentPolicy(make_space(["identity", "to_black"]), numbers=(1,))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    learner = InLoop(model, policy, interleave=True, update=Reinforce(accumulate=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        labels = torch.randint(2, (64,))
        images = (torch.randint(128, (64, 1, 8, 8)) + 127 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
        x = apply(images, learner.sample(64)).float() / 255 - 0.5
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    identity, erase = policy.keep_logits.sigmoid().tolist()
    assert erase < 0.1 < identity


def names(actions):
    return [[operation_with_code(code).name for code in row] for row in actions["operation"].tolist()]


def test_uniform_augment_is_algorithm_3():
    actions = UniformAugment("wl").sample(20_000, generator())
    assert actions["operation"].shape == (20_000, 2)
    done = actions["operation"] != 0
    # of two places each is done half the time, unless it is the identity (1 of 19)
    assert done.double().mean().item() == pytest.approx(0.5 * 18 / 19, abs=0.01)
    both = done.all(dim=1)
    assert not bool((actions["operation"][both][:, 0] == actions["operation"][both][:, 1]).any())
    rotated = actions["magnitude"][actions["operation"] == get_operation("rotate").code].abs()
    assert set(rotated.tolist()) == set(SPACES["wl"].magnitudes["rotate"])


def test_rand_augment_and_trivial_augment():
    actions = RandAugment(3, 10, "ra").sample(5000, generator())
    assert actions["operation"].shape == (5000, 3)
    shear = actions["magnitude"][actions["operation"] == get_operation("shear_x").code].abs()
    assert shear.unique().tolist() == pytest.approx([SPACES["ra"].magnitudes["shear_x"][10]])
    actions = TrivialAugment("wl").sample(5000, generator())
    assert actions["operation"].shape == (5000, 1)
    assert (actions["operation"] == 0).double().mean().item() == pytest.approx(1 / 19, abs=0.02)
    with pytest.raises(UsageError, match="whole strength from 0 to 30"):
        RandAugment(2, 31)


def test_auto_augment_has_its_25_sub_policies():
    policy = AutoAugment()
    assert len(policy.sub_policies) == 25
    first, second = policy.sub_policies[1]  # rotate 0.7 at level 2, translate_x 0.3 at level 9
    assert (first.operation, first.probability, first.magnitude) == ("rotate", 0.7, 6)
    assert (second.operation, second.probability, second.magnitude) == ("translate_x", 0.3, 9)
    assert policy.sub_policies[14][0].magnitude == 256 - int(256 * 2 / 10)  # solarize at level 2
    assert policy.sub_policies[5][1].magnitude == 6  # posterize at level 7: of 8 to 4 bits
    rotations = names(policy.sample(4000, generator()))
    assert sum(row[0] == "rotate" for row in rotations) / 4000 == pytest.approx(0.7 / 25, abs=0.01)


def test_fast_auto_augment_has_its_493_sub_policies():
    policy = FastAutoAugment()
    assert len(policy.sub_policies) == 493
    (first, second) = policy.sub_policies[0]
    assert (first.operation, round(first.probability, 4)) == ("contrast", 0.8321)
    assert first.magnitude == pytest.approx(0.1 + 1.8 * 0.498843)
    assert (second.operation, second.magnitude) == ("translate_x", pytest.approx(0.9 * 32 * (0.394023 - 0.5), abs=1e-4))
    images = torch.randint(256, (300, 3, 32, 32), dtype=torch.uint8)
    assert apply(images, policy.sample(300, generator())).shape == images.shape


def test_population_based_augment_follows_its_schedule():
    policy = PopulationBasedAugment(epochs=100)
    images = torch.randint(256, (300, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(apply(images, policy.sample(300, generator())), images)  # nothing in the first 12 of 200 epochs
    policy.epoch = 99
    actions = policy.sample(20_000, generator())
    num_done = (actions["operation"] != 0).sum(dim=1)
    shares = torch.bincount(num_done, minlength=3) / 20_000
    assert shares[0].item() == pytest.approx(0.2, abs=0.02)
    assert shares[2].item() == pytest.approx(0.5, abs=0.02)
    assert not torch.equal(apply(images, {k: v[:300] for k, v in actions.items()}), images)


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ((), "give different whole numbers"),
        ((0, 1), "give different"),
        ((1, 1), "give different"),
        ((3,), "from 1 to 2"),
    ],
)
def test_wrong_numbers(numbers, match):
    with pytest.raises(UsageError, match=match):
        AugmentPolicy(make_space(["identity", "rotate"]), numbers=numbers)


def test_a_policy_refuses_actions_and_states_of_another():
    policy, other = AugmentPolicy("ra"), AugmentPolicy("wide")
    with pytest.raises(UsageError, match="Actions have 'choice' from .*; this policy has 0..13"):
        policy.log_prob(AugmentPolicy("wl").sample(200, generator()))
    actions = policy.sample(5)
    with pytest.raises(UsageError, match="from -1"):
        policy.log_prob(actions | {"choice": torch.full_like(actions["choice"], -1)})
    torch.testing.assert_close(policy.log_prob(actions | {"keep": actions["keep"].long()}), policy.log_prob(actions))
    with pytest.raises(UsageError, match="another space or other numbers than 'wide'"):
        other.load_state_dict(policy.state_dict())  # the same operations, other ranges
    with pytest.raises(UsageError, match="another space or other numbers"):
        AugmentPolicy("ra", numbers=(1, 2, 3, 5)).load_state_dict(policy.state_dict())
    with pytest.raises(UsageError, match="another space or other numbers"):
        AugmentPolicy("wl").load_state_dict(policy.state_dict())


def test_fast_auto_augment_translates_by_height():
    wide, high = FastAutoAugment(width=64, height=32), FastAutoAugment(width=32, height=64)
    ratio = {"translate_x": 2.0, "translate_y": 0.5}
    for a, b in zip(itertools.chain(*wide.sub_policies), itertools.chain(*high.sub_policies), strict=True):
        assert a.magnitude == pytest.approx(ratio.get(a.operation, 1.0) * b.magnitude)


def test_population_based_augment_without_examples_or_epochs():
    policy = PopulationBasedAugment()
    assert policy.sample(0)["operation"].shape == (0, 2)
    policy.epoch = -1
    with pytest.raises(UsageError, match="epoch=-1"):
        policy.sample(3)
