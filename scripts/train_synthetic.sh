#!/bin/bash
# Measures how training on synthetic data scales from one to N processes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/recipe.sh"

usage() {
    cat <<END
Usage: $0 N [OPTIONS OF hvd-elastic bench synthetic]

Trains ResNet-50 on random data with 1, 2, 4, … and N processes, in one elastic run, and prints
images/s, efficiency, what limits it, and what other sizes would bring.

Examples:
  $0 8 --hostfile hosts
  $0 8 --hostfile hosts --framework tensorflow --batch-size 128 --precision bf16
  $0 8 --hostfile hosts --out scaling.html --out scaling.json
END
}

case ${1:-} in -h | --help) usage; exit ;; esac
is_number "${1:-}" || fail "N, the number of workers, comes first: a whole number, 1 or more"
number=$1
shift
sizes=
for ((size = 1; size < number; size *= 2)); do sizes+=$size,; done
find_python
exec "$python" -m hvd_elastic.cli.app bench synthetic --np "$sizes$number" "$@"
