"""Four hosts in namespaces with slow links, and copyclust as a user calls it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_elastic.virtual import VirtualCluster, netns
from tests.paths import LIMIT_S
from tests.waiting import until

NO_NAMESPACES = netns.why_no_namespaces()
MARKS = [
    pytest.mark.ssh,
    pytest.mark.root,
    pytest.mark.skipif(NO_NAMESPACES is not None, reason=NO_NAMESPACES or ""),
]
CHECKOUT = Path(__file__).parents[2]
MB = 1_000_000
LARGE = 24 * MB
HOSTS = 4


class Bed:
    """Four hosts with slow links, and copyclust as a user calls it."""

    def __init__(self, cluster: VirtualCluster, home: Path) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "HVD_ELASTIC_HOME": str(home),
        }

    def argv(self, *arguments: str, hostfile: Path | None = None) -> list[str]:
        program = "from hvd_elastic.cli.cluster.tools import copyclust_main; copyclust_main()"
        hosts = str(hostfile or self.cluster.hostfile)
        patient = ("--connect-timeout", "60")  # a busy machine takes long for a login
        return [sys.executable, "-c", program, hosts, *patient, *arguments, "--json"]

    def __call__(self, *arguments: str) -> Outcome:
        done = subprocess.run(
            self.argv(*arguments),
            capture_output=True,
            text=True,
            errors="surrogateescape",
            env=self.environment,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        return Outcome(done)

    def start(self, *arguments: str, hostfile: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*arguments, hostfile=hostfile),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            stdin=subprocess.DEVNULL,
        )

    def finish(self, process: subprocess.Popen[str]) -> Outcome:
        out, err = process.communicate(timeout=LIMIT_S)
        return Outcome(subprocess.CompletedProcess([], process.returncode, out, err))

    def data(self, number: int) -> Path:
        return self.cluster.data(self.hosts[number])

    @contextlib.contextmanager
    def caught(
        self,
        number: int,
        size: int,
        source: Path,
        to: str,
        *options: str,
        hostfile: Path | None = None,
    ) -> Iterator[subprocess.Popen[str]]:
        """A copy that stands still: its leader and source are stopped during the block.

        A host has at least so many bytes of the large file then, and none has most of it. A busy
        machine can miss that moment; the copy is begun again then.

        Args:
            to: where it goes, below /data.
        """
        while True:
            process = self.start(str(source), to, *options, hostfile=hostfile)
            self.wait_for_parts(number, size, process)
            with _held(process):
                sizes = [self.largest_part(n) for n in range(HOSTS)]
                done = [(self.data(n) / to[6:] / "large").exists() for n in range(HOSTS)]
                if sizes[number] >= size and max(sizes) < LARGE * 2 // 3 and not any(done):
                    yield process
                    return
            self.finish(process)
            self.remove(to)

    def remove(self, path: str) -> None:
        """Remove a folder on all hosts."""
        for host in self.hosts:
            assert self.cluster.run_on(host, ["rm", "-rf", path]).returncode == 0

    def parts(self, number: int) -> list[Path]:
        return [path for path in self.data(number).rglob(".hvd_elastic-part/*") if path.stat()]

    def largest_part(self, number: int) -> int:
        """Bytes that a host has of the large file while that is copied."""
        with contextlib.suppress(FileNotFoundError):  # a part has got its name meanwhile
            return max((path.stat().st_size for path in self.parts(number)), default=0)
        return 0

    def wait_for_parts(
        self, number: int, size: int, process: subprocess.Popen[str] | None = None
    ) -> None:
        """Wait until a host has so many bytes of a file, or the process has ended."""

        def is_there() -> bool:
            ended = process is not None and process.poll() is not None
            return ended or self.largest_part(number) >= size

        until(is_there, f"{size} bytes on host {number}")

    def wait_idle(self) -> None:
        until(
            lambda: not any(self.cluster.pids(host) for host in self.hosts), "the end on all hosts"
        )


@contextlib.contextmanager
def _held(process: subprocess.Popen[str]) -> Iterator[None]:
    """Stop a copy's leader and its source; nothing is stopped if it has ended."""
    stopped: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        for each in (leader, *leader.children(recursive=True)):
            each.suspend()
            stopped.append(each)
    try:
        yield
    finally:
        for each in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()


class Outcome:
    """What a call printed."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.status = done.returncode
        self.errors = done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.hosts: dict[str, dict[str, Any]] = {
            line["host"]: line for line in lines if line["kind"] == "host"
        }

    def __getitem__(self, key: str) -> list[Any]:
        return [self.hosts[name][key] for name in sorted(self.hosts)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ELASTIC_HOME", str(home))
        with VirtualCluster.up(HOSTS, 1, rate="50mbit", loopback=False) as cluster:
            yield Bed(cluster, home)


@pytest.fixture
def bed(made: Bed) -> Iterator[Bed]:
    yield made
    for host in made.hosts:
        status = made.cluster.status(host)
        if status == "off":
            made.cluster.boot(host)
        elif status == "cut":
            made.cluster.heal(host)
    made.wait_idle()
    for number in range(HOSTS):
        subprocess.run(["rm", "-rf", *made.data(number).iterdir()], check=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


def make_large(folder: Path, size: int = LARGE) -> Path:
    path = folder / "large"
    path.write_bytes(os.urandom(size))
    return path


def describe(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Everything below a folder: kind, mode, time, content."""
    found: dict[bytes, tuple[object, ...]] = {}
    top = os.fsencode(root)
    for folder, names, files in os.walk(top):
        for name in [b"", *names, *files]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            key = os.path.relpath(path, top)
            found[key] = (status.st_mode, status.st_mtime_ns, content)
    return found
