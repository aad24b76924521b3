"""Reads with Ray Data, on all nodes of a Ray cluster; see ``emulated.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers import emulated

args = emulated.parser().parse_args()


def transform(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the picture of a row."""
    return {"picture": emulated.picture(args, row["id"])}


def batches() -> Iterator[Any]:
    """Yield the batches of a block."""
    count = emulated.examples(args)
    # As many blocks as batches: with Ray's own choice, 200 at least, a block has two rows.
    rows = ray.data.range(count, override_num_blocks=count // args.batch)
    yield from rows.map(transform).iter_batches(batch_size=args.batch, batch_format="numpy")


ray.init(log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": sys.path[0]}})
ray.data.DataContext.get_current().enable_progress_bars = False
found = []
for _ in range(args.rounds):
    found.append(emulated.block(args, "free", emulated.free_batches(args)))
    found.append(emulated.block(args, "read", batches()))
emulated.write(args, found)
