"""Functions and scripts that are sent to workers."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_elastic.engines.dial_in.task import Outcome, Task
from hvd_elastic.engines.dial_in.training import Sizes
from hvd_elastic.errors import RunError, UsageError


def plain(x: int, *, y: int = 0) -> int:
    return x + y


def test_a_task_survives_its_journey():
    task = Task.unpack(Task.of(plain, (2,), {"y": 3}).pack())
    assert task.run(Path()) == 5
    inner = 7
    assert Task.unpack(Task.of(lambda x: x + inner, (1,), {}).pack()).run(Path()) == 8


def test_what_cannot_be_pickled_is_named_with_the_reason():
    lock = threading.Lock()

    def train(_: object = None) -> object:
        return lock

    with pytest.raises(
        UsageError, match=r"train\(\) cannot be sent .* variable 'lock', a lock, .*pickle"
    ):
        Task.of(train, (), {}).pack()
    with pytest.raises(UsageError, match=r"plain\(\) cannot be sent .* argument 1, a lock, cannot"):
        Task.of(plain, (lock,), {}).pack()
    with pytest.raises(UsageError, match="argument 'y', a lock, cannot"):
        Task.of(plain, (1,), {"y": lock}).pack()


def test_what_is_no_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give a function, or the path"):
        Task.of(5, (), {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"nothing-here\.py cannot be read: No such file"):
        Task.of(str(tmp_path / "nothing-here.py"), (), {})
    with pytest.raises(UsageError, match="keyword arguments \\(lr\\)"):
        Task.of(__file__, (), {"lr": 0.1})
    assert Task.of(__file__, ("--lr", 0.1), {}).args == ("--lr", "0.1")


def test_a_host_that_lacks_a_module_of_the_task_says_which(monkeypatch) -> None:
    module = types.ModuleType("only_here")
    module.train = types.FunctionType(plain.__code__, {}, "train")  # type: ignore[attr-defined]
    module.train.__module__, module.train.__qualname__ = "only_here", "train"
    monkeypatch.setitem(sys.modules, "only_here", module)
    packed = Task.of(module.train, (1,), {}).pack()
    monkeypatch.delitem(sys.modules, "only_here")
    with pytest.raises(RunError, match="has no module 'only_here'"):
        Task.unpack(packed)


def test_a_value_that_cannot_be_pickled_is_an_error_with_its_type():
    outcome = Outcome.of_value(threading.Lock(), "train")
    with pytest.raises(
        RunError, match=r"rank 0: the value of train\(\), a lock, cannot be pickled"
    ):
        outcome.get("rank 0")
    assert Outcome.unpack(Outcome.of_value({"loss": 0.5}, "train").pack()).get("") == {"loss": 0.5}
    assert Outcome.unpack(Outcome.of_value(None, "train").pack()).get("") is None


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0,), "wanted number of processes is 0"),
        ((2, 3), "at least 3"),
        ((4, 1, 2), "at most 2"),
        ((2, 0), "least number of processes is 0; it must be a positive integer"),
        ((2.0,), r"wanted number of processes is 2\.0"),
        ((None,), "wanted number of processes is None"),
    ],
)
def test_numbers_of_processes_that_do_not_fit_are_refused(
    sizes: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        Sizes(*sizes)
    assert isinstance(raised.value, ValueError)


def test_numbers_of_processes_may_be_numpys():
    sizes = Sizes(np.int64(2), np.int8(1), np.uint(3))
    assert sizes == Sizes(2, 1, 3)
    assert all(type(number) is int for number in (sizes.wanted, sizes.least, sizes.most))
