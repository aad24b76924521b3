"""Starts and ends the agents on the hosts of a run, and measures how long each has been silent."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hvd_elastic.control.commands import Member
from hvd_elastic.formatting import duration_words
from hvd_elastic.hosts.connection import Engine
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import SshOptions, connect, is_local, own_address_towards
from hvd_elastic.leader.agents.connection import AgentConnection, Post, Sender
from hvd_elastic.leader.agents.process import Connect
from hvd_elastic.leader.agents.rendezvous import EntryRelay
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import encode

_GRACE_S = 3.0
"""Time that workers get to end by themselves before they are killed [s]."""
_END_S = _GRACE_S + 9
"""How long to wait for the agents to end [s]: their grace time, and a margin for slow hosts."""
_LOGINS = 32
"""Most logins at a time. One takes some 40 ms of a core here, so hundreds at once would all exceed
the time limit of a connection."""
_BEATS_PER_S = 100
"""Number of hosts above which heartbeats come less than once a second, and so many in a second."""
_MANY_HOSTS = 64
_LEADER_BEATS = 1.5
"""Multiple of the time between heartbeats of an agent after which the leader sends one: an agent
needs them only to decide whether it has a leader, and waits for one more before it says no."""
_LONG_TURN_S = 0.05
"""How long a thread may run while others wait, with many hosts [s]. Hundreds wake at once,
and each looks again after this time whether it may run; with Python's 5 ms that takes long."""
_LONGEST_BEAT_S = 3.0
LOOK_S = 0.25
"""Time between two checks for silent agents [s]; short beside any failure timeout."""


class Agents:
    """Holds the connections to all agents of a run.

    Args:
        environment: variables for the workers, passed on through the agents' stdin.
        post: called with a connection and each message of its agent, from other threads.
        engine: what owns the hosts; None: they are reached over ssh.

    Attributes:
        by_host: connections by host, including those whose agent is still being started.
    """

    def __init__(
        self,
        spec: RunSpec,
        environment: Mapping[str, str],
        post: Post,
        engine: Engine | None = None,
    ) -> None:
        self.by_host: dict[str, AgentConnection] = {}
        self._spec = spec
        self._environment = dict(environment)
        self._post = post
        config = spec.ssh_config
        self._options = SshOptions(config_path=None if config is None else Path(config))
        self._engine = engine
        by_ssh = functools.partial(connect, options=self._options)
        self._connect: Connect = by_ssh if engine is None else engine.connect
        self._logins = threading.Semaphore(_LOGINS)
        self._sender = Sender()
        self._relay = EntryRelay(0, ())
        self._leaving: list[AgentConnection] = []
        self._ending: list[AgentConnection] = []
        self._looked_at = time.monotonic()
        self._next_beat = 0.0

    @property
    def up(self) -> list[AgentConnection]:
        """Return the connections whose agent has sent its hello."""
        return [agent for agent in self.by_host.values() if agent.up]

    @property
    def usable(self) -> list[AgentConnection]:
        """Return the connections of hosts in the run and of those that leave it."""
        return [*self.by_host.values(), *self._leaving]

    def start(
        self, name: str, hosts: Mapping[str, Host], led: msg.LeaderIdentity, *, take_over: bool
    ) -> None:
        """Start the agent of a host.

        Args:
            name: name of the host, which may have been removed from the hostfile.
            hosts: hosts of the hostfile by name.
            take_over: whether workers of an earlier leader are kept; otherwise they are ended.
        """
        host, spec = hosts.get(name) or Host(name, slots=1), self._spec
        if len(hosts) > _MANY_HOSTS:
            sys.setswitchinterval(_LONG_TURN_S)
        hello = msg.LeaderHello(
            run_id=led.run_id,
            host=name,
            leader=led.leader,
            led_by=led.led_by,
            led_since=led.led_since,
            take_over=take_over,
            failure_timeout_s=spec.failure_timeout_s,
            leader_grace_s=spec.leader_grace_s,
            env=self._environment,
            cwd=spec.cwd,
            command=spec.command,
            run={**spec.as_dict(), "run_id": led.run_id},
            interface=spec.interface,
            local_address=self._own_address(host, hosts.values()),
            heartbeat_s=self.heartbeat_s(len(hosts)),
            preemption=spec.preemption,
            preemption_command=spec.preemption_command,
            options=msg.WorkerOptions(
                *(spec.heartbeat_s, spec.audit, spec.checkpoint_every_s, bool(spec.input_hosts)),
                on_not_finite=spec.on_not_finite,
                profile=-1 if spec.profile is None else spec.profile,
            ),
        )
        self.by_host[name] = AgentConnection(
            host, self._connect, spec.python, hello, self._post, self._logins, self._sender
        )

    def heartbeat_s(self, hosts: int) -> float:
        """Return the time between heartbeats of an agent [s], for a number of hosts."""
        spec = self._spec
        slow = min(hosts / _BEATS_PER_S, spec.failure_timeout_s / 3, _LONGEST_BEAT_S)
        return max(spec.heartbeat_s, slow)

    def _own_address(self, host: Host, others: Iterable[Host]) -> str:
        """Return the address by which ``others`` reach this machine, if ``host`` is this machine.

        Otherwise, or if all hosts are this machine, it is the loopback address. Agents of other
        hosts do not use it.
        """
        if self._engine is not None:
            return self._engine.address_towards(list(others))
        if is_local(host, self._options):
            for other in others:
                if not is_local(other, self._options):
                    return own_address_towards(other, self._options)
        return "127.0.0.1"

    def send(self, host: str, message: msg.LeaderToAgent) -> None:
        if host in self.by_host:
            self.by_host[host].send(message)

    def send_all(self, hosts: Iterable[str], message: msg.LeaderToAgent) -> None:
        """Send the same message to the agents of ``hosts`` that have one; it is encoded once."""
        line = encode(message)
        for host in hosts:
            if host in self.by_host:
                self.by_host[host].send_line(line)

    def pass_on(self, entry: msg.StoreEntry, origin: str, members: Sequence[Member]) -> None:
        """Send an entry of the rendezvous of a generation to the hosts of its other members.

        Args:
            origin: host that it comes from.
            members: members of the generation, by rank.
        """
        if self._relay.generation != entry.generation:
            self._relay = EntryRelay(entry.generation, members)
        for host, message in self._relay.add_entry(entry, origin):
            self.send(host, message)

    def beat(self, now: float, recorded_step: int | None) -> None:
        """Send a heartbeat to all agents when the next one is due."""
        if now >= self._next_beat:
            self._next_beat = now + _LEADER_BEATS * self.heartbeat_s(len(self.by_host))
            for agent in self.usable:
                agent.beat(recorded_step)

    def silence(self, now: float) -> dict[str, float] | None:
        """Return the time since each host's last message [s]; None if this process was paused.

        While it is paused (stopped, or starved of CPU time), messages arrive and are not read, so
        the time since the last call must not count as silence.
        """
        gap_s, self._looked_at = now - self._looked_at, now
        if gap_s > LOOK_S + self._spec.heartbeat_s:
            for agent in self.by_host.values():
                agent.last_heard = min(agent.last_heard + gap_s, now)
            return None
        return {name: now - agent.last_heard for name, agent in self.by_host.items() if agent.up}

    def drop_silent(
        self, silence: Mapping[str, float], timeout_s: float
    ) -> Iterator[tuple[str, str, float]]:
        """Drop the hosts of :meth:`silence` that are lost; yield host, cause and silence [s]."""
        for name, silent_s in silence.items():
            if silent_s > timeout_s:
                self.by_host.pop(name).drop()
                yield name, f"no sign of life for {duration_words(silent_s)}", silent_s

    def leave(self, host: str) -> None:
        """Take ``host`` out of the run; its agent ends with :meth:`release`."""
        self._leaving.append(self.by_host.pop(host))

    def release(self, is_needed: Callable[[AgentConnection], bool]) -> None:
        """Ask the agents of hosts that left to end their workers and themselves; does not wait.

        Args:
            is_needed: returns whether files are still to be fetched through a connection.
        """
        for agent in [*self._leaving]:
            if agent.is_gone or not is_needed(agent):
                self._leaving.remove(agent)
                agent.shutdown(_GRACE_S)
                self._ending.append(agent)

    def drop(self) -> None:
        """Close all connections and leave the workers running without this leader."""
        for agent in [*self.usable, *self._ending]:
            agent.drop()
        self.by_host.clear()
        self._leaving.clear()

    def end_agents(self) -> list[str]:
        """End all agents and their workers; return the hosts whose agent did not end in time."""
        agents = [*self.usable, *self._ending]
        for agent in agents:
            agent.shutdown(_GRACE_S)
        deadline = time.monotonic() + _END_S
        silent = []
        for agent in agents:
            if not agent.wait_gone(max(0.0, deadline - time.monotonic())):
                silent.append(agent.host.name)
                agent.drop()
        return silent
