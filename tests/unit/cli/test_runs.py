from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.config import runs_folder
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import Request, RunFolder
from tests.paths import LIMIT_S
from tests.unit.records.made_events import leader, whole, write
from tests.unit.records.sample_run import sample_folder


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Done]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line of hvd-elastic in this process."""

    def run(*arguments: str) -> Done:
        status = 0
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run


@pytest.fixture
def run() -> RunFolder:
    return sample_folder(runs_folder())


def test_status(call: Call, run: RunFolder) -> None:
    done = call("status", "digits-3")
    assert done.status == 0
    assert "status       succeeded" in done.out
    assert "node1:1 node3:1" in done.out
    assert "4, longest pause 0.83 s" in done.out
    assert "run succeeded after 276 steps" in done.out
    found = call("status", "--json").json
    assert (found["run_id"], found["status"], found["steps"]) == ("digits-3", "succeeded", 276)
    assert found["leader_alive"] is False
    assert len(found["rescales"]) == 5
    assert found["final_metrics"]["accuracy"] > 0.97


def test_status_of_runs_that_are_not_well(call: Call) -> None:
    folder = RunFolder.create("a")
    assert call("status", "a", "--json").json["status"] == "never began"
    with folder.take_lead():
        assert call("status", "a", "--json").json["status"] == "starting"
        with EventLog(folder.events) as log:
            write(log, "run_started", {"run_id": "a", "hosts": [["n1", 1]]})
            assert call("status", "a", "--json").json["status"] == "running"
            reason = "waiting for 1 process: host n1 did not come back yet (trying again in 1 s)"
            write(log, "waiting", {"reason": reason, "have": 0, "need": 1})
            assert call("status", "a", "--json").json["status"] == "waiting"
            assert f"status       {reason}\n" in call("status", "a").out
            trace = "Traceback:\n  x\nValueError: no"
            write(log, "script_failed", {"host": "n1", "local_rank": 0, "traceback": trace})
    done = call("status", "a")
    assert "died: no live leader; resume with: hvd-elastic run --resume a" in done.out
    assert "worker n1:0: ValueError: no" in done.out
    assert "  the script failed in worker n1:0: ValueError: no\n" in done.out


def test_status_of_a_run_that_trains_on_without_a_leader(call: Call) -> None:
    folder = RunFolder.create("a", {"leader_grace_s": 3600.0})
    with EventLog(folder.events) as log:
        said = log.append(
            "run_started", whole({"kind": "run_started", "run_id": "a", "hosts": [["n1", 1]]})
        )
    until = said["t"] + 3600
    found = call("status", "a", "--json").json
    assert (found["status"], found["leaderless_until"]) == ("leaderless", until)
    words = time.strftime("%H:%M:%S", time.localtime(until))
    line = f"the leader is gone, and the hosts train on without one until about {words}; take them"
    assert f"status       {line} over with: hvd-elastic run --resume a" in call("status", "a").out
    assert call("list", "--json").json[0]["status"] == "leaderless"
    assert "leaderless after" in call("report", "a").out
    with folder.take_lead():
        assert call("status", "a", "--json").json["leaderless_until"] is None
    folder.write_run({"leader_grace_s": 0.0})
    assert call("status", "a", "--json").json["status"] == "died"


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "nope"), ("logs", "nope"), ("attach", "nope"), ("stop", "nope"),
        ("scale", "nope", "2"), ("drain", "nope", "n1"), ("discover", "nope"), ("report", "nope"),
    ],
)  # fmt: skip
def test_a_run_that_is_not_there(call: Call, run: RunFolder, arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.status == 1
    assert done.err.startswith("error: there is no run 'nope'")
    assert "newest are: digits-3" in done.err
    assert done.out == ""


def test_no_runs_at_all(call: Call) -> None:
    assert "there is no run yet" in call("status").err
    assert call("list").out.startswith("no runs in ")
    assert call("list", "--json").json == []


def test_a_run_id_that_cannot_be(call: Call) -> None:
    done = call("status", "../etc")
    assert done.status == 2
    assert "is not valid" in done.err


def test_list(call: Call, run: RunFolder) -> None:
    other = sample_folder(runs_folder(), "other", status="running")
    run.write_run({"created": 1.0})
    other.write_run({"created": 2.0})
    rows = call("list", "--json").json
    assert [(row["run_id"], row["status"], row["steps"]) for row in rows] == [
        ("other", "died", 276),
        ("digits-3", "succeeded", 276),
    ]
    lines = call("list", "-n", "1").out.splitlines()
    assert lines[1].startswith("other ")
    assert lines[2] == "and 1 older run: hvd-elastic list -n 0"
    assert len(call("list", "-n", "0").out.splitlines()) == 3


def test_list_reads_only_the_end_of_a_long_run(call: Call) -> None:
    folder = RunFolder.create("long")
    with EventLog(folder.events) as log:
        write(log, "run_started", {"run_id": "long"})
        for step in range(5000):
            write(log, "metrics", {"step": step, "loss": 1.0})
    with folder.take_lead():
        row = call("list", "--json").json[0]
    assert (row["status"], row["steps"]) == ("running", 4999)


def test_list_of_a_run_that_waits_for_long(call: Call) -> None:
    folder = RunFolder.create("long")
    with EventLog(folder.events) as log:
        write(log, "run_started", {"run_id": "long"})
        write(log, "metrics", {"step": 500, "throughput": 812.0, "size": 2})
        write(log, "waiting", {"reason": "waiting for host n2"})
        for _ in range(450):  # samples of hosts alone are more than is read at first
            write(log, "host_sample", {"host": "n1" + 600 * "x"})
    with folder.take_lead():
        row = call("list", "--json").json[0]
    assert (row["status"], row["steps"], row["throughput"]) == ("waiting", 500, None)


def test_status_of_a_run_that_died_while_it_trained(call: Call) -> None:
    sample_folder(runs_folder(), status="running")
    assert call("status", "--json").json["size"] == 0
    told = call("status").out
    assert "status       died" in told
    assert "worker" not in next(line for line in told.splitlines() if line.startswith("progress"))


def test_logs(call: Call, run: RunFolder) -> None:
    run.log_path("node1", 0).write_text("first\n10%\r50%\r100%\nlast without end")
    run.log_path("node10.example.org", 1).write_bytes(b"\xff broken\n" * 3)
    done = call("logs", "digits-3")
    assert done.out.splitlines() == [
        "node1:0 | first",
        "node1:0 | 100%",
        "node1:0 | last without end",
        *["node10.example.org:1 | \ufffd broken"] * 3,
    ]
    assert call("logs", "-n", "1", "--host", "node1").out == "node1:0 | last without end\n"
    entry = json.loads(call("logs", "-n", "1", "--host", "node10.example.org", "--json").out)
    assert (entry["host"], entry["local_rank"]) == ("node10.example.org", "1")
    missing = call("logs", "--host", "node7")
    assert missing.status == 1
    assert "has logs of: node1, node10.example.org" in missing.err
    assert "only a run started with --detach" in call("logs", "--leader").err


def test_the_last_lines_of_a_large_log(call: Call, run: RunFolder) -> None:
    run.log_path("n", 0).write_text("".join(f"{i} {'x' * 1000}\n" for i in range(2000)))
    lines = call("logs", "-n", "700").out.splitlines()
    assert len(lines) == 700
    assert lines[0].startswith("n:0 | 1300 x")
    assert len(call("logs", "-n", "0").out.splitlines()) == 2000


def test_logs_without_any(call: Call, run: RunFolder) -> None:
    assert call("logs") == (0, "", "the workers of run digits-3 printed nothing\n")
    with leader(run):
        assert "have printed nothing yet" in call("logs").err


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "hvd_elastic.cli.app", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def test_logs_follow_until_the_leader_is_gone(run: RunFolder) -> None:
    run.log_path("n", 0).write_text("old\nhalf")
    with leader(run):
        process = started("logs", "digits-3", "-f")
        assert process.stdout is not None
        assert process.stdout.readline() == "n:0 | old\n"
        with run.log_path("n", 0).open("a") as file:
            file.write(" done\n")
        assert process.stdout.readline() == "n:0 | half done\n"
        run.log_path("m", 0).write_text("a new worker\nend")
        assert process.stdout.readline() == "m:0 | a new worker\n"
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out, err, process.returncode) == ("m:0 | end\n", "", 0)


def test_attach_to_a_run_that_is_over(call: Call, run: RunFolder) -> None:
    done = call("attach", "digits-3")
    assert done.status == 0
    assert "host node3 joined: 2 → 3 slots (pause 0.12 s)" in done.out
    events = [json.loads(line) for line in call("attach", "--json").out.splitlines()]
    assert events[-1]["kind"] == "run_finished"


@pytest.mark.parametrize(("status", "code"), [("succeeded", 0), ("failed", 1), ("stopped", 1)])
def test_attach_ends_as_the_run_does(status: str, code: int) -> None:
    folder = RunFolder.create("live")
    with leader(folder) as log:
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 2]]})
        process = started("attach", "live")
        assert process.stdout is not None
        assert "run live: 1 host, 2 slots" in process.stdout.readline()
        write(log, "run_finished", {"status": status, "steps": 3})
        out, err = process.communicate(timeout=LIMIT_S)
    assert f"run {status} after 3 steps" in out
    assert (process.returncode, err) == (code, "")


def test_attach_to_a_run_that_is_being_resumed() -> None:
    folder = RunFolder.create("live")
    with leader(folder) as log:
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 2]]})
        write(log, "run_finished", {"status": "stopped", "steps": 3})
        process = started("attach", "live")
        assert process.stdout is not None
        while "run stopped after 3 steps" not in (line := process.stdout.readline()):
            assert line
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 2]]})
        write(log, "run_finished", {"status": "succeeded", "steps": 9})
    out, err = process.communicate(timeout=LIMIT_S)
    assert "run succeeded after 9 steps" in out
    assert (process.returncode, err) == (0, "")


def test_attach_to_a_run_whose_leader_died(call: Call) -> None:
    sample_folder(runs_folder(), status="running")
    done = call("attach")
    assert done.status == 1
    assert "--resume digits-3" in done.err


def test_ctrl_c_detaches() -> None:
    folder = RunFolder.create("live")
    with leader(folder) as log:
        write(log, "run_started", {"run_id": "live", "hosts": []})
        process = started("attach")
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        assert folder.leader_alive()
    assert (process.returncode, err) == (
        0,
        "detached; run live continues. End it with: hvd-elastic stop live\n",
    )


def test_stop_waits_for_the_end(call: Call) -> None:
    folder = RunFolder.create("live")

    def end(request: Request, log: EventLog) -> bool:
        assert request.op == "stop"
        time.sleep(0.3)  # a leader takes a while to end its workers
        fields = {"run_id": "live", "status": "stopped", "steps": 12, "checkpoint_step": 10}
        fields |= {"led_elsewhere": False}
        write(log, "run_finished", fields)
        return True

    with leader(folder, end):
        done = call("stop", "live")
    assert (done.status, done.out.splitlines()) == (
        0,
        [
            "run live: stopped after 12 steps",
            (
                "its checkpoint is of step 10, so 2 steps will be done again; "
                "resume with: hvd-elastic run --resume live"
            ),
        ],
    )


def test_stop_of_a_resumed_run_whose_leader_dies_meanwhile(call: Call) -> None:
    folder = RunFolder.create("live")
    with leader(folder, lambda *_: True) as log:
        write(log, "run_started", {"run_id": "live"})
        write(log, "run_finished", {"status": "stopped", "steps": 100})
        write(log, "run_started", {"run_id": "live"})
        write(log, "metrics", {"step": 150})
        done = call("stop", "live")
    assert (done.status, done.out) == (1, "")
    assert "its leader died; resume with: hvd-elastic run --resume live" in done.err


def test_stop_without_waiting(call: Call) -> None:
    with leader(RunFolder.create("live")):
        done = call("stop", "live", "--no-wait", "--json")
    assert done.json == {
        "run_id": "live", "ok": True, "message": "will do", "status": "stopping",
    }  # fmt: skip


def test_steering_a_run_without_a_leader(call: Call, run: RunFolder) -> None:
    done = call("stop", "digits-3")
    assert done.status == 1
    assert "no live leader, so 'stop' cannot reach it: it has succeeded" in done.err


def test_scale(call: Call) -> None:
    folder = RunFolder.create("live")
    asked: list[object] = []

    def note(request: Request, _: EventLog) -> bool:
        asked.append((request.op, request.fields["np"]))
        return False

    with leader(folder, note):
        assert call("scale", "live", "3").out == "will do\n"
        assert call("scale", "live", "auto", "--json").json["np"] is None
    assert asked == [("scale", 3), ("scale", None)]


def test_status_says_what_was_decided_last(call: Call) -> None:
    folder = RunFolder.create("live")
    with leader(folder, lambda *_: False) as log:
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 1]]})
        write(log, "decision", {"action": "stay", "reason": "more slots bring nothing"})
        for number in range(20):
            write(log, "warning", {"message": f"{number} of many"})
        assert "\ndecision     stay: more slots bring nothing\n" in call("status", "live").out


def test_status_says_what_the_batch_is_and_what_did_not_come_true(call: Call) -> None:
    folder = RunFolder.create("live")
    limits = {"initial_batch_size": 64, "max_batch_size": 2048}
    plan = {"global_batch_size": 128, "limits": limits, "reason": "there is noise"}
    known = {"step": 1, "global_batch_size": 128, "noise_scale": 345.6, "efficiency": 0.87}
    missed = "777 useful examples/s were predicted on 3 slots, and 393 are measured"
    with leader(folder, lambda *_: False) as log:
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 3]]})
        write(log, "batch_plan", plan)
        write(log, "metrics", known)
        write(log, "prediction_missed", {"reason": missed})
        told = call("status", "live").out
        batch = (
            "128 examples (64 at first, at most 2,048), noise scale 346 examples, efficiency 0.87"
        )
        assert f"\nbatch        {batch}\n" in told
        assert f"\nmissed       {missed}\n" in told
        # An infinite noise scale is not reported: the last one does not hold any more.
        write(log, "metrics", {"step": 2, "global_batch_size": 128})
        write(log, "rescale_started", {"generation": 2, "from_size": 3, "to_size": 1})
        told = call("status", "live").out
        assert "\nbatch        128 examples (64 at first, at most 2,048)\n" in told
        assert "\nmissed " not in told


def test_drain(call: Call) -> None:
    folder = RunFolder.create("live")
    asked: list[dict[str, Any]] = []

    def note(request: Request, log: EventLog) -> bool:
        asked.append(dict(request.fields))
        if not request.fields["undo"]:
            cause = {"host": "n2", "cause": "asked to", "leave_in_s": 90.0}
            write(log, "host_draining", cause)
            write(log, "host_drained", {"host": "n2"})
        else:
            write(log, "host_returned", {"host": "n2"})
        return False

    with leader(folder, note) as log:
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 1], ["n2", 2]]})
        for arguments, message in [
            (("n2",), "--reason is missing: drain n2 --reason TEXT"),
            (("n2", "--undo"), "of the cluster do: hvd-elastic undrain n2"),
            (("n2", "--reason", "a\nb"), "it is one line of text"),
            (("n2", "--reason", " "), "it is one line of text"),
            (
                ("n2", "--reason", "a" * 201),
                "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…' is not valid",
            ),
            (("n2", "--reason", "a", "--at", "noon"), "--at takes a time such as 22:00"),
            (("n2", "--reason", "a", "--at", "2020-01-01 22:00"), "is over"),
            (("n2", "--reason", "a", "--at", "22:00", "--in", "2h"), "give one of them"),
            (("live", "n2", "--reason", "a"), "--reason is of a host of the cluster"),
        ]:
            wrong = call("drain", *arguments)
            assert wrong.status == 2
            assert message in wrong.err
        done = call("drain", "live", "N2", "--in", "90s")
        assert done.out == "nothing of run live is left on host N2\n"
        assert "draining     n2: drained (asked to)\n" in call("status", "live").out
        found = call("status", "live", "--json").json["draining"]
        assert (found["n2"]["leave_in_s"], found["n2"]["empty"]) == (90.0, True)
        assert call("discover", "live").out == "n1:1\n"
        assert call("drain", "live", "n2", "--undo", "--json").json["undone"] is True
        assert call("status", "live", "--json").json["draining"] == {}
        assert call("discover", "live").out == "n1:1\nn2:2\n"
    assert asked == [
        {"host": "N2", "leave_in_s": 90.0, "undo": False},
        {"host": "n2", "leave_in_s": None, "undo": True},
    ]


def test_drain_of_a_run_that_ends_meanwhile(call: Call) -> None:
    folder = RunFolder.create("live")

    def end(_: Request, log: EventLog) -> bool:
        write(log, "run_finished", {"status": "succeeded"})
        return True

    with leader(folder, end):
        assert call("drain", "live", "n2").status == 0
    with leader(folder, lambda *_: True):
        done = call("drain", "live", "n2")
    assert done.status == 1
    assert "has no live leader" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--in", "soon"), "--in takes a time such as 45s, 90m or 1h30m, or seconds"),
        (("--in", "0"), "--in takes a time above 0 such as 45s, 90m or 1h30m, or seconds, not '0'"),
        (("--in", "9s", "--undo"), "give one of them"),
    ],
)
def test_drain_with_nonsense(call: Call, arguments: tuple[str, ...], words: str) -> None:
    RunFolder.create("live")
    done = call("drain", "live", "n2", *arguments)
    assert done.status == 2
    assert words in " ".join(done.err.split())


@pytest.mark.parametrize("number", ["0", "x", "1.5", "--", ""])
def test_scale_to_nonsense(call: Call, number: str) -> None:
    RunFolder.create("live")
    done = call("scale", "live", number)
    assert done.status == 2
    assert "Traceback" not in done.err


def test_discover(call: Call, run: RunFolder) -> None:
    with leader(run) as log:
        done = call("discover", "digits-3")
        assert (done.out, done.err) == ("node1:1\nnode3:1\n", "")
        write(log, "hosts_changed", {"hosts": [["node9", 4], ["node1", 0]]})
        assert call("discover").out == "node9:4\n"
        assert call("discover", "--json").json[0] == {"host": "node9", "slots": 4}
    done = call("discover", "digits-3")
    assert (done.status, done.out) == (0, "node9:4\n")
    assert "no live leader" in done.err


def test_discover_before_anything_is_known(call: Call) -> None:
    RunFolder.create("a")
    done = call("discover", "a")
    assert done.status == 1
    assert "has not reported its hosts yet" in done.err


def test_report(call: Call, run: RunFolder, tmp_path: Path) -> None:
    lines = call("report", "digits-3").out.splitlines()
    assert lines[0] == "run          digits-3: succeeded after 276 steps, 17,244 examples"
    assert "rescales     4, longest pause 0.83 s" in lines
    assert any("used exactly once in each of 12 epochs" in line for line in lines)
    assert lines[-1] == f"report       {run.path / 'report.html'}"
    out = tmp_path / "r.html"
    found = call("report", "--out", str(out), "--json").json
    assert out.stat().st_size > 50_000
    assert found["path"] == str(out)
    assert found["audit"]["ok"] is True
    assert found["steps"] == 276


@pytest.mark.parametrize(
    "name", ["status", "list", "logs", "attach", "stop", "scale", "discover", "report"]
)
def test_help_has_examples_on_lines_of_their_own(call: Call, name: str) -> None:
    done = call(name, "--help")
    assert done.status == 0
    assert "Examples:" in done.out
    assert any(line.strip().startswith(f"hvd-elastic {name}") for line in done.out.splitlines())
    assert "--json" in done.out


# ---- a run of somebody else, whose files may have been written for the terminals of others

TITLE = "\x1b]0;OWNED\x07\x1b[31m\x1b[2J\x9b2J\u202e [red]markup[/blue]"


@pytest.fixture
def hostile(run: RunFolder) -> RunFolder:
    lines = []
    for line in run.events.read_text().splitlines():
        event = json.loads(line)
        for name, value in event.items():
            if isinstance(value, str) and name not in ("kind", "status", "run_id", "how"):
                event[name] = value + TITLE
        if event["kind"] == "metrics":
            event[f"figure{TITLE}"] = 0.5
        lines.append(json.dumps(event))
        if event["kind"] == "run_started":
            lines.append(json.dumps({"kind": "warning", "t": event["t"], "message": TITLE}))
    run.events.write_text("\n".join(lines) + "\n")
    (run.logs / "node1.0.log").write_text(f"a line{TITLE}\n")
    return run


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    "line",
    ["report", "status", "attach", "top", "list", "logs", "logs --host x\x1b[2J", "scale 5",
     "get no\x1b]0;OWNED\x07 ."],
)  # fmt: skip
@pytest.mark.parametrize("colours", [False, True])
def test_control_characters_of_a_run_reach_no_terminal(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, colours: bool
) -> None:
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    words = line.split(" ")
    words += ["--out", str(tmp_path / "report.html")] if line == "report" else []
    done = call(*words)
    shown = done.out + done.err
    theirs = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]"
    if colours and line == "top":  # it has colours of its own, and moves the cursor
        theirs = r"\x1b\]|[\x07\x9b\u202e]"
    assert re.findall(theirs, shown) == []
    if line in ("report", "status", "attach", "top", "logs"):
        assert r"\u001b]0;OWNED\u0007" in shown.replace("\n", "")
    if line in ("attach", "logs", "top"):
        assert "[red]markup[/blue]" in shown.replace("\n", "")


def test_json_is_still_what_it_was(call: Call, hostile: RunFolder) -> None:
    found = [json.loads(line) for line in call("attach", "--json").out.splitlines()]
    assert TITLE in [event.get("message") for event in found]


def test_status_and_report_say_how_many_steps_were_left_out(call: Call) -> None:
    folder = RunFolder.create("live")
    with leader(folder, lambda *_: False) as log:
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 3]]})
        write(log, "metrics", {"step": 9, "skipped_steps": 2})
        for name in ("status", "report"):
            told = call(name, "live").out
            assert "\nleft out     2 steps, whose gradients were not finite\n" in told
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "<b>2</b><span>steps left out</span>" in page


def test_status_and_report_say_which_checkpoint_is_not_finite(call: Call) -> None:
    """It stands beside the one that a resumed run takes."""
    folder = RunFolder.create("live")
    with leader(folder, lambda *_: False) as log:
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 3]]})
        for step, where in ((40, ""), (50, "model.head.weight")):
            size = {"bytes": 1, "seconds": 0.1, "blocked_s": 0.0}
            log.append(
                "checkpoint", {"step": step, "path": f"{step}.json", "not_finite": where, **size}
            )
        told = call("status", "live").out
        call("report", "live")
    assert "step 40, 40.json; that of step 50 holds NaN or infinity in model.head.weight" in told
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "model.head.weight" in page


def test_words_of_a_command_that_are_not_utf8_are_shown(call: Call) -> None:
    folder = RunFolder.create("live")
    with leader(folder, lambda *_: False) as log:
        command = ["python", "train.py", "/data/caf\udce9"]
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 3]], "command": command})
        write(log, "warning", {"message": "no folder /data/caf\udce9"})
        assert call("status", "--json").json["hosts"]
        done = call("report", "live")
    assert (done.status, done.err) == (0, "")
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert r"/data/caf\udce9" in page


def test_a_loss_that_is_not_finite_is_null_in_json(call: Call) -> None:
    folder = RunFolder.create("live")
    with leader(folder, lambda *_: False) as log:
        write(log, "run_started", {"run_id": "live", "hosts": [["n1", 3]]})
        for step, loss in ((8, 0.5), (9, float("nan"))):
            write(log, "metrics", {"step": step, "loss": loss})
        for words in (["status"], ["report"]):
            told = json.loads(call(*words, "--json").out, parse_constant=pytest.fail)
            assert told["final_metrics"]["loss"] is None
