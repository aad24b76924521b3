#!/usr/bin/env python3
"""Write 1,797 handwritten digits (images of 8 x 8) as training and test arrays.

    python datasets_prep/digits.py --out /data/digits [--sample 200]

The result is OUT/train.npz and OUT/test.npz, each with ``images`` (N, 1, 8, 8; float32 in 0..1)
and ``labels`` (N; int64). The data comes with hvd_elastic: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvd_elastic.bench.digits_data import TEST_SHARE, write_digits


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--sample", type=int, help="use the first N images only")
    arguments = parser.parse_args()
    if arguments.sample is not None and arguments.sample < TEST_SHARE:
        parser.error(f"--sample must be {TEST_SHARE} or more")
    try:
        train, test = write_digits(arguments.out, arguments.sample)
    except OSError as error:
        print(f"error: cannot write to {arguments.out}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {train} training and {test} test images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
