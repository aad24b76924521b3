"""Finds the hosts of a cluster that can be used: runs report lost ones, which are tried again.

They report faults of the hardware as well, for which hosts can be drained.

A run that can start no agent on a host may be at fault itself, if its interpreter was named
wrongly. So hosts are tried with interpreters that should have this package: the daemon's, and those
of runs.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from hvd_elastic import __version__
from hvd_elastic.control.backoff import HOST_PAUSES_S, Retry, backoff
from hvd_elastic.formatting import count, one_line
from hvd_elastic.hosts.remote_python import FROM_NO_WORKING_FOLDER
from hvd_elastic.jobs.asked_hosts import AskedHosts
from hvd_elastic.jobs.notify import ClusterRecord
from hvd_elastic.jobs.operator_state import HEALTH, Drained, OperatorState
from hvd_elastic.run_events import Fault, HostFaults

_LOST_AGAIN_S = (10.0, 30.0, 60.0, 120.0)
"""Time to the first try of a host that came back 1, 2, … times, and no job trained there [s]."""
_MOST_FAULTS = 20
"""Faults of a host that are kept; the events may be those of a user who means no good."""
_MOST_TIMES = 1 << 40
"""How often a fault is seen at most, as far as is kept."""
_MOST_REASONS = 3
"""Faults that are named as the reason of a drain."""
_IMPORT = (
    f"{FROM_NO_WORKING_FOLDER}import hvd_elastic, hvd_elastic.agent.agent; "
    f"sys.exit((*sys.version_info[:2], hvd_elastic.__version__) != "
    f"({sys.version_info[0]}, {sys.version_info[1]}, {__version__!r}))"
)
"""Python program that tells by its exit status whether an agent of this version can start."""


@dataclass
class _Lost:
    cause: str
    python: str
    is_suspicion: bool
    """Whether the job may be at fault as well, so that the host is used until it was tried."""
    retry: Retry = field(default_factory=lambda: Retry(HOST_PAUSES_S))


class HostHealth:
    """The lost hosts of a cluster; a program on each of them tells when it can be used again.

    A host that runs the program may still start no job, because it lacks space for example. It is
    tried less and less often, until a job has trained there.

    Args:
        ssh_config: its ssh configuration; None: the user's own.
    """

    def __init__(self, hostfile: Path, ssh_config: str | None) -> None:
        self._hostfile = hostfile
        self._ssh_config = ssh_config
        self._lost: dict[str, _Lost] = {}
        self._returns: Counter[str] = Counter()
        self._working_python = sys.executable
        """Interpreter with which a job has trained last."""
        self._trial: AskedHosts | None = None

    @property
    def lost(self) -> Mapping[str, str]:
        """Lost hosts, with the cause."""
        return {host: lost.cause for host, lost in self._lost.items() if self.is_judged(host)}

    @property
    def suspects(self) -> set[str]:
        """Hosts that are being tried, since it is not known whether they are at fault."""
        return {host for host in self._lost if not self.is_judged(host)}

    def host_lost(
        self, host: str, cause: str, now: float, python: str, *, is_suspicion: bool = False
    ) -> None:
        """Note that a run has lost a host.

        Args:
            now: time [s].
            is_suspicion: whether the job may be at fault as well; the host is tried at once, and
                counts as lost if that fails.
        """
        known = self._lost.get(host)
        if known is not None and (is_suspicion or not known.is_suspicion):
            return
        lost = self._lost[host] = _Lost(cause, python, is_suspicion)
        lost.retry.at = now + backoff(_LOST_AGAIN_S, 0 if is_suspicion else self._returns[host])

    def forget_others(self, hosts: Container[str]) -> None:
        """Forget hosts that the hostfile has no more: a try of them would fail that of others."""
        self._lost = {host: lost for host, lost in self._lost.items() if host in hosts}

    def is_judged(self, host: str) -> bool:
        """Return whether it is known if a host that was suspected is at fault."""
        lost = self._lost.get(host)
        return lost is None or not lost.is_suspicion or lost.retry.failures > 0

    def host_works(self, host: str, python: str) -> None:
        """Note that a job has trained on a host with an interpreter, or has succeeded there."""
        self._returns.pop(host, None)
        self._working_python = python

    def retry_lost_hosts(self, now: float, changed: Callable[[str], None]) -> None:
        """Try lost hosts when it is time; call ``changed`` with each that returns or is lost."""
        if self._trial is not None:
            answers = self._trial.answers()
            if answers is None:
                return
            tried, self._trial = self._trial.hosts, None
            for host in tried:
                lost = self._lost.get(host)
                if lost is None:
                    continue
                if host in answers:
                    judged = self.is_judged(host)
                    del self._lost[host]
                    if judged:
                        self._returns[host] += 1
                    changed(host)
                else:
                    if not self.is_judged(host):
                        changed(host)
                    lost.retry.failed(now)
        due = [host for host, lost in self._lost.items() if now >= lost.retry.at]
        if due:
            self._try(due)

    def close(self) -> None:
        """End a try that has not ended."""
        if self._trial is not None:
            self._trial.close()

    def _try(self, hosts: list[str]) -> None:
        named = (self._lost[host].python for host in hosts)
        pythons = dict.fromkeys([self._working_python, sys.executable, *named])
        tried = " || ".join(shlex.join([python, "-c", _IMPORT]) for python in pythons)
        self._trial = AskedHosts(self._hostfile, self._ssh_config, hosts, tried)


class HardwareHealth:
    """The faults of the hardware of hosts; drains hosts that have some, if that is asked for.

    Args:
        drains: faults for which a host is drained: ``failed``, ``warning`` (those that tell that it
            may break as well), or none if empty.
        state: what operators have set.
        record: records what happens.

    Attributes:
        faults: faults of hosts, as their runs have told last.
    """

    def __init__(self, drains: str, state: OperatorState, record: ClusterRecord) -> None:
        self._drains, self._state, self._record = drains, state, record
        self.faults: dict[str, HostFaults] = {}
        self._kept = ("", 0.0)
        """The last host, with the time of its faults, if they are a reason to drain it."""

    def note_faults(self, told: HostFaults) -> None:
        """Note the faults of a host of which a run has told, and record it if there are others."""
        clean = [
            Fault(
                one_line(fault.what, 60),
                one_line(fault.text),
                min(max(fault.number, 1), _MOST_TIMES),
                is_broken=fault.is_broken,
            )
            for fault in told.faults[:_MOST_FAULTS]
        ]
        told = replace(told, t=min(told.t, time.time()), faults=clean)
        before = self.faults.get(told.host)
        if before is not None and before.t > told.t:
            return
        self.faults[told.host] = told
        known = set() if before is None else set(map(_rough, before.faults))
        if known != set(map(_rough, clean)):
            texts = [fault.text for fault in clean]
            self._record.emit("host_unhealthy", {"host": told.host, "faults": texts})

    def forget_others(self, hosts: Container[str]) -> None:
        """Forget the faults of hosts that the hostfile has no more."""
        self.faults = {host: told for host, told in self.faults.items() if host in hosts}

    def drain(self, listed: Collection[str], lost: Collection[str], now: float) -> bool:
        """Drain hosts with faults, but not the last one; return whether some were drained.

        Args:
            listed: hosts of the hostfile.
            lost: those that are lost.
            now: time [Unix s].

        Raises:
            RunError: it cannot be kept.
        """
        state, some = self._state, False
        for host, told in self.faults.items() if self._drains else ():
            if host in state.closed:
                continue
            faults = [
                fault
                for fault in state.new_faults(host, told.faults, told.t)
                if fault.is_broken or self._drains == "warning"
            ]
            if not faults:
                continue
            if {*listed} <= {host, *state.closed, *lost}:
                if self._kept != (host, told.t):
                    self._kept = host, told.t
                    text = f"host {host} is not drained, since it is the last: {faults[0].text}"
                    self._record.warn(text)
                continue
            reason = "; ".join(fault.text for fault in faults[:_MOST_REASONS])
            more = len(faults) - _MOST_REASONS
            reason += f"; and {count(more, 'other fault')}" if more > 0 else ""
            known = {fault.what: fault.number for fault in told.faults}
            drained = Drained(reason, HEALTH, now, known)
            state.drain(host, drained, now)
            self._record.drained(host, drained)
            some |= state.changed(now)
        return some


def _rough(fault: Fault) -> tuple[str, int]:
    """Return what a fault is, and a number that grows when it is seen twice as often."""
    return fault.what, fault.number.bit_length()
