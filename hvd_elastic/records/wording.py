"""Turns events into lines of text for users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_elastic.control.endings import Departure
from hvd_elastic.formatting import count, duration_words, number_words, plural, worker_name

_SHARES_TOLD = 8  # number of ranks whose shares are listed, so that the text fits a line
_DEPARTURES = {departure.value: departure for departure in Departure}


@dataclass(frozen=True)
class Line:
    """One line of text; ``tone`` is ``good``, ``bad``, ``change``, ``note`` or ``plain``."""

    text: str
    tone: str = "plain"


MISFIT = (TypeError, ValueError, OverflowError, LookupError, AttributeError)
"""Errors at an event whose fields are not those of its kind, as a file that was damaged, or written
by another version, may have."""


class Narrator:
    """Turns events into lines, one at a time; combines the events of a rescale into one line.

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
        self._plain = False

    def tell(self, event: Mapping[str, Any]) -> list[Line]:
        """Return the lines for an event, usually none or one."""
        try:
            return self._lines(event)
        except MISFIT:
            return [Line(f"an event '{event.get('kind')}' has unexpected fields", "note")]

    def _lines(self, event: Mapping[str, Any]) -> list[Line]:
        kind = str(event.get("kind"))
        before: list[Line] = []
        match kind:
            case "rescale_started":
                # Its end may be reported only after the next rescale has begun.
                self._reasons[int(event.get("generation") or 0)] = _rescale_words(event)
                return []
            case "rescale_finished":
                return self._rescale_finished(event)
            case "run_finished":
                return self._run_finished(event)
            case "batch_plan":
                text = batch_words(event, self._batch)
                self._batch = event
                return [Line(text, "change")] if text else []
            case "script_failed":
                self._error = _traceback(event).rsplit("\n", 1)[-1]
            case "worker_crashed":
                self._crash = f"worker {_worker(event)} {event.get('cause')}"
            case "worker_left":
                if self._crash and event.get("cause") == self._crash:
                    self._crash = ""
                    return []  # the crash was already shown with its stack
            case "input" if event.get("bound") == "nothing":
                return []
            case "run_started" | "waiting":
                before = self._unfinished()
                self._plain = event.get("plain") is True if kind == "run_started" else self._plain
        if self._plain and kind in ("worker_left", "script_failed"):
            return _plain_lines(event)
        line = _tell(kind, event)
        return before if line is None else [*before, line]

    def _run_finished(self, event: Mapping[str, Any]) -> list[Line]:
        status = str(event.get("status") or "finished")
        unfinished = self._unfinished()
        if status in ("failed", "succeeded") and not event.get("steps"):
            unfinished = []  # there was no step to finish the start: its end is enough
        message = str(event.get("message") or "")
        if self._error:
            message = message.removesuffix(f": {self._error}")  # was shown in full before
        exact = event.get("exact") is not False
        steps = None if self._plain else event.get("steps")
        examples = event.get("examples")
        words = outcome_words(status, steps, examples, message, exact=exact)
        ended = Line(f"run {words}", {"succeeded": "good", "failed": "bad"}.get(status, "note"))
        way_on = resume_words(event)
        return [*unfinished, ended, *([Line(way_on, "note")] if way_on else [])]

    def _unfinished(self) -> list[Line]:
        lines = [Line(f"{text} (not finished)", "change") for text in self._reasons.values()]
        self._reasons = {}
        return lines

    def _rescale_finished(self, event: Mapping[str, Any]) -> list[Line]:
        generation, size = int(event.get("generation") or 0), event.get("size")
        pause_s = event.get("pause_s")
        reason = self._reasons.pop(generation, count(size, "slot"))
        # Earlier rescales that broke before their first step get a line too, to show their causes.
        broken = [number for number in self._reasons if number < generation]
        lines = [Line(self._reasons.pop(number), "change") for number in broken]
        if pause_s is None:
            return [*lines, Line(f"training on {count(size, 'slot')}: {reason}", "good")]
        return [*lines, Line(f"{reason} (pause {duration_words(float(pause_s))})", "change")]


class _Fields(dict[str, Any]):
    """The fields of an event; a missing field is None."""

    def __missing__(self, _: str) -> None:
        return None


def _tell(kind: str, event: Mapping[str, Any]) -> Line | None:
    """Return the line for an event that needs no other event; None: it has none."""
    if kind == "worker_left":
        return _worker_left(event)
    if kind == "command_done":
        return _command_done(event)
    if kind not in _LINES:
        return None
    words, tone = _LINES[kind]
    return Line(words.format_map(_Fields(event)) if isinstance(words, str) else words(event), tone)


def _run_started(event: Mapping[str, Any]) -> str:
    hosts = event.get("hosts") or []
    slots = sum(int(entry[1]) for entry in hosts)
    return f"run {event.get('run_id')}: {count(len(hosts), 'host')}, {count(slots, 'slot')}"


def _taken_over(event: Mapping[str, Any]) -> str:
    size = count(event.get("size"), "worker")
    return f"took over the run: {size} went on training without a leader"


def _leader_cut_off(event: Mapping[str, Any]) -> str:
    silent, grace = (duration_words(float(event.get(k) or 0)) for k in ("silent_s", "grace_s"))
    return (
        f"no host was heard of for {silent}: this machine is cut off, or all of them are gone. "
        f"Training goes on without a leader for {grace}; trying to reach them"
    )


def _host_draining(event: Mapping[str, Any]) -> str:
    left = event.get("leave_in_s")
    when = "" if left is None else f", it has {duration_words(float(left))}"
    return f"host {event.get('host')} is being drained ({event.get('cause')}){when}"


def _hosts_changed(event: Mapping[str, Any]) -> str:
    named = " ".join(f"{name}:{slots}" for name, slots in event.get("hosts") or []) or "none"
    return f"hosts are now: {named}"


def _script_failed(event: Mapping[str, Any]) -> str:
    return f"the script failed in worker {_worker(event)}:\n{_traceback(event)}"


def _worker_crashed(event: Mapping[str, Any]) -> str:
    return f"worker {_worker(event)} {event.get('cause')}:\n{_traceback(event)}"


def _worker(event: Mapping[str, Any]) -> str:
    return worker_name(event.get("host"), event.get("local_rank"))


def _traceback(event: Mapping[str, Any]) -> str:
    return str(event.get("traceback") or "").rstrip()


def _command_done(event: Mapping[str, Any]) -> Line | None:
    message = event.get("message")
    if not event.get("ok", True):
        return Line(f"could not do as asked: {message}", "bad")
    return Line(f"done as asked: {message}", "note") if message else None


def _worker_left(event: Mapping[str, Any]) -> Line | None:
    worker, cause = _worker(event), str(event.get("cause") or "no cause given")
    # Earlier releases recorded no ``how``, but the same words as the cause of an orderly end.
    match _DEPARTURES.get(str(event.get("how", cause))):
        case Departure.LEFT:
            return Line(f"worker {worker} left as asked", "note")
        case Departure.FINISHED:
            return Line(f"worker {worker} left: finished", "note")
        case Departure.HOST_LOST:
            return None  # the event of the host has its own line
        case Departure.KILLED | Departure.DIED:
            return Line(cause, "bad")
    return Line(f"worker {worker} left: {cause}", "bad")


def _plain_lines(event: Mapping[str, Any]) -> list[Line]:
    """Return the lines for what a plain command does; the end of the run tells its exit status."""
    if event.get("kind") == "worker_left":
        return []
    return [Line(f"the command failed on host {event.get('host')}:\n{_traceback(event)}", "bad")]


def _rescale_words(event: Mapping[str, Any]) -> str:
    return str(event.get("reason") or f"{event.get('from_size')} → {event.get('to_size')} slots")


def resume_words(event: Mapping[str, Any]) -> str:
    """Return how a run that ended early can be resumed; empty if it cannot or need not.

    Args:
        event: the run's ``run_finished`` event.

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
        return ""  # the run continues under the other leader
    if not steps and (step is None or event.get("status") == "failed"):
        return ""  # nothing was trained, and the cause of the failure is enough
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


def outcome_words(
    status: str, steps: int | None, examples: int | None, message: str, *, exact: bool = True
) -> str:
    """Return the status of a run with its progress, and how it ended; steps None: it has none.

    >>> outcome_words("stopped", 12, 1200, "Ctrl-C")
    'stopped after 12 steps, 1,200 examples: Ctrl-C'
    >>> outcome_words("failed", 1, None, "", exact=False)
    'failed after at least 1 step'
    >>> outcome_words("succeeded", None, None, "the command ended with exit status 0 on host node1")
    'succeeded: the command ended with exit status 0 on host node1'
    """
    text = status
    if steps is not None:
        text += f" after {'' if exact else 'at least '}{count(steps, 'step')}"
    if examples:
        text += f", {number_words(examples)} {plural('example', examples)}"
    return f"{text}: {message}" if message else text


def left_out_words(metrics: Mapping[str, Any]) -> str:
    """Return how many steps were left out as the newest metrics tell it; empty: none.

    >>> left_out_words({"step": 120, "skipped_steps": 2})
    '2 steps, whose gradients were not finite'
    """
    skipped = metrics.get("skipped_steps")
    return f"{count(skipped, 'step')}, whose gradients were not finite" if skipped else ""


def progress_words(metrics: Mapping[str, Any], size: int) -> str:
    """Return the newest metrics as one line.

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


def shares_words(event: Mapping[str, Any]) -> str:
    """Return how the batch is divided among the ranks, and why; only the first ranks are listed.

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
    """Return how an adaptive batch size has changed, and why; empty if it has not.

    Args:
        plan: ``batch_plan`` event.
        before: previous ``batch_plan`` event; empty if there is none.

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


def awaited_words(reason: str, awaited: Mapping[str, Sequence[str]], *, runs: bool) -> str:
    """Return the reason of a job that is to have slots which other jobs have to leave first.

    Args:
        reason: why it is to have them.
        awaited: runs that have to leave each host.
        runs: whether the job runs; else it waits.

    >>> awaited_words("starts with 1 slot", {"node2": ["digits-3"]}, runs=False)
    'waits until digits-3 has left slots on node2; then: starts with 1 slot'
    >>> awaited_words("grows to 2 slots", {"node2": []}, runs=True)
    'grows to 2 slots, as soon as slots are free on node2'
    """
    leaving = dict.fromkeys(run for those in awaited.values() for run in those)
    hosts = ", ".join(awaited)
    until = f"{_all_of(leaving)} left slots on {hosts}" if leaving else f"slots are free on {hosts}"
    return f"{reason}, as soon as {until}" if runs else f"waits until {until}; then: {reason}"


def removed_host_words(ends: Sequence[str], leaves: Sequence[str]) -> str:
    """Return what is awaited before a host that has no slots in the hostfile any more is empty.

    Args:
        ends: runs of plain commands, which stay until they end.
        leaves: other runs.

    >>> removed_host_words(["sleep-1"], [])
    'taken out of the hostfile; empty as soon as sleep-1 has ended'
    """
    awaited = [f"{_all_of(ends)} ended"] if ends else []
    awaited += [f"{_all_of(leaves)} left it"] if leaves else []
    return f"taken out of the hostfile; empty as soon as {' and '.join(awaited)}"


def _all_of(runs: Iterable[str]) -> str:
    named = [*runs]
    return f"{' and '.join(named)} {'has' if len(named) == 1 else 'have'}"


_LINES: dict[str, tuple[str | Callable[[Mapping[str, Any]], str], str]] = {
    "run_started": (_run_started, "plain"),
    "taken_over": (_taken_over, "good"),
    "leader_cut_off": (_leader_cut_off, "bad"),
    "waiting": (lambda event: str(event.get("reason") or "waiting for hosts"), "note"),
    "hosts_changed": (_hosts_changed, "note"),
    "host_lost": ("host {host} lost: {cause}", "bad"),
    "host_draining": (_host_draining, "change"),
    "host_drained": ("host {host} is drained: nothing of this run is left on it", "note"),
    "host_returned": ("host {host} is given back and may be used again", "good"),
    "input": ("{reason}", "note"),
    "input_host_joined": ("input host {host} reads for the ranks in {processes} processes", "good"),
    "input_host_left": ("input host {host} reads no more: {cause}", "bad"),
    "shares": (shares_words, "change"),
    "prediction_missed": ("prediction missed: {reason}", "note"),
    "decision": ("decision: {action}: {reason}", "note"),
    "restored": (
        lambda e: f"went back to step {e.get('step')}, from {e.get('path') or 'the start'}",
        "note",
    ),
    "script_failed": (_script_failed, "bad"),
    "worker_crashed": (_worker_crashed, "bad"),
    "stop_requested": ("stopping: {reason}", "note"),
    "training_stopped": (
        "training ends after step {step}, as rank {rank} has asked: {reason}",
        "note",
    ),
    "training_goes_on": (
        "training goes on after step {step}: the ranks that had agreed to end it are lost",
        "note",
    ),
    "log_note": (lambda event: str(event.get("message") or event.get("text") or ""), "note"),
    "warning": ("warning: {message}", "bad"),
}
"""Text, or what makes it of the event, and tone, by kind of event."""
