"""Whether hosts are fit for a run (``checkclust``): judged against the leader, one check a line."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hvd_elastic.cluster.fanout import DEFAULT_FANOUT, HostResult, Stopper, fan_out
from hvd_elastic.cluster.hostfile import Host
from hvd_elastic.cluster.scripts import run_script
from hvd_elastic.cluster.ssh import SshOptions, connect
from hvd_elastic.words import count

__all__ = ["Check", "HostHealth", "Level", "check_hosts", "judge", "leader_facts"]

PACKAGES = ("hvd_elastic", "horovod", "torch", "tensorflow")
FOLDERS = ("~", "/tmp")  # noqa: S108  # how full it is; nothing is written there
CLOCK_SKEW_S = 1.0
LITTLE_DISK_BYTES = 1 << 30
NO_DISK_BYTES = 100 << 20
SCRIPT_S = 30.0


class Level(Enum):
    """How much a check matters: a run works, works with care, does not work."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One thing looked at; ``detail`` says what was found, and what to do unless it is ok."""

    name: str
    level: Level
    detail: str


@dataclass(frozen=True)
class HostHealth:
    """All checks of a host, and the facts behind them."""

    checks: tuple[Check, ...]
    facts: Mapping[str, Any]

    @property
    def level(self) -> Level:
        levels = [check.level for check in self.checks]
        for level in (Level.FAILED, Level.WARNING):
            if level in levels:
                return level
        return Level.OK


def leader_facts() -> dict[str, Any]:
    """Python and package versions here, which the hosts are compared with."""
    from importlib import metadata, util

    packages: dict[str, str | None] = {}
    for package in PACKAGES:
        packages[package] = None
        if util.find_spec(package) is not None:
            try:
                packages[package] = metadata.version(package.replace("_", "-"))
            except metadata.PackageNotFoundError:
                packages[package] = "unknown"
    from hvd_elastic import __version__

    packages["hvd_elastic"] = __version__
    return {"python": platform.python_version(), "packages": packages}


def check_hosts(
    hosts: Sequence[Host],
    options: SshOptions,
    python: str | None = None,
    fanout: int = DEFAULT_FANOUT,
) -> Iterator[HostResult[HostHealth]]:
    """Looks at every host.

    Args:
        hosts: which.
        options: how to connect.
        python: the interpreter that runs would use there; None: the leader's own path.
        fanout: hosts at a time.

    Yields:
        One result a host as it ends; FAILED when one of its checks failed.
    """
    leader = leader_facts()

    def look(host: Host, stopper: Stopper) -> HostHealth:
        with connect(host, options) as connection:
            stopper.add(connection.close)
            request = {"packages": PACKAGES, "folders": FOLDERS}
            before = time.time()
            facts = run_script(
                connection, "look_at_host", request, SCRIPT_S, python or sys.executable
            )
            return judge(host, facts, leader, before, time.time())

    limit_s = options.connect_timeout_s + SCRIPT_S + 10.0
    return fan_out(hosts, look, fanout, limit_s, _explain_checks)


def judge(
    host: Host, facts: Mapping[str, Any], leader: Mapping[str, Any], before: float, after: float
) -> HostHealth:
    """The checks for what a host said of itself.

    Args:
        host: as the hostfile has it.
        facts: the answer of ``remote/look_at_host.py``.
        leader: as :func:`leader_facts` gives it.
        before: the leader's clock when the question was sent [unix seconds].
        after: the leader's clock when it was answered.
    """
    checks = [_check_python(facts, leader)]
    checks += [
        _check_package(package, facts["packages"].get(package), version)
        for package, version in leader["packages"].items()
        if version is not None
    ]
    checks += [_check_disk(folder, free) for folder, free in facts["free"].items()]
    checks += [_check_clock(facts["clock"], before, after), _check_cpus(host, facts["cpus"])]
    return HostHealth(tuple(checks), facts)


def _check_python(facts: Mapping[str, Any], leader: Mapping[str, Any]) -> Check:
    there, here = str(facts["python"]), str(leader["python"])
    if there.split(".")[:2] != here.split(".")[:2]:
        return Check(
            "python",
            Level.FAILED,
            f"{there} ({facts['executable']}), the leader has {here}. Install Python "
            f"{'.'.join(here.split('.')[:2])} there, or name it with --python",
        )
    return Check("python", Level.OK, f"{there} ({facts['executable']})")


def _check_package(package: str, there: str | None, here: str) -> Check:
    if there is None:
        return Check(
            package, Level.FAILED, f"not installed there, the leader has {here}. Install it there"
        )
    if there != here and "unknown" not in (there, here):
        return Check(
            package,
            Level.FAILED,
            f"{there}, the leader has {here}. Install the same version everywhere",
        )
    return Check(package, Level.OK, there)


def _check_disk(folder: str, free: int | None) -> Check:
    name = f"disk {folder}"
    if free is None:
        return Check(name, Level.WARNING, "cannot be told")
    text = f"{free / 1e9:.1f} GB free"
    if free < NO_DISK_BYTES:
        return Check(name, Level.FAILED, f"{text}; make room")
    if free < LITTLE_DISK_BYTES:
        return Check(name, Level.WARNING, f"{text}, little for checkpoints and logs")
    return Check(name, Level.OK, text)


def _check_clock(there: float, before: float, after: float) -> Check:
    """The skew is known to half the time of the question: only what is surely off counts."""
    skew = there - (before + after) / 2
    doubt = (after - before) / 2
    text = f"{skew:+.2f} s ± {doubt:.2f} s"
    if abs(skew) - doubt > CLOCK_SKEW_S:
        return Check("clock", Level.WARNING, f"{text} from the leader's; start NTP there")
    return Check("clock", Level.OK, text)


def _check_cpus(host: Host, cpus: int) -> Check:
    if cpus < host.slots:
        return Check(
            "cpus",
            Level.WARNING,
            f"{cpus} for {count(host.slots, 'slot')}; lower slots= if it is slow",
        )
    return Check("cpus", Level.OK, f"{cpus} for {count(host.slots, 'slot')}")


def _explain_checks(health: HostHealth) -> str | None:
    failed = [check for check in health.checks if check.level is Level.FAILED]
    return "; ".join(f"{check.name}: {check.detail}" for check in failed) or None
