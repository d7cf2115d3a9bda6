"""Training on streams of one's own: no kernel of the learner races with another stream, and no memory is used again too early.

The loops below wait and record as torch's documentation asks for; without a learner they do not race.
"""

import pytest
import torch

from inloop import Recording
from tests.device.pretend_cuda.watching import races
from tests.device.problems import PROBLEMS
from tests.device.runs import Run, held_out_loss

pytestmark = pytest.mark.usefixtures("nothing_is_small")  # so that calls are aligned while the next gradient forms


@pytest.fixture(autouse=True)
def _streams_may_differ():
    """Torch warns of what is meant here: a node that adds up gradients on another stream than theirs."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    yield
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def train(run, streams, num_steps=7):
    """Train with the forward pass on one stream and the rest of the step on another; ``streams(step, main, side)`` gives both."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for step in range(num_steps):
        forward, backward = streams(step, main, side)
        x, y = run.draw()
        for stream in {forward, backward} - {main}:
            stream.wait_stream(main)
            x.record_stream(stream)
            y.record_stream(stream)
        with torch.cuda.stream(forward):
            logits = run.model(x)
            loss = run.problem.loss(logits, y)
        if forward != backward:
            backward.wait_stream(forward)
            loss.record_stream(backward)
        with torch.cuda.stream(backward):
            loss.backward()
            if run.learner.num_announced:
                run.learner.step(loss)
            run.move()
        for stream in {forward, backward} - {main}:
            main.wait_stream(stream)
        del x, y, logits, loss


STREAMS = {
    "one side stream": lambda step, main, side: (side, side),
    "forward on another": lambda step, main, side: (side, main),
    "backward on another": lambda step, main, side: (main, side),
    "steps take turns": lambda step, main, side: (side, side) if step % 2 else (main, main),
}
OPTIONS = {
    "mlp": {},
    "lstm": {"problem": PROBLEMS["lstm"]},
    "convolutions": {"problem": PROBLEMS["convolutions"]},
    "checkpointed": {"problem": PROBLEMS["checkpointed"]},
    "recompute": {"record": Recording(retain="recompute")},
    "half": {"record": Recording(retain="half")},
    "part": {"part": 0.5},
    "previous": {"reference": "previous"},
    "held-out": {"reference": held_out_loss},
    "optimizer": {"knows_optimizer": True},
}


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_learner_follows_the_streams_of_the_loop(options, streams):
    run = Run("cuda", on_device=True, **OPTIONS[options])
    with races() as found:
        train(run, STREAMS[streams])
    assert len(run.rewards) >= 5
    assert not found, str(found)


def keep_accumulating_nodes(model):
    """The nodes that add up gradients, as DistributedDataParallel keeps them: they stay on the stream of the moment for good."""
    return [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]


def test_kept_nodes_alone_do_not_race():
    run = Run("cuda", on_device=True)
    nodes = keep_accumulating_nodes(run.model)
    run.learner.close()
    run.draw = lambda: run.mixture.draw(torch.randint(3, (12,)))
    with races() as found:
        train(run, STREAMS["one side stream"])
    assert nodes
    assert not found, str(found)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_that_arrive_on_another_stream_do_not_race(options):
    run = Run("cuda", on_device=True, **OPTIONS[options])
    nodes = keep_accumulating_nodes(run.model)
    with races() as found:
        train(run, STREAMS["one side stream"])
    assert nodes
    assert not found, str(found)
