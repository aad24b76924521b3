"""Format numbers, times and names for messages to the user, tell whole numbers, and read times."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterable
from numbers import Integral
from typing import Any, TextIO

from hvd_elastic.errors import UsageError

_NAMED_AT_MOST = 4
_CONTROL = re.compile(
    r"\x1b\[[\d;:]*m"  # colours, which carry no text
    r"|\r(?=\n)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""What moves the cursor, sets a title, turns the direction of text, and the like."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_PLAIN_SECONDS = re.compile(r"\d+(\.\d+)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def plural(noun: str, number: object) -> str:
    """Return a noun in singular or plural form, as needed after a number.

    >>> [plural(noun, 2) for noun in ("slot", "process", "try", "batch", "epoch")]
    ['slots', 'processes', 'tries', 'batches', 'epochs']
    """
    if number == 1:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    hisses = noun.endswith(("s", "ch")) and noun != "epoch"
    return f"{noun}es" if hisses else f"{noun}s"


def count(number: object, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "host"), count(3, "process")
    ('1 host', '3 processes')
    """
    return f"{number} {plural(noun, number)}"


def bounds_words(least: int, most: int | None, noun: str) -> str:
    """Return the numbers of a thing that are allowed; ``most`` None: any above the least.

    >>> bounds_words(1, 1, "slot"), bounds_words(1, 4, "slot"), bounds_words(2, None, "slot")
    ('1 slot', '1 to 4 slots', '2 slots or more')
    """
    if most is None:
        return f"{count(least, noun)} or more"
    return count(least, noun) if least == most else f"{least} to {count(most, noun)}"


def hosts_named(names: Iterable[str]) -> str:
    """Return the names of hosts, of many only the first.

    >>> hosts_named(["a"]), hosts_named("abc"), hosts_named("abcdefg")
    ('host a', 'hosts a, b, c', 'hosts a, b, c and 4 more')
    """
    found = list(dict.fromkeys(names))
    if len(found) > _NAMED_AT_MOST:
        shown = found[: _NAMED_AT_MOST - 1]
        return f"hosts {', '.join(shown)} and {len(found) - len(shown)} more"
    return f"{plural('host', len(found))} {', '.join(found)}"


def worker_name(host: object, slot: object) -> str:
    """Return the name of a worker that users see.

    >>> worker_name("node2", 0)
    'node2:0'
    """
    return f"{host}:{slot}"


def shown_line(line: str) -> str:
    r"""Return what a terminal shows of a line: the last state of a progress bar that rewrites it.

    >>> shown_line("\r 50 % of the epoch\r100 % of the epoch\r")
    '100 % of the epoch'
    """
    return line.rstrip("\r").rpartition("\r")[2]


def printable(text: str) -> str:
    r"""Return text from elsewhere for a terminal: control characters are shown as in JSON.

    Newlines and tabs stay; colours are left out.

    >>> print(printable("\x1b[31mstep 7\x1b[0m\x1b]0;title\x07"))
    step 7\u001b]0;title\u0007
    """
    return _CONTROL.sub(_shown_control, text)


def one_line(text: str, most: int = 1000) -> str:
    r"""Return text of somebody else as one line of printable characters, cut where it is long.

    >>> one_line("step 7\n  \x1b[2J \ud800 é")
    'step 7 ?[2J ? é'
    """
    return "".join(each if each.isprintable() else "?" for each in " ".join(text[:most].split()))


def _shown_control(found: re.Match[str]) -> str:
    is_control = len(found[0]) == 1 and not found.string.startswith("\r\n", found.start())
    return f"\\u{ord(found[0]):04x}" if is_control else ""


class PrintableStream:
    """A text stream that shows the control characters of all that is written to it as text.

    Attributes:
        unfiltered: the stream below, for a program's own colours and cursor.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        self.unfiltered.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream on which control characters have their effect."""
    return stream.unfiltered if isinstance(stream, PrintableStream) else stream


def as_whole(value: Any) -> Any:
    """Return a whole number of another library, such as ``np.int64(8)``, as an int; else ``value``.

    >>> as_whole(8), as_whole(8.0), as_whole(True)
    (8, 8.0, True)
    """
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def number_words(value: Any) -> str:
    """Return a number to three significant digits.

    >>> [number_words(v) for v in (0.12345, 3, 812.44, 1234567, 0.00001234, None, 0.9722)]
    ['0.123', '3', '812', '1,234,567', '1.23e-05', 'nan', '0.972']
    """
    if value is None:
        return "nan"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or (value == value and abs(value) >= 1000):
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3g}"


def duration_words(seconds: float | None) -> str:
    """Return a length of time.

    >>> [duration_words(s) for s in (0.123, 7.5, 75, 3725, 200000, math.inf, None)]
    ['0.12 s', '7.5 s', '1 m 15 s', '1 h 02 m', '2 d 07 h', '∞ s', '–']
    >>> [duration_words(s) for s in (0, 0.0000071, 0.0004, 0.0099)]
    ['0.00 s', '7.1 µs', '400 µs', '9.9 ms']
    """
    if seconds is None or math.isnan(seconds):
        return "–"
    if math.isinf(seconds):
        return "∞ s"
    if 0 < seconds < 0.01:
        size, unit = (1e6, "µs") if seconds < 0.001 else (1e3, "ms")
        return f"{float(f'{size * seconds:.2g}'):g} {unit}"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def parse_duration(name: str, text: str) -> float:
    """Return a duration in seconds.

    Raises:
        UsageError: the text is not valid; gives examples.

    >>> [parse_duration("--deadline", text) for text in ("1.5h", "1h30m", "90")]
    [5400.0, 5400.0, 90.0]
    """
    whole = text + "s" if _PLAIN_SECONDS.fullmatch(text) else text
    parts = _DURATION.findall(whole)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != whole or seconds <= 0:
        above = " above 0" if parts and seconds <= 0 else ""
        raise UsageError(
            f"{name} takes a time{above} such as 45s, 90m or 1h30m, or seconds, not '{text}'"
        )
    return seconds


def clock_words(t: float | None) -> str:
    """Return the time of day of Unix seconds."""
    return _time_words(t, "%H:%M:%S")


def date_words(t: float | None) -> str:
    """Return the day and the time of day of Unix seconds."""
    return _time_words(t, "%Y-%m-%d %H:%M:%S")


def _time_words(t: float | None, form: str) -> str:
    with contextlib.suppress(TypeError, OverflowError, ValueError, OSError):  # in no calendar
        if t is not None:
            return time.strftime(form, time.localtime(t))
    return "–"


def bytes_words(count: float) -> str:
    """Return a number of bytes in its largest unit.

    >>> [bytes_words(n) for n in (12, 4096, 3_200_000, 999_960_000, 7_000_000_000)]
    ['12 B', '4.1 kB', '3.2 MB', '1.0 GB', '7.0 GB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
