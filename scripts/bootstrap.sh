#!/bin/sh
# What setup_env.py cannot do for itself: make sure that there is a Python that can run it.
# Usage: bootstrap.sh PYTHON [TARGET…]   (targets: what make was asked for, named in its errors)
set -eu

python=$1
shift
again="make${*:+ $*} PYTHON"
# from pyproject.toml: requires-python = ">=3.10,<3.14"
range=$(sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.\([0-9]*\)"$/\1 \2/p' "$(dirname "$0")/../pyproject.toml")
oldest=${range% *} newest=$((${range#* } - 1))

# Prints how this Python does not fit; nothing if it does.
fault() {
    "$1" -c '
import sys
found = sys.version_info[0] * 1000 + sys.version_info[1]
if not 3000 + int(sys.argv[1]) <= found <= 3000 + int(sys.argv[2]):
    print("Python %d.%d" % sys.version_info[:2])
elif sys.maxsize < 2**32:
    print("a Python of 32 bits")
elif sys.base_prefix != "/usr":  # there the package manager brings what is missing
    try:
        import ensurepip, venv
    except ImportError:
        print("a Python without venv or pip")
' "$oldest" "$newest" 2>/dev/null || echo "no Python"
}

# Ends with an error, and the command that gets a Python that fits.
refuse() {
    if [ "$(getconf LONG_BIT 2>/dev/null)" = 32 ]; then
        echo "error: $1; all programs of this system are of 32 bits: use a machine, or a container, of 64 bits" >&2
        exit 1
    fi
    names=$(seq -f "python3.%g" "$newest" -1 "$oldest")
    for other in $names /usr/bin/python3; do
        if command -v "$other" >/dev/null 2>&1 && [ -z "$(fault "$other")" ]; then
            echo "error: $1; run: $again=$other" >&2
            exit 1
        fi
    done
    for name in $names; do
        if apt-cache show "$name-venv" 2>/dev/null | grep -q ^Package; then
            echo "error: $1; run: sudo apt-get install -y $name-venv $name-dev, then: $again=$name" >&2
            exit 1
        fi
    done
    echo "error: $1; with uv (https://docs.astral.sh/uv): uv python install 3.$newest, then: $again=\"\$(uv python find 3.$newest)\"" >&2
    exit 1
}

needs="hvd_elastic needs Python 3.$oldest to 3.$newest, 64 bits"
if command -v "$python" >/dev/null 2>&1; then
    why=$(fault "$python")
    [ -z "$why" ] || refuse "$python is $why, and $needs"
    exit 0
fi
if [ "$python" = python3 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    install="apt-get install -y --no-install-recommends python3 python3-venv python3-dev"
    echo "This machine has no python3; installing as root:"
    echo "  $install"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    $install >/dev/null
    why=$(fault "$python")
    [ -z "$why" ] || refuse "$python of this system is $why, and $needs"
    exit 0
fi
refuse "there is no program $python, and $needs"
