"""The cluster tools over a real sshd: copying, ending, checking, trusting."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from hvd_elastic.programs.processes import read
from tests.paths import LIMIT_S
from tests.ssh import sshd as private_sshd
from tests.ssh import tools as shared
from tests.ssh.sshd import Sshd
from tests.ssh.tools import Tools, is_alive, records
from tests.waiting import until

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(not private_sshd.AVAILABLE, reason="sshd is not installed"),
]

server, tools = shared.server, shared.tools
NOBODY = 65534


def test_a_file_of_each_host_is_fetched(tools: Tools, tmp_path: Path) -> None:
    source = tmp_path / "it's a.log"
    data = os.urandom(3_000_000)
    source.write_bytes(data)
    logs = tmp_path / "logs"
    arguments = [str(source), str(logs), "--from-each", "--hosts", "node[1-2]"]
    result = tools("copyclust", str(tools.hostfile), *arguments)
    assert result.returncode == 0, result.stderr
    for name in ("node1", "node2"):
        assert (logs / name / source.name).read_bytes() == data
        assert [path.name for path in (logs / name).iterdir()] == [source.name]
    source.write_bytes(b"")
    found = records(tools("copyclust", str(tools.hostfile), *arguments, "--json"))
    assert found["node1"]["bytes"] == 0
    source.unlink()
    result = tools("copyclust", str(tools.hostfile), *arguments)
    assert result.returncode == 1
    assert "No such file" in result.stderr
    assert [path.name for path in (logs / "node1").iterdir()] == [source.name]
    other = [str(source), str(tmp_path / "other"), *arguments[2:]]
    assert tools("copyclust", str(tools.hostfile), *other).returncode == 1
    assert [*(tmp_path / "other").iterdir()] == [], "a host that failed has no folder"
    for more, message in [
        (["--delete"], "--delete does not go with --from-each"),
        (["--hosts", "node1", "x"], "give SRC, a file of each host, and DST"),
    ]:
        result = tools("copyclust", str(tools.hostfile), *arguments, *more)
        assert result.returncode == 2
        assert message in result.stderr
    result = tools("copyclust", str(tools.hostfile), "logs/", str(logs), "--from-each")
    assert (result.returncode, "give the path of a file" in result.stderr) == (2, True)


def test_copy_a_folder(tools: Tools, tmp_path: Path) -> None:
    source = tmp_path / "a set"
    (source / "empty").mkdir(parents=True)
    (source / "sub").mkdir()
    (source / "sub" / "big").write_bytes(os.urandom(2_000_000))
    (source / "it's").write_bytes(b"")
    (source / "link").symlink_to("sub/big")
    (source / "sub").chmod(0o750)
    target = tmp_path / "there"
    arguments = [str(tools.hostfile), str(source), f"{target}/", "--hosts", "node1"]
    result = tools("copyclust", *arguments)
    assert result.returncode == 0, result.stderr
    copied = target / "a set"
    names = sorted(path.relative_to(copied).as_posix() for path in copied.rglob("*"))
    assert names == ["empty", "it's", "link", "sub", "sub/big"]
    assert (copied / "sub" / "big").read_bytes() == (source / "sub" / "big").read_bytes()
    assert (copied / "link").readlink() == Path("sub/big")
    assert (copied / "sub").stat().st_mode & 0o777 == 0o750
    before = (source / "sub" / "big").stat()
    assert (copied / "sub" / "big").stat().st_mtime_ns == before.st_mtime_ns

    (source / "it's").write_bytes(b"new")
    found = records(tools("copyclust", *arguments, "--json"))
    assert (found["node1"]["files"], found["node1"]["skipped"]) == (1, 1)
    assert (copied / "it's").read_bytes() == b"new"


def test_hosts_that_share_the_destination_get_it_once(tools: Tools, tmp_path: Path) -> None:
    source = tmp_path / "set"
    source.mkdir()
    for number in range(5):
        (source / str(number)).write_bytes(os.urandom(100_000))
    arguments = [str(tools.hostfile), str(source), f"{tmp_path}/there", "--hosts", "node[1-3]"]
    result = tools("copyclust", *arguments, "--json")
    assert result.returncode == 0, result.stdout
    assert sorted(str(entry["files"]) for entry in records(result).values()) == ["0", "0", "5"]
    names = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert names == ["0", "1", "2", "3", "4"]


def test_nothing_is_copied_to_a_host_whose_key_has_changed(
    tools: Tools, server: Sshd, tmp_path: Path
) -> None:
    other = private_sshd.make_key(tmp_path / "other").with_suffix(".pub").read_text()
    known = tmp_path / "known"
    known.write_text(f"[{server.address}]:{server.port} {other}")
    text = tools.config.read_text().replace(str(server.folder / "known_hosts"), str(known))
    tools.config.write_text(text)
    (tmp_path / "file").write_bytes(b"secret")
    target = tmp_path / "there"
    result = tools("copyclust", str(tools.hostfile), str(tmp_path / "file"), str(target))
    assert result.returncode == 1
    assert result.stderr.count("THE HOST KEY HAS CHANGED") == 8
    assert not target.exists()


def test_copies_that_cannot_be(tools: Tools, tmp_path: Path) -> None:
    source = tmp_path / "file"
    source.write_bytes(b"data")
    only = ["--hosts", "node1"]
    assert tools("copyclust", str(tools.hostfile), str(source), "relative", *only).returncode == 2
    result = tools("copyclust", str(tools.hostfile), str(tmp_path / "none"), "/x", *only)
    assert result.returncode == 2
    assert "none does not exist. Name a file or folder of this machine" in result.stderr
    result = tools("copyclust", str(tools.hostfile), str(source), "/proc/none/x", *only)
    assert result.returncode == 1
    assert "host node1: /proc/none: No such file or directory" in result.stderr
    # Where nobody may write, root neither.
    result = tools("copyclust", str(tools.hostfile), str(source), "/sys/none/x", *only)
    assert result.returncode == 1
    assert re.search(r"host node1: /sys/none: .* (not permitted|denied)", result.stderr)
    (tmp_path / "folder").mkdir()
    result = tools("copyclust", str(tools.hostfile), str(source), str(tmp_path / "folder"), *only)
    assert result.returncode == 1
    assert "is a folder there; end the destination with /" in result.stderr
    result = tools("copyclust", str(tools.hostfile), str(source), f"{source}/x", *only)
    assert result.returncode == 1
    assert "host node1: " in result.stderr
    assert "Traceback" not in result.stderr


def test_kill_ends_the_run_and_nothing_else(tools: Tools, tmp_path: Path) -> None:
    def start(
        command: str, mark: dict[str, str] | None = None, user: int | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/sh", "-c", command],
            env={**os.environ, **(mark or {})},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            user=user,
        )

    mark = {"HVD_ELASTIC_RUN_ID": "digits-1"}
    # Forked; deaf to TERM; a descendant whose environment was cleared; another run; no run;
    # another user's.
    plain = start("sleep 100 & echo $!; wait", mark)
    deaf = start("trap '' TERM; echo ready; while :; do sleep 1; done", mark)
    cleared = start("env -i sleep 100 & echo $!; wait", mark)
    other = start("echo ready; exec sleep 100", {"HVD_ELASTIC_RUN_ID": "digits-10"})
    bystander = start("echo ready; exec sleep 100")
    everyone = [plain, deaf, cleared, other, bystander]
    if os.geteuid() == 0:
        everyone.append(start("echo ready; exec sleep 100", mark, NOBODY))
    try:
        words = [process.stdout.readline() for process in everyone if process.stdout]
        victims = {plain.pid, deaf.pid, cleared.pid, int(words[0]), int(words[2])}
        # They must be reaped for their pids to vanish: their parent is this test.
        for process in everyone:
            threading.Thread(target=process.wait, daemon=True).start()
        arguments = [str(tools.hostfile), "--hosts", "node1", "--run", "digits-1", "--json"]
        listed = records(tools("killclust", *arguments, "--dry-run"))["node1"]["processes"]
        assert isinstance(listed, list)
        assert {entry["pid"] for entry in listed} >= victims
        assert all(is_alive(pid) for pid in victims)

        result = tools("killclust", *arguments, "--grace", "3")
        assert result.returncode == 0, result.stdout
        ended = records(result)["node1"]["processes"]
        assert isinstance(ended, list)
        how = {entry["pid"]: entry["ended"] for entry in ended}
        assert {pid for pid in victims if is_alive(pid)} == set()
        assert (how[plain.pid], how[deaf.pid]) == ("TERM", "KILL")
        assert all(is_alive(process.pid) for process in everyone[3:])
        again = tools("killclust", *arguments)
        assert records(again)["node1"]["processes"] == []
    finally:
        for process in everyone:
            if is_alive(process.pid):
                process.kill()
            process.wait(LIMIT_S)
            if process.stdout:
                process.stdout.close()


def test_kill_ends_nine_kinds_of_process(tools: Tools, tmp_path: Path) -> None:
    run, told = f"run-{secrets.token_hex(4)}", tmp_path / "told"
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster.nine_kinds", str(told)],
        env={**tools.environment, "HVD_ELASTIC_RUN_ID": run},
        start_new_session=True,
    )
    threading.Thread(target=worker.wait, daemon=True).start()
    pids: list[int] = []
    try:
        until(lambda: told.exists() and told.read_text().count("\n") == 9, "nine kinds")
        pids = [int(line.split()[0]) for line in told.read_text().splitlines()]
        children = psutil.Process(worker.pid).children

        def only_they_live() -> bool:  # who has forked twice ends
            return all(x.pid in pids or x.status() == psutil.STATUS_ZOMBIE for x in children())

        until(only_they_live, "the end of the processes in between")
        arguments = [str(tools.hostfile), "--hosts", "node1", "--run", run, "--json"]
        found = records(tools("killclust", *arguments, "--grace", "2"))["node1"]["processes"]
        assert {entry["pid"] for entry in found} == set(pids)
        assert {entry["ended"] for entry in found} == {"TERM", "KILL"}
        assert not any(map(is_alive, pids))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_what_dead_runs_left_in_files_is_removed_and_what_is_used_is_not(
    tools: Tools, tmp_path: Path
) -> None:
    run = f"run-{secrets.token_hex(4)}"
    digest = hashlib.sha256(f"{run}/node1".encode()).hexdigest()[:12]
    # A log-in has no TMPDIR of ours.
    folders = [Path("/tmp", f"hvd-{digest}-{name}") for name in ("dead", "used")]
    for folder in folders:
        folder.mkdir()
        (folder / "torch_socket").write_bytes(bytes(1000))
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"torch_{ended.pid}_{run}", f"nccl-{run}-dead", f"nccl-{run}-used", f"mine-{run}"]
    shared_memory = [Path("/dev/shm", name) for name in names]
    for path in shared_memory:
        path.write_bytes(bytes(1000))
    # As a worker that lives has it, and one that has only mapped it.
    program = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); held = mmap.mmap(file.fileno(), 0); "
        "file.close(); print('ready', flush=True); sys.stdin.read()"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program, str(shared_memory[2])],
        env={**os.environ, "TMPDIR": str(folders[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        arguments = [str(tools.hostfile), "--hosts", "node1", "--run", run, "--json"]
        gone = [folders[0], *shared_memory[:2]]
        kept = [folders[1], *shared_memory[2:]]
        for options in (["--dry-run"], []):
            assert all(path.exists() for path in gone)
            files = records(tools("killclust", *arguments, *options))["node1"]["files"]
            found = {file["path"] for file in files}
            assert found >= set(map(str, gone))
            assert not found & set(map(str, kept))
        assert not any(path.exists() for path in gone)
        assert all(path.exists() for path in kept)
    finally:
        worker.communicate()
        for path in shared_memory:
            path.unlink(missing_ok=True)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def test_processes_are_ended_by_their_command_line(tools: Tools) -> None:
    word = secrets.token_hex(8)
    processes = [
        subprocess.Popen(["sh", "-c", f"sleep 100; : {name}"], start_new_session=True)
        for name in (f"train_{word}", f"other_{word}")
    ]
    try:
        for process in processes:
            threading.Thread(target=process.wait, daemon=True).start()
        arguments = [str(tools.hostfile), "--hosts", "node1", "--user-processes"]
        for pattern in ("", ".*", "("):
            assert tools("killclust", *arguments, pattern).returncode == 2
        found = records(tools("killclust", *arguments, f"train_{word}", "--json"))["node1"]
        assert processes[0].pid in [each["pid"] for each in found["processes"]]
        until(lambda: not is_alive(processes[0].pid), "its end")
        assert is_alive(processes[1].pid)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(LIMIT_S)


def test_strays_are_ended_and_what_somebody_holds_is_not(tools: Tools) -> None:
    names = ["TORCHELASTIC_RUN_ID=job", "OMPI_COMM_WORLD_RANK=0", "HOROVOD_RANK=1"]

    def orphan(command: str, *marks: str) -> int:
        """Started by a shell that is gone at once, as a launcher that was killed."""
        done = subprocess.run(
            ["setsid", "sh", "-c", f"env {' '.join(marks)} {command} >/dev/null 2>&1 & echo $!"],
            capture_output=True,
            text=True,
        )
        return int(done.stdout)

    def is_marked(pid: int) -> bool:
        """The shell's child has the mark once env has replaced it."""
        return any(name.encode() in read(pid, "environ").split(b"\0") for name in names)

    strays = [orphan("sleep 100", name) for name in names]
    strays += [orphan("sh -c 'sleep 100; :'", names[0])]
    bystanders = [
        orphan("sleep 100"),
        orphan("sleep 100", "HVD_ELASTIC_RUN_ID=run", names[0]),
    ]
    # This test is their launcher, and alive; they are of other jobs than the strays.
    held = [
        subprocess.Popen(
            ["env", f"{name}1", "MASTER_PORT=1", "sh", "-c", "sleep 100; :"],
            start_new_session=True,
        )
        for name in names
    ]
    try:
        until(lambda: all(map(is_marked, strays)), "the strays' start")
        if Path(f"/proc/{strays[0]}/stat").read_text().rpartition(")")[2].split()[1] != "1":
            pytest.skip("orphans are not given to process 1 here, but to a subreaper")
        arguments = [str(tools.hostfile), "--hosts", "node1", "--strays", "--json"]
        listed = records(tools("killclust", *arguments, "--dry-run"))["node1"]["processes"]
        assert isinstance(listed, list)
        found = {entry["pid"]: entry["run"] for entry in listed}
        assert set(strays) <= set(found)
        assert found[strays[0]] == "torchrun job"
        assert not {*bystanders, *(process.pid for process in held)} & set(found)
        assert tools("killclust", *arguments, "--grace", "2").returncode == 0
        until(lambda: not any(map(is_alive, strays)), "the strays' end")
        assert all(map(is_alive, bystanders))
        assert all(process.poll() is None for process in held)
    finally:
        for pid in [*bystanders, *strays]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in held:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(LIMIT_S)


def test_check_says_what_python_there_lacks(tools: Tools) -> None:
    arguments = [str(tools.hostfile), "--hosts", "node1", "--no-network"]
    result = tools("checkclust", *arguments, "--json")
    checks = records(result)["node1"]["checks"]
    levels = {check["name"]: check["level"] for check in checks}
    assert levels["python"] == levels["hvd_elastic code"] == "ok"
    assert not any(json.loads(line)["kind"] == "link" for line in result.stdout.splitlines())
    result = tools("checkclust", *arguments, "--python", "/no/python")
    assert result.returncode == 1
    assert "NOT ready: host node1: no /no/python there" in result.stdout
    assert tools("checkclust", *arguments, "--code", "/none").returncode == 2


def test_bootstrap_brings_the_leaders_key(tools: Tools, tmp_path: Path) -> None:
    """From a host that lets us in by another's key to one that knows ours, asked once."""
    there, ours = tmp_path / "there", tmp_path / "ours"
    (there / ".ssh").mkdir(parents=True, mode=0o700)
    # Without a line end, as people leave it.
    (there / ".ssh" / "authorized_keys").write_text("# mine")
    folder = tmp_path / "sshd"
    folder.mkdir()
    fresh = Sshd(folder, home=there)
    try:
        tools.config.write_text(
            f"Host node*\n HostName {fresh.address}\n Port {fresh.port}\nUserKnownHostsFile none\n"
        )
        arguments = [str(tools.hostfile), "--hosts", "node[1-2]", "--no-network", "--json"]
        bootstrap = [*arguments, "--bootstrap", "--identity", str(fresh.user_key)]
        # Nothing is done without a yes.
        assert tools("checkclust", *bootstrap, HOME=str(ours)).returncode == 1
        assert not (ours / ".ssh").exists()
        assert (there / ".ssh" / "authorized_keys").read_text() == "# mine"
        tools("checkclust", *bootstrap, "--yes", HOME=str(ours))
        public = (ours / ".ssh" / "id_ed25519.pub").read_text()
        assert (ours / ".ssh" / "id_ed25519").stat().st_mode & 0o077 == 0
        assert (there / ".ssh" / "authorized_keys").read_text() == f"# mine\n{public}"
        # Now it works without the other key; once more changes nothing.
        checked = records(tools("checkclust", *arguments, HOME=str(ours)))
        assert all(entry["checks"] for entry in checked.values())
        tools("checkclust", *bootstrap, "--yes", HOME=str(ours))
        assert (there / ".ssh" / "authorized_keys").read_text() == f"# mine\n{public}"
    finally:
        fresh.stop()


def test_trust_shows_accepts_and_then_is_strict(tools: Tools, server: Sshd) -> None:
    text = tools.config.read_text().replace(str(server.folder / "known_hosts"), "none")
    tools.config.write_text(text)
    known = tools.folder / "home" / "known_hosts"
    printed = subprocess.run(
        ["ssh-keygen", "-lf", f"{server.host_key}.pub"], capture_output=True, text=True
    ).stdout.split()[1]

    refused = tools("runclust", str(tools.hostfile), "--hosts", "node1", "true")
    assert refused.returncode == 1
    assert "hvd-elastic trust" in refused.stderr

    result = tools("trust", str(tools.hostfile))
    assert result.returncode == 1
    assert result.stdout.count(printed) == 8
    assert not known.exists()

    result = tools("trust", str(tools.hostfile), "--yes")
    assert result.returncode == 0, result.stderr
    assert known.read_text() == server.known_hosts_line()
    assert tools("runclust", str(tools.hostfile), "--hosts", "node1", "true").returncode == 0
    found = records(tools("trust", str(tools.hostfile), "--json"))
    assert {entry["state"] for entry in found.values()} == {"known"}

    for key_type in ("ed25519", "ecdsa"):
        key = private_sshd.make_key(tools.folder / key_type, key_type)
        other = key.with_suffix(".pub").read_text()
        known.write_text(f"[{server.address}]:{server.port} {other}")
        result = tools("trust", str(tools.hostfile), "--yes", "--json")
        assert result.returncode == 1
        assert {entry["state"] for entry in records(result).values()} == {"refused"}
        assert known.read_text().endswith(other)
