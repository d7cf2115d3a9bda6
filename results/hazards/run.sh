#!/usr/bin/env bash
# The commands behind results/hazards/*.json. Interrupted, it continues.
# Usage: results/hazards/run.sh [RUNS] [TEXT]   RUNS: a folder for the runs, default runs; TEXT: a folder with a .txt file for each source
set -euo pipefail
runs=${1:-runs}
text=${2:-}
here=$(dirname "$0")
python "$here/different.py" digits --seeds 5
python "$here/few_sources.py" digits --seeds 10
python "$here/few_sources.py" cifar10 --seeds 4
if [ -n "$text" ]; then python "$here/different.py" text "$text" --seeds 3; fi
for noise in none labels; do
  for batch in 8 32 128 250; do
    inloop run splits --data digits --noise "$noise" --batch "$batch" --seeds 5 --json \
      --out "$runs/hazards-$noise-batch-$batch" > "$here/batch-$batch-$noise.json"
  done
done
python "$here/batchnorm.py"
python "$here/table.py"
