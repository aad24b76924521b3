"""Reach the machines of a cloud over ssh: know their keys, check them, renew leases."""

from __future__ import annotations

import os
import subprocess
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hvd_elastic.engines.cloud.lease import renew_lease
from hvd_elastic.engines.cloud.provider import Machine
from hvd_elastic.engines.cloud.records import CloudFolder, Definition
from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.fanout import Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host, write_hostfile
from hvd_elastic.hosts.known_hosts import KeyState, forget, remember
from hvd_elastic.hosts.route import own_known_hosts
from hvd_elastic.hosts.ssh import connect, read_host_key
from hvd_elastic.programs.processes import descendants, end_processes, read_process

_CONNECT_S = 5.0
_LIMIT_S = 30.0
"""Time limit for all that is done on a machine at a time [s]."""


def _file_name(machine: Machine) -> str:
    """Return the id of a machine as the name of a file; an id such as ``zone/name`` has slashes."""
    return urllib.parse.quote(machine.id, safe="")


class UnfitError(SshError):
    """A machine that will never be able to train."""


class Reach:
    """Reaches the machines of a cloud.

    Args:
        definition: user, ssh configuration and slots of its machines.
    """

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        config = definition.ssh_config
        self.options = SshOptions(
            config_path=None if config is None else Path(config), connect_timeout_s=_CONNECT_S
        )
        self.unfit: set[str] = set()
        """Machines that will never be able to train, by id."""
        self._trusted = CloudFolder(definition.name).path / "trusted"
        """Machines whose host key was accepted once, by id: another key is refused from then on."""
        self._preparing: dict[str, subprocess.Popen[bytes]] = {}
        """Commands that prepare machines, by id; they stay when they have ended."""

    def host_of(self, machine: Machine) -> Host:
        """Return the line of a hostfile for a machine that has an address."""
        offer, asked = machine.offer, self._definition
        market = "spot" if offer.spot else "on-demand"
        return Host(
            machine.address,
            slots=asked.slots or offer.slots,
            user=asked.login or None,
            port=machine.port,
            price=offer.price,
            labels=tuple(each for each in (market, offer.type, offer.zone) if each),
        )

    def hosts_of(self, machines: Iterable[Machine]) -> list[Host]:
        """Return the lines of a hostfile for machines, in the order of their ids."""
        return [self.host_of(each) for each in sorted(machines, key=lambda each: each.id)]

    def renew(self, machines: Sequence[Machine], lease_s: float) -> Mapping[str, str]:
        """Renew the leases of machines, which also shows that they can be used.

        Returns:
            By the id of each machine, why it cannot be reached or used; empty: it can.
        """
        by_name = {each.address: each for each in machines if each.address}

        def visit(host: Host, stopper: Stopper) -> None:
            machine = by_name[host.name]
            trusted = self._trusted / _file_name(machine)
            if not trusted.exists():
                self._trust(host)
                self._trusted.mkdir(mode=0o700, exist_ok=True)
                trusted.touch()
            with connect(host, self.options) as connection:
                stopper.add_action(connection.close)
                # Before the lease, which a program of Python keeps.
                found = connection.run(["sh", "-c", "command -v python3"], _LIMIT_S)
                if found.exit_status < 0:
                    raise SshError(f"host {host.name}: the connection was lost")
                if not found.ok:
                    raise UnfitError(
                        f"host {host.name}: there is no python3: take an image that has Python"
                    )
                renew_lease(connection, lease_s)
            self._prepare(machine)

        hosts = [self.host_of(each) for each in by_name.values()]
        found = {each.id: "it has no address yet" for each in machines}
        for result in fan_out(hosts, visit, timeout_s=_LIMIT_S):
            machine = by_name[result.host.name]
            found[machine.id] = "" if result.ok else result.error
            if isinstance(result.exception, UnfitError):
                self.unfit.add(machine.id)
        return found

    @property
    def preparing(self) -> set[str]:
        """Machines whose preparation runs, by id."""
        return {each for each, process in [*self._preparing.items()] if process.poll() is None}

    def end_preparation(self, machine_id: str) -> None:
        """End the command that prepares a machine, if it runs, with all that it has started."""
        if machine_id in self.preparing:
            process = self._preparing[machine_id]
            pid = process.pid
            end_processes(
                lambda: filter(None, [read_process(pid), *descendants([pid])]), grace_s=0.0
            )
            process.wait()

    def _prepare(self, machine: Machine) -> None:
        """Have a new machine prepared by the user's command; return when that has succeeded.

        Raises:
            SshError: it is not done yet, or has failed.
        """
        command = self._definition.prepare
        if not command:
            return
        folder = CloudFolder(self._definition.name).path / "prepare"
        done = folder / f"{_file_name(machine)}.done"
        if done.exists():  # by an earlier command or leader; it may train by now
            return
        log = folder / f"{_file_name(machine)}.log"
        if machine.id not in self._preparing:
            folder.mkdir(mode=0o700, exist_ok=True)
            hosts = folder / f"{_file_name(machine)}.hosts"
            write_hostfile(hosts, [self.host_of(machine)])
            path = self._definition.ssh_config
            config = {} if path is None else {"HVD_ELASTIC_SSH_CONFIG": path}
            with log.open("wb") as file:
                self._preparing[machine.id] = subprocess.Popen(
                    ["/bin/sh", "-c", command],
                    env={**os.environ, **config, "HOSTFILE": str(hosts)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
        status = self._preparing[machine.id].poll()
        if status is None:
            raise SshError(f"host {machine.address}: it is being prepared, see {log}")
        if status:
            raise UnfitError(
                f"host {machine.address}: the command that prepares it ended with exit status "
                f"{status}, see {log}"
            )
        done.touch()

    def _trust(self, host: Host) -> None:
        """Accept the key of a machine that has just started, in place of an earlier one's.

        The address may have belonged to another machine before.
        """
        name, key, state, known = read_host_key(host, self.options)
        path = own_known_hosts()
        if state is KeyState.CHANGED and known is not None and known.path == path:
            forget(path, name)
            state = KeyState.UNKNOWN
        if state is KeyState.UNKNOWN:
            remember(path, [(name, key)])
