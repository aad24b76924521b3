"""The parameters of a study: read from ``--param`` or a file, and put into a command."""

from __future__ import annotations

import contextlib
import math
import re
import runpy
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hvd_elastic.errors import HvdElasticError, UsageError, raise_together

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import BaseTrial

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PLACEHOLDER = re.compile(rf"\{{(\{{{_NAME.pattern}\}})\}}|\{{({_NAME.pattern})\}}")
"""A name in braces; in two pairs of them it is text."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(.*))?")
_WHOLE = re.compile(r"[-+]?\d+")
_MOST = 2.0**53
"""Up to here, every whole number is a floating-point number too."""
_MOST_POINTS = 100_000
TRIAL = "trial"
"""Placeholder for the number of the trial."""
Values: TypeAlias = Mapping[str, Any]
Space: TypeAlias = "Mapping[str, BaseDistribution]"
"""Values of each parameter."""


def grid_size(space: Space) -> int:
    """Return how many points a grid has.

    Raises:
        UsageError: it has too many, or a parameter has no end of values.
    """
    size = 1
    for name, each in space.items():
        low, high, step = (getattr(each, key, None) for key in ("low", "high", "step"))
        if low is None or high is None:
            size *= len(getattr(each, "choices", ()))
        elif step is None or getattr(each, "log", False):
            raise UsageError(
                f"--sampler grid tries all values, and {name} is a range without a step: list "
                f"them ({name}={low:g},{high:g}), or give a step ({name}={low:g}..{high:g}:STEP)"
            )
        else:
            size *= math.floor((high - low) / step + 1e-9) + 1
    if size > _MOST_POINTS:
        raise UsageError(
            f"the grid has {size:,} points, and may have {_MOST_POINTS:,}: give larger steps or "
            "shorter lists, or --sampler random"
        )
    return size


def parse_param(text: str) -> tuple[str, BaseDistribution]:
    """Return the name and the values of a parameter, as ``--param`` describes it.

    Raises:
        UsageError: it is not valid; the message says what is.

    >>> parse_param("lr=1e-4..1:log")
    ('lr', FloatDistribution(high=1.0, log=True, low=0.0001, step=None))
    >>> parse_param("width=64,128")[1], parse_param("layers=2..8")[1]
    (CategoricalDistribution(choices=(64, 128)), IntDistribution(high=8, log=False, low=2, step=1))
    """
    from optuna.distributions import CategoricalDistribution

    name, equals, values = text.partition("=")
    if not equals or not _NAME.fullmatch(name) or not values:
        raise UsageError(
            f"--param {text!r} is not valid: give NAME=LOW..HIGH, NAME=LOW..HIGH:log, "
            "NAME=LOW..HIGH:STEP or NAME=VALUE,VALUE,…, such as lr=1e-4..1:log"
        )
    if name == TRIAL:
        raise UsageError(
            f"--param {text}: {{{TRIAL}}} is the number of the trial; name it otherwise"
        )
    found = _RANGE.fullmatch(values)
    if found is not None:
        return name, _range(text, name, *found.groups())
    if ".." in values:
        raise UsageError(
            f"--param {text}: the bounds of a range are numbers, such as {name}=1e-4..1 or "
            f"{name}=1..8"
        )
    if values[0] in "[({" and values[-1] in "])}":
        raise UsageError(
            f"--param {text}: a list has no brackets: {name}={values[1:-1]}. A range has two "
            f"points: {name}=1e-4..1"
        )
    words = [word.strip() for word in values.split(",")]
    if "" in words or len({*words}) < len(words):
        raise UsageError(f"--param {text}: a value is empty or listed twice")
    if len(words) < 2:
        raise UsageError(
            f"--param {text}: one value is nothing to search. Write it into the command, or give "
            "several"
        )
    return name, CategoricalDistribution([_typed(word) for word in words])


def _range(text: str, name: str, low: str, high: str, how: str | None) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    least, most = float(low), float(high)
    step = None
    if not math.isfinite(most - least) or max(-least, most) > _MOST:
        raise UsageError(f"--param {text}: a bound is above {_MOST:g}, which is too large")
    if not least < most:
        what = "both bounds are equal" if least == most else "the bounds are reversed"
        raise UsageError(f"--param {text}: {what}; give NAME=LOW..HIGH, such as {name}=1e-4..1")
    if how == "log" and least <= 0:
        raise UsageError(
            f"--param {text}: a logarithmic range begins above 0, and this one begins at {low}"
        )
    if how not in (None, "log"):
        try:
            step = float(how)
        except ValueError:
            step = math.nan
        if not (most - least) / _MOST < step <= most - least:
            raise UsageError(
                f"--param {text}: what follows the range is log, or a step above 0 and at most "
                f"{most - least:g}, of which it has at most {_MOST:g}"
            )
    whole = all(_WHOLE.fullmatch(word) for word in (low, high, how) if word not in (None, "log"))
    if whole:
        return IntDistribution(int(low), int(high), log=how == "log", step=int(step or 1))
    return FloatDistribution(least, most, log=how == "log", step=step)


def _typed(word: str) -> str | int | float:
    """Return a value as the number that is written so, or else as text.

    >>> _typed("64"), _typed("0.5"), _typed("1e-4"), _typed("relu")
    (64, 0.5, '1e-4', 'relu')
    """
    for kind in (int, float):
        try:
            if str(value := kind(word)) == word and math.isfinite(value):
                return value
        except ValueError:
            continue
    return word


def check_space(names: Collection[str], command: Sequence[str], *, source: str = "--param") -> None:
    """Check that the placeholders of a command are the parameters.

    Args:
        source: where the parameters are from, for messages.

    Raises:
        UsageError: one is missing there or here.
    """
    found = [each for word in command for each in _PLACEHOLDER.finditer(word)]
    used = {each[2] for each in found if each[2]} - {TRIAL}
    known = ", ".join(names) or "none"

    def check_placeholders() -> None:
        for name in sorted(used - {*names}):
            raise UsageError(
                f"the command has a placeholder {{{name}}}, and no parameter is named so (there "
                f"is: {known}). Add it to {source}, or write {{{{{name}}}}} for the text itself"
            )

    def check_parameters() -> None:
        for name in names:
            if name not in used:
                raise UsageError(
                    f"no word of the command has the placeholder {{{name}}}, so parameter {name} "
                    f"would change nothing. Write it where it belongs, such as --{name} {{{name}}}"
                )

    raise_together(check_placeholders, check_parameters)


def fill(command: Sequence[str], values: Values, number: int) -> list[str]:
    """Return a command with the parameters of a trial.

    Raises:
        UsageError: there is a placeholder without a value.

    >>> fill(["train.py", "--lr={lr}", "--out", "t{trial}", "{{x}}"], {"lr": 0.1}, 3)
    ['train.py', '--lr=0.1', '--out', 't3', '{x}']
    """
    known = {**values, TRIAL: number}

    def value(found: re.Match[str]) -> str:
        if found[2] and found[2] not in known:
            raise UsageError(
                f"trial {number} has no value for the placeholder {{{found[2]}}}; it has: "
                f"{', '.join(values) or 'none'}. Let suggest() return a value for each placeholder "
                "in every case, such as 0 where it is not used"
            )
        return found[1] or str(known[found[2]])

    return [_PLACEHOLDER.sub(value, word) for word in command]


def of_file(path: Path) -> Callable[[BaseTrial], Values]:
    """Return the function ``suggest(trial)`` of a file, checked.

    It may return the values of the placeholders by name; otherwise they are those that it has
    asked the trial for.

    Raises:
        UsageError: the file has no such function, or it fails.
    """
    path = path.absolute()
    try:
        path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    with _explained(path):
        function = runpy.run_path(str(path)).get("suggest")
    if not callable(function):
        raise UsageError(
            f"{path} has no function suggest(trial), which asks for the parameters: "
            'trial.suggest_float("lr", 1e-4, 1, log=True)'
        )

    def suggest(trial: BaseTrial) -> Values:
        with _explained(path):
            values = function(trial)
        if values is not None and not isinstance(values, Mapping):
            raise UsageError(
                f"{path}: suggest() has returned a {type(values).__name__}; it returns nothing, or "
                "the values of the placeholders by name"
            )
        found = dict(trial.params if values is None else values)
        if wrong := [name for name in found if not isinstance(name, str)]:
            raise UsageError(f"{path}: suggest() has returned {wrong[0]!r} as a placeholder's name")
        return found

    return suggest


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of a user's file into one that names its line."""
    try:
        yield
    except HvdElasticError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        line = f", line {lines[-1]}" if lines else ""
        raise UsageError(f"{path}{line}: {type(error).__name__}: {error}") from error
