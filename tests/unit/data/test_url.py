"""Shards behind a URL: fetched once for a host, whole and right, and kept up to a size."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.file_server import CUT, FileServer
from hvd_elastic.data import ShardDataset, load_index, remote
from hvd_elastic.data.cache import ShardCache
from hvd_elastic.data.files import write_pieces
from hvd_elastic.data.index import table_path
from hvd_elastic.data.remote import RemoteFolder
from hvd_elastic.errors import DataError
from tests import other_user
from tests.other_user import UID, WORDS, needs_root
from tests.other_user import open_folder as open_folder
from tests.paths import LIMIT_S
from tests.small_disk import mounted
from tests.unit.data.shards import write_numbers
from tests.waiting import until

SIZES = [4, 1, 5, 0, 3, 2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    with FileServer(write_numbers(tmp_path / "there", SIZES)).serving() as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,) * 5)


def numbers(dataset: ShardDataset) -> list[int]:
    return [int(array[0]) for array, _ in dataset]


def kept(cache: Path) -> set[str]:
    """Names of the shards in the cache."""
    return {path.name[17:] for path in cache.glob("*.tar")}


def shard_requests(server: FileServer) -> dict[str, int]:
    return {name: n for name, n in server.requests.items() if name.endswith(".tar")}


def test_each_shard_is_fetched_once_and_then_read_from_the_cache(
    server: FileServer, tmp_path: Path
) -> None:
    dataset = ShardDataset(server.url, cache=tmp_path / "cache")
    assert (len(dataset), dataset.classes) == (15, ("a", "b", "c"))
    assert not kept(tmp_path / "cache"), "nothing before it is needed"
    assert numbers(dataset) == list(range(15))
    once = dict.fromkeys([f"s-{n:02d}.tar" for n in (0, 1, 2, 4, 5)], 1)
    assert shard_requests(server) == once
    again = ShardDataset(server.url, cache=tmp_path / "cache")
    assert numbers(again) == list(range(15))
    assert numbers(pickle.loads(pickle.dumps(again))) == list(range(15))
    assert shard_requests(server) == once
    assert not [*(tmp_path / "cache").glob(".*.part")]


def test_processes_of_a_host_fetch_a_shard_once(server: FileServer, tmp_path: Path) -> None:
    server.delay_s = 0.05
    code = (
        "import sys; from hvd_elastic.data import ShardDataset\n"
        "print(sum(int(a[0]) for a, _ in ShardDataset(sys.argv[1], cache=sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, server.url, str(tmp_path / "cache")]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [reader.communicate()[0] for reader in readers] == [f"{sum(range(15))}\n"] * 3
    assert set(shard_requests(server).values()) == {1}


def is_waited_for(path: Path) -> bool:
    """Return whether a process waits for the lock on a file."""
    locks = map(str.split, Path("/proc/locks").read_text().splitlines())
    return any(f"{path.stat().st_ino}" == lock[6].split(":")[2] for lock in locks if "->" in lock)


def test_who_waits_for_a_shard_does_not_wait_for_its_readers(
    server: FileServer, tmp_path: Path
) -> None:
    """A reader may be a rank that waits in a collective for the rank of the one that waits here."""
    cache = tmp_path / "cache"
    ranks = [ShardDataset(server.url, cache=cache) for _ in range(8)]
    released = threading.Event()
    server.faults = {"s-00.tar": [released]}
    threads = [threading.Thread(target=each.__getitem__, args=(0,), daemon=True) for each in ranks]
    for thread in threads:
        thread.start()
    until(lambda: any(is_waited_for(path) for path in cache.glob(".*-s-00.tar.*")))
    released.set()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert all(rank._opened for rank in ranks), "they keep the shard open"
    assert shard_requests(server) == {"s-00.tar": 1}


def test_locks_of_a_killed_process_do_not_outlive_it_in_its_loader_processes(
    server: FileServer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    code = """
import os, sys, time
from pathlib import Path
from hvd_elastic.data import ShardDataset
dataset = ShardDataset(sys.argv[1], cache=sys.argv[2])
dataset.prefetch_blocks([0])
while not [*Path(sys.argv[2]).glob(".*-s-00.tar.part")]:
    time.sleep(0.005)
if not os.fork():
    sys.stdin.read()
    os._exit(0)
print(flush=True)
time.sleep(3600)
"""
    stopped = threading.Event()
    server.faults = {"s-00.tar": [stopped]}
    command = [sys.executable, "-c", code, server.url, str(cache)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as rank:
        assert rank.stdin
        assert rank.stdout
        assert rank.stdout.readline() == "\n"
        until(lambda: server.requests["s-00.tar"])
        rank.kill()
        rank.wait()
        # Its loader process is still there.
        dataset = ShardDataset(server.url, cache=cache)
        reader = threading.Thread(target=dataset.__getitem__, args=(0,), daemon=True)
        reader.start()
        reader.join(LIMIT_S)
        assert not reader.is_alive()
        stopped.set()
    assert kept(cache) == {"s-00.tar"}
    assert not [*cache.glob(".*-s-00.tar*")]


def test_a_shard_is_checked_and_a_broken_connection_tried_again(
    server: FileServer, tmp_path: Path
) -> None:
    server.faults = {
        "index.json": [500, 503],
        "s-00.tar": [CUT, 502, CUT],
        "s-00.tar.npy": [CUT, 429],
    }
    dataset = ShardDataset(server.url, cache=tmp_path / "cache")
    assert int(dataset[3][0][0]) == 3
    assert server.requests == {"index.json": 3, "s-00.tar.npy": 3, "s-00.tar": 4}
    # Another file of the same name and size.
    path = server.folder / "s-01.tar"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(
        DataError, match=r"/s-01.tar is not the file that the index there describes"
    ):
        dataset[4]
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"s-01.tar cannot be read \(6 attempts\): the .* cut off"):
        dataset[4]
    table_path(server.folder / "s-02.tar").write_bytes(b"no table")
    with pytest.raises(DataError, match=r"s-02.tar.npy is not the table that belongs to the index"):
        dataset[5]
    assert kept(tmp_path / "cache") == {"s-00.tar"}
    assert not [*(tmp_path / "cache").glob(".*.part")]


def test_a_file_that_is_shorter_at_the_second_attempt_has_no_end_of_the_first(
    server: FileServer, tmp_path: Path
) -> None:
    there, here = server.folder / "a", tmp_path / "a"
    there.write_bytes(b"x" * 1000)
    server.faults = {"a": [CUT]}

    def take(pieces: Iterator[bytes]) -> None:
        try:
            write_pieces(file, pieces)
        finally:
            there.write_bytes(b"y" * 100)

    with here.open("xb") as file:
        RemoteFolder(server.url).receive("a", take)
    assert server.requests["a"] == 2
    assert here.read_bytes() == b"y" * 100


@pytest.mark.parametrize(
    ("status", "advice"), [(403, "credentials"), (404, "names the folder that holds index.json")]
)
def test_a_refusal_is_told_at_once_and_without_secrets(
    server: FileServer, tmp_path: Path, status: int, advice: str
) -> None:
    host = server.url.removeprefix("http://")
    server.faults = {"index.json": [status]}
    with pytest.raises(DataError) as raised:
        ShardDataset(f"http://{host}/train?signature=secret", cache=tmp_path / "cache")
    assert f"http://{host}/train/index.json: the server answers {status}" in str(raised.value)
    assert advice in str(raised.value)
    assert "secret" not in str(raised.value)
    assert server.requests == {"index.json?signature=secret": 1}, "sent, and not tried again"


def test_a_server_that_is_not_there_is_explained(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"1:1/x/index.json cannot be read \(6 attempts\): .*refused"
    ):
        ShardDataset("http://user:secret@127.0.0.1:1/x", cache=tmp_path)


def test_any_url_of_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="pip install fsspec")
    folder = write_numbers(tmp_path / "there", SIZES)
    dataset = ShardDataset(folder.as_uri(), cache=tmp_path / "cache")
    assert numbers(dataset) == list(range(15))
    with pytest.raises(DataError, match=r"none/index.json cannot be read: .*names the folder"):
        ShardDataset(f"{folder.as_uri()}/none", cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"gopher://x/index.json cannot be read: Protocol not"):
        ShardDataset("gopher://x", cache=tmp_path / "cache")


def test_arguments_that_do_not_fit_are_explained(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"need a folder on this host's disk .* cache="):
        ShardDataset(server.url)
    with pytest.raises(DataError, match="cache and cache_bytes are for a URL"):
        ShardDataset(server.folder, cache=tmp_path)
    total = sum(shard.bytes for shard in load_index(server.folder).shards)
    with pytest.raises(DataError, match=f"two windows of 16, .* may have {total} bytes"):
        ShardDataset(server.url, cache=tmp_path, cache_bytes=total - 1)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"the cache .*file cannot be written: File exists"):
        ShardDataset(server.url, cache=tmp_path / "file")


def test_an_index_cannot_name_files_outside_of_the_cache(
    server: FileServer, tmp_path: Path
) -> None:
    index = server.folder / "index.json"
    index.write_text(index.read_text().replace("s-00.tar", "../s-00.tar"))
    with pytest.raises(DataError, match=r"names the shard '../s-00.tar', which would not lie in"):
        ShardDataset(server.url, cache=tmp_path / "cache")


# -- the size of the cache


def limited(server: FileServer, cache: Path, shards: int = 2) -> ShardDataset:
    """A data set whose cache holds about so many of its shards; it keeps one open."""
    most = max(shard.bytes for shard in load_index(server.folder).shards)
    return ShardDataset(server.url, cache=cache, cache_bytes=shards * most, shuffle_window=1)


def test_the_least_recently_used_shards_make_room(server: FileServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_numbers(server.folder, [3] * 6)
    dataset = limited(server, cache, 3)
    for number in (0, 1, 2, 0, 3):
        dataset[3 * number]
    assert kept(cache) == {"s-00.tar", "s-02.tar", "s-03.tar"}
    assert len([*cache.glob("*.npy")]) == 3, "tables go with their shards"
    # What a process that was killed has left counts, and is the first to go.
    left = next(iter(cache.glob("*-s-02.tar")))
    left.rename(left.with_name(f".{left.name}.part"))
    dataset[4 * 3]
    assert kept(cache) == {"s-00.tar", "s-03.tar", "s-04.tar"}
    assert not [*cache.glob(".*.part")]


def test_a_shard_that_somebody_reads_stays(server: FileServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_numbers(server.folder, [3] * 6)
    dataset, other = limited(server, cache), limited(server, cache)
    other[0]
    for number in (1, 2, 3):
        dataset[3 * number]
        assert kept(cache) == {"s-00.tar", f"s-{number:02d}.tar"}
    assert int(other[1][0][0]) == 1
    # One that is damaged is fetched again.
    path = next(iter(cache.glob("*-s-03.tar")))
    os.truncate(path, 10)
    assert int(limited(server, cache)[9][0][0]) == 9


# -- what comes next is fetched ahead


def test_blocks_are_fetched_ahead_as_many_as_fit(server: FileServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_numbers(server.folder, [3] * 6)
    dataset = limited(server, cache, 3)
    dataset.prefetch_blocks([4, 1, 5, 0, 2, 3])
    until(lambda: kept(cache) == {"s-04.tar", "s-01.tar", "s-05.tar"})
    dataset.prefetch_blocks([5, 0, 2, 3, 4, 1])
    until(lambda: kept(cache) == {"s-05.tar", "s-00.tar", "s-02.tar"})
    for number in (5, 0, 2):
        assert int(dataset[3 * number][0][0]) == 3 * number
    assert all(count == 1 for count in shard_requests(server).values())


def test_a_shard_that_is_being_fetched_by_another_is_not_fetched_ahead(
    server: FileServer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    dataset = ShardDataset(server.url, cache=cache)
    index = load_index(server.folder)
    path = ShardCache(RemoteFolder(server.url), cache, index, None, None).path(index.shards[0])
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        dataset.prefetch_blocks(range(6))
        until(lambda: kept(cache) == {f"s-{n:02d}.tar" for n in (1, 2, 4, 5)})
        reader = threading.Thread(target=dataset.__getitem__, args=(0,))
        reader.start()
        until(lambda: is_waited_for(lock))
        lock.unlink()
        fcntl.flock(other, fcntl.LOCK_UN)
        reader.join()
    assert shard_requests(server)["s-00.tar"] == 1


def test_a_password_is_not_sent_on_to_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: urllib.request.Request, **_: Any) -> io.BytesIO:
        asked.append(request)
        return io.BytesIO(b"x")

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    assert remote.RemoteFolder("http://me:secret@host/d").read("index.json") == b"x"
    assert [*asked[0].unredirected_hdrs] == ["Authorization"]
    assert not asked[0].headers, "these go to the server of a redirection"


def test_a_cache_on_a_full_disk_is_explained(server: FileServer, tmp_path: Path) -> None:
    write_numbers(server.folder, [200] * 4, width=64)
    with mounted(tmp_path / "disk", "100k") as disk:
        dataset = ShardDataset(server.url, cache=disk / "cache")
        with pytest.raises(DataError, match=r"No space left on device; name another folder"):
            numbers(dataset)
        assert not [*(disk / "cache").glob(".*.part")]


def test_a_cache_on_a_read_only_disk_is_explained(server: FileServer, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "100k") as disk:
        (disk / "cache").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(DataError, match="cannot be written: Read-only file system"):
            ShardDataset(server.url, cache=disk / "cache")


def test_a_group_shares_a_cache_in_which_shards_belong_to_others(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, set_time = tmp_path / "cache", os.utime
    assert numbers(ShardDataset(server.url, cache=cache)) == list(range(15))

    def refuse(file: Any, times: Any = None, *, ns: Any = None) -> None:
        if ns is not None:  # who does not own a file may at most set it to the present time
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        set_time(file, times)

    monkeypatch.setattr(os, "utime", refuse)
    for path in cache.glob("*.tar"):
        set_time(path, (0, 0))
    assert numbers(ShardDataset(server.url, cache=cache)) == list(range(15))
    assert all(path.stat().st_mtime > 0 for path in cache.glob("*.tar")), "they count as used"
    assert server.requests["s-00.tar"] == 1


@needs_root
def test_the_second_user_of_a_group_reads_from_its_cache(
    server: FileServer, open_folder: Path
) -> None:
    cache = open_folder / "cache"
    assert numbers(ShardDataset(server.url, cache=cache)) == list(range(15))
    os.chown(cache, 0, UID)
    cache.chmod(0o2770)
    (cache / ".lock").touch()  # the first user has it at this moment
    (cache / ".lock").chmod(0o644)
    next(cache.glob("*-s-00.tar")).unlink()

    def read() -> None:
        assert numbers(ShardDataset(server.url, cache=cache)) == list(range(15))

    other_user.call(read)
    assert server.requests["s-00.tar"] == 2

    def refused() -> None:
        with pytest.raises(DataError, match=rf"cache {cache} cannot be written: Permission denied"):
            ShardDataset(server.url, cache=cache)

    os.chown(cache, UID, UID)
    cache.chmod(0o500)
    other_user.call(refused)


@needs_root
def test_a_cache_of_another_user_in_which_all_may_write_is_refused(
    server: FileServer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert len(ShardDataset(server.url, cache=cache)) == 15
    os.chown(cache, UID, 0)
    cache.chmod(0o777)
    with pytest.raises(DataError, match=rf"cache {cache} belongs to {re.escape(WORDS)}, who could"):
        ShardDataset(server.url, cache=cache)
    cache.chmod(0o770)  # shared with the group of this user
    assert len(ShardDataset(server.url, cache=cache)) == 15
