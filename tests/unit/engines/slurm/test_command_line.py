"""``hvd-elastic run`` inside an allocation, and ``hvd-elastic slurm``: what reaches Slurm."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.cli.engines import slurm
from hvd_elastic.engines.slurm.batch import Submission
from hvd_elastic.errors import RunError
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from tests.unit.engines.slurm.conftest import VARIABLES, Write
from tests.unit.records.made_events import write


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    for name in (*VARIABLES, *(name for name in os.environ if name.startswith("SBATCH_"))):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    """This process is in an allocation of two nodes with eight CPUs each."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def queue(write: Write, tmp_path: Path) -> Path:
    """An sbatch that takes everything; the file has the command lines that it was given."""
    path = tmp_path / "submitted"
    write("sbatch", f'echo "$*" >> {path}; echo "42;virtual"')
    write("scancel", "")
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def submit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    return call(capsys, "slurm", "submit", *arguments)


def test_sizes_are_checked_against_the_allocation(inside, capsys) -> None:
    status, _, message = call(capsys, "run", "--np", "17", "--", "true")
    assert status == 2
    assert message.startswith("error: --np 17 is above the 16 slots of Slurm job 17.")
    status, _, message = call(capsys, "run", "--pin-hosts", "gpu9", "--", "true")
    assert status == 2
    assert "host 'gpu9' is not in Slurm job 17 (gpu1, gpu2)" in message


def test_a_hostfile_takes_the_place_of_the_allocation(inside, capsys, tmp_path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    hosts = ["--hostfile", str(tmp_path / "hosts")]
    status, _, message = call(capsys, "run", *hosts, "--np", "2", "--", "true")
    assert status == 2
    assert f"above the 1 slot of {tmp_path / 'hosts'}" in message
    status, _, message = call(capsys, "run", "--slurm", *hosts, "--", "true")
    assert status == 2
    assert "--slurm and --hostfile do not go together" in message


def test_slurm_may_be_asked_for_where_there_is_none(capsys) -> None:
    status, _, message = call(capsys, "run", "--slurm", "--", "true")
    assert status == 2
    assert "there is no Slurm allocation here (SLURM_JOB_ID is not set)" in message


def test_a_run_is_submitted_with_its_script(queue, capsys) -> None:
    arguments = ["--nodes", "2-8", "--run-id", "a", "--np", "4", "--json", "--", "true"]
    status, out, _ = submit(capsys, *arguments)
    assert status == 0
    assert json.loads(out) == {"run_id": "a", "job_id": "42"}
    folder = RunFolder.open("a")
    assert queue.read_text() == f"--parsable {folder.path}/slurm/first.sh\n"
    assert "slurm lead a" in (folder.path / "slurm" / "first.sh").read_text()
    fields = folder.read_run()
    assert (fields["engine"], fields["np"], fields["hostfile"]) == ("slurm", 4, None)
    assert (fields["slurm"]["least"], fields["slurm"]["most"]) == (2, 8)


def test_what_the_environment_asks_of_sbatch_is_asked_for(queue, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    monkeypatch.setenv("SBATCH_QOS", "high")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1:00:00")
    monkeypatch.setenv("SBATCH_JOB_NAME", "mine")
    arguments = ("--nodes", "2-8", "--time", "30", "--sbatch=--qos=low", "--dry-run", "--", "true")
    _, out, _ = submit(capsys, *arguments)
    assert out.count("#SBATCH --partition=gpu\n") == 2
    assert out.count("#SBATCH --qos=high\n#SBATCH --qos=low\n") == 2
    assert out.count("#SBATCH --time=30\n") == 2
    assert "mine" not in out


def test_only_the_first_submission_is_held(queue, capsys) -> None:
    submit(capsys, "--nodes", "2", "--run-id", "a", "--sbatch=-H", "--", "true")
    assert queue.read_text().startswith("--parsable --hold /")
    assert "hold" not in (RunFolder.open("a").path / "slurm" / "first.sh").read_text()
    submit(capsys, "--resume", "a")
    assert queue.read_text().splitlines()[1].startswith("--parsable /")


def test_nothing_of_a_run_is_written_without_its_lock(inside, write, queue, capsys) -> None:
    write("squeue", 'case "$*" in *--jobs=17*) echo RUNNING 1:00:00;; esac')
    submit(capsys, "--nodes", "2", "--run-id", "a", "--", "true")
    folder = RunFolder.open("a")
    folder.hosts.write_text("gpu9 slots=1\n")
    files = [path for path in folder.path.rglob("*") if path.is_file() and path != folder.lock]
    before = {path: path.read_bytes() for path in files}
    with folder.take_lead():
        for words in (("run", "--resume"), ("slurm", "lead"), ("slurm", "submit", "--resume")):
            status, _, message = call(capsys, *words, "a")
            assert status == 1
            assert "run a has a live leader" in message or "run a is running" in message
    assert {path: path.read_bytes() for path in before} == before
    assert not folder.events.exists()


def test_a_run_that_waits_in_the_queue_is_not_submitted_again(write, queue, capsys) -> None:
    submit(capsys, "--nodes", "2", "--run-id", "a", "--", "true")
    script = RunFolder.open("a").path / "slurm" / "first.sh"
    write("squeue", f"echo '7|PENDING||1:00||/other/first.sh'; echo '42|PENDING||1:00||{script}'")
    status, _, message = submit(capsys, "--resume", "a", "--nodes", "3")
    assert status == 1
    assert "run a has been submitted already: job 42 is PENDING" in message
    assert "--nodes=2\n" in script.read_text()


def test_a_run_without_a_leader_is_said_to_be_in_the_queue(queue, capsys) -> None:
    assert submit(capsys, "--nodes", "1", "--run-id", "s1", "--", "true")[0] == 0
    _, rows, _ = call(capsys, "status", "s1")
    assert "has not begun: squeue --me shows" in rows
    assert "s1  in queue?" in call(capsys, "list")[1]
    for command in (["stop", "s1"], ["attach", "s1"]):
        status, _, message = call(capsys, *command)
        assert (status, "scancel takes it from there" in message) == (1, True)
    with EventLog(RunFolder.open("s1").events) as log:
        write(log, "run_started", {"run_id": "s1"})
    for command in (["stop", "s1"], ["attach", "s1"], ["status", "s1"]):
        _, rows, message = call(capsys, *command)
        assert "with: hvd-elastic slurm submit --resume s1" in rows + message
    for cause in ("SIGTERM", "stop command"):
        with EventLog(RunFolder.open("s1").events) as log:
            write(log, "run_finished", {"status": "stopped", "message": cause, "steps": 10})
        _, rows, _ = call(capsys, "status", "s1")
        assert (f"stopped: {cause}. squeue --me shows" in rows) == (cause == "SIGTERM")


def test_a_dry_run_prints_the_scripts_alone(queue, capsys, tmp_path) -> None:
    status, out, _ = submit(capsys, "--nodes", "2-8", "--run-id", "a", "--dry-run", "--", "true")
    assert status == 0
    assert out.count("#!/bin/bash\n") == 2
    assert not queue.exists()
    assert not (tmp_path / "home" / "runs").exists()


def test_what_sbatch_refuses_leaves_the_run_id_free(write, queue, capsys) -> None:
    write("sbatch", "echo sbatch: error: Invalid account >&2; exit 1")
    status, _, message = submit(capsys, "--nodes", "2", "--run-id", "a", "--", "true")
    assert status == 1
    assert "Invalid account" in message
    write("sbatch", "echo 43")
    assert submit(capsys, "--nodes", "2", "--run-id", "a", "--", "true")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "say how many nodes the run may have: --nodes 2-8"),
        (["--nodes", "8-2"], "--nodes 8-2: the most nodes come second"),
        (["--nodes", "2-3", "--np", "4"], "--np 4 is above the 3 slots of --nodes 2-3"),
        (["--nodes", "2", "--sbatch", "--array=1-4"], "--sbatch --array=1-4: each task"),
        (["--nodes", "2", "--sbatch", "-Ax -q y"], "--sbatch '-Ax -q y' has several options"),
        (["--nodes", "2", "--sbatch", "-o a -e b"], "--sbatch '-o a -e b' has several options"),
        (["--nodes", "2", "--sbatch", "--wrap=ls"], "--sbatch --wrap=ls submits a command in"),
        (["--nodes", "2", "--sbatch", "--uid=0"], "--sbatch --uid=0 submits as another user"),
        (["--nodes", "2", "--time", "1"], "--time 1 leaves no time to train"),
        (["--nodes", "2", "--time", "1h"], "--time 1h is no time of Slurm"),
        (["--nodes", "2", "--leave-before", "65536"], "--leave-before 65536: Slurm announces"),
        (["--nodes", "2", "--leave-before", "0"], "--leave-before 0: Slurm announces"),
        (["--nodes", "2", "--hostfile", "hosts"], "no such option: --hostfile"),
    ],
)
def test_mistakes_are_found_before_anything_is_submitted(
    queue, capsys, arguments: list[str], wanted: str
) -> None:
    status, _, message = submit(capsys, *arguments, "--", "true")
    assert status == 2
    assert message.startswith(f"error: {wanted}")
    assert not queue.exists()


def test_mistakes_in_variables_are_named_as_such(queue, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SBATCH_GPUS", "8")
    message = submit(capsys, "--nodes", "2", "--", "true")[2]
    assert message.startswith("error: SBATCH_GPUS=8 is a number for an allocation")
    monkeypatch.delenv("SBATCH_GPUS")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    message = submit(capsys, "--nodes", "2", "--", "true")[2]
    assert message.startswith("error: SBATCH_TIMELIMIT=1 leaves no time")


def test_a_job_that_goes_on_is_submitted_again_when_slurm_was_away(
    write, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(slurm, "_AGAIN_S", 0.0)
    run = Submission("a", 1, 1, str(tmp_path), "/", "python", "/home")
    again = "echo sbatch: error: no controller >&2; exit 1"
    write("sbatch", f'test -e "$0.called" || {{ touch "$0.called"; {again}; }}; echo 43')
    assert slurm._sbatch_again(run) == "43"
    said = capsys.readouterr().out
    assert "sbatch --parsable failed: sbatch: error: no controller; trying again in 0 s" in said
    write("sbatch", again)
    with pytest.raises(RunError, match=r"not submitted again: .*slurm submit --resume a"):
        slurm._sbatch_again(replace(run, leave_before_s=0.0))


def test_a_run_is_submitted_again_with_other_allocations(queue, capsys) -> None:
    submit(capsys, "--nodes", "2-8", "--run-id", "a", "--", "true")
    status, _, _ = submit(capsys, "--resume", "a", "--nodes", "3", "--time", "8:00:00")
    assert status == 0
    folder = RunFolder.open("a")
    script = (folder.path / "slurm" / "first.sh").read_text()
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --time=8:00:00\n" in script
    status, _, message = submit(capsys, "--resume", "a", "--np", "2")
    assert status == 2
    assert "only what it has of Slurm can be given anew: --nodes" in message


def test_what_cannot_be_submitted_again_says_why(queue, capsys) -> None:
    RunFolder.create("plain", {"command": ["true"]})
    status, _, message = submit(capsys, "--resume", "plain")
    assert status == 1
    assert "run plain was not submitted to Slurm" in message
    submit(capsys, "--nodes", "2", "--run-id", "done", "--", "true")
    with EventLog(RunFolder.open("done").events) as log:
        write(log, "run_started", {"run_id": "done", "hosts": [["gpu1", 1]]})
        write(log, "run_finished", {"status": "succeeded", "steps": 10})
    status, _, message = submit(capsys, "--resume", "done")
    assert status == 1
    assert "done has finished" in message


def test_a_node_without_the_run_folder_says_what_it_needs(capsys) -> None:
    status, _, message = call(capsys, "slurm", "lead", "a")
    assert status == 1
    assert "needs a folder that all nodes see: set HVD_ELASTIC_HOME" in message
