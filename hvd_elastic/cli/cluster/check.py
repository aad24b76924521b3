"""Implement ``checkclust`` and ``hvd-elastic trust``: look at the hosts before a run does."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.cluster.host_report import Printer, conclude, show_result
from hvd_elastic.cli.cluster.install import (
    REFUSED,
    Bootstrap,
    Yes,
    accept_host_keys,
    bootstrap_hosts,
)
from hvd_elastic.cli.options import command, option
from hvd_elastic.cli.output import print_json_line
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import duration_words
from hvd_elastic.hosts.fanout import HostResult
from hvd_elastic.tools.check.health import HostHealth, Level
from hvd_elastic.tools.check.network import NetLink


@command(HostOptions, but=["dry_run"])
def check(
    chosen: HostOptions,
    python: Annotated[
        str | None,
        option("Python on the hosts (default: the path of this one)", "--python", metavar="PATH"),
    ] = None,
    folder: Annotated[
        list[str] | None,
        option("folder that a run writes to; may be repeated", "--folder", metavar="PATH"),
    ] = None,
    code: Annotated[
        Path | None,
        option(
            "file or folder whose Python code must be the same everywhere", "--code", metavar="PATH"
        ),
    ] = None,
    network_interface: Annotated[
        str | None,
        option(
            "network interface of the ring (default: the one of ssh)",
            "--network-interface",
            metavar="NAME",
        ),
    ] = None,
    network: Annotated[
        bool, option("measure the network between the hosts", "--network/--no-network")
    ] = True,
    gpus: Annotated[
        bool, option("check GPUs (--no-gpus for training on CPUs)", "--gpus/--no-gpus")
    ] = True,
    bootstrap: Bootstrap = False,
    yes: Yes = False,
) -> None:
    """Report for every host what would break a run on it, and what to do about it.

    Checks connection, Python, packages, code, CUDA, GPUs, folders, memory, limits, clock, names,
    interfaces, stray processes, and who uses hosts of a cluster without a job there; then whether
    hosts reach one another, and how fast.

    For example:

      checkclust hosts

      checkclust hosts --code . --folder /data --python /opt/venv/bin/python --json

      checkclust hosts --bootstrap
    """
    from hvd_elastic.tools.check.health import CheckSettings, check_cluster

    if code is not None and not code.exists():
        raise UsageError(f"--code {code}: there is no such file or folder on this machine")
    settings = CheckSettings(
        python,
        tuple(folder or ()),
        None if code is None else str(code.absolute()),
        network_interface,
        network,
        chosen.fanout,
        gpus,
        _users_of_hosts(),
    )
    if bootstrap:
        bootstrap_hosts(chosen, yes)
    started = time.monotonic()
    printer = Printer(chosen.hosts)
    found = check_cluster(chosen.hosts, chosen.ssh, settings, printer.passing)
    printer.clear()
    for result in found.hosts:
        show_result(result, printer, chosen.as_json, describe_health, tell_failures=False)
        if not chosen.as_json:
            show_health(result, printer, chosen.verbose)
    show_links(found.links, printer, chosen.as_json)
    conclude(chosen, found.hosts, printer, time.monotonic() - started)


def _users_of_hosts() -> dict[str, list[str]]:
    """Return who has jobs on the hosts of the clusters that this user knows and that are up.

    A host may be in several of them.
    """
    from hvd_elastic.jobs.job import Hosts
    from hvd_elastic.jobs.place import list_clusters
    from hvd_elastic.jobs.server import ask_daemon

    found: dict[str, list[str]] = {}
    for place in list_clusters():
        with contextlib.suppress(RunError):
            if place.daemon_alive():
                rows = ask_daemon(place, Hosts()).data
                for row in rows:
                    found.setdefault(row["host"], []).extend(row["users"])
    return found


@command(HostOptions, but=["only_hosts", "exclude_hosts", "dry_run", "identity"])
def trust(
    chosen: HostOptions,
    yes: Annotated[bool, option("accept without asking", "--yes", "-y")] = False,
) -> None:
    """Show the hosts' key fingerprints and accept them into the project's own known_hosts.

    Compare each with the host's own (on it: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub).
    A key that has changed is never accepted here.

    For example:

      hvd-elastic trust hosts
    """
    shown = accept_host_keys(chosen, yes)
    if any(entry.state in REFUSED for entry in shown):
        raise typer.Exit(1)


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


def show_links(links: Sequence[NetLink], printer: Printer, as_json: bool) -> None:
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
        printer.print_note(
            f"network: {len(good)} directions, {rates[0]:.0f} to {rates[-1]:.0f} Mbit/s (median "
            f"{statistics.median(rates):.0f}), there and back in "
            f"{duration_words(latencies[0])} to {duration_words(latencies[-1])}"
        )
