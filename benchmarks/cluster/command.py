"""The command line of ``benchmarks/cluster.py``."""

from __future__ import annotations

import argparse

from benchmarks.cluster.calls import measure_calls
from benchmarks.cluster.copying import ROWS, measure_copies
from benchmarks.cluster.faults import FAULTS, measure_faults
from benchmarks.cluster.many import measure_many
from benchmarks.testbed.command import add_output_options, deliver, end_with, names, numbers
from benchmarks.testbed.command import progress as shown_progress
from benchmarks.testbed.figures import Result

__all__ = ["main"]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="cluster.py",
        description="Copies to many hosts beside peers; with --calls, --many or --faults commands "
        "on them instead.",
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="of " + ", ".join(ROWS))
    parser.add_argument("--rate", default="100mbit", help="of every link (default: 100mbit)")
    parser.add_argument("--size", type=int, default=128, help="of the data set in MB")
    parser.add_argument("--counts", type=numbers, default="2,4,8,16", help="hosts in the row scale")
    parser.add_argument("--hosts", type=int, default=8, help="hosts in the other rows")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--calls", type=int, metavar="N", help="commands on N hosts, no copies")
    parser.add_argument("--rounds", type=int, default=5, help="of --calls")
    parser.add_argument(
        "--faults", nargs="?", const=",".join(FAULTS), metavar="ROWS",
        help=f"what happens when something is wrong, no copies; rows of {', '.join(FAULTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--many", nargs="?", type=numbers, const=[32, 64, 128, 256], metavar="COUNTS",
        help="how commands grow with the hosts (32,64,128,256), and memory here; no copies",
    )  # fmt: skip
    add_output_options(parser)
    options = parser.parse_args()

    def measure() -> None:
        with shown_progress(options) as say:
            result: Result
            if options.calls is not None:
                result = measure_calls(options.calls, options.rounds, say)
            elif options.faults is not None:
                result = measure_faults(names(options.faults), not options.no_peers, say)
            elif options.many is not None:
                result = measure_many(options.many, options.size * 1_000_000, say)
            else:
                result = measure_copies(
                    names(options.rows),
                    rate=options.rate,
                    size=options.size * 1_000_000,
                    counts=options.counts,
                    hosts=options.hosts,
                    peers=not options.no_peers,
                    say=say,
                )
        deliver(result, options)

    return end_with(measure)
