#!/bin/bash
# Trains ResNet-50 on ImageNet, or pictures in its layout, with N processes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/recipe.sh"

usage() {
    cat <<END
Usage: $0 N [--framework torch|tensorflow] [OPTIONS OF hvd-elastic run] -- --data FOLDER [RECIPE]
       $0 --resume RUN

Trains ResNet-50 by the published large-batch recipe: SGD with warm-up, cosine decay and label
smoothing, or LARS. Log, metrics, checkpoints and the best model are in the folder of the run.

Examples:
  $0 8 --hostfile hosts --run-id resnet -- --data /data/imagenet
  $0 8 --hostfile hosts --min-np 4 --max-np 16 -- --data /data/imagenet --precision bfloat16
  $0 32 --hostfile hosts -- --data /data/imagenet --batch-size 8192
  $0 8 --hostfile hosts -- --data /data/imagenet --max-batch-size 8192    (the batch adapts)
  $0 8 --framework tensorflow --hostfile hosts -- --data /data/imagenet
  $0 --resume resnet

All options of the recipe: python scripts/examples/imagenet.py --help
END
}

case ${1:-} in
    -h | --help) usage; exit ;;
    --resume) [ $# -eq 2 ] || fail "--resume takes the id of a run, and nothing else"
        python=${PYTHON:-$root/.venv/bin/python}
        [ -x "$python" ] || python=python3
        exec "$python" -m hvd_elastic.cli.app run --resume "$2" ;;
esac
is_number "${1:-}" || fail "N, the number of workers, comes first: a whole number, 1 or more"
number=$1
shift
split_words "$@"
run_words=(--np "$number" "${run_words[@]}")
run_recipe
