"""Measures the estimates of an adaptive batch, and its benefit; see README.md here."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.adaptive.measure import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
