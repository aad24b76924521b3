from __future__ import annotations

from pathlib import Path

from hvd_elastic.cli.cluster.host_options import Chosen
from hvd_elastic.cli.cluster.newcomers import Newcomers
from hvd_elastic.cluster.run.commands import select_hosts
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.hosts.ssh import SshOptions


def test_who_is_added_to_the_hostfile_joins_once_if_chosen(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\n")

    def choose():
        return select_hosts(parse_hostfile(path), None, "x" if "x" in path.read_text() else None)

    chosen = Chosen(path, choose, choose(), SshOptions(), 4, False, False, False)
    notes: list[str] = []
    newcomers = Newcomers(chosen, notes.append)
    assert newcomers() == []
    path.write_text("b\nx\na\n")
    assert [host.name for host in newcomers()] == ["b"]
    assert newcomers() == []
    path.write_text("a slots=many\n")
    assert newcomers() == []
    path.unlink()
    assert newcomers() == []
    path.write_text("c d\n")
    newcomers()
    path.write_text("c\nd slots=2\n")
    assert [host.name for host in newcomers()] == ["c", "d"]
    assert [host.name for host in newcomers.hosts] == ["a", "b", "c", "d"]
    assert notes[0] == f"host b joins: it is in {path} now"
    assert "slots" in notes[1]
    assert notes[1].endswith("until that is right no host joins")


def test_a_hostfile_that_cannot_be_read_twice(tmp_path: Path) -> None:
    chosen = Chosen(tmp_path / "none", list, [], SshOptions(), 4, False, False, False)
    assert Newcomers(chosen, print)() == []
