"""Connect to a host: ssh configuration, jump hosts, socket, host key, authentication, deadline.

This adds what paramiko does not do: host keys are verified before anything is sent, an attempt ends
within its deadline, small packets are sent at once, and the user is never asked for a password.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.config import home
from hvd_elastic.errors import (
    HostKeyError,
    HostUnknownError,
    HostUnreachableError,
    LoginRefusedError,
    SshError,
    StrangerError,
)
from hvd_elastic.hosts import ssh_config
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.known_hosts import HostKey, KeyState, KnownHosts, known_name
from hvd_elastic.own_files import check_configuration, check_owner

if TYPE_CHECKING:
    import paramiko


# More than this can only be a ProxyJump that leads back to itself.
MAX_JUMPS = 8
SSH_PORT = 22
# paramiko's own timeouts can expire this much before the deadline.
DEADLINE_SLACK_S = 0.02
IDLE_WAKE_S = 5.0
# Interval of keepalive messages; gateways drop connections that are idle for minutes.
KEEPALIVE_S = 15
SILENCE_MS = 60_000
"""A connection that does not answer for this time is lost."""


def own_known_hosts() -> Path:
    """Return the path of this project's known_hosts file, written by ``hvd-elastic trust``."""
    return home() / "known_hosts"


def _check_own_known_hosts() -> None:
    """Raise HostKeyError if other users can write this project's known_hosts, or replace it."""
    path = own_known_hosts()
    try:
        for each in (path, path.parent):
            check_owner(each)
            check_configuration(each)
    except OSError:
        pass  # there is none
    except StrangerError as error:
        raise HostKeyError(f"no host key in {path} is trusted: {error}") from None


@dataclass
class Attempt:
    """One attempt to connect, with the sockets to close when its time is over."""

    host: Host
    options: SshOptions
    deadline: float
    where: str = ""
    sockets: list[Any] = field(default_factory=list)
    expired: bool = False

    def remaining(self) -> float:
        # A timeout of 0 would mean "do not block" for a socket.
        return max(0.001, self.deadline - time.monotonic())

    def expire(self) -> None:
        self.expired = True
        for sock in self.sockets:
            with contextlib.suppress(OSError, EOFError):
                # Only shutdown wakes a thread that is blocked in recv; closing does not.
                if isinstance(sock, socket.socket):
                    sock.shutdown(socket.SHUT_RDWR)
                else:
                    sock.close()


@contextlib.contextmanager
def attempting(host: Host, options: SshOptions) -> Iterator[Attempt]:
    """Limit the time of an attempt to connect, and turn its failures into this project's errors."""
    # paramiko would log tracebacks of failures that are reported as errors here.
    logger = logging.getLogger("paramiko")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    attempt = Attempt(host, options, time.monotonic() + options.connect_timeout_s)
    # paramiko has a timeout for each phase but none for all together: a server that sends one byte
    # per second would block the caller for minutes.
    timer = threading.Timer(options.connect_timeout_s, attempt.expire)
    timer.daemon = True
    timer.start()
    try:
        yield attempt
    except Exception as error:
        # paramiko's own timeouts expire at the same time and raise other errors.
        if time.monotonic() >= attempt.deadline - DEADLINE_SLACK_S:
            attempt.expired = True
        if isinstance(error, SshError) and not attempt.expired:
            raise
        raise _explain(error, attempt) from error
    finally:
        timer.cancel()
    if attempt.expired:
        # The login succeeded, but the connection was closed at the deadline.
        raise _explain(TimeoutError(), attempt)


def _explain(error: Exception, attempt: Attempt) -> SshError:
    """Return this project's error for an error of the network or of paramiko."""
    from paramiko import ssh_exception

    host, options = attempt.host, attempt.options
    where = f"host {host.name}" + (f" ({attempt.where})" if attempt.where else "")
    port_advice = "check the name and port (port= in the hostfile, or the ssh configuration)"
    if isinstance(error, HostKeyError):
        return error
    if attempt.expired or isinstance(error, TimeoutError):
        return HostUnreachableError(
            f"{where}: no answer within {options.connect_timeout_s:g} s. "
            f"Is it up, and does no firewall drop the connection? Otherwise {port_advice}"
        )
    if isinstance(error, socket.gaierror):
        return HostUnknownError(
            f"{where}: the name cannot be looked up ({error.strerror}). Fix the hostfile, or give "
            "the host a HostName in the ssh configuration"
        )
    if isinstance(error, ConnectionRefusedError):
        return HostUnreachableError(
            f"{where}: connection refused; no ssh server listens there. Start sshd on it, or "
            f"{port_advice}"
        )
    if isinstance(error, ssh_exception.PasswordRequiredException):
        return SshError(
            f"{where}: the private key is locked by a passphrase. Load it with ssh-add and try "
            "again; nobody is asked for passwords here"
        )
    if isinstance(error, ssh_exception.AuthenticationException) or "authentication" in str(error):
        return LoginRefusedError(
            f"{where}: refused to log in {_user_of(attempt)} with any key ({error}). "
            f"'ssh -o BatchMode=yes {host.target} true' must work: put your public key into its "
            "~/.ssh/authorized_keys (for all hosts: checkclust HOSTFILE --bootstrap), or give "
            "another key with --identity"
        )
    if isinstance(error, ssh_exception.ChannelException):
        return HostUnreachableError(f"{where}: the jump host cannot reach it ({error.text})")
    if isinstance(error, (ssh_exception.SSHException, EOFError)):
        cause = str(error) or "the connection was closed"
        return HostUnreachableError(
            f"{where}: no ssh connection ({cause}). Does an ssh server answer there? "
            f"Otherwise {port_advice}; a server at its limit (MaxStartups) wants a smaller "
            "--fanout, one that puts off who has failed to log in (PerSourcePenalties) some time"
        )
    if isinstance(error, OSError):
        return HostUnreachableError(f"{where}: {error.strerror or error}. Is it up? {port_advice}")
    return SshError(f"{where}: {type(error).__name__}: {error}")


def _user_of(attempt: Attempt) -> str:
    user = attempt.where.partition("@")[0] if "@" in attempt.where else attempt.host.user
    return f"user {user or getpass.getuser()}"


class Route:
    """The way to a host: ssh configuration, jump hosts, socket and known keys."""

    def __init__(self, host: Host, options: SshOptions, attempt: Attempt, depth: int = 0) -> None:
        from paramiko import SSHClient

        if depth > MAX_JUMPS:
            raise SshError(
                f"host {host.name}: more than {MAX_JUMPS} jump hosts. Does a ProxyJump of the ssh "
                "configuration lead back to itself?"
            )
        self.host = host
        self.options = options
        self.attempt = attempt
        self.depth = depth
        entry = ssh_config.load_ssh_config(
            options.config_path, host.name, host.port, host.user
        ).lookup(host.name)
        self.entry: dict[str, Any] = entry
        self.address = str(entry.get("hostname", host.name))
        self.port = int(entry.get("port", SSH_PORT))
        self.user = str(entry.get("user") or getpass.getuser())
        self.client = SSHClient()
        self.known_name = known_name(entry.get("hostkeyalias", self.address), self.port)
        if "hostkeyalias" in entry:
            self.known_name = str(entry["hostkeyalias"]).lower()
        _check_own_known_hosts()
        self.known = KnownHosts.load([own_known_hosts(), *ssh_config.known_hosts_files(entry)])
        self.jump = _last_jump(host, str(entry.get("proxyjump", "none")))
        self.gateway: Route | None = None
        self.sock: Any = None
        attempt.where = f"{self.user}@{self.address} port {self.port}"

    def open_socket(self) -> None:
        """Open a socket to the host's sshd, or a channel through its jump hosts."""
        command = str(self.entry.get("proxycommand", "none"))
        if self.jump is not None:
            self.sock = self._open_through(self.jump)
        elif command.lower() != "none":
            from paramiko import ProxyCommand

            self.sock = ProxyCommand(command)
        else:
            self.sock = _open_tcp(self.address, self.port, self.attempt)
        self.attempt.sockets.append(self.sock)

    def _open_through(self, jump: Host) -> Any:
        where = self.attempt.where
        options = replace(self.options, password=None)  # it was asked for the host, not for this
        self.gateway = Route(jump, options, self.attempt, self.depth + 1)
        self.gateway.open_socket()
        self.gateway.log_in()
        self.attempt.where = where
        transport = self.gateway.client.get_transport()
        assert transport is not None, "it has logged in"
        return transport.open_channel(
            "direct-tcpip",
            (self.address, self.port),
            ("127.0.0.1", 0),
            timeout=self.attempt.remaining(),
        )

    def make_transport(self, sock: Any, **settings: Any) -> paramiko.Transport:
        """Return a transport that prefers host keys of known types.

        paramiko's order of key exchanges stays. It begins with curve25519 (and its post-quantum
        form if both sides have it), which costs the leader much less than OpenSSH's sntrup761.
        """
        from hvd_elastic.hosts.ordered_channel import OrderedTransport

        transport = OrderedTransport(sock, **settings)
        # Keepalives prevent gateways from dropping an idle connection. They also give
        # TCP_USER_TIMEOUT data to wait for: a cut cable shows after one minute instead of 15.
        transport.set_keepalive(KEEPALIVE_S)
        security = transport.get_security_options()
        wanted = []
        for key_type in self.known.key_types(self.known_name):
            rsa = key_type == "ssh-rsa"
            wanted += ["rsa-sha2-512", "rsa-sha2-256"] if rsa else [key_type]
        offered = tuple(security.key_types)
        first = [key_type for key_type in wanted if key_type in offered]
        security.key_types = tuple(dict.fromkeys([*first, *offered]))
        # GCM ciphers process the data once, others twice (cipher and MAC).
        ciphers = tuple(security.ciphers)
        gcm = [cipher for cipher in ciphers if "gcm" in cipher]
        security.ciphers = tuple(dict.fromkeys([*gcm, *ciphers]))
        return transport

    def log_in(self) -> None:
        """Exchange keys, verify the host key, and authenticate."""
        import paramiko

        identities = [self.options.identity] if self.options.identity else []
        identities += [Path(name).expanduser() for name in self.entry.get("identityfile", [])]
        only = str(self.entry.get("identitiesonly", "no")).lower() == "yes"
        existing = [path for path in identities if path is not None and path.is_file()]
        agent = paramiko.Agent() if only and existing else None
        self.client.set_missing_host_key_policy(_make_policy(self))
        remaining = self.attempt.remaining()
        try:
            self.client.connect(
                self.address,
                self.port,
                self.user,
                self.options.password,
                _find_agent_key(agent, existing) if agent else None,
                [str(path) for path in existing] or None,
                remaining,
                allow_agent=not only,
                look_for_keys=not only,
                sock=self.sock,
                banner_timeout=remaining,
                auth_timeout=remaining,
                channel_timeout=max(remaining, 10.0),
                transport_factory=self.make_transport,
            )
        finally:
            if agent is not None:
                agent.close()
        if isinstance(self.sock, socket.socket):
            # This is how often paramiko's idle thread checks whether a keepalive is due. Its
            # default of 0.1 s would use several percent of a core for 128 hosts.
            self.sock.settimeout(IDLE_WAKE_S)

    def close(self) -> None:
        """Close the connection, then those to its jump hosts."""
        if isinstance(self.sock, socket.socket):
            # Without this, paramiko waits until its thread wakes up by itself.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        self.client.close()
        if self.sock is not None:
            with contextlib.suppress(OSError, EOFError):
                self.sock.close()
        if self.gateway is not None:
            self.gateway.close()


@dataclass(frozen=True)
class _Jump(Host):
    """A jump host, itself reached through the one before it in the same ProxyJump."""

    before: _Jump | None = None


def _last_jump(host: Host, text: str) -> _Jump | None:
    """Return the jump host that leads to a host.

    Args:
        text: its ProxyJump in the ssh configuration; "none" or hosts with commas between them.

    Raises:
        SshError: a jump host is not valid.
    """
    last = host.before if isinstance(host, _Jump) else None
    if last is not None:
        return last  # as ssh has it, this counts more than a ProxyJump of its own
    for part in text.split(",") if text.lower() != "none" else []:
        user, _, rest = part.strip().removeprefix("ssh://").rpartition("@")
        name, _, port = rest.rpartition(":") if rest.count(":") == 1 else (rest, "", "")
        try:
            last = _Jump(
                name.strip("[]"), user=user or None, port=int(port) if port else None, before=last
            )
        except ValueError as error:
            raise SshError(
                f"host {host.name}: ProxyJump '{part}' of the ssh configuration: {error}"
            ) from error
    return last


def _make_policy(route: Route) -> Any:
    """Return the policy that paramiko calls for every key, since its own known hosts stay empty."""
    import paramiko

    class VerifyPolicy(paramiko.MissingHostKeyPolicy):
        def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
            _verify(route, HostKey(key.get_name(), key.asbytes()))

    return VerifyPolicy()


def _verify(route: Route, key: HostKey) -> None:
    state, known = route.known.check(route.known_name, key)
    name = route.host.name
    shown = f"{key.key_type} {key.fingerprint}"
    if state is KeyState.KNOWN:
        return
    if state is KeyState.REVOKED and known is not None:
        raise HostKeyError(
            f"host {name}: its key {shown} is marked as revoked in {known.path}, "
            f"line {known.line}. Nothing was sent to it"
        )
    if state is KeyState.CHANGED and known is not None:
        raise HostKeyError(
            f"host {name} ({route.known_name}): THE HOST KEY HAS CHANGED. It shows {shown}; "
            f"{known.path}, line {known.line} has {known.key.key_type} {known.key.fingerprint}. "
            "Somebody may be "
            "listening in; nothing was sent to it. If the host was set up again, remove the old "
            f"key with: {known.removal(route.known_name)}  "
            "and accept the new one with: hvd-elastic trust HOSTFILE"
        )
    raise HostKeyError(
        f"host {name} ({route.known_name}): unknown host key {shown}. Compare it with the "
        "host's own (on it: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub) and accept it with: "
        "hvd-elastic trust HOSTFILE"
    )


def _find_agent_key(agent: paramiko.Agent, identities: list[Path]) -> Any:
    """Return the ssh agent's key for one of these files (for IdentitiesOnly), or None."""
    wanted = set()
    for path in identities:
        with contextlib.suppress(OSError, IndexError, UnicodeDecodeError):
            wanted.add(path.with_name(f"{path.name}.pub").read_text(encoding="utf-8").split()[1])
    return next((key for key in agent.get_keys() if key.get_base64() in wanted), None)


def _open_tcp(name: str, port: int, attempt: Attempt) -> socket.socket:
    addresses = _look_up(name, port, attempt)
    last: OSError | None = None
    for index, (family, address) in enumerate(addresses):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(attempt.remaining() / (len(addresses) - index))
            sock.connect(address)
        except OSError as error:
            sock.close()
            last = error
            continue
        # paramiko sends small packets and waits for answers. With Nagle's algorithm and delayed
        # acknowledgements each costs 40 ms (a login takes 72, not 18 ms, a command 48, not 2 ms).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_QUICKACK"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
        return sock
    assert last is not None, "a look-up gives at least one address"
    raise last


def _look_up(name: str, port: int, attempt: Attempt) -> list[tuple[int, Any]]:
    """Return the addresses of a name, within the remaining time; the resolver has no timeout."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        if address.version == 4:
            return [(socket.AF_INET, (name, port))]
    found: list[tuple[int, Any]] = []
    failed: list[OSError] = []

    def ask() -> None:
        try:
            for family, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
                found.append((family, address))
        except OSError as error:
            failed.append(error)
        except UnicodeError:
            failed.append(socket.gaierror(socket.EAI_NONAME, "not a host name"))

    asking = threading.Thread(target=ask, name=f"look up {name}", daemon=True)
    asking.start()
    asking.join(attempt.remaining())
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError
    return found
