"""The same training in one, two and four processes: the same rewards, and the same policy at every step."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.distributed.processes import run
from tests.distributed.training import Convolutional, Options, Transformer, train


@cache
def alone(options):
    return train(options)


def check(options, world_size):
    """Against one process without any wrapper."""
    expected = alone(replace(options, wrapper="none"))
    results = run(world_size, train, options)
    assert len(expected["rewards"]) >= options.steps // 2 - 1
    for result in results:
        assert result["probabilities"] == results[0]["probabilities"], "processes differ"
        assert len(result["rewards"]) == len(expected["rewards"])
        for here, there in zip(result["rewards"], expected["rewards"], strict=True):
            torch.testing.assert_close(torch.tensor(here), torch.tensor(there), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(
            torch.tensor(result["probabilities"]), torch.tensor(expected["probabilities"]), rtol=1e-6, atol=1e-9
        )
        assert result["drawn"] == expected["drawn"]
        torch.testing.assert_close(
            torch.tensor(result["excess"]), torch.tensor(expected["excess"]), rtol=1e-4, atol=1e-6
        )
    assert expected["probabilities"][-1] != expected["probabilities"][0], "nothing was learned"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_fifty_steps(wrapper, world_size):
    check(Options(Transformer, wrapper, steps=50, clip=False), world_size)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_convolutional_network(wrapper):
    check(Options(Convolutional, wrapper, clip=False), 2)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_processes_with_unequal_parts_of_a_batch(wrapper):
    check(Options(Transformer, wrapper, batch=10, clip=False), 4)


@pytest.mark.parametrize(("world_size", "batch", "micro_batches"), [(2, 24, 2), (4, 26, 1)])
def test_what_is_told_of_the_examples(world_size, batch, micro_batches):
    """The default rule lowers the source with wrong labels, at the same step."""
    options = Options(
        *(Convolutional, "ddp"), steps=250, batch=batch, micro_batches=micro_batches, knows_optimizer=True, tells=True
    )
    check(replace(options, clip=False), world_size)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_accumulation_without_synchronisation(wrapper):
    check(Options(Transformer, wrapper, micro_batches=3, clip=False), 2)


@pytest.mark.parametrize(
    "options",
    [
        Options(Convolutional, "ddp", interleave=True),
        Options(Convolutional, "ddp", retain="recompute"),
        Options(Convolutional, "ddp", reference="previous"),
        Options(Convolutional, "ddp", selection="passes"),
        Options(Convolutional, "ddp", reference="held-out"),
        Options(Transformer, "fsdp", reference="held-out", knows_optimizer=True, clip=False),
        Options(Convolutional, "ddp", part=0.3, steps=30),
        Options(Transformer, "fsdp", part=0.3, clip=False),
        Options(Convolutional, "fsdp", reference="previous", clip=False),
        Options(Transformer, "ddp", knows_optimizer=True, clip=False),
        Options(Transformer, "fsdp", knows_optimizer=True, clip=False),
        Options(Transformer, "ddp", reference="trail"),
        Options(Transformer, "fsdp", reference="trail", clip=False),
        Options(Convolutional, "ddp", reference="trail", part=0.5),
    ],
    ids=[
        "interleaved",
        "recomputed",
        "previous",
        "passes",
        "held-out",
        "held-out-sharded",
        "part",
        "part-sharded",
        "previous-sharded",
        "adamw",
        "adamw-sharded",
        "trail",
        "trail-sharded",
        "trail-part",
    ],
)
def test_options(options):
    check(options, 2)
