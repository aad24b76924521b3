"""Steers a run: carries out the requests that users send to it, and what its policy decides."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_elastic.control import events as ev
from hvd_elastic.control.endings import StopCause
from hvd_elastic.formatting import count
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.executor import Executor
from hvd_elastic.leader.fetching import Fetching
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.stopping import Stopping
from hvd_elastic.run_events import CommandDone, ReadEvent

if TYPE_CHECKING:
    from hvd_elastic.leader.scaling import Scaler


@dataclass(frozen=True)
class Answer:
    """The answer to a request, and the event that it causes.

    Attributes:
        event: event for the machine; None: the request changes nothing there.
    """

    message: str
    event: ev.TargetChanged | ev.HostDraining | ev.HostReturned | None = None
    ok: bool = True


class Steering:
    """Steers a run.

    Args:
        run: what all parts of the leader share; requests arrive in its folder.
        fetching: says how long a checkpoint takes.
    """

    def __init__(
        self, run: LedRun, executor: Executor, stopping: Stopping, fetching: Fetching
    ) -> None:
        self._run = run
        self._executor = executor
        self._stopping = stopping
        self._fetching = fetching
        self._scaler: Scaler | None = None

    def start_policy(self, events: Iterable[ReadEvent]) -> None:
        """Let the policy of the run decide, if it has one; ``events``: those of the run so far."""
        if self._run.spec.policy == "fixed":
            return
        from hvd_elastic.leader.scaling import Scaler

        past = [*events]
        age_s = max(0.0, time.time() - past[0].t) if past else 0.0
        scaler = Scaler(self._run.spec, self._run.journal.emit, time.monotonic() - age_s, past)
        self._run.journal.listeners.append(scaler.note)
        self._scaler = scaler

    def let_policy_decide(self, now: float) -> None:
        """Carry out what the policy decides, if anything."""
        if self._scaler is not None and self._stopping.cause is None:
            hosts = self._run.hostfile.hosts.values()
            change = self._scaler.look(self._executor.machine, hosts, now)
            if change is not None:
                self._executor.tell(change)

    def look_for_requests(self, only: str | None = None) -> None:
        """Carry out and answer the requests that have arrived; ``only``: none but this one."""
        for request in self._run.folder.take_requests(only):
            answer = self._answer(request.op, request.fields)
            if answer.event is not None:
                self._executor.tell(answer.event)
            done = CommandDone(request.id, request.op, answer.ok, answer.message)
            done.values = dict(request.fields)
            self._run.journal.emit(done)

    def _answer(self, op: str, fields: Mapping[str, Any]) -> Answer:
        hosts, draining = self._run.hostfile.hosts, self._executor.machine.draining
        match op:
            case "stop":
                asked = {cause.value: cause for cause in StopCause}
                self._stopping.ask(asked.get(str(fields.get("reason")), StopCause.COMMAND))
                return Answer("the run is being stopped")
            case "scale":
                run_id, wanted = self._run.folder.run_id, fields.get("np")
                return scale(wanted, self._run.spec, run_id, hosts.values(), draining, self._scaler)
            case "policy":
                return steer_policy(fields.get("do"), self._scaler)
            case "drain":
                return drain(fields, hosts, draining, self._fetching.reserve_s)
        return Answer(f"the leader knows no request {op!r}", ok=False)


def scale(
    wanted: Any,
    spec: RunSpec,
    run_id: str,
    hosts: Iterable[Host],
    draining: Collection[str],
    scaler: Scaler | None,
) -> Answer:
    """Request a number of workers; None returns the choice to the options or the policy."""
    if wanted is None and scaler is not None:
        return steer_policy("resume", scaler)
    if wanted is None:
        message = "the number of workers follows the options of the run again"
        return Answer(message, ev.TargetChanged(None))
    if not isinstance(wanted, int) or wanted < 1:
        message = f"cannot scale to {wanted!r} workers: give a whole number of 1 or more"
        return Answer(message, ok=False)
    slots = sum(host.slots for host in hosts if host.name not in draining)
    limit = min(slots, spec.max_np or slots)
    if not spec.min_np <= wanted <= limit:
        message = (
            f"cannot scale to {count(wanted, 'worker')}: this run takes "
            f"{spec.min_np} to {limit} (--min-np, --max-np and the slots of the hostfile"
            f"{' that are not drained' if draining else ''})"
        )
        return Answer(message, ok=False)
    until = ""
    if scaler is not None:
        scaler.pause(f"{count(wanted, 'worker')} wanted by hvd-elastic scale")
        until = f"; the policy is paused until: hvd-elastic scale {run_id} auto"
    return Answer(f"{count(wanted, 'worker')} wanted{until}", ev.TargetChanged(wanted))


def steer_policy(do: Any, scaler: Scaler | None) -> Answer:
    """Pause or resume the policy, depending on ``do``."""
    if scaler is None:
        message = "this run has no policy to steer: it was started with --policy fixed"
        return Answer(message, ok=False)
    if do == "pause":
        scaler.pause("asked to by hvd-elastic policy")
        return Answer("the number of workers stays as it is")
    if do == "resume":
        scaler.resume("the policy may decide again", time.monotonic())
        return Answer("the policy decides the number of workers again")
    return Answer(f"a policy can be told to pause or resume, not to {do!r}", ok=False)


def drain(
    fields: Mapping[str, Any], hosts: Collection[str], draining: Collection[str], reserve_s: float
) -> Answer:
    """Drain a host, or allow its use again.

    Args:
        hosts: names of the hosts in the hostfile.
        draining: names of the drained hosts.
        reserve_s: part of the host's remaining time that is kept for a last checkpoint and for
            ending the processes [s].
    """
    host, leave_in_s = str(fields.get("host")), fields.get("leave_in_s")
    if host not in hosts:
        message = f"the hostfile has no host {host!r}; it has {', '.join(hosts)}"
        return Answer(message, ok=False)
    if fields.get("undo"):
        if host not in draining:
            return Answer(f"host {host} is not drained", ok=False)
        return Answer(f"host {host} may be used again", ev.HostReturned(host))
    is_number = isinstance(leave_in_s, (int, float)) and not isinstance(leave_in_s, bool)
    if leave_in_s is not None and not (is_number and leave_in_s >= 0):
        message = f"a host can leave in 0 seconds or more, not in {leave_in_s!r}"
        return Answer(message, ok=False)
    return Answer(
        f"the run leaves host {host}, and does not use it until it is given back",
        host_draining(host, "asked to by hvd-elastic drain", leave_in_s, reserve_s, asked=True),
    )


def host_draining(
    host: str, cause: str, leave_in_s: float | None, reserve_s: float, *, asked: bool = False
) -> ev.HostDraining:
    """Return the event that drains a host; see :func:`drain` for the arguments."""
    train_for_s = None if leave_in_s is None else max(0.0, leave_in_s - reserve_s)
    return ev.HostDraining(host, cause, train_for_s, leave_in_s, asked)
