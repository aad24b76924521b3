from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.records import run_folder
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import Request, RunFolder, check_run_id, list_runs, new_run_id
from tests.unit.records.made_events import leader, write


def test_a_new_run_id_is_valid_and_tells_the_time() -> None:
    run_id = new_run_id(0.0)
    assert re.fullmatch(r"(19700101|19691231)-\d{6}-[0-9a-f]{3}", run_id)
    assert check_run_id(run_id) == run_id


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "-x", "a b", "x" * 65, "a\n", "ü", ".a"])
def test_invalid_run_ids(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not valid"):
        RunFolder.create(run_id, root=tmp_path)
    with pytest.raises(UsageError, match="is not valid"):
        RunFolder.open(run_id, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_id_is_given_once(tmp_path: Path) -> None:
    folder = RunFolder.create("digits", root=tmp_path / "deep" / "runs")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(RunError, match=r"'digits' is in use .*--resume digits"):
        RunFolder.create("digits", root=tmp_path / "deep" / "runs")
    with (
        folder.take_lead(),
        pytest.raises(RunError, match=r"it is running.*attach digits, or .* stop digits"),
    ):
        RunFolder.create("digits", root=tmp_path / "deep" / "runs")


def test_chosen_run_ids_differ(tmp_path: Path) -> None:
    names = {RunFolder.create(root=tmp_path).run_id for _ in range(20)}
    assert len(names) == 20


def test_a_place_that_cannot_hold_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot make the run folder"):
        RunFolder.create("a", root=tmp_path / "file")
    (tmp_path / "taken").write_text("")
    with pytest.raises(RunError, match="a file is in its place"):
        RunFolder.create("taken", root=tmp_path)


def test_a_run_that_could_not_be_made_leaves_its_id_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write_run", full)
        with pytest.raises(RunError, match="No space left"):
            RunFolder.create("a", root=tmp_path)
    assert RunFolder.create("a", root=tmp_path).path.is_dir()


def test_a_run_that_is_there_outlives_an_attempt_to_make_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = RunFolder.create("a", root=tmp_path).checkpoints / "step-1"
    checkpoint.touch()

    def stale(_: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(run_folder, "private_folder", stale)
    with pytest.raises(RunError, match="Stale file handle"):
        RunFolder.create("a", root=tmp_path)
    assert checkpoint.exists()


def test_open_finds_by_name_and_the_newest(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run yet"):
        RunFolder.open(root=tmp_path)
    for number, name in enumerate(["zeta", "alpha", "mid"]):
        RunFolder.create(name, root=tmp_path).write_run({"created": 100.0 + number})
    (tmp_path / "stray-file").write_text("")
    assert [run.run_id for run in list_runs(root=tmp_path)] == ["mid", "alpha", "zeta"]
    assert RunFolder.open(root=tmp_path).run_id == "mid"
    assert RunFolder.open("zeta", root=tmp_path).run_id == "zeta"
    with pytest.raises(RunError, match=r"no run 'beta' .* newest are: mid, alpha, zeta"):
        RunFolder.open("beta", root=tmp_path)


def test_run_json_keeps_other_fields_and_survives_garbage(tmp_path: Path) -> None:
    folder = RunFolder.create("a", root=tmp_path)
    folder.write_run({"np": 2})
    folder.write_run({"np": 3, "script": Path("train.py")})
    found = folder.read_run()
    assert (found["run_id"], found["np"], found["script"]) == ("a", 3, "train.py")
    folder.run_json.write_text('{"half')
    assert folder.read_run() == {}
    assert folder.created > 0
    assert list(folder.path.glob(".*")) == []


def test_the_lead_is_held_by_one(tmp_path: Path) -> None:
    folder = RunFolder.create("a", root=tmp_path)
    assert not folder.leader_alive()
    with folder.take_lead():
        assert folder.leader_alive()
        assert folder.leader()["pid"] == os.getpid()
        with pytest.raises(RunError, match=f"has a live leader .pid {os.getpid()}"):
            folder.take_lead()
    assert not folder.leader_alive()
    folder.take_lead().close()


LEADER = """
import sys, time
from pathlib import Path
from hvd_elastic.records.run_folder import RunFolder
lock = RunFolder(Path(sys.argv[1])).take_lead()
print("leading", flush=True)
time.sleep(60)
"""


def test_a_killed_leader_is_seen_at_once(tmp_path: Path) -> None:
    folder = RunFolder.create("a", root=tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(folder.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "leading\n"
    assert folder.leader_alive()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not folder.leader_alive()


def test_asking_does_not_keep_a_leader_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_elastic.records.process_lock._TRIES", 4000)
    folder = RunFolder.create("a", root=tmp_path)
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            folder.leader_alive()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(20):
            folder.take_lead().close()
    finally:
        done.set()
        thread.join()


def test_requests_are_handed_out_once_in_order(tmp_path: Path) -> None:
    folder = RunFolder.create("a", root=tmp_path)
    assert folder.take_requests() == []
    first = folder.send_request("scale", {"np": 3})
    second = folder.send_request("stop")
    (folder.commands / "garbage.json").write_text("[1]")
    assert folder.take_requests() == [
        Request(first, "scale", {"np": 3}),
        Request(second, "stop", {}),
    ]
    assert folder.take_requests() == []
    assert list(folder.commands.iterdir()) == []
    (folder.commands / "folder.json").mkdir()
    assert folder.take_requests() == []


def test_the_leader_answers(tmp_path: Path) -> None:
    folder = RunFolder.create("a", root=tmp_path)
    with leader(
        folder, answer=lambda request: {"ok": True, "message": f"np is {request.fields['np']}"}
    ):
        assert folder.ask_leader("scale", {"np": 3}) == "np is 3"
    with leader(folder, answer=lambda _: {"ok": False, "message": "only 2 slots"}):
        with pytest.raises(RunError, match="refused 'scale': only 2 slots"):
            folder.ask_leader("scale", {"np": 3})


def test_a_leader_that_is_deaf_or_gone(tmp_path: Path) -> None:
    folder = RunFolder.create("a", root=tmp_path)
    with pytest.raises(RunError, match="no live leader, so 'stop' cannot reach it: it never began"):
        folder.ask_leader("stop")
    with EventLog(folder.events) as log:
        write(log, "run_started", {"run_id": "a"})
        with pytest.raises(RunError, match=r"its leader died; .*--resume a"):
            folder.ask_leader("stop")
        folder.write_run({"resume": "its program again"})  # of an engine that alone has hosts
        with pytest.raises(RunError, match="its leader died; resume with: its program again"):
            folder.ask_leader("stop")
        write(log, "run_finished", {"status": "succeeded"})
        with pytest.raises(RunError, match="it has succeeded"):
            folder.ask_leader("stop")
    with folder.take_lead(), pytest.raises(RunError, match=r"did not answer within 0.2 s"):
        folder.ask_leader("stop", timeout_s=0.2)
    assert list(folder.commands.iterdir()) == []  # no later leader must find it
