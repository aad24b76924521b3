"""Virtual clusters, really made: in namespaces where there is root, on loopback everywhere."""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvd_elastic.errors import UsageError, VirtualClusterError
from hvd_elastic.hosts import connection as connections
from hvd_elastic.hosts import ssh
from hvd_elastic.hosts.fanout import Outcome
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.programs.processes import read, read_process
from hvd_elastic.tools.run import commands
from hvd_elastic.virtual import VirtualCluster, accounts, netns, processes
from hvd_elastic.virtual.plan import interface_name
from hvd_elastic.virtual.processes import CpuGroups, marked_processes
from hvd_elastic.virtual.state import clusters_folder
from tests.paths import COSTLY, LIMIT_S
from tests.small_disk import mounted
from tests.waiting import until

NO_NAMESPACES = netns.why_no_namespaces()
needs_namespaces = [
    pytest.mark.root,
    pytest.mark.skipif(NO_NAMESPACES is not None, reason=NO_NAMESPACES or ""),
]
BACKENDS = [
    pytest.param(False, id="netns", marks=needs_namespaces),
    pytest.param(True, id="loopback"),
]
QUIET_S = 0.4
"""For so long nothing must arrive where nothing is expected."""

pytestmark = pytest.mark.ssh


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    yield tmp_path
    for left in VirtualCluster.every():
        left.down()


@pytest.fixture(params=BACKENDS)
def both(request: pytest.FixtureRequest, home: Path) -> Iterator[VirtualCluster]:
    """Two hosts, in namespaces or on loopback."""
    with VirtualCluster.up(2, 2, loopback=request.param) as made:
        yield made


@pytest.fixture
def spaces(home: Path) -> Iterator[VirtualCluster]:
    """Two hosts in namespaces; for tests marked with ``needs_namespaces``."""
    if NO_NAMESPACES:
        pytest.skip(NO_NAMESPACES)
    with VirtualCluster.up(2, 2, loopback=False) as made:
        yield made


def log_in(cluster: VirtualCluster, host: str, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh", "-F", str(cluster.ssh_config), "-o", f"ConnectTimeout={LIMIT_S:g}", host, command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )


def answer(cluster: VirtualCluster, host: str, command: str) -> str:
    done = log_in(cluster, host, command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def connect(cluster: VirtualCluster, host: str) -> socket.socket:
    entry = cluster.state.host(host)
    connection = socket.create_connection((entry.address, entry.port), timeout=LIMIT_S)
    assert connection.recv(4) == b"SSH-"
    while b"\n" not in connection.recv(100):
        pass
    return connection


def assert_nothing_left(cluster: VirtualCluster, subnet: str, home: Path) -> None:
    assert not marked_processes(cluster.folder)
    assert not cluster.folder.exists()
    assert not (home / "virtual").exists()
    assert str(cluster.folder) not in Path("/proc/self/mountinfo").read_text()
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        assert not any(str(cluster.folder) in word for word in words), process.info
    if subnet:
        assert not Path(f"/sys/class/net/{interface_name(subnet)}").exists()
    groups = CpuGroups.find(netns.Namespaces(cluster.folder).group_name)
    assert groups is None or not groups.folder.exists()


# ---- accounts


@pytest.mark.parametrize("users", [["Ada"], ["ada", "ada"], ["-x"], [""]])
def test_a_name_that_no_account_can_have_is_named(users: list[str]) -> None:
    with pytest.raises(UsageError, match="--users: '"):
        accounts.check_names(users, "vc1")


@pytest.mark.root
@pytest.mark.skipif(NO_NAMESPACES is not None, reason=NO_NAMESPACES or "")
def test_accounts_log_in_with_keys_of_their_own_and_are_removed(home: Path) -> None:
    name = f"vcu{os.getpid()}"  # no other test has these users and this group
    ada, eve = f"{name}a", f"{name}e"

    def as_ada(*words: str) -> subprocess.CompletedProcess[str]:
        options = accounts.as_user(ada)
        return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, **options)

    with VirtualCluster.up(1, 1, name=name, users=[ada, eve]) as cluster:
        cluster.add(1)
        for host in cluster.hosts:
            assert as_ada("ssh", host, "id -Gn").stdout.split() == [ada, name]
        assert answer(cluster, cluster.hosts[0], "id -un") == "root"
        assert as_ada("ssh", "-l", eve, cluster.hosts[0], "true").returncode == 255
        assert "Permission denied" in as_ada("cat", f"/home/{eve}/{accounts.KEY}").stderr
        assert as_ada("cat", "hostfile").stdout == cluster.hostfile.read_text()
        started = subprocess.Popen(["sleep", "600"], **accounts.as_user(eve))
        with pytest.raises(VirtualClusterError, match=f"has a user {eve} already"):
            VirtualCluster.up(1, 1, users=[eve])
    assert started.wait(LIMIT_S) == -signal.SIGKILL
    for user in (ada, eve):
        with pytest.raises(KeyError):
            pwd.getpwnam(user)
        assert not Path(f"/home/{user}").exists()
    with pytest.raises(KeyError):
        grp.getgrnam(name)


# ---- both kinds


def test_hosts_take_logins_by_name_with_verified_keys(both: VirtualCluster) -> None:
    assert both.hosts == ["vc1-1", "vc1-2"]
    assert both.hostfile.read_text() == "vc1-1 slots=2\nvc1-2 slots=2\n"
    for host in both.hosts:
        text = answer(both, host, "echo $HVD_ELASTIC_VIRTUAL_HOST; env; command -v ls")
        assert text.splitlines()[0] == host
        assert text.splitlines()[-1].endswith("/ls")
        assert f"SSH_CONNECTION={both.leader_address} " in text or both.loopback
    # A host key that is not the known one is refused.
    known = both.folder / "known_hosts"
    first, second = known.read_text().splitlines()
    known.write_text(f"{first.split(' ')[0]} {second.split(' ', 1)[1]}\n")
    refused = log_in(both, "vc1-1", "true")
    assert refused.returncode == 255
    assert "verification failed" in refused.stderr


def test_a_stranger_key_is_refused(both: VirtualCluster, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    entry = both.state.host("vc1-1")
    words = ["ssh", "-F", "/dev/null", "-i", str(stranger), "-p", str(entry.port)]
    for option in (
        "IdentitiesOnly=yes",
        "BatchMode=yes",
        f"UserKnownHostsFile={both.folder / 'known_hosts'}",
    ):
        words += ["-o", option]
    done = subprocess.run(
        [*words, f"{both.state.user}@{entry.address}", "true"], capture_output=True, text=True
    )
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_a_crash_ends_everything_and_a_boot_brings_the_host_back(both: VirtualCluster) -> None:
    answer(both, "vc1-1", "echo kept > ~/.hvd-elastic-test; rm ~/.hvd-elastic-test")
    # One left behind by its session, as a daemon would be.
    answer(both, "vc1-2", "setsid sleep 600 < /dev/null > /dev/null 2>&1 & echo started")
    session = subprocess.Popen(
        ["ssh", "-F", str(both.ssh_config), "vc1-2", "echo on; exec sleep 600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert session.stdout is not None
    assert session.stdout.readline() == "on\n"
    sleepers = {pid for pid in both.pids("vc1-2") if "sleep" in command_of(pid)}
    assert len(sleepers) == 2
    with connect(both, "vc1-2") as connection, connect(both, "vc1-1") as other:
        both.crash("vc1-2")
        assert closes(connection), "a crash closes connections at once"
        assert not closes(other), "only the host that crashed"
    assert session.wait(timeout=LIMIT_S) == 255
    session.stdout.close()
    assert not any(map(read_process, sleepers))
    assert both.pids("vc1-2", system=True) == set()
    assert both.status("vc1-2") == "off"
    assert both.status("vc1-1") == "up"
    entry = both.state.host("vc1-2")
    with pytest.raises(OSError):  # noqa: PT011  # refused, unreachable or silent
        socket.create_connection((entry.address, entry.port), timeout=0.5)
    both.crash("vc1-2")
    both.boot("vc1-2")
    assert both.status("vc1-2") == "up"
    assert answer(both, "vc1-2", "echo again") == "again"
    with pytest.raises(VirtualClusterError, match="vc1-2 is running"):
        both.boot("vc1-2")


def command_of(pid: int) -> str:
    return read(pid, "cmdline").replace(b"\0", b" ").decode()


def closes(connection: socket.socket) -> bool:
    """Whether the peer's end of a connection is closed within a moment."""
    connection.settimeout(QUIET_S)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_processes_of_a_host_are_found_and_killed_by_the_id_they_know(
    both: VirtualCluster,
) -> None:
    assert both.pids("vc1-1") == set()
    sleeper = subprocess.Popen(
        ["ssh", "-F", str(both.ssh_config), "vc1-1", "echo $$; exec sleep 600"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sleeper.stdout is not None
    own_id = int(sleeper.stdout.readline())
    assert both.pids("vc1-1")
    assert both.pids("vc1-2") == set()
    both.kill("vc1-1", own_id)
    assert sleeper.wait(timeout=LIMIT_S) in (255, 137)
    sleeper.stdout.close()
    until(lambda: both.pids("vc1-1") == set())
    with pytest.raises(VirtualClusterError, match="no process 999999"):
        both.kill("vc1-1", 999_999)


def test_hosts_are_added_while_it_is_up(both: VirtualCluster) -> None:
    assert both.add(2) == ["vc1-3", "vc1-4"]
    assert both.hostfile.read_text().splitlines()[2:] == ["vc1-3 slots=2", "vc1-4 slots=2"]
    assert answer(both, "vc1-4", "echo $HVD_ELASTIC_VIRTUAL_HOST") == "vc1-4"
    with pytest.raises(UsageError, match="at most 250"):
        both.add(247)


def test_hosts_that_cannot_be_added_leave_the_cluster_as_it_was(
    both: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = both.state
    with monkeypatch.context() as patch:
        patch.setattr("hvd_elastic.virtual.processes.wait_for_sshd", fail)
        with pytest.raises(VirtualClusterError, match="broken on purpose"):
            both.add(1)
    assert both.state == before
    assert set(marked_processes(both.folder).values()) <= {"vc1-1", "vc1-2", "(switch)"}
    assert both.add(1) == ["vc1-3"]


def fail(*_: object) -> None:
    raise VirtualClusterError("broken on purpose")


@pytest.mark.parametrize("loopback", BACKENDS)
def test_down_leaves_nothing_and_may_be_repeated(home: Path, loopback: bool) -> None:
    copy = home / "hosts"
    made = VirtualCluster.up(2, 1, loopback=loopback, hostfile=copy)
    subnet = made.state.subnet
    answer(made, "vc1-1", "setsid sleep 600 < /dev/null > /dev/null 2>&1 & echo started")
    assert copy.read_text() == "vc1-1 slots=1\nvc1-2 slots=1\n"
    made.down()
    assert_nothing_left(made, "" if loopback else subnet, home)
    assert not copy.exists()
    made.down()
    with pytest.raises(VirtualClusterError, match="not up"):
        _ = made.hosts


@pytest.mark.parametrize("loopback", BACKENDS)
@pytest.mark.parametrize("error", [VirtualClusterError("broken on purpose"), KeyboardInterrupt()])
def test_an_up_that_fails_half_way_leaves_nothing(
    home: Path, loopback: bool, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object) -> None:
        raise error

    monkeypatch.setattr("hvd_elastic.virtual.processes.wait_for_sshd", break_off)
    with pytest.raises(type(error)):
        VirtualCluster.up(2, 1, loopback=loopback)
    assert_nothing_left(VirtualCluster("vc1"), "", home)


@pytest.mark.parametrize("loopback", BACKENDS)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=COSTLY)]
)
def test_a_virtclust_ended_half_way_leaves_nothing_at_the_latest_after_down(
    home: Path, loopback: bool, number: signal.Signals
) -> None:
    program = f"""
        import signal
        from hvd_elastic.cli.machine import virtclust
        from hvd_elastic.virtual import processes
        def half_way(*_):
            print("half way", flush=True)
            signal.pause()
        processes.wait_for_sshd = half_way
        virtclust.main(["up", "2x1"{', "--loopback"' * loopback}])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half way\n"
    process.send_signal(number)
    _, words = process.communicate(timeout=LIMIT_S)
    if number == signal.SIGKILL:
        assert len(marked_processes(VirtualCluster("vc1").folder)) >= 2
        for left in VirtualCluster.every():
            left.down()
    else:
        assert process.returncode == 128 + number, words
        assert "Traceback" not in words
    assert_nothing_left(VirtualCluster("vc1"), "", home)


@pytest.mark.parametrize("loopback", BACKENDS)
def test_down_works_without_a_folder_and_with_a_damaged_one(home: Path, loopback: bool) -> None:
    made = VirtualCluster.up(1, 1, loopback=loopback)
    (made.folder / "state.json").write_text("{")
    made.down()
    assert_nothing_left(made, "", home)
    made = VirtualCluster.up(1, 1, loopback=loopback)
    subprocess.run(["rm", "-r", str(made.folder)], check=True)
    assert [left.name for left in VirtualCluster.every()] == ["vc1"]
    made.down()
    assert_nothing_left(made, "", home)


@pytest.mark.parametrize("loopback", BACKENDS)
def test_clusters_made_at_the_same_time_do_not_collide(home: Path, loopback: bool) -> None:
    options = ["--loopback"] if loopback else []
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "hvd_elastic.cli.machine.virtclust",
                "up",
                "2x1",
                "--json",
                *options,
            ],
            env={**os.environ, "HVD_ELASTIC_HOME": str(home / sub)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for sub in ("a", "a", "b")
    ]
    try:
        ends = [process.communicate(timeout=LIMIT_S) for process in started]
        assert [process.returncode for process in started] == [0, 0, 0], ends
        records = [json.loads(out) for out, _ in ends]
        assert sorted(record["name"] for record in records) == ["vc1", "vc1", "vc2"]
        assert len({record["subnet"] for record in records}) == 3
        for record in records:
            for host in record["hosts"]:
                done = subprocess.run(
                    ["ssh", "-F", record["ssh_config"], host["name"], "echo $HVD_ELASTIC_VIRTUAL"],
                    capture_output=True,
                    text=True,
                )
                assert done.stdout.strip() == str(Path(record["ssh_config"]).parent)
    finally:
        for sub in ("a", "b"):
            os.environ["HVD_ELASTIC_HOME"] = str(home / sub)
            for left in VirtualCluster.every():
                left.down()
        os.environ["HVD_ELASTIC_HOME"] = str(home)


def test_nothing_of_the_callers_environment_reaches_the_hosts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "tweet-7731")
    with VirtualCluster.up(1, 1) as made:
        assert "tweet-7731" not in answer(made, "vc1-1", "env")
        marked = {process.pid for process in marked_processes(made.folder)}
        for pid in made.pids("vc1-1", system=True) | marked:
            assert b"tweet-7731" not in read(pid, "environ")


def test_names_in_use_and_wrong_arguments_are_refused(both: VirtualCluster) -> None:
    with pytest.raises(VirtualClusterError, match="virtclust down --name vc1"):
        VirtualCluster.up(1, 1, name="vc1", loopback=both.loopback)
    assert both.status("vc1-1") == "up"
    with pytest.raises(UsageError, match="1 to 250"):
        VirtualCluster.up(0, 1)
    with pytest.raises(UsageError, match="cluster name"):
        VirtualCluster.up(1, 1, name="No Name")
    with pytest.raises(VirtualClusterError, match="there are vc1"):
        VirtualCluster.find("vc9")
    assert VirtualCluster.find().name == "vc1"
    found, name = VirtualCluster.find_host("2")
    assert (found.name, name) == ("vc1", "vc1-2")


def test_a_missing_program_is_named_with_its_package(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SEARCH_PATH", str(home))
    with pytest.raises(VirtualClusterError, match="apt-get install openssh-server"):
        VirtualCluster.up(1, 1)
    assert not clusters_folder().exists()


def test_a_cluster_stays_the_same_when_the_home_changes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = VirtualCluster.up(1, 1, loopback=True)
    with monkeypatch.context() as patch:
        patch.setenv("HVD_ELASTIC_HOME", str(home / "elsewhere"))
        assert made.hosts == ["vc1-1"]
        made.down()
    assert_nothing_left(made, "", home)


# ---- loopback only


def test_loopback_says_what_it_cannot_do(home: Path) -> None:
    with VirtualCluster.up(1, 1, loopback=True) as made:
        for action in (made.cut, made.heal):
            with pytest.raises(VirtualClusterError, match="network namespaces"):
                action("vc1-1")
        with pytest.raises(VirtualClusterError, match="network namespaces"):
            made.crash("vc1-1", silent=True)
    with pytest.raises(VirtualClusterError, match="leave out --rate"):
        VirtualCluster.up(1, 1, loopback=True, rate="1gbit")


def test_an_sshd_whose_manager_was_killed_is_still_ended(home: Path) -> None:
    with VirtualCluster.up(1, 1, loopback=True) as made:
        for manager in marked_processes(made.folder):
            os.kill(manager.pid, signal.SIGKILL)
        assert made.pids("vc1-1", system=True)
        made.down()
        assert_nothing_left(made, "", home)


# ---- namespaces only


@pytest.mark.root
def test_a_host_has_a_name_processes_and_folders_of_its_own(spaces: VirtualCluster) -> None:
    one, two = spaces.hosts
    assert answer(spaces, one, "hostname") == one
    assert answer(spaces, two, "hostname") == two
    for host in spaces.hosts:
        assert answer(spaces, one, f"getent hosts {host}").split() == [spaces.address(host), host]
    leader = answer(spaces, one, "getent hosts leader").split()
    assert leader[0] == spaces.leader_address
    answer(spaces, one, "echo 1 > /data/x; echo 1 > /tmp/x; echo 1 > /dev/shm/x")
    assert answer(spaces, two, "cat /data/x /tmp/x /dev/shm/x 2>/dev/null; echo none") == "none"
    assert (spaces.data(one) / "x").read_text() == "1\n"
    # Only what belongs to this host: first process, sshd, its session and ps itself.
    names = answer(spaces, one, "ps -e -o comm=").split()
    assert set(names) <= {"sh", "bash", "sshd", "ps", "sshd-session"}
    assert "eth0" in answer(spaces, one, "ls /sys/class/net").split()


@pytest.mark.root
def test_boot_keeps_data_and_empties_tmp(spaces: VirtualCluster) -> None:
    host = spaces.hosts[0]
    answer(spaces, host, "echo 1 > /data/x; mkdir -p /tmp/a/b")
    spaces.crash(host)
    spaces.boot(host)
    # The running Python is shared with the hosts, wherever it lies, so /tmp need not be empty.
    assert answer(spaces, host, "cat /data/x; test -e /tmp/a && echo left; true") == "1"


@pytest.mark.root
def test_a_cut_cable_is_silent_and_heals(spaces: VirtualCluster) -> None:
    host, other = spaces.hosts
    with connect(spaces, host) as connection:
        spaces.cut(host)
        assert spaces.status(host) == "cut"
        assert not closes(connection), "a pulled cable tells nobody"
        connection.sendall(b"SSH-2.0-test\r\n")
        assert not closes(connection)
        reach = spaces.run_on(other, ["sh", "-c", f"getent hosts {host} && ip neigh"])
        assert reach.returncode == 0
        entry = spaces.state.host(host)
        with pytest.raises(OSError):  # noqa: PT011  # silent or unreachable
            socket.create_connection((entry.address, 22), timeout=0.3)
        spaces.heal(host)
        # What was sent while the cable was out arrives after all.
        connection.settimeout(60)
        assert connection.recv(1)
    assert answer(spaces, host, "echo healed") == "healed"
    spaces.crash(host)
    with pytest.raises(VirtualClusterError, match=f"virtclust boot {host}"):
        spaces.cut(host)


@pytest.mark.root
@pytest.mark.parametrize("how", ["cut", pytest.param("sshd stops", marks=COSTLY)])
def test_a_command_is_lost_with_its_host(
    spaces: VirtualCluster, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(ssh, "UNACKNOWLEDGED_S", 0.5)
    monkeypatch.setattr(ssh, "UNANSWERED_S", 3.0 if how == "sshd stops" else 60.0)
    monkeypatch.setattr(connections, "ASK_AFTER_S", 0.2)
    host = spaces.hosts[0]
    options = ssh.SshOptions(config_path=spaces.ssh_config)
    quiet = "echo begun; sleep 1; echo ended"
    # A host that answers may say nothing for as long as it likes.
    (calm,) = commands.run_on_hosts([Host(host)], quiet, options)
    assert calm.answer.stdout == b"begun\nended\n"

    def lose(*_: object) -> None:
        if how == "cut":
            spaces.cut(host)
        else:
            signal_sshd(spaces, host, signal.SIGSTOP)

    endless = "echo begun; exec sleep 100"
    (lost,) = commands.run_on_hosts([Host(host)], endless, options, on_lines=lose)
    assert lost.outcome is Outcome.UNREACHABLE
    assert lost.error.startswith("the connection is lost: the host or its network is down")
    assert lost.answer.stdout == b"begun\n"
    if how == "cut":
        spaces.heal(host)
    else:
        stuck = virtclust("run", host, "--", "true")
        assert stuck.returncode == 255
        assert "timed out" in stuck.stderr
        signal_sshd(spaces, host, signal.SIGCONT)
    until(lambda: not spaces.pids(host))


def signal_sshd(cluster: VirtualCluster, host: str, number: int) -> None:
    for pid in cluster.pids(host, system=True):
        if read(pid, "comm").startswith(b"sshd"):
            os.kill(pid, number)


@pytest.mark.root
def test_a_host_that_dies_by_itself_and_hangs_in_it_is_crashed_and_booted(
    spaces: VirtualCluster,
) -> None:
    host = spaces.hosts[0]
    process = spaces.popen_on(host, ["sleep", "600"], stdin=subprocess.DEVNULL)

    def sleeping() -> set[int]:
        return {pid for pid in spaces.pids(host) if command_of(pid).startswith("sleep")}

    until(sleeping, "the sleep")
    os.kill(process.pid, signal.SIGSTOP)  # so nobody reaps the sleep, for which PID 1 waits
    spaces.kill(host, 1, signal.SIGKILL)

    def networks() -> list[int]:
        pids = spaces.pids(host, system=True)
        return [pid for pid in pids if Path(f"/proc/{pid}/ns/net").exists()]

    until(lambda: not networks(), "its end begins")
    assert spaces.pids(host, system=True), "it hangs"
    spaces.crash(host)
    assert process.wait(timeout=LIMIT_S) == -signal.SIGKILL
    assert spaces.pids(host, system=True) == set()
    spaces.boot(host)
    assert answer(spaces, host, "echo again") == "again"


@pytest.mark.root
def test_a_silent_crash_tells_nobody(spaces: VirtualCluster) -> None:
    host = spaces.hosts[0]
    with connect(spaces, host) as connection:
        spaces.crash(host, silent=True)
        assert spaces.pids(host, system=True) == set()
        assert not closes(connection)
        # The booted host knows nothing of the connection and says so.
        spaces.boot(host)
        connection.sendall(b"x")
        connection.settimeout(60)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as s:
    s.sendall(bytes(int(sys.argv[3])))
"""
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    with connection:
        while connection.recv(65536):
            pass
"""


@pytest.mark.root
def test_the_link_rate_holds_in_both_directions(home: Path) -> None:
    if NO_NAMESPACES:
        pytest.skip(NO_NAMESPACES)
    size, bits_per_s = 2_000_000, 20_000_000
    with VirtualCluster.up(1, 1, rate="20mbit", loopback=False) as made:
        host = made.hosts[0]
        at_host, at_leader = made.address(host), made.leader_address
        for receiver_address, send_on_host in ((at_leader, True), (at_host, False)):
            receive = ["python3", "-c", RECEIVE, receiver_address]
            if send_on_host:
                receiver = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True)
            else:
                receiver = made.popen_on(host, receive, stdout=subprocess.PIPE)
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            begun = time.monotonic()
            send = ["python3", "-c", SEND, receiver_address, port, str(size)]
            if send_on_host:
                assert made.run_on(host, send).returncode == 0
            else:
                subprocess.run(send, check=True)
            assert receiver.wait(timeout=LIMIT_S) == 0
            receiver.stdout.close()
            rate = size * 8 / (time.monotonic() - begun)
            assert rate < 1.3 * bits_per_s


@pytest.mark.root
def test_no_line_of_a_system_file_changes(home: Path) -> None:
    if NO_NAMESPACES:
        pytest.skip(NO_NAMESPACES)

    def fingerprint() -> dict[str, str]:
        places = [Path("/etc/ssh"), Path.home() / ".ssh"]
        files = [path for place in places if place.is_dir() for path in place.rglob("*")]
        files += [Path("/etc/hosts"), Path("/etc/shadow"), Path("/etc/passwd")]
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.is_file()
        }

    before = fingerprint()
    top_before = sorted(Path("/").iterdir())
    with VirtualCluster.up(2, 1, loopback=False) as made:
        answer(made, "vc1-1", "hostname")
        made.crash("vc1-1")
        made.boot("vc1-1")
        assert fingerprint() == before
    assert fingerprint() == before
    assert sorted(Path("/").iterdir()) == top_before


@pytest.mark.root
def test_hosts_keep_their_etc_when_the_machine_replaces_files_of_its_own(
    home: Path, tmp_path: Path
) -> None:
    """The machine's /etc is a copy here, in a mount namespace of the test's own."""
    if NO_NAMESPACES:
        pytest.skip(NO_NAMESPACES)
    etc = tmp_path / "etc"
    copy = ["cp", "-aT", "/etc", str(etc)]
    until(lambda: subprocess.run(copy).returncode == 0)  # programs remove their lock files there
    shadow = (etc / "shadow").read_text().splitlines()
    shadow = ["root:!:" + line.split(":", 2)[2] if line[:5] == "root:" else line for line in shadow]
    (etc / "shadow").write_text("\n".join(shadow) + "\n")
    script = f"""
        set -e
        mount -n --bind {etc} /etc
        {sys.executable} -m hvd_elastic.cli.machine.virtclust up 2x1 --name keeps > /dev/null
        for name in hosts shadow; do
            cp -p /etc/$name /etc/$name.new
            mv /etc/$name.new /etc/$name
        done
        ssh -F {home}/virtual/keeps/ssh_config keeps-1 getent hosts keeps-2
    """
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["keeps-2"]


@pytest.mark.root
@pytest.mark.parametrize(
    "free_pages", [0, *(pytest.param(pages, marks=COSTLY) for pages in (1, 3, 5)), 8, 12]
)
def test_up_on_a_full_disk(tmp_path: Path, free_pages: int) -> None:
    """However little is left, and so whatever file it is that cannot be written."""
    with mounted(tmp_path / "small", "64k", lazy=True) as disk:
        (disk / "filler").write_bytes(b"x" * (16 - free_pages) * 4096)
        done = subprocess.run(
            [sys.executable, "-m", "hvd_elastic.cli.machine.virtclust", "up", "2x1", "--loopback"],
            env={**os.environ, "HVD_ELASTIC_HOME": str(disk)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {disk.resolve()}/virtual/vc1")
        assert "No space left on device; free space" in line
        assert "HVD_ELASTIC_HOME" in line
        assert [path.name for path in disk.iterdir()] == ["filler"]
        assert not marked_processes(disk / "virtual" / "vc1")


@pytest.mark.root
def test_a_cpu_share_is_set_and_taken_back(home: Path) -> None:
    if NO_NAMESPACES:
        pytest.skip(NO_NAMESPACES)
    if CpuGroups.find("x") is None:
        pytest.skip("no control group file system with a cpu controller is mounted")
    with VirtualCluster.up(1, 1, cpus=0.5, loopback=False) as made:
        groups = CpuGroups.find(netns.Namespaces(made.folder).group_name)
        assert groups is not None
        members = (groups.folder / "vc1-1" / "cgroup.procs").read_text().split()
        assert made.pids("vc1-1", system=True) <= set(map(int, members))
    assert_nothing_left(made, "", home)


@pytest.mark.root
def test_shares_are_seen_in_a_hosts_own_tmp(home: Path) -> None:
    if NO_NAMESPACES:
        pytest.skip(NO_NAMESPACES)
    shared = home / "shared"
    shared.mkdir()
    (shared / "note").write_text("seen")
    with VirtualCluster.up(1, 1, loopback=False, shares=[shared]) as made:
        assert answer(made, "vc1-1", f"cat {shared}/note") == "seen"
        # This Python and this package as well, wherever they are.
        done = made.run_on("vc1-1", [sys.executable, "-c", "import hvd_elastic"], cwd="/")
        assert done.returncode == 0, done.stderr
    assert (shared / "note").read_text() == "seen"
    with pytest.raises(UsageError, match="no such file or folder"):
        VirtualCluster.up(1, 1, loopback=False, shares=[home / "nowhere"])


@pytest.mark.root
def test_everything_that_left_the_switch_behind_is_reported(spaces: VirtualCluster) -> None:
    for process in marked_processes(spaces.folder, "(switch)"):
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: "(switch)" not in marked_processes(spaces.folder).values())
    with pytest.raises(VirtualClusterError, match="virtclust down --name vc1"):
        spaces.cut("vc1-1")


# ---- the command line


def virtclust(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvd_elastic.cli.machine.virtclust", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("loopback", BACKENDS)
def test_the_commands(home: Path, loopback: bool) -> None:
    up = virtclust("up", "2x3", "--name", "tryout", "--json", *["--loopback"] * loopback)
    assert up.returncode == 0, up.stderr
    record = json.loads(up.stdout)
    assert [host["name"] for host in record["hosts"]] == ["tryout-1", "tryout-2"]
    assert virtclust("hostfile").stdout == "tryout-1 slots=3\ntryout-2 slots=3\n"
    assert virtclust("hostfile", "--path").stdout.strip() == record["hostfile"]
    ran = virtclust("run", "tryout-1", "--", "sh", "-c", "echo '$HOME is' $0; exit 7", "a b")
    assert (ran.stdout, ran.returncode) == ("$HOME is a b\n", 7)
    late = virtclust("run", "tryout-1", "--name", "tryout", "--", "hostname")
    assert (late.returncode, late.stdout) == (2, "")
    assert late.stderr.startswith("error: --name stands after the host")
    assert json.loads(virtclust("crash", "2", "--json").stdout) == {
        "host": "tryout-2",
        "status": "off",
    }
    hosts = json.loads(virtclust("status", "--json").stdout)["hosts"]
    assert [host["status"] for host in hosts] == ["up", "off"]
    assert virtclust("boot", "tryout-2").returncode == 0
    assert virtclust("add", "1").stdout == "added: tryout-3\n"
    wrong = virtclust("crash", "tryout-9")
    assert wrong.returncode == 1
    assert "tryout-1, tryout-2, tryout-3" in wrong.stderr
    assert "tryout: 3 hosts of 3 slots" in virtclust("list").stdout
    assert virtclust("down", "--all").stdout == "down: tryout\n"
    assert virtclust("down").returncode == 0
    assert_nothing_left(VirtualCluster("tryout"), "", home)


def test_the_hostfile_alone_is_enough_and_the_command_to_train_is_printed(home: Path) -> None:
    up = virtclust("up", "1x1", "--name", "alone", "--loopback")
    folder = VirtualCluster("alone").folder
    options = f"-H {folder / 'hostfile'} -F {folder / 'ssh_config'}"
    assert f"hvd-elastic run {options} -- python train.py\n" in up.stdout
    program = "from hvd_elastic.cli.cluster.tools import runclust_main; runclust_main()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "hostfile"), "echo hello"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == "alone-1: hello\n", done.stderr
    assert virtclust("down").returncode == 0


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["up", "three"], 2, "HOSTSxSLOTS"),
        (["up", "1x1", "--cpus", "many"], 2, "--cpus takes a number of 0.01 or more, not 'many'"),
        (["add", "x"], 2, "N takes a whole number of 1 or more, not 'x'"),
        (["up", "1x1", "--rate", "fast"], 2, "1gbit"),
        (["down", "--all", "--name", "x"], 2, "exclude"),
        (["cut", "vc1-1"], 1, "virtclust up 3x2"),
        (["down", "--name", "vc7"], 1, "there is no virtual cluster"),
    ],
)
def test_a_users_mistake_is_one_line(home: Path, words: list[str], status: int, text: str) -> None:
    done = virtclust(*words)
    assert done.returncode == status
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.root
@pytest.mark.parametrize("command", ["shutdown -h now", "poweroff", "systemctl poweroff"])
def test_a_host_that_shuts_itself_down_is_off_and_boots_again(spaces, command):
    if shutil.which(command.split()[0]) is None:
        pytest.skip("this machine has no such program, and nothing that hosts have to be kept from")
    first, second = spaces.hosts
    done = log_in(spaces, first, f"{command}; sleep {LIMIT_S:g}")
    assert done.returncode == 255, "the connection is closed"
    deadline = time.monotonic() + LIMIT_S
    while spaces.status(first) != "off":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert spaces.status(second) == "up"
    spaces.boot(first)
    assert log_in(spaces, first, "hostname").stdout.strip() == first


@pytest.mark.root
@pytest.mark.skipif(shutil.which("shutdown") is None, reason="this machine has no shutdown")
def test_a_shutdown_may_be_later_and_be_cancelled_and_no_host_reboots(spaces):
    host = spaces.hosts[0]
    file = "/run/virtclust.shutdown"
    assert log_in(
        spaces,
        host,
        f"shutdown +5 && until [ -s {file} ]; do sleep 0.1; done && cat {file} && shutdown -c",
    ).stdout
    assert log_in(spaces, host, f"kill -0 $(cat {file})").returncode == 1
    for reboot in ("reboot", "shutdown -r now"):
        refused = log_in(spaces, host, reboot)
        assert refused.returncode == 1
        assert "virtclust boot HOST" in refused.stderr
    assert spaces.status(host) == "up"


@pytest.mark.root
def test_a_host_crashes_also_when_nsenter_has_stopped_with_its_process(spaces):
    """As it does when it sees that its process is stopped, which is done before the kill."""
    host = spaces.hosts[0]
    with spaces.popen_on(host, ["sleep", "1000"]) as started:
        deadline = time.monotonic() + LIMIT_S
        while not (found := [*spaces.pids(host)]):
            assert time.monotonic() < deadline
        (sleeping,) = found
        os.kill(sleeping, signal.SIGSTOP)
        deadline = time.monotonic() + LIMIT_S
        while psutil.Process(started.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        spaces.crash(host)
        assert spaces.status(host) == "off"
