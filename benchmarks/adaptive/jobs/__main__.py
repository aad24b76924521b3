"""Runs one job: ``python -m benchmarks.adaptive.jobs NAME OUT [ARGUMENT]...``.

On one rank or under a launcher; rank 0 writes the rows that the job of that name returns to OUT.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.adaptive.jobs import (
    changes,
    digits,
    distorted,
    examples,
    noise,
    overhead,
    rules,
    times,
)
from hvd_elastic.training import context

JOBS: dict[str, Callable[..., Sequence[Mapping[str, Any]]]] = {
    "changes": changes.rows,
    "digits": digits.rows,
    "distorted": distorted.rows,
    "examples": examples.rows,
    "noise": noise.rows,
    "overhead": overhead.rows,
    "rules": rules.rows,
    "times": times.rows,
}


def main() -> None:
    """Run the job that the command line names."""
    name, out, *arguments = sys.argv[1:]
    found = JOBS[name](*arguments)
    if context.current().worker.communicator.rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
