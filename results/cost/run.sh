#!/bin/sh
# Measures everything of this folder, and goes on where it was interrupted. Nothing else should run meanwhile.
# The peers are optional: pip install --no-deps higher torchopt opacus backpack-for-pytorch
set -e
cd "$(dirname "$0")/../.."
ours=gar,gar-interleaved,gar-part,gar-trail,gar-half,gar-recompute
bench() { inloop bench --out results/cost/bench.json "$@"; }
bench --models mlp --repeats 10
bench --models wrn-16-4 --modes $ours,metagradient,jvp --repeats 10
bench --models gpt-6,vit-tiny --modes $ours,vmap,opacus,jvp,backpack,metagradient --repeats 8
bench --models wrn-28-10 --modes $ours,jvp --repeats 4
bench --models wrn-16-4-gn --modes $ours,vmap,opacus,jvp,backpack,metagradient --repeats 4
bench --models wrn-28-10 --modes metagradient --repeats 2
bench --models wrn-28-10-gn --modes gar,gar-recompute,vmap,opacus,jvp --repeats 2
bench --models wrn-16-4,vit-tiny,gpt-6 --modes metagradient-unrolled,higher,torchopt --repeats 2
bench --models gpt-6+bf16,vit-tiny+bf16,wrn-16-4+bf16 --modes gar,gar-interleaved --repeats 6
MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_MMAP_THRESHOLD_=8000000000 \
    inloop bench --out results/cost/untrimmed.json --models gpt-6 --modes gar,gar-interleaved --repeats 8
bench --models mlp --modes gar --figure results/cost/bench.svg >/dev/null
python -m benchmarks.overhead --out results/cost/overhead.json  # with --code ad9eb04=FOLDER: a checkout of that commit
python -m benchmarks.autocast_error
python -m benchmarks.scaling --repeats 4
python -m benchmarks.half_error
python -m benchmarks.checkpointing --repeats 4
python -m benchmarks.plan
python -m benchmarks.first_step
python -m benchmarks.optimizer_cost
# needs CIFAR-10 (INLOOP_DATA) and a folder with .txt files: python -m benchmarks.layer_subsets TEXT
python results/cost/table.py
