"""The scaling controller, in virtual time or on real jobs; see README.md here.

Run it: ``python benchmarks/controller.py`` writes results/controller.json. With ``--virtual`` real
jobs train on virtual hosts: ``--virtual --out benchmarks/results/controller_virtual.json``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from hvd_elastic.bench.controller import measure, table
from hvd_elastic.bench.figures import conditions, write_result
from hvd_elastic.bench.scaling.results import measure_virtual, show_virtual
from hvd_elastic.bench.scaling.workloads import CHANGES, FORECASTS, WORKLOADS
from hvd_elastic.errors import HvdElasticError

RESULT = Path(__file__).parent / "results" / "controller.json"
NOTE = "Virtual time: only how long a decision takes depends on this machine."


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--virtual", action="store_true", help="real jobs on virtual hosts (root)")
    for option, valid, what in (
        ("--workloads", WORKLOADS, "steady state"),
        ("--changes", CHANGES, "changes in mid-run"),
        ("--forecasts", FORECASTS, "what 2 hosts foretell of 4 and 8"),
    ):
        names = ",".join(valid)
        told = f"{what}, with --virtual: of {names} (default: all; an empty text: none)"
        parser.add_argument(option, default=names, metavar="NAMES", help=told)
    told = "write the figures to this JSON file; with --virtual, what it holds of other cases stays"
    parser.add_argument("--out", type=Path, help=told)
    arguments = parser.parse_args()
    if not arguments.virtual:
        load_before = os.getloadavg()
        found = measure(_say)
        taken = conditions("the simulator", NOTE, load_before)
        write_result(arguments.out or RESULT, "controller", taken, found)
        print(table(found))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = (arguments.workloads, arguments.changes, arguments.forecasts)
    try:
        found = measure_virtual(
            *([n for n in text.split(",") if n] for text in names), _say, arguments.out
        )
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(show_virtual(found))
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
