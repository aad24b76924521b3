"""Show the progress of a copy on a terminal: total, rate, time left, and state of each host."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hvd_elastic.formatting import unfiltered

if TYPE_CHECKING:
    from hvd_elastic.tools.copy.copying import CopyProgress


MOST_NAMED = 8


@contextlib.contextmanager
def copy_bar(*, quiet: bool) -> Iterator[Callable[[CopyProgress], None] | None]:
    """Return a context with a function that shows a :class:`CopyProgress`; None off a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[states]}"),
    )
    console = Console(file=unfiltered(sys.stderr))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("copy", total=None, states="")

        def show(now: CopyProgress) -> None:
            progress.update(
                bar,
                completed=now.done_bytes,
                total=now.total_bytes or None,
                states=states_in_words(now.states),
            )

        yield show


def states_in_words(states: dict[str, str]) -> str:
    """Return the state of each host; for many hosts the number in each state, in steps of 10 %.

    >>> states_in_words({"a": "done", "b": "42%"})
    'a done, b 42%'
    >>> states_in_words({f"n{i}": "done" if i else "42%" for i in range(9)})
    '1 at 40%, 8 done'
    """
    if len(states) <= MOST_NAMED:
        return ", ".join(f"{name} {state}" for name, state in states.items())
    counts: Counter[str] = Counter()
    for state in states.values():
        if state.endswith("%"):
            state = f"at {int(state[:-1]) // 10 * 10}%"
        counts[state] += 1
    return ", ".join(f"{number} {state}" for state, number in counts.items())
