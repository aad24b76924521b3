"""checkclust on eight virtual hosts: nothing on healthy ones, each of fifteen faults on others."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_elastic.virtual import VirtualCluster
from hvd_elastic.virtual.netns import why_no_namespaces
from tests.paths import LIMIT_S
from tests.ssh.sshd import AVAILABLE, SSHD, make_key

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(not AVAILABLE, reason="sshd is not installed"),
]

CHECKOUT = Path(__file__).parents[2]
VERSIONS = {"torch": "2.13.0", "horovod": "0.28.1"}
# A clock that is wrong for a program that is started with -I -S -c PROGRAM.
FAST_CLOCK = """if [ "$1" = -I ]; then
shift 3; program=$1; shift
fast="import time; right = time.time; time.time = lambda: right() + 5"
exec {python} -I -S -c "$fast; $program" "$@"
fi
"""


@pytest.fixture(scope="module")
def code() -> Iterator[Path]:
    """A folder of the leader's, under a path that each host has a folder of its own for."""
    folder = Path(tempfile.mkdtemp(prefix="hvd-code-", dir="/tmp"))
    (folder / "train.py").write_text("print('train')\n")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(code: Path) -> Iterator[VirtualCluster]:
    refusal = why_no_namespaces()
    if refusal:
        pytest.skip(refusal)
    with VirtualCluster.up(hosts=8, slots=1, rate="100mbit") as cluster:
        for host in cluster.hosts:
            give_python(cluster, host, VERSIONS)
            shutil.copytree(code, seen_there(cluster, host, code))
        yield cluster


def seen_there(cluster: VirtualCluster, host: str, path: Path) -> Path:
    """A path below /tmp of a host, as this machine sees it."""
    return cluster.folder / "hosts" / host / path.relative_to("/")


def give_python(
    cluster: VirtualCluster, host: str, versions: dict[str, str], more: str = "", site: str = ""
) -> None:
    """An interpreter of the host's own, with packages of these versions."""
    folder = cluster.data(host)
    shutil.rmtree(folder / "site", ignore_errors=True)
    make_site(folder / "site", versions)
    (folder / "site" / "sitecustomize.py").write_text(site)
    script = folder / "python"
    script.write_text(
        f"#!/bin/sh\nexport PYTHONPATH=/data/site:{CHECKOUT}\n"
        f'{more.format(python=sys.executable)}exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)


def make_site(folder: Path, versions: dict[str, str]) -> Path:
    for name, version in versions.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        described = folder / f"{name}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        if name == "horovod":
            build = f"horovod-{version}-cp311-torch-{versions['torch']}-patch-0123456789ab\n"
            (described / "HVD_ELASTIC_BUILD").write_text(build)
    return folder


class Checked:
    """One call of checkclust, and what it said."""

    def __init__(self, cluster: VirtualCluster, code: Path, folder: Path) -> None:
        site = folder / "site"
        if not site.exists():
            make_site(site, VERSIONS)
        done = subprocess.run(
            [
                *[
                    sys.executable,
                    "-c",
                    "from hvd_elastic.cli.cluster.tools import checkclust_main as m; m()",
                ],
                *[str(cluster.hostfile), "--json", "--python", "/data/python", "--code", str(code)],
                *[
                    "--folder",
                    "/data/checkpoints",
                    "--folder",
                    "/data/logs",
                    "--connect-timeout",
                    "60",
                ],
            ],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{site}:{CHECKOUT}",
                "HVD_ELASTIC_HOME": str(folder / "home"),
            },
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        self.status = done.returncode
        self.errors = done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.hosts = {line["host"]: line for line in lines if line["kind"] == "host"}
        self.links = [line for line in lines if line["kind"] == "link"]

    def findings(self, host: str) -> dict[str, tuple[str, str]]:
        """What is not well on a host: name to level and words."""
        return {
            item["name"]: (item["level"], item["detail"])
            for item in self.hosts[host]["checks"]
            if item["level"] != "ok"
        }


SSHD_WITH_PASSWORD = """
mkdir -p /data/home/.ssh
(umask 077; sed "s|^root:[^:]*:|root:$1:|" /etc/shadow > /run/shadow)
mount -n --bind /run/shadow /etc/shadow
cat > /run/password_config <<END
Port 2222
HostKey /run/virtclust/ssh_host_ed25519_key
AuthorizedKeysFile /data/home/.ssh/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication yes
PidFile /run/password_pid
SetEnv HOME=/data/home
END
$2 -f /run/password_config
"""


def test_bootstrap_asks_for_a_password_once(cluster: VirtualCluster, tmp_path: Path) -> None:
    """Of a jump host first: then the key opens the way to the host behind it."""
    host = cluster.hosts[0]
    hashed = subprocess.run(
        ["openssl", "passwd", "-6", "right horse"], capture_output=True, text=True
    ).stdout.strip()
    command = ["sh", "-ec", SSHD_WITH_PASSWORD, "sh", hashed, SSHD]
    done = cluster.run_on(host, command, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    hostfile, config = tmp_path / "hosts", tmp_path / "config"
    hostfile.write_text("root@behind\nroot@door\n")
    config.write_text(
        f"Host *\n HostName {cluster.address(host)}\n Port 2222\n UserKnownHostsFile none\n"
        "Host behind\n ProxyJump root@door\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(
            HOME=str(tmp_path), HVD_ELASTIC_HOME=str(tmp_path / "own"), PYTHONPATH=str(CHECKOUT)
        )
        os.environ.pop("SSH_AUTH_SOCK", None)
        program = "from hvd_elastic.cli.cluster.tools import checkclust_main as m; m()"
        arguments = [str(hostfile), "-F", str(config), "--no-network", "--bootstrap"]
        os.execv(sys.executable, [sys.executable, "-c", program, *arguments])
    shown, asked = "", 0
    answers = [("[y/N] ", "y"), ("not kept): ", "right horse")]
    with contextlib.suppress(OSError):  # how a terminal tells that nobody writes any more
        while data := os.read(terminal, 4096).decode():
            shown += data
            if asked < len(answers) and shown.endswith(answers[asked][0]):
                os.write(terminal, answers[asked][1].encode() + b"\n")
                asked += 1
    os.waitpid(pid, 0)
    os.close(terminal)
    assert asked == 2, shown
    assert "SHA256:" in shown
    assert "Password for door (" in shown
    assert "1 added, 1 there" in shown
    assert "right horse" not in shown
    public = (tmp_path / ".ssh" / "id_ed25519.pub").read_text()
    assert (cluster.data(host) / "home" / ".ssh" / "authorized_keys").read_text() == public


@pytest.fixture(scope="module")
def healthy(
    cluster: VirtualCluster, code: Path, tmp_path_factory: pytest.TempPathFactory
) -> Checked:
    return Checked(cluster, code, tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def faulty(
    cluster: VirtualCluster,
    healthy: Checked,
    code: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Checked:
    """The same cluster with every fault planted, as many to a host as do not hide one another."""
    del healthy  # looked at before
    folder = tmp_path_factory.mktemp("faulty")
    _, second, third, fourth, fifth, sixth, seventh, eighth = cluster.hosts

    def on(host: str, command: str) -> None:
        done = cluster.run_on(host, ["sh", "-ec", command], stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr

    # Full disk, low file limit (OpenSSH 8.9 needs more files than MaxStartups), unresolvable name.
    on(second, "mkdir /data/logs; mount -n -t tmpfs -o size=4m full /data/logs")
    on(second, "prlimit --pid $(cat /run/virtclust/sshd.pid) --nofile=240")
    on(second, f"grep -v {third} /etc/hosts > /tmp/hosts; mount -n --bind /tmp/hosts /etc/hosts")
    # Other torch, other code, blocked port.
    give_python(cluster, third, {**VERSIONS, "torch": "2.9.0"})
    (seen_there(cluster, third, code) / "train.py").write_text("print('other')\n")
    address = cluster.address(second)
    on(third, f"ip rule add ipproto 6 dport 1024-65534 to {address} prohibit")
    # Clock skew, no Horovod, unwritable folder.
    give_python(
        cluster, fourth, VERSIONS, FAST_CLOCK, "import sys; sys.modules['horovod'] = None\n"
    )
    on(fourth, "mkdir /data/checkpoints; mount -n -t tmpfs -o ro none /data/checkpoints")
    # Wrong interface, slow link, stray.
    on(fifth, "ip link set eth0 down; ip link set eth0 name ens9; ip link set ens9 up")
    on(fifth, "tc qdisc replace dev ens9 root tbf rate 5mbit burst 16kb latency 50ms")
    on(fifth, "HOROVOD_RANK=0 setsid sleep 1000 > /dev/null 2>&1 < /dev/null &")
    # Missing key; changed host key; dead host.
    (cluster.folder / "hosts" / sixth / "authorized_keys").write_text("")
    other = make_key(folder / "other").with_suffix(".pub").read_text().split()[1]
    known = cluster.folder / "known_hosts"
    own = (cluster.folder / "hosts" / seventh / "ssh_host_ed25519_key.pub").read_text().split()[1]
    known.write_text(known.read_text().replace(own, other))
    cluster.crash(eighth)
    return Checked(cluster, code, folder)


def test_nothing_is_found_on_a_healthy_cluster(cluster: VirtualCluster, healthy: Checked) -> None:
    for host in cluster.hosts:
        assert healthy.findings(host) == {}, host
    assert healthy.status == 0, healthy.errors
    ends = {(link["from"], link["to"]) for link in healthy.links}
    assert ends == {(a, b) for a in cluster.hosts for b in cluster.hosts if a != b}
    for link in healthy.links:
        assert 0 < link["bytes_per_s"] < 20e6, "at most the 12.5 MB/s of the links, or a burst"


@pytest.mark.parametrize(
    ("number", "name", "level", "words"),
    [
        pytest.param(2, "folder /data/logs", "failed", "Make room", id="full disk"),
        pytest.param(2, "open files", "failed", "240 open files to a process", id="low file limit"),
        pytest.param(
            2, "names", "warning", "does not know host {3} by name", id="unresolvable name"
        ),
        pytest.param(
            3, "torch", "failed", "2.9.0, the leader has 2.13.0", id="other torch version"
        ),
        pytest.param(
            3,
            "horovod build",
            "failed",
            "torch 2.9.0, patch 0123456789ab, the leader has torch 2.13.0, patch",
            id="Horovod for another torch",
        ),
        pytest.param(3, "code", "failed", "1 file of other content", id="other code"),
        pytest.param(3, "ports", "failed", "cannot connect to {2}", id="blocked port"),
        pytest.param(4, "clock", "warning", "Start NTP there", id="clock skew"),
        pytest.param(4, "horovod", "failed", "not installed there", id="no Horovod"),
        pytest.param(4, "folder /data/checkpoints", "failed", "Read-only", id="unwritable folder"),
        pytest.param(5, "interface", "warning", "ens9, the others use eth0", id="wrong interface"),
        pytest.param(5, "network", "warning", "its link carries", id="slow link"),
        pytest.param(5, "strays", "warning", "killclust HOSTFILE --strays", id="stray"),
    ],
)
def test_a_fault_is_found(
    cluster: VirtualCluster, faulty: Checked, number: int, name: str, level: str, words: str
) -> None:
    hosts = ["", *cluster.hosts]
    found = faulty.findings(hosts[number])
    assert name in found, found
    assert found[name][0] == level
    assert words.format(*hosts) in found[name][1]
    assert faulty.status == 1


@pytest.mark.parametrize(
    ("number", "state", "words"),
    [
        pytest.param(6, "failed", "checkclust HOSTFILE --bootstrap", id="missing key"),
        pytest.param(7, "failed", "THE HOST KEY HAS CHANGED", id="changed host key"),
        pytest.param(8, "unreachable", "Is it up", id="dead host"),
    ],
)
def test_a_host_that_cannot_be_used(
    cluster: VirtualCluster, faulty: Checked, number: int, state: str, words: str
) -> None:
    found = faulty.hosts[cluster.hosts[number - 1]]
    assert found["state"] == state
    assert words in found["error"]


def test_nothing_else_is_found(cluster: VirtualCluster, faulty: Checked) -> None:
    names = [sorted(faulty.findings(host)) for host in cluster.hosts]
    assert names == [
        [],
        ["folder /data/logs", "names", "open files", "ports"],
        ["code", "horovod build", "ports", "torch"],
        ["clock", "folder /data/checkpoints", "horovod"],
        ["interface", "network", "strays"],
        [],
        [],
        [],
    ]
