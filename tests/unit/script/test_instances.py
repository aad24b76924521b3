"""Objects of a process are found while its other threads go on."""

from __future__ import annotations

import threading
from pathlib import Path

import hvd_elastic
from hvd_elastic.script.instances import holders_of, instances_of


class Schedule:
    def __init__(self, user: object) -> None:
        self.user = user


class Slotted(Schedule):
    __slots__ = ("other",)
    other: object


def test_instances_and_holders_are_found_however_they_keep_their_attributes() -> None:
    one, two = [1], [2]
    plain, slotted, other = Schedule(one), Slotted(one), Schedule(two)
    vars(plain)["further"] = 1  # it has a dict of its own from now on
    slotted.other = two
    assert {*instances_of(Schedule)} == {plain, slotted, other}
    assert instances_of(Slotted) == [slotted]
    assert {*holders_of(one, Schedule)} == {plain, slotted}
    assert {*holders_of(two, Schedule)} == {slotted, other}


def test_a_thread_that_makes_tuples_meanwhile_does_not_fail() -> None:
    others = [[number] for number in range(300_000)]  # a script with PyTorch has as many
    failed: list[BaseException] = []
    enough = threading.Event()

    def make() -> None:
        try:
            while not enough.is_set():
                tuple(each for each in range(1000))
        except SystemError as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(5):
            instances_of(Schedule)
            holders_of(Schedule, type)
    finally:
        enough.set()
        thread.join()
    assert others
    assert not failed


def test_nothing_looks_at_all_objects() -> None:
    package = Path(hvd_elastic.__file__).parent
    names = {path.name for path in package.rglob("*.py") if "gc.get_objects" in path.read_text()}
    assert names == {"instances.py"}, "which says why"
