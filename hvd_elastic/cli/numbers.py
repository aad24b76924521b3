"""Options and arguments that take a number, and say which when they are given something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import typer

from hvd_elastic.errors import UsageError

__all__ = ["number_option", "parse_number", "parse_whole_number", "whole_number_option"]


def parse_whole_number(name: str, value: object, least: int = 1, instead: str = "") -> int:
    """The number that ``value`` says.

    Args:
        name: what it is given as, for the message.
        value: a text, or a default that is a number already.
        least: the smallest that makes sense.
        instead: what else is taken, for the message.

    Raises:
        UsageError: says what is taken.

    >>> parse_whole_number("--np", "4")
    4
    """
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if number < least:
        raise UsageError(f"{name} takes a whole number of {least} or more{instead}, not '{value}'")
    return number


def parse_number(name: str, value: object, least: float = 0.0, above: bool = False) -> float:
    """As :func:`parse_whole_number`; with ``above``, ``least`` itself is too small."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not (number > least if above else number >= least) or math.isinf(number):
        limit = f"above {least:g}" if above else f"of {least:g} or more"
        raise UsageError(f"{name} takes a number {limit}, not '{value}'")
    return number


def whole_number_option(*names: str, least: int = 1, help: str) -> Any:  # noqa: A002
    """An option for a whole number, by its spellings."""
    return _option(lambda value: parse_whole_number(names[0], value, least), names, "N", help)


def number_option(
    *names: str,
    least: float = 0.0,
    above: bool = False,
    metavar: str = "NUMBER",
    help: str,  # noqa: A002
) -> Any:
    """An option for any number, by its spellings."""
    return _option(lambda value: parse_number(names[0], value, least, above), names, metavar, help)


def _option(
    parse: Callable[[object], float], names: tuple[str, ...], metavar: str, text: str
) -> Any:
    return typer.Option(*names, parser=parse, metavar=metavar, help=text)
