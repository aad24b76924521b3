#!/bin/sh
# Measures all that needs a GPU, in ten minutes, on a machine that has PyTorch for CUDA, nvcc and a
# compiler, but no network. First collect what it lacks, for its Python, where there is a network:
#   benchmarks/gpu_session.sh collect [3.12]
# then bring the checkout there, with the folder .wheels/, which git ignores, and run there
#   benchmarks/gpu_session.sh
# Results: benchmarks/results/gpu*.json, also in the folder $OUT if that is set.
set -eu
cd "$(dirname "$0")/.."
SESSION_S=${SESSION_S:-600}
ENDS=$(($(date +%s) + SESSION_S))
ENVIRONMENT=.venv-gpu
WHEELS=$PWD/.wheels
RESULTS=benchmarks/results

collect() {
    mkdir -p "$WHEELS"
    # What hvd_elastic and the build of Horovod need: 62 MiB, half of which is CMake.
    python3 - "$WHEELS" <<'END'
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, ".")
from hvd_elastic.install.prerequisites import BUILD_REQUIREMENTS, RUN_REQUIREMENTS, pip_arguments

folder = Path(sys.argv[1])
project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
(folder / "dependencies.txt").write_text("\n".join(project["dependencies"]), encoding="utf-8")
pip_arguments((*RUN_REQUIREMENTS, *BUILD_REQUIREMENTS), folder)  # writes requirements.txt
END
    set -- --dest "$WHEELS" --python-version "$1" --only-binary :all: \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64
    python3 -m pip download "$@" --requirement "$WHEELS/dependencies.txt" cmake
    python3 -m pip download "$@" --no-deps --requirement "$WHEELS/requirements.txt"
    python3 -m pip download --dest "$WHEELS" --no-deps --no-binary horovod horovod==0.28.1
    du -sh "$WHEELS"
}

# step SECONDS COMMAND...: at most so long, and not past the end; a failure does not end the session
step() {
    limit_s=$1
    shift
    left_s=$((ENDS - $(date +%s)))
    if [ "$left_s" -lt 20 ]; then
        echo "left out, since the time is over: $*"
        return 1
    fi
    [ "$limit_s" -le "$left_s" ] || limit_s=$left_s
    echo "== $(date +%T) $*"
    timeout --kill-after 10 "$limit_s" "$@" || { echo "failed with status $?: $*"; return 1; }
}

install() {
    python3 -m venv --system-site-packages "$ENVIRONMENT"
    PATH=$PWD/$ENVIRONMENT/bin:$PATH
    PIP_NO_INDEX=1 PIP_FIND_LINKS=$WHEELS
    XDG_CACHE_HOME=$PWD/$ENVIRONMENT/cache # the kept wheel stays out of the user's folder
    export PATH PIP_NO_INDEX PIP_FIND_LINKS XDG_CACHE_HOME
    step 150 python -m pip install --quiet --no-deps --requirement "$WHEELS/requirements.txt"
    step 150 python -m pip install --quiet cmake
    step 150 python -m pip install --quiet --no-build-isolation --editable .
    step 300 hvd-elastic build-horovod --without-tensorflow
    hvd-elastic doctor || true
}

measure() {
    failed=0
    touch "$ENVIRONMENT/began"
    gpu="python benchmarks/gpu.py --rounds"
    step 90 $gpu 2 --parts faults --out "$RESULTS/gpu.json" || failed=1
    step 90 $gpu 1 --parts template --out "$RESULTS/gpu_template.json" || failed=1
    step 600 $gpu 3 --parts overhead --out "$RESULTS/gpu_overhead.json" || failed=1
    if [ -n "${OUT:-}" ]; then
        find "$RESULTS" -name "gpu*.json" -newer "$ENVIRONMENT/began" -exec cp {} "$OUT" ";"
    fi
    return "$failed"
}

case ${1:-} in
collect) collect "${2:-3.12}" ;;
"")
    install
    measure
    ;;
*)
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
