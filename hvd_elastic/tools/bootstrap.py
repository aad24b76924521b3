"""Install the leader's public ssh key on every host of a new cluster."""

from __future__ import annotations

import base64
import binascii
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_elastic.errors import LoginRefusedError, SshError
from hvd_elastic.hosts import ssh_config
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT, HostResult, Outcome, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.known_hosts import fingerprint
from hvd_elastic.hosts.ssh import SshOptions, connect, is_local

DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
# Limit for adding the key on one host.
INSTALL_S = 20.0
# The key comes on stdin and is compared by its second word, since the comment may differ. The lock
# is for hosts that share a home folder.
_INSTALL = """umask 077; mkdir -p ~/.ssh && read -r key && blob=$(echo "$key" | cut -d' ' -f2) &&
file=~/.ssh/authorized_keys && exec 9>> "$file" || exit
! command -v flock > /dev/null || flock 9
if grep -qF -- "$blob" "$file"; then echo there; else
if [ -s "$file" ] && [ -n "$(tail -c 1 "$file")" ]; then echo >&9; fi
printf '%s\n' "$key" >&9 && echo added; fi"""


@dataclass(frozen=True)
class LeaderKey:
    """The key by which this machine's user shall log in to the hosts.

    Attributes:
        path: file of the private key, which may not exist yet.
        line: the public key as a line of ``authorized_keys``; "" if there is none yet.
    """

    path: Path
    line: str = ""

    @property
    def fingerprint(self) -> str:
        """The fingerprint as printed by ``ssh-keygen -l``; "" if there is no key."""
        try:
            return fingerprint(base64.b64decode(self.line.split()[1], validate=True))
        except (IndexError, binascii.Error):
            return ""

    def make(self) -> LeaderKey:
        """Return the key; create it if there is none (ed25519, without passphrase).

        Raises:
            SshError: it cannot be created.
        """
        if self.line:
            return self
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            done = subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.path)],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode != 0:
                raise SshError(f"no key can be made in {self.path}: {done.stderr.strip()}")
            return _read_key(self.path)
        except OSError as error:
            raise SshError(f"no key can be made in {self.path}: {error.strerror}") from error


def find_leader_key(hosts: Sequence[Host], options: SshOptions) -> LeaderKey:
    """Return the key that ssh would use: that of the ssh configuration, or else the user's first.

    Args:
        hosts: the hosts; the ssh configuration is read for the first one.
        options: ssh options. Their ``identity`` is another key, by which hosts can be reached now.
    """
    config = ssh_config.load_ssh_config(options.config_path)
    named = config.lookup(hosts[0].name).get("identityfile", []) if hosts else []
    paths = [Path(name).expanduser() for name in (*named, *DEFAULT_KEYS)]
    for path in paths:
        if path.is_file() and path.with_name(f"{path.name}.pub").is_file():
            return _read_key(path)
    return LeaderKey(paths[0])


def bring_key(
    hosts: Sequence[Host],
    key: LeaderKey,
    options: SshOptions,
    ask_password: Callable[[Sequence[Host]], str | None],
    fanout: int = DEFAULT_FANOUT,
) -> list[HostResult[str]]:
    """Add the key to ``~/.ssh/authorized_keys`` on every host, and test that it is accepted.

    Args:
        hosts: the hosts, whose host keys are known by now.
        key: the leader's key.
        options: ssh options for logging in without that key.
        ask_password: called with the hosts that refuse a login without password; returns the
            password, or None.
        fanout: maximum number of hosts at a time.

    Returns:
        One result for each host, in order: "there" (it had the key), "added", or "local".
    """
    by_key = replace(options, identity=key.path)

    def bring(host: Host, stopper: Stopper, how: SshOptions) -> str:
        with connect(host, how) as connection:
            stopper.add_action(connection.close)
            line = key.line.encode() + b"\n"
            result = connection.run(["sh", "-c", _INSTALL], INSTALL_S, line)
        if result.text not in ("there", "added"):
            why = result.stderr.decode("utf-8", "replace").strip() or result.text
            raise SshError(f"host {host.name}: the key cannot be added: {why}")
        try:
            connect(host, by_key).close()
        except LoginRefusedError as error:
            raise SshError(
                f"host {host.name}: the key is in ~/.ssh/authorized_keys there, and its sshd does "
                "not take it. See AuthorizedKeysFile and StrictModes in its sshd_config (the home "
                f"folder must not be writable for others): {error}"
            ) from error
        return result.text

    def bring_to(some: Sequence[Host], how: SshOptions) -> dict[str, HostResult[str]]:
        limit_s = 2 * options.connect_timeout_s + INSTALL_S + 10.0
        results = fan_out(some, lambda host, stopper: bring(host, stopper, how), fanout, limit_s)
        return {result.host.name: result for result in results}

    remote = [host for host in hosts if not is_local(host, options)]
    shut: list[Host] = []
    open_: list[Host] = []
    for result in fan_out(remote, lambda host, _: _lets_in(host, options), fanout):
        (shut if result.value is False else open_).append(result.host)
    results = bring_to(open_, options)
    password = ask_password(shut) if shut else None
    results |= bring_to(shut, options if password is None else replace(options, password=password))
    local = {host.name: HostResult(host, Outcome.OK, 0.0, "local") for host in hosts}
    return [results.get(host.name, local[host.name]) for host in hosts]


def _lets_in(host: Host, options: SshOptions) -> bool:
    try:
        connect(host, options).close()
    except LoginRefusedError:
        return False
    return True


def _read_key(path: Path) -> LeaderKey:
    public = path.with_name(f"{path.name}.pub")
    try:
        return LeaderKey(path, public.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise SshError(f"{public} cannot be read: {error.strerror}") from error
