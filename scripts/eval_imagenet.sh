#!/bin/bash
# Evaluates weights of the recipe on the validation pictures: top-1 and top-5 accuracy.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/recipe.sh"

usage() {
    cat <<END
Usage: $0 RUN|FILE [--framework torch|tensorflow] [OPTIONS OF hvd-elastic run] -- --data FOLDER [RECIPE]

Evaluates the newest checkpoint of a run, or a file such as best.pt, on FOLDER/val, all processes
together: top-1 and top-5 accuracy and the mean loss, each picture once. Options of the recipe that
make the model (--depth, --width, --image-size) are those of the training.

Examples:
  $0 resnet --hostfile hosts -- --data /data/imagenet
  $0 ~/.hvd_elastic/runs/resnet/saved/best.pt --np 2 -- --data /data/imagenet
END
}

case ${1:-} in
    -h | --help) usage; exit ;;
    '' | -*) fail "the run, or a file of weights, comes first" ;;
esac
weights=$1
[ ! -f "$weights" ] || weights=$(cd "$(dirname "$weights")" && pwd)/$(basename "$weights")
shift
split_words "$@"
run_words=(--checkpoint-every 0 "${run_words[@]}")
recipe_words+=(--evaluate "$weights")
run_recipe
