"""The process of a host that the leader cannot log in to: it dials back, and runs commands.

An engine (Spark, Ray) starts it on the host and hands it an invitation as one line of JSON on its
stdin, so the key appears neither on a command line nor in a file. It keeps a control connection to
the leader, over which the leader asks for commands. For each command this process opens a further
connection, which carries stdin, stdout, stderr, signals and the exit status.

It is the child subreaper (prctl(2)) of the commands: what one leaves behind, also in a session of
its own, ends with it.

It ends, with all that it has started, when the leader says so, when the link stays broken for
longer than the grace time of the invitation, and at once when its stdin ends: then the engine has
taken the host away. SIGTERM is passed on to the commands: the agent reports it as a notice.

Exit status: 0 the leader has ended it, or nobody listened from the beginning; 1 the link is lost;
2 the leader refused it or is not the leader.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from hvd_elastic.programs.hold_command import become_subreaper
from hvd_elastic.programs.processes import Process, descendants, end_processes
from hvd_elastic.programs.secure_stream import Kind, SecureStream, dial

PARENT_VARIABLE = "HVD_ELASTIC_HOST_PROCESS"
"""Variable with the id of this process, whose death ends the agent."""
FOLDER_VARIABLE = "HVD_ELASTIC_HOST_FOLDER"
"""Variable with a folder of this process, for files that its leader sends; it ends with it."""
CONTROL_PATIENCE_S = 10.0
"""Time after which the other end of a control connection counts as gone [s]."""
_REDIAL_S = 1.0
_OPEN_S = 30.0
"""How long the connection of a command is tried for [s]; its leader waits a little longer."""
_END_S = 15.0
"""How long commands get to end by themselves [s]: an agent ends its workers first."""
_TERM_S = 10.0
"""Time between TERM and KILL [s]."""
_LEFT_S = 2.0
"""The same for what commands have left behind [s]."""
_CHUNK_BYTES = 1 << 16


class _RefusedError(Exception):
    """The leader does not want this host, or is not the leader; says why."""


class HostProcess:
    """Runs commands for a leader.

    Args:
        invitation: what :meth:`hvd_elastic.hosts.dial_in.DialIn.invitation` has returned, and
            ``name`` and ``slots`` of this host, and ``env``, variables for the commands.
    """

    def __init__(self, invitation: dict[str, Any]) -> None:
        self._address: str = invitation["address"]
        self._port: int = invitation["port"]
        self._certificate: str = invitation["certificate"]
        self._grace_s: float = invitation["grace_s"]
        self._folder = tempfile.mkdtemp(prefix="hvd_elastic-host-")
        self._hello = {
            "control": secrets.token_hex(8),  # the same when this process dials again
            "name": invitation["name"],
            "slots": invitation["slots"],
            "python": sys.executable,
            "python_version": platform.python_version(),
            "folder": self._folder,
        }
        self._variables = {**os.environ, **invitation["env"]}
        folder = str(Path(sys.executable).parent)
        self._variables["PATH"] = f"{folder}:{self._variables.get('PATH', os.defpath)}"
        self._variables[PARENT_VARIABLE] = str(os.getpid())
        self._variables[FOLDER_VARIABLE] = self._folder
        # An engine's user may have no home; nothing of a run is needed here after it.
        self._variables.setdefault("HVD_ELASTIC_HOME", self._folder)
        self._commands: dict[str, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()
        """Held while a command is started, since it is a child before it is a known one."""
        self._ending = threading.Lock()
        """Held while that is ended which commands have left behind."""

    def run(self) -> int:
        """Serve the leader until it or the link ends; return the exit status."""
        become_subreaper()
        signal.signal(signal.SIGTERM, lambda *_: self._signal_all(signal.SIGTERM))
        threading.Thread(target=self._follow_parent, name="parent", daemon=True).start()
        try:
            return self._serve_and_redial()
        finally:
            self._end_left()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve_and_redial(self) -> int:
        lost_at, why, was_led = time.monotonic(), "", False
        while time.monotonic() < lost_at + self._grace_s:
            try:
                control = self._call(self._hello, CONTROL_PATIENCE_S)
            except (_RefusedError, ssl.SSLError) as error:
                self._end_commands()
                return self._failed(2, error)
            except OSError as error:
                if isinstance(error, ConnectionRefusedError) and not was_led:
                    return 0  # the engine was slower than the run, which is over
                why = str(error)
                time.sleep(_REDIAL_S)
                continue
            was_led = True
            # Where the connection goes, since a name may have several addresses.
            self._variables["HVD_ELASTIC_LEADER_ADDRESS"] = control.peer_address or self._address
            try:
                self._serve(control)
            except OSError as error:
                why = str(error)
            else:
                self._end_commands(_END_S)
                return 0
            finally:
                control.close()
            lost_at = time.monotonic()
        self._end_commands()
        return self._failed(1, f"the link to the leader is lost: {why}")

    def _failed(self, status: int, why: object) -> int:
        place = f"{self._address}:{self._port}"
        if isinstance(why, ssl.SSLError):
            why = f"it does not have the key of this run ({why.reason or why})"
        print(f"host process for the leader at {place}: {why}", file=sys.stderr)
        return status

    def _call(self, first: dict[str, Any], patience_s: float) -> SecureStream:
        """Return a new connection to the leader, which has answered its first message."""
        stream = dial(self._address, self._port, self._certificate)
        try:
            stream.send(Kind.MESSAGE, json.dumps(first).encode())
            answer = _message(stream)
            if "refused" in answer:
                raise _RefusedError(answer["refused"])
        except BaseException:
            stream.close()
            raise
        stream.has_begun(patience_s)
        return stream

    def _serve(self, control: SecureStream) -> None:
        """Start what the leader asks for, until it has no more.

        Raises:
            OSError: the connection is lost.
        """
        while "end" not in (message := _message(control)):
            if "signal" in message:
                # Not over the command's own connection, where it would wait behind unread input.
                popen = self._commands.get(message["signal"])
                if popen is not None:
                    _signal(popen, signal.Signals[f"SIG{message['name']}"])
                continue
            # In the main thread: the kernel ends the agent when the thread that began it ends.
            self._start(message["start"], message["command"])

    def _start(self, number: str, command: str) -> None:
        with self._starting:
            for known in [*self._commands]:
                if self._commands[known].poll() is not None:
                    del self._commands[known]
            popen = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._variables,
                bufsize=0,
                start_new_session=True,
            )
            self._commands[number] = popen
        threading.Thread(target=self._attend, args=(number, popen), daemon=True).start()

    def _attend(self, number: str, popen: subprocess.Popen[bytes]) -> None:
        """Connect a command to the leader, until both have ended."""
        try:
            stream = self._open(number)
        except (_RefusedError, OSError) as error:
            print(f"the connection of a command cannot be opened: {error}", file=sys.stderr)
            for pipe in (popen.stdin, popen.stdout, popen.stderr):
                assert pipe is not None, "started with three pipes"
                pipe.close()
            return
        threading.Thread(target=_pass_input, args=(stream, popen), daemon=True).start()
        pumps = [
            threading.Thread(target=_pass_output, args=(stream, kind, pipe), daemon=True)
            for kind, pipe in ((Kind.STDOUT, popen.stdout), (Kind.STDERR, popen.stderr))
        ]
        for pump in pumps:
            pump.start()
        status = popen.wait()
        with contextlib.suppress(OSError):
            stream.send(Kind.EXIT, str(128 - status if status < 0 else status).encode())
        self._end_left()
        for pump in pumps:
            pump.join()
        stream.cut()  # the thread that passes the input closes it

    def _open(self, number: str) -> SecureStream:
        """Return the connection of a command; what fails on a busy network is tried again."""
        deadline = time.monotonic() + _OPEN_S
        while True:
            try:
                return self._call({"command": number}, CONTROL_PATIENCE_S)
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_REDIAL_S)

    # -- ends ----------------------------------------------------------------------------------

    def _follow_parent(self) -> None:
        """End everything at once when the process that started this one has gone."""
        with contextlib.suppress(OSError):
            while os.read(0, _CHUNK_BYTES):
                pass
        end_processes(descendants, 0.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)

    def _signal_all(self, number: int) -> None:
        for popen in [*self._commands.values()]:
            _signal(popen, number)

    def _end_left(self) -> None:
        """End what commands that have ended have left behind, which this process has inherited."""

        def left() -> list[Process]:
            with self._starting:
                known = {popen.pid for popen in self._commands.values()}
                found = [each for each in descendants() if each.parent == os.getpid()]
            roots = [each for each in found if each.pid not in known]
            return [*roots, *descendants([each.pid for each in roots])] if roots else []

        with self._ending:
            for pid, _ in end_processes(left, _LEFT_S):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)  # a container's first process may not do it

    def _end_commands(self, patience_s: float = 0.0) -> None:
        """Wait for the commands to end, and end those that did not in time."""
        if not self._all_end_within(patience_s):
            self._signal_all(signal.SIGTERM)
            if not self._all_end_within(_TERM_S):
                self._signal_all(signal.SIGKILL)

    def _all_end_within(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        for popen in self._commands.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(max(0.0, deadline - time.monotonic()))
        return all(popen.poll() is not None for popen in self._commands.values())


def _signal(popen: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a command and what it has started, if it still runs."""
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, number)


def _message(stream: SecureStream) -> dict[str, Any]:
    kind, data = stream.receive()
    if kind is not Kind.MESSAGE:
        raise ConnectionError("the leader sent no message")
    message: dict[str, Any] = json.loads(data)
    return message


def _pass_input(stream: SecureStream, popen: subprocess.Popen[bytes]) -> None:
    assert popen.stdin is not None, "started with three pipes"
    try:
        while True:
            _, data = stream.receive()
            if not data:
                popen.stdin.close()
            else:
                with contextlib.suppress(BrokenPipeError, ValueError):  # it reads no more
                    view = memoryview(data)
                    while view:
                        view = view[popen.stdin.write(view) :]
    except OSError:
        pass  # the leader has closed the connection, or it is lost
    finally:
        popen.stdin.close()
        stream.close()


def _pass_output(stream: SecureStream, kind: Kind, pipe: Any) -> None:
    with contextlib.suppress(OSError), pipe:
        while data := pipe.read(_CHUNK_BYTES):
            stream.send(kind, data)
        stream.send(kind)


def main() -> None:
    """Read the invitation and serve its leader."""
    invitation = json.loads(sys.stdin.buffer.readline())
    sys.exit(HostProcess(invitation).run())


if __name__ == "__main__":
    main()
