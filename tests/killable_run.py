"""A training run that saves every few steps and prints what it ended with; the same command continues it."""

import hashlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import inloop
from inloop.checkpoints import Checkpoints

NUM_STEPS = 240


class Squares(Dataset):
    """A dataset that workers must index, with random labels if it is bad."""

    def __init__(self, bad):
        self.x = torch.randn(50, 4, generator=torch.Generator().manual_seed(bad))
        self.y = torch.randint(2, (50,)) if bad else (self.x.sum(dim=1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def main(folder, num_workers):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters())
    mixture = inloop.Mixture([Squares(0), Squares(1), Squares(0)], selection="passes")
    learner = inloop.InLoop(model, inloop.MixturePolicy(3), update=inloop.Reinforce(accumulate=2))
    loader = mixture.loader(learner, 8, num_workers=num_workers, num_batches=NUM_STEPS)
    parts = {"model": model, "optimizer": optimizer, "learner": learner, "loader": loader}
    checkpoints = Checkpoints(folder, keep=2)
    if (found := checkpoints.load()) is not None:
        for name, part in parts.items():
            part.load_state_dict(found[1][name])
        torch.set_rng_state(found[1]["torch"])
    for _, (x, y) in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        if learner.num_steps % 3 == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            checkpoints.save(learner.num_steps, state | {"torch": torch.get_rng_state()})
            (folder / "progress").write_text(str(learner.num_steps))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    sys.stdout.write(f"{digest} {learner.policy.scores.tolist()} {mixture.drawn_K.tolist()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
