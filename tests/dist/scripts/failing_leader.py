"""``hvd-elastic`` with a defect: its leader raises as soon as the file FAIL is in its folder."""

from __future__ import annotations

from pathlib import Path

from hvd_elastic.cli.app import main
from hvd_elastic.leader.hostfile_watch import HostfileWatch

_changed = HostfileWatch.changed


def _look_and_fail(watch: HostfileWatch, now: float) -> bool:
    if Path("FAIL").exists():
        raise ZeroDivisionError("a defect")
    return _changed(watch, now)


HostfileWatch.changed = _look_and_fail  # type: ignore[method-assign, assignment]
main()
