"""Recognises the secrets of a run's environment in text, from digests that the run folder keeps.

The environment itself is never written to disk, and whoever reports a fault later has another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

_NAME = re.compile(r".*(KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH)", re.IGNORECASE)
_SHORTEST = 6
_BEGINS = re.compile(r"(?<![A-Za-z0-9])(?=\S)")
"""Where a secret may begin in text: not in the middle of a word."""


class Digests(msgspec.Struct):
    """Digests of secrets, by length; ``salt`` is of one leader of the run."""

    salt: bytes
    by_length: dict[int, set[bytes]]

    def write(self, path: Path) -> None:
        """Append them to a file, which only its owner can read."""
        with contextlib.suppress(OSError):  # a full disk is told by what is written next
            path.touch(mode=0o600)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(self) + b"\n")

    def find(self, text: str) -> set[str]:
        """Return the secrets that a text holds."""
        found = set()
        places = [each.start() for each in _BEGINS.finditer(text)] if self.by_length else []
        for length, digests in self.by_length.items():
            windows = {text[place : place + length] for place in places}
            found |= {each for each in windows if _digest(each, self.salt) in digests}
        return found


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Return the values of the variables whose names say that they are secret.

    >>> secrets_of({"WANDB_API_KEY": "swordfish", "PATH": "/usr/bin", "AUTH": "no"})
    {'swordfish'}
    """
    return {
        value
        for name, value in environment.items()
        if len(value) >= _SHORTEST and _NAME.match(name)
    }


def digests_of(environment: Mapping[str, str], salt: bytes) -> Digests:
    """Return the digests of an environment's secrets.

    >>> digests_of({"MY_TOKEN": "swordfish"}, b"salt").find("said 'swordfish', and no")
    {'swordfish'}
    """
    by_length: dict[int, set[bytes]] = {}
    for secret in secrets_of(environment):
        by_length.setdefault(len(secret), set()).add(_digest(secret, salt))
    return Digests(salt, by_length)


def read_digests(path: Path) -> list[Digests]:
    """Return the digests of all leaders of a run; a missing or damaged file has none."""
    try:
        return [msgspec.json.decode(line, type=Digests) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError):
        return []


def _digest(text: str, salt: bytes) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), key=salt, digest_size=16).digest()
