"""The command line of ``benchmarks/cluster.py``."""

from __future__ import annotations

import argparse

from benchmarks.cluster.commands import measure_calls
from benchmarks.cluster.copying import ROWS, measure_copies
from benchmarks.cluster.faults import FAULTS, measure_faults
from benchmarks.cluster.many import measure_many
from benchmarks.testbed.command import Say, names, numbers, run_benchmark
from benchmarks.testbed.figures import Result


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
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
    known, every = ", ".join(FAULTS), ",".join(FAULTS)
    told = f"what happens when something is wrong, no copies; rows of {known}"
    parser.add_argument("--faults", nargs="?", const=every, metavar="ROWS", help=told)
    told = "how commands grow with the hosts (32,64,128,256), and memory here; no copies"
    counts = [32, 64, 128, 256]
    parser.add_argument(
        "--many", nargs="?", type=numbers, const=counts, metavar="COUNTS", help=told
    )
    return run_benchmark(parser, _measure)


def _measure(options: argparse.Namespace, say: Say) -> Result:
    if options.calls is not None:
        return measure_calls(options.calls, options.rounds, say)
    if options.faults is not None:
        return measure_faults(names(options.faults), not options.no_peers, say)
    if options.many is not None:
        return measure_many(options.many, options.size * 1_000_000, say)
    return measure_copies(options, say)
