"""Keeps the random numbers of a script the same on all ranks where it has seeded them alike.

A worker that joins has drawn fewer numbers than the others, and of a loop body that fails each rank
has run another part. What a script has seeded differently on each rank, or not at all, is left
alone.
"""

from __future__ import annotations

import base64
import ctypes
import json
import random
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

_WORDS = 624
"""32-bit words of the state of a Mersenne Twister, which are renewed together."""
_RENEWALS = 16
"""Renewals after which another state counts as seeded again: 10,000 numbers."""


class Generator(Protocol):
    """A global generator of random numbers."""

    def copy(self) -> Any:
        """Return its state; called after each step."""

    def set(self, state: Any) -> None:
        """Set it to a state."""

    def dump(self) -> bytes:
        """Return its state as bytes."""

    def load(self, data: bytes) -> None:
        """Set it to what :meth:`dump` returned on another rank."""

    def is_later(self, state: Any) -> bool:
        """Return whether it has drawn numbers since a state, and was not seeded again."""


class Generators:
    """The global generators of this process.

    Args:
        others: those of the framework, by name.

    Attributes:
        shared: names of those that all ranks had in the same state when they began.
    """

    def __init__(self, others: Mapping[str, Generator]) -> None:
        self._all: dict[str, Generator] = {"random": _Python(), "numpy": _NumPy(), **others}
        self._first: dict[str, int] = {}
        self.shared: set[str] = set()

    def offered(self) -> dict[str, Any]:
        """Return the states of this rank, whose state all others get; plain data."""
        self._note_first()
        return {
            name: (first, base64.b64encode(self._all[name].dump()).decode("ascii"))
            for name, first in self._first.items()
        }

    def _note_first(self) -> None:
        """Note once the states with which this process begins to train."""
        if not self._first:
            self._first = {name: zlib.crc32(each.dump()) for name, each in self._all.items()}

    def agree(self, offered: Mapping[str, Any], *, take: bool) -> int:
        """Compare first states with those of the root, one bit for each; ``take``: its present."""
        self._note_first()
        bits = 0
        for number, (name, first) in enumerate(self._first.items()):
            theirs, state = offered.get(name, (None, ""))
            if theirs == first:
                bits |= 1 << number
                if take:
                    self._all[name].load(base64.b64decode(state))
        return bits

    @property
    def all_bits(self) -> int:
        """Return what :meth:`agree` returns where all agree."""
        return (1 << len(self._all)) - 1

    def settle(self, bits: int) -> None:
        """Note which generators agree on all ranks."""
        self.shared = {name for number, name in enumerate(self._all) if bits >> number & 1}

    def copy(self) -> dict[str, Any]:
        """Return the states of the shared generators, for :meth:`restore`."""
        return {name: self._all[name].copy() for name in self.shared}

    def restore(self, states: Mapping[str, Any], *, unless_seeded: bool = False) -> None:
        """Set generators to earlier states; ``unless_seeded``: not those seeded again since."""
        for name, state in states.items():
            generator = self._all[name]
            if not unless_seeded or generator.is_later(state):
                generator.set(state)


class _Python:
    """Generator of the module ``random``."""

    def copy(self) -> Any:
        return random.getstate()

    def set(self, state: Any) -> None:
        random.setstate(state)

    def dump(self) -> bytes:
        return json.dumps(random.getstate()).encode()

    def load(self, data: bytes) -> None:
        version, words, gauss = json.loads(data)
        random.setstate((version, tuple(words), gauss))

    def is_later(self, state: Any) -> bool:
        other, now = random.Random(), random.getstate()[1][:_WORDS]
        other.setstate(state)
        for _ in range(_RENEWALS):
            if other.getstate()[1][:_WORDS] == now:
                return True
            other.getrandbits(32 * _WORDS)
        return False


class _NumPy:
    """Generator of ``numpy.random.seed``; its state takes 50 us, so it is copied if it changes."""

    def __init__(self) -> None:
        self._copied: Any = ()
        self._seen = b""

    def copy(self) -> Any:
        seen = self._memory()
        has_gauss = bool(self._copied) and self._copied[3]
        if not seen or seen != self._seen or has_gauss:
            self._copied, self._seen = np.random.get_state(), seen
        return self._copied

    @staticmethod
    def _memory() -> bytes:
        """Return its words and its place in them; empty: it is another kind of generator."""
        bits = vars(np.random)["get_bit_generator"]()
        if not isinstance(bits, np.random.MT19937):
            return b""
        return ctypes.string_at(bits.ctypes.state_address, 4 * (_WORDS + 1))

    def set(self, state: Any) -> None:
        np.random.set_state(state)

    def dump(self) -> bytes:
        state: Any = np.random.get_state()
        kind, words, *rest = state
        return json.dumps([kind, np.asarray(words).tolist(), *rest]).encode()

    def load(self, data: bytes) -> None:
        np.random.set_state(tuple(json.loads(data)))

    def is_later(self, state: Any) -> bool:
        other: Any = np.random.RandomState()
        other.set_state(state)
        now: Any = np.random.get_state()
        for _ in range(_RENEWALS):
            if np.array_equal(other.get_state()[1], now[1]):
                return True
            other.bytes(4 * _WORDS)
        return False
