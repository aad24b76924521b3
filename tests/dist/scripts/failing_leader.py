"""``hvd-elastic`` with a defect: its leader raises as soon as the file FAIL is in its folder."""

from __future__ import annotations

from pathlib import Path

from hvd_elastic.cli.app import main
from hvd_elastic.leader.leader import Leader

_look = Leader._look_at_hostfile


def _look_and_fail(leader: Leader) -> None:
    _look(leader)
    if Path("FAIL").exists():
        raise ZeroDivisionError("a defect")


Leader._look_at_hostfile = _look_and_fail  # type: ignore[method-assign, assignment]
main()
