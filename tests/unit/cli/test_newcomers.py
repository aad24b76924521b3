from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_elastic.cli.cluster.copy import Newcomers
from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.hosts.hostfile import Host, parse_hostfile
from hvd_elastic.tools.run.commands import select_hosts
from tests.waiting import until


def test_who_is_added_to_the_hostfile_joins_once_if_chosen(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\n")

    class Choosing(HostOptions):
        def read_hosts(self) -> Sequence[Host]:
            excluded = "x" if "x" in path.read_text() else None
            return select_hosts(parse_hostfile(path), None, excluded)

    chosen = Choosing(path)
    notes: list[str] = []
    newcomers = Newcomers(chosen, notes.append)
    assert newcomers() == []
    path.write_text("b\nx\n")
    assert newcomers() == []
    path.write_text("b1\nx\na\n")  # what was there is a part of this
    assert until(newcomers) == [Host("b1")]
    assert newcomers() == []
    path.write_text("a slots=many\n")
    until(lambda: newcomers() == [] and len(notes) == 2)
    path.unlink()
    assert newcomers() == []
    path.write_text("c\nd slots=2\n")
    assert [host.name for host in until(newcomers)] == ["c", "d"]
    assert [host.name for host in newcomers.hosts] == ["a", "b1", "c", "d"]
    assert notes[0] == f"host b1 joins: it is in {path} now"
    assert "slots" in notes[1]
    assert notes[1].endswith("until that is right no host joins")


def test_a_hostfile_that_cannot_be_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\n")
    chosen = HostOptions(path)
    path.unlink()
    assert Newcomers(chosen, print)() == []
