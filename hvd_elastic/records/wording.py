"""Every word in which a run is described: its state, its figures, and what happened to it.

The words of each state of a run and of a job are in ``tests/unit/records/words.md``, for people to
read; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_elastic import run_events as ev
from hvd_elastic.control.endings import StopCause
from hvd_elastic.formatting import (
    bytes_words,
    clock_words,
    count,
    date_words,
    duration_words,
    number_words,
    plural,
    worker_name,
)
from hvd_elastic.run_events import Departure

if TYPE_CHECKING:
    from hvd_elastic.records.summary import Draining, RunSummary

TRAINS = ("running", "leaderless")
"""States of a run whose workers train."""
GOES_ON = ("waiting", *TRAINS)
"""States of a run that is not over."""
ENDED = ("succeeded", "failed", "stopped", "died")
"""States of a run that is over."""
READING = "reading"
"""State of a run whose events a page has not read to the end yet."""
_NOTABLE = 0.005
"""Part of the time from which a cause is told in words."""
_SHARES_TOLD = 8  # number of ranks whose shares are listed, so that the text fits a line


@dataclass(frozen=True)
class Line:
    """One line of text; ``tone`` is ``good``, ``bad``, ``change``, ``note`` or ``plain``."""

    text: str
    tone: str = "plain"


class Narrator:
    """Turns events into lines, one at a time; combines the events of a rescale into one line.

    >>> narrator = Narrator()
    >>> narrator.tell(ev.RescaleStarted(2, 2, 3, [], [], "host node3 joined: 2 → 3 slots"))
    []
    >>> [line.text for line in narrator.tell(ev.RescaleFinished(2, 3, 0.1234))]
    ['host node3 joined: 2 → 3 slots (pause 0.12 s)']
    """

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._batch: ev.BatchPlan | None = None
        self._crash = ""
        self._error = ""
        self._plain = False
        self._unknown: set[str] = set()

    def tell(self, event: ev.ReadEvent) -> list[Line]:
        """Return the lines for an event, usually none or one."""
        match event:
            case ev.Metrics():
                return []
            case ev.RescaleStarted():
                # Its end may be reported only after the next rescale has begun.
                sizes = f"{event.from_size} → {event.to_size} slots"
                self._reasons[event.generation] = event.reason or sizes
                return []
            case ev.RescaleFinished():
                return self._rescale_finished(event)
            case ev.RunFinished():
                return self._run_finished(event)
            case ev.RunStarted():
                self._plain = event.plain
                return [*self._unfinished(), *_tell(event)]
            case ev.Waiting():
                return [*self._unfinished(), *_tell(event)]
            case ev.BatchPlan():
                text, self._batch = batch_words(event, self._batch), event
                return [Line(text, "change")] if text else []
            case ev.ScriptFailed(host=host, traceback=traceback):
                self._error = traceback.rstrip().rsplit("\n", 1)[-1]
                if self._plain:
                    # The end of the run tells the exit status of the command.
                    return [
                        Line(f"the command failed on host {host}:\n{traceback.rstrip()}", "bad")
                    ]
            case ev.WorkerCrashed():
                self._crash = f"worker {worker_name(event.host, event.local_rank)} {event.cause}"
            case ev.WorkerLeft(cause=cause):
                if self._plain or (self._crash and cause == self._crash):
                    self._crash = "" if cause == self._crash else self._crash
                    return []  # a crash was already shown with its stack
            case ev.Unread(what=kind, known=False):
                if kind in self._unknown:
                    return []
                self._unknown.add(kind)
        return _tell(event)

    def _run_finished(self, event: ev.RunFinished) -> list[Line]:
        status, message = event.status, event.message
        unfinished = self._unfinished()
        if status in ("failed", "succeeded") and not event.steps:
            unfinished = []  # there was no step to finish the start: its end is enough
        if self._error:
            message = message.removesuffix(f": {self._error}")  # was shown in full before
        steps = None if self._plain else event.steps
        words = outcome_words(status, steps, event.examples, message, exact=event.exact)
        ended = Line(f"run {words}", {"succeeded": "good", "failed": "bad"}.get(status, "note"))
        way_on = resume_words(event)
        return [*unfinished, ended, *([Line(way_on, "note")] if way_on else [])]

    def _unfinished(self) -> list[Line]:
        lines = [Line(f"{text} (not finished)", "change") for text in self._reasons.values()]
        self._reasons = {}
        return lines

    def _rescale_finished(self, event: ev.RescaleFinished) -> list[Line]:
        generation, slots = event.generation, count(event.size, "slot")
        reason = self._reasons.pop(generation, slots)
        # Earlier rescales that broke before their first step get a line too, to show their causes.
        broken = [number for number in self._reasons if number < generation]
        lines = [Line(self._reasons.pop(number), "change") for number in broken]
        if event.pause_s is None:
            return [*lines, Line(f"training on {slots}: {reason}", "good")]
        return [*lines, Line(f"{reason} (pause {duration_words(event.pause_s)})", "change")]


def _tell(event: ev.ReadEvent) -> list[Line]:
    """Return the line for an event that needs no other event, if it has one."""
    told = _words(event)
    return [] if told is None else [Line(*told)]


def _words(event: ev.ReadEvent) -> tuple[str, str] | None:
    """Return text and tone of an event that needs no other event; None: it is not told."""
    match event:
        case ev.RunStarted(run_id=run_id, hosts=hosts):
            slots = count(sum(number for _, number in hosts), "slot")
            return f"run {run_id}: {count(len(hosts), 'host')}, {slots}", "plain"
        case ev.TakenOver(size=0, workers=workers):
            return f"took over the run: {count(workers, 'worker')} did not train yet", "good"
        case ev.TakenOver(size=size):
            trained = count(size, "worker")
            return f"took over the run: {trained} continued training without a leader", "good"
        case ev.LeaderCutOff(silent_s=silent_s, grace_s=grace_s):
            silent, grace = duration_words(silent_s), duration_words(grace_s)
            text = (
                f"no host was heard of for {silent}: this machine is cut off, or all of them are "
                f"gone. Training continues without a leader for {grace}; trying to reach them"
            )
            return text, "bad"
        case ev.Waiting(reason=reason):
            return reason, "note"
        case ev.HostsChanged(hosts=hosts):
            named = " ".join(f"{name}:{slots}" for name, slots in hosts) or "none"
            return f"hosts are now: {named}", "note"
        case ev.HostLost(host=host, cause=cause):
            return f"host {host} lost: {cause}", "bad"
        case ev.HostFaults(host=host, faults=faults):
            text = f"host {host}: {'; '.join(each.text for each in faults)}"
            return (text, "bad") if faults else None
        case ev.HostDraining(host=host, cause=cause, leave_in_s=leave_in_s):
            when = "" if leave_in_s is None else f", it has {duration_words(leave_in_s)}"
            return f"host {host} is being drained ({cause}){when}", "change"
        case ev.HostDrained(host=host):
            return f"host {host} is drained: nothing of this run is left on it", "note"
        case ev.HostReturned(host=host):
            return f"host {host} is given back and may be used again", "good"
        case ev.Input(bound=bound, reason=reason):
            return None if bound == "nothing" else (reason, "note")
        case ev.InputHostJoined(host=host, processes=processes):
            return f"input host {host} reads for the ranks in {processes} processes", "good"
        case ev.InputHostLeft(host=host, cause=cause):
            return f"input host {host} reads no more: {cause}", "bad"
        case ev.Shares():
            return shares_words(event), "change"
        case ev.PredictionMissed(reason=reason):
            return f"prediction missed: {reason}", "note"
        case ev.Decision(action=action, reason=reason):
            return f"decision: {action}: {reason}", "note"
        case ev.Restored(step=step, path=path):
            return f"went back to step {step}, from {path or 'the start'}", "note"
        case ev.ScriptFailed(traceback=traceback):
            worker = worker_name(event.host, event.local_rank)
            return f"the script failed in worker {worker}:\n{traceback.rstrip()}", "bad"
        case ev.WorkerCrashed(cause=cause, traceback=traceback):
            worker = worker_name(event.host, event.local_rank)
            return f"worker {worker} {cause}:\n{traceback.rstrip()}", "bad"
        case ev.WorkerLeft():
            return _left_words(event)
        case ev.StopRequested(reason=reason):
            return f"stopping: {reason}", "note"
        case ev.TrainingStopped(step=step, rank=rank, reason=reason):
            return f"training ends after step {step}, as rank {rank} has asked: {reason}", "note"
        case ev.TrainingGoesOn(step=step):
            lost = "the ranks that had agreed to end it are lost"
            return f"training continues after step {step}: {lost}", "note"
        case ev.CommandDone(ok=False, message=message):
            return f"could not do as asked: {message}", "bad"
        case ev.CommandDone(message=message) if message:
            return f"done as asked: {message}", "note"
        case ev.LogNote(message=message):
            return message, "note"
        case ev.Warned(message=message):
            return f"warning: {message}", "bad"
        case ev.Unread(what=kind, known=True):
            return f"an event '{kind}' has unexpected fields", "note"
        case ev.Unread(what=kind):
            return f"events '{kind}' are unknown to this version, and left out", "note"
    return None


def _left_words(event: ev.WorkerLeft) -> tuple[str, str] | None:
    worker = worker_name(event.host, event.local_rank)
    match event.how:
        case Departure.LEFT:
            return f"worker {worker} left as asked", "note"
        case Departure.FINISHED:
            return f"worker {worker} left: finished", "note"
        case Departure.HOST_LOST:
            return None  # the event of the host has its own line
    return event.cause, "bad"


def cut_off_words(event: ev.LeaderCutOff) -> str:
    """Return since when a leader hears from no host, and what it does."""
    return (
        f"its leader hears from none of its hosts since {clock_words(event.t - event.silent_s)}: "
        f"they may train on alone; it tries them until {clock_words(event.t + event.tries_s)}, "
        "then trains where it can"
    )


def silent_words(silent: Mapping[str, float]) -> str:
    """Return which hosts a leader has not reached again, by the time since when [Unix s].

    >>> silent_words({"node3": 0.0})[:49]
    'its leader has not reached node3 again: no answer'
    """
    since = clock_words(min(silent.values()))
    return f"its leader has not reached {', '.join(silent)} again: no answer since {since}"


def departure_words(cause: str, rescale: str) -> str:
    """Return why a worker has left.

    Args:
        cause: cause of its ``worker_left`` event.
        rescale: reason of the last rescale that had begun; empty: there was none.

    >>> departure_words("left", "host node3 left: 3 → 2 slots")
    'as asked: host node3 left: 3 → 2 slots'
    >>> departure_words("finished", ""), departure_words("was killed by signal 9", "")
    ('its training function returned', 'was killed by signal 9')
    """
    match cause:
        case Departure.LEFT.value:
            return f"as asked: {rescale}" if rescale else "as asked"
        case Departure.FINISHED.value:
            return "its training function returned"
        case Departure.HOST_LOST.value:
            return "its host was lost"
    return cause


# -- the state of a run ----------------------------------------------------------------------------


def run_state(status: str, *, alive: bool, waiting: bool, until: float | None) -> str:
    """Return the state of a run as shown to users.

    Args:
        until: time until which the hosts train on without a leader; None: they do not.
    """
    if status == "running":
        if not alive:
            return "died" if until is None else "leaderless"
        return "waiting" if waiting else "running"
    if status == "unknown":
        return "starting" if alive else "never began"
    return status


IN_QUEUE = (
    "squeue --me shows whether it waits in Slurm's queue to begin or to resume, and scancel takes "
    "it from there"
)
"""What else there is to know about a run without a leader that was submitted to Slurm."""
_OF_JOBS_END = (StopCause.TERMINATE.value, StopCause.HANGUP.value)
"""Causes of a stop when Slurm ends a job, at its time limit too: the next one may wait."""


def state_words(
    summary: RunSummary, state: str, until: float | None, resume: str = "", *, submitted: bool
) -> str:
    """Return a state of :func:`run_state` with what there is to know about it, or to do.

    Args:
        until: time until which the hosts train on without a leader [Unix s].
        resume: command with which it continues; empty: ``hvd-elastic run --resume``.
    """
    resume = resume or f"hvd-elastic run --resume {summary.run_id}"
    words = {
        "leaderless": (
            "the leader is gone, and the hosts train on without one until about "
            f"{clock_words(until)}; take them over with: {resume}"
        ),
        "died": f"died: no live leader; resume with: {resume}",
        "never began": "never began: its leader ended before the first event",
        "waiting": summary.waiting,
        "running": f"running: {summary.cut_off}" if summary.cut_off else "running",
        "failed": f"failed: {summary.message}" if summary.message else "failed",
        "stopped": f"stopped: {summary.message}" if summary.message else "stopped",
        "succeeded": "succeeded",
    }
    if submitted:
        words["never began"] = f"has not begun: {IN_QUEUE}"
        words["died"] += f". {IN_QUEUE}"
        if summary.message in _OF_JOBS_END:
            words["stopped"] += f". {IN_QUEUE}"
    if summary.message and (summary.stopped_for or summary.plain):
        words["succeeded"] = f"succeeded: {summary.message}"
    return words.get(state, state)


def time_words(summary: RunSummary, state: str, now: float) -> str:
    """Return when a run started, and how long it has taken so far or did take.

    Args:
        now: present time [Unix s].
    """
    if summary.started is None:
        return ""
    if state in ("succeeded", "failed", "stopped"):
        lasted = f"took {duration_words(summary.duration_s)}"
    elif state in ("running", "waiting"):
        lasted = f"{duration_words(max(0.0, now - summary.started))} ago"
    else:  # nobody knows what happened since
        lasted = f"{duration_words(summary.duration_s)} until the last event of its leader"
    return f"{date_words(summary.started)}, {lasted}"


def run_sentences(
    summary: RunSummary, state: str, forecast: str = "", slow: Mapping[str, float] | None = None
) -> list[str]:
    """Return what matters now: how fast, how far, what is in the way, what was decided.

    Args:
        forecast: how far it is, and when it is expected to end, as a sentence.
        slow: slow hosts, with the time of their steps relative to the median of the hosts.
    """
    told = [sentence for sentence in (_state_sentence(summary, state), forecast) if sentence]
    for name, factor in (slow or {}).items():
        told.append(f"Host {name} is slow: its steps take {factor:.1f} x the median of the hosts.")
    if summary.input and "no bottleneck" not in summary.input:
        told.append(f"Data: {summary.input}.")
    left_out = left_out_words(summary.last)
    if left_out:
        told.append(f"Left out: {left_out}.")
    if summary.skipped:
        told.append(f"Skipped: {skipped_words(summary.skipped)}.")
    if summary.live_rescales:
        paused_s = sum(each.pause_s or 0.0 for each in summary.live_rescales)
        rescales = count(len(summary.live_rescales), "rescale")
        told.append(f"{rescales} paused training for {duration_words(paused_s)} together.")
    lost = _lost_words(summary)
    if lost:
        told.append(lost)
    decided = [said for said in summary.decisions if said.kind == "decision"]
    if decided:
        at = clock_words((summary.started or 0.0) + decided[-1].at_s)
        told.append(f"The policy decided at {at}: {decided[-1].text}.")
    if summary.missed:
        told.append(f"It fell short: {summary.missed}.")
    if summary.misfits:
        told.append(f"{misfit_words(summary)}.")
    if summary.warnings:
        told.append(f"Last warning: {summary.warnings[-1].text}")
    return told


def _state_sentence(summary: RunSummary, state: str) -> str:
    if state == READING:
        return "The events of this run are still being read; what there is so far is shown."
    if state == "running":
        if summary.cut_off:
            return f"{summary.cut_off[:1].upper()}{summary.cut_off[1:]}."
        if summary.plain:
            return "The command runs."
        rate = summary.last.get("throughput")
        fast = f" at {number_words(round(rate))} examples/s" if rate else ""
        return f"Trains on {count(summary.size, 'slot')}{fast}."
    if state == "waiting":
        return f"Waits: {summary.waiting}."
    if state == "leaderless":
        return "The leader is gone, and the hosts train on without one."
    if state not in ENDED:
        return ""  # it has not begun
    steps, examples = None if summary.plain else summary.steps, summary.examples
    words = outcome_words(state, steps, examples, "", exact=summary.exact)
    return f"{words[:1].upper()}{words[1:]}, in {duration_words(summary.duration_s)}."


def _lost_words(summary: RunSummary) -> str:
    """Return which causes took most besides training, as a sentence; empty: hardly any did."""
    if summary.first_step_s is None or not summary.duration_s:
        return ""
    parts = {c: s.seconds / summary.duration_s for c, s in summary.spending.by_cause.items()}
    most = sorted((c for c in parts if parts[c] >= _NOTABLE), key=lambda c: -parts[c])
    named = ", ".join(f"{cause} {parts[cause]:.1%}" for cause in most)
    return f"Of the time, {sum(parts.values()):.1%} was not training: {named}." if most else ""


def status_rows(
    summary: RunSummary,
    state: str,
    until: float | None,
    folder: str,
    now: float,
    resume: str = "",
    *,
    submitted: bool = False,
) -> list[tuple[str, str]]:
    """Return what there is to say of a run: label and text of each row.

    Args:
        until: time until which the hosts train on without a leader [Unix s].
        now: present time [Unix s].
        resume: command with which it continues; empty: ``hvd-elastic run --resume``.
    """
    failure = checkpoint = ""
    plan = summary.batch_plan
    trains = summary.started is not None and not summary.plain
    if (kept := summary.kept_checkpoint) is not None:
        checkpoint = f"step {kept.step}, {kept.path}"
        newest = summary.checkpoints[-1]
        if newest.not_finite:
            where = f"holds NaN or infinity in {newest.not_finite}"
            checkpoint += f"; that of step {newest.step} {where}"
    if summary.failure and not summary.plain:  # of a plain command the status says it
        last_line = summary.failure.rstrip().rpartition("\n")[2]
        failure = f"worker {summary.failed_worker}: {last_line}"
    # The last metrics may belong to an earlier epoch than the last step.
    epoch = summary.last.get("epoch") if summary.ended_in is None else summary.ended_in
    reached = {**summary.last, "step": summary.steps, "epoch": epoch}
    own = {name: value for name, value in summary.final_metrics().items() if name != "loss"}
    hosts = [f"{name}:{slots}" for name, slots in summary.hosts]
    reading = [f"{name} ({count(n, 'process')})" for name, n in summary.input_hosts.items()]
    draining = [
        f"{name}: {'drained' if found.empty else _time_left_words(summary, found, now)} "
        f"({found.cause})"
        for name, found in summary.draining.items()
        if found.empty or state not in ENDED
    ]
    decided = [said.text for said in summary.decisions if said.kind == "decision"]
    size = summary.trains_now(state)
    if not size:
        reached.pop("throughput", None)
    rows = [
        ("run", summary.run_id),
        ("status", state_words(summary, state, until, resume, submitted=submitted)),
        ("started", time_words(summary, state, now)),
        ("progress", progress_words(reached, size) if trains else ""),
        ("metrics", metric_words(own)),
        ("left out", left_out_words(summary.last)),
        ("skipped", skipped_words(summary.skipped)),
        ("batch", _batch_size_words(summary, plan) if plan else ""),
        ("hosts", " ".join(hosts)),
        ("input hosts", " ".join(reading)),
        ("data", summary.input),
        ("shares", summary.shares),
        ("pinned", " ".join(summary.pinned)),
        *(("draining", text) for text in draining),
        *(("hardware", f"{host}: {'; '.join(found)}") for host, found in summary.faults.items()),
        ("rescales", rescale_words(summary) if trains else ""),
        ("decision", decided[-1] if decided else ""),
        ("missed", summary.missed),
        ("checkpoint", checkpoint),
        ("saved", saved_words(summary)),
        ("folder", folder),
        ("failure", failure),
        ("not read", misfit_words(summary)),
    ]
    return [(label, text) for label, text in rows if text]


def _time_left_words(summary: RunSummary, found: Draining, now: float) -> str:
    """Return a text that says how much time is left to drain a host."""
    if found.leave_in_s is None or summary.started is None:
        return "being left"
    left_s = summary.started + found.at_s + found.leave_in_s - now
    return f"being left, {duration_words(left_s)} remain" if left_s > 0 else "being left, overdue"


def _batch_size_words(summary: RunSummary, plan: ev.BatchPlan) -> str:
    initial, most = plan.limits.initial_batch_size, plan.limits.max_batch_size
    text = f"{number_words(plan.global_batch_size)} examples"
    text += f" ({number_words(initial)} at first, at most {number_words(most)})"
    for name, unit in (("noise_scale", " examples"), ("efficiency", "")):
        if name in summary.last:
            text += f", {name.replace('_', ' ')} {number_words(summary.last[name])}{unit}"
    return text


def metric_words(metrics: Mapping[str, Any]) -> str:
    """Return names and values of metrics, as one line."""
    return ", ".join(f"{name} {number_words(value)}" for name, value in metrics.items())


def misfit_words(summary: RunSummary) -> str:
    """Return how many events are not shown, since this version cannot read them; empty: none."""
    if not summary.misfits:
        return ""
    events = count(summary.misfits, "event")
    return f"{events} left out, of a kind or with fields that this version does not know"


def saved_words(summary: RunSummary) -> str:
    """Return the files that the script has saved: name, step and size of each."""
    return ", ".join(
        f"{name} (step {saved.step}, {bytes_words(saved.size_bytes)})"
        for name, saved in summary.saved.items()
    )


def rescale_words(summary: RunSummary) -> str:
    """Return how many rescales a run had, and the longest pause of one."""
    pause_s = summary.longest_pause_s
    longest = f", longest pause {duration_words(pause_s)}" if pause_s is not None else ""
    return f"{len(summary.live_rescales)}{longest}"


def resume_words(event: ev.RunFinished) -> str:
    """Return how a run that ended early can be resumed; empty if it cannot or need not.

    >>> ended = ev.RunFinished("stopped", "", "r1", 9, 72, 0, True, 9, False)
    >>> resume_words(ended)
    'its checkpoint is of step 9; resume with: hvd-elastic run --resume r1'
    >>> ended.checkpoint_step = 7
    >>> resume_words(ended)
    'its checkpoint is of step 7, so 2 steps will be done again; resume with: hvd-elastic run --resume r1'
    >>> ended.checkpoint_step = None
    >>> resume_words(ended)
    'it has no checkpoint here: --resume continues from one that is still on a host, or starts from scratch'
    >>> ended.resume = "sbatch x"
    >>> ended.checkpoint_step = 9
    >>> resume_words(ended)
    'its checkpoint is of step 9; resume with: sbatch x'
    """  # noqa: E501
    steps, step = event.steps, event.checkpoint_step
    if event.status == "succeeded" or event.led_elsewhere:
        return ""  # it is over, or continues under the other leader
    if not steps and (step is None or event.status == "failed"):
        return ""  # nothing was trained, and the cause of the failure is enough
    if step is None:
        return (
            "it has no checkpoint here: --resume continues from one that is still on a host, "
            "or starts from scratch"
        )
    undone = f", so {count(steps - step, 'step')} will be done again" if step < steps else ""
    command = event.resume or f"hvd-elastic run --resume {event.run_id}"
    return f"its checkpoint is of step {step}{undone}; resume with: {command}"


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


def skipped_words(skipped: Mapping[str, str]) -> str:
    """Return how many examples were skipped, and why the last one was; empty: none.

    >>> skipped_words({"/data/a.tar: example 'k'": "no image"})
    "1 example, which cannot be decoded; the last: /data/a.tar: example 'k': no image"
    """
    if not skipped:
        return ""
    (example, reason), number = [*skipped.items()][-1], count(len(skipped), "example")
    return f"{number}, which cannot be decoded; the last: {example}: {reason}"


def progress_words(metrics: Mapping[str, Any], size: int) -> str:
    """Return the newest metrics as one line.

    >>> progress_words({"step": 120, "epoch": 3, "loss": 0.41237, "throughput": 812.4}, 3)
    'step 120 · epoch 3 · loss 0.412 (rank 0) · 812 examples/s · 3 workers'
    """
    parts = []
    if metrics.get("step") is not None:
        parts.append(f"step {metrics['step']}")
    if metrics.get("epoch") is not None:
        parts.append(f"epoch {metrics['epoch']}")
    if "loss" in metrics:
        of = " (rank 0)" if size > 1 else ""  # the script's own, of its share of the batch
        parts.append(f"loss {number_words(metrics['loss'])}{of}")
    if metrics.get("throughput") is not None:
        parts.append(f"{number_words(metrics['throughput'])} examples/s")
    if size:
        parts.append(count(size, "worker"))
    if metrics.get("accuracy") is not None:
        parts.append(f"accuracy {number_words(metrics['accuracy'])}")
    return " · ".join(parts)


def shares_words(event: ev.Shares) -> str:
    """Return how the batch is divided among the ranks, and why; only the first ranks are listed.

    >>> shares_words(ev.Shares(9, 32, [24, 8], "rank 1 is slow"))
    'the ranks have 24, 8 of 32 examples: rank 1 is slow'
    >>> shares_words(ev.Shares(9, 32, [], "the ranks are equally fast, to 5 %"))
    'equal shares of the batch: the ranks are equally fast, to 5 %'
    """
    shares, reason = event.shares, event.reason
    if not shares:
        return f"equal shares of the batch: {reason}"
    told = ", ".join(map(str, shares[:_SHARES_TOLD]))
    more = f" and {len(shares) - _SHARES_TOLD} more" if len(shares) > _SHARES_TOLD else ""
    return f"the ranks have {told}{more} of {event.global_batch_size} examples: {reason}"


def batch_words(plan: ev.BatchPlan, before: ev.BatchPlan | None) -> str:
    """Return how an adaptive batch size has changed, and why; empty if it has not.

    Args:
        before: previous batch plan; None if there is none.

    >>> first = ev.BatchPlan(0, 64, 32, 0, None, ev.BatchLimits(64, 512, 1, None, 3), "")
    >>> batch_words(first, None)
    ''
    >>> grown = ev.BatchPlan(9, 128, 32, 1, 1.74, first.limits, "noise")
    >>> batch_words(grown, first)
    'batch 64 → 128 examples in 2 passes of 32 on each rank, learning rate x 1.74: noise'
    """
    size, extra = plan.global_batch_size, plan.accumulation_steps
    old = before.global_batch_size if before else plan.limits.initial_batch_size
    if size == old and extra == (before.accumulation_steps if before else 0):
        return ""
    text = f"batch of {number_words(size)} examples"
    if size != old:
        text = f"batch {number_words(old)} → {number_words(size)} examples"
    if extra:
        text += f" in {extra + 1} passes of {plan.atomic_batch_size} on each rank"
    if plan.lr_scale is not None:
        text += f", learning rate x {number_words(plan.lr_scale)}"
    return f"{text}: {plan.reason}"


def attempts_words(attempts: int, failures: int, retries: int) -> str:
    """Return how often the run of a job was started, and how often it may fail again.

    >>> attempts_words(2, 0, 0), attempts_words(3, 2, 2), attempts_words(2, 1, 3)
    ('2, none failed', '3, 2 failed; no retry is left', '2, 1 failed; 2 retries are left')
    """
    if not failures:
        return f"{attempts}, none failed"
    left = max(0, retries - failures)
    are_left = f"{count(left, 'retry')} {'is' if left == 1 else 'are'}" if left else "no retry is"
    return f"{attempts}, {failures} failed; {are_left} left"


def awaited_words(reason: str, awaited: Mapping[str, Sequence[str]], *, runs: bool) -> str:
    """Return the reason of a job that is to have slots which other jobs have to leave first.

    Args:
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
