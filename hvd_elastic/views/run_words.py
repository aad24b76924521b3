"""Tells in words how a run is: how fast, how far, what is in the way, what was decided."""

from __future__ import annotations

import contextlib
import time

from hvd_elastic.formatting import count, duration_words, number_words, plural
from hvd_elastic.records.run_state import GOES_ON
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.records.wording import left_out_words
from hvd_elastic.views.allocation import slow_hosts
from hvd_elastic.views.costs import forecast_words, lost_words
from hvd_elastic.views.forecast import predict_end
from hvd_elastic.views.page import escape

READING = "reading"
"""State of a run whose events are not all read yet."""


def run_words(summary: RunSummary, state: str) -> str:
    """Return what matters now as HTML, in words, with a bar of the part that is done."""
    told = []
    if summary.plain and state == "running":
        told.append("The command runs.")
    elif state == "running":
        rate = summary.last.get("throughput")
        fast = f" at {number_words(round(rate))} examples/s" if rate else ""
        told.append(f"Trains on {count(summary.size, 'slot')}{fast}.")
    elif state == READING:
        told.append("The events of this run are still being read; what there is so far is shown.")
    elif state == "waiting":
        told.append(f"Waits: {summary.waiting}.")
    elif has_ended(state):
        steps = f"{number_words(summary.steps)} {plural('step', summary.steps)}"
        least = "" if summary.exact else "at least "
        took = duration_words(summary.duration_s)
        after = took if summary.plain else f"{took} and {least}{steps}"
        told.append(f"{state.capitalize()} after {after}.")
    done = summary.last.get("done") if state in GOES_ON else None
    if isinstance(done, float):
        told.append(forecast_words(summary, done, predict_end(summary)))
    for name, factor in slow_hosts(summary).items():
        told.append(f"Host {name} is slow: its steps take {factor:.1f} x the median of the hosts.")
    if summary.input and "no bottleneck" not in summary.input:
        told.append(f"Data: {summary.input}.")
    paused_s = sum(each.pause_s or 0.0 for each in summary.live_rescales)
    left_out = left_out_words(summary.last)
    if left_out:
        told.append(f"Left out: {left_out}.")
    if summary.live_rescales:
        rescales = count(len(summary.live_rescales), "rescale")
        told.append(f"{rescales} took {duration_words(paused_s)} of training together.")
    lost = lost_words(summary)
    if lost:
        told.append(lost)
    decided = [said for said in summary.decisions if said.kind == "decision"]
    if decided:
        at = clock_words((summary.started or 0.0) + decided[-1].at_s)
        told.append(f"The policy decided at {at}: {decided[-1].text}.")
    if summary.missed:
        told.append(f"It fell short: {summary.missed}.")
    if summary.misfits:
        told.append(f"{count(summary.misfits, 'event')} with unexpected fields left out.")
    if summary.warnings:
        told.append(f"Last warning: {summary.warnings[-1].text}")
    if not told:
        return ""
    bar = progress_bar(done) if isinstance(done, float) else ""
    lines = "".join(f"<p>{escape(text)}</p>" for text in told)
    return f'<section class="words">{lines}{bar}</section>'


def progress_bar(done: float) -> str:
    """Return a bar of the part that is done as HTML."""
    return (
        f'<svg class="done" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{done:.0%} done"><rect width="{100 * done:.2f}" height="1"></rect></svg>'
    )


def has_ended(state: str) -> bool:
    """Return whether a run in this state is over."""
    return state in ("succeeded", "failed", "stopped", "died")


def clock_words(t: float | None) -> str:
    """Return the time of day of Unix seconds."""
    with contextlib.suppress(TypeError, OverflowError, ValueError, OSError):  # in no calendar
        if t is not None:
            return time.strftime("%H:%M:%S", time.localtime(t))
    return "–"
