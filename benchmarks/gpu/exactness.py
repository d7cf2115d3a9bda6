"""The section "rewards": are a learner's rewards those of brute force, in every precision, and does its own verification pass?

The reference is computed on the CPU in float64, from the parameters that the model on the GPU had: so errors of the training do not add up. It is one
backward pass for each example. With BatchNorm, whose examples have no gradients of their own, each example has its own copy of the parameters instead.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from benchmarks.gpu.findings import Finding, attempt, describe, judged
from benchmarks.gpu.precisions import PRECISIONS, Precision
from benchmarks.gpu.problems import PROBLEMS, Problem
from benchmarks.gpu.training import SIZES, STEPS, Training, calls, error_of
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from inloop import Recording
from inloop.alignment.oracles import align_by_loss, align_by_path
from inloop.errors import VerificationError

SECTION = "rewards"


def check(device: str, quick: bool = False) -> Iterator[Finding]:
    """A finding for each model in each precision."""
    for precision in PRECISIONS:
        for problem in PROBLEMS:
            yield from attempt(
                SECTION,
                f"{problem}, {precision}",
                lambda problem=problem, precision=precision: look(device, problem, precision),
            )


def look(device: str, problem_name: str, precision_name: str) -> Finding:
    """Train, compare the rewards, and train again with each step verified."""
    problem, precision = PROBLEMS[problem_name], PRECISIONS[precision_name]
    with precision.settings():
        error = max(largest_error(problem, device, precision, size) for size in SIZES)
        refusal = why_not_verified(problem, device, precision)
    found = f"error {error:.1e}; " + (refusal or f"{STEPS} verified steps pass")
    return Finding(
        SECTION,
        f"{problem_name}, {precision_name}",
        found,
        f"error {precision.tolerance:.0e}",
        judged(error <= precision.tolerance and not refusal),
        {"error": error, "tolerance": precision.tolerance, "verified": not refusal},
    )


def largest_error(problem: Problem, device: str, precision: Precision, size: str) -> float:
    """Of the rewards of a training run."""
    training = Training(problem, device, precision)
    states = []
    with calls(size):
        for step in range(STEPS):
            states.append(training.state())
            training.step(*training.batch(step))
    return error_of(training.rewards(), brute_force(problem, states, precision.dtype))


def why_not_verified(problem: Problem, device: str, precision: Precision) -> str:
    """Why inloop refuses a step if it verifies each; empty if it refuses none."""
    training = Training(problem, device, precision, record=Recording(verify=True))
    try:
        for step in range(STEPS):
            training.step(*training.batch(step))
    except VerificationError as error:
        return f"step {step + 1} is refused: {describe(error)}"
    return ""


def brute_force(problem: Problem, states: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> Tensor:
    """``r_i = <∇l_i(θ_t), ∇L(θ_{t+1})>`` of all steps but the last, [STEPS - 1, N].

    Args:
        states: The model's before each step.
        dtype: Of the inputs that the model was given.
    """
    rewards = []
    for step in range(len(states) - 1):
        direction = gradient(problem, states[step + 1], step + 1, dtype)
        rewards.append(own_rewards(problem, states[step], step, dtype, direction))
    return torch.stack(rewards)


def gradient(problem: Problem, state: Mapping[str, Tensor], step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradient of a step's batch, without that of BatchNorm's own parameters, which do not count."""
    model = problem.model(torch.float64)
    model.load_state_dict(state)
    x, y = (column.double() if column.is_floating_point() else column for column in problem.batch(step, dtype))
    problem.losses(model(x), y).mean().backward()
    return {
        name if not path else f"{path}.{name}": parameter.grad
        for path, module in model.named_modules()
        if not isinstance(module, _BatchNorm)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.grad is not None
    }


def own_rewards(
    problem: Problem, state: Mapping[str, Tensor], step: int, dtype: torch.dtype, direction: dict[str, Tensor]
) -> Tensor:
    """The product of each example's gradient with a direction, [N]."""
    model = problem.model(torch.float64)
    model.load_state_dict(state)
    x, y = (column.double() if column.is_floating_point() else column for column in problem.batch(step, dtype))
    if problem.couples_examples:
        return align_by_path(model, lambda model: problem.losses(model(x), y).mean(), direction).detach()
    return align_by_loss(model, problem.losses(model(x), y), direction).detach()
