"""An HTTP server for the files of a folder, with a delay, a rate and faults: a store far away."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_PIECE_BYTES = 1 << 16
CUT = "cut"
"""A fault: the connection ends in the middle of the file."""


class FileServer:
    """Serves a folder.

    Args:
        folder: whose files are served.
        delay_s: before each answer.
        bytes_per_s: of all connections together; None: no limit.
        address: of this machine, where it listens.

    Attributes:
        faults: by name of a file, what its next requests get: a status, ``CUT``, or the file when
            an event is set.
        requests: number of requests by name of the file, with its query.
    """

    def __init__(
        self,
        folder: Path,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.folder, self.delay_s, self.bytes_per_s = folder, delay_s, bytes_per_s
        self.faults: dict[str, list[int | str | threading.Event]] = {}
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._free_at = 0.0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):
                    owner.answer(self)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self.url = f"http://{address}:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Send a file, or what its faults say."""
        time.sleep(self.delay_s)
        asked = request.path.rpartition("/")[2]
        name = asked.partition("?")[0]
        with self._lock:
            self.requests[asked] += 1
            fault = self.faults[name].pop(0) if self.faults.get(name) else None
        if isinstance(fault, threading.Event):
            fault.wait()
        path = self.folder / name
        if isinstance(fault, int) or not path.is_file():
            request.send_error(fault if isinstance(fault, int) else 404)
            return
        data = path.read_bytes()
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        end = len(data) // 2 if fault == CUT else len(data)
        for at in range(0, end, _PIECE_BYTES):
            piece = data[at : min(end, at + _PIECE_BYTES)]
            self._wait(len(piece))
            request.wfile.write(piece)

    def _wait(self, size: int) -> None:
        if self.bytes_per_s is None:
            return
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + size / self.bytes_per_s
        time.sleep(max(0.0, start - time.monotonic()))

    @contextlib.contextmanager
    def serving(self) -> Iterator[FileServer]:
        """Serve in a thread."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


if __name__ == "__main__":
    server = FileServer(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    with server.serving():
        print(server.url, flush=True)
        sys.stdin.read()
