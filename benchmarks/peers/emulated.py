"""Emulated reading and training, for the scripts that ``benchmarks/input.py`` runs on hosts.

An example is a picture, and takes processor time to transform, or time to wait for. A step takes
the time of an emulated device. Blocks of steps with what is measured and with a loader that costs
nothing come in turn in one process, so that a disturbance of the machine meets both alike.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = (64, 64, 3)
"""Of a picture, 12 KB, unless ``--side`` crops it."""


def parser() -> argparse.ArgumentParser:
    """Return a parser of the options of every script."""
    made = argparse.ArgumentParser()
    made.add_argument("result", type=Path, help="file for the blocks")
    made.add_argument(
        "--transform-ms", type=float, default=0.0, help="processor time of an example"
    )
    made.add_argument("--wait-ms", type=float, default=0.0, help="wait for an example")
    made.add_argument("--noise", action="store_true", help="pictures that cannot be compressed")
    made.add_argument("--side", type=int, default=SHAPE[0], help="rows and columns of a picture")
    made.add_argument("--step-ms", type=float, default=80.0, help="device time of a step")
    made.add_argument("--batch", type=int, default=16, help="examples of a step")
    made.add_argument("--warm", type=int, default=6, help="first steps of a block, not timed")
    made.add_argument("--steps", type=int, default=14, help="further steps of a block")
    made.add_argument("--rounds", type=int, default=1, help="blocks of each kind")
    return made


def picture(args: argparse.Namespace, index: int) -> np.ndarray:
    """Return a picture, after the time that it takes."""
    time.sleep(args.wait_ms / 1000)
    end = time.thread_time() + args.transform_ms / 1000
    while time.thread_time() < end:
        pass
    shape = (args.side, args.side, SHAPE[2])
    if args.noise:
        return np.random.default_rng(index).integers(0, 256, shape, np.uint8)
    return np.full(shape, index % 256, np.uint8)


def examples(args: argparse.Namespace) -> int:
    """Return the number of examples of a block."""
    count: int = args.batch * (args.warm + args.steps)
    return count


def free_batches(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Yield the batches of a block from a loader that costs nothing."""
    batch = np.zeros((args.batch, *SHAPE), np.uint8)
    for _ in range(args.warm + args.steps):
        yield batch


def block(args: argparse.Namespace, kind: str, batches: Iterable[Any]) -> dict[str, Any]:
    """Take the steps of a block; return its kind, its time and the part that waited [s]."""
    began = ended = waited = 0.0
    asked = time.perf_counter()
    for number, _ in enumerate(batches, 1):
        waited += time.perf_counter() - asked
        time.sleep(args.step_ms / 1000)
        asked = ended = time.perf_counter()
        if number == args.warm:
            began, waited = ended, 0.0
    return {"kind": kind, "seconds": ended - began, "wait_s": waited}


def write(args: argparse.Namespace, blocks: list[dict[str, Any]]) -> None:
    """Write the blocks for the benchmark."""
    args.result.write_text(json.dumps(blocks), encoding="utf-8")
