from __future__ import annotations

import io
import re
import threading
import time

import pytest

from hvd_elastic.records.wording import Narrator
from hvd_elastic.views import terminal
from hvd_elastic.views.terminal import LastingView, RunView
from tests.paths import LIMIT_S
from tests.unit.records.made_events import made
from tests.unit.records.sample_run import sample_events

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(events: list[dict[str, object]]) -> list[str]:
    """What a pipe gets, without the time of day."""
    stream = io.StringIO()
    with RunView(stream, clock=FakeClock()) as view:
        for event in events:
            view.show(made(event))
    return [line.partition("  ")[2] for line in stream.getvalue().splitlines()]


def test_a_whole_run_in_plain_lines() -> None:
    lines = shown(sample_events())
    assert lines[0] == "run digits-3: 2 hosts, 2 slots"
    assert lines[1] == "training on 2 slots: start with 2 slots"
    assert "host node3 joined: 2 → 3 slots (pause 0.12 s)" in lines
    assert "worker node2:0 left as asked" in lines
    assert lines[-2].startswith("step 276 · epoch 11 · loss ")
    assert lines[-1].startswith("run succeeded after 276 steps")
    # The first, the last, and where each change found it.
    assert sum(line.startswith("step ") for line in lines) == 6


def test_progress_is_printed_by_time() -> None:
    stream, clock = io.StringIO(), FakeClock()
    view = RunView(stream, clock=clock, interval_s=5.0)
    for step in range(100):
        clock.now += 0.1
        view.show(made({"kind": "metrics", "t": clock.now, "step": step, "loss": 1.0}))
    assert stream.getvalue().count("step ") == 2
    view.close()
    assert stream.getvalue().count("step ") == 3
    view.close()
    assert stream.getvalue().count("step ") == 3


def test_evaluation_metrics_do_not_wipe_those_of_the_step() -> None:
    lines = shown(
        [
            {"kind": "metrics", "t": 1.0, "step": 5, "epoch": 0, "loss": None},
            {"kind": "metrics", "t": 2.0, "step": 5, "accuracy": 0.97},
        ]
    )
    assert lines[-1] == "step 5 · epoch 0 · loss nan · accuracy 0.97"


def test_a_terminal_gets_a_live_line_and_text_is_no_markup() -> None:
    stream = io.StringIO()
    with RunView(stream, live=True) as view:
        for event in sample_events():
            view.show(made(event))
        view.print("worker says [bold]hello[/nonsense]")
        view.show(made({"kind": "warning", "t": 1.0, "message": "[red] [/] \x5b"}))
    text = ESCAPES.sub("", stream.getvalue())
    assert "host node3 joined: 2 → 3 slots (pause 0.12 s)" in text
    assert "worker says [bold]hello[/nonsense]" in text
    assert "warning: [red] [/]" in text
    assert "step 276" in text


@pytest.mark.parametrize("live", [False, True])
def test_what_a_worker_or_a_host_sends_moves_no_cursor_and_sets_no_title(live: bool) -> None:
    stream = io.StringIO()
    with RunView(stream, live=live) as view:
        view.print("[node1:0] loss \x1b]0;title\x07\x1b[31m0.5\x1b[0m \x9b2J")
        view.show(made({"kind": "warning", "t": 1.0, "message": "host node1: \x1b]0;title\x07"}))
        view.show(made({"kind": "metrics", "t": 2.0, "step": 1, "loss": "\x1b]0;title\x07"}))
    shown = stream.getvalue()
    assert "[node1:0] loss \\u001b]0;title\\u00070.5 \\u009b2J" in shown
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert "\x9b" not in shown


def test_the_live_line_shows_at_once_that_a_rescale_is_over() -> None:
    stream = io.StringIO()
    view = RunView(stream, live=True, clock=FakeClock())
    view.show(made({"kind": "metrics", "t": 1.0, "step": 1, "loss": 1.0}))
    view.show(made({"kind": "rescale_started", "generation": 2, "from_size": 2, "to_size": 3}))
    assert "rescaling 2 → 3" in ESCAPES.sub("", stream.getvalue())
    stream.seek(0)
    stream.truncate()
    view.show(made({"kind": "rescale_finished", "generation": 2, "size": 3, "pause_s": 0.1}))
    last = ESCAPES.sub("", stream.getvalue()).rpartition("\r")[2]
    view.close()
    assert last.startswith("step 1 · epoch 0 · loss 1 (rank 0) · 3 workers")


def test_no_line_is_older_than_the_one_before_it() -> None:
    stream = io.StringIO()
    with RunView(stream, clock=FakeClock(), interval_s=60.0) as view:
        for t in range(3):
            view.show(made({"kind": "metrics", "t": 100.0 + t, "step": t, "loss": 1.0}))
        view.show(made({"kind": "stop_requested", "t": 110.0, "reason": "Ctrl-C"}))
        view.show(made({"kind": "metrics", "t": 111.0, "step": 3, "loss": 1.0}))
        view.print("[a:0] accuracy 0.9")
        view.show(made({"kind": "run_finished", "t": 120.0, "status": "stopped", "steps": 3}))
    lines = stream.getvalue().splitlines()
    assert [line.rpartition("  ")[2] for line in lines] == [
        "step 0 · epoch 0 · loss 1",
        "step 2 · epoch 0 · loss 1",
        "stopping: Ctrl-C",
        "[a:0] accuracy 0.9",
        "step 3 · epoch 0 · loss 1",
        "run stopped after 3 steps",
    ]
    stamps = [line.partition("  ")[0] for line in lines if line[0] != "["]
    assert stamps == sorted(stamps)


def test_a_rescale_without_a_further_step_is_over_when_its_workers_report() -> None:
    stream = io.StringIO()
    view = RunView(stream, live=True, clock=FakeClock())
    view.show(made({"kind": "rescale_started", "generation": 2, "from_size": 2, "to_size": 3}))
    view.show(made({"kind": "metrics", "t": 1.0, "step": 9, "size": 2}))
    assert "rescaling 2 → 3" in ESCAPES.sub("", stream.getvalue()).rpartition("\r")[2]
    view.show(made({"kind": "metrics", "t": 2.0, "step": 9, "size": 3, "accuracy": 0.9}))
    last = ESCAPES.sub("", stream.getvalue()).rpartition("\r")[2]
    view.close()
    assert last.startswith("step 9 · epoch 0 · 3 workers · accuracy 0.9")


def test_a_traceback_is_shown_whole() -> None:
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: no'
    lines = shown(
        [{"kind": "script_failed", "t": 1.0, "host": "n", "local_rank": 1, "traceback": trace}]
    )
    stream = "\n".join(lines)
    assert "the script failed in worker n:1:" in stream


def test_an_error_of_the_script_is_told_once_in_full() -> None:
    narrator = Narrator()
    words = "error: train.py, line 3: no"
    failed = {"kind": "script_failed", "host": "n", "local_rank": 1, "traceback": f"{words}\n"}
    start = {"kind": "rescale_started", "generation": 1, "reason": "start on 1 host: 0 → 2 slots"}
    finished = {"kind": "run_finished", "status": "failed", "steps": 0}
    message = f"the training script failed in worker n:1: {words}"
    events = [start, failed, {**finished, "message": message}]
    assert [line.text for event in events for line in narrator.tell(made(event))] == [
        f"the script failed in worker n:1:\n{words}",
        "run failed after 0 steps: the training script failed in worker n:1",
    ]


def test_a_crash_is_told_with_its_stack_and_as_the_reason_of_the_rescale() -> None:
    narrator = Narrator()
    worker = {"host": "n", "local_rank": 1}
    crashed = {"kind": "worker_crashed", "cause": "was killed by signal 11", "traceback": "stack"}
    left = {"kind": "worker_left", "how": "died", "cause": "worker n:1 was killed by signal 11"}
    events = [{**crashed, **worker}, {**left, **worker}]
    assert [line.text for event in events for line in narrator.tell(made(event))] == [
        "worker n:1 was killed by signal 11:\nstack"
    ]
    assert [line.text for line in narrator.tell(made({**left, **worker}))] == [left["cause"]]


def test_a_rescale_that_never_finished_keeps_its_line() -> None:
    narrator = Narrator()
    started = {"kind": "rescale_started", "generation": 2, "reason": "node3 joined"}
    assert narrator.tell(made(started)) == []
    again = {**started, "generation": 3, "reason": "node3 died"}
    assert narrator.tell(made(again)) == []
    formed = {"kind": "rescale_finished", "generation": 3, "size": 2, "pause_s": 1.5}
    lines = [line.text for line in narrator.tell(made(formed))]
    assert lines == ["node3 joined", "node3 died (pause 1.5 s)"]
    assert narrator.tell(made({**started, "generation": 4, "reason": "node3 died"})) == []
    end = narrator.tell(
        made({"kind": "run_finished", "status": "failed", "steps": 1, "message": "why"})
    )
    assert [line.text for line in end] == [
        "node3 died (not finished)",
        "run failed after 1 step: why",
    ]


def test_rescales_that_overlap_keep_their_reasons() -> None:
    """The next one is announced before the first step of the one before it is reported."""
    events: list[dict[str, object]] = [
        {"kind": "rescale_started", "generation": 2, "from_size": 1, "to_size": 2, "reason": "b"},
        {"kind": "rescale_started", "generation": 3, "from_size": 2, "to_size": 3, "reason": "c"},
        {"kind": "rescale_finished", "generation": 2, "size": 2, "pause_s": 0.25},
        {"kind": "rescale_finished", "generation": 3, "size": 3, "pause_s": 0.5},
    ]
    narrator = Narrator()
    told = [line.text for event in events for line in narrator.tell(made(event))]
    assert told == ["b (pause 0.25 s)", "c (pause 0.50 s)"]
    stream = io.StringIO()
    view = RunView(stream, live=True, clock=FakeClock())
    for event in events[:3]:
        view.show(made(event))
    assert "rescaling 2 → 3" in ESCAPES.sub("", stream.getvalue()).rpartition("\r")[2]
    view.show(made(events[3]))
    view.close()


def test_changes_of_the_batch_and_missed_predictions_are_told() -> None:
    narrator = Narrator()
    limits = {"initial_batch_size": 64, "max_batch_size": 512}
    first = {"kind": "batch_plan", "global_batch_size": 64, "accumulation_steps": 0,
             "lr_scale": 1.0, "limits": limits, "reason": "the initial batch size"}  # fmt: skip
    grown = {**first, "global_batch_size": 128, "lr_scale": 1.7, "reason": "there is noise"}
    missed = {"kind": "prediction_missed", "reason": "777 were predicted"}
    told = [
        line.text for event in (first, grown, grown, missed) for line in narrator.tell(made(event))
    ]
    assert told == [
        "batch 64 → 128 examples, learning rate x 1.7: there is noise",
        "prediction missed: 777 were predicted",
    ]


def test_every_kind_of_event_can_be_told_bare() -> None:
    narrator = Narrator()
    kinds = (
        "run_started agent_started agent_lost agent_failed host_lost worker_standby worker_joined "
        "worker_left waiting hosts_changed restored decision stop_requested command_done warning "
        "log_note script_failed worker_crashed metrics checkpoint rescale_started rescale_finished "
        "batch_plan shares prediction_missed run_finished"
    )
    for kind in kinds.split():
        for line in narrator.tell(made({"kind": kind})):
            assert line.text or kind in ("log_note", "worker_left", "waiting")


class HeldStream(io.StringIO):
    """A terminal after Ctrl-S: it takes nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.free = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.asked.set()
        assert self.free.wait(LIMIT_S)
        return super().write(text)


def test_a_held_terminal_holds_nothing_up_and_shows_it_later() -> None:
    stream = HeldStream()
    view = LastingView(stream)
    with view:
        for event in sample_events():
            view.show(made(event))
        view.print("accuracy 0.9")
        assert stream.asked.wait(LIMIT_S)
        assert not stream.getvalue()
        stream.free.set()
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("run digits-3: 2 hosts, 2 slots")
    assert lines[-1] == "accuracy 0.9"


def test_of_what_nobody_reads_lines_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "_MOST_WAITING", 3)
    monkeypatch.setattr(terminal, "_PATIENCE_S", 0.01)
    stream = HeldStream()
    view = LastingView(stream)
    with view:
        view.print("0")
        assert stream.asked.wait(LIMIT_S)
        for line in range(1, 9):
            view.print(f"{line}")
        view.print("an event", keep=True)
        stream.free.set()
        while "an event" not in stream.getvalue():
            time.sleep(0.01)
        view.print("9")
    note = "… 5 lines left out here, where nobody read; hvd-elastic logs has them"
    assert stream.getvalue().splitlines() == ["0", "1", "2", "3", note, "an event", "9"]


def test_a_traceback_that_the_worker_has_printed_is_not_shown_again() -> None:
    stream = io.StringIO()
    traceback = "Traceback (most recent call last):\n  File 'a.py'\nValueError: broken"
    failed = {"kind": "script_failed", "host": "n1", "local_rank": 0, "traceback": traceback}
    with RunView(stream, clock=FakeClock()) as view:
        for line in traceback.splitlines():
            view.output("n1", 0, line)
        view.show(made(failed))
        view.show(made({**failed, "host": "n2"}))
    told = stream.getvalue()
    assert told.count("Traceback") == 2, "that of n2 was not printed"
    assert told.index("the script failed in worker n1:0:\nValueError: broken") > 0


def test_a_plain_command_has_words_of_its_own() -> None:
    command = {"host": "n1", "local_rank": 0}
    lines = shown(
        [
            {
                "t": 1.0,
                "kind": "run_started",
                "run_id": "sleep-1",
                "hosts": [["n1", 1]],
                "plain": True,
            },
            {"t": 2.0, "kind": "waiting", "reason": "starting the command on n1"},
            {"t": 3.0, "kind": "worker_started", **command},
            {"t": 4.0, "kind": "script_failed", **command, "traceback": "no such data"},
            {
                "t": 5.0,
                "kind": "worker_left",
                **command,
                "cause": "worker n1:0 ended",
                "how": "died",
            },
            {
                "t": 9.0,
                "kind": "run_finished",
                "status": "failed",
                "steps": 0,
                "examples": 0,
                "message": "the command ended with exit status 3 on host n1: no such data",
            },
        ]
    )
    assert lines[:2] == ["run sleep-1: 1 host, 1 slot", "starting the command on n1"]
    assert lines[-1] == "run failed: the command ended with exit status 3 on host n1"
    told = " ".join(lines)
    assert not re.search("step|worker|script", told), told
