"""Checkpoint files survive whatever happens to who writes them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_elastic.checkpoint import whole_files
from hvd_elastic.checkpoint.header import Header, TensorInfo
from hvd_elastic.checkpoint.manifests import (
    CheckpointInfo,
    check_folder,
    complete_checkpoint,
    find_checkpoints,
    newest_valid,
    why_invalid,
)
from hvd_elastic.checkpoint.reader import load_arrays, load_file
from hvd_elastic.checkpoint.saved import find_spooled
from hvd_elastic.checkpoint.shards import (
    ShardInfo,
    complete_sets,
    describe_shard,
    drop_shards,
    find_shards,
    parse_shard,
    receive_shard,
    why_incomplete,
    write_shard,
)
from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError
from tests.small_disk import mounted


def shard_of(step: int, index: int, count: int, data: bytes, **other: Any) -> ShardInfo:
    """What a rank says that it is going to write."""
    fields: dict[str, Any] = {"generation": 1, "life": "a", "layout": "l", **other}
    return ShardInfo(
        path=Path(),
        step=step,
        epoch=step // 10,
        examples=step * 64,
        index=index,
        count=count,
        host=f"node{index}",
        rank=index,
        header=0,
        begin=index * len(data),
        end=(index + 1) * len(data),
        total=count * len(data),
        **fields,
    )


def write(folder: Path, step: int, index: int, count: int, data: bytes, **other: Any) -> ShardInfo:
    shard = shard_of(step, index, count, data, **other)

    def copy(file: HashingWriter) -> None:
        file.write(data)

    return write_shard(folder, shard, copy)


def put(
    folder: Path, step: int, data: bytes = b"", keep: int = 9, count: int = 2
) -> CheckpointInfo:
    """A checkpoint of ``count`` shards with ``data`` in each."""
    data = data or f"state after step {step}".encode() * 100
    shards = [write(folder, step, index, count, data) for index in range(count)]
    return complete_checkpoint(folder, shards, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Skipped(list[tuple[str, str]]):
    def __call__(self, path: Path, why: str) -> None:
        self.append((path.name, why))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Made by the first write; a blank and a quote must do no harm.
    return tmp_path / "a run's" / "check points"


def test_what_was_written_is_found_and_valid(folder: Path) -> None:
    info = put(folder, 120, b"payload")
    first, second = info.shards
    assert first.path.read_bytes() == b"payload"
    assert first.sha256 == hashlib.sha256(b"payload").hexdigest()
    assert (info.step, info.epoch, info.examples, info.bytes) == (120, 12, 7680, 14)
    assert names(folder) == sorted([first.file, second.file, "step-000000000120.json"])
    (found,) = find_checkpoints(folder)
    assert found.manifest() == info.manifest()
    assert newest_valid(folder) == found
    manifest = json.loads(info.path.read_text())
    assert manifest == info.manifest()
    assert [(s["host"], s["begin"], s["end"], s["bytes"]) for s in manifest["shards"]] == [
        ("node0", 0, 7, 7),
        ("node1", 7, 14, 7),
    ]


def test_newest_means_greatest_step_and_only_keep_remain(folder: Path) -> None:
    for step in (100, 200, 300, 1_000_000_000_000):
        put(folder, step, keep=3)
    assert [info.step for info in find_checkpoints(folder)] == [1_000_000_000_000, 300, 200]
    assert len(names(folder)) == 9


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "none") == []
    assert newest_valid(tmp_path / "none") is None


def test_a_truncated_shard_is_skipped_with_the_reason(folder: Path) -> None:
    older, newer = put(folder, 1), put(folder, 2)
    cut = newer.shards[1]
    os.truncate(cut.path, cut.bytes - 1)
    skipped = Skipped()
    found = newest_valid(folder, skipped)
    assert found is not None
    assert found.step == older.step
    assert skipped == [(cut.file, f"it is truncated: {cut.bytes - 1} of {cut.bytes} bytes")]


@given(place=st.integers(0, 999), bit=st.integers(0, 7), shard=st.integers(0, 1))
@settings(max_examples=30, deadline=None)
def test_any_flipped_bit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int, shard: int
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    older, newer = put(folder, 1), put(folder, 2, random.Random(1).randbytes(1000))
    damaged = bytearray(newer.shards[shard].path.read_bytes())
    damaged[place] ^= 1 << bit
    newer.shards[shard].path.write_bytes(damaged)
    skipped = Skipped()
    found = newest_valid(folder, skipped)
    assert found is not None
    assert found.step == older.step
    assert len(skipped) == 1
    assert skipped[0][1].startswith("it is corrupted: SHA-256 is ")


def test_a_byte_too_many_is_noticed(folder: Path) -> None:
    info = put(folder, 2, b"1234")
    with info.shards[0].path.open("ab") as file:
        file.write(b"5")
    assert why_invalid(info) == (
        info.shards[0].path,
        "it is too long: 5 bytes instead of 4",
    )


def test_shards_without_a_manifest_are_no_checkpoint(folder: Path) -> None:
    older, newer = put(folder, 1), put(folder, 2)
    newer.path.unlink()
    skipped = Skipped()
    found = newest_valid(folder, skipped)
    assert found is not None
    assert found.step == older.step
    ((_, why),) = skipped
    assert why == "it has no manifest, so its checkpoint was not completed"
    assert [info.step for info in find_checkpoints(folder)] == [1]


def test_a_manifest_with_a_shard_missing_is_no_checkpoint(folder: Path) -> None:
    info = put(folder, 2)
    info.shards[1].path.unlink()
    skipped = Skipped()
    assert newest_valid(folder, skipped) is None
    ((name, why),) = skipped
    assert name == info.path.name
    assert why.endswith(f"its shard {info.shards[1].file} is missing")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 3}, "format is 3, this version reads 4"),
        ({"step": "7"}, "Expected `int`, got `str` - at `$.step`"),
        ({"step": 8}, "file is "),
        ({"bytes": -1}, "Expected `int` >= 0 - at `$.bytes`"),
        ({"bytes": True}, "Expected `int`, got `bool` - at `$.bytes`"),
        ({"bytes": 9}, "bytes is 9, header and range say something else"),
        ({"sha256": "x"}, "matching regex"),
        ({"file": "../../etc/passwd"}, r"file is '../../etc/passwd', it must be 'step-0000000000"),
        ({"created": None}, "Expected `float`, got `null` - at `$.created`"),
        ({"host": 3}, "Expected `str`, got `int` - at `$.host`"),
        ({"world": "2"}, "Expected `int`, got `str` - at `$.world`"),
        ({"generation": 2}, "shard 1 belongs to another checkpoint"),
        ({"index": 0}, "shard 1 of 2 is missing"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_skipped(
    folder: Path, change: dict[str, object], why: str
) -> None:
    info = put(folder, 7)
    manifest = info.manifest()
    changed = {**manifest["shards"][1], **change}
    if "index" in change:
        changed["file"] = changed["file"].replace("-1-of-", "-0-of-")
    manifest["shards"][1] = changed
    info.path.write_text(json.dumps(manifest))
    skipped = Skipped()
    assert newest_valid(folder, skipped) is None
    assert any(why in said for _, said in skipped), skipped


@pytest.mark.parametrize("text", ["", "{", "[1]", '"step"', "null", "\udcff", '{"format": 1}'])
def test_a_manifest_that_is_not_json_is_skipped(folder: Path, text: str) -> None:
    put(folder, 3)
    info = put(folder, 7)
    info.path.write_bytes(text.encode("utf-8", "surrogateescape"))
    skipped = Skipped()
    found = newest_valid(folder, skipped)
    assert found is not None
    assert found.step == 3
    assert any("its manifest is of no use" in why for _, why in skipped)


def test_a_skip_is_logged_where_nobody_listens(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(put(folder, 2).shards[0].path, 0)
    assert newest_valid(folder) is None
    assert "is skipped: it is truncated: 0 of" in caplog.text


def test_other_files_are_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("notes.txt", "step-1.json", "step-000000000001.pt", ".tmp-mine", "model.pt"):
        (folder / name).write_text("mine")
    for step in range(5):
        put(folder, step, keep=1)
    assert [info.step for info in find_checkpoints(folder)] == [4]
    assert len(names(folder)) == 5 + 3


# -- pruning


def test_good_ones_do_not_give_way_to_later_damaged_ones(folder: Path) -> None:
    """Training went back behind a damaged checkpoint; keeping one must keep the good one."""
    put(folder, 1)
    os.truncate(put(folder, 5).shards[1].path, 3)
    put(folder, 2, keep=1)
    found = newest_valid(folder, Skipped())
    assert found is not None
    assert found.step == 2
    put(folder, 5, keep=1)
    assert [info.step for info in find_checkpoints(folder)] == [5]
    assert len(names(folder)) == 3


def test_a_step_written_again_replaces_its_data(folder: Path) -> None:
    first = put(folder, 5, b"first")
    for shard in first.shards:
        os.utime(shard.path, ns=(0, first.path.stat().st_mtime_ns - 1))
    second = put(folder, 5, b"second", count=3)
    assert names(folder) == sorted(path.name for path in second.files)
    assert newest_valid(folder) == find_checkpoints(folder)[0]


def test_the_same_data_written_again_stays_one_checkpoint(folder: Path) -> None:
    put(folder, 5, b"same")
    put(folder, 5, b"same")
    assert len(names(folder)) == 3
    assert newest_valid(folder) is not None


def test_what_dead_writers_left_goes_and_what_living_ones_write_stays(folder: Path) -> None:
    put(folder, 1)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = os.uname().nodename
    gone = folder / f".tmp-{host}-{dead.pid}-01234567"
    alive = folder / f".tmp-{host}-{os.getppid()}-01234567"
    recent = folder / ".tmp-other-host-7-01234567"
    old = folder / ".tmp-other-host-8-01234567"
    unfinished = folder / "step-000000000009-0-of-2-0123456789ab.shard"
    for path in (gone, alive, recent, old, unfinished):
        path.write_bytes(b"half")
    for path in (old, unfinished):
        os.utime(path, (0, time.time() - 2 * whole_files._ABANDONED_S))
    put(folder, 2)
    left = {path for path in (gone, alive, recent, old, unfinished) if path.exists()}
    assert left == {alive, recent}


def test_keep_must_be_one_or_more(folder: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0, it must be 1 or more"):
        put(folder, 1, keep=0)


# -- the disk says no


def test_a_folder_below_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "checkpoints"
    for attempt in (lambda: put(below, 1), lambda: check_folder(below)):
        with pytest.raises(CheckpointError, match=r"cannot be written to .*/file/checkpoints: Not"):
            attempt()
    with pytest.raises(CheckpointError, match="cannot be looked for in"):
        find_checkpoints(below)


def test_check_folder_makes_it_and_leaves_nothing_in_it(folder: Path) -> None:
    check_folder(folder)
    assert names(folder) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


@pytest.mark.root
def test_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(small_disk: Path) -> None:
    older = put(small_disk, 1, b"x" * 300_000)
    before = names(small_disk)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written: .*/disk is full \(No sp"):
        put(small_disk, 2, b"y" * 600_000, count=1)
    assert names(small_disk) == before
    assert newest_valid(small_disk) == find_checkpoints(small_disk)[0]
    assert why_invalid(older) is None
    # There is room for a smaller one, and training that goes on writes it.
    put(small_disk, 3, b"z" * 100_000)
    assert [info.step for info in find_checkpoints(small_disk)] == [3, 1]


@pytest.mark.root
def test_a_disk_with_no_room_for_the_manifest_keeps_no_half(small_disk: Path) -> None:
    put(small_disk, 1, b"x" * 100_000)
    before = names(small_disk)
    room = os.statvfs(small_disk)
    with pytest.raises(CheckpointError, match="is full"):
        put(small_disk, 2, b"y" * (room.f_bavail * room.f_bsize), count=1)
    assert names(small_disk) == before


@pytest.mark.root
def test_a_read_only_disk_is_explained_and_can_still_be_read(small_disk: Path) -> None:
    put(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*: Read-only file system"):
        put(small_disk, 2)
    with pytest.raises(CheckpointError, match="Read-only"):
        check_folder(small_disk)
    assert newest_valid(small_disk) is not None


# -- killed while writing

WRITER = """
import sys, time
from pathlib import Path
from hvd_elastic.checkpoint import manifests, shards
from tests.unit.checkpoint import test_files

folder, moment = sys.argv[1:]

def stop_here():
    print(moment, flush=True)
    time.sleep(600)

if moment == "renaming data":
    Path.replace = lambda *_: stop_here()
elif moment == "between data and manifest":
    manifests.sync_folder = lambda folder: stop_here()
elif moment == "pruning":
    manifests.prune = lambda *_: stop_here()

def write(file):
    file.write(b"x" * 500_000)
    if moment == "writing data":
        stop_here()
    file.write(b"x" * 500_000)

shard = test_files.shard_of(2, 0, 1, b"x" * 1_000_000)
written = shards.write_shard(folder, shard, write)
manifests.complete_checkpoint(folder, [written], keep=3)
"""


@pytest.mark.parametrize(
    ("moment", "survives"),
    [
        ("writing data", 1),
        ("renaming data", 1),
        ("between data and manifest", 1),
        ("pruning", 2),
    ],
)
def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(
    folder: Path, moment: str, survives: int
) -> None:
    put(folder, 1)
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), moment],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    with ExitStack() as afterwards:
        afterwards.callback(writer.wait)
        afterwards.callback(writer.kill)
        afterwards.enter_context(writer.stdout)
        assert writer.stdout.readline().strip() == moment
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
    found = newest_valid(folder, Skipped())
    assert found is not None
    assert found.step == survives
    # The next one is written as if nothing had been, and clears up what is certainly left over.
    put(folder, 3)
    assert newest_valid(folder) == find_checkpoints(folder)[0]
    assert not [name for name in names(folder) if name.startswith(".tmp")]


# -- shards of several hosts


@pytest.mark.parametrize("damage", ["none", "truncated", "flipped"])
def test_a_shard_that_arrives_is_proven_intact(folder: Path, tmp_path: Path, damage: str) -> None:
    data = b"weights" * 1000
    there = write(tmp_path / "node0", 40, 0, 1, data)
    sent = {"none": data, "truncated": data[:-5], "flipped": b"W" + data[1:]}[damage]

    def copy(file: HashingWriter) -> None:
        file.write(sent)

    put(folder, 30)
    before = names(folder)
    if damage == "none":
        arrived = receive_shard(folder, there, copy)
        complete_checkpoint(folder, [arrived], keep=1)
        assert [info.step for info in find_checkpoints(folder)] == [40]
    else:
        why = "it is truncated: 6995 of 7000" if damage == "truncated" else "it is corrupted"
        with pytest.raises(CheckpointError, match=f"step 40, from host node0: {why}"):
            receive_shard(folder, there, copy)
        assert names(folder) == before


@pytest.mark.parametrize("file", ["../x.pt", "/etc/passwd", "step-000000000040-000000000000.pt"])
def test_a_description_from_elsewhere_cannot_choose_the_path(folder: Path, file: str) -> None:
    described = write(folder, 40, 0, 1, b"weights").manifest()
    assert parse_shard(described, folder).path.parent == folder
    with pytest.raises(ValueError, match="file is"):
        parse_shard({**described, "file": file}, folder)


def spooled(folder: Path, *where: int, keep: int = 2, **other: Any) -> ShardInfo:
    step, index, count = where
    shard = write(folder, step, index, count, b"x" * 10, **other)
    describe_shard(shard, keep)
    return shard


def test_a_spool_lists_its_whole_shards_and_keeps_the_newest_steps(folder: Path) -> None:
    for step in (10, 20, 30):
        for index in (0, 1):
            spooled(folder, step, index, 3)
    found = find_shards(folder)
    assert [(s.step, s.index) for s in found] == [(30, 0), (30, 1), (20, 0), (20, 1)]
    os.truncate(found[0].path, 3)
    found[1].path.unlink()
    assert [(s.step, s.index) for s in find_shards(folder)] == [(20, 0), (20, 1)]
    drop_shards(folder, 20)
    assert find_shards(folder) == []
    assert len(names(folder)) == 3, "what is left of step 30"
    drop_shards(folder, None)
    assert names(folder) == []
    assert find_shards(folder / "none") == []


def test_the_newest_complete_checkpoint_is_found_on_several_hosts(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for step in (10, 20):
        spooled(a, step, 0, 2)
        spooled(b, step, 1, 2)
    spooled(a, 30, 0, 2)  # the rank of shard 1 was killed
    spooled(b, 30, 1, 2, life="b")  # an older leader's
    spooled(a, 20, 1, 2)  # a copy
    both = [*find_shards(a), *find_shards(b)]
    assert [[s.index for s in parts] for parts in complete_sets(both)] == [[0, 1]]
    assert complete_sets(both)[0][0].step == 20
    assert complete_sets(find_shards(b)) == []


def test_what_is_no_whole_is_not_completed(folder: Path) -> None:
    shards = [write(folder, 5, index, 3, b"x" * 10) for index in range(3)]
    with pytest.raises(CheckpointError, match=r"not completed .*: shard 1 of 3 is missing"):
        complete_checkpoint(folder, [shards[0], shards[2]], keep=1)
    with pytest.raises(CheckpointError, match="shards are not in order"):
        complete_checkpoint(folder, [shards[1], shards[0], shards[2]], keep=1)
    assert find_checkpoints(folder) == []


def test_a_checkpoint_that_cannot_be_completed_again_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the next leader, while the disk is full."""
    info = put(folder, 5)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hvd_elastic.checkpoint.manifests.write_json", full)
    with pytest.raises(CheckpointError, match="No space left"):
        complete_checkpoint(folder, info.shards, keep=1)
    found = newest_valid(folder)
    assert found is not None
    assert found.path == info.path


def test_the_module_needs_neither_torch_nor_horovod() -> None:
    imports = "import sys, hvd_elastic.checkpoint.manifests"
    code = f"{imports}; print({{'torch', 'horovod'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def put_header(folder: Path, header: bytes) -> CheckpointInfo:
    """A checkpoint without any data behind its header."""
    shard = replace(shard_of(1, 0, 1, b""), header=len(header))

    def copy(file: HashingWriter) -> None:
        file.write(header)

    return complete_checkpoint(folder, [write_shard(folder, shard, copy)], 9)


def test_a_description_of_a_shard_of_very_many_costs_no_memory() -> None:
    """Of a host that was taken over, or in a folder of checkpoints from elsewhere."""
    count = 10_000_000
    described = replace(shard_of(1, 0, 1, b"x"), bytes=1, sha256="0" * 64, count=count).manifest()
    shard = parse_shard(described, Path())
    tracemalloc.start()
    try:
        assert complete_sets([shard]) == []
        assert why_incomplete([shard]) == f"shard 1 of {count} is missing"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_json_that_is_nested_too_deeply_is_damage(folder: Path) -> None:
    """In a manifest, a description in a spool, and the headers of a checkpoint and a saved file."""
    deep = b"[" * 200_000
    header = b'{"__metadata__":' + deep
    whole = len(header).to_bytes(8, "little") + header
    info = put_header(folder, whole)
    with pytest.raises(CheckpointError, match=r"cannot be loaded, it is damaged .* too deeply"):
        load_arrays(info.path)
    with pytest.raises(CheckpointError, match=r"cannot be loaded, it is damaged .* too deeply"):
        load_file(info.shards[0].path, lambda info: (None, None))
    info.path.write_bytes(deep)
    skipped = Skipped()
    assert newest_valid(folder, skipped) is None
    ((name, why),) = skipped
    assert (name, "nested too deeply" in why) == (info.path.name, True)
    info.shards[0].path.with_suffix(".json").write_bytes(deep)
    assert find_shards(folder) == []
    (folder / "best.pt-1-0123456789ab.save.json").write_bytes(b'{"host":' + deep)
    assert find_spooled(folder) == []


def test_a_manifest_of_more_than_any_memory_is_damage(folder: Path) -> None:
    size = 1 << 60
    tensor = TensorInfo("w", "uint8", (size,), size)
    header = Header((tensor,), {}, 1, "torch", "0", {}).encode()
    info = put_header(folder, header)
    manifest = json.loads(info.path.read_text())
    manifest["shards"][0].update(end=size, total=size, bytes=len(header) + size)
    info.path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="cannot be loaded, it is damaged"):
        load_arrays(info.path)
