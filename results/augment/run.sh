#!/usr/bin/env bash
# The commands behind results/augment/*.json. Needs CIFAR-10 (found in INLOOP_DATA or downloaded). Interrupted, it continues.
# Usage: results/augment/run.sh [RUNS] [SEEDS]   RUNS: a folder for the runs, default runs; SEEDS: default 10
# Each run uses one core (OMP_NUM_THREADS=1); two run at a time.
set -euo pipefail
runs=${1:-runs}
seeds=${2:-10}
here=$(dirname "$0")
export OMP_NUM_THREADS=1 here runs

common=(--data cifar10 --examples 4000 --batch 128 --network wrn-16-1-s2 --cutout 0 --epochs 50)

run() {  # NAME SEEDS ARGUMENTS...
  local name=$1 seeds=$2
  shift 2
  inloop run augment "$@" --seeds "$seeds" --out "$runs/augment-$name" --json > "$here/$name.json.new"
  mv "$here/$name.json.new" "$here/$name.json"
}
export -f run

commands() {
  # What was chosen, on 4,000 other training images, one seed each: RandAugment's N and M, and how OLA learns
  local held="--validation 4000"
  echo "validation-none 1 $held --augment none"
  echo "validation-ua-ra 1 $held --augment ua --space ra"
  for chosen in 1-14 2-7 2-14; do
    echo "validation-ra-ra-$chosen 1 $held --augment ra --space ra --ra-operations ${chosen%-*} --ra-strength ${chosen#*-}"
  done
  for m in 7 14; do echo "validation-ra-wl-1-$m 1 $held --augment ra --space wl --ra-operations 1 --ra-strength $m"; done
  echo "validation-ola-ra 1 $held --augment ola --space ra"
  echo "validation-ola-ra-heldout 1 $held --augment ola --space ra --reference heldout"
  echo "validation-ola-ra-slow 1 $held --augment ola --space ra --policy-learning-rate 0.02"
  echo "validation-ola-ra-no-plain 1 $held --augment ola --space ra --no-interleave"
  echo "validation-ola-ra-slow-no-plain 1 $held --augment ola --space ra --policy-learning-rate 0.02 --no-interleave"
  echo "validation-ola-ra-centred 1 $held --augment ola --space ra --normalisation center"
  # The comparison, on the test images; paired seeds
  for some in $(seq 2 2 "$seeds"); do
    echo "none $some --augment none"
    for space in ra wl; do
      echo "ua-$space $some --augment ua --space $space"
      echo "ta-$space $some --augment ta --space $space"
      echo "ola-$space $some --augment ola --space $space --no-interleave"
    done
    echo "ra-ra $some --augment ra --space ra --ra-operations 2 --ra-strength 7"
    echo "ra-wl $some --augment ra --space wl --ra-operations 1 --ra-strength 7"
    echo "ola-ra-paper $some --augment ola --space ra"
  done
}

commands | xargs -P 2 -L 1 bash -c 'run "$0" "$1" '"${common[*]}"' "${@:2}"'
