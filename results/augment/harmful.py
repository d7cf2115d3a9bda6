"""Does a learned policy drop harmful operations, and keep the others? On the digits, 5 seeds for each way to learn.

    python results/augment/harmful.py       writes harmful.json beside it, seed by seed; interrupted, it continues

Four operations: *identity*; *shift_one*, by one pixel left or right (benign: the crop does as much); *erase*, which leaves a black
image; *flip_ud*, which turns a 6 into something like a 9.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from inloop.augment import make_space, register_operation
from inloop_lab.augmentation.experiment import AugmentExperiment
from inloop_lab.augmentation.settings import with_augment_defaults
from inloop_lab.data.digits import load_digits
from inloop_lab.runs.folder import write_atomically
from inloop_lab.runs.seed import train_to_end

HARMFUL, BENIGN = ("erase", "flip_ud"), ("identity", "shift_one")
SEEDS = 5
# The paper's way is: every second step without operations, one update of the policy for each rewarded step, all layers, from the start.
VARIANTS = {
    "paper": {},
    "centred rewards": {"normalisation": "center"},
    "model's learning rate 0.02": {"learning_rate": 0.02},
    "centred rewards, model's learning rate 0.02": {"normalisation": "center", "learning_rate": 0.02},
    "10 steps an update, twice as long": {"accumulate": 10, "epochs": 160},
    "batch 500, 4 steps an update": {"batch": 500, "epochs": 160, "accumulate": 4},
    "no crop": {"padding": 0},
    "no plain steps": {"interleave": False},
    "held-out reference": {"reference": "heldout"},
    "batch 125": {"batch": 125, "epochs": 40},
    "batch 500": {"batch": 500, "epochs": 160},
    "start after 20 epochs": {"start": 20},
    "last layer only": {"layers": "linear"},
}


def shift_one(images: Tensor, sign_N: Tensor) -> Tensor:
    return torch.where((sign_N > 0).view(-1, 1, 1, 1), images.roll(1, 3), images.roll(-1, 3))


def main() -> None:
    register_operation("erase", lambda images, magnitude_N: torch.zeros_like(images))
    register_operation("shift_one", shift_one, magnitudes=(1.0, 1.0), signed=True)
    space = make_space([*BENIGN, *HARMFUL])
    path, data = Path(__file__).with_name("harmful.json"), load_digits()
    results = json.loads(path.read_text())["results"] if path.exists() else []
    for variant, options in VARIANTS.items():
        settings = with_augment_defaults("digits", **({"epochs": 80} | options))
        for seed in range(SEEDS):
            if any(result["variant"] == variant and result["seed"] == seed for result in results):
                continue
            result = train_to_end(lambda s=settings, seed=seed: AugmentExperiment(s, data, seed, space))
            last = result["epochs"][-1]
            keep = dict(zip(result["operations"], last["keep"], strict=True))
            results.append(
                {
                    "variant": variant,
                    "seed": seed,
                    "keep": keep,
                    "number": last["number"],
                    "test_accuracy": result["test_accuracy"],
                    "dropped": max(keep[name] for name in HARMFUL) <= 0.1,
                    "ranked": max(keep[name] for name in HARMFUL) < min(keep[name] for name in BENIGN),
                }
            )
            print(variant, seed, keep, file=sys.stderr, flush=True)
            text = json.dumps({"options": VARIANTS, "results": results}, indent=1) + "\n"
            write_atomically(path, lambda file, text=text: file.write(text.encode()))


if __name__ == "__main__":
    main()
