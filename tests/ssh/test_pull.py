"""copyclust --pull over hosts that fetch from a web server of this machine; who builds on it."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hvd_elastic.virtual import plan
from tests import other_user
from tests.paths import LIMIT_S
from tests.ssh.copies import CHECKOUT, HOSTS, MARKS, MB, Bed, bed, made
from tests.waiting import until

__all__ = ["bed", "made"]

pytestmark = MARKS
COUNT = 10


# It says that a file is missing, and nothing else.
FETCH = """import email.utils, os, sys, urllib.request
sys.excepthook = lambda _, error, __: print("fetch:", error, file=sys.stderr)
path, head = urllib.request.urlretrieve(*sys.argv[1:])
"""
KEEP_TIME = """when = email.utils.parsedate_to_datetime(head["Last-Modified"]).timestamp()
os.utime(path, (when, when))
"""


class Store:
    """A store of files and what was read of it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.read: list[str] = []
        self.asked: list[str] = []
        self.held = threading.Event()
        self.held.set()
        store = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                store.asked.append(self.path)
                assert store.held.wait(LIMIT_S)
                super().do_GET()

            def log_request(self, code: object = "-", size: object = "-") -> None:
                if code == 200:
                    store.read.append(self.path.lstrip("/"))

            def log_error(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(
            (address, 0), functools.partial(Handler, directory=str(folder))
        )
        self.url = f"http://{address}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        # Not every machine has curl.
        fetch = shlex.join([sys.executable, "-ISc", FETCH])
        self.each = f"{fetch} {self.url}/{{path}} {{dst}}/{{path}}"
        self.together = (
            f"while read -r path; do {fetch} {self.url}/$path {{dst}}/$path || exit; done "
            "< {list}"
        )
        fetch = shlex.join([sys.executable, "-ISc", FETCH + KEEP_TIME])
        self.all = (
            f"cd {{dst}} && mkdir -p a b && for path in {' '.join(self.names)}; "
            f"do {fetch} {self.url}/$path $path || exit; done"
        )

    @property
    def names(self) -> list[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def write_list(self, path: Path, *more: str) -> str:
        """The list with sizes, and other lines after that."""
        lines = [f"{(self.folder / name).stat().st_size}\t{name}" for name in self.names]
        path.write_text("\n".join([*lines, *more]))
        return str(path)

    def stop(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def store(bed: Bed, tmp_path: Path) -> Iterator[Store]:
    folder = tmp_path / "store"
    for number in range(COUNT):
        path = folder / "ab"[number % 2] / f"{number}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(number * 50_000))
    interface = plan.interface_name(bed.cluster.state.subnet)
    shown = subprocess.run(
        ["ip", "-4", "-o", "addr", "show", interface], capture_output=True, text=True, check=True
    )
    store = Store(folder, shown.stdout.split()[3].partition("/")[0])
    yield store
    store.stop()


def check(bed: Bed, store: Store, *hosts: int) -> None:
    """Those hosts have what is in the store, and nothing else."""
    for number in hosts or range(HOSTS):
        root = bed.data(number) / "set"
        found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        assert found == store.names
        for name in found:
            assert (root / name).read_bytes() == (store.folder / name).read_bytes()


def test_each_file_is_read_once_and_not_again(bed: Bed, store: Store, tmp_path: Path) -> None:
    arguments = ["--pull", store.each, "--list", store.write_list(tmp_path / "list"), "/data/set"]
    result = bed(*arguments, "--dry-run")
    assert sorted(result["fetched"]) == [2, 2, 3, 3]
    assert store.asked == []
    assert not (bed.data(0) / "set").exists()
    result = bed(*arguments)
    assert result.status == 0, result.errors
    assert sorted(result["fetched"]) == [2, 2, 3, 3]
    assert [a + b for a, b in zip(result["fetched"], result["files"], strict=True)] == [COUNT] * 4
    assert sorted(store.read) == store.names
    check(bed, store)

    # What one host has is not read again, and a file of another size is.
    (bed.data(1) / "set/a/8.tar").unlink()
    (bed.data(2) / "set/b/9.tar").write_bytes(b"short")
    (store.folder / "a/2.tar").write_bytes(b"new")
    store.write_list(tmp_path / "list")
    store.read.clear()
    result = bed(*arguments)
    assert result.status == 0, result.errors
    assert store.read == ["a/2.tar"]
    check(bed, store)


def test_a_command_that_fails_on_one_host_and_a_file_that_is_not_there(
    bed: Bed, store: Store, tmp_path: Path
) -> None:
    broken = bed.hosts[1]
    command = f"test $(hostname) != {broken} || {{ echo no tool >&2; exit 127; }}; {store.together}"
    listed = store.write_list(tmp_path / "list")
    arguments = ["--pull", command, "--list", listed, "/data/set"]
    result = bed(*arguments)
    assert result.status == 0, result.errors
    assert "exit status 127: no tool" in result.hosts[broken]["fetch_error"]
    assert result.hosts[broken]["fetched"] == 0
    assert sorted(store.read) == store.names
    check(bed, store)

    (tmp_path / "list").write_text("a/0.tar\nmissing.tar\nb/1.tar")
    result = bed("--pull", store.each, "--list", listed, "/data/set")
    assert result.status == 1
    for error in result["error"]:
        assert "missing.tar was not fetched: exit status 1: fetch: HTTP Error 404" in error
        assert "404" in error
    check(bed, store)
    result = bed("--pull", "false {dst} {list}", "--list", listed, "/data/other")
    assert result.status == 1
    assert "exit status 1" in result["error"][0]


def test_a_command_without_a_list_runs_on_one_host(bed: Bed, store: Store) -> None:
    broken = bed.hosts[0]
    command = f"test $(hostname) != {broken} && {store.all}"
    result = bed("--pull", command, "/data/set")
    assert result.status == 0, result.errors
    assert result["fetched"] == [0, COUNT, 0, 0]
    assert sorted(store.read) == store.names
    check(bed, store)
    result = bed("--pull", f"test $(hostname) != {broken}; : {{dst}}", "/data/set")
    assert (result["fetched"], result["skipped"]) == ([0] * HOSTS, [COUNT] * HOSTS)
    result = bed("--pull", "echo no such bucket >&2; exit 3 {dst}", "/data/set")
    assert result.status == 1
    assert "nothing was fetched: exit status 3: no such bucket" in result["error"][3]


@other_user.needs_root
def test_a_command_may_keep_the_owners_of_what_it_fetches(bed: Bed) -> None:
    command = f"echo theirs > {{dst}}/theirs; chown {other_user.UID} {{dst}}/theirs"
    result = bed("--pull", command, "/data/kept")
    assert result.status == 0, result.errors
    assert sum(result["fetched"]) == 1
    for number in range(HOSTS):
        (bed.data(number) / "kept").chmod(0o777)
    result = bed("--pull", command, "/data/kept")
    assert result.status == 1
    assert "theirs belongs to another user" in " ".join(result["error"])


def test_a_host_that_dies_and_what_it_alone_had(bed: Bed, store: Store, tmp_path: Path) -> None:
    for number in range(4):
        (store.folder / f"large-{number}").write_bytes(os.urandom(8 * MB))
    arguments = ["--pull", store.each, "--list", store.write_list(tmp_path / "list"), "/data/set"]
    victim = 1
    while True:
        process = bed.start(*arguments)
        bed.wait_for_parts(victim + 1, MB, process)  # it passes on what it has fetched
        bed.cluster.crash(bed.hosts[victim])
        result = bed.finish(process)
        states = [state == "ok" for state in result["state"]]
        if not states[victim]:
            break
        check(bed, store)  # a busy machine missed the moment: the copy was over before
        bed.cluster.boot(bed.hosts[victim])
        bed.remove("/data/set")
    assert states == [True, False, True, True], result["error"]
    check(bed, store, 0, 2, 3)
    bed.cluster.boot(bed.hosts[victim])
    store.read.clear()
    assert bed(*arguments).status == 0
    assert store.read == []
    check(bed, store)


def test_ctrl_c_ends_the_commands(bed: Bed, store: Store, tmp_path: Path) -> None:
    arguments = ["--pull", store.each, "--list", store.write_list(tmp_path / "list"), "/data/set"]
    store.held.clear()
    process = bed.start(*arguments)
    until(lambda: len(store.asked) >= HOSTS, "the requests")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    bed.wait_idle()
    store.held.set()
    assert bed(*arguments).status == 0
    check(bed, store)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that all hosts see at one path, unlike /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


def start_preparing(bed: Bed, source: Path, out: Path, *options: object) -> subprocess.Popen[str]:
    script = str(CHECKOUT / "datasets_prep/image_folder.py")
    words = ["--source", source, "--out", out, "--per-shard", 2, "--json", *options]
    return subprocess.Popen(
        [sys.executable, script, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=bed.environment,
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    output, errors = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def members(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_hosts_prepare_shards_together(bed: Bed, shared_folder: Path, tmp_path: Path) -> None:
    """As one machine makes them, through a broken picture; a second call has nothing to do."""
    image = pytest.importorskip("PIL.Image", reason="pip install pillow")
    source = shared_folder / "birds"
    for number in range(13):
        (source / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        image.new("RGB", (30, 20), (9 * number, 0, 0)).save(source / f"{number % 2}/{number}.jpg")
    (source / "1/3.jpg").write_bytes(b"no picture")
    alone = ended(start_preparing(bed, source, tmp_path / "set"))
    assert alone.returncode == 0, alone.stderr
    words = (bed, source, Path("/data/set"), "--hostfile", bed.cluster.hostfile)
    together = ended(start_preparing(*words))
    assert together.returncode == 0, together.stderr
    told = json.loads(together.stdout)[0]
    assert (told["examples"], told["shards"]) == (12, 7)
    assert [line.partition(":")[0] for line in told["skipped"]] == ["1/3.jpg"]
    written = re.findall(r"set: (\d) shards written, (\d) received", together.stderr)
    assert sorted(written) == [("1", "6"), ("2", "5"), ("2", "5"), ("2", "5")]
    for number in range(HOSTS):
        assert content(bed.data(number) / "set") == content(tmp_path / "set")
    again = ended(start_preparing(*words))
    assert json.loads(again.stdout)[0] == {**told, "there": 7}
    shutil.rmtree(bed.data(3) / "set")  # a host that joins
    other = ended(start_preparing(*words, "--resize", 9))
    assert other.returncode == 1
    assert "set was made from resize 0 instead of 9" in other.stderr
    assert "Traceback" not in other.stderr
    assert not [*(bed.data(3) / "set").glob("*.tar")], "it has no shards of other settings"
    joined = ended(start_preparing(*words))
    assert joined.returncode == 0, joined.stderr
    assert content(bed.data(3) / "set") == content(tmp_path / "set")


def test_a_host_that_dies_while_it_prepares(bed: Bed, shared_folder: Path) -> None:
    """The others write its part; it is killed once it has written a shard and not all of them.

    Its part is six of the 24 shards.
    """
    image = pytest.importorskip("PIL.Image", reason="pip install pillow")
    source, victim = shared_folder / "birds", 1
    source.mkdir()
    image.effect_noise((2400, 1600), 50).convert("RGB").save(source / "0.jpg")
    for number in range(1, 48):
        (source / f"{number}.jpg").hardlink_to(source / "0.jpg")
    options = ("--resize", 500, "--processes", 1)
    words = (bed, source, Path("/data/set"), *options, "--hostfile", bed.cluster.hostfile)
    folder = bed.data(victim) / "set"
    for _ in range(5):
        process = start_preparing(*words)
        until(lambda: [*folder.glob("*.tar")], "its first shard")
        bed.cluster.crash(bed.hosts[victim])
        if len([*folder.glob("*.tar")]) < 6:
            break
        ended(process)  # a busy machine was too late for it
        bed.cluster.boot(bed.hosts[victim])
        bed.remove("/data/set")
    else:
        pytest.fail("it had written its whole part")
    first = ended(process)
    assert first.returncode == 1
    assert f"error: {bed.hosts[victim]}: " in first.stderr
    assert "the same call goes on where this one stopped" in first.stderr
    assert "Traceback" not in first.stderr
    survivor, *others = {*range(HOSTS)} - {victim}
    whole = content(bed.data(survivor) / "set")
    shards = [data for name, data in whole.items() if name.endswith(".tar")]
    pictures = [key.partition("_")[2] for shard in shards for key in members(shard)]
    assert len(shards) == 24
    assert sorted(pictures) == sorted(f"{number}.jpg" for number in range(48))
    for number in others:
        assert content(bed.data(number) / "set") == whole
    bed.cluster.boot(bed.hosts[victim])
    second = ended(start_preparing(*words))
    assert second.returncode == 0, second.stderr
    for number in range(HOSTS):
        assert content(bed.data(number) / "set") == whole
