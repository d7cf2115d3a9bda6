"""The paper's Theorem 1, and the unbiasedness of NSLR, on a problem small enough to take every expectation exactly.

Each of n examples draws one of K = 3 actions; action a always means the same example. So a batch is known by how often
each action was drawn, and an expectation is a sum over those counts with multinomial weights. The paper's equations 2-3
and its NSLR formula leave out the factor -α/n and the sign; here they stand.
"""

import copy
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import MixturePolicy, Reinforce, capture
from inloop.rewards import GradientAlignment, NextStepLoss
from inloop.step import Draw, Judge, Step

ALPHA, K = 0.4, 3


class Problem:
    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.x_K, self.y_K = torch.randn(K, 2, dtype=torch.float64), torch.randn(K, 1, dtype=torch.float64)
        self.held_out = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
        self.policy = MixturePolicy(K).double()
        with torch.no_grad():
            self.policy.scores.copy_(torch.tensor([0.3, -0.4, 0.8]))

    def next_loss(self, model):
        x, y = self.held_out
        return F.mse_loss(model(x), y)

    def batches(self, n):
        """Every possible batch of n examples, with its probability."""
        p_K = self.policy.probabilities().tolist()
        for first in range(n + 1):
            for second in range(n + 1 - first):
                counts = (first, second, n - first - second)
                ways = math.factorial(n) / math.prod(math.factorial(c) for c in counts)
                probability = ways * math.prod(p**c for p, c in zip(p_K, counts, strict=True))
                yield torch.tensor([0] * counts[0] + [1] * counts[1] + [2] * counts[2]), probability

    def after_step(self, actions):
        """The tape of an SGD step on the actions' examples, and the model after it."""
        model = copy.deepcopy(self.model)
        with capture(model) as tape:
            F.mse_loss(model(self.x_K[actions]), self.y_K[actions]).backward()
        torch.optim.SGD(model.parameters(), lr=ALPHA).step()
        model.zero_grad()
        return tape, model

    def update(self, reward, actions):
        """What the library's REINFORCE moves the policy by: sum_i r_i ∇log p(a_i)."""
        tape, after = self.after_step(actions)
        loss = self.next_loss(after)
        loss.backward()
        draws = [Draw(actions, (len(actions),), copy.deepcopy(self.policy), 0)]
        judge = Judge({name: p.grad for name, p in after.named_parameters()}, loss.item())
        rewards_N = reward(Step(draws, tape), judge)
        moved = copy.deepcopy(self.policy)
        reinforce = Reinforce(torch.optim.SGD(moved.parameters(), lr=1.0), accumulate=1, normalisation="none")
        reinforce.attach(moved, reward)
        reinforce.add(draws, rewards_N)
        return (moved.scores - self.policy.scores).detach()

    def expected_update(self, reward, n):
        return sum(probability * self.update(reward, actions) for actions, probability in self.batches(n))

    def meta_gradient_of_an_infinite_batch(self):
        """∇_φ L(θ - α E_a[∇l(θ, a)])."""
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        per_action = [
            torch.autograd.grad(F.mse_loss(self.model(self.x_K[[a]]), self.y_K[[a]]), parameters) for a in range(K)
        ]
        p_K = self.policy.log_probabilities().exp()
        after = {
            name: p.detach() - ALPHA * sum(p_K[a] * per_action[a][j] for a in range(K))
            for j, (name, p) in enumerate(zip(names, parameters, strict=True))
        }
        loss = self.next_loss(lambda x: torch.func.functional_call(self.model, after, (x,)))
        return torch.autograd.grad(loss, self.policy.scores)[0]

    def meta_gradient(self, n):
        """∇_φ E[L(θ_{t+1})] for batches of n, through the probability of each batch."""
        log_p_K = self.policy.log_probabilities()
        expectation = torch.zeros((), dtype=torch.float64)
        for actions, probability in self.batches(n):
            loss = self.next_loss(self.after_step(actions)[1]).item()
            log_p = log_p_K[actions].sum()
            expectation = expectation + probability * loss * (log_p - log_p.detach()).exp()
        return torch.autograd.grad(expectation, self.policy.scores)[0]


@pytest.fixture(scope="module")
def problem():
    return Problem()


@pytest.mark.parametrize("limit", ["infinite batch", "same batch"])
def test_theorem_1_the_expected_gar_update_approaches_the_meta_gradient(problem, limit):
    """Its error about halves as the batch doubles."""
    exact = functools.cache(problem.meta_gradient)
    errors = []
    for n in (4, 8, 16, 32):
        target = problem.meta_gradient_of_an_infinite_batch() if limit == "infinite batch" else exact(n)
        estimate = -ALPHA / n * problem.expected_update(GradientAlignment(), n)
        errors.append(float((estimate - target).norm() / target.norm()))
    ratios = [before / after for before, after in itertools.pairwise(errors)]
    assert all(1.8 < ratio < 2.2 for ratio in ratios), (errors, ratios)
    assert errors[-1] < 0.05


@pytest.mark.parametrize("n", [1, 2, 5])
def test_nslr_is_unbiased_for_every_batch_size(problem, n):
    """E[L(θ_{t+1}) sum_i ∇log p(a_i)] = ∇_φ E[L(θ_{t+1})]; the reward is -L, for something to be maximised."""
    estimate = -problem.expected_update(NextStepLoss(), n)
    torch.testing.assert_close(estimate, problem.meta_gradient(n), rtol=1e-10, atol=1e-14)
