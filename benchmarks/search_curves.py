"""Records learning curves for ``search.py``: 64 small trainings at two batch sizes.

A convolutional network learns the handwritten digits that this package has with it: every other
image trains, the others validate. Eight learning rates and eight widths, each with the batch that
was tuned for and with one four times as large, whose learning rate follows AdaScale. A curve is the
validation accuracy against useful examples.

Run it: ``python benchmarks/search_curves.py benchmarks/search_curves.json``, 10 minutes of
one core. Seed 0.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from hvd_elastic.bench.digits_data import write_digits
from hvd_elastic.model.lr_rules import adascale_gain
from hvd_elastic.model.noise_scale import NoiseTracker

RATES = tuple(round(float(rate), 5) for rate in np.geomspace(1e-3, 1.0, 8))
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24)
BATCHES = (32, 128)
"""The first is the batch that was tuned for."""
EXAMPLES = 36_450
"""Useful examples of a whole training: some 40 epochs."""
POINTS = 40
SEED = 0
_PASS = 16
"""Examples of a pass; the gradient noise shows between the passes of a step."""
_SAMPLED = 4
"""The noise is measured in one of so many steps."""


def record_curve(rate: float, width: int, batch: int) -> dict[str, Any]:
    """Train once; return the curve and the gradient noise scale along it."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    images, labels = (torch.from_numpy(each) for each in _digits())
    train, valid = slice(0, None, 2), slice(1, None, 2)
    model = nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    noise = NoiseTracker(1, BATCHES[0], len(images[train]))
    scale = batch / BATCHES[0]
    found: dict[str, Any] = {"examples": [], "accuracy": [], "noise": []}
    useful, gain = 0.0, 1.0
    wanted = iter(np.geomspace(EXAMPLES / 81, EXAMPLES, POINTS))
    following = next(wanted)
    for number, chosen in enumerate(_batches(rng, len(images[train]), batch)):
        inputs, targets = images[train][chosen], labels[train][chosen]
        optimizer.zero_grad()
        if number % _SAMPLED == 0:
            local = 0.0
            passes = batch // _PASS
            before = torch.zeros(())
            for part, wished in zip(inputs.split(_PASS), targets.split(_PASS), strict=True):
                (F.cross_entropy(model(part), wished) / passes).backward()
                now = _gradient(model)
                local += float((now - before).square().sum()) * passes
                before = now
            total = float(before.square().sum())
            noise.add_norms([local], [total], batch, passes, number)
            gain = adascale_gain(scale, 1.0, _known(noise) / BATCHES[0])
        else:
            F.cross_entropy(model(inputs), targets).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate * gain
        optimizer.step()
        useful += gain * BATCHES[0]
        if useful < following:
            continue
        with torch.no_grad():
            right = (model(images[valid]).argmax(1) == labels[valid]).float().mean()
        found["examples"].append(round(useful))
        found["accuracy"].append(round(float(right), 4))
        found["noise"].append(float(f"{_known(noise):.3g}"))
        while following <= useful:
            following = next(wanted, np.inf)
        if following == np.inf:
            return {"rate": rate, "width": width, "batch": batch, **found}
    raise AssertionError("batches do not end")


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all images and their labels."""
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder))
        parts = [np.load(Path(folder) / f"{name}.npz") for name in ("train", "test")]
        images, labels = (np.concatenate([p[key] for p in parts]) for key in ("images", "labels"))
    return images, labels


def _batches(rng: np.random.Generator, examples: int, batch: int) -> Iterator[np.ndarray]:
    while True:
        order = rng.permutation(examples)
        for begin in range(0, examples - batch + 1, batch):
            yield order[begin : begin + batch]


def _known(noise: NoiseTracker) -> float:
    """Return the noise scale [examples], at most so much that JSON can hold it."""
    return min(noise.noise_scale(), 1e6)


def _gradient(model: Any) -> Any:
    import torch

    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main() -> int:
    """Record all curves; return the exit status."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--few", type=int, default=None, help="record only so many of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    curves: list[dict[str, Any]] = []
    for width in WIDTHS:
        for rate in RATES:
            for batch in BATCHES:
                if options.few is not None and len(curves) >= options.few:
                    break
                curves.append(record_curve(rate, width, batch))
                print(
                    f"{len(curves)}: rate {rate}, width {width}, batch {batch}: "
                    f"{curves[-1]['accuracy'][-1]}, {time.process_time() - began:.0f} s",
                    file=sys.stderr,
                )
    content: dict[str, Any] = {"seed": SEED, "examples": EXAMPLES, "batches": BATCHES}
    content["processor_s"] = round(time.process_time() - began)
    lines = ",\n".join(json.dumps(curve, separators=(",", ":")) for curve in curves)
    head = json.dumps(content)[:-1]
    options.out.write_text(f'{head}, "curves": [\n{lines}\n]}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
