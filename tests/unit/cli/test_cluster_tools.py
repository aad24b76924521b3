"""What the cluster commands make of what they are given; no hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.cli.cluster.copy import copied_in_words
from hvd_elastic.cli.cluster.host_options import HereOptions, HostOptions
from hvd_elastic.cli.cluster.host_report import Printer
from hvd_elastic.cli.cluster.run import _is_nothing
from hvd_elastic.cli.cluster.tools import (
    checkclust_main,
    copyclust_main,
    killclust_main,
    runclust_main,
)
from hvd_elastic.hosts.fanout import HostResult, Outcome
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.tools.copy.job import Copied
from tests.paths import LIMIT_S, ROOT


@pytest.mark.parametrize(("name", "nothing"), [("null", True), ("zero", False)])
def test_an_input_that_is_nothing(name: str, nothing: bool) -> None:
    with Path("/dev", name).open("rb") as file:
        assert _is_nothing(file.fileno()) is nothing


def test_an_input_that_is_empty_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as file:
        assert not _is_nothing(file.fileno())
    ours, theirs = os.pipe()
    assert not _is_nothing(ours)
    os.close(ours)
    os.close(theirs)


Refused = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Call a tool with a hostfile and words; return the error of its wrong usage."""
    (tmp_path / "hosts").write_text("127.0.0.1 port=1\n")

    def call(main: Callable[[], None], *words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tool", str(tmp_path / "hosts"), *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    "places",
    [
        ["", "/data"],
        ["--from", "127.0.0.1", "", "/data"],
        ["--pull", "cp x {dst}", ""],
        ["/etc", ""],
    ],
)
def test_an_empty_place_is_not_the_current_folder(places: list[str], refused: Refused) -> None:
    """As when the variable of a script is not set."""
    assert "''" in refused(copyclust_main, "--dry-run", *places)


def test_an_empty_run_is_none(refused: Refused) -> None:
    assert "--run '': it is empty" in refused(killclust_main, "--run", "")


def test_a_key_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("key", "hosts"):
        (tmp_path / name).write_text("node1\n")
    options = HostOptions(tmp_path / "hosts", identity=Path("~/key"))
    assert options.ssh.identity == tmp_path / "key"


EVERY_TOOL = pytest.mark.parametrize(
    ("main", "words"),
    [
        (runclust_main, ["true"]),
        (killclust_main, ["--all"]),
        (checkclust_main, []),
        (copyclust_main, ["/etc/hosts", "/data"]),
    ],
)


@EVERY_TOOL
def test_exclude_leaves_out_files_and_never_hosts(
    main: Callable[[], None], words: list[str], refused: Refused
) -> None:
    assert "--exclude-hosts" in refused(main, "--exclude", "127.0.0.1", *words)


@EVERY_TOOL
@pytest.mark.parametrize("option", ["--exclude-hosts", "-x"])
def test_hosts_are_left_out_alike_by_all_tools(
    main: Callable[[], None], words: list[str], option: str, refused: Refused
) -> None:
    assert "--exclude-hosts: host 'x' is not in" in refused(main, option, "x", *words)


def test_a_run_that_is_nowhere_is_an_error_and_one_that_has_ended_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    RunFolder.create("killed-1")
    (tmp_path / "hosts").write_text("localhost\n")

    def end(run: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["killclust", str(tmp_path / "hosts"), "--run", run])
        with pytest.raises(SystemExit) as caught:
            killclust_main()
        return int(caught.value.code or 0), capsys.readouterr().err

    status, error = end("kiled-1")
    assert status == 1
    assert "no host has a process or folder of a run 'kiled-1', and there is no such run" in error
    assert "Did you mean 'killed-1'? See: hvd-elastic list" in error
    assert end("killed-1") == (0, "")
    # A run of another machine's leader, which has processes here.
    elsewhere = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "HVD_ELASTIC_RUN_ID": "killed-elsewhere"}
    )
    assert end("killed-elsewhere") == (0, "")
    assert elsewhere.wait(timeout=LIMIT_S) < 0


@pytest.mark.parametrize(
    ("close", "out"),
    [(">&-", ""), ("2>&-", "localhost: a\n"), ("<&-", "localhost: a\n")],
)
def test_a_closed_stream_is_no_hindrance(tmp_path: Path, close: str, out: str) -> None:
    (tmp_path / "hosts").write_text("localhost\n")
    program = "from hvd_elastic.cli.start import runclust; runclust()"
    call = [sys.executable, "-c", program, str(tmp_path / "hosts"), "echo a; echo b >&2"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {close}', "sh", *call],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, out)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("copied", "dry", "words"),
    [
        (Copied(0, 0, 50_000, 0, ()), False, "50000 files up to date"),
        (Copied(1, 2_000_000_000, 0, 0, ()), False, "1 file, 2.0 GB copied (1.0 GB/s)"),
        (
            Copied(1, 12, 3, 0, ("a",)),
            True,
            "1 file, 12 B to copy, 3 files up to date, 1 to remove",
        ),
        (Copied(0, 0, 0, 2, ()), False, "2 files got another time or mode only"),
        (Copied(0, 0, 0, 0, ()), False, "0 files up to date"),
    ],
)
def test_what_a_copy_says(copied: Copied, dry: bool, words: str) -> None:
    hosts = [Host("n1")]
    chosen = HereOptions(dry_run=dry)
    result = HostResult(hosts[0], Outcome.OK, 2.0, copied)
    assert copied_in_words(result, chosen, Printer(hosts), None) == words


def test_bytes_of_a_host_are_printed_as_they_came(capfdbinary: Any) -> None:
    host = Host("n1")
    Printer([host]).lines(host, "stdout", b"a\xff\xc3\xbc".decode("utf-8", "surrogateescape"))
    assert capfdbinary.readouterr().out == b"n1: a\xff\xc3\xbc\n"


def test_uninstall_of_this_machine_lists_first_and_keeps_runs(tmp_path: Path) -> None:
    """Without a hostfile; what was made here by hand is not removed either.

    In a small environment, since the size of each file of it is looked at.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    path = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    for name in ("cache/hvd_elastic/wheels", "home/runs/digits-1", "home/imagenet"):
        (tmp_path / name).mkdir(parents=True)
    folders = {"XDG_CACHE_HOME": f"{tmp_path}/cache", "HVD_ELASTIC_HOME": f"{tmp_path}/home"}
    folders["PYTHONPATH"] = path

    def uninstall(*words: str) -> subprocess.CompletedProcess[str]:
        python = str(tmp_path / "env/bin/python")
        command = [python, "-m", "hvd_elastic.cli.app", "uninstall", *words]
        return subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **folders}, timeout=LIMIT_S
        )

    wrong = uninstall("--only", "everything")
    assert wrong.returncode == 2
    assert "--only everything: there is no such part; give environment, cache" in wrong.stderr
    listed = uninstall()
    shared = "stays, unless you give --only cache; all environments of this user share it"
    assert f"cache  {tmp_path}/cache/hvd_elastic  0 B  {shared}" in listed.stdout
    runs = "stays, unless you give --only runs; not ours, and stays: imagenet"
    assert f"runs  {tmp_path}/home  0 B  {runs}" in listed.stdout
    assert uninstall("--yes").returncode == 0
    assert (tmp_path / "cache/hvd_elastic/wheels").is_dir()
    done = uninstall("--only", "cache", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"cache  {tmp_path}/cache/hvd_elastic  0 B  removed" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("[ch]*/*")) == ["imagenet", "runs"]
