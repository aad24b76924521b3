"""Options and marks of the workload's scripts, whatever framework they use."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

COMMIT_BLOCK = 40


def parse_arguments() -> argparse.Namespace:
    """Parse the options of every script, and sleep for ``--slow-start``, as slow imports would."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="folder of digits.py")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--step-time", type=float, default=0.015, help="sleep in each step [s]")
    parser.add_argument("--slow-start", type=float, default=0.0, help="sleep before training [s]")
    parser.add_argument("--newcomers-only", type=Path, help="sleep only when this file exists")
    parser.add_argument("--model", choices=("digits", "tiny"), default="digits")
    parser.add_argument("--frozen-mb", type=float, default=0.0, help="frozen parameters [MB]")
    parser.add_argument("--commit-blocks", action="store_true", help="commit in every other block")
    parser.add_argument("--min-np", type=int, default=1)
    parser.add_argument("--snapshot", type=Path, help="file for launchers that restart")
    args = parser.parse_args()
    if args.newcomers_only is None or args.newcomers_only.exists():
        time.sleep(args.slow_start)
    return args


def commits(args: argparse.Namespace, step: int) -> bool:
    """Return whether this step ends with a commit; blocks with and without commits alternate.

    Writes a note to the marks where a block begins, so that its steps can be recognised.
    """
    if not args.commit_blocks:
        return True
    committing = step // COMMIT_BLOCK % 2 == 1
    if step % COMMIT_BLOCK == 0:
        mark("note", text="commit" if committing else "no commit")
    return committing


def mark(kind: str, **fields: Any) -> None:
    """Append a line to the marks of this process, if it has any."""
    path = os.environ.get("HVD_ELASTIC_BENCH_MARKS")
    if path:
        line = json.dumps({"mark": kind, "mono": time.monotonic(), **fields})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def mark_step(size: int) -> None:
    """Mark the end of a step; see :class:`benchmarks.testbed.marks.Step`."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = round(used.ru_utime + used.ru_stime, 6)
    mark("step", size=size, cpu=cpu, switches=used.ru_nvcsw + used.ru_nivcsw)
