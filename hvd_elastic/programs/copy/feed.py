"""The sending side of a link: a thread that sends another node the data that it requests."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zlib
from typing import Any, Callable, Iterator  # noqa: UP035  # Python 3.7 has no others

from hvd_elastic.programs.copy.frames import (
    DATA,
    END,
    FRAME_BYTES,
    GONE,
    LAST,
    PACKED,
    WHOLE,
    Link,
    LinkError,
    connect,
    make_frame,
)
from hvd_elastic.programs.copy.store import Gone, Store
from hvd_elastic.programs.file_hash import hash_of

# Interval at which a waiting feeder checks whether it was dropped.
WAIT_S = 0.5
# Bytes that are compressed to estimate how far a frame shrinks.
SAMPLE_BYTES = 4096
# A frame is sent compressed if that takes at most this share of its size.
WORTH = 0.9
# Frames sent before the first try: a link's speed shows only once the kernel's buffers are full.
LINK_UNKNOWN = 16
# Maximum number of frames between two tries, for data that do not shrink and for a link too fast.
MOST_SKIPPED = 256
MOST_SKIPPED_FOR_LINK = 64


class Packer:
    """Compresses frames where that makes the link faster, which it measures itself.

    Compression pays if the link time saved exceeds the processor time spent. Until one frame has
    paid, the ratio is estimated from a sample of each frame.
    """

    def __init__(self) -> None:
        self._skip = LINK_UNKNOWN
        self._next_skip = 1
        self._pays = False
        self._link_s_per_byte = 0.0
        self._cost_s_per_byte = 0.0

    def sent(self, size: int, seconds: float) -> None:
        """Record the time for which the link blocked a send of ``size`` bytes."""
        self._link_s_per_byte += 0.1 * (seconds / max(size, 1) - self._link_s_per_byte)

    def pack(self, payload: bytes) -> bytes | None:
        """Return the compressed payload, or None if it is to be sent as it is."""
        if self._skip > 0:
            self._skip -= 1
            return None
        if not self._pays:
            middle = len(payload) // 2
            sample = payload[middle : middle + SAMPLE_BYTES]
            share = len(zlib.compress(sample, 1)) / len(sample)
            if not self._would_pay(share):
                self._wait_longer(share)
                return None
        # Thread time, because other threads and processes do not count; and of the whole frame,
        # because the time for a sample is mostly setup.
        begun = time.thread_time()
        packed = zlib.compress(payload, 1)
        cost = (time.thread_time() - begun) / len(payload)
        self._cost_s_per_byte += 0.2 * (cost - self._cost_s_per_byte)
        share = len(packed) / len(payload)
        self._pays = self._would_pay(share)
        self._next_skip = 1
        return packed if share < WORTH else None

    def _would_pay(self, share: float) -> bool:
        return share < WORTH and (1 - share) * self._link_s_per_byte > self._cost_s_per_byte

    def _wait_longer(self, share: float) -> None:
        """Double the number of frames before the next try, since trying costs time too."""
        self._skip = self._next_skip
        most = MOST_SKIPPED_FOR_LINK if share < WORTH else MOST_SKIPPED
        self._next_skip = min(2 * self._next_skip, most)
        self._cost_s_per_byte *= 0.9  # the measured cost may have been that of a busy moment


class Pace:
    """Limits the sending rate of a link.

    Args:
        bytes_per_s: maximum rate [bytes/s]; 0 for no limit.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._due = time.monotonic()

    def wait(self, size: int) -> None:
        """Wait until ``size`` more bytes may be sent."""
        if self._rate:
            now = time.monotonic()
            self._due = max(self._due, now - 0.1) + size / self._rate
            if self._due > now:
                time.sleep(self._due - now)


class Feeder:
    """Feeds one node; ``run`` is the body of a thread.

    Args:
        store: files to send from.
        peer: name of the node that is fed.
        number: number of the link, which both ends use in their reports.
        addresses: addresses on which the node listens.
        secret: secret shared with the node.
        certificate: certificate for encryption; None for no encryption.
        bytes_per_s: maximum sending rate [bytes/s]; 0 for no limit.
        packs: whether frames may be compressed.
        on_end: called with (this feeder, reason) when the link breaks, or with "" as the reason
            when all is sent.

    Attributes:
        sent: bytes given to the link so far; -1 until the node was reached.
        sending: whether it is waiting for the link (and not for the store, the disk or its pace).
    """

    def __init__(
        self,
        store: Store,
        peer: str,
        number: int,
        addresses: list[tuple[str, int]],
        secret: bytes,
        certificate: str | None,
        bytes_per_s: float,
        packs: bool,
        on_end: Callable[[Feeder, str], None],
    ) -> None:
        self.peer = peer
        self.number = number
        self.sent = -1
        self.sending = True
        self.dropped = threading.Event()
        self._store = store
        self._to = (addresses, secret, certificate)
        self._pace = Pace(bytes_per_s)
        self._packer = Packer() if packs else None
        self._on_end = on_end
        self._link: Link | None = None
        self._held = bytearray()

    def drop(self) -> None:
        """Stop feeding, whatever it is waiting for."""
        self.dropped.set()
        if self._link is not None:
            self._link.drop()

    def run(self) -> None:
        """Feed until all requested data is sent or the link breaks."""
        why = ""
        try:
            self._link = connect(*self._to, self._reached)
            if self.dropped.is_set():
                return
            self._link.send_list(self.number)
            wanted = self._link.read_list()
            self.sending = False
            for index, offset in self._in_turn(wanted):
                self._feed(index, offset)
            self._held += make_frame(LAST, 0)
            self._flush()
        except (OSError, LinkError, ValueError) as error:
            why = str(error) or type(error).__name__
        finally:
            self.sending = False
            if self._link is not None:
                self._link.close()
            if not self.dropped.is_set():
                self._on_end(self, why)

    def _reached(self) -> None:
        self.sent = 0

    def _in_turn(self, wanted: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield files that are available first, then the others as their data begins to arrive."""
        store = self._store
        seen = len(store.begun)
        waiting = dict(wanted)
        for index, offset in wanted:
            if store.has_begun(index):
                del waiting[index]
                yield index, offset
        while waiting:
            self._pause_until(store.begun_beyond, seen)
            index = store.begun[seen]
            seen += 1
            if index in waiting:
                yield index, waiting.pop(index)

    def _pause_until(self, over: Callable[..., bool], *arguments: int) -> None:
        """Wait until ``over``, called with the arguments and a time limit [s], returns True."""
        if over(*arguments, 0):
            return
        # Send what is ready, instead of holding it until the rest is.
        self._flush()
        while not over(*arguments, WAIT_S):
            if self.dropped.is_set():
                raise LinkError("dropped")

    def _feed(self, index: int, offset: int) -> None:
        size = self._store.tree.files[index].size
        try:
            if size <= FRAME_BYTES:
                self._feed_whole(index, size)
            else:
                self._feed_pieces(index, offset, size)
        except Gone as gone:
            self._put(
                make_frame(GONE, index, 0, str(gone).encode("utf-8", "replace")[:FRAME_BYTES])
            )

    def _feed_whole(self, index: int, size: int) -> None:
        self._wait(index, size - 1)
        known = self._store.recent(index, 0)
        if known is not None:
            self._put(known[0])
            return
        number = self._store.open(index)
        try:
            data = os.read(number, FRAME_BYTES)
            self._check(index, number)
        finally:
            os.close(number)
        digest = self._store.digests.get(index) or hashlib.sha256(data).digest()
        self._put(self._frame(WHOLE, index, 0, digest + self._origin(index) + data))

    def _feed_pieces(self, index: int, offset: int, size: int) -> None:
        number = -1
        digest: Any = None
        try:
            if self._store.is_own(index) and index not in self._store.digests:
                number = self._store.open(index)
                digest = hash_of(number, offset)
            while offset < size:
                end = self._wait(index, offset)
                known = self._store.recent(index, offset) if digest is None else None
                if known is not None:
                    frame, length = known
                else:
                    if number < 0:
                        number = self._store.open(index)
                    data = os.pread(number, min(FRAME_BYTES, end - offset), offset)
                    if not data:
                        self._give_up(index, "it became shorter during the copy")
                    if digest is not None:
                        digest.update(data)
                    frame, length = self._frame(DATA, index, offset, data), len(data)
                self._put(frame)
                offset += length
            self._wait(index, size)
            if number >= 0:
                self._check(index, number)
            value = self._store.digests.get(index) or digest.digest()
            if self._store.is_own(index):
                self._store.digests.setdefault(index, value)
            self._put(make_frame(END, index, 0, value + self._origin(index)))
        finally:
            if number >= 0:
                os.close(number)

    def _origin(self, index: int) -> bytes:
        return bytes([self._store.origin(index)])

    def _check(self, index: int, number: int) -> None:
        problem = self._store.problem(index, number)
        if problem:
            self._give_up(index, problem)

    def _give_up(self, index: int, reason: str) -> None:
        self._store.give_up(index, reason)
        raise Gone(reason)

    def _wait(self, index: int, offset: int) -> int:
        """Wait until a file can be read beyond ``offset``; return how far it can be read."""
        end = -1

        def is_ready(index: int, offset: int, timeout: float) -> bool:
            nonlocal end
            end = self._store.ready(index, offset, timeout)
            return end >= 0

        self._pause_until(is_ready, index, offset)
        return end

    def _frame(self, kind: int, index: int, offset: int, payload: bytes) -> bytes:
        if self._packer is not None and len(payload) >= SAMPLE_BYTES:
            packed = self._packer.pack(payload)
            if packed is not None:
                return make_frame(kind | PACKED, index, offset, packed)
        return make_frame(kind, index, offset, payload)

    def _put(self, frame: bytes) -> None:
        self._held += frame
        if len(self._held) >= FRAME_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        data, self._held = bytes(self._held), bytearray()
        if self._link is None or self.dropped.is_set():
            raise LinkError("dropped")
        self._pace.wait(len(data))
        begun = time.perf_counter()
        self.sending = True
        self._link.send(data)
        self.sending = False
        if self._packer is not None:
            self._packer.sent(len(data), time.perf_counter() - begun)
        self.sent += len(data)
