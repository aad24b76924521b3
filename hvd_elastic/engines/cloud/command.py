"""A provider of the user's: programs that start, list and stop machines, with JSON in and out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from hvd_elastic.engines.cloud.provider import (
    CapacityError,
    CloudError,
    CredentialsError,
    Machine,
    Offer,
    Order,
    QuotaError,
    ThrottledError,
    UnsupportedError,
)
from hvd_elastic.errors import UsageError

_LIMIT_S = 300.0
"""Time limit for a program [s]."""
_ERRORS: Mapping[str, type[CloudError]] = {
    "capacity": CapacityError,
    "quota": QuotaError,
    "throttled": ThrottledError,
    "credentials": CredentialsError,
    "unsupported": UnsupportedError,
    "other": CloudError,
}


class _Machines(msgspec.Struct):
    machines: list[dict[str, Any]]


class _Offers(msgspec.Struct):
    offers: list[Offer]


class CommandProvider:
    """Programs ``start``, ``list`` and ``stop`` of a folder, and ``offers`` if there is one.

    Each reads one JSON object and prints one; see docs/cloud.md.

    Raises:
        UsageError: the folder lacks one of the programs.
    """

    preemption: str | None = None

    def __init__(self, settings: Mapping[str, str]) -> None:
        folder = settings.get("programs", "")
        if not folder:
            raise UsageError(
                "--provider command needs --programs FOLDER, with the programs start, list and stop"
            )
        self._folder = Path(folder)
        lacking = [each for each in ("start", "list", "stop") if not self._has(each)]
        if lacking:
            raise UsageError(
                f"--programs {folder}: no executable {' and no '.join(lacking)} there; "
                "docs/cloud.md says what each program does"
            )

    def offers(self, types: Sequence[str], zones: Sequence[str], spot: bool) -> Sequence[Offer]:
        if self._has("offers"):
            asked = {"types": [*types], "zones": [*zones], "spot": spot}
            with self._reading("offers", text := self._call("offers", asked)):
                return msgspec.json.decode(text, type=_Offers).offers
        markets = (True, False) if spot else (False,)
        return [Offer(t, z, market) for t in types for z in zones or ("",) for market in markets]

    def start(self, order: Order) -> Sequence[Machine]:
        asked = {**asdict(order.offer), **asdict(order)}
        del asked["offer"]
        started = self._machines("start", asked)
        if not started:
            raise CapacityError(f"{self._folder / 'start'} started no machine, and said not why")
        return started

    def list(self, tags: Mapping[str, str]) -> Sequence[Machine]:
        found = self._machines("list", {"tags": {**tags}})
        # A program that ignores the tags must not have machines of others stopped.
        return [
            each for each in found if tags.items() <= each.tags.items() and "cloud" in each.tags
        ]

    def stop(self, ids: Sequence[str]) -> None:
        self._call("stop", {"ids": [*ids]})

    def _has(self, program: str) -> bool:
        return os.access(self._folder / program, os.X_OK) and (self._folder / program).is_file()

    def _machines(self, program: str, asked: Mapping[str, Any]) -> Sequence[Machine]:
        with self._reading(program, text := self._call(program, asked)):
            return [
                msgspec.convert({"address": "", **each, "offer": {"type": "", **each}}, Machine)
                for each in msgspec.json.decode(text, type=_Machines).machines
            ]

    @contextlib.contextmanager
    def _reading(self, program: str, text: bytes) -> Iterator[None]:
        try:
            yield
        except msgspec.DecodeError as error:
            raise CloudError(
                f"{self._folder / program} printed {text[:80].decode(errors='replace')!r}, which "
                f"is not what docs/cloud.md asks for: {error}"
            ) from None

    def _call(self, program: str, asked: Mapping[str, Any]) -> bytes:
        path = self._folder / program
        try:
            done = subprocess.run(
                [path], input=json.dumps(asked).encode(), capture_output=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise CloudError(f"{path} did not end within {_LIMIT_S:g} s") from None
        except OSError as error:
            raise CloudError(f"{path} cannot be run: {error.strerror}") from None
        if done.returncode == 0:
            return done.stdout or b"{}"
        kind, message = "other", ""
        try:
            told = json.loads(done.stdout)
            kind, message = str(told["error"]), str(told.get("message", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # it said nothing on purpose: its last line is all there is
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        message = message or (lines[-1] if lines else f"exit status {done.returncode}")
        raise _ERRORS.get(kind, CloudError)(f"{path}: {message}")
