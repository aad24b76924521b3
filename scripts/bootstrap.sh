#!/bin/sh
# The one thing setup_env.py cannot do for itself: make sure that there is a Python to run it.
# Usage: bootstrap.sh PYTHON
set -eu

python=$1

if command -v "$python" >/dev/null 2>&1; then
    exit 0
fi
if [ "$python" = python3 ] && command -v apt-get >/dev/null 2>&1; then
    install="apt-get install -y --no-install-recommends python3 python3-venv python3-dev"
    if [ "$(id -u)" = 0 ]; then
        echo "This machine has no python3; installing as root:"
        echo "  $install"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        $install >/dev/null
        exit 0
    fi
    echo "error: there is no program $python; run: sudo $install" >&2
    exit 1
fi
echo "error: there is no program $python; install Python 3.10 or later, or name one: make PYTHON=/path/to/python" >&2
exit 1
