"""An update rule that is anchored at a prior and moves on evidence.

The policy's parameters φ are logits; their initial values φ_0 (0 for the scores of a mixture, which has its prior apart) are its prior. For every parameter j the rule estimates
the advantage a_j of the choices that a higher φ_j makes likelier, from the score functions s_i = ∂log p(a_i; φ)/∂φ_j of
all examples so far and their normalised rewards w_i (mean 0 and deviation 1 within a step):

    a_j = X_j / Y_j,    X_j = sum_i w_i s_i,    Y_j = sum_i s_i²,    se_j = sqrt(max(V_j, Y_j)) / Y_j

For a softmax this is the mean reward of choice j minus that of the others. V_j is the variance of X_j - a_j Y_j over
steps: examples of one step share a judge. Y_j, the variance if they did not, is a lower bound for the first steps. Then

    φ_j = φ_0j + clip(S(a_j - m) / temperature),    S(a) = a max(0, 1 - (caution se / a)²) / (1 + (se / temperature)²)

with m the median of a over the alternatives of the same choice (0 for yes or no): a single excellent source must not
make all others look bad. The last factor is that of a normal prior for a, with the temperature as its deviation: while
errors are large, even the largest of many estimates moves its choice little.

So a choice that is not certain to be better or worse stays at its prior, however long its estimate wanders. The clip
keeps e^-3 of the prior's odds for a dropped choice, so that it is seen if it becomes good. A judge that is not training data may double
the odds of an alternative. Other judges may only lower it: the policy draws them, too, so what it draws more of would agree with itself the
more, and examples that are seen again and again would look best. Beyond ``memory`` examples, new evidence replaces old. A choice that is seldom drawn forgets slowly.

If the learner is told more of the examples, the rule also acts on that. It drops each source whose losses certainly show that it does not learn while most
others do (``learner.step(loss, losses=)``). It keeps a quarter of the odds of a source whose labels certainly surprise the model (``logits=`` and
``labels=``): with some wrong labels it still teaches.

Rewards do not tell wrong from different: what is unlike the rest pulls against it. So they move no source if the judge is training data and logits
and labels are told, which do tell. They move nothing if the judge is a trail (``Reference.tells_better``), whose rewards are low for hard examples, too.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.policies import Actions, Discrete, MixturePolicy, Policy, part_of, source_policy
from inloop.rewards import Reward
from inloop.step import Draw
from inloop.updates.reinforce import normalise, trainable
from inloop.updates.update import KnownSources, Update

LOWEST, HIGHEST = -3.0, math.log(2)  # limits of φ - φ_0
LOWEST_OF_SURPRISING = -math.log(4)
LEAST_STEPS = 10  # a parameter with evidence of fewer stays
_MOST_CHOICES = 1000  # whose scores are all kept
_ROWS = 256  # examples whose scores are computed together: of a policy with many choices they take much memory
EVERY = 10  # rewarded steps between two changes of the policy


class Evidence:
    """A ratio of two sums over examples, ``X / Y``, for each of J parameters, with its standard error over steps.

    Args:
        memory: How many examples, by the sum of their squared weights, to remember before new ones replace old ones.
    """

    def __init__(self, num_parameters: int, memory: float) -> None:
        self._memory = memory
        self.sums = torch.zeros(
            5, num_parameters, dtype=torch.float64, device="cpu"
        )  # over steps, of X, Y, X², X Y, Y²

    def add(self, x_J: Tensor, y_J: Tensor) -> None:
        """Add the sums of one step."""
        x, y, sums = x_J.numpy(), y_J.numpy(), self.sums.numpy()
        sums += (x, y, x * x, x * y, y * y)
        sums *= np.minimum(self._memory / np.maximum(sums[1], 1e-12), 1.0)

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the ratio and its standard error, [J] each; the error is infinite without enough evidence."""
        x, y, xx, xy, yy = self.sums
        ratio = x / y.clamp_min(1e-12)
        steps = y**2 / yy.clamp_min(1e-12)
        variance = (xx - 2 * ratio * xy + ratio**2 * yy).clamp_min(0) * steps / (steps - 1).clamp_min(1e-12)
        error = torch.maximum(variance, y).sqrt() / y.clamp_min(1e-12)
        return ratio, torch.where(steps >= LEAST_STEPS, error, torch.inf)

    def certain(self, caution: float, scale: float, groups: Sequence[Tensor] = ()) -> Tensor:
        """Return S: the part of the ratio beyond ``caution`` standard errors, shrunk where errors are large.

        Args:
            scale: How large ratios are expected to be: the deviation of their prior.
            groups: Rows of parameters, [G, K] each, that are compared with their median.
        """
        ratio, error = self.estimate()
        for rows_GK in groups:
            known_GK = torch.where(error[rows_GK].isfinite(), ratio[rows_GK], torch.nan)
            ratio[rows_GK] -= known_GK.nanquantile(0.5, dim=-1, keepdim=True).nan_to_num(0.0)
        is_certain = ratio.abs() > caution * error
        beyond = ratio - (caution * error).square() / ratio.where(is_certain, torch.ones((), device="cpu"))
        return torch.where(is_certain, beyond / (1 + (error / scale).square()), 0.0)


class Anchored(Update):
    """Moves each parameter away from its prior as far as the evidence for its advantage goes.

    Args:
        temperature: The advantage, in standard deviations of a step's rewards, that changes a choice's odds e-fold; also how large
            advantages are expected to be.
        caution: How many standard errors an advantage must have to count.
        memory: How many examples the evidence covers.
    """

    def __init__(self, temperature: float = 0.05, caution: float = 2.0, memory: float = 4000.0) -> None:
        super().__init__()
        given = {"temperature": temperature, "caution": caution, "memory": memory}
        for name, value in given.items():
            if not value > 0:
                raise UsageError(f"{name}={value}: allowed are numbers above 0.")
        self.temperature, self.caution, self.memory = temperature, caution, memory

    def begin(self, policy: Policy, reward: Reward) -> None:
        self._parameters = trainable(policy)
        if not self._parameters:
            raise UsageError(
                f"The policy, a {type(policy).__name__}, has no parameters to learn. Fix: give one that has, or update=False to watch only."
            )
        if any(isinstance(part, MixturePolicy) and part.form == "inverted" for part in policy.modules()):
            raise UsageError(
                "Anchored lowers the scores of bad sources, and the inverted form has high scores for them. Fix: MixturePolicy(..., form='bounded')."
            )
        if reward.normalisation == "none":
            raise UsageError(
                f"Anchored compares the examples of a step, and {type(reward).__name__} is not made for that. Fix: use reward='gar', or "
                "update=inloop.Reinforce()."
            )
        self._groups, self._places = alternatives_of(policy), places_of_sources(policy)
        mixtures = {id(part.scores) for part in policy.modules() if isinstance(part, MixturePolicy)}
        # The prior of a mixture is not in its scores, which may have been moved by a learner before.
        priors = [torch.zeros_like(p) if id(p) in mixtures else p.detach() for p in self._parameters]
        self._prior = torch.cat([values.flatten().double() for values in priors])
        self._evidence = Evidence(len(self._prior), self.memory)
        self._num_steps = 0
        self._scores: weakref.WeakKeyDictionary[Policy, tuple[Tensor, Tensor]] = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def add(self, draws: Sequence[Draw], rewards_N: Tensor) -> bool:
        rewards_N = rewards_N.detach().to("cpu", torch.float64)
        weights_N = normalise(rewards_N)
        if weights_N.numpy().any():  # equal rewards are no evidence
            parts = zip(draws, weights_N.split([sum(draw.rewarded_counts) for draw in draws]), strict=True)
            sums_2J = [self._sums(draw, weights_n) for draw, weights_n in parts]
            self._evidence.add(*(sums_2J[0] if len(sums_2J) == 1 else torch.stack(sums_2J).sum(dim=0)))
        self._num_steps += 1
        if self._num_steps % EVERY:
            return False
        return self._move()

    def _sums(self, draw: Draw, weights_N: Tensor) -> Tensor:
        """Sums over the examples of a draw, [2, J]: of w s and of s². Of one choice among a few, each choice's score is computed once."""
        policy, actions = draw.policy, draw.rewarded
        if not isinstance(policy, Discrete) or policy.given is not None or policy.num_choices > _MOST_CHOICES:
            return _sums_by_example(policy, actions, weights_N)
        if policy not in self._scores:
            scores_KJ = scores(policy, torch.arange(policy.num_choices, device="cpu"))
            self._scores[policy] = scores_KJ, scores_KJ.square()
        choice_N = policy.check(actions).numpy()
        number_K = np.bincount(choice_N, minlength=policy.num_choices)
        weight_K = np.bincount(choice_N, weights_N.numpy(), minlength=policy.num_choices)
        drawn = number_K > 0  # the score of a choice with probability zero is no number
        each_KJ, square_KJ = (table_KJ.numpy()[drawn] for table_KJ in self._scores[policy])
        return torch.from_numpy(np.stack([weight_K[drawn] @ each_KJ, number_K[drawn] @ square_KJ]))

    def _move(self) -> bool:
        """Set the policy to its prior, shifted by the evidence. Return whether that changed it."""
        effect = self._evidence.certain(self.caution, self.temperature, self._groups)
        shift = (effect / self.temperature).clamp(LOWEST, HIGHEST)
        if not self.reference.tells_better:
            shift = torch.zeros_like(shift)
        if self.reference.is_training_data:
            for rows_GK in self._groups:
                shift[rows_GK] = shift[rows_GK].clamp_max(0)
        if self.sources is not None and self._places is not None:
            shift[self._places] = self._shift_of_sources(shift[self._places], self.sources)
        return self._set(self._prior + shift)

    def _shift_of_sources(self, shift_K: Tensor, sources: KnownSources) -> Tensor:
        """The shift of the sources' scores, from that by rewards and what is known of the sources."""
        if sources.labels_are_told and self.reference.is_training_data:
            shift_K = torch.where(sources.stagnant(), shift_K, 0.0)  # a source that learns is at most different
        is_raised_K = shift_K > 0  # by a judge that is not training data, which decides
        lowered_K = torch.where(sources.surprising(), shift_K.clamp_max(LOWEST_OF_SURPRISING), shift_K)
        lowered_K = torch.where(sources.not_learning(), LOWEST, lowered_K)
        return torch.where(is_raised_K, shift_K, lowered_K)

    def _set(self, values: Tensor) -> bool:
        parts = values.split([parameter.numel() for parameter in self._parameters])
        pairs = [(p, part.view_as(p).to(p)) for p, part in zip(self._parameters, parts, strict=True)]
        if all(torch.equal(parameter, part) for parameter, part in pairs):
            return False
        for parameter, part in pairs:
            parameter.copy_(part)
        self.version += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "prior": self._prior.clone(),
            "evidence": self._evidence.sums.clone(),
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["prior"].shape != self._prior.shape:
            raise UsageError(
                f"The state is of a policy with {len(state['prior'])} parameters; this one has {len(self._prior)}."
            )
        super().load_state_dict(state)
        self._prior = state["prior"].clone()
        self._evidence.sums = state["evidence"].clone()
        self._num_steps = state["num_steps"]


def alternatives_of(policy: Policy) -> list[Tensor]:
    """Where the alternatives of each choice are among all trainable parameters of a policy, [G, K] for each parameter."""
    named = {
        id(parameter)
        for part in policy.modules()
        if isinstance(part, Policy)
        for name, parameter in part.named_parameters(recurse=False)
        if name in part.alternatives
    }
    groups, start = [], 0
    for parameter in trainable(policy):
        if id(parameter) in named:
            places = torch.arange(start, start + parameter.numel(), device="cpu")
            groups.append(places.view(-1, parameter.shape[-1]))
        start += parameter.numel()
    return groups


def places_of_sources(policy: Policy) -> Tensor | None:
    """Where the scores of the sources are among all trainable parameters of a policy, [K]; None if it has no mixture."""
    mixture = source_policy(policy)
    start = 0
    for parameter in trainable(policy):
        if isinstance(mixture, MixturePolicy) and parameter is mixture.scores:
            return torch.arange(start, start + parameter.numel(), device="cpu")
        start += parameter.numel()
    return None


def _sums_by_example(policy: Policy, actions: Actions, weights_N: Tensor) -> Tensor:
    total = torch.zeros((), device="cpu")
    for start in range(0, max(1, len(weights_N)), _ROWS):
        rows = slice(start, start + _ROWS)
        scores_NJ = scores(policy, part_of(actions, rows))
        total = total + torch.stack([weights_N[rows] @ scores_NJ, scores_NJ.square().sum(dim=0)])
    return total


def scores(policy: Policy, actions: Actions) -> Tensor:
    """``∂log p(a_i; φ)/∂φ_j``, [N, J], at the present parameters of a policy."""
    parameters = trainable(policy)
    with torch.enable_grad():
        log_prob_N = policy.log_prob(actions)
    n = len(log_prob_N)
    if n == 0:
        return torch.zeros(0, sum(p.numel() for p in parameters), dtype=torch.float64, device="cpu")
    each = torch.eye(n, dtype=log_prob_N.dtype, device="cpu")
    gradients = torch.autograd.grad(log_prob_N, parameters, each, is_grads_batched=True, allow_unused=True)
    return torch.cat(
        [
            torch.zeros(n, p.numel(), dtype=torch.float64, device="cpu") if g is None else g.reshape(n, -1).double()
            for p, g in zip(parameters, gradients, strict=True)
        ],
        dim=1,
    )
