"""Run long programs with much output, showing one line on the terminal and logging the rest.

Standard library only, since the set-up uses it before anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hvd_elastic.errors import BuildError
from hvd_elastic.formatting import unfiltered
from hvd_elastic.signals import ended_by_signals

_MAKE_PERCENTAGE = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
_COMPILER_ERROR = re.compile(
    r"^([^\s:]+:\d+(:\d+)?|\S+): (fatal )?error: |^CMake Error|undefined reference to "
)
# What follows the first error of a compiler and belongs to it: the line of the source, a caret.
_LINES_OF_AN_ERROR = 6
_NO_NETWORK = (
    "NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError"
    "|ProtocolError|IncompleteRead|Temporary failure resolving|Could not connect to"
    "|Connection timed out while downloading|Attempting to resume incomplete download"
)
_CAUSES = {
    "No space left on device|Disk quota exceeded": (
        "the disk is full, of the environment, of TMPDIR (where Horovod is built) or of "
        "XDG_CACHE_HOME (where pip and we keep files); free some, or name another folder"
    ),
    "Killed signal terminated program|[Cc]annot allocate memory|out of memory": (
        "there is too little memory; fewer compilers at once need less: "
        "hvd-elastic build-horovod --jobs 1"
    ),
    _NO_NETWORK: "the network failed; run the same command again when it works",
}
"""What the output of a failed program may hold, and what it means; the first that fits counts."""
# Interval between lines of progress where they cannot be rewritten, as in a log.
_PLAIN_INTERVAL_S = 30.0


def make_percentage(line: str) -> int | None:
    """Return the progress [%] in a line of a CMake-generated Makefile, or None.

    >>> make_percentage("  [ 12%] Building CXX object third_party/gloo/x.cc.o")
    12
    >>> make_percentage("cc1plus: 99% of nothing") is None
    True
    """
    found = _MAKE_PERCENTAGE.match(line)
    return None if found is None else min(int(found.group(1)), 100)


class ProgressLine:
    """Shows ``label … 42 % 1:23``; rewrites the line on a terminal, else repeats it rarely.

    Args:
        stream: stream to write to; default stdout.
        clock: returns seconds that never decrease.
        terminal: whether lines can be rewritten; by default the stream decides.
    """

    def __init__(
        self,
        label: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        terminal: bool | None = None,
    ) -> None:
        self._label = label
        self._stream = unfiltered(sys.stdout) if stream is None else stream
        self._clock = clock
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._began = clock()
        # Without a terminal, a short step writes only its last line.
        self._written_at = self._began - (_PLAIN_INTERVAL_S - 10.0)
        self._percentage: int | None = None

    def update(self, percentage: int | None = None) -> None:
        """Show the state, unless it was shown a short time ago."""
        if percentage is not None:
            self._percentage = max(percentage, self._percentage or 0)
        since = self._clock() - self._written_at
        if self._terminal and since >= 0.2:
            self._write(f"\r{self._text()}\x1b[K")
        elif not self._terminal and since >= _PLAIN_INTERVAL_S:
            self._write(f"{self._text()}\n")

    def finish(self, outcome: str) -> None:
        """Write the last line, with the outcome and the duration."""
        line = f"{self._label}: {outcome} ({_minutes(self._clock() - self._began)})"
        self._write(f"\r{line}\x1b[K\n" if self._terminal else f"{line}\n")

    def note(self, text: str) -> None:
        """Write a line of its own, which stays."""
        line = f"{self._label}: {text}"
        self._write(f"\r{line}\x1b[K\n" if self._terminal else f"{line}\n")

    def _text(self) -> str:
        share = "" if self._percentage is None else f"{self._percentage:3d} %  "
        return f"{self._label} … {share}{_minutes(self._clock() - self._began)}"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._written_at = self._clock()


def run_quietly(
    command: Sequence[str],
    *,
    label: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    percentage: Callable[[str], int | None] = lambda _: None,
    patience_s: float = 5.0,
) -> None:
    """Run ``command`` with its output appended to ``log``.

    The program has its own process group, which is interrupted and then killed if this process is
    interrupted, so that no compiler keeps running.

    Args:
        percentage: returns the progress in a line of output [%], or None.
        patience_s: how long an interrupted program may take to end [s]; a second interruption
            kills it at once.

    Raises:
        BuildError: it could not be started, or its exit status is not 0; the message has the
            relevant lines and the path of the log.
    """
    progress = ProgressLine(label)
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    network_told = False
    with _appending(log) as append, ended_by_signals():
        append(f"$ {' '.join(command)}")
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise BuildError(f"cannot start {command[0]}: {error.strerror}") from error
        try:
            for line in _lines_or_ticks(process, progress.update):
                lines.append(line)
                append(line)
                if not network_told and re.search(_NO_NETWORK, line):
                    network_told = True  # pip tries again for a minute or more
                    progress.note("the network does not answer; trying again …")
                progress.update(percentage(line))
            status = process.wait()
        except BaseException:
            try:
                _signal_group(process, signal.SIGINT)
                with contextlib.suppress(OSError):  # who reads our output may have ended first
                    progress.finish("interrupted")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=patience_s)
            finally:
                _signal_group(process, signal.SIGKILL)
                process.wait()
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()
    if status != 0:
        progress.finish("failed")
        told = "\n".join(f"  {line}" for line in telling_lines(lines))
        output = "\n".join(lines)
        cause = next((f": {why}" for sign, why in _CAUSES.items() if re.search(sign, output)), "")
        raise BuildError(
            f"{label} failed with status {status}{cause}\n{told}\nThe whole log: {log}"
        )
    progress.finish("done")


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def telling_lines(lines: Sequence[str], limit: int = 20) -> list[str]:
    """Return the lines that show what went wrong.

    These are a compiler's first error and the lines after it, which show its place. If no compiler
    failed, they are the first errors, then the last lines.

    >>> telling_lines(["a", "ERROR: no such thing", "b", "c", "d"], limit=3)
    ['ERROR: no such thing', '…', 'c', 'd']
    >>> telling_lines(["x.cc:1:2: error: no such thing", "  1 | x", "    | ^", *"abcdefgh"])[:2]
    ['x.cc:1:2: error: no such thing', '  1 | x']
    """
    kept = [line for line in lines if line.strip()]
    for number, line in enumerate(kept):
        if _COMPILER_ERROR.search(line.strip()):
            return kept[number : number + _LINES_OF_AN_ERROR]
    end = kept[-(limit - limit // 3) :]
    before = kept[: len(kept) - len(end)]
    errors = [line for line in before if re.search(r"\b(fatal error|error|ERROR)\b:", line)]
    errors = errors[: limit // 3]
    return [*errors, "…", *end] if errors else end


def _lines_or_ticks(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> Iterator[str]:
    """Yield lines as they arrive; call ``tick`` about once a second if there are none."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    rest = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], 1.0)
        if not ready:
            tick()
            continue
        chunk = os.read(descriptor, 65536)
        if not chunk:
            break
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", errors="replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", errors="replace")


@contextlib.contextmanager
def _appending(log: Path) -> Iterator[Callable[[str], None]]:
    """A function that appends a line; lines for which the disk has no space are lost.

    The program itself fails then, and its error says more than one of the log.
    """

    def append(line: str) -> None:
        with contextlib.suppress(OSError):
            file.write(f"{line}\n")

    file = log.open("a", buffering=1, encoding="utf-8")
    try:
        yield append
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
