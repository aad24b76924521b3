"""The hosts of a hostfile as a ``fabric.Group``, for fabfiles and Python programs."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import fabric
from fabric.exceptions import GroupException
from fabric.group import GroupResult
from fabric.runners import Result
from fabric.transfer import Result as TransferResult
from invoke.exceptions import CommandTimedOut, UnexpectedExit
from paramiko import SSHConfig

from hvd_elastic.errors import SshError, UsageError
from hvd_elastic.hosts.connection import SshOptions, watched
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT, HostResult, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host, Hostfile, parse_hostfile, parse_hosts
from hvd_elastic.hosts.ssh import SshConnection, is_local
from hvd_elastic.tools.copy.copying import (
    Copied,
    CopySettings,
    check_destination,
    check_source,
    copy_to_hosts,
)
from hvd_elastic.tools.run.commands import (
    CommandResult,
    CommandSettings,
    HowToRun,
    run_on_hosts,
    select_hosts,
)

if TYPE_CHECKING:
    from typing_extensions import Self


_OUTPUT_BYTES = 1 << 30
"""Limit of the output kept for each host; Fabric has none, so this is high."""

_HIDDEN: dict[bool | str | None, tuple[str, ...]] = {
    **dict.fromkeys((None, False), ()),
    **dict.fromkeys(("out", "stdout"), ("stdout",)),
    **dict.fromkeys(("err", "stderr"), ("stderr",)),
    **dict.fromkeys((True, "both"), ("stdout", "stderr")),
}


class HostConnection(fabric.Connection):
    """A ``fabric.Connection`` to one host that connects when it is first used.

    Host keys are verified and ``~/.ssh/config`` is read as by all tools of this project. Fabric's
    own configuration (``~/.fabric.yaml``, ``FABRIC_`` variables) is not used.
    """

    def __init__(self, host: Host, options: SshOptions | None = None) -> None:
        config = fabric.Config(ssh_config=SSHConfig(), lazy=True)
        super().__init__(host.name, user=host.user, port=host.port, config=config, gateway=False)
        # Fabric refuses to set attributes that its configuration does not know.
        self._set(at=host, options=options or SshOptions(), ours=None)

    def open(self) -> None:
        """Connect, unless connected already.

        Raises:
            HostUnreachableError, HostKeyError, SshError: as :func:`hvd_elastic.hosts.ssh.connect`;
                SshError also for this machine itself (use :meth:`local`).
        """
        if self.is_connected:
            return
        if is_local(self.at, self.options):
            raise SshError(f"host {self.at.name} is this machine: use local() of the connection")
        self.ours = SshConnection(self.at, self.options)
        self.client, self.transport = self.ours.client, self.ours.client.get_transport()

    def close(self) -> None:
        """Close the connection; further calls do nothing."""
        super().close()
        if self.ours is not None:
            self.ours.close()


class HostGroup(fabric.Group):
    """A group of hosts, on which commands run at the same time.

    Each method returns a ``fabric.GroupResult`` that maps each host's connection to its result. If
    anything fails on any host, ``fabric.exceptions.GroupException`` is raised after all hosts are
    done; its ``result`` has ``succeeded`` and ``failed``. Members are :class:`HostConnection`.

    Args:
        hosts: lines as in a hostfile: ``"node1"``, ``"me@node2 port=2222"``, ``"gpu[01-16]"``.
        options: ssh options.
        fanout: maximum number of hosts at a time.
        timeout_s: limit for :meth:`run` and :meth:`get` on each host [s]; None for no limit.

    Raises:
        HostfileError: a host cannot be parsed.

    >>> HostGroup("gpu[1-3]", "login")
    <HostGroup gpu1, gpu2, gpu3, login>
    """

    def __init__(
        self,
        *hosts: str,
        options: SshOptions | None = None,
        fanout: int = DEFAULT_FANOUT,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self.options = options or SshOptions()
        self.fanout = fanout
        self.timeout_s = timeout_s
        if hosts:
            self._add_hosts(parse_hosts("\n".join(hosts), "HostGroup"))

    @classmethod
    def from_hostfile(
        cls,
        path: str | Path,
        *,
        only: str | None = None,
        exclude: str | None = None,
        options: SshOptions | None = None,
        fanout: int = DEFAULT_FANOUT,
        timeout_s: float | None = None,
    ) -> Self:
        """Return a group of the hosts of a hostfile.

        Args:
            path: path of the hostfile.
            only: names of hosts to include, such as ``gpu[01-04],login,@spot``; None for all.
            exclude: names of hosts to leave out, in the same form.
            options, fanout, timeout_s: as for the class.

        Raises:
            HostfileError: the hostfile cannot be parsed; names path and line.
            UsageError: ``only`` or ``exclude`` has a name that is not in the hostfile.
        """
        group = cls(options=options, fanout=fanout, timeout_s=timeout_s)
        group._add_hosts(select_hosts(parse_hostfile(path), only, exclude))
        return group

    def _add_hosts(self, hosts: Iterable[Host] | Hostfile) -> None:
        self.extend(HostConnection(host, self.options) for host in hosts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(host.name for host in self.hosts)}>"

    @property
    def hosts(self) -> list[Host]:
        """The hosts, in the order of the hostfile."""
        return [member.at for member in self]

    @property
    def _members(self) -> dict[str, HostConnection]:
        return {member.at.name: member for member in self}

    def run(
        self,
        command: str,
        *,
        warn: bool = False,
        hide: bool | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        timeout: float | None = None,
        in_stream: IO[bytes] | None = None,
        sudo: bool = False,
    ) -> GroupResult:
        """Run a shell command on every host, as ``runclust`` does.

        If the caller is interrupted or dies, all that the command started on a host is ended.

        Args:
            command: shell text.
            warn: whether to accept an exit status other than 0.
            hide: output that is not printed: ``"out"``, ``"err"``, or True for both. Other lines
                are printed with the name of their host.
            env: variables to set for it; they do not appear on any command line.
            cwd: folder to run it in; "" for the user's home.
            timeout: limit for the command on each host, without connecting [s]; None for the
                group's limit.
            in_stream: binary file that the command on every host reads from the beginning.
            sudo: see :meth:`sudo`.

        Returns:
            A ``fabric.runners.Result`` for each host.

        Raises:
            GroupException: a host failed; its exceptions are ``UnexpectedExit``,
                ``CommandTimedOut`` or an :class:`~hvd_elastic.errors.SshError`.
        """
        limit_s = self.timeout_s if timeout is None else timeout
        settings = CommandSettings(
            HowToRun(dict(env or {}), cwd, sudo), self.fanout, limit_s, keep_bytes=_OUTPUT_BYTES
        )
        hidden = _HIDDEN[hide]
        shown = functools.partial(_print_lines, hidden=hidden)
        results = run_on_hosts(self.hosts, command, self.options, settings, in_stream, shown)

        def convert(member: HostConnection, found: HostResult[CommandResult]) -> object:
            if found.value is None:
                return _error(found)
            result = Result(
                connection=member,
                command=command,
                stdout=found.value.stdout.decode("utf-8", "replace"),
                stderr=found.value.stderr.decode("utf-8", "replace"),
                exited=found.value.exit_status,
                env=dict(env or {}),
                hide=hidden,
            )
            if found.value.timed_out:
                # A limit may have fractions of a second.
                return CommandTimedOut(result, limit_s)  # type: ignore[arg-type]
            return result if result.ok or warn else UnexpectedExit(result)

        return self._gather(results, convert)

    def sudo(self, command: str, **how: Any) -> GroupResult:
        """Run a command as root on every host, without asking for a password (``sudo -n``).

        Args:
            command: shell text.
            how: keyword arguments of :meth:`run`.
        """
        return self.run(command, sudo=True, **how)

    def put(
        self,
        local: str | Path | IO[bytes],
        remote: str | None = None,
        *,
        settings: CopySettings | None = None,
    ) -> GroupResult:
        """Copy a file or folder to every host, from host to host as ``copyclust`` does.

        The data leave this machine only once, and files that a host has already are not sent again.

        Args:
            local: a path, or a binary file object. A path that ends with ``/`` stands for what is
                in the folder, as with rsync.
            remote: absolute path or path under ``~/``; one that ends with ``/`` is the folder to
                copy into. None for the home folder.
            settings: settings of the copy.

        Returns:
            A ``fabric.transfer.Result`` for each host.

        Raises:
            UsageError: the source does not exist, or ``remote`` cannot be a destination.
            GroupException: a host failed.
        """
        with _as_path(local) as path:
            check_source(path)
            if not isinstance(local, str | Path) and (remote is None or remote.endswith("/")):
                raise UsageError("put: a file object needs the full remote path of its copy")
            remote = check_destination(path, "~/" if remote is None else remote)
            settings = settings or CopySettings(fanout=self.fanout)
            results = copy_to_hosts(self.hosts, path, remote, self.options, settings)

            def convert(member: HostConnection, found: HostResult[Copied]) -> object:
                if not found.ok:
                    return _error(found)
                return TransferResult(str(path), local, remote, remote, member)

            return self._gather(results, convert)

    def get(self, remote: str, local: str = "{host}/") -> GroupResult:
        """Copy a file from every host to this machine.

        Args:
            remote: path of the file on the hosts.
            local: path of the copy here, in which ``{host}`` stands for the name of each host.

        Returns:
            A ``fabric.transfer.Result`` for each host.

        Raises:
            GroupException: a host failed.
        """
        members = self._members

        def fetch(host: Host, stopper: Stopper) -> TransferResult:
            member = members[host.name]
            if is_local(host, self.options):
                return _copy_here(member, remote, local)
            stopper.add_action(member.close)
            member.open()
            with watched(member.ours, lambda: 0):
                return member.get(remote, local=local)

        results = fan_out(self.hosts, fetch, self.fanout, self.timeout_s)
        return self._gather(results, lambda _, found: found.value if found.ok else _error(found))

    def _gather(
        self,
        results: Iterable[HostResult[Any]],
        convert: Callable[[HostConnection, HostResult[Any]], object],
    ) -> GroupResult:
        members = self._members
        gathered = GroupResult()
        for found in results:
            member = members[found.host.name]
            gathered[member] = convert(member, found)
        if gathered.failed:
            raise GroupException(gathered)
        return gathered


def _error(found: HostResult[Any]) -> BaseException:
    return found.exception or SshError(found.error)


def _print_lines(host: Host, stream: str, text: str, *, hidden: tuple[str, ...]) -> None:
    if stream not in hidden:
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        lines = "".join(f"{host.name}: {line}\n" for line in text.split("\n"))
        (sys.stdout if stream == "stdout" else sys.stderr).write(lines)


def _copy_here(member: HostConnection, remote: str, local: str) -> TransferResult:
    """Copy a file on this machine, as ``get`` of a connection does from a host."""
    source = Path(remote).expanduser()
    target = Path(local.format(host=member.at.name))
    if local.endswith("/"):
        target /= source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
    return TransferResult(str(target.absolute()), local, str(source.absolute()), remote, member)


@contextlib.contextmanager
def _as_path(local: str | Path | IO[bytes]) -> Iterator[str | Path]:
    if isinstance(local, str | Path):
        yield os.path.expanduser(local)  # noqa: PTH111  # keeps the slash at its end
        return
    with tempfile.NamedTemporaryFile() as file:
        shutil.copyfileobj(local, file)
        file.flush()
        yield file.name
