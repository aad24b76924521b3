"""Decodes what an agent sends, and checks by its hello whether its host can be used."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from hvd_elastic import __version__
from hvd_elastic.agent.spool import Spool
from hvd_elastic.control.progress import Activity
from hvd_elastic.errors import SshError
from hvd_elastic.leader.agents.process import AgentProcess
from hvd_elastic.run_events import Metrics
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import LineSplitter, MessageDecoder, ProtocolError


class LedHostError(SshError):
    """The host is led by another leader of the same run."""

    brief = "is led by another leader"


class UnfitHostError(SshError):
    """The host answers but cannot be used as it is, so trying again is useless."""

    brief = "cannot be used as it is"


_LATE_S = 1.0
"""Delay from which an event tells how late its metrics are, such as after a takeover [s]."""


class Incoming:
    """The messages of an agent, from its output.

    Args:
        process: the agent's process, which errors name.
        told: what the agent was told, by which its hello is checked.

    Attributes:
        hello: the agent's hello, which describes its host; None before it arrived.
    """

    def __init__(self, process: AgentProcess, told: msg.LeaderHello) -> None:
        self._process = process
        self._told = told
        name = f"host {process.host.name}: its agent"
        self._lines = LineSplitter(name)
        self._decoder: MessageDecoder[Any] = MessageDecoder(msg.AgentToLeader, name)
        self._activities: dict[str, Activity] = {}
        self.hello: msg.AgentHello | None = None
        self._apart_s = 0.0  # least difference of the clocks that was seen

    def take_activities(self) -> dict[str, Activity]:
        """Return the workers' activities in the last heartbeat; empty if there is no new one."""
        taken, self._activities = self._activities, {}
        return taken

    def messages(self, data: bytes) -> Iterator[msg.AgentToLeader]:
        """Yield the messages that a piece of output completes, except heartbeats.

        Raises:
            ProtocolError: the agent has sent an invalid message.
            UnfitHostError: its versions differ from the leader's, its host lacks the interface, or
                it names a folder that is not the run's.
            LedHostError: it has refused this leader, with the message before.
        """
        for line in self._lines.feed(data):
            try:
                message = self._decoder.decode(line)
            except ProtocolError:
                if self.hello is None and not self._is_hello_of_another_version(line):
                    continue  # output of a shell start-up file, not of the agent
                raise
            if isinstance(message, msg.AgentBeat):
                self._activities = message.workers
                continue
            if isinstance(message, msg.AgentHello):
                self._check_version(message)
                self._check_network(message)
                self._check_spool(message)
                self.hello = message
            self._note_delay(message)
            yield message
            if isinstance(message, msg.Refused):
                name, by = self._process.host.name, message.led.led_by
                raise LedHostError(f"host {name} is led by another leader, {by}")

    def _note_delay(self, message: msg.AgentToLeader) -> None:
        """Note how long metrics were on their way: after a takeover they come late, all at once."""
        if isinstance(message, msg.AgentHello):
            self._apart_s = time.time() - message.time
        elif isinstance(message, msg.WorkerSaid) and isinstance(message.message, Metrics):
            apart_s = time.time() - message.message.t
            self._apart_s = min(self._apart_s, apart_s)
            late_s = apart_s - self._apart_s
            message.message.late_s = round(late_s, 3) if late_s >= _LATE_S else 0.0

    def _is_hello_of_another_version(self, line: bytes) -> bool:
        """Return whether the line is a hello; raise UnfitHostError if its version differs."""
        try:
            greeting = msgspec.json.decode(line, type=msg.Greeting)
        except (ValueError, RecursionError):
            return False
        if greeting.ev != msg.AgentHello.__struct_config__.tag:
            return False
        self._check_version(greeting)
        return True

    def _check_version(self, hello: msg.Greeting | msg.AgentHello) -> None:
        name = self._process.host.name
        mine = ".".join(platform.python_version_tuple()[:2])
        theirs = ".".join(str(hello.python).split(".")[:2])
        if mine != theirs:
            raise UnfitHostError(
                f"host {name} has Python {hello.python} at {self._process.python}, the leader has "
                f"{platform.python_version()}. Use the same minor version everywhere, or name "
                "the right interpreter with --python."
            )
        if hello.version != __version__ or hello.protocol != msg.PROTOCOL:
            raise UnfitHostError(
                f"host {name} has hvd_elastic {hello.version} (protocol {hello.protocol}), the "
                f"leader has {__version__} (protocol {msg.PROTOCOL}). "
                "Install the same version on every host."
            )

    def _check_network(self, hello: msg.AgentHello) -> None:
        wanted, there = self._told.interface, hello.interfaces
        if wanted and wanted not in there:
            known = ", ".join(f"{each} ({address})" for each, address in there.items()) or "none"
            raise UnfitHostError(
                f"host {self._process.host.name} has no network interface {wanted} with an "
                f"address; it has {known}. "
                "Name one that every host has with --network-interface, or leave it out."
            )

    def _check_spool(self, hello: msg.AgentHello) -> None:
        try:
            Spool.check_path(hello.spool, self._told)
        except ValueError as error:
            raise UnfitHostError(
                f"host {self._process.host.name}: its agent says that it keeps files of the run in "
                f"{error}: that is not an agent of hvd_elastic. Look who has started it there"
            ) from None
