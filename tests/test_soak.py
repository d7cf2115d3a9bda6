"""Thousands of steps of an untidy loop: memory stays flat, nothing is left behind; and calls that make no sense end well."""

import gc
import random
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import inloop
from inloop import InLoop, InloopError, MixturePolicy, Recording, Reinforce


class Untidy(nn.Module):
    """A layer with a rule, a black box, a bare parameter, dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.cell = nn.Linear(6, 8), nn.LSTM(8, 4, batch_first=True)
        self.head, self.gain = nn.Linear(4, 3), nn.Parameter(torch.ones(8))

    def forward(self, x):
        hidden = F.dropout(self.first(x).relu_() * self.gain, 0.2, self.training)
        return self.head(self.cell(hidden)[0][:, -1])


def num_hooks(model):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    on_modules = sum(len(getattr(module, table)) for module in model.modules() for table in tables)
    on_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return on_modules + on_parameters


def num_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def explode(*_):
    raise RuntimeError("mine")


@pytest.mark.parametrize("retain", ["exact", "half", "recompute"])
def test_an_untidy_loop_leaves_nothing_behind(retain):
    torch.manual_seed(0)
    chance = random.Random(0)
    model = Untidy()
    learner = InLoop(
        model, MixturePolicy(3), generator=torch.Generator().manual_seed(0), record=Recording(retain=retain)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts, num_rewarded = [], 0
    for step in range(1000):
        what = chance.choice(["step"] * 6 + ["skip", "eval", "paused", "forward fails", "backward fails", "abandon"])
        for _ in range(chance.choice([1, 1, 1, 2])):
            n = chance.choice([4, 6])
            learner.sample(n)
            handle = None
            if what.endswith("fails"):
                handle = model.head.register_forward_hook(
                    explode
                    if what.startswith("forward")
                    else lambda module, args, out: out.register_hook(explode) and None
                )
            with pytest.raises(RuntimeError, match="mine") if handle is not None else nullcontext():
                loss = F.cross_entropy(model(torch.randn(n, 3, 6)), torch.randint(3, (n,)))
                if what != "abandon":
                    loss.backward()
            if handle is not None:
                handle.remove()
        if what in ("skip", "abandon") or what.endswith("fails"):
            learner.skip()
            optimizer.zero_grad()
            continue
        if what == "eval":
            with torch.no_grad():
                model.eval()(torch.randn(2, 3, 6))
            model.train()
        if what == "paused":
            with learner.paused():
                torch.autograd.grad(model(torch.randn(2, 3, 6)).sum(), list(model.parameters()))
        num_rewarded += learner.step(loss).rewarded
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            loss = None
            learner.skip()
            counts.append(num_tensors())
    assert num_rewarded > 300
    assert max(counts[2:]) <= counts[1] + 60, counts  # a step's tape has its ups and downs
    learner.close()
    assert num_hooks(model) == 0


# ------------------------------------------------------------------ calls that make no sense

anything = st.one_of(
    st.none(),
    st.integers(-3, 9),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.builds(lambda *shape: torch.zeros(shape), st.integers(0, 3), st.integers(0, 3)),
    st.just(nn.ReLU()),
    st.just({}),
)
CALLS = {
    "InLoop": lambda a, b: InLoop(a, b),
    "InLoop with options": lambda a, b: InLoop(
        nn.Linear(2, 2), MixturePolicy(2), record=Recording(reduction=a, retain=b)
    ),
    "layers": lambda a, b: InLoop(
        nn.Linear(2, 2), MixturePolicy(2), update=Reinforce(start_after=-1), record=Recording(layers=[str(a)])
    ),
    "step before anything": lambda a, b: InLoop(nn.Linear(2, 2), MixturePolicy(2)).step(1.0),
    "reward": lambda a, b: InLoop(nn.Linear(2, 2), MixturePolicy(2), reward=str(a)),
    "reference": lambda a, b: InLoop(nn.Linear(2, 2), MixturePolicy(2), reference=str(b)),
    "align": lambda a, b: _recorded().align(a),
    "align by name": lambda a, b: _recorded().align({str(a): b}),
    "load": lambda a, b: InLoop(nn.Linear(2, 2), MixturePolicy(2)).load_state_dict({"policy": a}),
    "check": lambda a, b: inloop.check(nn.Linear(2, 2), torch.zeros(3, 2), lambda model, batch: a),
}


def _recorded():
    model = nn.Linear(2, 2)
    with inloop.capture(model) as tape:
        model(torch.ones(3, 2)).sum().backward()
    return tape


@pytest.mark.parametrize("call", CALLS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(a=anything, b=anything)
def test_malformed_calls_end_in_an_error_that_helps(call, a, b):
    with pytest.raises(InloopError) as caught:
        CALLS[call](a, b)
    assert len(str(caught.value)) > 40
