"""How long a data set's way to many hosts is, or a command's, beside peers; see README.md here.

Run it: ``python benchmarks/cluster.py --out benchmarks/results/cluster.json``; without copies, with
``--calls 128``, ``--many`` or ``--faults``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from hvd_elastic.bench.cluster.calls import measure_calls, show_calls, write_calls
from hvd_elastic.bench.cluster.copying import ROWS, measure_copies, show_copies, write_copies
from hvd_elastic.bench.cluster.faults import FAULTS, measure_faults, show_faults, write_faults
from hvd_elastic.bench.cluster.many import measure_many, show_many, write_many
from hvd_elastic.errors import HvdElasticError


def numbers(text: str) -> list[int]:
    """Numbers with commas between."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': write numbers as in 2,4,8") from None


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
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
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file as well")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        if arguments.calls is not None:
            calls = measure_calls(arguments.calls, arguments.rounds, say)
            print(show_calls(calls))
            if arguments.out is not None:
                write_calls(calls, arguments.out)
            return 0
        if arguments.faults is not None:
            faults = measure_faults(arguments.faults.split(","), not arguments.no_peers, say)
            print(show_faults(faults))
            if arguments.out is not None:
                write_faults(faults, arguments.out)
            return 0
        if arguments.many is not None:
            many = measure_many(arguments.many, arguments.size * 1_000_000, say)
            print(show_many(many))
            if arguments.out is not None:
                write_many(many, arguments.out)
            return 0
        result = measure_copies(
            arguments.rows.split(","),
            rate=arguments.rate,
            size=arguments.size * 1_000_000,
            counts=arguments.counts,
            hosts=arguments.hosts,
            peers=not arguments.no_peers,
            say=say,
        )
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(show_copies(result))
    if arguments.out is not None:
        write_copies(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
