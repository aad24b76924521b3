"""Leads the hosts that read for the ranks: their agents, and one worker of the script on each.

They hold no state of the run. So a lost one is started again and nothing else happens: the ranks
read what it was asked for elsewhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from hvd_elastic.control.backoff import HOST_PAUSES_S, Retry
from hvd_elastic.control.endings import how_it_ended
from hvd_elastic.control.events import AgentFailed
from hvd_elastic.hosts.certificate import make_certificate
from hvd_elastic.hosts.connection import Engine
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.agents.agents import Agents
from hvd_elastic.leader.agents.connection import AgentConnection, FromAgent
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.workers import Workers
from hvd_elastic.policy.input import InputWatch, choose_readers
from hvd_elastic.policy.objective import hourly_price
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import (
    Decision,
    Event,
    HostFaults,
    Input,
    InputHostJoined,
    InputHostLeft,
    Warned,
)
from hvd_elastic.wire import messages as msg

_MOST_SCRIPT_FAILURES = 3
"""Failures of the script in a row after which a host is left out until the hostfile is saved."""


@dataclass
class _InputHost:
    """Present state of one input host."""

    host: Host
    starts: int = 0
    retry: Retry = field(default_factory=lambda: Retry(HOST_PAUSES_S))
    script_failures: int = 0
    start_at: float = math.inf
    """When to start it next [s]; infinite: it runs, is left out, or is not needed yet."""
    take_over: bool = False
    """Whether a worker that reads there under an earlier leader is to continue."""
    needed: bool = False
    """Whether it should read; one with a price, only once the ranks wait for data."""
    worker: str = ""
    error: str = ""
    """Why its script failed; empty: it did not."""


class InputHosts:
    """Holds the input hosts of a run.

    Args:
        folder: run folder, for the logs of the workers.
        environment: variables for the workers.
        post: has a function called in the leader's loop.
        changed: called when the ranks should read from other processes.
        engine: what owns the hosts; None: they are reached over ssh.

    Attributes:
        watch: follows how long the ranks wait for their data.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        environment: Mapping[str, str],
        led: Callable[[], msg.LeaderIdentity],
        post: Callable[[Callable[[], None]], None],
        emit: Callable[[Event], None],
        changed: Callable[[msg.UseInput], None],
        engine: Engine | None = None,
    ) -> None:
        self._agents = Agents(
            spec,
            environment,
            lambda agent, message: post(lambda: self._heard(agent, message)),
            engine,
        )
        self._failure_timeout_s = spec.failure_timeout_s
        self._led, self._emit, self._changed = led, emit, changed
        self._workers = Workers(folder)
        self._known: dict[str, _InputHost] = {}
        self._others: Mapping[str, Host] = {}
        self._servers: dict[str, msg.InputServer] = {}
        self._certificate = ""
        self.watch = InputWatch()

    @property
    def use(self) -> msg.UseInput | None:
        """Return what a new rank has to be told; None: nothing."""
        return self._servers_in_use() if self._servers else None

    def update(
        self,
        hosts: Mapping[str, Host],
        ranks: Mapping[str, Host],
        reading: Collection[str] = (),
    ) -> None:
        """Use these input hosts, and no others; those that were left out are tried again.

        Args:
            ranks: hosts that train, which have to reach them.
            reading: names of those that read under an earlier leader.
        """
        self._others = ranks
        for name in {*self._known, *self._servers} - hosts.keys():
            self._known.pop(name, None)
            self._end_agent(name)
            self._gone(name, "it was taken out of the run")
        for name, host in hosts.items():
            known = self._known.setdefault(name, _InputHost(host))
            known.host, known.script_failures = host, 0
            known.take_over = known.take_over or name in reading
            known.needed = known.needed or known.take_over or host.price is None
            if known.needed and name not in self._agents.by_host:
                known.start_at = min(known.start_at, time.monotonic())

    def tend_hosts(self, now: float) -> None:
        """Start hosts that are due, and send heartbeats."""
        if not self._known:
            return
        for name, known in self._known.items():
            if now >= known.start_at:
                known.start_at = math.inf
                if not self._certificate:
                    self._certificate = make_certificate()
                hosts = {each.host.name: each.host for each in self._known.values()}
                self._agents.start(
                    name, {**self._others, **hosts}, self._led(), take_over=known.take_over
                )
                known.take_over = False
        self._agents.beat(now, None)

    def give_up_silent(self, now: float) -> None:
        """Give up silent hosts; not called while this machine is cut off from those that train."""
        silence = self._agents.silence(now) or {}
        for name, cause, _ in self._agents.drop_silent(silence, self._failure_timeout_s):
            self._failed(name, cause)

    def watch_ranks(self, members: Sequence[tuple[str, str]]) -> None:
        """Record how long the ranks wait for their data, if that has changed.

        If that is for cores, hosts with a price are asked to read, where it makes examples cheaper.
        """
        found = self.watch.next_finding(members)
        if found is not None:
            self._emit(found)
            if found.bound == "cores":
                self._add_readers(found, {host for _, host in members})

    def _add_readers(self, found: Input, trains: AbstractSet[str]) -> None:
        offered = [known.host for known in self._known.values() if not known.needed]
        if not offered or any(map(self._is_starting, self._known.values())):
            return
        used = [known.host for known in self._known.values() if known.needed]
        used += [host for name, host in self._others.items() if name in trains]
        is_known = all(host.price is not None for host in used)
        choice = choose_readers(found, offered, hourly_price(used) if is_known else None)
        self._emit(Decision("grow" if choice.hosts else "stay", choice.reason))
        for name in choice.hosts:
            self._known[name].needed, self._known[name].start_at = True, time.monotonic()

    def _is_starting(self, known: _InputHost) -> bool:
        name = known.host.name
        reads = name in self._servers
        return not reads and (name in self._agents.by_host or known.start_at < math.inf)

    def drop(self) -> None:
        """Close all connections; another leader leads the run, or this one again."""
        self._known.clear()
        self._agents.drop()

    def end_agents(self) -> None:
        self._known.clear()
        self._agents.end_agents()
        self._workers.close()

    # -- messages ----------------------------------------------------------------------------

    def _heard(self, agent: AgentConnection, message: FromAgent) -> None:
        name = agent.host.name
        known = self._known.get(name)
        if known is None or self._agents.by_host.get(name) is not agent:
            return
        if not isinstance(message, AgentFailed) and message.seq:
            agent.acted_upon = message.seq
        match message:
            case msg.AgentHello():
                self._greet(known, message)
            case AgentFailed(cause=cause, fatal=fatal):
                del self._agents.by_host[name]
                self._failed(name, cause, fatal=fatal)
            case msg.AgentWarning(message=text):
                self._warn(f"host {name}: {text}")
            case msg.HostSampled(sample=sample):
                self._emit(sample)
            case msg.HardwareJudged(faults=faults):
                self._emit(HostFaults(host=name, faults=faults))
            case msg.Log(worker=worker, data=data) if worker == known.worker:
                self._workers.log(worker, data)
            case msg.WorkerNotStarted(error=error):
                self._script_failed(known, f"its command cannot be started: {error}")
            case msg.WorkerEnded(worker=worker) if worker == known.worker:
                self._ended(known, message)
            case msg.WorkerSaid(worker=worker, message=said) if worker == known.worker:
                self._on_report(agent, known, said)

    def _greet(self, known: _InputHost, hello: msg.AgentHello) -> None:
        """Have a worker read: that of an earlier leader, or a new one."""
        name = known.host.name
        held = hello.held.workers if hello.held is not None else ()
        if held:
            known.worker = held[-1].worker
        else:
            known.starts += 1
            known.worker = f"{name}:input.{known.starts}"
            self._agents.send(name, msg.StartWorker(known.worker, 0, 1, reads=True))
        known.error = ""
        self._workers.places[known.worker] = (name, 0)
        address = hello.interfaces.get(hello.interface or "", "127.0.0.1")
        task = msg.ServeInput(known.host.cpus or hello.cpus, address, self._certificate)
        self._agents.send(name, msg.Tell(known.worker, task))

    def _on_report(self, agent: AgentConnection, known: _InputHost, said: Any) -> None:
        name = known.host.name
        match said:
            case msg.InputServing(ports=ports):
                assert agent.info is not None
                known.retry.worked()
                known.script_failures = 0
                address = agent.info.interfaces.get(agent.info.interface or "", "127.0.0.1")
                self._servers[name] = msg.InputServer(name, address, ports)
                self.watch.begin_anew()
                self._emit(InputHostJoined(name, len(ports)))
                self._tell_ranks()
            case msg.ScriptRaised(traceback=text):
                self._workers.write(known.worker, text)
                known.error = text.strip().rsplit("\n", 1)[-1]
            case Warned(message=text):
                self._warn(f"input host {name}: {text}")

    def _ended(self, known: _InputHost, message: msg.WorkerEnded) -> None:
        exited = message.event()
        self._workers.failure_told = True  # the run does not fail, so its log need not be shown
        self._workers.ended(exited)
        _, how = how_it_ended(exited)
        if message.signal is None:
            self._script_failed(known, known.error or f"its script {how}")
        else:
            self._failed(known.host.name, f"its worker {how}")

    # -- ends --------------------------------------------------------------------------------

    def _script_failed(self, known: _InputHost, why: str) -> None:
        known.script_failures += 1
        left_out = known.script_failures >= _MOST_SCRIPT_FAILURES
        self._failed(known.host.name, why, fatal=left_out)

    def _failed(self, name: str, cause: str, *, fatal: bool = False) -> None:
        """Note that a host does not read any more; start it again unless that is useless."""
        known = self._known[name]
        known.retry.failed(time.monotonic())
        known.worker = ""
        known.start_at = math.inf if fatal else known.retry.at
        self._end_agent(name)  # a new one starts with a clean host
        self.watch.begin_anew()
        end = "save the hostfile to have it tried again" if fatal else "trying again"
        if not self._gone(name, cause):
            self._warn(f"input host {name} cannot be used: {cause}; {end}")

    def _end_agent(self, name: str) -> None:
        if name in self._agents.by_host:
            self._agents.leave(name)
            self._agents.release(lambda _: False)

    def _gone(self, name: str, cause: str) -> bool:
        """Tell the ranks that a host does not read any more; return whether it did."""
        if self._servers.pop(name, None) is None:
            return False
        self._emit(InputHostLeft(name, cause))
        self._tell_ranks()
        return True

    def _tell_ranks(self) -> None:
        self._changed(self._servers_in_use())

    def _servers_in_use(self) -> msg.UseInput:
        return msg.UseInput(self._certificate, [*self._servers.values()])

    def _warn(self, text: str) -> None:
        self._emit(Warned(text))
