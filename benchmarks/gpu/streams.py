"""The section "streams": passes on a stream of their own give the rewards of the default stream.

The loop waits and records as torch's documentation asks for. Each stream first sleeps for a moment: so a kernel of the learner that does not wait for
another stream reads what is not there yet.
"""

from collections.abc import Callable, Iterator

import torch
from benchmarks.gpu.findings import Finding, attempt, naming, worst_of
from benchmarks.gpu.precisions import EXACT
from benchmarks.gpu.problems import PROBLEMS, Problem
from benchmarks.gpu.training import SIZES, STEPS, Training, calls, error_of
from torch import Tensor

SECTION = "streams"
SLEEP = 2_000_000  # cycles: about a millisecond
Choice = Callable[[int, torch.cuda.Stream, torch.cuda.Stream], tuple[torch.cuda.Stream, torch.cuda.Stream]]

# The streams of the forward pass and of the rest of the step, chosen from the default stream and a side stream.
STREAMS: dict[str, Choice] = {
    "one side stream": lambda step, main, side: (side, side),
    "forward on a side stream": lambda step, main, side: (side, main),
    "backward on a side stream": lambda step, main, side: (main, side),
    "steps take turns": lambda step, main, side: (side, side) if step % 2 else (main, main),
}


def check(device: str, quick: bool = False) -> Iterator[Finding]:
    """A finding for each use of streams, with the largest error of all models."""
    for name in STREAMS:
        yield attempt(SECTION, name, look, device, name)


def look(device: str, name: str) -> Finding:
    """Train every model on the streams and on the default one."""
    errors: dict[str, float] = {}
    with EXACT.settings():
        for problem_name, problem in PROBLEMS.items():
            for size in SIZES:
                with naming(problem_name), calls(size):
                    error = error_of(rewards(problem, device, STREAMS[name]), rewards(problem, device, None))
                errors[problem_name] = max(error, errors.get(problem_name, 0.0))
    return worst_of(SECTION, name, errors, EXACT.tolerance)


def rewards(problem: Problem, device: str, choose: Choice | None) -> Tensor:
    """The rewards of a training run, on the default stream if none are chosen."""
    training = Training(problem, device)
    if choose is None:
        for step in range(STEPS):
            training.step(*training.batch(step))
    else:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for step in range(STEPS):
            step_on(training, step, main, *choose(step, main, side))
    torch.cuda.synchronize()
    return training.rewards()


def step_on(
    training: Training, step: int, main: torch.cuda.Stream, forward: torch.cuda.Stream, backward: torch.cuda.Stream
) -> None:
    """A training step with its forward pass on one stream and all else on another; its data come from the main one."""
    x, y = training.batch(step)
    training.learner.sample(len(x))
    for stream in {forward, backward} - {main}:
        stream.wait_stream(main)
        x.record_stream(stream)
        y.record_stream(stream)
    with torch.cuda.stream(forward):
        torch.cuda._sleep(SLEEP)
        loss = training.loss(x, y)
    if forward != backward:
        backward.wait_stream(forward)
        loss.record_stream(backward)
    with torch.cuda.stream(backward):
        torch.cuda._sleep(SLEEP)
        loss.backward()
        training.finish(loss)
    for stream in {forward, backward} - {main}:
        main.wait_stream(stream)
