"""States that are not as a learner saves them: loaded as they are, or refused in a line that names the entry. Never half loaded."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import inloop
from inloop.errors import InloopError, UsageError


def make_learner(**options):
    torch.manual_seed(0)
    sources = {name: (torch.randn(30, 4), torch.randint(3, (30,))) for name in ("web", "books")}
    mixture = inloop.Mixture(sources, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    learner = inloop.InLoop(model, inloop.MixturePolicy(mixture), optimizer=optimizer, **options)
    train(learner, mixture, model, optimizer)
    learner.sample(8)
    return learner, mixture, model, optimizer


def train(learner, mixture, model, optimizer):
    for _ in range(3):
        x, y = mixture.draw(learner.sample(8))
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        learner.step(loss, logits=scores, labels=y)
        optimizer.step()
        optimizer.zero_grad()


def entries(state, path=()):
    """The paths of all entries of a nest."""
    nodes = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in nodes:
        yield (*path, key)
        yield from entries(value, (*path, key))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


RULES = {
    "anchored": dict,
    "reinforce": lambda: {"update": inloop.Reinforce()},
    "trail": lambda: {"reference": "trail"},
}
VALUES = st.sampled_from(
    [
        None,
        -1,
        3,
        0.5,
        "x",
        True,
        [],
        {},
        {"a": 1},
        torch.zeros(0),
        torch.zeros(3, 3),
        torch.zeros(2).long(),
        torch.full((2,), torch.nan),
        object(),
    ]
)
GONE = object()


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_state_is_loaded_or_refused_in_a_line(rule, data):
    learner, *others = make_learner(**RULES[rule]())
    state = copy.deepcopy(learner.state_dict())
    path = data.draw(st.sampled_from(list(entries(state))))
    value = data.draw(st.one_of(st.just(GONE), VALUES))
    node = state
    for key in path[:-1]:
        node = node[key]
    if value is GONE and isinstance(node, dict):
        del node[path[-1]]
    else:
        node[path[-1]] = value if value is not GONE else None
    before = copy.deepcopy(learner.state_dict())
    message = None
    try:
        learner.load_state_dict(state)
        str(learner)
        learner.skip()
        train(learner, *others)
    except InloopError as error:
        message = str(error)
    if message is not None:
        assert len(message) < 400
        after = learner.state_dict()
        assert after["sampler"].pop("draws") == [] or before["sampler"]["draws"]
        del before["sampler"]["draws"]
        assert same(after, before)
    learner.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state["statistics"].pop("drawn"), "statistics is a dict of"),
        (lambda state: state["update"].update(evidence=torch.zeros(2)), "update.evidence is a tensor of type float32"),
        (lambda state: state.update(num_steps="many"), "num_steps is 'many'"),
        (lambda state: state.update(update=3), "update is a int"),
        (lambda state: state["recording"].update(has_new_kind=7), "recording.has_new_kind is 7; needed is a bool"),
        (lambda state: state.update(num_steps=-1), "whole number from 0"),
        (lambda state: state.update(num_steps=None), "num_steps is None"),
        (lambda state: state["policy"]["scores"].fill_(torch.nan), "policy.scores has numbers that are not finite"),
        (lambda state: state["sampler"]["draws"][0].update(everyone="x"), r"sampler.draws\[0\].everyone is"),
        (lambda state: state["sampler"]["draws"][0].update(plain=torch.zeros(0)), r"sampler.draws\[0\].plain is"),
        (lambda state: state.update(more=1), "it has more, of which this learner knows nothing"),
        (
            lambda state: state["statistics"]["signs"].update(told_labels=torch.zeros(3, 3, dtype=torch.float64)),
            "signs.told_labels is a tensor",
        ),
    ],
)
def test_the_entry_is_named(change, says):
    learner, *_ = make_learner()
    state = learner.state_dict()
    change(state)
    with pytest.raises(UsageError, match=says):
        learner.load_state_dict(state)
