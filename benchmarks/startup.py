"""Measures the time from the command to the first step, beside peers; see README.md here."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.elasticity.startup import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
