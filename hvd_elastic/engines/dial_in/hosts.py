"""Hosts that dial in: an engine for the leader, and the process that dials on each host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.dial_in import DialIn, DialInConnection, DialInHost
from hvd_elastic.hosts.hostfile import Host, write_hostfile
from hvd_elastic.hosts.transfer import send_file

_TAIL_BYTES = 4096
_ERROR = re.compile(
    r"^\s*(?:[\w.]+\.)?(?P<kind>\w+(?:Error|Exception)): (?P<text>\S.*)", re.MULTILINE
)
_MISSING = re.compile(r"No module named '(\w+)")


class HostProcess:
    """A process that dials back to the leader, and runs its commands on this host.

    It ends when the leader ends it, when its link is lost for good, with :meth:`close`, and with
    the process that has made this object.

    Args:
        invitation: of :class:`hvd_elastic.hosts.dial_in.DialIn`; it goes through a pipe.
        name: name to propose for the host, such as its address; the leader adds a number if another
            host has it.
        env: variables for all that runs here, beside those of this process.
    """

    def __init__(
        self,
        invitation: Mapping[str, Any],
        name: str,
        slots: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # what is imported here
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hvd_elastic.programs.dial_back"],
            env={**os.environ, **path},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # it decides itself when it ends
        )
        asked = {**invitation, "name": name, "slots": slots, "env": dict(env or {})}
        assert self._process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # its end says why
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        self._said = b""
        self._reading = threading.Thread(target=self._read, name="host process", daemon=True)
        self._reading.start()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait until the leader has no more use for this host.

        Raises:
            RunError: the link was lost, or the leader has another key; says which.
        """
        status = self._process.wait()
        self.close()
        if status:
            said = self._said.decode(errors="replace").strip()
            raise RunError(said or "the host process was killed")

    def terminate(self) -> None:
        """Give notice that the host goes away: its workers leave, as at SIGTERM under ssh."""
        self._process.terminate()

    def close(self) -> None:
        """End the process at once, with all that it has started."""
        assert self._process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._reading.join()

    def _read(self) -> None:
        assert self._process.stderr is not None, "started with a pipe"
        with self._process.stderr as pipe:
            while line := pipe.readline(_TAIL_BYTES):
                self._said = (self._said + line)[-_TAIL_BYTES:]


def last_error(said: str) -> str:
    r"""Return the last error that a text names, after which there may be advice; else its begin.

    >>> last_error("ray::map()\n  File …\nValueError: no such column x\nTo retry, configure …")
    'ValueError: no such column x'
    >>> last_error("hvd_elastic.errors.RunError: the link is lost\n")
    'the link is lost'
    """
    found = [*_ERROR.finditer(said)]
    if not found:
        return next(iter(said.strip().splitlines()), "no reason is given")
    kind, text = found[-1]["kind"], found[-1]["text"].rstrip()
    return text if kind == "RunError" else f"{kind}: {text}"


def missing_package(said: str) -> str | None:
    """Return the package that an import did not find; None: that was not the error.

    >>> missing_package("ModuleNotFoundError: No module named 'pyarrow.lib'")
    'pyarrow'
    """
    found = _MISSING.findall(said)
    return found[-1] if found else None


_LOOK_S = 0.5
"""Time between two looks at what is waited for, if no host has come or gone [s]."""
_PATIENCE_S = 30.0
"""How long hosts are waited for before that is said [s]."""
_START_S = 600.0
"""How long enough hosts are waited for [s]."""


class DialInHosts:
    """An engine whose hosts are those that have dialled in.

    Args:
        hostfile: path of the hostfile of the run, which is written when hosts come and go. It
            keeps its last hosts when all have gone, since a hostfile has at least one. None: the
            run needs none.
        address: address of this machine by which the hosts reach it.
        warn: called with the reason when a connection is refused.
        files: open files that each host gets into its folder before it is used, by name.
        again: what lets the hosts of an earlier leader dial in: ``grace_s``, ``port`` and
            ``certificate`` of :class:`hvd_elastic.hosts.dial_in.DialIn`.

    Attributes:
        dial_in: where the hosts dial in; its ``invitation`` is for them.

    Raises:
        OSError: the address is not one of this machine.
    """

    def __init__(
        self,
        hostfile: Path | None,
        address: str,
        warn: Callable[[str], None],
        files: Mapping[str, BinaryIO] | None = None,
        **again: Any,
    ) -> None:
        self._hostfile = hostfile
        self._address = address
        self._files = dict(files or {})
        self._warn = warn
        self._changed = threading.Condition()
        self._provided: dict[str, threading.Lock] = {}
        self._ready: set[str] = set()
        self._released: set[str] = set()
        """Hosts that were told to end, by identity."""
        self._not_replaced = 0
        self.dial_in = DialIn(address, self._write, warn, **again)

    @property
    def hosts(self) -> list[DialInHost]:
        """Return the hosts that are connected, without those that were told to end."""
        return [each for each in self.dial_in.hosts if each.identity not in self._released]

    @property
    def slots(self) -> int:
        """Return the number of slots of the hosts that are connected."""
        return sum(each.host.slots for each in self.hosts)

    def wait_for(
        self,
        slots: int,
        check: Callable[[], None],
        calm_s: float,
        least: int,
        limit_s: float = _START_S,
    ) -> None:
        """Wait until there are hosts with enough slots, which are in the hostfile then.

        Args:
            check: called now and then; raises an error if no more hosts are to come.
            calm_s: time without a new host after which ``least`` slots are enough [s].
            limit_s: how long they are waited for [s].

        Raises:
            RunError: they have not come in time.
        """
        began = came_at = time.monotonic()
        seen, is_told = 0, False
        with self._changed:
            while (now := self.slots) < slots:
                if now != seen:
                    came_at, seen = time.monotonic(), now
                if now >= least and time.monotonic() >= came_at + calm_s:
                    break
                check()
                waited_s = time.monotonic() - began
                there = f"{now} of {count(slots, 'process')} have a host"
                if waited_s > limit_s:
                    raise RunError(f"{there}, and no more have come in {limit_s:g} s")
                if waited_s > _PATIENCE_S and not is_told:
                    is_told = True
                    self._warn(f"{there} after {_PATIENCE_S:g} s; waiting for more")
                self._changed.wait(_LOOK_S)
            self._write()  # a host that has just dialled in is counted before its thread does it

    def release_host(self, name: str, *, is_last: bool = False) -> None:
        """Tell a host that was drained to end.

        The leader ends its agent as on any host that is no longer in the hostfile.

        Args:
            is_last: whether also the last one is released; it may be given back otherwise.
        """
        others = [each for each in self.hosts if each.host.name != name]
        for remote in self.hosts:
            if (others or is_last) and remote.host.name == name:
                with self._changed:
                    self._released.add(remote.identity)
                    self._not_replaced += 1
                self._write()
                with contextlib.suppress(OSError):  # it has gone by itself
                    remote.send({"end": True})

    def take_released(self) -> bool:
        """Return whether a host that has ended was released, so that no other takes its place."""
        with self._changed:
            was_released = self._not_replaced > 0
            self._not_replaced -= was_released
            return was_released

    def connect(self, host: Host) -> Connection:
        """Return a connection to a host, which has its files then.

        Raises:
            SshError: the host is not connected, or a file cannot be sent.
        """
        connection = self.dial_in.connect(host)
        with self._provided.setdefault(connection.remote.identity, threading.Lock()):
            if connection.remote.identity not in self._ready:
                self._provide(connection)
                self._ready.add(connection.remote.identity)
        return connection

    def _provide(self, connection: DialInConnection) -> None:
        for name, file in self._files.items():
            file.flush()
            # Opened anew, since each host reads it from the beginning.
            path = Path(f"/proc/self/fd/{file.fileno()}")
            send_file(connection, path, f"{connection.remote.folder}/{name}")

    def address_towards(self, hosts: list[Host]) -> str:
        """Return the address of this machine."""
        return self._address

    def close(self) -> None:
        """Tell all hosts that there is nothing more to do."""
        self.dial_in.close()

    def _write(self) -> None:
        """Write the hostfile; called when a host has come or gone, by several threads."""
        with self._changed:
            hosts = [each.host for each in self.hosts]
            if hosts and self._hostfile is not None:
                write_hostfile(self._hostfile, hosts)
            self._changed.notify_all()
