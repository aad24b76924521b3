"""Read and write hostfiles: which hosts a run may use, and how many processes each can hold.

A line names one host in one of these forms. The order matters, since ranks follow it::

    gpu1                            1 slot
    gpu1 slots=8                    Horovod's form
    gpu1:8                          MPI's form: the number after the colon is SLOTS, never a port
    gpu1 slots=4 max_slots=8        Open MPI's limit
    alice@gpu1 slots=8 port=2222    user and ssh port
    gpu[01-16] slots=8              ranges as in pdsh and ClusterShell: gpu[1-4,7], r[1-2]n[01-08]
    gpu1 cpus=64 price=2.5 labels=spot,a100
    gpu1 slots=2 devices=4,5        the GPU of each slot
    ::1   or   [fe80::1]:4          IPv6 addresses
    # a comment, alone or after a host; blank lines are skipped

A number after a colon is the number of slots, as for mpirun and horovodrun, and never a port. The
ssh port is written ``port=2222``, or set in the ssh configuration for that host.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hvd_elastic.errors import HostfileError, StrangerError
from hvd_elastic.formatting import count, hosts_named
from hvd_elastic.own_files import check_configuration
from hvd_elastic.replaced_files import write_whole

# A mistake such as gpu[1-1000000000] must give an error instead of filling the memory.
MAX_HOSTS = 65_536
_RANGES = {"slots": (0, 65_536), "max_slots": (1, 65_536), "port": (1, 65_535), "cpus": (1, 65_536)}
"""Least and largest value of each attribute that is a whole number."""

VALID_FORMS = (
    "valid lines: 'gpu1', 'gpu1 slots=8', 'gpu1:8' (8 slots), 'alice@gpu1 slots=8 port=2222', "
    "'gpu[01-16] slots=8'; attributes: slots=, max_slots=, port=, cpus=, price=, labels=a,b, "
    "devices=0,1; "
    "'#' begins a comment"
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+-]*\$?")
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*")
_INTEGER = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(
    r"[0-9]{1,15}(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?|\.[0-9]+([eE][+-]?[0-9]{1,3})?"
)
_ATTRIBUTE = re.compile(r"(?P<key>[^\s=]+)\s*=\s*(?P<value>\S*)")
_WORD = re.compile(r"\S+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(?P<low>[0-9]{1,9})(-(?P<high>[0-9]{1,9}))?(/(?P<step>[0-9]{1,9}))?")


INPUT_LABEL = "input"
"""Label of a host that reads for those that train."""


@dataclass(frozen=True)
class Host:
    """One host of a hostfile.

    Attributes:
        name: host name, ssh alias or address; unique in its hostfile, ignoring case.
        slots: number of processes that it can hold; 0: it does not train, see ``labels``.
        user: ssh user; None for that of the ssh configuration.
        port: ssh port; None for that of the ssh configuration.
        max_slots: maximum number of processes that it may ever hold, >= ``slots``.
        cpus: number of CPU cores to assume, if it differs from what the host has.
        price: cost of the host [any currency, per hour], >= 0.
        labels: words by which hosts can be selected, such as ``spot``; a host with ``input`` reads
            for those that train.
        devices: number of the GPU of each slot; empty: those of the host in their order.
    """

    name: str
    slots: int = 1
    user: str | None = None
    port: int | None = None
    max_slots: int | None = None
    cpus: int | None = None
    price: float | None = None
    labels: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for problem in _find_problems(self):
            raise ValueError(problem)

    @property
    def target(self) -> str:
        """Destination for ssh: ``user@name`` or ``name``."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class Hostfile:
    """Hosts of a hostfile in its order, and the name of the file."""

    hosts: tuple[Host, ...]
    source: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def slots(self) -> int:
        """Total number of slots of all hosts."""
        return sum(host.slots for host in self.hosts)

    def get(self, name: str) -> Host | None:
        """Return the host of that name (ignoring case), or None."""
        wanted = name.lower()
        return next((host for host in self.hosts if host.name.lower() == wanted), None)

    def choose(self, text: str) -> tuple[Host, ...]:
        r"""Return the hosts that a list names, in its order; ``@spot`` names those of a label.

        Raises:
            HostfileError: the list cannot be parsed, or names a host or label that is not here.

        >>> hosts = parse_hosts("gpu[1-2] labels=a100\ngpu3\nlogin", "example")
        >>> [host.name for host in hosts.choose("login,@a100")]
        ['login', 'gpu1', 'gpu2']
        """
        found: dict[str, Host] = {}
        for name in expand_hosts(text, labels=True):
            host = self.get(name)
            if name.startswith("@"):
                chosen = [host for host in self if name[1:] in host.labels]
                labels = dict.fromkeys(label for host in self for label in host.labels)
                has = f"its labels are {', '.join(labels)}" if labels else "it has no labels="
                missing = f"no host of {self.source} has the label '{name[1:]}'; {has}"
            else:
                chosen = [] if host is None else [host]
                more = ", …" if len(self) > 8 else ""
                missing = (
                    f"host '{name}' is not in {self.source} ({', '.join(self.names[:8])}{more})"
                )
            if not chosen:
                raise HostfileError(missing)
            found |= {host.name: host for host in chosen}
        return tuple(found.values())

    def without(self, text: str, *, may_be_empty: bool = False) -> Hostfile:
        """Return the hosts that a list does not name; it may name some that are not here.

        Args:
            may_be_empty: whether no host may be left.

        Raises:
            HostfileError: the list cannot be parsed, or no host is left.
        """
        left = tuple(host for host in self if not is_named(host, text))
        if self.hosts and not left and not may_be_empty:
            raise HostfileError(f"--exclude {text} leaves no host of {self.source}")
        return replace(self, hosts=left)

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)


@functools.lru_cache(maxsize=1024)
def _names_in(text: str) -> frozenset[str]:
    names = expand_hosts(text, labels=True)
    return frozenset(name.lower() if name[:1] != "@" else name for name in names)


def is_named(host: Host, text: str) -> bool:
    """Return whether a list such as ``gpu[1-4],@spot`` names a host, by its name or a label.

    Raises:
        HostfileError: the list cannot be parsed.
    """
    own = [host.name.lower(), *(f"@{each}" for each in host.labels)]
    return not _names_in(text).isdisjoint(own)


def name_as_listed(name: str, names: Iterable[str]) -> str:
    """Return the name of a host as a list has it, where case does not matter; else the name.

    >>> name_as_listed("GPU1", ["gpu1", "gpu2"]), name_as_listed("GPU9", ["gpu1"])
    ('gpu1', 'GPU9')
    """
    return next((each for each in names if each.lower() == name.lower()), name)


class _PartError(Exception):
    """Part of a line that cannot be parsed; ``column`` is its position in the text, from 0."""

    def __init__(self, column: int, message: str) -> None:
        super().__init__(message)
        self.column = column


def parse_hostfile(path: str | Path, *, may_be_empty: bool = False) -> Hostfile:
    """Read a hostfile.

    Args:
        may_be_empty: whether a file without hosts is valid.

    Raises:
        HostfileError: the file is missing, unreadable or empty, every user can write it, or a line
            cannot be parsed; names path, line, column, text, and the valid forms.
    """
    try:
        check_configuration(Path(path), may_group=True)
        data = Path(path).read_bytes()
    except StrangerError as error:
        raise HostfileError(f"hostfile {error}") from None
    except FileNotFoundError:
        raise HostfileError(
            f"hostfile {path} does not exist. Give the path of a file with one host a line; "
            f"{VALID_FORMS}"
        ) from None
    except IsADirectoryError:
        raise HostfileError(
            f"hostfile {path} is a folder, not a file with one host a line"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HostfileError(f"hostfile {path} cannot be read: {reason}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise HostfileError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8 text. "
            f"A hostfile is plain text; {VALID_FORMS}"
        ) from None
    return parse_hosts(text, str(path), may_be_empty=may_be_empty)


def parse_hosts(text: str, source: str, *, may_be_empty: bool = False) -> Hostfile:
    """Parse the text of a hostfile; ``source`` names it in errors.

    Raises:
        HostfileError: as :func:`parse_hostfile`.

    >>> [host.name for host in parse_hosts("gpu[08-10] slots=2", "example")]
    ['gpu08', 'gpu09', 'gpu10']
    """
    hosts: list[Host] = []
    seen: dict[str, tuple[int, str]] = {}
    # Not splitlines(), which also splits at form feeds and Unicode separators: then line numbers
    # in errors would differ from those in an editor.
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.rstrip("\r")
        content = line.split("#", 1)[0].rstrip()
        if not content.strip():
            continue
        try:
            parsed = _parse_line(content)
            if len(hosts) + len(parsed) > MAX_HOSTS:
                raise _PartError(0, f"more than {MAX_HOSTS} hosts in one hostfile")
        except _PartError as error:
            raise HostfileError(_describe(source, number, line, error.column, str(error))) from None
        for host in parsed:
            key = host.name.lower()
            if key in seen:
                first_number, first_line = seen[key]
                column = len(content) - len(content.lstrip())
                message = (
                    f"host '{host.name}' stands already in line {first_number} "
                    f"('{first_line.strip()}'). Name each host once, with all its slots; "
                    "for two sshds on one machine use two Host entries of the ssh configuration"
                )
                raise HostfileError(_describe(source, number, line, column, message))
            seen[key] = (number, line)
            hosts.append(host)
    if not hosts and not may_be_empty:
        raise HostfileError(f"{source} names no host. Write one host a line; {VALID_FORMS}")
    return Hostfile(tuple(hosts), source)


def require_prices(hostfile: Hostfile) -> None:
    """Check that all hosts have a price.

    Raises:
        HostfileError: some have none; names them.
    """
    missing = [host.name for host in hostfile if host.price is None]
    if missing:
        raise HostfileError(
            f"{hostfile.source} has no price= for {hosts_named(missing)}; add it, such as "
            "'gpu1 slots=8 price=2.5'"
        )


def format_hostfile(hosts: Iterable[Host]) -> str:
    """Return the text of a hostfile with these hosts; :func:`parse_hosts` reads it back.

    >>> print(format_hostfile([Host("gpu1", slots=8, user="alice"), Host("::1")]), end="")
    alice@gpu1 slots=8
    ::1 slots=1
    """
    return "".join(f"{_format_host(host)}\n" for host in hosts)


def write_hostfile(path: Path, hosts: Iterable[Host]) -> None:
    """Replace a hostfile in one step, so that who watches it never reads half of it.

    Raises:
        OSError: it cannot be written; the old one is unchanged.
    """
    write_whole(path, format_hostfile(hosts), mode=0o644)


def expand_hosts(text: str, *, labels: bool = False) -> tuple[str, ...]:
    """Return the host names of a list such as ``gpu[01-04,7],login``, in its order.

    Args:
        labels: whether a part such as ``@spot`` may be there, which stays as it is.

    Raises:
        HostfileError: a part cannot be parsed; names it.

    >>> expand_hosts("gpu[01-03],login")
    ('gpu01', 'gpu02', 'gpu03', 'login')
    """
    names: list[str] = []
    column = 0
    # Commas inside brackets belong to the range.
    for part in re.split(r",(?![^\[\]]*\])", text):
        if part.strip():
            try:
                if labels and part.strip().startswith("@"):
                    names.append(part.strip())
                else:
                    names += _expand(part.strip(), column)
            except _PartError as error:
                raise HostfileError(
                    f"host list '{text}', at '{part.strip()}': {error}. "
                    "Write names and ranges with commas between, such as gpu[01-04],login"
                ) from None
        column += len(part) + 1
    if not names:
        raise HostfileError(f"host list '{text}' names no host. Write for example gpu[01-04],login")
    return tuple(dict.fromkeys(names))


def fold_hosts(names: Iterable[str]) -> str:
    """Return names as a short list: ranges over the last number in a name, without duplicates.

    Groups appear in the order of their first name, with numbers ascending. :func:`expand_hosts`
    returns the same set of names.

    >>> fold_hosts(["gpu01", "gpu02", "gpu04", "login"])
    'gpu[01-02,04],login'
    """
    texts: dict[tuple[str, str], list[str]] = {}
    order: list[tuple[str, str] | str] = []
    for name in dict.fromkeys(names):
        match = None if _is_address6(name) else re.fullmatch(r"(.*?)([0-9]{1,9})([^0-9]*)", name)
        if match is None:
            order.append(name)
            continue
        key = (match[1], match[3])
        if key not in texts:
            order.append(key)
        texts.setdefault(key, []).append(match[2])
    parts: list[str] = []
    for entry in order:
        if isinstance(entry, str):
            parts.append(entry)
            continue
        prefix, suffix = entry
        for width, numbers in _group_by_width(texts[entry]):
            if len(numbers) == 1:
                parts.append(f"{prefix}{numbers[0]:0{width}d}{suffix}")
            else:
                parts.append(f"{prefix}[{_fold_numbers(numbers, width)}]{suffix}")
    return ",".join(parts)


def _group_by_width(texts: list[str]) -> list[tuple[int, list[int]]]:
    """Group numbers that fit in one range, each with the zero-padded width that they share."""
    padded = {len(text) for text in texts if text[0] == "0" and len(text) > 1}
    if not padded:
        return [(1, sorted(map(int, texts)))]
    if len(padded) == 1:
        width = padded.pop()
        if all(len(text) >= width for text in texts):
            return [(width, sorted(map(int, texts)))]
    by_length: dict[int, list[int]] = {}
    for text in texts:
        by_length.setdefault(len(text), []).append(int(text))
    return [(length, sorted(numbers)) for length, numbers in by_length.items()]


def _fold_numbers(numbers: list[int], width: int) -> str:
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        low, high = f"{members[0]:0{width}d}", f"{members[-1]:0{width}d}"
        parts.append(low if low == high else f"{low}-{high}")
    return ",".join(parts)


def _describe(source: str, number: int, line: str, column: int, message: str) -> str:
    """Return the full error text: place, reason, the line with the faulty part marked, and help."""
    shown = line.replace("\t", " ")
    return (
        f"{source}, line {number}, column {column + 1}: {message}.\n"
        f"    {shown}\n"
        f"    {' ' * column}^\n"
        f"{VALID_FORMS}"
    )


def _parse_line(content: str) -> list[Host]:
    match = _WORD.search(content)
    assert match is not None, "blank lines are skipped by the caller"
    entry, column = match.group(), match.start()
    if entry.startswith("-"):
        # ssh would treat it as an option, and -oProxyCommand=... runs a command.
        raise _PartError(column, f"'{entry}' begins with '-'; a host name cannot")
    if "=" in entry:
        raise _PartError(column, f"'{entry}' stands where the host name should")
    user, names, slots = _parse_entry(entry, column)
    common = Host(names[0], user=user)
    changes = _parse_attributes(content, match.end(), slots_in_entry=slots is not None)
    if slots is not None:
        changes["slots"] = slots
    labels = changes.get("labels", ())
    assert isinstance(labels, tuple)
    if changes.get("slots") == 0 and INPUT_LABEL not in labels:
        at = re.search(r"(?<![_-])slots\s*=\s*", content)
        raise _PartError(
            at.end() if at else column + entry.rindex(":") + 1,
            "slots is 0, so the host does not train; if it is to read for the others, write "
            f"labels={INPUT_LABEL} too",
        )
    final_slots = changes.get("slots", common.slots)
    max_slots = changes.get("max_slots")
    if isinstance(max_slots, int) and isinstance(final_slots, int) and max_slots < final_slots:
        at = re.search(r"max[_-]slots", content)
        raise _PartError(
            at.start() if at else column,
            f"max_slots={max_slots} is below the host's {count(final_slots, 'slot')}",
        )
    if changes:
        common = replace(common, **changes)  # type: ignore[arg-type]  # keys and types: _ATTRIBUTES
    return [common, *(replace(common, name=name) for name in names[1:])]


def _parse_entry(entry: str, column: int) -> tuple[str | None, list[str], int | None]:
    """Split ``user@names:slots`` into its parts."""
    user: str | None = None
    rest, start = entry, column
    if "@" in entry:
        user, _, rest = entry.rpartition("@")
        start += len(user) + 1
        if not _USER.fullmatch(user):
            raise _PartError(column, f"'{user}' is no user name")
    if rest.startswith("-"):
        raise _PartError(start, f"'{rest}' begins with '-'; a host name cannot")
    if not rest:
        raise _PartError(start, f"no host name in '{entry}'")

    bracketed = re.match(r"\[([^\[\]]*:[^\[\]]*)\](.*)", rest)
    if bracketed:
        name, tail = bracketed[1], bracketed[2]
        if not _is_address6(name):
            raise _PartError(start + 1, f"'{name}' is no IPv6 address")
        if tail and not tail.startswith(":"):
            raise _PartError(start + len(name) + 2, f"'{tail}' after the address")
        names, slots_text = [name], tail[1:] if tail else None
    elif rest.count(":") > 1:
        if not _is_address6(rest):
            raise _PartError(start, f"'{rest}' is neither 'host:slots' nor an IPv6 address")
        names, slots_text = [rest], None
    else:
        pattern, colon, tail = rest.partition(":")
        slots_text = tail if colon else None
        names = _expand(pattern, start)
    if slots_text is None:
        return user, names, None
    at = column + len(entry) - len(slots_text)
    return user, names, _parse_count("slots", slots_text, at)


def _expand(pattern: str, column: int) -> list[str]:
    """Return the names of a pattern; with several brackets, the last one varies fastest."""
    if _is_address6(pattern):
        return [pattern]
    leftover = _BRACKET.sub("", pattern)
    if "[" in leftover or "]" in leftover:
        raise _PartError(
            column + pattern.find("[" if "[" in leftover else "]"),
            f"unbalanced bracket in '{pattern}'",
        )
    choices: list[list[str]] = []
    count = 1
    position = 0
    for bracket in _BRACKET.finditer(pattern):
        choices.append([pattern[position : bracket.start()]])
        numbers = _expand_ranges(bracket[1], column + bracket.start() + 1)
        count *= len(numbers)
        if count > MAX_HOSTS:
            raise _PartError(column, f"'{pattern}' stands for more than {MAX_HOSTS} hosts")
        choices.append(numbers)
        position = bracket.end()
    choices.append([pattern[position:]])
    names = ["".join(parts) for parts in itertools.product(*choices)]
    for name in names[:1]:
        bad = _NAME.match(name)
        if bad is None or bad.end() != len(name):
            offending = name[bad.end()] if bad else name[:1]
            raise _PartError(
                column + max(pattern.find(offending), 0),
                f"'{offending}' cannot stand in the host name '{pattern}' "
                "(letters, digits, '-', '.', '_', ranges in [])",
            )
    return names


def _expand_ranges(text: str, column: int) -> list[str]:
    numbers: dict[str, None] = {}
    at = column
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _PartError(
                at, f"'{part}' in '[{text}]' is no range; write numbers such as [01-16] or [1-4,7]"
            )
        low, high = match["low"], match["high"] or match["low"]
        padded = low.startswith("0") and len(low) > 1
        if high.startswith("0") and len(high) > 1 and len(high) != len(low):
            raise _PartError(at, f"'{part}': both ends of a range are padded to the same width")
        if int(high) < int(low):
            raise _PartError(at, f"'{part}' runs backwards; the smaller number comes first")
        step = int(match["step"] or 1)
        if step < 1:
            raise _PartError(at, f"'{part}': the step is at least 1")
        span = range(int(low), int(high) + 1, step)
        if len(span) > MAX_HOSTS:
            raise _PartError(at, f"'{part}' stands for more than {MAX_HOSTS} hosts")
        width = len(low) if padded else 1
        numbers.update((f"{number:0{width}d}", None) for number in span)
        at += len(part) + 1
    return list(numbers)


def _parse_attributes(content: str, position: int, slots_in_entry: bool) -> dict[str, object]:
    changes: dict[str, object] = {}
    while True:
        word = _WORD.search(content, position)
        if word is None:
            return changes
        match = _ATTRIBUTE.match(content, word.start())
        if match is None:
            raise _PartError(
                word.start(), f"'{word.group()}' is no attribute; write key=value, one host a line"
            )
        key = match["key"].replace("-", "_")
        if key not in _ATTRIBUTES:
            raise _PartError(
                match.start(),
                f"unknown attribute '{match['key']}' (valid: {', '.join(_ATTRIBUTES)})",
            )
        if key in changes:
            raise _PartError(match.start(), f"'{key}=' is given twice")
        if key == "slots" and slots_in_entry:
            raise _PartError(
                match.start(),
                "slots are given twice: the number after the colon is slots as well. "
                "An ssh port is written port=2222",
            )
        changes[key] = _ATTRIBUTES[key](key, match["value"], match.start("value"))
        position = match.end()


def _parse_count(key: str, text: str, column: int) -> int:
    if not _INTEGER.fullmatch(text):
        raise _PartError(column, f"{key} is a whole number, not '{text}'")
    value = int(text)
    least, most = _RANGES[key]
    if not least <= value <= most:
        raise _PartError(column, f"{key} is {value}; it must be {least} to {most}")
    return value


def _parse_price(key: str, text: str, column: int) -> float:
    value = float(text) if _DECIMAL.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise _PartError(column, f"{key} is a number >= 0 (cost per hour), not '{text}'")
    return value


def _parse_labels(key: str, text: str, column: int) -> tuple[str, ...]:
    labels: dict[str, None] = {}
    at = column
    for label in text.split(","):
        if not _LABEL.fullmatch(label):
            raise _PartError(
                at, f"'{label}' is no label; write {key}=spot,a100 without blanks after the commas"
            )
        labels[label] = None
        at += len(label) + 1
    return tuple(labels)


def _parse_devices(key: str, text: str, column: int) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(_INTEGER.fullmatch(part) for part in parts):
        raise _PartError(column, f"{key} are numbers of GPUs as in {key}=0,1, not '{text}'")
    devices = tuple(map(int, parts))
    if len(set(devices)) < len(devices):
        raise _PartError(column, f"{key}={text} names a GPU twice")
    return devices


_ATTRIBUTES: dict[str, Callable[[str, str, int], object]] = {
    **dict.fromkeys(_RANGES, _parse_count),
    "price": _parse_price,
    "labels": _parse_labels,
    "devices": _parse_devices,
}


def _format_host(host: Host) -> str:
    words = [host.target, f"slots={host.slots}"]
    for field in fields(host):
        value = getattr(host, field.name)
        if field.name in ("name", "user", "slots") or value is None or value == ():
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else repr(value)
        words.append(f"{field.name}={text}")
    return " ".join(words)


def _is_address6(text: str) -> bool:
    if ":" not in text:
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    # A scope is the name of an interface. Other characters could be used to inject commands.
    return re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?", text) is not None


def _find_problems(host: Host) -> Iterator[str]:
    if not (_NAME.fullmatch(host.name) or _is_address6(host.name)):
        yield f"host name {host.name!r}: letters, digits, '-', '.', '_', or an IPv6 address"
    if host.user is not None and not _USER.fullmatch(host.user):
        yield f"user {host.user!r} of host {host.name}: letters, digits, '-', '.', '_', '+'"
    for key, (least, most) in _RANGES.items():
        value = getattr(host, key)
        if value is not None and not least <= value <= most:
            yield f"{key}={value} of host {host.name}: must be {least} to {most}"
    if not host.slots and INPUT_LABEL not in host.labels:
        yield (
            f"slots=0 of host {host.name}: such a host does not train; if it is to read for the "
            f"others, write labels={INPUT_LABEL}, else leave its line out"
        )
    if host.max_slots is not None and host.max_slots < host.slots:
        slots = count(host.slots, "slot")
        yield f"max_slots={host.max_slots} of host {host.name} is below its {slots}"
    if host.price is not None and not (math.isfinite(host.price) and host.price >= 0):
        yield f"price={host.price} of host {host.name}: a number >= 0"
    if host.devices and len(host.devices) < host.slots:
        yield (
            f"devices of host {host.name} are {len(host.devices)}, fewer than its "
            f"{count(host.slots, 'slot')}"
        )
    for label in host.labels:
        if not _LABEL.fullmatch(label):
            yield f"label {label!r} of host {host.name}: letters, digits, '_.:/-'"
