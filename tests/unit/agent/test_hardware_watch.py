"""The agent tells the faults of its host when they change."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_elastic.agent import hardware
from hvd_elastic.agent.hardware import HardwareWatch
from hvd_elastic.run_events import Fault
from tests.paths import LIMIT_S
from tests.unit.control.test_hardware import FELL, GPU, WELL


def test_faults_are_told_when_they_change_and_when_a_number_has_doubled() -> None:
    told: list[list[Fault]] = []
    watch = HardwareWatch(told.append, pytest.fail)

    def add(now: float, **changes: Any) -> list[str]:
        told.clear()
        watch.add({**WELL, **changes}, now)
        return [f"{each.what} {each.number} {each.is_broken}" for faults in told for each in faults]

    watch.add(WELL, 0.0)
    assert told == [[]], "that there are none is told once"
    assert add(60) == []
    assert not told
    assert add(120, xids=[FELL]) == ["GPU 0 Xid 79 1 True"]
    assert add(180, xids=[FELL]) == []
    assert add(240, xids=[FELL] * 3) == ["GPU 0 Xid 79 3 True"]
    assert add(300, gpus=[{**GPU, "corrected": 1000}]) == ["GPU 0 corrected 1000 False"]
    assert add(360, gpus=[{**GPU, "corrected": 1020}]) == []
    assert add(420, gpus=[{**GPU, "corrected": 1030}]) == ["GPU 0 corrected 1030 False"]
    assert add(3500, xids=[FELL]) == ["GPU 0 Xid 79 1 True"]
    for now in (3610, 3670, 7000):
        assert add(now, xids=[FELL]) == [], "it came within the last hour"
    assert add(7300, xids=[FELL]) == ["GPU 0 Xid 79 1 False"]
    assert add(7400) == []
    assert told == [[]], "they are gone"


def test_a_process_watches_until_the_agent_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_FIRST_S", 0.0)
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "dmesg"
    told: list[list[Fault]] = []
    warned: list[str] = []

    async def watch() -> None:
        await asyncio.wait_for(HardwareWatch(told.append, warned.append).watch(), LIMIT_S)

    program.write_text("#!/bin/sh\necho 'NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen'\n")
    program.chmod(0o755)

    async def watch_for_a_while() -> None:
        task = asyncio.ensure_future(watch())
        while not told:
            await asyncio.sleep(0.02)
        watching.extend({*psutil.Process().children()} - others)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    others, watching = {*psutil.Process().children()}, list[psutil.Process]()
    asyncio.run(watch_for_a_while())
    (watcher,) = watching
    assert os.waitpid(watcher.pid, 0)[1] == 0, "the end of its input ends it"
    assert [fault.what for fault in told[0]] == ["GPU at 0000:18:00 Xid 79"]
    assert not warned
