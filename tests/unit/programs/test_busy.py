"""Who uses the cores of a host."""

from __future__ import annotations

import pytest

from hvd_elastic.programs import busy
from hvd_elastic.programs.busy import BusyProcesses
from hvd_elastic.tools.check.checks import Level, check_users
from tests import other_user
from tests.waiting import until


@other_user.needs_root
def test_a_user_without_a_job_who_uses_a_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "_LEAST_CORES", 0.001)  # others may have the cores now
    process = other_user.start("print('works', flush=True)\nwhile True: pass\n")
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "works\n"
        users = BusyProcesses()  # it may wait for a core for a while
        found = until(lambda: [each for each in users.find() if each["pid"] == process.pid])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    told = check_users(found, ["ada"])
    assert told.level is Level.WARNING
    assert "nobody has no job here and runs python" in told.detail
    assert f"(pid {process.pid}, " in told.detail
    assert check_users(found, ["nobody"]).level is Level.OK
    found[0]["command"] = "\x1b[2J"
    assert "?[2J" in check_users(found, ["ada"]).detail, "a terminal is not told what to do"
