"""How often the host waits for the device in a training step: not at all while gradients form, once in ``learner.step``.

Each wait costs the time that the device then has nothing to do. The numbers in the reasons are those of today.
"""

import pytest
import torch

from inloop import Recording
from tests.device.pretend_cuda.watching import host_synchronisations
from tests.device.problems import PROBLEMS
from tests.device.runs import Run
from tests.device.test_learner import fused_adamw

PLAIN = {}
PART = {"part": 0.5}
BFLOAT16 = {"autocast": torch.bfloat16, "dtype": torch.float32}
FLOAT16 = {"autocast": torch.float16, "dtype": torch.float32, "scaler": True}
TOLD = {"tells": True}
TEN_SOURCES = {"num_sources": 10}
HALF = {"record": Recording(retain="half")}
ADAMW = {"make_optimizer": fused_adamw, "knows_optimizer": True}
MICRO_BATCHES = {"micro_batches": 2}


def case(options, name, number=0, where=""):
    """A case that is expected to fail if it waits today."""
    marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"{number} waits: {where}")] if number else []
    return pytest.param(options, id=name, marks=marks)


@pytest.fixture
def run(request):
    """A run whose steps need not be verified any more, with sources on the device."""
    options = dict(request.param)
    problem = PROBLEMS[options.pop("problem", "mlp")]
    return Run("cuda", problem, on_device=True, **options).train(6)


@pytest.mark.parametrize(
    "run",
    [
        case(PLAIN, "plain"),
        case(PART, "part"),
        case(PART | {"problem": "gpt"}, "part of a gpt"),
        case(BFLOAT16, "bfloat16"),
        case(FLOAT16, "float16"),
        case(TOLD, "told"),
        case(HALF, "half"),
        case(ADAMW, "AdamW"),
        case({"reference": "previous"}, "previous"),
        case({"reference": "trail"}, "trail"),
        *(case({"problem": name}, name) for name in PROBLEMS if name not in ("mlp", "plain mlp")),
    ],
    indirect=True,
)
def test_nothing_waits_while_gradients_form(run):
    batch = run.draw()
    with host_synchronisations() as counted:
        run.backward(*batch)
    assert len(counted) == 0, str(counted)


@pytest.mark.parametrize(
    "run",
    [
        case(PLAIN, "plain"),
        case(PART, "part"),
        case(BFLOAT16, "bfloat16"),
        case(FLOAT16, "float16", 2, "scale_of (refusals.py) reads the scaler's scale"),
        case(TOLD, "told"),
        case(TOLD | {"problem": "gpt"}, "told of a gpt"),
        case(HALF, "half"),
        case(ADAMW, "AdamW"),
        case(MICRO_BATCHES, "micro-batches"),
        case({"update": False}, "no update"),
        case({"reference": "previous"}, "previous"),
        case({"reference": "trail"}, "trail"),
        case({"problem": "gpt"}, "gpt"),
        case(TEN_SOURCES, "ten sources"),
        case({"interleave": True}, "interleaved, nothing rewarded"),
    ],
    indirect=True,
)
def test_the_learner_waits_once_a_step(run):
    for _ in range(run.micro_batches):
        run.backward(*run.draw())
    with host_synchronisations() as counted:
        run.learn()
    assert len(counted) <= 1, str(counted)


@pytest.mark.parametrize(
    "run",
    [
        case(PLAIN, "three sources"),
        case(TEN_SOURCES, "ten sources"),
        case(MICRO_BATCHES, "micro-batches", 1, "are_gone (refusals.py) looks for gradients that were cleared"),
    ],
    indirect=True,
)
def test_drawing_from_sources_on_the_device_does_not_wait(run):
    with host_synchronisations() as counted:
        for _ in range(run.micro_batches):
            run.backward(*run.draw())
    assert len(counted) == 0, str(counted)


@pytest.mark.parametrize("run", [PLAIN, TEN_SOURCES], indirect=True, ids=["three sources", "ten sources"])
def test_choosing_does_not_wait(run):
    with host_synchronisations() as counted:
        run.learner.sample(12)
    assert len(counted) == 0, str(counted)
