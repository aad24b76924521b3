"""The command line of ``benchmarks/elasticity.py``."""

from __future__ import annotations

import argparse

from benchmarks.elasticity.measure import measure_elasticity, parse_peers
from benchmarks.elasticity.rows import ROWS, parse_rows
from benchmarks.testbed.command import add_output_options, at_least_one, deliver, end_with, progress
from benchmarks.testbed.launchers import PEERS
from hvd_elastic.errors import UsageError

__all__ = ["main"]

_ABOUT = """What joins, leaves and failures cost: ours beside Horovod, torchrun and torchft.

The same workload on the same virtual hosts, seen by one clock. Needs root. Peers that are not
installed are put into an environment in your cache folder; one that cannot be is left out.

Example: python benchmarks/elasticity.py --rows 1,3,4 --repetitions 5 --out elasticity.json
"""


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="elasticity.py",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    told = "rows of the table, as in 1,3,6-8 (default: all)"
    parser.add_argument("--rows", metavar="LIST", help=told)
    known = ",".join(PEERS)
    parser.add_argument("--peers", metavar="LIST", default=known, help=f"of {known} (default: all)")
    told = "measured rounds (3)"
    parser.add_argument("--repetitions", "-n", type=at_least_one, default=3, help=told)
    told = "patience with a job that does not go on (90)"
    parser.add_argument("--limit", type=float, default=90.0, metavar="SECONDS", help=told)
    told = "training with a random kill every 10 s, 0 for none"
    parser.add_argument("--etr", type=float, default=0.0, metavar="MINUTES", help=told)
    parser.add_argument("--seed", type=int, default=0, help="of the random kills")
    told = "look into our own stall in rows 1, 3 and 4 as well"
    parser.add_argument("--breakdown", action="store_true", help=told)
    add_output_options(parser)
    options = parser.parse_args(arguments)

    def measure() -> None:
        if not 0 < options.limit < float("inf"):
            raise UsageError(f"--limit takes a number above 0, not '{options.limit}'")
        if not 0 <= options.etr < float("inf"):
            raise UsageError(f"--etr takes a number of 0 or more, not '{options.etr}'")
        rows = ROWS if options.rows is None else parse_rows(options.rows)
        launchers = parse_peers(options.peers)
        with progress(options) as say:
            result = measure_elasticity(
                rows,
                launchers,
                options.repetitions,
                say,
                limit_s=options.limit,
                etr_minutes=options.etr,
                breakdown=options.breakdown,
                seed=options.seed,
            )
        deliver(result, options)

    return end_with(measure)
