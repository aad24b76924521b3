"""Runs one job: ``python -m benchmarks.adaptive.jobs NAME OUT [ARGUMENT]...``.

It runs on one rank or under a launcher; rank 0 writes the rows that the module NAME returns to OUT.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from hvd_elastic.worker import context


def main() -> None:
    """Run the job that the command line names."""
    name, out, *arguments = sys.argv[1:]
    found = importlib.import_module(f"benchmarks.adaptive.jobs.{name}").rows(*arguments)
    if context.current().worker.rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
