"""The table for those who know Slurm: each command of it does what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.jobs.job import JobStatus
from hvd_elastic.jobs.place import ClusterFolder
from tests.paths import ROOT
from tests.unit.jobs import test_daemon
from tests.unit.jobs.test_daemon import Running

place = test_daemon.place
NUMBER = "12"
ELSEWHERE = {
    "hvd-elastic shell 12": (
        *("tests/dist/test_drains.py", "jobs_leave_drained_hosts_during_a_rescale_and_all_hosts"),
    ),
    "runclust hosts --hosts gpu3 --pty bash": (
        *("tests/ssh/test_runclust.py", "a_command_has_the_terminal"),
    ),
}
"""Commands that need a terminal and a real run or host, with the test that runs them."""


def commands() -> list[list[str]]:
    """Return the commands of the table that are run here, in its order, each as words."""
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    part = page.partition("## For those who know Slurm")[2].partition("\n## ")[0]
    rows = [row for row in part.splitlines() if row.startswith("| `s")]
    found = [re.findall(r"\| `([^`]*)` \|$", row) for row in rows]
    assert all(found), "each line has one command of ours"
    told = [command for (command,) in found]
    for command, (path, name) in ELSEWHERE.items():
        assert f"def test_{name}(" in (ROOT / path).read_text(encoding="utf-8")
        told.remove(command)
    program = "hvd-elastic "
    assert all(command.startswith(program) for command in told)
    return [shlex.split(command.removeprefix(program)) for command in told]


def test_each_command_for_those_who_know_slurm_works(
    place: ClusterFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("gpu[1-3] slots=1 labels=a100\n")
    monkeypatch.chdir(tmp_path)
    place = ClusterFolder.create("hosts")
    place.path.parent.joinpath("test", "hostfiles").rmdir()
    place.path.parent.joinpath("test").rmdir()
    daemon = Running(place, tmp_path / "hosts")
    first = test_daemon.submit(place)

    def call(words: list[str]) -> tuple[int, str]:
        status = 0
        try:
            main([str(first) if word == NUMBER else word for word in words])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        found = capsys.readouterr()
        return status, found.out + found.err

    told = {}
    table = commands()
    assert len(table) > 15
    for words in [[word.replace(f":{NUMBER}", f":{first}") for word in each] for each in table]:
        status, told[" ".join(words)] = call(words)
        assert status == 0, (words, told[" ".join(words)])
        if words[0] == "hold":
            daemon.until(lambda: daemon.job(first).status is JobStatus.QUEUED)
    daemon.until(lambda: daemon.job(first).status is JobStatus.CANCELLED)
    assert daemon.job(first).request.priority == 4.0
    assert daemon.job(first + 1).request.time_limit_s is None
    assert daemon.job(first + 2).request.time_limit_s == 8 * 3600.0
    assert daemon.job(first + 3).status is JobStatus.QUEUED  # held
    wishes = [daemon.job(first + number).request.wish.words for number in range(10, 14)]
    assert wishes == ["--hosts gpu[1-2]", "--exclude gpu3", "--labels a100", "--labels a100"]
    assert daemon.job(first + 14).request.spec["notify"] == "./mail.sh"
    assert "host gpu3 is drained: bad DIMM" in told["drain gpu3 --no-wait --reason bad DIMM"]
    assert "USER" in told["limits"]
    assert "is paused" in told["up hosts --pause"]
    daemon.down(leave_jobs=False)
