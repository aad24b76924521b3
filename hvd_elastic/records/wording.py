"""Events in words: one line for what is worth a line, and numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_elastic.control.endings import Departure
from hvd_elastic.formatting import count, plural, worker_name

__all__ = [
    "Line",
    "Narrator",
    "batch_words",
    "bytes_words",
    "duration_words",
    "number_words",
    "outcome_words",
    "progress_words",
    "resume_words",
    "shares_words",
]

_SHARES_TOLD = 8
_DEPARTURES = {departure.value: departure for departure in Departure}


@dataclass(frozen=True)
class Line:
    """One line for the reader; ``tone`` is ``good``, ``bad``, ``change``, ``note`` or ``plain``."""

    text: str
    tone: str = "plain"


class Narrator:
    """Tells events one by one; remembers what it needs to tell a rescale in one line.

    >>> narrator = Narrator()
    >>> narrator.tell({"kind": "rescale_started", "generation": 2, "from_size": 2, "to_size": 3,
    ...                "reason": "host node3 joined: 2 → 3 slots"})
    []
    >>> [line.text for line in narrator.tell(
    ...     {"kind": "rescale_finished", "generation": 2, "size": 3, "pause_s": 0.1234})]
    ['host node3 joined: 2 → 3 slots (pause 0.12 s)']
    """

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._batch: Mapping[str, Any] = {}
        self._crash = ""
        self._error = ""

    def tell(self, event: Mapping[str, Any]) -> list[Line]:
        """The lines for this event; mostly none or one."""
        kind = event.get("kind")
        if kind == "rescale_started":
            # Its first step may be reported only after the next rescale has begun.
            self._reasons[int(event.get("generation") or 0)] = _rescale_words(event)
            return []
        if kind == "rescale_finished":
            return self._rescale_finished(event)
        if kind == "run_finished":
            way_on = resume_words(event)
            more = [Line(way_on, "note")] if way_on else []
            unfinished = self._unfinished()
            if event.get("status") == "failed" and not event.get("steps"):
                unfinished = []  # training never began, and why says more
            message = str(event.get("message") or "")
            if self._error and message.endswith(f": {self._error}"):  # told in full before
                event = {**event, "message": message.removesuffix(f": {self._error}")}
            return [*unfinished, _run_finished(event), *more]
        if kind == "batch_plan":
            text = batch_words(event, self._batch)
            self._batch = event
            return [Line(text, "change")] if text else []
        if kind == "script_failed":
            self._error = str(event.get("traceback") or "").rstrip().rsplit("\n", 1)[-1]
        elif kind == "worker_crashed":
            worker = worker_name(event.get("host"), event.get("local_rank"))
            self._crash = f"worker {worker} {event.get('cause')}"
        elif kind == "worker_left" and self._crash and event.get("cause") == self._crash:
            self._crash = ""
            return []  # told with its stack
        line = _tell(str(kind), event)
        before = self._unfinished() if kind in ("run_started", "waiting") else []
        return before if line is None else [*before, line]

    def _unfinished(self) -> list[Line]:
        lines = [Line(f"{text} (not finished)", "change") for text in self._reasons.values()]
        self._reasons = {}
        return lines

    def _rescale_finished(self, event: Mapping[str, Any]) -> list[Line]:
        generation, size = int(event.get("generation") or 0), event.get("size")
        pause_s = event.get("pause_s")
        reason = self._reasons.pop(generation, count(size, "slot"))
        # Earlier ones that broke before a step was done get a line too: their causes count.
        broken = [number for number in self._reasons if number < generation]
        lines = [Line(self._reasons.pop(number), "change") for number in broken]
        if pause_s is None:
            return [*lines, Line(f"training on {count(size, 'slot')}: {reason}", "good")]
        return [*lines, Line(f"{reason} (pause {duration_words(float(pause_s))})", "change")]


def _tell(kind: str, event: Mapping[str, Any]) -> Line | None:
    get = event.get
    host = get("host")
    worker = worker_name(host, get("local_rank"))
    if kind == "run_started":
        hosts = get("hosts") or []
        slots = sum(int(entry[1]) for entry in hosts)
        return Line(
            f"run {get('run_id')}: {count(len(hosts), 'host')}, {count(slots, 'slot')}", "plain"
        )
    if kind == "taken_over":
        size = count(get("size"), "process")
        return Line(f"took over the run: {size} went on training without a leader", "good")
    if kind == "leader_cut_off":
        grace = duration_words(float(get("grace_s") or 0))
        return Line(
            f"no host was heard of for {duration_words(float(get('silent_s') or 0))}: this machine "
            f"is cut off, or all of them are gone. Training goes on without a leader for {grace}; "
            "trying to reach them",
            "bad",
        )
    if kind == "host_lost":
        return Line(f"host {host} lost: {get('cause')}", "bad")
    if kind == "host_draining":
        left = get("leave_in_s")
        when = "" if left is None else f", it has {duration_words(float(left))}"
        return Line(f"host {host} is being drained ({get('cause')}){when}", "change")
    if kind == "host_drained":
        return Line(f"host {host} is drained: nothing of this run is left on it", "note")
    if kind == "host_returned":
        return Line(f"host {host} is given back and may be used again", "good")
    if kind == "worker_left":
        return _worker_left(worker, event)
    if kind == "waiting":
        return Line(str(get("reason") or "waiting for hosts"), "note")
    if kind == "hosts_changed":
        hosts = " ".join(f"{name}:{slots}" for name, slots in get("hosts") or []) or "none"
        return Line(f"hosts are now: {hosts}", "note")
    if kind == "restored":
        return Line(f"went back to step {get('step')}, from {get('path') or 'the start'}", "note")
    if kind == "shares":
        return Line(shares_words(event), "change")
    if kind == "prediction_missed":
        return Line(f"prediction missed: {get('reason')}", "note")
    if kind == "decision":
        return Line(f"decision: {get('action')}: {get('reason')}", "note")
    if kind == "stop_requested":
        return Line(f"stopping: {get('reason')}", "note")
    if kind == "command_done":
        if get("ok", True):
            return Line(f"done as asked: {get('message')}", "note") if get("message") else None
        return Line(f"could not do as asked: {get('message')}", "bad")
    if kind == "warning":
        return Line(f"warning: {get('message')}", "bad")
    if kind == "log_note":
        return Line(str(get("message") or get("text") or ""), "note")
    if kind == "script_failed":
        trace = str(get("traceback") or "").rstrip()
        return Line(f"the script failed in worker {worker}:\n{trace}", "bad")
    if kind == "worker_crashed":
        trace = str(get("traceback") or "").rstrip()
        return Line(f"worker {worker} {get('cause')}:\n{trace}", "bad")
    return None


def _worker_left(worker: str, event: Mapping[str, Any]) -> Line | None:
    cause = str(event.get("cause") or "no cause given")
    # Runs of earlier releases have no ``how``; their cause is the same word where all went well.
    match _DEPARTURES.get(str(event.get("how", cause))):
        case Departure.LEFT:
            return Line(f"worker {worker} left as asked", "note")
        case Departure.FINISHED:
            return Line(f"worker {worker} left: finished", "note")
        case Departure.HOST_LOST:
            return None  # the event of the host says it
        case Departure.KILLED | Departure.DIED:
            return Line(cause, "bad")
    return Line(f"worker {worker} left: {cause}", "bad")


def _rescale_words(event: Mapping[str, Any]) -> str:
    return str(event.get("reason") or f"{event.get('from_size')} → {event.get('to_size')} slots")


def _run_finished(event: Mapping[str, Any]) -> Line:
    status = str(event.get("status") or "finished")
    tone = {"succeeded": "good", "failed": "bad"}.get(status, "note")
    message = str(event.get("message") or "")
    words = outcome_words(status, event.get("steps"), event.get("examples"), message)
    return Line(f"run {words}", tone)


def resume_words(event: Mapping[str, Any]) -> str:
    """From where a run that ended before its time can go on; empty where there is nothing to say.

    Args:
        event: its ``run_finished``.

    >>> resume_words({"status": "stopped", "run_id": "r1", "steps": 9, "checkpoint_step": 9})
    'its checkpoint is of step 9; go on with: hvd-elastic run --resume r1'
    >>> resume_words({"status": "failed", "run_id": "r1", "steps": 9, "checkpoint_step": 7})
    'its checkpoint is of step 7, so 2 steps will be done again; go on with: hvd-elastic run --resume r1'
    >>> resume_words({"status": "stopped", "run_id": "r1", "steps": 9, "checkpoint_step": None})
    'it has no checkpoint here: --resume goes on from one that is still on a host, or begins anew'
    >>> resume_words({"status": "stopped", "run_id": "r1", "steps": 0, "checkpoint_step": 9})
    'its checkpoint is of step 9; go on with: hvd-elastic run --resume r1'
    >>> resume_words({"status": "failed", "steps": 9, "checkpoint_step": 7, "led_elsewhere": True})
    ''
    """  # noqa: E501
    steps = event.get("steps")
    if event.get("status") == "succeeded" or steps is None or "checkpoint_step" not in event:
        return ""
    step = event["checkpoint_step"]
    if event.get("led_elsewhere"):
        return ""  # it goes on there
    if not steps and (step is None or event.get("status") == "failed"):
        return ""  # nothing was begun, and why it failed says the rest
    if step is None:
        return (
            "it has no checkpoint here: --resume goes on from one that is still on a host, "
            "or begins anew"
        )
    undone = f", so {count(steps - step, 'step')} will be done again" if step < steps else ""
    return (
        f"its checkpoint is of step {step}{undone}; "
        f"go on with: hvd-elastic run --resume {event.get('run_id')}"
    )


def outcome_words(status: str, steps: int | None, examples: int | None, message: str) -> str:
    """How a run ended, or stands.

    >>> outcome_words("stopped", 12, 1200, "Ctrl-C")
    'stopped after 12 steps, 1,200 examples: Ctrl-C'
    """
    text = f"{status} after {count(steps, 'step')}"
    if examples:
        text += f", {number_words(examples)} {plural('example', examples)}"
    return f"{text}: {message}" if message else text


def progress_words(metrics: Mapping[str, Any], size: int) -> str:
    """The newest metrics on one line.

    >>> progress_words({"step": 120, "epoch": 3, "loss": 0.41237, "throughput": 812.4}, 3)
    'step 120 · epoch 3 · loss 0.412 · 812 examples/s · 3 workers'
    """
    parts = []
    if metrics.get("step") is not None:
        parts.append(f"step {metrics['step']}")
    if metrics.get("epoch") is not None:
        parts.append(f"epoch {metrics['epoch']}")
    if "loss" in metrics:
        parts.append(f"loss {number_words(metrics['loss'])}")
    if metrics.get("throughput") is not None:
        parts.append(f"{number_words(metrics['throughput'])} examples/s")
    if size:
        parts.append(count(size, "worker"))
    if metrics.get("accuracy") is not None:
        parts.append(f"accuracy {number_words(metrics['accuracy'])}")
    return " · ".join(parts)


def number_words(value: Any) -> str:
    """A number with three digits that mean something.

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


def shares_words(event: Mapping[str, Any]) -> str:
    """How a batch is shared out among the ranks, and why; the first of many.

    >>> shares_words({"shares": [24, 8], "global_batch_size": 32, "reason": "rank 1 is slow"})
    'the ranks have 24, 8 of 32 examples: rank 1 is slow'
    >>> shares_words({"shares": [], "reason": "the ranks are equally fast, to 5 %"})
    'equal shares of the batch: the ranks are equally fast, to 5 %'
    """
    shares, reason = event.get("shares") or [], event.get("reason")
    if not shares:
        return f"equal shares of the batch: {reason}"
    told = ", ".join(map(str, shares[:_SHARES_TOLD]))
    more = f" and {len(shares) - _SHARES_TOLD} more" if len(shares) > _SHARES_TOLD else ""
    return f"the ranks have {told}{more} of {event.get('global_batch_size')} examples: {reason}"


def batch_words(plan: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """How a batch that adapts has changed, and why; empty where it has not.

    Args:
        plan: a ``batch_plan`` event.
        before: the one before it; empty where there is none, or it is not known.

    >>> first = {"global_batch_size": 64, "accumulation_steps": 0, "limits": {"initial_batch_size": 64}}
    >>> batch_words(first, {})
    ''
    >>> grown = {**first, "global_batch_size": 128, "lr_scale": 1.74, "reason": "noise"}
    >>> batch_words(grown, first)
    'batch 64 → 128 examples, learning rate x 1.74: noise'
    >>> batch_words({**grown, "accumulation_steps": 1, "atomic_batch_size": 32}, grown)
    'batch of 128 examples in 2 passes of 32 on each rank, learning rate x 1.74: noise'
    """  # noqa: E501
    size, extra = plan.get("global_batch_size"), plan.get("accumulation_steps") or 0
    initial = (plan.get("limits") or {}).get("initial_batch_size")
    known = before or {"global_batch_size": initial}
    old = known.get("global_batch_size")
    if size == old and extra == (known.get("accumulation_steps") or 0):
        return ""
    text = f"batch of {number_words(size)} examples"
    if size != old and old is not None:
        text = f"batch {number_words(old)} → {number_words(size)} examples"
    if extra:
        text += f" in {extra + 1} passes of {plan.get('atomic_batch_size')} on each rank"
    if plan.get("lr_scale") is not None:
        text += f", learning rate x {number_words(plan['lr_scale'])}"
    return f"{text}: {plan.get('reason')}"


def duration_words(seconds: float | None) -> str:
    """A length of time.

    >>> [duration_words(s) for s in (0.123, 7.5, 75, 3725, 200000, None)]
    ['0.12 s', '7.5 s', '1 m 15 s', '1 h 02 m', '2 d 07 h', '–']
    """
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def bytes_words(count: float) -> str:
    """A number of bytes.

    >>> [bytes_words(n) for n in (12, 4096, 3_200_000, 7_000_000_000)]
    ['12 B', '4.1 kB', '3.2 MB', '7.0 GB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
