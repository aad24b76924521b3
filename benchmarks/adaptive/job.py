"""Runs one job: ``python -m benchmarks.adaptive.job NAME OUT [ARGUMENT]...``.

On one rank or under a launcher; rank 0 writes the rows that the job of that name returns to OUT.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.adaptive import (
    changes_job,
    digits_job,
    distorted_job,
    examples_job,
    noise_job,
    overhead_job,
    rule_job,
    times_job,
)
from hvd_elastic.torch import context

JOBS: dict[str, Callable[..., Sequence[Mapping[str, Any]]]] = {
    "changes": changes_job.rows,
    "digits": digits_job.rows,
    "distorted": distorted_job.rows,
    "examples": examples_job.rows,
    "noise": noise_job.rows,
    "overhead": overhead_job.rows,
    "rules": rule_job.rows,
    "times": times_job.rows,
}


def main() -> None:
    """Run the job that the command line names."""
    name, out, *arguments = sys.argv[1:]
    found = JOBS[name](*arguments)
    if context.current().engine.rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
