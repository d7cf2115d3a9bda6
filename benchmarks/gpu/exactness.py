"""The section "rewards": are a learner's rewards those of brute force, in every precision, and does its own verification pass?

The reference is computed on the CPU in float64, from the parameters that the model on the GPU had: so errors of the training do not add up. In other
precisions torch rounds what anybody computes. So brute force is also computed on the GPU in the same precision, and its error, *torch's own*, is no
error of inloop.
"""

from collections.abc import Iterator

from benchmarks.gpu.brute_force import BruteForce
from benchmarks.gpu.findings import Finding, attempt, describe, judged
from benchmarks.gpu.precisions import EXACT, PRECISIONS, Precision
from benchmarks.gpu.problems import PROBLEMS, Problem
from benchmarks.gpu.training import SIZES, STEPS, Training, calls, error_of

from inloop import Recording
from inloop.errors import VerificationError

SECTION = "rewards"
TIMES_TORCHS_OWN = 3
NEVER_RIGHT = 0.3  # whatever torch's own error is


def check(device: str, quick: bool = False) -> Iterator[Finding]:
    """A finding for each model in each precision."""
    for precision in PRECISIONS:
        for problem in PROBLEMS:
            yield attempt(SECTION, f"{problem}, {precision}", look, device, problem, precision)


def look(device: str, problem_name: str, precision_name: str) -> Finding:
    """Train, compare the rewards, and train again with each step verified."""
    problem, precision = PROBLEMS[problem_name], PRECISIONS[precision_name]
    with precision.settings():
        found = [errors(problem, device, precision, size) for size in SIZES]
        refusal = why_not_verified(problem, device, precision)
    error, own = (max(each) for each in zip(*found, strict=True))
    limit = allowed(precision, own)
    return Finding(
        SECTION,
        f"{problem_name}, {precision_name}",
        f"error {error:.1e}, torch's own {own:.1e}; " + (refusal or f"{STEPS} verified steps pass"),
        f"error {limit:.0e}",
        judged(error <= limit and not refusal),
        {"error": error, "torchs_own_error": own, "limit": limit, "verified": not refusal},
    )


def allowed(precision: Precision, own: float) -> float:
    """The largest error that is right: the tolerance, or more if brute force in the same precision is as far off."""
    return min(max(precision.tolerance, TIMES_TORCHS_OWN * own), NEVER_RIGHT)


def errors(problem: Problem, device: str, precision: Precision, size: str) -> tuple[float, float]:
    """Of the rewards of a training run, and of brute force on the same device in the same precision."""
    training = Training(problem, device, precision)
    states = []
    with calls(size):
        for step in range(STEPS):
            states.append(training.state())
            training.step(*training.batch(step))
    right = BruteForce(problem, "cpu", EXACT, precision.dtype).rewards(states)
    own = BruteForce(problem, device, precision, precision.dtype).rewards(states)
    return error_of(training.rewards(), right), error_of(own, right)


def why_not_verified(problem: Problem, device: str, precision: Precision) -> str:
    """Why inloop refuses a step if it verifies each; empty if it refuses none."""
    training = Training(problem, device, precision, record=Recording(verify=True))
    try:
        for step in range(STEPS):
            training.step(*training.batch(step))
    except VerificationError as error:
        return f"step {step + 1} is refused: {describe(error)}"
    return ""
