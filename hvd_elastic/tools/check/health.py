"""Collect the facts of all hosts, measure their network, and check them (``checkclust``)."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.fanout import HostResult, Outcome, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.remote_python import run_script
from hvd_elastic.hosts.ssh import connect
from hvd_elastic.programs.look_at_host import digest_of, version_of
from hvd_elastic.tools.check.checks import (
    COMPARED,
    Check,
    CheckSettings,
    HostHealth,
    Level,
    check_clock,
    check_hardware,
    check_host,
    check_names,
    check_network,
    check_strays,
    check_users,
    choose_reference,
)
from hvd_elastic.tools.check.network import NetLink, NetworkProbe
from hvd_elastic.tools.kill import Target, end_processes_of

__all__ = ["Check", "CheckSettings", "ClusterHealth", "HostHealth", "Level", "check_cluster"]

# Limit for each of the two programs that run on a host.
SCRIPT_S = 30.0
PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class ClusterHealth:
    """Result of checking a cluster.

    Attributes:
        hosts: one result for each host, in the given order; FAILED if one of its checks failed.
        links: measured network between the hosts, one entry for each direction.
    """

    hosts: tuple[HostResult[HostHealth], ...]
    links: tuple[NetLink, ...]


def check_cluster(
    hosts: Sequence[Host],
    options: SshOptions | None = None,
    settings: CheckSettings | None = None,
    on_step: Callable[[str], None] | None = None,
) -> ClusterHealth:
    """Check every host, then the network between them.

    Args:
        on_step: called with a description of each step before it begins.
    """
    options, settings = options or SshOptions(), settings or CheckSettings()
    tell = on_step or (lambda _: None)
    python = settings.python or sys.executable
    request = {
        "packages": [*COMPARED],
        "folders": settings.folders,
        "names": [host.name for host in hosts],
        "code": settings.code,
    }

    def facts_of(host: Host, stopper: Stopper) -> dict[str, Any]:
        with connect(host, options) as connection:
            stopper.add_action(connection.close)
            facts = run_script(connection, "look_at_host", request, SCRIPT_S, python)
            found = end_processes_of(connection, Target(strays=True), 0, SCRIPT_S, True, ours=True)
            return {**facts, "strays": found["processes"]}

    tell(f"looking at {len(hosts)} hosts")
    limit_s = options.connect_timeout_s + 2 * SCRIPT_S + 10.0
    looked = {
        result.host.name: result for result in fan_out(hosts, facts_of, settings.fanout, limit_s)
    }
    facts = {name: result.answer for name, result in looked.items() if result.ok}
    reference = choose_reference(leader_facts(settings), facts, settings)
    checks = {}
    for host in hosts:
        if host.name in facts:
            own = facts[host.name]
            checks[host.name] = check_host(host, own, reference, settings)
            checks[host.name] += check_names(host.name, facts, reference)
            checks[host.name] += check_hardware(own["hardware"], gpus=settings.gpus)
            checks[host.name].append(check_strays(own["strays"]))
            if (users := settings.users.get(host.name)) is not None:
                checks[host.name].append(check_users(own["busy"], users))
    links: list[NetLink] = []
    if settings.network and facts:
        links = _measure(
            [host for host in hosts if host.name in facts], options, settings, facts, checks, tell
        )
    return ClusterHealth(
        tuple(_conclude(looked[host.name], checks.get(host.name), facts) for host in hosts),
        tuple(links),
    )


def _measure(
    hosts: Sequence[Host],
    options: SshOptions,
    settings: CheckSettings,
    facts: Mapping[str, Mapping[str, Any]],
    checks: Mapping[str, list[Check]],
    tell: Callable[[str], None],
) -> list[NetLink]:
    """Measure the network, add its checks, and return the links."""
    addresses = {}
    if settings.interface is not None:
        for name, own in facts.items():
            entry = own["interfaces"].get(settings.interface)
            if entry is not None and entry["addresses"]:
                addresses[name] = entry["addresses"][0]
    tell("starting the measurement of the network")
    python = settings.python or sys.executable
    with NetworkProbe(hosts, options, addresses, python, settings.fanout) as probe:
        for name, (skew_s, doubt_s) in probe.clocks().items():
            checks[name].append(check_clock(skew_s, doubt_s))
        broken = probe.unreachable()
        links = [
            *broken,
            *probe.measure(
                broken, lambda done, total: tell(f"measuring the network, round {done} of {total}")
            ),
        ]
        for name, found in check_network(probe.names, links).items():
            checks[name].extend(found)
        for name, why in probe.failures.items():
            checks[name].append(Check("network", Level.FAILED, why.partition(": ")[2] or why))
    return links


def leader_facts(settings: CheckSettings) -> dict[str, Any]:
    """Return the facts of this machine that the hosts are compared with."""
    from hvd_elastic import __version__

    packages = {package: version_of(package) for package in COMPARED}
    packages["hvd_elastic"] = __version__
    return {
        "python": platform.python_version(),
        "packages": packages,
        "code": None if settings.code is None else digest_of(Path(settings.code)),
        "package_code": digest_of(PACKAGE),
    }


def _conclude(
    looked: HostResult[dict[str, Any]],
    checks: Sequence[Check] | None,
    facts: Mapping[str, Mapping[str, Any]],
) -> HostResult[HostHealth]:
    host = looked.host
    if checks is None:
        return HostResult(host, looked.outcome, looked.seconds, error=looked.error)
    health = HostHealth(tuple(checks), facts[host.name])
    failed = [check for check in checks if check.level is Level.FAILED]
    reason = "; ".join(f"{check.name}: {check.detail}" for check in failed)
    outcome = Outcome.FAILED if failed else Outcome.OK
    return HostResult(host, outcome, looked.seconds, health, reason)
