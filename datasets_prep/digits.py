#!/usr/bin/env python3
"""Write scikit-learn's handwritten digits (1,797 images of 8 x 8) as training and test arrays.

    python datasets_prep/digits.py --out /data/digits [--sample 200]

The result is OUT/train.npz and OUT/test.npz, each with ``images`` (N, 1, 8, 8; float32 in 0..1)
and ``labels`` (N; int64). The data ships inside scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

TEST_SHARE = 5  # every fifth image is for testing


def prepare(out: Path, sample: int | None = None) -> tuple[int, int]:
    """Write the arrays; returns the numbers of training and test images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)[:sample]
    labels = labels.astype(np.int64)[:sample]
    test = np.arange(len(labels)) % TEST_SHARE == 0
    out.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", ~test), ("test", test)):
        temporary = out / f".{name}.npz.part"
        with temporary.open("wb") as file:
            np.savez(file, images=images[chosen], labels=labels[chosen])
        temporary.replace(out / f"{name}.npz")
    return int((~test).sum()), int(test.sum())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--sample", type=int, help="use the first N images only")
    arguments = parser.parse_args()
    if arguments.sample is not None and arguments.sample < TEST_SHARE:
        parser.error(f"--sample must be {TEST_SHARE} or more")
    try:
        train, test = prepare(arguments.out, arguments.sample)
    except OSError as error:
        print(f"error: cannot write to {arguments.out}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {train} training and {test} test images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
