"""What a learner adds to a step besides arithmetic: kernels, and the host's time.

python -m benchmarks.overhead [--names] [--time]      --names: also each kernel of a plain step and of one with a learner
"""

import argparse
import json

import torch

from inloop_lab.bench.overhead import MODELS, Loop, count_kernels, host_time, measure_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    for model in MODELS:
        for tells in (False, True):
            row = measure_kernels(model, tells)
            ratio = round(row["kernels"] / row["kernels_plain"], 2)
            print(json.dumps({"model": model, "told": tells, **row, "ratio": ratio}), flush=True)
        if options.names:
            for given in (None, {}):
                torch.manual_seed(0)
                print(json.dumps(count_kernels(Loop(*MODELS[model](), given))))
    if options.time:
        print(json.dumps(host_time()))


if __name__ == "__main__":
    main()
