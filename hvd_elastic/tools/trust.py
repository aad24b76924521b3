"""Accept unknown host keys after showing them to the user once; changed keys are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.fanout import HostResult, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.known_hosts import HostKey, KeyState, KnownKey, remember
from hvd_elastic.hosts.ssh import (
    SshOptions,
    in_order_of_jumps,
    is_local,
    own_known_hosts,
    read_host_key,
)


class TrustState(Enum):
    """State of a host's key after :func:`trust_hosts`."""

    LOCAL = "local"  # this machine: no ssh, no key
    KNOWN = "known"  # its key was known before
    ACCEPTED = "accepted"
    DECLINED = "declined"  # shown and not accepted
    REFUSED = "refused"  # changed or revoked; the user must resolve that
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class ShownKey:
    """Key that a host showed.

    Attributes:
        host: name of the host in the hostfile (or of a jump host).
        state: whether the key is trusted now.
        name: name of the host in known_hosts, "" if it showed no key.
        key: its key, None if it showed none.
        message: why it is refused or unreachable.
    """

    host: str
    state: TrustState
    name: str = ""
    key: HostKey | None = None
    message: str = ""

    @property
    def fingerprint(self) -> str:
        return self.key.fingerprint if self.key else ""


def trust_hosts(
    hosts: Sequence[Host],
    options: SshOptions,
    confirm: Callable[[list[ShownKey]], bool],
    fanout: int = 64,
    trusted: Callable[[list[ShownKey]], None] = lambda _: None,
) -> list[ShownKey]:
    """Read the hosts' keys and add unknown ones to this project's known_hosts.

    Jump hosts of the ssh configuration come first, since their keys must be known before the hosts
    behind them can be reached.

    Args:
        hosts: hosts of a hostfile.
        confirm: called with the unknown keys, if any; returns whether to accept them.
        fanout: maximum number of hosts at a time.
        trusted: called with the entries of jump hosts before the hosts behind them are looked at,
            then with those of the others.

    Returns:
        One entry for each host: jump hosts, the others in the hostfile's order, this machine.

    Raises:
        SshError: known_hosts cannot be written, or the ssh configuration cannot be used.
    """
    remote = [host for host in hosts if not is_local(host, options)]
    shown = []
    for group in in_order_of_jumps(remote, options):
        found = _trust(group, options, confirm, fanout)
        trusted(found)
        shown += found
    local = [ShownKey(host.name, TrustState.LOCAL) for host in hosts if host not in remote]
    trusted(local)
    return shown + local


def _trust(
    hosts: Sequence[Host],
    options: SshOptions,
    confirm: Callable[[list[ShownKey]], bool],
    fanout: int,
) -> list[ShownKey]:
    results = {
        result.host.name: _assess(result)
        for result in fan_out(hosts, lambda host, _: read_host_key(host, options), fanout)
    }
    shown = [results[host.name] for host in hosts]
    unknown = [entry for entry in shown if entry.state is TrustState.DECLINED]
    if unknown and confirm(unknown):
        _accept(unknown, own_known_hosts())
        shown = [
            ShownKey(entry.host, TrustState.ACCEPTED, entry.name, entry.key)
            if entry.state is TrustState.DECLINED
            else entry
            for entry in shown
        ]
    return shown


def _assess(result: HostResult[tuple[str, HostKey, KeyState, KnownKey | None]]) -> ShownKey:
    if result.value is None:
        return ShownKey(result.host.name, TrustState.UNREACHABLE, message=result.error)
    name, key, state, known_key = result.value
    if state in (KeyState.CHANGED, KeyState.REVOKED):
        assert known_key is not None, "a line says so"
        message = (
            f"the key is {state.value}: see {known_key.path}, line {known_key.line}. If the host "
            f"was set up again, remove the old key with: {known_key.removal(name)}  and try again"
        )
        return ShownKey(result.host.name, TrustState.REFUSED, name, key, message)
    known = TrustState.KNOWN if state is KeyState.KNOWN else TrustState.DECLINED
    return ShownKey(result.host.name, known, name, key)


def _accept(shown: Sequence[ShownKey], path: Path) -> None:
    entries = {(entry.name, entry.key) for entry in shown if entry.key is not None}
    try:
        remember(path, [(name, key) for name, key in sorted(entries, key=lambda pair: pair[0])])
    except OSError as error:
        raise SshError(
            f"{path} cannot be written: {error.strerror}. Set HVD_ELASTIC_HOME to a folder of yours"
        ) from error
