"""Write the dataset of the demo: 1,797 images of handwritten digits of 8 x 8 pixels.

They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak
(UCI Machine Learning Repository, CC BY 4.0), which scikit-learn ships too, in ``digits.npz`` here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvd_elastic.replaced_files import replacing

TEST_SHARE = 5
"""One of so many images is for testing."""
_DIGITS = Path(__file__).with_name("digits.npz")


def write_digits(folder: Path, sample: int | None = None) -> tuple[int, int]:
    """Write the dataset as ``train.npz`` and ``test.npz``.

    Each has ``images``, shape (N, 1, 8, 8), float32 from 0 to 1, and ``labels``, shape (N,), int64.

    Args:
        folder: folder to write to; it is created if it does not exist.
        sample: number of images to use; None: all.

    Returns:
        The numbers of training and of test images.
    """
    with np.load(_DIGITS) as arrays:
        images = (arrays["images"][:sample, None] / 16.0).astype(np.float32)
        labels = arrays["labels"][:sample].astype(np.int64)
    test = np.arange(len(labels)) % TEST_SHARE == 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", ~test), ("test", test)):
        with replacing(folder / f"{name}.npz") as temporary, temporary.open("wb") as file:
            np.savez(file, images=images[chosen], labels=labels[chosen])
    return int((~test).sum()), int(test.sum())
