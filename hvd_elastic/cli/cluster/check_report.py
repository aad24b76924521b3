"""Print the results of ``checkclust``: the problems of each host, and the network in one line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hvd_elastic.cli.cluster.host_report import Printer
from hvd_elastic.cli.output import print_json_line
from hvd_elastic.cluster.check.health import HostHealth, Level
from hvd_elastic.cluster.check.network import Link
from hvd_elastic.formatting import duration_words
from hvd_elastic.hosts.fanout import HostResult


def describe_health(result: HostResult[HostHealth]) -> dict[str, Any]:
    """Return the fields of this tool in the JSON object of a host."""
    checks = result.value.checks if result.value else ()
    return {
        "checks": [
            {"name": item.name, "level": item.level.value, "detail": item.detail} for item in checks
        ]
    }


def show_health(result: HostResult[HostHealth], printer: Printer, verbose: bool) -> None:
    """Print a line for the host, and one for each problem on it."""
    if result.value is None:
        printer.lines(result.host, "stdout", f"NOT ready: {result.error}")
        return
    health = result.value
    words = {Level.OK: "ready", Level.WARNING: "ready, with warnings", Level.FAILED: "NOT ready"}
    printer.lines(result.host, "stdout", words[health.level])
    for item in health.checks:
        if verbose or item.level is not Level.OK:
            text = f"  {item.level.value:8}{item.name}: {item.detail}"
            printer.lines(result.host, "stdout", text)


def show_links(links: Sequence[Link], printer: Printer, as_json: bool) -> None:
    """Print the range of bandwidth and latency between the hosts; with ``as_json`` every link."""
    if as_json:
        for link in links:
            print_json_line(
                {
                    "kind": "link",
                    "from": link.source,
                    "to": link.target,
                    "bytes_per_s": round(link.bytes_per_s),
                    "latency_s": round(link.latency_s, 6),
                    "refused": link.refused,
                }
            )
        return
    good = [link for link in links if not link.refused]
    if good:
        rates = sorted(link.bytes_per_s * 8 / 1e6 for link in good)
        latencies = sorted(link.latency_s for link in good)
        printer.note(
            f"network: {len(good)} directions, {rates[0]:.0f} to {rates[-1]:.0f} Mbit/s (median "
            f"{statistics.median(rates):.0f}), there and back in "
            f"{duration_words(latencies[0])} to {duration_words(latencies[-1])}"
        )
