#!/usr/bin/env bash
# The commands behind results/splits/*.json. Needs CIFAR-10 (found in INLOOP_DATA or downloaded). Interrupted, it continues.
# Usage: results/splits/run.sh [RUNS]   RUNS: a folder for the runs, default runs
set -euo pipefail
runs=${1:-runs}
here=$(dirname "$0")

run() {  # NAME ARGUMENTS...
  local name=$1
  shift
  [ -e "$here/$name.json" ] && return
  inloop run splits --data cifar10 "$@" --out "$runs/$name" --json > "$here/$name.json.new"
  mv "$here/$name.json.new" "$here/$name.json"
}

# Table 1, and the two baselines beside it
for network in fc-bn fc; do
  for reward in gar nslr none oracle; do
    run "$network-$reward" --network $network --reward $reward --seeds 10
  done
done
run cnn-bn-gar --network cnn-bn --reward gar --seeds 10

# What the paper does not have: labels that people got wrong, and images of noise
for noise in human images; do
  for reward in gar none oracle; do
    run "fc-bn-$reward-$noise" --network fc-bn --reward $reward --noise $noise --seeds 10
  done
done

# Other readings of CNN_BN: three seeds each, with all layers or only the linear one in the reward
for layers in all linear; do
  for reading in cnn-bn-stride2 cnn-bn-stride3; do
    run "reading-$reading-$layers" --network $reading --layers $layers --seeds 3
  done
done
run reading-cnn-bn-linear --network cnn-bn --layers linear --seeds 3

# The best of them with ten seeds
run cnn-bn-gar-linear --network cnn-bn --layers linear --seeds 10

# What matters: three seeds each
for batch in 100 250 500; do run "study-batch-$batch" --batch $batch --seeds 3; done
for sources in 5 20 50; do run "study-sources-$sources" --sources $sources --seeds 3; done
for reference in previous heldout; do run "study-reference-$reference" --reference $reference --seeds 3; done
run study-optimizer-adam --optimizer adam --seeds 3

# Two more readings, slow ones
run reading-cnn-bn-literal-all --network cnn-bn-literal --seeds 3
run reading-cnn-bn-maxpool-all --network cnn-bn-maxpool --seeds 3

# A variant of BatchNorm: statistics without gradient
for layers in all linear; do
  run "reading-cnn-bn-detached-$layers" --network cnn-bn-detached --layers $layers --seeds 3
done

for reward in nslr none oracle; do
  run "cnn-bn-$reward" --network cnn-bn --reward $reward --seeds 10
done

# Baselines that follow the loss
for network in fc-bn fc; do
  for reward in loss exp3; do
    run "$network-$reward" --network $network --reward $reward --seeds 10
  done
done

# The figures fc-bn.svg and fc.svg are copies of what this writes
inloop report "$runs"
