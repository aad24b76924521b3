"""What virtclust is called with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_elastic.cli.machine import virtclust
from hvd_elastic.errors import HostfileError
from hvd_elastic.virtual import VirtualCluster


class Played:
    """A cluster that notes whose cable is pulled."""

    def __init__(self, folder: Path) -> None:
        self.hostfile = folder / "hosts"
        self.cut_hosts: list[str] = []

    def cut(self, host: str) -> None:
        self.cut_hosts.append(host)

    def status(self, host: str) -> str:
        return "cut" if host in self.cut_hosts else "up"


def test_a_label_names_all_hosts_that_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Played(tmp_path)
    cluster.hostfile.write_text("vc1-1 labels=spot\nvc1-2\nvc1-3 labels=spot,a100\n")
    monkeypatch.setattr(VirtualCluster, "find", lambda name: cluster)
    virtclust.app(["cut", "@spot"], standalone_mode=False)
    assert cluster.cut_hosts == ["vc1-1", "vc1-3"]
    assert capsys.readouterr().out.splitlines() == [
        "vc1-1: its cable is pulled",
        "vc1-3: its cable is pulled",
    ]
    with pytest.raises(HostfileError, match="has the label 'none'; its labels are spot, a100"):
        virtclust.app(["cut", "@none"], standalone_mode=False)
