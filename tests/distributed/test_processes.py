"""What processes tell each other, what they refuse, and what happens when one of them is gone or goes its own way."""

import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import inloop
from inloop import distributed
from inloop.alignment import direction
from inloop.errors import LostProcessError, UnsupportedLayerError, UsageError, VerificationError
from inloop.rewards import GradientAlignment
from tests.distributed.processes import run
from tests.distributed.training import Convolutional, Options, Run, Transformer


def oracle_rewards(options):
    """A step with the loss of each example differentiated by itself, against the gradient of the next step."""
    run = Run(options)
    batches = []
    for _ in range(2):
        x, y = run.mixture.draw(run.learner.sample(3))
        loss = F.cross_entropy(run.wrapped(x).flatten(0, -2), y.flatten())
        loss.backward()
        batches.append((x, y))
        if len(batches) == 1:
            run.learner.step(loss)
            model = options.kind().double()
            model.load_state_dict(run.model.state_dict())
            run.optimizer.step()
            run.optimizer.zero_grad()
    gradient = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    run.learner.step(loss)
    x, y = batches[0]
    own = [F.cross_entropy(model(x[i : i + 1]).flatten(0, -2), y[i : i + 1].flatten()) for i in range(len(x))]
    rewards = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]) @ gradient for loss in own
    ]
    return torch.stack(rewards).tolist(), run.rewards[0].tolist()


def test_rewards_are_those_of_each_examples_own_loss():
    results = run(2, oracle_rewards, Options(Transformer, "ddp"))
    expected = torch.tensor([reward for own, _ in results for reward in own])
    for _, gathered in results:
        torch.testing.assert_close(torch.tensor(gathered), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_what_a_step_costs_in_messages(wrapper):
    """Counts to draw, the numbers to agree by, the rewards; counts and sources of the mixture; sharded gradients once."""
    options = Options(Convolutional, wrapper, steps=6, batch=12, clip=False)
    result, _ = run(2, _trained, options)
    small = 8 + 5 * 8 + 6 * 8 + 8 + 6 * 8  # from one other process
    if wrapper == "ddp":
        assert result["messages"][-1] == 5
        assert result["bytes"][-1] == small
        return
    model = Convolutional().double()
    half = sum(p.numel() - -(-len(p) // 2) * p[0].numel() for p in model.parameters()) * 8
    assert result["messages"][-1] == 5 + 1 + len(list(model.parameters()))  # and the gradient's norm
    assert abs(result["bytes"][-1] - small - half) <= 8


def _trained(options):
    return Run(options).train().record()


def gathered_at_once():
    """The most elements of sharded gradients that are there at one time."""
    run = Run(Options(Transformer, "fsdp", clip=False)).train(3)
    alive, most = weakref.WeakSet(), 0
    whole = distributed.whole

    def watched(tensor):
        nonlocal most
        full = whole(tensor)
        alive.add(full)
        most = max(most, sum(part.numel() for part in alive))
        return full

    direction.whole = watched
    run.train(3)
    sizes = sorted(sum(p.numel() for p in part.parameters(recurse=False)) for part in run.model.modules())
    return most, sizes, sum(p.numel() for p in run.model.parameters())


def test_sharded_gradients_are_never_gathered_all_at_once():
    for most, sizes, total in run(2, gathered_at_once):
        assert most <= sizes[-1] + sizes[-2] < 0.55 * total


def one_dies():
    run = Run(Options(Convolutional, "ddp")).train(2)
    if dist.get_rank() == 1:
        os._exit(9)
    start = time.monotonic()
    try:
        run.train(1)
    except LostProcessError as error:
        return str(error), time.monotonic() - start


def test_a_process_that_dies_leaves_no_hang():
    (message, seconds), nothing = run(2, one_dies, group_timeout=30)
    assert nothing is None
    assert seconds < 35
    assert "Process 0 of 2 could not reach the others" in message
    assert "last checkpoint" in message


def one_is_stuck():
    run = Run(Options(Convolutional, "ddp")).train(2)
    if dist.get_rank() == 1:
        time.sleep(12)
        os._exit(0)
    start = time.monotonic()
    try:
        run.train(1)
    except LostProcessError as error:
        return str(error), time.monotonic() - start


def test_a_process_that_hangs_is_given_up_after_the_timeout():
    (message, seconds), _ = run(2, one_is_stuck, group_timeout=4)
    assert "could not reach the others" in message
    assert 3 < seconds < 11


def one_has_a_bad_loss(where):
    run = Run(Options(Convolutional, "ddp")).train(2)
    before = run.learner.policy.scores.clone()
    x, y = run.mixture.draw(run.learner.sample(6))
    loss = F.cross_entropy(run.wrapped(x), y)
    loss.backward()
    bad = dist.get_rank() == 1
    if bad and where == "gradient":
        run.model[0].weight.grad.fill_(torch.nan)
    report = run.learner.step(float("inf") if bad and where == "loss" else loss)
    return report.dropped is not None, torch.equal(before, run.learner.policy.scores)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_all_drop_the_step_that_one_has_to_drop(where):
    assert run(2, one_has_a_bad_loss, where) == [(True, True)] * 2


def one_goes_its_own_way(how):
    run = Run(Options(Convolutional, "ddp")).train(2)
    if dist.get_rank() == 1:
        if how == "policy":
            with torch.no_grad():
                run.learner.policy.scores[0] += 1
        else:
            run.learner.num_steps += 1
    with pytest.raises(UsageError, match="not at one"):
        run.train(1)
    return True


@pytest.mark.parametrize("how", ["policy", "steps"])
def test_processes_that_part_ways_are_told(how):
    assert run(2, one_goes_its_own_way, how) == [True, True]


def gradients_that_are_not_averaged():
    run = Run(Options(Convolutional, "none"))
    with pytest.raises(VerificationError, match="must be the mean over the 2 processes"):
        run.train(1)
    return True


def test_a_model_that_nobody_averages_is_refused():
    assert run(2, gradients_that_are_not_averaged) == [True, True]


def own_actions():
    """Chosen by the user, in each process others."""
    run = Run(Options(Convolutional, "ddp"))
    for _ in range(4):
        actions = torch.full((3,), dist.get_rank() + 1)
        run.learner.use(actions)
        x, y = run.mixture.draw(actions)
        loss = F.cross_entropy(run.wrapped(x), y)
        loss.backward()
        report = run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return report.rewards.count_K.tolist(), run.learner.policy.scores.tolist()


def test_actions_from_elsewhere_are_gathered():
    first, second = run(2, own_actions)
    assert first == second
    assert first[0] == [0, 3, 3]


def continue_elsewhere(options, steps, state):
    run = Run(options)
    if state is not None:
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.learner.load_state_dict(state["learner"])
        run.mixture.load_state_dict(state["mixture"])
    run.train(steps)
    saved = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "learner": run.learner.state_dict(),
        "mixture": run.mixture.state_dict(),
    }
    return saved, run.record()


def test_a_run_continues_with_another_number_of_processes():
    options = Options(Convolutional, "ddp")
    state, _ = run(4, continue_elsewhere, options, 9, None)[0]
    alone = Run(Options(Convolutional)).train(9)
    alone.learner.state_dict()  # as the other: what waits to be paid is dropped
    alone.train(8)
    _, record = run(2, continue_elsewhere, options, 8, state)[0]
    expected = torch.stack(alone.probabilities[9:]).tolist()
    torch.testing.assert_close(torch.tensor(record["probabilities"]), torch.tensor(expected), rtol=1e-6, atol=1e-9)
    # What is pending belongs to one process.
    assert record["probabilities"][-1] != record["probabilities"][0]


def loader_over(world_batch, num_steps, state):
    """Batches from a loader with workers; the examples say where they are from."""
    torch.manual_seed(1)
    sources = [(torch.arange(50) + 100 * number,) for number in range(3)]
    model = DistributedDataParallel(nn.Linear(1, 1))
    mixture = inloop.Mixture(sources)
    learner = inloop.InLoop(model, inloop.MixturePolicy(3), update=inloop.Reinforce(accumulate=1))
    loader = mixture.loader(learner, world_batch // distributed.world_size(), num_workers=1, num_batches=10)
    if state is not None:
        learner.load_state_dict(state["learner"])
        loader.load_state_dict(state["loader"])
    seen = []
    for number, (_, (values,)) in enumerate(loader):
        loss = model(values[:, None].float() / 100).square().mean()
        loss.backward()
        learner.step(loss)
        model.zero_grad()
        seen.append(values.tolist())
        if number == num_steps - 1:
            break
    return seen, {"learner": learner.state_dict(), "loader": loader.state_dict()}


def _joined(results):
    return [[value for part in parts for value in part] for parts in zip(*(seen for seen, _ in results), strict=True)]


def test_a_loader_with_batches_on_order_continues_with_another_number_of_processes():
    whole = run(2, loader_over, 8, 10, None)
    first = run(2, loader_over, 8, 4, None)
    rest = run(4, loader_over, 8, 6, first[0][1])
    assert _joined(first) == _joined(whole)[:4]
    assert _joined(rest)[:2] == _joined(whole)[4:6]  # what was on order: drawn before the run was left
    assert [len(batch) for batch in _joined(rest)] == [8] * 6
    assert len({value for batch in _joined(whole) for value in batch}) > 40  # processes do not draw the same


def streams():
    """Each example of a stream is read by every process and kept by one."""
    numbers = [range(1000), range(1000, 2000)]
    mixture = inloop.Mixture([list_like(part) for part in numbers])
    seen = []
    for _ in range(20):
        seen += mixture.draw(torch.tensor([0, 1, 0])).tolist()
    return seen, sum(len(source._buffer) + len(source._passed_over) for source in mixture.sources)


class list_like:
    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)


def test_streams_are_divided_and_nothing_is_hoarded():
    results = run(2, streams)
    everything = sorted(value for seen, _ in results for value in seen)
    assert everything == [*range(80), *range(1000, 1040)]
    assert all(left <= 3 for _, left in results)


def refusals():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    policy = inloop.MixturePolicy(2)
    with pytest.raises(UsageError, match="DataParallel"):
        inloop.InLoop(nn.DataParallel(model), policy)
    with pytest.raises(UsageError, match=r"model\.module"), inloop.capture(DistributedDataParallel(model)):
        pass
    with pytest.raises(UsageError, match="processes|several"):
        inloop.MetaGradient(model, nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    learner = inloop.InLoop(DistributedDataParallel(model), policy)
    learner.close()
    sharded = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(sharded)
    with pytest.raises(UsageError, match="recompute"):
        inloop.InLoop(sharded, policy, record=inloop.Recording(retain="recompute"))
    return True


def test_what_is_refused():
    assert run(2, refusals) == [True, True]


def tensor_parallel():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    learner = inloop.InLoop(model, inloop.MixturePolicy(2))
    learner.sample(3)
    with pytest.raises(UnsupportedLayerError, match="tensor parallelism"):
        model(torch.randn(3, 4))
    return True


def test_tensor_parallelism_is_refused_by_name():
    assert run(2, tensor_parallel) == [True, True]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.inner(x) * self.scale


def black_box_in_parts():
    model = nn.Sequential(Scaled(), nn.Linear(2, 40))
    fully_shard(model[0].inner)
    fully_shard(model)
    learner = inloop.InLoop(model, inloop.MixturePolicy(2))
    learner.sample(3)
    with pytest.raises(UnsupportedLayerError, match="sharded by themselves"):
        model(torch.randn(3, 2))
    return True


def test_a_black_box_sharded_in_parts_is_refused_by_name():
    assert run(2, black_box_in_parts) == [True, True]


class Transposed(nn.Module):
    """Examples are second in the middle."""

    def __init__(self, sorts=False):
        super().__init__()
        self.a, self.b, self.sorts = nn.Linear(3, 5), nn.Linear(5, 2), sorts

    def forward(self, x):
        if self.sorts:
            x = x[x.sum(dim=(1, 2)).argsort()]
        return self.b(torch.tanh(self.a(x.transpose(0, 1)))).transpose(0, 1).mean(dim=1)


def rewards_with_examples_second(wrapper, positions):
    torch.manual_seed(0)
    model = Transposed().double()
    if wrapper == "fsdp":
        fully_shard(model.a)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if wrapper == "ddp" else model
    learner = inloop.InLoop(wrapped, inloop.MixturePolicy(3), update=False)
    rewards = []
    add = learner.reward
    learner.reward = Seen(rewards, add)
    data = torch.randn(3, 8, positions, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for x in data:
        learner.sample(4)
        wrapped(x[4 * dist.get_rank() :][:4]).square().mean().backward()
        learner.step(1.0)
        model.zero_grad()
    return [part.tolist() for part in rewards]


class Seen(GradientAlignment):
    def __init__(self, rewards, inner):
        self.rewards, self.inner = rewards, inner

    def __call__(self, step, reference):
        self.rewards.append(self.inner(step, reference))
        return self.rewards[-1]


@pytest.mark.parametrize("positions", [4, 5])
def test_where_the_examples_are_is_found_out_in_sharded_models_too(positions):
    expected = run(2, rewards_with_examples_second, "ddp", positions)
    for here, there in zip(run(2, rewards_with_examples_second, "fsdp", positions), expected, strict=True):
        torch.testing.assert_close(torch.tensor(here), torch.tensor(there), rtol=1e-9, atol=1e-12)


def sorts_its_examples():
    model = Transposed(sorts=True)
    fully_shard(model)
    learner = inloop.InLoop(model, inloop.MixturePolicy(3))
    learner.sample(4)
    with pytest.raises(UnsupportedLayerError, match="other rows of"):
        model(torch.randn(4, 6, 3))
    return True


def test_a_sharded_model_that_sorts_its_examples_is_refused():
    assert run(2, sorts_its_examples) == [True, True]


def one_process_sharded():
    return Run(Options(Transformer, "fsdp", clip=False)).train(6).record()["probabilities"]


def test_a_sharded_model_in_one_process():
    (result,) = run(1, one_process_sharded)
    torch.testing.assert_close(
        torch.tensor(result),
        torch.stack(Run(Options(Transformer, clip=False)).train(6).probabilities),
        rtol=1e-6,
        atol=1e-9,
    )


def one_has_no_examples(wrapper):
    run = Run(Options(Convolutional, wrapper, clip=False))
    mine = 12 if dist.get_rank() == 0 else 0
    for _ in range(4):
        x, y = run.mixture.draw(run.learner.sample(mine))
        loss = F.cross_entropy(run.wrapped(x), y, reduction="sum") * 2 / 12
        loss.backward()
        report = run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return report.reward_mean


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_process_without_examples(wrapper):
    first, second = run(2, one_has_no_examples, wrapper)
    assert first == second


def the_sum_stays():
    run = Run(Options(Convolutional, "ddp")).train(2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            run.learner.policy.scores += torch.tensor([1.0, -1.0, 0.0])
    with pytest.raises(UsageError, match="not at one"):
        run.train(1)
    return True


def test_policies_are_compared_as_a_whole():
    assert run(2, the_sum_stays) == [True, True]


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.rarely, self.used = nn.Linear(3, 3), nn.Linear(3, 3), False

    def forward(self, x):
        return self.always(x) + (self.rarely(x) if self.used else 0)


def a_layer_that_one_uses():
    """A kind of step that one process sees for the first time must be verified by all."""
    torch.manual_seed(0)
    model = Sometimes()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    learner = inloop.InLoop(wrapped, inloop.MixturePolicy(2), update=inloop.Reinforce(accumulate=1))
    for step in range(6):
        model.used = step == 4 and dist.get_rank() == 1
        learner.sample(4)
        wrapped(torch.randn(4, 3)).square().mean().backward()
        learner.step(1.0)
        model.zero_grad()
    return learner.policy.scores.tolist()


def test_kinds_of_steps_that_only_one_process_sees():
    first, second = run(2, a_layer_that_one_uses, group_timeout=20)
    assert first == second
