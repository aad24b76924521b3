"""Faults of every kind while a model trains, from a checkout; see README.md here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvd_elastic.bench.soak import main

if __name__ == "__main__":
    sys.exit(main())
