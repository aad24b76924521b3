"""What an engine says of a task or actor that has failed, which is long, in a few words."""

from __future__ import annotations

import re

_ERROR = re.compile(
    r"^\s*(?:[\w.]+\.)?(?P<kind>\w+(?:Error|Exception)): (?P<text>\S.*)", re.MULTILINE
)
_MISSING = re.compile(r"No module named '(\w+)")


def last_error(said: str) -> str:
    r"""Return the last error that a text names, after which there may be advice; else its begin.

    >>> last_error("ray::map()\n  File …\nValueError: no such column x\nTo retry, configure …")
    'ValueError: no such column x'
    >>> last_error("hvd_elastic.errors.RunError: the link is lost\n")
    'the link is lost'
    """
    found = [*_ERROR.finditer(said)]
    if not found:
        return next(iter(said.strip().splitlines()), "no reason is given")
    kind, text = found[-1]["kind"], found[-1]["text"].rstrip()
    return text if kind == "RunError" else f"{kind}: {text}"


def missing_package(said: str) -> str | None:
    """Return the package that an import did not find; None: that was not the error.

    >>> missing_package("ModuleNotFoundError: No module named 'pyarrow.lib'")
    'pyarrow'
    """
    found = _MISSING.findall(said)
    return found[-1] if found else None
