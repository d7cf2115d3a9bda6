"""Several processes train one model, save as they go, and continue after one of them has died.

torchrun --nproc-per-node=2 --max-restarts=3 examples/with_torchrun.py --out runs/t [--shard]
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import inloop
from inloop.datasets import digit_sources

BAD, GLOBAL_BATCH = 1, 128
WHOLE = StateDictOptions(full_state_dict=True)


def make_model(shard: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    if not shard:
        return DistributedDataParallel(model)
    for part in (model[1], model[3], model):
        fully_shard(part)
    return model


def join_others() -> None:
    """As init_process_group("gloo"); but a new attempt does not look for processes that are gone."""
    store, rank, world_size = next(rendezvous("env://"))
    attempt = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=attempt, rank=rank, world_size=world_size, timeout=timeout
    )


def main(out: str, steps: int = 200, shard: bool = False, die_at: int | None = None) -> None:
    join_others()
    first = dist.get_rank() == 0
    model = make_model(shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mixture = inloop.Mixture(digit_sources(5, BAD))
    policy = inloop.MixturePolicy(5)
    learner = inloop.InLoop(model, policy, update=inloop.Reinforce(accumulate=5))
    loader = mixture.loader(learner, GLOBAL_BATCH // dist.get_world_size(), num_batches=steps)
    checkpoints = inloop.Checkpoints(out)
    if (found := checkpoints.load()) is not None:
        step, state = found
        set_model_state_dict(model, state["model"], options=WHOLE)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=WHOLE)
        learner.load_state_dict(state["learner"])
        loader.load_state_dict(state["loader"])
        if first:
            print(
                f"continuing from step {step} with {dist.get_world_size()} processes", flush=True
            )

    for _, (x, y) in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        if learner.num_steps % 20 == 0:
            state = {
                "model": get_model_state_dict(model, options=WHOLE),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=WHOLE),
                "learner": learner.state_dict(),
                "loader": loader.state_dict(),
            }
            checkpoints.save(learner.num_steps, state)
            dist.barrier()  # nobody goes on before the file is there
        if learner.num_steps == die_at and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(1)  # to see what happens
    if first:
        print(
            f"shares of the sources: {policy.probabilities()}; source {BAD} has random labels",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--shard", action="store_true", help="fully_shard in place of DistributedDataParallel"
    )
    parser.add_argument(
        "--die-at",
        type=int,
        help="let the last process end without a word at this step, once begun anew never again",
    )
    options = parser.parse_args()
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        options.die_at = None
    main(**vars(options))
    # All is saved and printed. Without the interpreter's own end: gloo's threads may still want to
    # free a tensor then, and abort a process that has done its work (pytorch/pytorch#190489).
    os._exit(0)
