"""The pieces of a copy's nodes on one machine: links, paths, patterns, compression, stores."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import queue
import re
import shutil
import socket
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.hosts.certificate import make_certificate
from hvd_elastic.programs.copy import feed as copy_feed
from hvd_elastic.programs.copy import frames as wire
from hvd_elastic.programs.copy import pulling_node, renaming
from hvd_elastic.programs.copy import store as copy_store
from hvd_elastic.programs.copy.comparison import Comparison, StoreError, check_free
from hvd_elastic.programs.copy.feed import LINK_UNKNOWN, Packer
from hvd_elastic.programs.copy.pulling_node import Fetched, Listed, Pull
from hvd_elastic.programs.copy.renaming import sync_disk
from hvd_elastic.programs.copy.store import SharedError, SourceStore, Target
from hvd_elastic.programs.copy.tree import (
    ANY,
    FETCHED,
    PARTS,
    Keeps,
    Tree,
    check_inside,
    is_excluded,
    read_tree,
    walk,
)
from tests import other_user, small_disk
from tests.other_user import open_folder as open_folder
from tests.paths import LIMIT_S

SECRET = b"s" * 32
TEXT = b"loss=0.5 " * 7000


def meet(
    feeder: tuple[bytes, str | None], fed: tuple[bytes, str | None]
) -> tuple[wire.Link | Exception, wire.Link | Exception]:
    """Both ends of a link over a real socket: what each got, or why not."""
    results: dict[str, wire.Link | Exception] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            try:
                results["fed"] = wire.accept(server.accept()[0], *fed)
            except (OSError, wire.LinkError) as error:
                results["fed"] = error

        thread = threading.Thread(target=take)
        thread.start()
        try:
            results["feeder"] = wire.connect([server.getsockname()], *feeder)
        except wire.LinkError as error:
            results["feeder"] = error
        thread.join(LIMIT_S)
    return results["feeder"], results["fed"]


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_link_carries_frames_both_know_the_secret_of(encrypted: bool) -> None:
    certificate = make_certificate() if encrypted else None
    feeder, fed = meet((SECRET, certificate), (SECRET, certificate))
    assert isinstance(feeder, wire.Link)
    assert isinstance(fed, wire.Link)
    fed.send_list([[0, 5]])
    assert feeder.read_list() == [[0, 5]]
    data = os.urandom(wire.FRAME_BYTES)

    def feed() -> None:
        for number in range(100):
            feeder.send(wire.make_frame(wire.DATA, number, 7, data))
        feeder.close()

    thread = threading.Thread(target=feed)
    thread.start()
    for number in range(100):
        assert wire.read_frame(fed.file) == (wire.DATA, number, 7, data)
    with pytest.raises(wire.LinkError, match="closed"):
        wire.read_frame(fed.file)
    thread.join(LIMIT_S)
    fed.close()


def test_who_knows_another_secret_or_certificate_is_refused() -> None:
    own = make_certificate()
    for other in [(b"x" * 32, own), (SECRET, make_certificate()), (SECRET, None)]:
        for result in meet(other, (SECRET, own)):
            assert isinstance(result, Exception)
    for result in meet((b"x" * 32, None), (SECRET, None)):
        assert isinstance(result, Exception)


def test_a_packed_frame_never_grows_beyond_a_frame() -> None:
    import zlib

    assert wire.unpack_payload(zlib.compress(b"a" * wire.FRAME_BYTES)) == b"a" * wire.FRAME_BYTES
    for bad in (zlib.compress(bytes(10 * wire.FRAME_BYTES)), b"junk", zlib.compress(b"ab")[:-2]):
        with pytest.raises(wire.LinkError, match="damaged"):
            wire.unpack_payload(bad)


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/x", "a//b", "", ".", "a/.", "a\0b", ".hvd_elastic-part/x"]
)
def test_paths_that_would_leave_the_destination(path: str) -> None:
    with pytest.raises(ValueError, match="would leave the destination"):
        check_inside(path)
    with pytest.raises(ValueError, match="would leave the destination"):
        read_tree([True, [[path, 1, 1, 0o644]], [], [], [], [], []])


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("*.tmp", ["a.tmp", "x/a.tmp", "a.tmp/inside"], ["a.tmpx"]),
        ("cache", ["cache", "x/cache/y"], ["cached"]),
        ("/cache", ["cache", "cache/y"], ["x/cache"]),
        ("data/old*", ["data/old1", "data/older/x"], ["x/data/old1"]),
        ("logs/", ["logs", "x/logs/y"], ["log"]),
    ],
)
def test_patterns(pattern: str, fits: list[str], fits_not: list[str]) -> None:
    assert all(is_excluded(path, [pattern]) for path in fits)
    assert not any(is_excluded(path, [pattern]) for path in fits_not)


def test_what_is_taken_of_all_that_is_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "a.txt", "sub/deep/b.py", "sub/c.txt", "none/d.txt", "whole/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    tree, _ = walk(os.fsencode(tmp_path), ["*", "+ *.py", "+ /whole"])
    assert [file.path for file in tree.files] == ["a.py", "sub/deep/b.py", "whole/e.txt"]
    assert [path for path, _, _ in tree.folders] == ["", "sub", "sub/deep", "whole"]
    assert not is_excluded("x/whole.py", ["*", "+ *.py"])
    assert is_excluded("x/whole", ["*", "+ /whole"])
    tree, _ = walk(os.fsencode(tmp_path), ["*.txt", "+ c.txt"])
    assert [file.path for file in tree.files] == ["a.py", "sub/c.txt", "sub/deep/b.py"]


def frames(packer: Packer, payload: bytes, number: int, link_s: float) -> list[bytes | None]:
    found = []
    for _ in range(number):
        found.append(packer.pack(payload))
        packer.sent(len(payload), link_s)
    return found


def test_text_is_compressed_on_a_slow_link_and_noise_never() -> None:
    packed = frames(Packer(), TEXT, 200, link_s=60.0)
    assert packed[:LINK_UNKNOWN] == [None] * LINK_UNKNOWN
    first = packed[LINK_UNKNOWN]
    assert first is not None
    assert wire.unpack_payload(first) == TEXT
    assert None not in packed[LINK_UNKNOWN:]
    assert frames(Packer(), os.urandom(60_000), 100, link_s=60.0) == [None] * 100


def test_what_setting_up_costs_is_no_measure_of_a_whole_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spent_s = 0.0

    def compress(data: bytes, level: int) -> bytes:
        nonlocal spent_s
        spent_s += 200e-6 + 10e-9 * len(data)
        return zlib.compress(data, level)

    fake = SimpleNamespace(compress=compress)
    monkeypatch.setattr(copy_feed, "zlib", fake)
    monkeypatch.setattr(copy_feed, "time", SimpleNamespace(thread_time=lambda: spent_s))
    text = (TEXT * (wire.FRAME_BYTES // len(TEXT) + 1))[: wire.FRAME_BYTES]
    packed = frames(Packer(), text, 200, link_s=8e-8 * len(text))  # 100 Mbit/s
    assert None not in packed[2 * LINK_UNKNOWN :]
    seldom = frames(Packer(), text, 2000, link_s=8e-10 * len(text))  # 10 Gbit/s
    assert sum(frame is not None for frame in seldom) < 40


def test_nothing_is_compressed_for_a_link_that_holds_nobody_up() -> None:
    assert frames(Packer(), TEXT, 200, link_s=0.0) == [None] * 200


def test_a_feeder_waits_for_its_link_only_while_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * wire.FRAME_BYTES))
    sending: dict[str, bool] = {}

    def note(what: str, answer: Any = None) -> Any:
        sending[what] = feeder.sending
        return answer

    class Disk(SourceStore):
        def open(self, index: int) -> int:
            return int(note("disk", super().open(index)))

    link = SimpleNamespace(
        send_list=lambda _: None,
        read_list=lambda: note("list", [[0, wire.FRAME_BYTES]]),
        send=lambda _: note("link"),
        close=lambda: None,
    )
    monkeypatch.setattr(copy_feed, "connect", lambda *_: link)
    monkeypatch.setattr(copy_feed.Pace, "wait", lambda *_: note("pace"))
    monkeypatch.setattr(copy_feed, "hash_of", lambda *_: note("hash", hashlib.sha256()))
    store = Disk(os.fsencode(tmp_path), walk(os.fsencode(tmp_path), [])[0])
    feeder = copy_feed.Feeder(store, "b", 1, [], b"", None, 1.0, False, lambda *_: None)
    feeder.run()
    assert sending == {"list": True, "disk": False, "hash": False, "pace": False, "link": True}


def target_of(place: Path, tree: Tree, copy: str = "this") -> Target:
    plan = Comparison(os.fsencode(place), tree, [], deletes=False, checksum=False)
    plan.settle_doubts({})
    return Target(plan, copy)


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


def test_one_copy_at_a_time_and_hosts_that_share_a_place(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(b"data")
    tree, _ = walk(os.fsencode(tmp_path / "source"), [])
    first = target_of(tmp_path / "there", tree)
    with pytest.raises(SharedError):
        target_of(tmp_path / "there", tree)
    with pytest.raises(StoreError, match=r"another copy to .* is in progress there"):
        target_of(tmp_path / "there", tree, "another")
    first.whole(0, hashlib.sha256(b"data").digest(), 0, b"data", b"")
    assert first.finish() == []
    again = target_of(tmp_path / "there", tree, "another")
    assert again.arrived
    again.finish()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


@pytest.mark.parametrize("theirs", ["this", "that"])
def test_a_holder_that_ends_just_when_another_host_meets_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    """Of a copy that has nothing to send, one host may be through while the next one begins."""
    tree = Tree(True, [], [("", 0o755, 0)], [], [], [], [])
    first = target_of(tmp_path, tree, theirs)
    lock = fcntl.flock
    met = []

    def end_of_first(number: int, operation: int) -> None:
        try:
            lock(number, operation)
        except BlockingIOError:
            met.append(number)
            first.finish()
            raise

    monkeypatch.setattr(fcntl, "flock", end_of_first)
    second = target_of(tmp_path, tree)
    assert len(met) == 1
    assert second.finish() == []
    assert not list(tmp_path.iterdir())


def test_what_arrives_damaged_gets_no_name_and_is_asked_for_again(tmp_path: Path) -> None:
    data = os.urandom(200_000)
    (tmp_path / "source").write_bytes(data)
    tree, _ = walk(os.fsencode(tmp_path / "source"), [])
    target = target_of(tmp_path / "there", tree)

    def send(content: bytes) -> Any:
        target.write(0, 0, content, b"")
        target.finish_file(0, hashlib.sha256(data).digest(), 0)

    for _ in range(2):
        with pytest.raises(wire.LinkError, match="arrived damaged"):
            send(bytes([data[0] ^ 1]) + data[1:])
        assert target.wants() == [(0, 0)]
        assert not (tmp_path / "there").exists()
    with pytest.raises(wire.LinkError, match="nobody asked for"):
        target.write(0, 7, b"x", b"")
    send(data)
    assert target.arrived
    assert target.finish() == []
    assert (tmp_path / "there").read_bytes() == data
    assert target.complete


@pytest.mark.parametrize("first", ["", "same", "other"])
def test_a_file_that_is_fetched_goes_on_where_sending_ended(tmp_path: Path, first: str) -> None:
    data = os.urandom(200_000)
    (tmp_path / "source").write_bytes(data)
    tree, _ = walk(os.fsencode(tmp_path / "source"), [])
    target = target_of(tmp_path / "there", tree)
    readers = []
    if first:
        target.write(0, 0, data[:50_000] if first == "same" else bytes(50_000), b"")
        readers.append(target.open(0))
    if first == "other":
        with pytest.raises(wire.LinkError, match="damaged"):
            target.adopt(0, opened(tmp_path / "source"))
    target.adopt(0, opened(tmp_path / "source"))
    assert target.arrived
    assert target.left == 0
    assert target.finish() == []
    assert (tmp_path / "there").read_bytes() == data
    for reader in readers:  # who reads on finds it all
        assert os.pread(reader, 300_000, 0) == data
        os.close(reader)


def test_a_fetched_file_of_another_size_is_none(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"data")
    tree, _ = walk(os.fsencode(tmp_path / "source"), [])
    (tmp_path / "source").write_bytes(b"more data")
    target = target_of(tmp_path / "there", tree)
    target.adopt(0, opened(tmp_path / "source"))
    assert target.gone == {0: "it was changed in the store during the copy"}
    assert target.complete


def test_files_get_their_names_once_they_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    contents = [b"small", os.urandom(200_000)]
    (tmp_path / "source" / "deep").mkdir(parents=True)
    for name, data in zip(("a", "deep/b"), contents, strict=True):
        (tmp_path / "source" / name).write_bytes(data)
    tree, _ = walk(os.fsencode(tmp_path / "source"), [])
    named_at_sync = []

    def note_and_sync(descriptor: int) -> None:
        named_at_sync.append({path.name for path in there.rglob("*") if path.name in "ab"})
        sync_disk(descriptor)

    monkeypatch.setattr(renaming, "sync_disk", note_and_sync)
    monkeypatch.setattr(copy_store, "sync_disk", note_and_sync)
    target = target_of(there, tree)
    digests = [hashlib.sha256(data).digest() for data in contents]
    target.whole(0, digests[0], 0, contents[0], b"")
    target.write(1, 0, contents[1], b"")
    target.finish_file(1, digests[1], 0)
    assert target.arrived
    assert not target.complete
    for index, data in enumerate(contents):  # others are fed from what has no name yet
        reader = target.open(index)
        assert os.read(reader, 300_000) == data
        os.close(reader)
    assert target.finish() == []
    assert target.complete
    # Before the names were given, and after all was done.
    assert named_at_sync == [set(), {"a", "b"}]
    assert (there / "deep" / "b").read_bytes() == contents[1]


def test_names_are_given_behind_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renaming, "SYNC_BYTES", 1000)
    given: queue.Queue[tuple[int, bytes]] = queue.Queue()
    folder = os.open(tmp_path, os.O_RDONLY)
    names = renaming.Names(folder, lambda index, part: given.put((index, part)))
    names.add_file(3, b"part")
    names.count(1000)
    assert given.get(timeout=LIMIT_S) == (3, b"part")
    names.stop_renaming()
    os.close(folder)


def target_with_a_file(folder: Path) -> Target:
    """A copy to ``there`` of which all has come, and nothing has its name yet."""
    data = b"data"
    (folder / "source").write_bytes(data)
    tree, _ = walk(os.fsencode(folder / "source"), [])
    target = target_of(folder / "there", tree)
    target.whole(0, hashlib.sha256(data).digest(), 0, data, b"")
    return target


def test_a_disk_that_cannot_take_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(renaming, "sync_disk", refuse)
    target = target_with_a_file(tmp_path)
    with pytest.raises(OSError, match="No space left") as caught:
        target.finish()
    assert "Make room there and call again" in target.explain(caught.value)
    assert not (tmp_path / "there").exists()


def test_a_disk_that_failed_once_gets_no_name_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells a write that failed once to each descriptor; what was lost stays lost."""
    answers = [OSError(errno.EIO, "Input/output error")]

    def fail_once(descriptor: int) -> None:
        if answers:
            raise answers.pop()
        sync_disk(descriptor)

    monkeypatch.setattr(renaming, "sync_disk", fail_once)
    target = target_with_a_file(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            target.finish()
    target.abandon(keep=False)
    assert not (tmp_path / "there").exists()


def test_a_read_only_file_that_a_killed_node_left_without_its_name(open_folder: Path) -> None:
    """Root may write what is read-only: another user does the work, in a process of its own."""
    data = os.urandom(200_000)
    source = open_folder / "source"
    source.write_bytes(data)
    source.chmod(0o444)
    place = open_folder / "user"
    place.mkdir()
    place.chmod(0o777)
    tree, _ = walk(os.fsencode(source), [])

    def copy_twice() -> None:
        killed = target_of(place / "there", tree)
        killed.write(0, 0, data, b"")
        killed.finish_file(0, hashlib.sha256(data).digest(), 0)
        os.close(killed._parts)  # and with it the lock
        again = target_of(place / "there", tree)
        assert again.wants() == [(0, len(data))]
        again.finish_file(0, hashlib.sha256(data).digest(), 0)
        assert again.finish() == []

    if os.geteuid() == 0:
        other_user.call(copy_twice)
    else:
        copy_twice()
    found = place / "there"
    assert found.read_bytes() == data
    assert found.stat().st_mode & 0o777 == 0o444


def test_the_room_that_is_wanted_is_said_in_whole(tmp_path: Path) -> None:
    with small_disk.mounted(tmp_path / "disk", "20m") as folder:
        check_free(os.fsencode(folder), 1_000_000, 1)
        wanted = re.escape("needs 10.0 MB and 16.8 MB to spare, 21.0 MB are free")
        with pytest.raises(StoreError, match=wanted):
            check_free(os.fsencode(folder), 10_000_000, 1)


def test_what_has_arrived_when_a_copy_is_cut_off_is_kept(tmp_path: Path) -> None:
    data = b"data"
    (tmp_path / "source").mkdir()
    for name in "ab":
        (tmp_path / "source" / name).write_bytes(data)
    tree, _ = walk(os.fsencode(tmp_path / "source"), [])
    target = target_of(tmp_path / "there", tree)
    target.whole(0, hashlib.sha256(data).digest(), 0, data, b"")
    target.abandon(keep=True)
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["a"]


# ---- in a destination that others can write to


def copied(place: Path, tree: Tree, contents: dict[int, bytes]) -> Target:
    """A target in which all files have arrived and have no names yet."""
    target = target_of(place, tree)
    for index, data in contents.items():
        target.whole(index, hashlib.sha256(data).digest(), 0, data, b"")
    return target


@pytest.fixture
def source(tmp_path: Path) -> Tree:
    (tmp_path / "source" / "below").mkdir(parents=True)
    for name in ("a", "below/b"):
        (tmp_path / "source" / name).write_bytes(name.encode())
    return walk(os.fsencode(tmp_path / "source"), [])[0]


CONTENTS = {0: b"a", 1: b"below/b"}


@other_user.needs_root
@pytest.mark.parametrize("mode", [0o777, 0o700])
@pytest.mark.parametrize("folder", [PARTS, FETCHED])
def test_a_folder_of_parts_that_another_user_has_made_is_refused(
    open_folder: Path, source: Tree, folder: str, mode: int
) -> None:
    theirs = open_folder / folder

    def plant() -> None:
        theirs.mkdir()
        theirs.chmod(mode)

    other_user.call(plant)
    pull = Pull(os.fsencode(open_folder), "x {dst} {path}", [Listed("a", 1)], "c", 1, 0)
    arrive = {PARTS: lambda: target_of(open_folder, source), FETCHED: lambda: pull.fetch([0])}
    with pytest.raises(StoreError, match=rf"{folder} belongs to user nobody \(mode {mode:o}\), so"):
        arrive[folder]()
    assert list(theirs.iterdir()) == []


def test_a_folder_of_parts_that_others_may_write_to_is_refused(
    open_folder: Path, source: Tree
) -> None:
    (open_folder / PARTS).mkdir()
    (open_folder / PARTS).chmod(0o777)
    with pytest.raises(StoreError, match=r"mode 777.*others could change files while they arrive"):
        target_of(open_folder, source)


def test_no_command_starts_once_a_node_that_fetches_has_ended_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = Pull(os.fsencode(tmp_path), "touch {dst}/{path}", [Listed("a", None)], "c", 1, 0o22)
    assert pull.fetch([0]).came == [0]
    found: list[Fetched] = []
    monkeypatch.setattr(pulling_node, "end_processes", lambda *_: found.append(pull.fetch([0])))
    umask = os.umask(0o22)
    try:
        node = pulling_node.PullNode({})
        node._pull = pull
        node.leave()
    finally:
        os.umask(umask)
    assert found == [Fetched([], [0], "the copy has ended")]


@other_user.needs_root
def test_a_server_of_files_that_makes_another_user_of_root(open_folder: Path, source: Tree) -> None:
    def copy() -> None:
        assert ctypes.CDLL(None).setfsuid(other_user.UID) == 0, "as NFS with root_squash"
        target = copied(open_folder / "there", source, CONTENTS)
        assert target.finish() == []

    other_user.call(copy, uid=0)
    assert (open_folder / "there" / "a").stat().st_uid == other_user.UID


@pytest.fixture
def shared(open_folder: Path) -> Path:
    """A destination in which all users may rename what others have made: no sticky bit."""
    place = open_folder / "there"
    place.mkdir()
    place.chmod(0o777)
    return place


@other_user.needs_root
@pytest.mark.parametrize("opened", ["before", "by the copy"])
@pytest.mark.parametrize("what", ["a", "below/b", "below", ""])
def test_what_another_user_puts_in_the_place_of_files_is_told(
    shared: Path, source: Tree, what: str, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = shared / what
    (shared / "below").mkdir()
    (shared / "below").chmod(0o777)
    folders = [(path, 0o755 if opened == "before" else 0o777, 0) for path, _, _ in source.folders]
    target = copied(shared, source._replace(folders=folders), CONTENTS)

    def swap() -> None:
        theirs = changed.with_name("theirs")
        if changed.is_file():
            shutil.copy2(changed, theirs)
        else:
            shutil.copytree(changed, theirs, ignore=shutil.ignore_patterns(PARTS))
        changed.rename(changed.with_name("taken"))
        theirs.rename(changed)

    def swap_then(action: str) -> None:
        real = getattr(copy_store, action)

        def swapping(*arguments: Any) -> Any:
            monkeypatch.setattr(copy_store, action, real)
            other_user.call(swap)
            return real(*arguments)

        monkeypatch.setattr(copy_store, action, swapping)

    # All files have their names: now, or when the folders have their modes.
    swap_then("list_names" if opened == "before" else "sync_disk")
    problems = target.finish()
    assert problems
    assert str(changed) in problems[0]
    assert "replaced" in problems[0]


@other_user.needs_root
def test_a_folder_of_parts_that_another_user_takes_away_is_still_where_files_arrive(
    shared: Path, source: Tree
) -> None:
    target = copied(shared, source, CONTENTS)

    def swap() -> None:
        parts = shared / PARTS
        parts.rename(shared / "taken")
        parts.mkdir()

    other_user.call(swap)
    reader = target.open(0)
    assert os.read(reader, 100) == b"a", "what others are fed of it as well"
    os.close(reader)
    assert target.finish() == []
    assert (shared / "a").read_bytes() == b"a"


@other_user.needs_root
def test_files_of_another_user_are_compared_and_not_trusted(
    open_folder: Path, source: Tree
) -> None:
    place = open_folder / "there"

    def plant() -> None:
        place.mkdir()
        for index, text in enumerate([b"a", b"evil: b"]):
            path = place / source.files[index].path
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text)
            os.utime(path, ns=(source.files[index].mtime_ns,) * 2)

    other_user.call(plant)
    plan = Comparison(os.fsencode(place), source, [], deletes=False, checksum=False)
    assert plan.needed == []
    assert plan.doubtful == [0, 1], "both have the size and time of the source"
    plan.settle_doubts({index: hashlib.sha256(data).digest() for index, data in CONTENTS.items()})
    assert plan.needed == [1]
    pull = Pull(os.fsencode(place), "x {dst} {path}", [Listed("a", 1)], "c", 1, 0)
    assert pull.find_listed() == [], "there is nothing to compare it with"
    assert list(pull.foreign([])) == ["a", "below/b"]


@other_user.needs_root
def test_a_file_that_another_user_replaces_in_an_open_folder_below_is_compared(
    open_folder: Path, source: Tree
) -> None:
    place = open_folder / "there"
    (place / "below" / "deep").mkdir(parents=True)
    (place / "below").chmod(0o777)
    file = source.files[1]
    tree = source._replace(files=[file._replace(path="below/deep/b")])

    def plant() -> None:
        path = place / "below" / "deep"
        path.rename(path.with_name("taken"))
        path.mkdir()
        (path / "b").write_bytes(b"evil: b")
        os.utime(path / "b", ns=(file.mtime_ns,) * 2)

    other_user.call(plant)
    plan = Comparison(os.fsencode(place), tree, [], deletes=False, checksum=False)
    assert plan.doubtful == [0]
    pull = Pull(os.fsencode(place), "x {dst}", None, "c", 1, 0)
    assert list(pull.foreign([])) == ["below/deep/b"]
    node, said = pulling(open_folder / "there", ": {dst}", None)
    node._fetch([0])
    assert "below/deep/b belongs to another user" in said[0]["why"]
    assert "--no-same-owner" in said[0]["why"]


def pulling(
    place: Path, command: str, files: list[Listed] | None
) -> tuple[pulling_node.PullNode, list[dict[str, Any]]]:
    """Return a node that can fetch, and the list of what it says."""
    config: dict[str, Any] = dict.fromkeys(("deletes", "checksum", "dry_run"), False)
    config |= {"patterns": [], "passing": [], "keeps": [False] * 3, "shard": None, "copy": "copy"}
    umask = os.umask(0o22)
    node = pulling_node.PullNode({**config, "place": str(place)})
    os.umask(umask)
    node._pull = Pull(os.fsencode(place), command, files, "copy", 1, 0o22)
    said: list[dict[str, Any]] = []
    node.say = lambda say, **told: said.append({"say": say, **told})  # type: ignore[method-assign]
    return node, said


@other_user.needs_root
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("changed", [False, True])
def test_what_a_command_fetches_with_its_owner_is_what_others_get(
    tmp_path: Path, listed: bool, changed: bool
) -> None:
    """As root, tar keeps owners; nobody else has the file, so it must not be waited for."""
    place = tmp_path / "there"
    path = place / "below" / "b"
    command = f"chown {other_user.UID} {place}/below; : > {{dst}}/below/b; "
    # Its bit is removed at the end, which changes the file.
    command += f"chown {other_user.UID} {{dst}}/below/b; chmod u+s {{dst}}/below/b; # "
    if listed:
        path.parent.mkdir(parents=True)
    else:
        command = f"mkdir {place}/below; {command}"
    files = [Listed("below/b", None)] if listed else None
    node, said = pulling(place, command + "{path}" * listed, files)
    node._fetch([0])
    (answer,) = said
    assert answer["why"] == ""
    status = path.stat()
    assert status.st_uid == other_user.UID
    found = [("below/b", status.st_size, status.st_mtime_ns, 0o644)]
    tree = answer["tree"] or wire.pack([True, found, [["", ANY, ANY]], [], [], [], []])
    if changed:
        path.write_bytes(b"changed")
    node.obey("tree", {"tree": tree})
    complete = said[-1]
    assert complete["say"] == "complete"
    assert [name for name, _ in complete["gone"]] == ["below/b"] * changed
    if not changed:
        assert node._target is not None
        with path.open() as file:
            assert node._target.problem(0, file.fileno()) == ""


@other_user.needs_root
@pytest.mark.parametrize("exists", [True, False])
def test_a_command_may_give_the_destination_the_owner_in_the_store(
    tmp_path: Path, exists: bool
) -> None:
    """As tar of an archive of ".", `cp -a` of a folder's content and `rsync -a` do."""
    place = tmp_path / "there"
    if exists:
        place.mkdir()
    owner = f"{other_user.UID}:{other_user.UID}"
    node, said = pulling(place, f": > {{dst}}/b; chown -R {owner} {{dst}}", None)
    node._fetch([0])
    assert said[0]["why"] == ""
    node.obey("tree", {"tree": said[0]["tree"]})
    assert said[-1]["say"] == "complete"
    assert said[-1]["gone"] == []
    again, said = pulling(place, ": {dst}", None)
    again._fetch([0])
    assert "b belongs to another user" in said[0]["why"], "who may have put it there since"


@other_user.needs_root
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("when", ["before the tree", "after the tree"])
def test_what_another_user_puts_in_the_place_of_a_fetched_file_is_not_passed_on(
    open_folder: Path, listed: bool, when: str
) -> None:
    place = open_folder / "there"
    path = place / "below" / "b"
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o777)
    command = f"printf 'good: b' > {{dst}}/below/b; chown {other_user.UID} {{dst}}/below/b; # "
    files = [Listed("below/b", None)] if listed else None
    node, said = pulling(place, command + "{path}" * listed, files)
    node._fetch([0])
    (answer,) = said
    status = path.stat()
    found = [("below/b", status.st_size, status.st_mtime_ns, 0o644)]
    tree = answer["tree"] or wire.pack([True, found, [["", ANY, ANY]], [], [], [], []])

    def replace() -> None:
        path.unlink()  # the new file may get its inode
        path.write_bytes(b"evil: b")
        path.chmod(0o644)
        os.utime(path, ns=(status.st_mtime_ns,) * 2)

    time.sleep(0.05)  # a change time is known to some milliseconds
    if when == "before the tree":
        other_user.call(replace)
    node.obey("tree", {"tree": tree})
    gone = [["below/b", "it was changed after it was fetched"]]
    assert said[-1]["gone"] == (gone if when == "before the tree" else [])
    if when == "after the tree":
        assert node._target is not None
        with path.open() as file:
            assert node._target.problem(0, file.fileno()) == ""
        other_user.call(replace)
        with path.open() as file:
            assert node._target.problem(0, file.fileno()) == "it belongs to another user"


@other_user.needs_root
def test_a_file_of_another_user_in_an_open_folder_below_is_not_fed(
    tmp_path: Path, source: Tree
) -> None:
    os.chown(tmp_path / "source" / "below" / "b", other_user.UID, other_user.UID)
    target = target_of(tmp_path / "source", source)
    number = target.open(1)
    assert target.problem(1, number) == "", "nobody else could have put it there"
    (tmp_path / "source" / "below").chmod(0o777)
    assert target.problem(1, number) == "it belongs to another user"
    os.close(number)
    target.abandon(keep=False)


@other_user.needs_root
def test_a_set_uid_file_of_another_user_does_not_become_one_of_the_copier(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).touch()
    os.chown(tmp_path / "theirs", other_user.UID, other_user.UID)
    for name in ("ours", "theirs"):
        (tmp_path / name).chmod(0o6755)
    tree, _ = walk(os.fsencode(tmp_path), [])
    assert {file.path: file.mode for file in tree.files} == {"ours": 0o6755, "theirs": 0o755}
    listed = [Listed("ours", None), Listed("theirs", None)]
    pull = Pull(os.fsencode(tmp_path), "x {dst} {path}", listed, "c", 1, 0)
    assert [entry[3] for entry in pull.find_listed()] == [0o6755], "the other one is fetched"


def test_folders_of_an_interrupted_pull_are_as_those_of_a_complete_one(
    tmp_path: Path, source: Tree
) -> None:
    tree = source._replace(folders=[(path, ANY, ANY) for path, _, _ in source.folders])
    target_of(tmp_path / "there", tree).abandon(keep=False)
    assert (tmp_path / "there" / "below").stat().st_mode & 0o777 == 0o755


def test_delete_keeps_what_a_pattern_matches_in_a_folder_that_the_source_lacks(
    tmp_path: Path, source: Tree
) -> None:
    place = tmp_path / "there"
    for name in ("old/deep/best.pt", "old/deep/log", "old/log", "gone/log"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).touch()
    plan = Comparison(os.fsencode(place), source, ["*.pt"], deletes=True, checksum=False)
    assert sorted(plan.extra) == ["gone", "old/deep/log", "old/log"]
    target = Target(plan, "copy")
    for index in plan.needed:
        data = CONTENTS[index]
        target.whole(index, hashlib.sha256(data).digest(), 0, data, b"")
    (place / "gone" / "new.pt").touch()  # during the copy
    assert target.finish() == []
    left = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert left == {"a", "below/b", "old/deep/best.pt", "gone/new.pt"}


@pytest.mark.parametrize("what", ["file", "link", "name"])
def test_a_folder_with_what_a_pattern_matches_makes_no_way(tmp_path: Path, what: str) -> None:
    source, place = tmp_path / "source", tmp_path / "there"
    source.mkdir()
    (source / "a").write_bytes(b"a")
    if what == "file":
        (source / "x").write_bytes(b"x")
    elif what == "link":
        (source / "x").symlink_to("a")
    else:
        (source / "x").hardlink_to(source / "a")
    (place / "x").mkdir(parents=True)
    (place / "x" / "best.pt").touch()
    tree, _ = walk(os.fsencode(source), ["*.pt"], ALL)
    try:
        plan = Comparison(os.fsencode(place), tree, ["*.pt"], deletes=True, checksum=False)
        target = Target(plan, "copy", keeps=ALL)
        target.adopt(0, opened(source / "a"))
        problems = target.finish()
    except StoreError as error:
        problems = [str(error)]
    assert len(problems) == 1
    assert str(place / "x") in problems[0]
    assert "--exclude keeps" in problems[0]
    assert (place / "x" / "best.pt").exists()


ALL = Keeps(hard_links=True, sparse=True, attributes=True)


def copied_whole(source: Path, there: Path, keeps: Keeps) -> tuple[Tree, list[str]]:
    """Copy as one node does; return the tree and the problems."""
    tree = read_tree(wire.unpack(wire.pack(walk(os.fsencode(source), [], keeps)[0])))
    plan = Comparison(os.fsencode(there), tree, [], deletes=False, checksum=True)
    found = {str(path.relative_to(source)): path for path in source.rglob("*")}
    whole = {index: found.get(file.path, source) for index, file in enumerate(tree.files)}
    plan.settle_doubts({i: hashlib.sha256(whole[i].read_bytes()).digest() for i in plan.doubtful})
    plan.check_room()
    target = Target(plan, "copy", keeps=keeps)
    for index in plan.needed:
        target.adopt(index, opened(whole[index]))
    return tree, target.finish()


def test_names_holes_and_attributes_are_kept(tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    (source / "deep").mkdir(parents=True)
    (source / "a").write_bytes(b"a" * 100_000)
    os.link(source / "a", source / "deep" / "b")
    (source / "alone").write_bytes(b"alone")
    with (source / "disk").open("wb") as disk:
        disk.seek(50_000_000)
        disk.write(b"end")
        disk.truncate(90_000_001)
    (source / "zeros").write_bytes(bytes(500_000))
    os.setxattr(source / "alone", "user.origin", b"\0\xff")
    (source / "alone").chmod(0o444)
    os.setxattr(source / "deep", "user.kind", b"folder")
    tree, problems = copied_whole(source, there, ALL)
    assert problems == []
    assert tree.same == [("deep/b", "a")]
    assert (there / "a").samefile(there / "deep" / "b")
    assert (there / "disk").read_bytes() == (source / "disk").read_bytes()
    assert (there / "disk").stat().st_blocks * 512 < 1_000_000
    assert (there / "zeros").stat().st_blocks == 0, "zeros take no space, as with rsync"
    assert os.getxattr(there / "alone", "user.origin") == b"\0\xff"
    assert (there / "alone").stat().st_mode & 0o777 == 0o444
    assert os.getxattr(there / "deep", "user.kind") == b"folder"

    # What has changed since is mended, and nothing else is touched.
    os.setxattr(there / "alone", "user.more", b"x")
    os.removexattr(there / "deep", "user.kind")
    (there / "deep" / "b").unlink()
    (there / "deep" / "b").write_bytes(b"another file")
    inode = (there / "a").stat().st_ino
    assert copied_whole(source, there, ALL)[1] == []
    assert (there / "deep" / "b").stat().st_ino == inode
    assert os.listxattr(there / "alone") == ["user.origin"]
    assert os.getxattr(there / "deep", "user.kind") == b"folder"
    tree, _ = copied_whole(source, tmp_path / "plain", Keeps())
    assert (tree.same, tree.stored, tree.attributes) == ([], [], [])
    assert not (tmp_path / "plain" / "a").samefile(tmp_path / "plain" / "deep" / "b")
    assert os.listxattr(tmp_path / "plain" / "alone") == []


def test_a_single_file_keeps_holes_and_attributes(tmp_path: Path) -> None:
    with (tmp_path / "disk").open("wb") as disk:
        disk.truncate(10_000_000)
    os.setxattr(tmp_path / "disk", "user.kind", b"disk")
    assert copied_whole(tmp_path / "disk", tmp_path / "there", ALL)[1] == []
    assert (tmp_path / "there").stat().st_blocks == 0
    assert os.getxattr(tmp_path / "there", "user.kind") == b"disk"


def test_what_a_file_system_does_not_keep_is_said_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_bytes(b"x" * 200_000)
        os.setxattr(source / name, "user.kind", b"file")
    os.link(source / "a", source / "c")
    with (source / "disk").open("wb") as disk:
        disk.truncate(300_000)
    monkeypatch.setattr(os, "setxattr", refuse)
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(copy_store, "_write_sparse", copy_store._write_at)
    there = tmp_path / "there"
    assert copied_whole(source, there, ALL)[1] == [
        f"{there}/disk: its holes are not kept: the file system fills them",
        f"{there}/a: its attribute user.kind is not kept: Operation not supported",
        f"{there}/b: its attribute user.kind is not kept: Operation not supported",
        f"{there}/c: Operation not supported",
    ]


def test_a_large_file_with_holes_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_store, "KEPT_PART_BYTES", 1)
    data = os.urandom(70_000) + bytes(400_000) + os.urandom(70_000)
    (tmp_path / "source").write_bytes(data)
    tree, _ = walk(os.fsencode(tmp_path / "source"), [], ALL)

    def target() -> Target:
        plan = Comparison(os.fsencode(tmp_path / "there"), tree, [], False, False)
        return Target(plan, "copy", keeps=ALL)

    first = target()
    first.write(0, 0, data[:300_000], b"")  # its end is a hole
    first.abandon(keep=True)
    second = target()
    assert second.wants() == [(0, 300_000)]
    second.write(0, 300_000, data[300_000:], b"")
    second.finish_file(0, hashlib.sha256(data).digest(), 0)
    assert second.finish() == []
    assert (tmp_path / "there").read_bytes() == data
    assert (tmp_path / "there").stat().st_blocks * 512 < len(data) - 300_000


def test_a_tree_that_names_a_file_outside_is_refused(tmp_path: Path) -> None:
    tree = Tree(True, [], [("", 0o755, 0)], [], [("a", "../../etc/passwd")], [], [])
    with pytest.raises(ValueError, match="would leave the destination"):
        read_tree(wire.unpack(wire.pack(tree)))
