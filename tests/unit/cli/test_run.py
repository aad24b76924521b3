"""``hvd-elastic run``: what it refuses before any host is touched."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from hvd_elastic.agent.preemption.clouds import CLOUDS
from hvd_elastic.agent.spool import Spool
from hvd_elastic.checkpoint.manifests import complete_checkpoint
from hvd_elastic.cli.app import main
from hvd_elastic.cli.options import hostfile_of
from hvd_elastic.cli.runs import run_options
from hvd_elastic.cli.runs.run import begin_leader
from hvd_elastic.errors import HostfileError, UsageError
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from tests.unit.checkpoint.test_files import spooled
from tests.unit.records.made_events import write
from tests.waiting import until


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))


def call(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--np", "abc"], "--np takes a whole number of 1 or more, not 'abc'"),
        (["-np", "abc"], "--np takes a whole number of 1 or more, not 'abc'"),
        (["--min-np", "0"], "--min-np takes a whole number of 1 or more, not '0'"),
        (["--max-np", "1.5"], "--max-np takes a whole number of 1 or more, not '1.5'"),
        (["--checkpoint-every", "often"], "--checkpoint-every takes a number of 0 or more"),
        (["--failure-timeout", "0"], "--failure-timeout takes a number above 0, not '0'"),
        (["--failure-timeout", "nan"], "--failure-timeout takes a number above 0, not 'nan'"),
        (["--nope"], "no such option: --nope"),
        (["--pdb", "1"], "no such option: --pdb. Write breakpoint() in the script"),
        (["--nproc_per_node=2"], "no such option: --nproc_per_node. It is one of torchrun's. Here"),
    ],
)
def test_options_say_what_they_take(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    status, message = call(*arguments, "--", "true", capsys=capsys)
    assert status == 2
    assert message.startswith(f"error: {wanted}")
    assert message.count("\n") == 1


def check_refused(
    capsys: pytest.CaptureFixture[str], *arguments: object, status: int, says: list[str]
) -> None:
    """Call it; it says what is wrong, where, and what to do, and leaves no run."""
    found, message = call(*map(str, arguments), capsys=capsys)
    assert found == status, message
    assert message.startswith("error: ")
    for words in says:
        assert words in message
    runs = Path(os.environ["HVD_ELASTIC_HOME"], "runs")
    assert not runs.exists() or not list(runs.iterdir())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, ["hosts does not exist", "slots=8"]),
        ("# none yet\n\n", ["hosts", "names no host", "slots=8"]),
        ("node1 slots=2\nnode2 slots=many\n", ["hosts, line 2", "node2 slots=many", "slots=8"]),
    ],
)
def test_a_hostfile_without_hosts_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    script: Path,
    text: str | None,
    says: list[str],
) -> None:
    hostfile = tmp_path / "hosts"
    if text is not None:
        hostfile.write_text(text)
    command = ("-H", hostfile, "--", sys.executable, script)
    check_refused(capsys, *command, status=1, says=[str(hostfile), *says])


def test_a_command_that_cannot_be_run_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    says = ["trian.py does not exist", str(tmp_path)]
    check_refused(capsys, "--", sys.executable, "trian.py", status=2, says=says)
    says = ["'pyhton' is not on PATH", "after --, for example: -- python train.py"]
    check_refused(capsys, "--", "pyhton", "train.py", status=2, says=says)
    says = [f"{script} is no executable file", f"-- python {script} --lr 0.1"]
    check_refused(capsys, "--", script, "--lr", 0.1, status=2, says=says)


def test_min_np_above_the_slots_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\n")
    says = ["--min-np 5 is above the 4 slots", str(hostfile), "add hosts or slots"]
    command = ("-H", hostfile, "--min-np", 5, "--", sys.executable, script)
    check_refused(capsys, *command, status=2, says=says)


def test_a_run_id_in_use_is_refused(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    taken = Path(os.environ["HVD_ELASTIC_HOME"], "runs", "taken")
    taken.mkdir(parents=True)
    command = ("--run-id", "taken", "--", sys.executable, str(script))
    status, message = call(*command, capsys=capsys)
    assert status == 1
    assert message.startswith("error: ")
    for words in ("'taken' is in use", "another --run-id", "hvd-elastic run --resume taken"):
        assert words in message
    assert not list(taken.iterdir())


@pytest.mark.parametrize("place", ["below a file", "not writable"])
def test_a_checkpoint_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Path, place: str
) -> None:
    """No run is left, so that the same command with another folder is not told "in use"."""
    if place == "below a file":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "checkpoints"
    else:
        # The kernel's own folders are closed to root as well.
        folder = Path("/proc/checkpoints")
    says = [f"checkpoints cannot be written to {folder}"]
    says += ["a folder that this user can make and write"]
    options = ("--run-id", "job", "--checkpoint-dir", folder)
    check_refused(capsys, *options, "--", sys.executable, script, status=1, says=says)


def test_a_checkpoint_folder_of_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    folder = tmp_path / "checkpoints"
    complete_checkpoint(folder, [spooled(folder, 20, 0, 1, run="other")], keep=1)
    held = sorted(folder.iterdir())
    says = [f"{folder} holds a checkpoint of run other", "run --resume other"]
    options = ("--checkpoint-dir", folder)
    check_refused(capsys, *options, "--", sys.executable, script, status=1, says=says)
    assert sorted(folder.iterdir()) == held


def test_the_help_names_each_cloud() -> None:
    hints = get_type_hints(run_options.RunOptions, include_extras=True)
    *clouds, last = CLOUDS
    assert f"({', '.join(clouds)} or {last})" in get_args(hints["preemption"])[1].help


def test_a_current_folder_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, error = call("--", "python", "train.py", capsys=capsys)
    assert (status, error.partition(";")[0]) == (2, "error: the current folder was removed")


@pytest.mark.parametrize(
    ("options", "gpus", "slots", "said"),
    [
        ({}, 8, 8, "8 workers on this machine (its 8 GPUs); "),
        ({}, 0, 1, "1 worker on this machine (it has no GPU to use); "),
        ({"min_np": 2}, 1, 2, "2 workers on this machine (its GPU); "),
        ({"np": 3}, 8, 3, ""),
        ({"max_np": 4}, 8, 4, ""),
    ],
)
def test_without_hosts_each_gpu_has_a_worker(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int], gpus: int, slots: int, said: str
) -> None:
    monkeypatch.setattr(run_options, "usable_gpus", lambda environment: gpus)
    found = run_options.RunOptions(command=["true"], **options)  # type: ignore[arg-type]
    assert found.spec().slots == slots
    assert found.says_size() == (f"{said}--np and --hostfile change that" if said else "")


def test_a_python_of_another_environment_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ``.venv/bin/hvd-elastic`` is called and the environment is not active."""
    for folder in ("own", "other"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        program = tmp_path / folder / "bin/python"
        program.touch(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "own"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own/bin/python"))

    def said(path: str, program: str) -> str:
        monkeypatch.setenv("PATH", str(tmp_path / path / "bin"))
        return run_options.RunOptions(command=[program, "train.py"]).says_python()

    assert f"activate it (. {tmp_path}/own/bin/activate)" in said("other", "python")
    assert said("own", "python") == ""
    assert said("other", str(tmp_path / "other/bin/python")) == ""


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--profile", "1"], "1 worker has rank 0"),
        (["--profile", "2", "-H", "localhost:2"], "2 workers have the ranks 0 to 1"),
        (["--profile", "1", "-H", "localhost:2", "--spares", "1"], "1 worker has rank 0"),
        (["--profile", "2", "-H", "localhost:4", "--max-np", "2"], "2 workers have the ranks"),
    ],
)
def test_a_rank_that_no_worker_has_is_not_profiled(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    why: str,
) -> None:
    monkeypatch.setattr(run_options, "usable_gpus", lambda environment: 0)
    status, message = call(*options, "--", "true", capsys=capsys)
    assert status == 2
    assert f"--profile {options[1]}: {why}" in message


def test_all_mistakes_are_named_in_the_order_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-H", str(tmp_path / "none"), "--np", "2", "--min-np", "3", "-F", "nowhere"]
    status, message = call(*options, "--", "python", "trian.py", capsys=capsys)
    assert status == 2
    lines = message.splitlines()
    assert [line.split(" does not")[0].split(":")[1] for line in lines] == [
        f" hostfile {tmp_path / 'none'}",
        " --min-np 3 is above --np 2",
        " --ssh-config nowhere",
        " the training script trian.py",
    ]
    assert all(line.startswith("error: ") for line in lines)


def test_a_finished_run_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create("done-1")
    with EventLog(folder.events) as log:
        write(log, "run_started", {"run_id": "done-1", "hosts": [["node1", 1]]})
        write(log, "run_finished", {"status": "succeeded", "steps": 10})
    status, message = call("--resume", "done-1", capsys=capsys)
    assert status == 1
    assert "done-1 has finished" in message


def test_a_run_that_nobody_knows_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, message = call("--resume", "gone-1", capsys=capsys)
    assert status == 1
    assert "its hosts know it: hvd-elastic run --resume gone-1 --hostfile HOSTFILE" in message
    (tmp_path / "hosts").write_text("localhost\n")
    status, message = call(
        "--resume", "gone-1", "--hostfile", str(tmp_path / "hosts"), capsys=capsys
    )
    assert status == 1
    assert "there is no run 'gone-1' on this machine, as far as" in message
    assert "another HVD_ELASTIC_HOME are not seen), and none of its 1 hosts knows it" in message
    assert not (tmp_path / "home" / "runs" / "gone-1").exists()


def test_hosts_that_do_not_agree_on_a_run_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("localhost\n")
    spool = tmp_path / "home" / "spool" / "lost-1"

    def told(place: str, **fields: object) -> None:
        (spool / place).mkdir(parents=True, exist_ok=True)
        spec = RunSpec(("true",), str(tmp_path / "gone"))
        Spool(spool / place).keep_run({**spec.as_dict(), "run_id": "lost-1", **fields})

    told("a")
    told("b", np=2)
    told("c", command=5)
    call_it = ("--resume", "lost-1", "--hostfile", str(tmp_path / "hosts"))
    status, message = call(*call_it, capsys=capsys)
    assert status == 1
    assert "  command: ['true']" in message
    assert "which is not on this machine" in message
    told("d", preemption_command="touch /tmp/x\x1b[2J")
    status, message = call(*call_it, capsys=capsys)
    assert status == 1
    assert "do not agree on its preemption_command" in message
    assert "\\x1b[2J" in message
    assert not (tmp_path / "home" / "runs").exists()


def test_options_that_resume_would_ignore_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.create("stopped-1")
    status, message = call("--resume", "stopped-1", "--audit", capsys=capsys)
    assert status == 2
    assert "--audit cannot be given with --resume" in message


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--max-np", "1"], "--min-np 2 is above --max-np 1"),
        (["--np", "1"], "--min-np 2 is above --np 1"),
        (["--np", "9"], "--np 9 is above the 3 slots of"),
        (["--np", "3"], "--spares 1 beside 3 workers needs 4 slots, and"),
    ],
)
def test_sizes_that_a_resumed_run_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], wanted: str
) -> None:
    (tmp_path / "hosts").write_text("n1 slots=2\nn2\n")
    spec = RunSpec(
        ("true",), str(tmp_path), str(tmp_path / "hosts"), min_np=2, spares=1, python="python3"
    )
    RunFolder.create("small-1", spec.as_dict())
    status, message = call("--resume", "small-1", *options, capsys=capsys)
    assert status == 2
    assert message.startswith(f"error: {wanted}")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--pin-hosts", "n[1-3]"], "--pin-hosts: host 'n3' is not in hosts (n1, n2)"),
        (["--pin-hosts", "n1,n2", "--max-np", "3"], "--max-np 3 is below the 4 slots of the hosts"),
        (
            ["--pin-hosts", "n1", "--mpi"],
            "a job under --mpi keeps its hosts to the end: leave --pin",
        ),
        (["-x", "n3"], "--exclude: host 'n3' is not in hosts (n1, n2)"),
        (["--exclude", "n[1"], "--exclude: host list 'n[1'"),
        (["--exclude", "n1,@fast"], "--exclude n1,@fast leaves no host of hosts"),
        (["--exclude", "n1", "--np", "3"], "--np 3 is above the 2 slots of hosts"),
        (["--exclude", "n1", "--pin-hosts", "n1"], "--pin-hosts: host 'n1' is not in hosts (n2)"),
        (["-x", "n1", "--input-hosts", "n1"], "--input-hosts and --exclude both name host n1;"),
    ],
)
def test_hosts_that_cannot_be_pinned_or_excluded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    wanted: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2 labels=fast\n")
    status, message = call("-H", "hosts", *options, "--", "true", capsys=capsys)
    assert status == 2
    assert message.startswith(f"error: {wanted}")


def test_excluded_hosts_are_those_of_a_hostfile(capsys: pytest.CaptureFixture[str]) -> None:
    status, message = call("--exclude", "n1", "--", "true", capsys=capsys)
    assert status == 2
    assert "--exclude names hosts of a hostfile; give one with --hostfile" in message


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--input-hosts", "n[1-3]"], "host n1 has 2 slots in hosts, so it trains"),
        (["--input-hosts", "n[9"], "--input-hosts: "),
        (["--input-hosts", "@fast"], "host n2 has 2 slots in hosts, so it trains"),
        (["--input-hosts", "@none"], "--input-hosts: no host of hosts has the label 'none'"),
        (["--input-hosts", "cpu1", "--mpi"], "a job under --mpi has no leader to lead input hosts"),
        (["-H", "reads"], "all hosts of reads read, and none trains"),
        (["-H", "reads", "--input-hosts", "CPU1"], "all hosts of reads read, and none trains"),
        (["-H", "reads", "--input-hosts", "@input"], "all hosts of reads read, and none trains"),
    ],
)
def test_hosts_that_cannot_read_for_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    wanted: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2 labels=fast\n")
    (tmp_path / "reads").write_text("cpu1 slots=0 labels=input\n")
    given = options if "-H" in options else ["-H", "hosts", *options]
    status, message = call(*given, "--", "true", capsys=capsys)
    assert status in (1, 2)
    assert f"error: {wanted}" in message


def test_input_hosts_are_named_by_a_label(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n1 slots=2\ncpu[1-2] slots=0 labels=input,old\n")
    options = run_options.RunOptions(hostfile=hostfile, input_hosts="@old,cpu7", command=["true"])
    assert options.spec().input_hosts == ("cpu1", "cpu2", "cpu7")
    with pytest.raises(UsageError, match="@old names hosts of a hostfile; give one"):
        run_options.RunOptions(input_hosts="@old", command=["true"]).spec()


def test_hosts_are_pinned_by_a_hostfile(capsys: pytest.CaptureFixture[str]) -> None:
    status, message = call("--pin-hosts", "n1", "--", "true", capsys=capsys)
    assert status == 2
    assert "--pin-hosts names hosts of a hostfile; give one with --hostfile" in message


def test_mpi_has_nobody_who_writes_for_tensorboard(capsys: pytest.CaptureFixture[str]) -> None:
    status, message = call("--mpi", "--tensorboard", "--", "true", capsys=capsys)
    assert status == 2
    assert "leave --tensorboard out and set HVD_ELASTIC_RUN_FOLDER" in message


def test_a_list_of_hosts_is_taken_as_horovodrun_takes_it(
    tmp_path: Path,
) -> None:
    written = hostfile_of("gpu[01-02]:8,login:1")
    found = {host.name: host.slots for host in parse_hostfile(written).hosts}
    assert found == {"gpu01": 8, "gpu02": 8, "login": 1}
    assert hostfile_of("gpu[01-02]:8,login:1") == written
    assert hostfile_of("hosts") == Path("hosts")
    (tmp_path / "a,b").touch()
    assert hostfile_of(tmp_path / "a,b") == tmp_path / "a,b", "a path is no list"
    with pytest.raises(HostfileError, match=r"list of hosts 'a:x,b:2'.*whole number"):
        hostfile_of("a:x,b:2")


def test_a_run_is_led_from_the_fork_of_its_leader_on(tmp_path: Path) -> None:
    """Also if that dies, or another one leads already."""
    folder = RunFolder.create("forked-1")
    spec = RunSpec(("true",), str(tmp_path))

    def wait() -> None:
        (tmp_path / f"waits-{os.getpid()}").touch()
        signal.pause()

    child = begin_leader(spec, folder, {}, False, beside=wait)
    try:
        assert folder.leader_alive(), "before it has done anything"
        until((tmp_path / f"waits-{child}").exists, "the leader's start")
        assert folder.leader()["pid"] == child
        second = begin_leader(spec, folder, {}, False)
        assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not folder.leader_alive()
