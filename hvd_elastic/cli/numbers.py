"""Parse numbers of options and arguments, with errors that name the valid values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import typer

from hvd_elastic.errors import UsageError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_PLAIN_SECONDS = re.compile(r"\d+(\.\d+)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_whole_number(
    name: str, value: object, least: int = 1, instead: str = "", most: int | None = None
) -> int:
    """Return the integer that ``value`` represents.

    Args:
        name: name of the option or argument, for the message.
        value: text, or a default that is a number already.
        least: smallest valid number.
        instead: further valid values in words, for the message.
        most: largest valid number; None: any.

    Raises:
        UsageError: the value is not valid; names the valid ones.

    >>> parse_whole_number("--np", "4")
    4
    """
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        valid = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} takes a whole number {valid}{instead}, not '{value}'")
    return number


def parse_number(name: str, value: object, least: float = 0.0, above: bool = False) -> float:
    """Return the number that ``value`` represents.

    Args:
        name, value: see :func:`parse_whole_number`.
        least: smallest valid number; with ``above`` it is not valid itself.
        above: whether the number must be above ``least``.

    Raises:
        UsageError: the value is not valid; names the valid ones.
    """
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not (number > least if above else number >= least) or math.isinf(number):
        limit = f"above {least:g}" if above else f"of {least:g} or more"
        raise UsageError(f"{name} takes a number {limit}, not '{value}'")
    return number


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


def whole_number_option(
    *names: str,
    least: int = 1,
    most: int | None = None,
    help: str,  # noqa: A002
) -> Any:
    """Return a typer option for an integer."""

    def parse(value: object) -> int:
        return parse_whole_number(names[0], value, least, most=most)

    return _option(parse, names, "N", help)


def port_option(help: str) -> Any:  # noqa: A002
    """Return a typer option for a TCP port; 0 is valid."""
    return whole_number_option("--port", least=0, most=65535, help=help)


def number_option(
    *names: str,
    least: float = 0.0,
    above: bool = False,
    metavar: str = "NUMBER",
    help: str,  # noqa: A002
) -> Any:
    """Return a typer option for a number."""
    return _option(lambda value: parse_number(names[0], value, least, above), names, metavar, help)


def _option(
    parse: Callable[[object], float], names: tuple[str, ...], metavar: str, text: str
) -> Any:
    return typer.Option(*names, parser=parse, metavar=metavar, help=text)
