"""Text that is larger than memory: the time and peak memory of tokenising it, and of drawing rows from it.

    python -m benchmarks.large_text [--gigabytes 10] [--out results/mixtures/large_text.json]

Two domains of documents of about 2 kB are generated in a temporary folder, which takes twice as much space. The peak of resident memory includes
torch and the pages of the tokens that the system holds for as long as it has nothing better to do with them.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import torch

from inloop.mixture import Mixture
from inloop_lab.mixtures.domains import load_domains
from inloop_lab.mixtures.settings import MixtureSettings

BATCHES, BATCH = 1000, 32


def generate(path: Path, num_bytes: float) -> None:
    """Documents of random words, a thousand of which repeat."""
    draw = random.Random(path.name)
    words = ["".join(draw.choices("abcdefghij", k=5)) for _ in range(1000)]
    block = "".join(json.dumps({"text": " ".join(draw.choices(words, k=350))}) + "\n" for _ in range(1000)).encode()
    with path.open("wb") as file:
        while file.tell() < num_bytes:
            file.write(block)


def peak_megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def measure(gigabytes: float, folder: Path) -> dict[str, float]:
    data = folder / "data"
    data.mkdir()
    for name in ("one", "two"):
        generate(data / f"{name}.jsonl", gigabytes / 2 * 1e9)
    began, before = time.perf_counter(), peak_megabytes()
    domains = load_domains(MixtureSettings(data=str(data)), folder / "tokens")
    tokenised, peak = time.perf_counter() - began, peak_megabytes()
    mixture = Mixture(dict(domains.training))
    began = time.perf_counter()
    for _ in range(BATCHES):
        mixture.draw(torch.randint(2, (BATCH,)))
    return {
        "gigabytes": gigabytes,
        "rows": sum(map(len, domains.training.values())),
        "peak_megabytes_before": before,
        "tokenise_seconds": round(tokenised, 1),
        "tokenise_peak_megabytes": peak,
        "milliseconds_a_batch": round(1e3 * (time.perf_counter() - began) / BATCHES, 2),
        "draw_peak_megabytes": peak_megabytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("results/mixtures/large_text.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.gigabytes, Path(folder))
    print(found)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
