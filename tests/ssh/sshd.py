"""A private sshd on a loopback address for tests: own host key, own user key, own ssh config."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.paths import LIMIT_S

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
AVAILABLE = Path(SSHD).exists() and shutil.which("ssh-keygen") is not None


def make_key(path: Path, key_type: str = "ed25519") -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", key_type, "-N", "", "-C", "test", "-f", str(path)], check=True
    )
    return path


def free_port(address: str = "127.0.0.1") -> int:
    """A free port below those that the kernel gives to connections, of which one could take it."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)  # seeded alike, two would draw one
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((address, port))
            return port


# One that does not know our key and would let us in by a password.
BY_PASSWORD = "PasswordAuthentication yes\nPubkeyAuthentication no\n"


def _version() -> tuple[int, ...]:
    """Return the version of OpenSSH here."""
    told = subprocess.run([SSHD, "-V"], capture_output=True, text=True).stderr
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", told)
    assert found is not None, told
    return tuple(map(int, found.groups()))


class Sshd:
    """One sshd; hosts of any name reach it through :meth:`write_config`.

    Args:
        folder: for its files.
        address: where it listens.
        home: the home folder of those who log in, whose authorized_keys it reads too.
        settings: lines of its configuration that hold in place of those below.
    """

    def __init__(
        self,
        folder: Path,
        address: str = "127.0.0.1",
        home: Path | None = None,
        settings: str = "",
    ) -> None:
        self.folder = folder
        self.address = address
        self.port = free_port(address)
        self.host_key = make_key(folder / "host_key")
        self.user_key = make_key(folder / "user_key")
        shutil.copy(f"{self.user_key}.pub", folder / "authorized_keys")
        self.config = folder / "sshd_config"
        self.config.write_text(
            f"{settings}ListenAddress {address}:{self.port}\n"
            f"HostKey {self.host_key}\n"
            f"AuthorizedKeysFile {folder / 'authorized_keys'}"
            + (f" {home}/.ssh/authorized_keys" if home else "")
            # Else bash reads ~/.bashrc for every command, which may take its time.
            + f"\nSetEnv SHLVL=1{f' HOME={home}' if home else ''}\n"
            "StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 200\n"
            "Subsystem sftp internal-sftp\n"
            # Tests fail to log in on purpose, and all their hosts are one server.
             + ("PerSourcePenalties no\n" if _version() >= (9, 8) else "")
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "sshd.log").open("ab") as log:
            process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(self.config)], stderr=log)
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                socket.create_connection((self.address, self.port), 1).close()
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                # sshd says nowhere that it listens; only a connection shows it.
                time.sleep(0.02)
            else:
                return process

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)

    def known_hosts_line(self) -> str:
        key = " ".join((self.host_key.with_suffix(".pub")).read_text().split()[:2])
        return f"[{self.address}]:{self.port} {key}\n"

    def write_config(self, path: Path, names: list[str], extra: str = "") -> Path:
        """An ssh config in which these names are this sshd, known by its key."""
        known = self.folder / "known_hosts"
        if not known.exists():
            known.write_text(self.known_hosts_line())
        with path.open("a") as file:
            file.write(
                f"Host {' '.join(names)}\n  HostName {self.address}\n  Port {self.port}\n"
                f"  UserKnownHostsFile {known}\n  IdentityFile {self.user_key}\n"
                f"  IdentitiesOnly yes\n{extra}\n"
            )
        return path
