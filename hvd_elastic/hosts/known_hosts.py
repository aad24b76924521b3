"""Read OpenSSH's known_hosts files and check host keys as strictly as ssh does.

paramiko's own reader ignores ``@revoked`` and patterns, and its client compares only with the first
key it finds. So it accepts and refuses other keys than ssh. No network is used here.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import functools
import hashlib
import hmac
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hvd_elastic.own_files import private_folder

SSH_PORT = 22


class KeyState(Enum):
    """Result of looking up a server's key in the known_hosts files."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class HostKey:
    """Public key of a server: its type, such as ``ssh-ed25519``, and its bytes."""

    key_type: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    patterns: str
    key: HostKey
    marker: str
    path: Path
    line: int

    def removal(self, name: str) -> str:
        """Return the command that removes the keys of a host from the file of this line."""
        return f"ssh-keygen -R {shlex.quote(name)} -f {shlex.quote(str(self.path))}"

    def matches(self, name: str) -> bool:
        """Return whether the line is about that host, with ssh's hashes, wildcards and ``!``."""
        found = False
        for pattern in self.patterns.split(","):
            negated = pattern.startswith("!")
            if _matches(pattern.removeprefix("!"), name):
                if negated:
                    return False
                found = True
        return found


@dataclass(frozen=True)
class KnownHosts:
    """All keys in a number of known_hosts files."""

    keys: tuple[KnownKey, ...]

    @classmethod
    def load(cls, paths: Iterable[Path]) -> KnownHosts:
        """Read the files that are readable; lines without a valid key are skipped, as ssh does."""
        return _load(tuple((path, _state_of(path)) for path in paths))

    @functools.cached_property
    def _places(self) -> tuple[dict[str, list[int]], list[int]]:
        """Indices of lines with plain names, by name, and indices of all other lines."""
        plain: dict[str, list[int]] = {}
        others = []
        for place, key in enumerate(self.keys):
            if key.patterns.startswith("|") or any(letter in key.patterns for letter in "*?!"):
                others.append(place)
                continue
            for name in key.patterns.lower().split(","):
                plain.setdefault(name, []).append(place)
        return plain, others

    def lookup(self, name: str) -> tuple[KnownKey, ...]:
        """Return the lines about a host; ``name`` is a result of :func:`known_name`."""
        plain, others = self._places
        matching = [place for place in others if self.keys[place].matches(name)]
        places = sorted({*plain.get(name.lower(), ()), *matching})
        return tuple(self.keys[place] for place in places)

    def check(self, name: str, key: HostKey) -> tuple[KeyState, KnownKey | None]:
        """Return what is known of this key for this host, and the line that decides it."""
        about = self.lookup(name)
        for known in self.keys:
            # A revoked key is refused for every host that shows it.
            if known.marker == "@revoked" and known.key == key:
                return KeyState.REVOKED, known
        plain = [known for known in about if not known.marker]
        for known in plain:
            if known.key == key:
                return KeyState.KNOWN, known
        if name.startswith("["):
            # As in ssh, a key recorded for the host without a port is valid for any port.
            for known in self.lookup(name[1 : name.rindex("]")]):
                if not known.marker and known.key == key:
                    return KeyState.KNOWN, known
        # A key of another type too: the known types are asked for first, so a server that has not
        # changed would have shown one of them, and who pretends to be it can choose the type.
        same_type = [known for known in plain if known.key.key_type == key.key_type]
        return (KeyState.CHANGED, (same_type or plain)[0]) if plain else (KeyState.UNKNOWN, None)

    def key_types(self, name: str) -> tuple[str, ...]:
        """Return the types of the host's known keys, which to request from its server first."""
        bare = name[1 : name.rindex("]")] if name.startswith("[") else name
        about = [*self.lookup(name), *(self.lookup(bare) if bare != name else ())]
        return tuple(dict.fromkeys(known.key.key_type for known in about if not known.marker))


def known_name(host: str, port: int) -> str:
    """Return the name of a host in a known_hosts file.

    >>> known_name("gpu1", 22), known_name("gpu1", 2222)
    ('gpu1', '[gpu1]:2222')
    """
    return host.lower() if port == SSH_PORT else f"[{host.lower()}]:{port}"


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint, as printed by ``ssh-keygen -l``."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii")
    return f"SHA256:{digest.rstrip('=')}"


def remember(path: Path, entries: Iterable[tuple[str, HostKey]]) -> None:
    """Append (name, key) lines to a known_hosts file, creating it with mode 600 if needed.

    Raises:
        OSError: the file cannot be written.
    """
    if not path.parent.exists():
        private_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        # Two processes that write at the same time must not mix their lines.
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        torn = b""
        if size:
            file.seek(size - 1)
            torn = b"" if file.read(1) == b"\n" else b"\n"
        lines = [
            f"{name} {key.key_type} {base64.b64encode(key.blob).decode('ascii')}\n".encode("ascii")
            for name, key in entries
        ]
        file.write(torn + b"".join(lines))


def forget(path: Path, name: str) -> None:
    """Turn the lines about a host of a known_hosts file into comments.

    Only the first byte of each is written, so that nobody reads a part of the file meanwhile.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        at = 0
        for line in file.read().splitlines(keepends=True):
            known = _parse_line(line.decode(errors="replace"), path, 0)
            if known is not None and known.matches(name):
                file.seek(at)
                file.write(b"#")
            at += len(line)


def _state_of(path: Path) -> tuple[int, ...] | None:
    """Return values that change whenever the file's content changes; None if it is unreadable."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)


@functools.lru_cache(maxsize=8)
def _load(files: tuple[tuple[Path, tuple[int, ...] | None], ...]) -> KnownHosts:
    """Read the files; cached, so that they are read once for all hosts."""
    keys: list[KnownKey] = []
    for path, _ in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            key = _parse_line(line, path, number)
            if key is not None:
                keys.append(key)
    return KnownHosts(tuple(keys))


def _parse_line(line: str, path: Path, number: int) -> KnownKey | None:
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#"):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownKey(words[0], HostKey(words[1], blob), marker, path, number)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in pattern[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    # Not fnmatch, which would take the brackets of [host]:port for a set of characters.
    expression = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, name.lower()) is not None
