"""Format counts and names for messages to the user."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["count", "hosts_named", "plural", "worker_name"]

_NAMED_AT_MOST = 4


def plural(noun: str, number: object) -> str:
    """Return a noun in singular or plural form, as needed after a number.

    >>> plural("slot", 1), plural("slot", 0), plural("process", 2), plural("try", 4)
    ('slot', 'slots', 'processes', 'tries')
    """
    if number == 1:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def count(number: object, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "host"), count(3, "process")
    ('1 host', '3 processes')
    """
    return f"{number} {plural(noun, number)}"


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
