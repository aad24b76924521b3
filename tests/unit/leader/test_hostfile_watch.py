"""A hostfile that cannot be looked at or used, and the order of its hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_elastic.leader.hostfile_watch import HostfileWatch
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.policy.objective import Objective
from hvd_elastic.replaced_files import write_whole


def become_a_pipe(hostfile: Path) -> None:
    hostfile.unlink()
    os.mkfifo(hostfile)


def lose_its_folder(hostfile: Path) -> None:
    hostfile.parent.rename(hostfile.parent.with_name("moved"))
    hostfile.parent.touch()


@pytest.mark.parametrize(
    ("change", "told"),
    [(become_a_pipe, "cannot be looked at (not a regular file)"), (lose_its_folder, "is gone")],
)
def test_the_hosts_stay_and_it_is_told_once(
    tmp_path: Path, change: Callable[[Path], None], told: str
) -> None:
    hostfile = tmp_path / "folder" / "hosts"
    hostfile.parent.mkdir()
    hostfile.write_text("a\nb\n")
    warned: list[str] = []
    watch = HostfileWatch(hostfile, warned.append)
    watch.read()
    change(hostfile)
    assert not any(watch.changed(now) for now in range(4))
    assert warned == [f"the hostfile {hostfile} {told}, the hosts stay; put it back to change them"]
    assert list(watch.hosts) == ["a", "b"]


def test_a_host_without_a_price_changes_nothing_where_the_policy_minds_the_cost(
    tmp_path: Path,
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a price=1\n")
    told: list[str] = []
    spec = RunSpec(
        ("true",),
        "/",
        hostfile=str(hostfile),
        policy="goodput",
        objective=Objective("cost", budget=4.0),
    )
    watch = HostfileWatch.of_run(spec, told.append)
    watch.read()
    hostfile.write_text("a price=1\nbig slots=8\n")
    assert not any(watch.changed(now) for now in range(4))
    assert len(told) == 1
    assert f"the hosts stay: {hostfile} has no price= for host big; add it" in told[0]
    assert list(watch.hosts) == ["a"]


@pytest.mark.parametrize(
    ("np", "pinned", "first"), [(1, (), ["b"]), (3, (), ["c"]), (3, ("a",), ["a", "b"])]
)
def test_where_the_policy_minds_the_cost_the_cheapest_hosts_come_first(
    tmp_path: Path, np: int, pinned: tuple[str, ...], first: list[str]
) -> None:
    """Before a step was timed nothing else keeps to the budget."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2 price=9\nb price=2\nc slots=4 price=3\nd price=2\n")
    spec = RunSpec(
        ("true",), "/", hostfile=str(hostfile), policy="goodput", np=np, pin_hosts=pinned,
        objective=Objective("cost", budget=20.0),
    )  # fmt: skip
    watch = HostfileWatch.of_run(spec, lambda _: None)
    watch.read()
    found = list(watch.hosts)
    assert found[: len(first)] == first
    assert sorted(found) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("engine", "hosts"), [(None, ["a"]), ("cloud:lab", [])])
def test_only_an_engine_may_have_no_host_for_a_while(tmp_path: Path, engine, hosts) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a\n")
    told: list[str] = []
    spec = RunSpec(("true",), "/", hostfile=str(hostfile), engine=engine)
    watch = HostfileWatch.of_run(spec, told.append)
    watch.read()
    write_whole(hostfile, "\n\n")
    assert watch.changed(0.0) is (engine is not None)
    assert [*watch.hosts] == hosts
    assert len(told) == len(hosts)


def test_hosts_that_read_do_not_train(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\ncpu1 slots=0 cpus=8 labels=input\nb\n")
    told: list[str] = []
    watch = HostfileWatch(hostfile, told.append, readers=("cpu2",))
    watch.read()
    assert [(host.name, host.slots) for host in watch.slots] == [("a", 2), ("b", 1)]
    assert [*watch.input_hosts] == ["cpu1", "cpu2"]
    assert watch.input_hosts["cpu1"].cpus == 8


def test_excluded_hosts_are_left_out_whenever_they_are_listed(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nB\n")
    spec = RunSpec(("true",), "/", hostfile=str(hostfile), exclude="b,c[1-9],@old")
    told: list[str] = []
    watch = HostfileWatch.of_run(spec, told.append)
    watch.read()
    assert [*watch.hosts] == ["a"]
    write_whole(hostfile, "c1\na slots=2\nd labels=old,x\ne\ncpu1 slots=0 labels=input,old\n")
    assert watch.changed(0.0)
    assert [*watch.hosts] == ["a", "e"]
    assert not watch.input_hosts
    assert not told
    write_whole(hostfile, "b\nc2\n")
    assert not watch.changed(0.0)
    assert [*watch.hosts] == ["a", "e"]
    assert told[0].endswith(f"--exclude b,c[1-9],@old leaves no host of {hostfile}")


def test_a_host_that_trains_cannot_become_one_that_reads(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\n")
    told: list[str] = []
    watch = HostfileWatch(hostfile, told.append)
    watch.read()
    write_whole(hostfile, "a slots=2\nb slots=4 labels=input\n")
    assert not watch.changed(0.0)
    assert "host b has 4 slots" in told[0]
    assert "slots=0" in told[0]
    assert [*watch.hosts] == ["a"]


def test_a_hostfile_that_is_written_in_place_takes_no_host_away_meanwhile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a\nb\n")
    told: list[str] = []
    watch = HostfileWatch(hostfile, told.append)
    watch.read()
    with hostfile.open("w") as file:
        for number in range(3):
            now = 0.9 * number
            assert not watch.changed(now), f"it has {number} of 3 lines"
            file.write(f"n{number}\n")
            file.flush()
    assert not watch.changed(2.7)
    assert [*watch.hosts] == ["a", "b"]
    assert watch.changed(3.7)
    assert [*watch.hosts] == ["n0", "n1", "n2"]
    os.utime(hostfile, ns=(1, 1))  # saved with the same text
    assert [watch.changed(now) for now in (4.0, 5.0, 6.0)] == [False, True, False]
    write_whole(hostfile, "c\n")
    assert watch.changed(6.0), "a file that is replaced is whole"
    assert [*watch.hosts] == ["c"]
    hostfile.rename(hostfile.with_suffix(".bak"))  # as vim does
    assert not watch.changed(7.0)
    hostfile.touch()
    assert not watch.changed(7.1)
    hostfile.write_text("c\nd\n")
    assert watch.changed(7.2)
    assert [*watch.hosts] == ["c", "d"]
    assert not told
