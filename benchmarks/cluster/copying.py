"""Measures copies of a data set to many hosts, in multiples of size over link rate (D/B)."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.cluster.copybed import DESTINATION, CopyBed, Timed, make_copy_bed
from benchmarks.testbed.command import Say, check_names, names
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.raw_tcp import time_raw_tcp
from hvd_elastic.errors import UsageError

SMALL_FILES = 20_000
SMALL_BYTES = 10_000
_WORDS = b"epoch loss accuracy learning rate batch gradient worker host step tensor".split()


@dataclass(frozen=True)
class Measured:
    """One figure.

    Attributes:
        row: name of the row (see :data:`ROWS`).
        tool: ``copyclust`` or the tool that it is compared with.
        hosts: number of hosts.
        seconds: time from the command to its end.
        ratio: the same time in units of D/B.
        target: upper bound for ``ratio`` (for ``seconds`` in the row "nothing"); None: no bound.
        note: remark for the reader.
        sent: bytes that this machine sent, with headers, in units of D; None for raw TCP.
        payload: the same without the headers of Ethernet, IP and TCP.
        complete: number of hosts whose copy is identical to the source.
    """

    row: str
    tool: str
    hosts: int
    seconds: float
    ratio: float
    target: float | None
    note: str = ""
    sent: float | None = None
    payload: float | None = None
    complete: int | None = None


ROWS: dict[str, str] = {
    "scale": "random bytes in one file, to more and more hosts",
    "small": f"{SMALL_FILES} files of {SMALL_BYTES // 1000} KB",
    "most": "90 % is there already",
    "times": "all is there, with other times",
    "nothing": f"nothing to do, {SMALL_FILES} files",
    "text": "compressible text",
    "crash": "a host in the middle crashes at a third",
    "silent": "a cable in the middle is pulled at a third",
    "slow": "one host in the middle at a fifth of the speed",
    "join": "a host is added to the hostfile at a third, and fed by its peers",
    "again": "the leader is killed at a half, then started again",
    "pull": "files of a store, which is this machine, fetched once and exchanged, or by every host",
}


class _Measuring:
    """Measures the rows, on one set of hosts after the other.

    Args:
        options: options of the command line.
        folder: scratch folder of this machine.
        say: called with every figure.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, say: Say) -> None:
        self._options = options
        self._size = options.size * 1_000_000
        self._peers = not options.no_peers
        self._folder = folder
        self._say = say
        self.found: list[Measured] = []

    def run(self, rows: Sequence[str]) -> None:
        rate = self._options.rate
        if "scale" in rows:
            for count in self._options.counts:
                with make_copy_bed(count, rate, self._folder) as bed:
                    self._scale(bed)
        on_one_bed: dict[str, Callable[[CopyBed], None]] = {
            "small": self._small,
            "most": self._most,
            "times": self._times,
            "nothing": self._nothing,
            "text": self._text,
            "crash": lambda bed: self._broken("crash", bed, 1.2, bed.cluster.crash),
            "silent": lambda bed: self._broken("silent", bed, 1.4, bed.cluster.cut),
            "slow": self._slow,
            "join": self._join,
            "again": self._again,
            "pull": self._pull,
        }
        others = [row for row in rows if row != "scale"]
        if others:
            with make_copy_bed(self._options.hosts, rate, self._folder) as bed:
                for row in others:
                    on_one_bed[row](bed)

    # ---- rows

    def _scale(self, bed: CopyBed) -> None:
        source = self._random()
        self._ours("scale", bed, source, 1.10 if len(bed.hosts) == 16 else None)
        seconds = time_raw_tcp(bed.cluster, [None, *bed.hosts], self._size)
        ratio = round(seconds * bed.bytes_per_s / self._size, 3)
        note = "each host sends as much to the next at the same time"
        tcp = ("scale", "TCP alone", len(bed.hosts), round(seconds, 2), ratio, None, note)
        self._found(Measured(*tcp))
        # With more hosts rsync's time only grows in proportion, so it is not measured.
        if self._peers and len(bed.hosts) <= 4:
            self._rsync("scale", bed, source, together=False)
            self._rsync("scale", bed, source)

    def _small(self, bed: CopyBed) -> None:
        self._ours("small", bed, self._many(), 1.10)

    def _most(self, bed: CopyBed) -> None:
        def prepare(source: Path) -> None:
            bed.put_there(source)
            for host in bed.hosts:
                (bed.copy(host) / "9").unlink()

        self._both("most", bed, self._random(pieces=10), 0.15, prepare)

    def _times(self, bed: CopyBed) -> None:
        def prepare(source: Path) -> None:
            bed.put_there(source)
            for path in source.iterdir():
                os.utime(path, (path.stat().st_mtime + 10,) * 2)

        self._both("times", bed, self._random(pieces=10), 0.2, prepare)

    def _nothing(self, bed: CopyBed) -> None:
        self._both("nothing", bed, self._many(), 2.0, bed.put_there)

    def _text(self, bed: CopyBed) -> None:
        rng = random.Random(0)
        source = self._empty()
        words = (b"%s=%d\n" % (rng.choice(_WORDS), rng.randrange(1000)) for _ in range(200_000))
        block = b"".join(words)
        with (source / "text").open("wb") as file:
            while file.tell() < self._size:
                start = rng.randrange(len(block) // 2)
                file.write(block[start : start + (1 << 20)])
        self._ours("text", bed, source, 0.5)

    def _broken(self, row: str, bed: CopyBed, target: float, hurt: Callable[[str], Any]) -> None:
        victim = bed.hosts[len(bed.hosts) // 2 - 1]

        def meanwhile(_: object) -> None:
            bed.wait_for(victim, self._size // 3)
            hurt(victim)

        note = f"{len(bed.hosts) - 1} survivors"
        self._ours(row, bed, self._random(), target, meanwhile=meanwhile, note=note)

    def _slow(self, bed: CopyBed) -> None:
        bed.clear()
        slow = bed.hosts[len(bed.hosts) // 2 - 1]
        bed.slow_down(slow, 0.2)
        healthy: list[float] = []

        def meanwhile(_: object) -> None:
            others = [host for host in bed.hosts if host != slow]
            healthy.append(bed.wait_until_complete(others, "0"))

        source = self._random()
        timed = bed.time(source, [bed.ours(source)], meanwhile)
        ratio = healthy[0] * bed.bytes_per_s / self._size
        note = f"the slow host; all healthy ones at {ratio:.2f} (most: 1.4)"
        self._keep("slow", "copyclust", bed, source, timed, 5.3, note)
        bed.slow_down(slow, 1.0)

    def _join(self, bed: CopyBed) -> None:
        bed.clear()
        late = bed.hosts[-1]
        lines = bed.cluster.hostfile.read_text().splitlines()
        # In the same folder, where the tools look for the ssh configuration.
        hostfile = bed.cluster.hostfile.with_name("joining")
        hostfile.write_text("\n".join(line for line in lines if line.split()[:1] != [late]))
        took: list[float] = []

        def meanwhile(_: object) -> None:
            bed.wait_for(bed.hosts[-2], self._size // 3)
            hostfile.write_text("\n".join(lines))
            took.append(bed.wait_until_complete([late], "0"))

        source = self._random()
        timed = bed.time(source, [bed.ours(source, hostfile)], meanwhile)
        note = f"since it joined; {timed.seconds:.1f} s in all; sent at most 1.02"
        self._keep("join", "copyclust", bed, source, replace(timed, seconds=took[0]), 1.1, note)

    def _again(self, bed: CopyBed) -> None:
        source = self._random()
        bed.clear()

        def meanwhile(processes: Sequence[subprocess.Popen[bytes]]) -> None:
            bed.wait_for(bed.hosts[-1], self._size // 2)
            processes[0].kill()

        bed.time(source, [bed.ours(source)], meanwhile)
        deadline = time.monotonic() + 30
        while any(bed.cluster.pids(host) for host in bed.hosts) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = sum(len(bed.cluster.pids(host)) for host in bed.hosts)
        fraction = min(bed.arrived(host) for host in bed.hosts) / self._size
        note = f"{left} processes left; {fraction:.2f} had arrived everywhere"
        timed = bed.time(source, [bed.ours(source)])
        self._keep("again", "copyclust", bed, source, timed, round(1.1 - fraction, 2), note)

    def _pull(self, bed: CopyBed) -> None:
        source = self._random(pieces=2 * len(bed.hosts))
        names = [path.name for path in source.iterdir()]
        for name in names:
            os.utime(source / name, (0, 0))  # a web server reports times in whole seconds
        listed = self._folder / "names"
        listed.write_text("".join(f"{name}\n" for name in names))
        with _serve(source, bed.cluster.leader_address) as url:
            each = f"curl -fsSR {url}/{{path}} -o {{dst}}/{{path}}"
            fetch = f"curl -fsSR {url}/$name -o $name || exit"
            whole = f"for name in {' '.join(names)}; do {fetch}; done"
            place = f"mkdir -p {DESTINATION} && cd {DESTINATION}"
            commands = {"copyclust --pull": bed.pull(each, listed)}
            if self._peers:
                commands["curl on every host"] = bed.run(f"{place} && {whole}")
            for tool, command in commands.items():
                bed.clear()
                self._keep("pull", tool, bed, source, bed.time(source, [command]))

    # ---- copies

    def _both(
        self,
        row: str,
        bed: CopyBed,
        source: Path,
        target: float,
        prepare: Callable[[Path], None],
    ) -> None:
        """Measure copyclust and rsync from the same state of the hosts."""
        self._ours(row, bed, source, target, prepare=prepare)
        if self._peers:
            self._rsync(row, bed, source, prepare=prepare)

    def _ours(
        self,
        row: str,
        bed: CopyBed,
        source: Path,
        target: float | None,
        *,
        prepare: Callable[[Path], None] = lambda _: None,
        meanwhile: Callable[[Sequence[subprocess.Popen[bytes]]], None] | None = None,
        note: str = "",
    ) -> None:
        bed.clear()
        prepare(source)
        timed = bed.time(source, [bed.ours(source)], meanwhile)
        self._keep(row, "copyclust", bed, source, timed, target, note)

    def _rsync(
        self,
        row: str,
        bed: CopyBed,
        source: Path,
        *,
        together: bool = True,
        prepare: Callable[[Path], None] = lambda _: None,
    ) -> None:
        bed.clear()
        prepare(source)
        commands = [bed.rsync(source, host) for host in bed.hosts]
        tool = "rsync, all at once" if together else "rsync, one by one"
        timed = bed.time(source, commands, together=together)
        self._keep(row, tool, bed, source, timed)

    def _keep(
        self,
        row: str,
        tool: str,
        bed: CopyBed,
        source: Path,
        timed: Timed,
        target: float | None = None,
        note: str = "",
    ) -> None:
        size = sum(path.stat().st_size for path in source.rglob("*"))
        self._found(
            Measured(
                row=row,
                tool=tool,
                hosts=len(bed.hosts),
                seconds=round(timed.seconds, 2),
                ratio=round(timed.seconds * bed.bytes_per_s / size, 3),
                target=target,
                note=note,
                sent=round(timed.sent_bytes / size, 3),
                payload=round(timed.payload_bytes / size, 3),
                complete=len(timed.complete),
            )
        )

    def _found(self, measured: Measured) -> None:
        self.found.append(measured)
        self._say(_line(measured))

    # ---- sources

    def _empty(self) -> Path:
        folder = self._folder / "source"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _random(self, pieces: int = 1) -> Path:
        folder = self._empty()
        for number in range(pieces):
            (folder / str(number)).write_bytes(os.urandom(self._size // pieces))
        return folder

    def _many(self) -> Path:
        folder = self._empty()
        for number in range(SMALL_FILES):
            below = folder / str(number % 100)
            below.mkdir(exist_ok=True)
            (below / str(number)).write_bytes(os.urandom(SMALL_BYTES))
        return folder


class _Quiet(SimpleHTTPRequestHandler):
    """Request handler that logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _serve(folder: Path, address: str) -> Iterator[str]:
    """Serve a folder by HTTP for the length of the block; yield its URL."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer((address, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{address}:{server.server_port}"
        finally:
            server.shutdown()


def measure_copies(options: argparse.Namespace, say: Say) -> Result:
    """Measure the rows that the command line names; ``say`` is called with every figure.

    Raises:
        UsageError: a row is unknown, or rsync or curl is not installed.
    """
    rows = names(options.rows)
    check_names("--rows", rows, ROWS)
    if not options.no_peers and shutil.which("rsync") is None:
        raise UsageError("rsync is not installed. Install it: apt install rsync; or --no-peers")
    if "pull" in rows and shutil.which("curl") is None:
        raise UsageError("curl is not installed. Install it: apt install curl; or leave out pull")
    load_before = os.getloadavg()
    peak = _PeakLoad()
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-bench-") as folder, peak:
        measuring = _Measuring(options, Path(folder), say)
        try:
            measuring.run(rows)
        except KeyboardInterrupt:
            say("interrupted; what was measured is kept")
    note = (
        f"Links of {options.rate} in each direction, this machine's included; "
        f"D = {options.size} MB ({SMALL_FILES * SMALL_BYTES / 1e6:.0f} MB in small files); "
        f"TCP with {Path('/proc/sys/net/ipv4/tcp_congestion_control').read_text().strip()}. "
        "All hosts share these cores. "
        f"Highest load average meanwhile: {peak.highest:.1f}."
    )
    return Result(
        "cluster",
        conditions("virtual hosts (namespaces)", note, load_before),
        {"rows_mean": {row: ROWS[row] for row in rows}, "rows": measuring.found},
        ["\n".join(map(_line, measuring.found))],
    )


class _PeakLoad:
    """Context manager that records the highest 1-minute load average of its block."""

    def __init__(self) -> None:
        self.highest = 0.0
        self._over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self.highest = max(self.highest, os.getloadavg()[0])


def _line(measured: Measured) -> str:
    unit = "s" if measured.row == "nothing" else "D/B"
    value = measured.seconds if measured.row == "nothing" else measured.ratio
    limit = "" if measured.target is None else f" (at most {measured.target:g})"
    where = f"{measured.row:8} {measured.hosts:3} hosts  {measured.tool:18}"
    note = f"; {measured.note}" if measured.note else ""
    parts = [f"{value:6.2f} {unit}{limit}, {measured.seconds:.1f} s"]
    if measured.complete is not None:
        parts.append(f"{measured.sent:.2f} D sent ({measured.payload:.3f} without headers)")
        parts.append(f"{measured.complete} complete")
    return f"{where} {', '.join(parts)}{note}"
