"""copyclust over hosts in namespaces: what arrives, and what happens when something breaks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hvd_elastic.virtual import plan
from tests import small_disk
from tests.paths import COSTLY, LIMIT_S
from tests.ssh.copies import (
    HOSTS,
    MARKS,
    MB,
    Bed,
    bed,
    describe,
    made,
    make_large,
    source,
)

__all__ = ["bed", "made", "source"]

pytestmark = MARKS


def test_everything_arrives_as_it_was(bed: Bed, source: Path) -> None:
    odd = ["a b", "it's", 'a"b', "new\nline", "-rf", "--help", "$HOME", "ü", "~", "x" * 255]
    for name in odd:
        (source / name).write_bytes(os.urandom(100))
    with open(os.fsencode(source) + b"/\xff\xfe", "wb") as file:
        file.write(b"not UTF-8")
    (source / "empty folder" / "in it").mkdir(parents=True)
    (source / "empty").touch()
    make_large(source, 1_000_003).chmod(0o640)
    (source / "program").write_bytes(b"#!/bin/sh\n")
    (source / "program").chmod(0o755)
    (source / "read-only").mkdir()
    (source / "read-only" / "file").write_bytes(b"1" * 70_000)
    (source / "read-only" / "file").chmod(0o444)
    (source / "link").symlink_to("a b")
    (source / "dangling").symlink_to("/nowhere/ü")
    os.link(source / "large", source / "again")
    with (source / "disk").open("wb") as disk:
        disk.truncate(30 * MB)
        disk.write(b"boot")
    os.setxattr(source / "large", "user.kind", b"large")
    os.mkfifo(source / "pipe")
    os.utime(source / "a b", ns=(1_234_567_890_123_456_789, 1_234_567_890_123_456_789))
    (source / "read-only").chmod(0o555)
    result = bed("-HSX", str(source), "/data/")
    assert result.status == 0, result.errors
    assert "pipe: neither file, folder nor link" in result.errors
    (source / "pipe").unlink()
    os.utime(source, (1, 1))
    assert bed("-HSX", f"{source}/", "/data/set/").status == 0
    wanted = describe(source)
    for number in range(HOSTS):
        there = bed.data(number) / "set"
        assert describe(there) == wanted
        assert (there / "large").samefile(there / "again")
        assert (there / "disk").stat().st_blocks * 512 < MB
        assert os.getxattr(there / "large", "user.kind") == b"large"

    # Nothing differs: nothing is sent. Then one host lacks one file.
    assert bed(str(source), "/data/")["files"] == [0] * HOSTS
    (bed.data(2) / "set" / "it's").unlink()
    result = bed(str(source), "/data/")
    assert result["files"] == [0, 0, 1, 0]
    assert result["bytes"] == [0, 0, 100, 0]
    assert describe(bed.data(2) / "set")[b"it's"] == wanted[b"it's"]


def test_many_small_files_in_the_plain(bed: Bed, source: Path) -> None:
    for number in range(2000):
        folder = source / str(number % 20)
        folder.mkdir(exist_ok=True)
        (folder / str(number)).write_bytes(os.urandom(number))
    result = bed(str(source), "/data/set", "--plain")
    assert result.status == 0, result.errors
    assert result["files"] == [2000] * HOSTS
    wanted = describe(source)
    for number in range(HOSTS):
        assert describe(bed.data(number) / "set") == wanted


def test_a_single_file_and_where_it_cannot_go(bed: Bed, source: Path) -> None:
    file = make_large(source, 100_000)
    assert bed(str(file), "/data/deep/er/name").status == 0
    assert (bed.data(3) / "deep/er/name").read_bytes() == file.read_bytes()
    modes = [(bed.data(3) / name).stat().st_mode & 0o777 for name in ("deep", "deep/er")]
    assert modes == [0o755, 0o755]
    result = bed(str(file), "/data/deep")
    assert result.status == 1
    assert "is a folder there; end the destination with /" in result["error"][0]
    result = bed(str(source), "/data/deep/er/name")
    assert result.status == 1
    assert "is no folder there" in result["error"][0]
    assert bed(str(file), "/data/deep/").status == 0
    assert (bed.data(0) / "deep/large").stat().st_size == 100_000


def test_only_times_differ(bed: Bed, source: Path) -> None:
    make_large(source, 3 * MB)
    (source / "small").write_bytes(b"small")
    assert bed(str(source), "/data/set").status == 0
    for name in ("large", "small"):
        os.utime(source / name, (1_000_000_000, 1_000_000_000))
    result = bed(str(source), "/data/set")
    assert (result["touched"], result["bytes"]) == ([2] * HOSTS, [0] * HOSTS)
    assert describe(bed.data(1) / "set") == describe(source)

    # Same size, same time, other bytes: only --checksum finds that.
    there = bed.data(1) / "set" / "small"
    there.write_bytes(b"SMALL")
    os.utime(there, (1_000_000_000, 1_000_000_000))
    assert bed(str(source), "/data/set")["files"] == [0] * HOSTS
    assert bed(str(source), "/data/set", "--checksum")["files"] == [0, 1, 0, 0]
    assert there.read_bytes() == b"small"


def test_delete_exclude_and_dry_run(bed: Bed, source: Path) -> None:
    (source / "keep").write_bytes(b"keep")
    (source / "work.tmp").write_bytes(b"1")
    (source / "cache" / "deep").mkdir(parents=True)
    (source / "cache" / "deep" / "x").write_bytes(b"1")
    for number in range(HOSTS):
        old = bed.data(number) / "set" / "old" / "deeper"
        old.mkdir(parents=True)
        (old / "file").write_bytes(b"old")
        (bed.data(number) / "set" / "spared.tmp").write_bytes(b"old")
    arguments = [str(source), "/data/set", "--delete", "--exclude", "*.tmp", "--exclude", "/cache"]
    plan = bed(*arguments, "--dry-run")
    assert (plan["files"], plan["removed"]) == ([1] * HOSTS, [["old"]] * HOSTS)
    assert not (bed.data(0) / "set" / "keep").exists()
    assert (bed.data(0) / "set" / "old").exists()
    assert bed(*arguments).status == 0
    assert sorted(path.name for path in (bed.data(0) / "set").iterdir()) == ["keep", "spared.tmp"]


def test_links_in_the_destination_are_not_followed(bed: Bed, source: Path) -> None:
    (source / "sub").mkdir()
    (source / "sub" / "file").write_bytes(b"new")
    (source / "name").write_bytes(b"new")
    outside = bed.data(0) / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"not ours")
    (bed.data(0) / "set").mkdir()
    (bed.data(0) / "set" / "sub").symlink_to("/data/outside")
    (bed.data(0) / "set" / "name").symlink_to("/data/outside/file")
    assert bed(str(source), "/data/set").status == 0
    assert (outside / "file").read_bytes() == b"not ours"
    assert describe(bed.data(0) / "set") == describe(source)


@pytest.mark.parametrize("silent", [pytest.param(False, marks=COSTLY), True])
def test_a_host_that_dies_is_cut_out_and_repaired(bed: Bed, source: Path, silent: bool) -> None:
    make_large(source)
    with bed.caught(1, 4 * MB, source, "/data/set") as process:
        bed.cluster.crash(bed.hosts[1], silent=silent)
    result = bed.finish(process)
    assert result.status == 1
    assert [state == "ok" for state in result["state"]] == [True, False, True, True]
    assert bed.hosts[1] in result["error"][1]
    wanted = describe(source)
    for number in (0, 2, 3):
        assert describe(bed.data(number) / "set") == wanted
    bed.cluster.boot(bed.hosts[1])
    result = bed(str(source), "/data/set")
    assert result.status == 0, result.errors
    assert [count > 0 for count in result["files"]] == [False, True, False, False]
    assert result["resumed_bytes"][1] > 0
    assert describe(bed.data(1) / "set") == wanted


def test_a_cable_that_is_plugged_in_again_does_no_harm(bed: Bed, source: Path) -> None:
    make_large(source, 40 * MB)
    process = bed.start(str(source), "/data/set")
    bed.wait_for_parts(3, 2 * MB, process)
    bed.cluster.cut(bed.hosts[1])
    # Not long, for a busy machine: a host that is silent for 15 s is given up.
    bed.wait_for_parts(3, bed.largest_part(3) + 4 * MB, process)
    bed.cluster.heal(bed.hosts[1])
    result = bed.finish(process)
    assert result.status == 0, result["error"]
    wanted = describe(source)
    for number in range(HOSTS):
        assert describe(bed.data(number) / "set") == wanted


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=COSTLY)])
def test_an_interrupted_copy_goes_on_where_it_was(
    bed: Bed, source: Path, number: signal.Signals
) -> None:
    make_large(source)
    with bed.caught(3, 8 * MB, source, "/data/set") as process:
        process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == (130 if number is signal.SIGINT else -signal.SIGKILL)
    bed.wait_idle()
    assert not (bed.data(3) / "set" / "large").exists()
    there = [bed.largest_part(host) for host in range(HOSTS)]
    assert there[3] >= 8 * MB
    result = bed(str(source), "/data/set")
    assert result.status == 0, result.errors
    assert result["resumed_bytes"] == there
    for host in range(HOSTS):
        assert describe(bed.data(host) / "set") == describe(source)


def test_a_damaged_rest_is_found_and_sent_again(bed: Bed, source: Path) -> None:
    make_large(source)
    with bed.caught(1, 8 * MB, source, "/data/set") as process:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    bed.wait_idle()
    (part,) = (path for path in bed.parts(1) if path.stat().st_size > MB)
    with part.open("r+b") as file:
        file.write(b"damage")
    result = bed(str(source), "/data/set")
    assert result.status == 0, result.errors
    for host in range(HOSTS):
        assert describe(bed.data(host) / "set") == describe(source)


def test_a_source_that_changes_is_reported(bed: Bed, source: Path) -> None:
    large = make_large(source)
    (source / "other").write_bytes(b"fine")
    caught = bed.caught(0, 2 * MB, source, "/data/set")
    with caught as process, large.open("r+b") as file:
        file.seek(20 * MB)
        file.write(b"changed")
    result = bed.finish(process)
    assert result.status == 1
    for number in range(HOSTS):
        assert "large: it was changed during the copy" in result["error"][number]
        assert sorted(p.name for p in (bed.data(number) / "set").iterdir()) == ["other"]
    assert bed(str(source), "/data/set").status == 0
    assert (bed.data(3) / "set" / "large").read_bytes() == large.read_bytes()


def test_a_disk_that_is_too_small_and_one_that_fills_up(bed: Bed, source: Path) -> None:
    make_large(source)
    host = bed.hosts[1]

    def on_host(command: str) -> None:
        assert bed.cluster.run_on(host, ["sh", "-c", command]).returncode == 0

    on_host("mkdir /data/disk && mount -t tmpfs -o size=60m none /data/disk")
    try:
        on_host("head -c 40000000 /dev/zero > /data/disk/other")
        result = bed(str(source), "/data/disk/set")
        assert result.status == 1
        assert [state == "ok" for state in result["state"]] == [True, False, True, True]
        assert "MB are free there. Make room" in result["error"][1]
        assert result["bytes"][1] == 0

        on_host("rm /data/disk/other; rm -rf /data/disk/set")
        for number in (0, 2, 3):
            (bed.data(number) / "disk/set/large").unlink()
        with bed.caught(2, 4 * MB, source, "/data/disk/set") as process:
            on_host("head -c 60000000 /dev/zero > /data/disk/other || true")
        result = bed.finish(process)
        assert result.status == 1
        assert [state == "ok" for state in result["state"]] == [True, False, True, True]
        assert "No space left on device. Make room there" in result["error"][1]
        for number in (0, 2, 3):
            assert describe(bed.data(number) / "disk/set") == describe(source)
    finally:
        bed.wait_idle()
        on_host("umount /data/disk")


def test_from_another_host(bed: Bed, source: Path) -> None:
    data = os.urandom(200_000)
    (bed.data(2) / "set").mkdir()
    (bed.data(2) / "set" / "file").write_bytes(data)
    result = bed("/data/set", "/data/copy", "--from", bed.hosts[2])
    assert result.status == 0, result.errors
    for number in range(HOSTS):
        assert (bed.data(number) / "copy" / "file").read_bytes() == data
    result = bed("/data/none", "/data/copy", "--from", bed.hosts[2])
    assert result.status == 1
    assert f"host {bed.hosts[2]}: source /data/none: No such file" in result.errors


def test_a_host_joins_and_is_fed_by_its_peers(bed: Bed, source: Path) -> None:
    large = make_large(source)
    hostfile = bed.cluster.hostfile.with_name("joining")
    lines = bed.cluster.hostfile.read_text().splitlines()
    hostfile.write_text("\n".join(line for line in lines if bed.hosts[3] not in line))
    interface = plan.interface_name(bed.cluster.state.subnet)
    counter = Path("/sys/class/net", interface, "statistics/tx_bytes")
    with bed.caught(2, 4 * MB, source, "/data/set", hostfile=hostfile) as process:
        before = int(counter.read_text())
        hostfile.write_text("\n".join(lines))
    result = bed.finish(process)
    assert result.status == 0, result.errors
    assert sorted(result.hosts) == sorted(bed.hosts)
    assert f"host {bed.hosts[3]} joins" in result.errors
    for number in range(HOSTS):
        assert describe(bed.data(number) / "set") == describe(source)
    assert int(counter.read_text()) - before < 1.5 * large.stat().st_size


def test_a_host_that_its_peers_do_not_reach_is_fed_by_the_leader(bed: Bed, source: Path) -> None:
    make_large(source, 2 * MB)
    apart = bed.hosts[1]
    address = bed.cluster.address(apart)
    others = [host for host in bed.hosts if host != apart]
    for host in others:
        bed.cluster.run_on(host, ["ip", "route", "add", "unreachable", address])
    try:
        result = bed(str(source), "/data/set")
    finally:
        for host in others:
            bed.cluster.run_on(host, ["ip", "route", "del", "unreachable", address])
    assert result.status == 0, result["error"]
    assert bed.hosts[0] in result.hosts[apart]["unreached"]
    for number in range(HOSTS):
        assert describe(bed.data(number) / "set") == describe(source)


def test_shares(bed: Bed, source: Path) -> None:
    for number in range(10):
        (source / f"shard-{number}").write_bytes(os.urandom(100_000))
    result = bed(str(source), "/data/set", "--shard")
    assert result.status == 0, result.errors
    assert sorted(result["files"]) == [2, 2, 3, 3]
    found = [p.name for n in range(HOSTS) for p in (bed.data(n) / "set").iterdir()]
    assert sorted(found) == sorted(path.name for path in source.iterdir())


def test_a_stranger_gets_nothing_and_does_no_harm(bed: Bed, source: Path) -> None:
    make_large(source)
    program = (
        "import re, socket, subprocess, sys\n"
        "out = subprocess.run(['ss', '-ltnp'], capture_output=True, text=True).stdout\n"
        "port = int(re.search(r'10[.0-9]*:(\\d+) .*python', out)[1])\n"
        "address = re.search(r'(\\S+):%d ' % port, out)[1]\n"
        "sock = socket.create_connection((address, port)); sock.settimeout(30)\n"
        "sock.sendall(b'x' * 64)\n"
        "got = b''\n"
        "while piece := sock.recv(1000): got += piece\n"
        "print(len(got))"
    )
    with bed.caught(1, 2 * MB, source, "/data/set", "--plain") as process:
        done = bed.cluster.run_on(bed.hosts[1], ["python3", "-c", program])
    assert bed.finish(process).status == 0
    # A nonce, and the proof that this is the node: no word of the data.
    assert done.stdout.strip() in ("32", "64"), done.stderr
    assert describe(bed.data(3) / "set") == describe(source)


def test_a_small_disk_of_this_machine_is_no_source_of_trouble(tmp_path: Path, bed: Bed) -> None:
    """The leader writes nothing: its own disk may be full."""
    with small_disk.mounted(tmp_path / "full", "2m") as folder:
        (folder / "data").write_bytes(os.urandom(MB))
        with pytest.raises(OSError, match="No space"):
            (folder / "rest").write_bytes(bytes(4 * MB))
        assert bed(str(folder / "data"), "/data/set/data").status == 0
