"""A Ray cluster on the hosts of a hostfile, started and ended over ssh.

What is needed to reach and to end it is recorded on this machine before anything is started, in
``$HVD_ELASTIC_HOME/ray``. On the hosts, :mod:`hvd_elastic.programs.ray_node` does the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from hvd_elastic.config import home
from hvd_elastic.errors import RunError, SshError
from hvd_elastic.hosts.fanout import HostResult, Outcome, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.remote_python import run_script
from hvd_elastic.hosts.ssh import SshOptions, connect, is_local, own_address_towards
from hvd_elastic.own_files import private_folder
from hvd_elastic.programs.ray_node import START_S, TOKEN
from hvd_elastic.records.process_lock import lock_held
from hvd_elastic.replaced_files import write_whole

_LIMIT_S = START_S + 30.0
"""Time limit of what is done on a host [s]."""

_LEAST_STORE_BYTES = 75 * 1024 * 1024
"""Smallest object store that Ray accepts [bytes]."""


@dataclass(frozen=True)
class NodeSettings:
    """Settings that a node is started with.

    Attributes:
        python: interpreter with Ray on the hosts.
        port: port of the head; 0: a free one.
        store_bytes: size of the object store of each node [bytes]; None: Ray's choice, 30 % of the
            memory.
    """

    python: str
    port: int = 0
    store_bytes: int | None = None

    def options(self, host: Host) -> list[str]:
        """Return the options of ``ray start`` for a host.

        The slots of the hostfile are a resource, by which workers can be placed as under ssh.
        """
        words = [f"--resources={json.dumps({'slots': host.slots})}"] if host.slots else []
        if host.cpus is not None:
            words.append(f"--num-cpus={host.cpus}")
        if self.store_bytes is not None:
            words.append(f"--object-store-memory={max(self.store_bytes, _LEAST_STORE_BYTES)}")
        return words


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster that this user has started from a hostfile.

    Attributes:
        mark: value of a variable in the environment of all its processes.
        token: secret without which no process of Ray answers.
        hosts: hosts on which a node was started or may have been; the first is the head.
        address: address and port of the head; "": it is not known yet.
        client: address and port at which the head serves drivers that run elsewhere.
        settings: how nodes are started.
    """

    mark: str = field(default_factory=lambda: secrets.token_hex(6))
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    hosts: tuple[Host, ...] = ()
    address: str = ""
    client: str = ""
    settings: NodeSettings = NodeSettings("python3")

    @property
    def folder(self) -> str:
        """Folder on every host, of this cluster alone.

        Ray's sockets need a short path on a local file system; a home folder may be neither.
        """
        return f"/tmp/hvd-ray-{self.mark}"  # noqa: S108  # made exclusively, with mode 0700

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def variables(self) -> dict[str, str]:
        """Variables that a driver on one of the hosts needs."""
        return {"RAY_ADDRESS": self.address, **self._secret_at(f"{self.folder}/{TOKEN}")}

    def outside_variables(self, token_file: Path) -> dict[str, str]:
        """Return the variables that a driver elsewhere needs, given a file with the token."""
        return {"RAY_ADDRESS": f"ray://{self.client}", **self._secret_at(str(token_file))}

    @property
    def node_variables(self) -> dict[str, str]:
        return {
            **self._secret_at(f"{self.folder}/{TOKEN}"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    @staticmethod
    def _secret_at(path: str) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path}


class ClusterRecord:
    """The record of the cluster of one hostfile, and the lock of who changes it."""

    def __init__(self, hostfile: Path) -> None:
        path = hostfile.absolute()
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
        self._hostfile = path
        self._folder = home() / "ray" / f"{path.stem}-{digest}"

    @property
    def token_file(self) -> Path:
        return self._folder / TOKEN

    def locked(self, waiting: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Return the lock, without which two commands at once would start two clusters."""
        private_folder(self._folder)
        return lock_held(self._folder / "lock", waiting)

    def read(self) -> RayCluster | None:
        """Return the cluster; None if there is none.

        Raises:
            RunError: the record cannot be read.
        """
        path = self._folder / "cluster.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=RayCluster)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path}, the record of a Ray cluster, cannot be read: {error}"
            ) from error

    def require(self) -> RayCluster:
        """Return the cluster.

        Raises:
            RunError: there is none, or its record cannot be read.
        """
        found = self.read()
        if found is None or not found.address:
            raise RunError(
                f"no Ray cluster was started from {self._hostfile} on this machine. Start one "
                f"with: hvd-elastic ray up {self._hostfile}"
            )
        return found

    def write(self, cluster: RayCluster) -> None:
        """Record a cluster, for this user alone."""
        for name, text in (("cluster.json", json.dumps(asdict(cluster))), (TOKEN, cluster.token)):
            write_whole(self._folder / name, text, mode=0o600)

    def forget(self) -> None:
        for name in ("cluster.json", TOKEN):
            (self._folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Started:
    """A node of the cluster after ``up``.

    Attributes:
        address: its address, of the head with its port.
        ray, python: versions there.
        new: whether it was started now; otherwise it was up already.
        client: of the head, see :class:`RayCluster`.
    """

    address: str
    ray: str
    python: str
    new: bool
    client: str = ""


@dataclass(frozen=True)
class Looked:
    """State of a node: ``up``, ``broken`` (some of its processes have ended) or ``down``."""

    state: str
    processes: int
    bytes: int


def bring_up(
    record: ClusterRecord,
    hosts: Sequence[Host],
    ssh: SshOptions,
    settings: NodeSettings,
    fanout: int,
) -> Iterator[HostResult[Started]]:
    """Start a node on each host that has none, the head first.

    Yields:
        One result for each host as it ends. Without a head there are no others.

    Raises:
        RunError: the head was started alone, at an address that other hosts do not reach.
    """
    cluster = record.read() or RayCluster()
    before = cluster.hosts
    # Without an address no head has started, and the first of these hosts is to be it.
    every = [*before, *hosts] if cluster.address else [*hosts, *before]
    grown: dict[str, Host] = {}
    for host in every:
        grown.setdefault(host.name, host)
    alone = cluster.address.startswith("127.0.0.1:") and is_local(cluster.head, ssh)
    if alone and not all(is_local(host, ssh) for host in hosts):
        raise RunError(
            f"the head of this Ray cluster was started alone, at {cluster.address}, which other "
            "hosts do not reach. End it with hvd-elastic ray down HOSTFILE, then start it again"
        )
    cluster = replace(cluster, hosts=tuple(grown.values()), settings=settings)
    record.write(cluster)  # first, so that an interrupted start can be ended
    head = cluster.head

    def start(host: Host, stopper: Stopper, at: str | None) -> Started:
        answer = _ask(
            cluster,
            host,
            ssh,
            stopper,
            {
                "do": "start",
                "token": cluster.token,
                "head": at,
                "port": settings.port,
                "address": _own_address(host, hosts, ssh),
                "options": settings.options(host),
                "env": cluster.node_variables,
            },
        )
        return msgspec.convert(answer, Started)

    def drop_unreached(result: HostResult[Started]) -> None:
        """Forget a new host that was not reached: nothing was started there."""
        nonlocal cluster
        known = {host.name for host in before}
        if result.outcome is Outcome.UNREACHABLE and result.host.name not in known:
            left = tuple(host for host in cluster.hosts if host.name != result.host.name)
            cluster = replace(cluster, hosts=left)
            record.write(cluster)

    (first,) = fan_out([head], lambda host, stopper: start(host, stopper, None), 1, _LIMIT_S)
    if first.value is not None:
        cluster = replace(cluster, address=first.value.address, client=first.value.client)
        record.write(cluster)
    drop_unreached(first)
    if any(host.name == head.name for host in hosts) or not first.ok:
        yield first
    if first.ok:
        others = [host for host in hosts if host.name != head.name]
        at = cluster.address
        for result in fan_out(others, lambda host, stop: start(host, stop, at), fanout, _LIMIT_S):
            drop_unreached(result)
            yield result


def look_at(
    cluster: RayCluster, hosts: Sequence[Host], ssh: SshOptions, fanout: int
) -> Iterator[HostResult[Looked]]:
    """Yield the state of each node."""

    def describe_node(host: Host, stopper: Stopper) -> Looked:
        request = {"do": "look", "is_head": host.name == cluster.head.name}
        return msgspec.convert(_ask(cluster, host, ssh, stopper, request), Looked)

    return fan_out(hosts, describe_node, fanout, _LIMIT_S)


def take_down(
    record: ClusterRecord,
    cluster: RayCluster,
    hosts: Sequence[Host],
    ssh: SshOptions,
    fanout: int,
) -> Iterator[HostResult[int]]:
    """End the nodes on these hosts, and nothing else there; yield the number of their processes.

    The record is kept for hosts on which something may be left.
    """

    def end_node(host: Host, stopper: Stopper) -> int:
        answer = _ask(cluster, host, ssh, stopper, {"do": "end"})
        if left := ", ".join(map(str, answer["left"])):
            raise SshError(f"host {host.name}: processes {left} cannot be ended")
        return int(answer["ended"])

    left = {host.name: host for host in cluster.hosts}
    for result in fan_out(hosts, end_node, fanout, _LIMIT_S):
        if result.ok:
            left.pop(result.host.name, None)
            if left:
                record.write(replace(cluster, hosts=tuple(left.values())))
            else:
                record.forget()
        yield result


def _own_address(host: Host, hosts: Sequence[Host], ssh: SshOptions) -> str | None:
    """Return the address by which the others reach ``host``; None: the one that ssh reaches."""
    if not is_local(host, ssh):
        return None
    others = [other for other in hosts if not is_local(other, ssh)]
    return own_address_towards(others[0], ssh) if others else "127.0.0.1"


def _ask(
    cluster: RayCluster, host: Host, ssh: SshOptions, stopper: Stopper, request: dict[str, Any]
) -> Any:
    """Have ``ray_node`` do something on a host; return its answer.

    Raises:
        SshError: it could not; says why.
    """
    payload = {"cluster": cluster.mark, "folder": cluster.folder, **request}
    python = cluster.settings.python if request["do"] == "start" else "python3"
    with connect(host, ssh) as connection:
        stopper.add_action(connection.close)
        answer = run_script(connection, "ray_node", payload, _LIMIT_S, python)
    if answer.get("error"):
        raise SshError(f"host {host.name}: {answer['error']}")
    return answer
