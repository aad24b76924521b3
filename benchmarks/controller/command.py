"""The command line of ``benchmarks/controller.py``."""

from __future__ import annotations

import argparse

from benchmarks.controller.results import measure_virtual
from benchmarks.controller.simulated import measure_simulated
from benchmarks.controller.workloads import CHANGES, FORECASTS, WORKLOADS
from benchmarks.testbed.command import add_output_options, deliver, end_with, names, progress

__all__ = ["main"]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="controller.py",
        description="The scaling controller in virtual time; with --virtual real jobs train on "
        "virtual hosts, and what the file of --out holds of other cases stays.",
    )
    parser.add_argument("--virtual", action="store_true", help="real jobs on virtual hosts (root)")
    for option, valid, what in (
        ("--workloads", WORKLOADS, "steady state"),
        ("--changes", CHANGES, "changes in mid-run"),
        ("--forecasts", FORECASTS, "what 2 hosts predict of 4 and 8"),
    ):
        known = ",".join(valid)
        told = f"{what}, with --virtual: of {known} (default: all; an empty text: none)"
        parser.add_argument(option, default=known, metavar="NAMES", help=told)
    add_output_options(parser)
    options = parser.parse_args()

    def measure() -> None:
        with progress(options) as say:
            if options.virtual:
                workloads, changes, forecasts = (
                    names(text) for text in (options.workloads, options.changes, options.forecasts)
                )
                result = measure_virtual(workloads, changes, forecasts, say, options.out)
            else:
                result = measure_simulated(say)
        deliver(result, options)

    return end_with(measure)
