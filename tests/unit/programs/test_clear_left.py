"""Which locks and sockets count as left behind: those that no process uses."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_elastic.agent.worker import make_scratch
from hvd_elastic.programs import clear_left
from hvd_elastic.programs.clear_left import clear, find, remove, size_of
from tests import other_user


@pytest.fixture
def home(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Home and temporary folder, on a file system that says who has a file open."""
    tmp_path_factory.getbasetemp()  # not in this temporary folder
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hvd-test-") as folder:
        monkeypatch.setenv("HOME", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def left(home: Path) -> set[tuple[Path, str]]:
    return {(path, kind) for path, kind in find("no-such-run", "node1") if home in path.parents}


def test_a_lock_is_left_behind_when_nobody_has_it_open(home: Path) -> None:
    locks = []
    for name in ("dead", "used"):
        folder = home / ".cache" / "torch_extensions" / "py311_cpu" / name
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        locks.append(folder / "lock")
    dead, used = locks
    with used.open():
        assert left(home) == {(dead, "lock")}
        assert remove(dead) == ""
        assert left(home) == set()
    assert left(home) == {(used, "lock")}


def test_a_socket_is_left_behind_when_nobody_listens(home: Path) -> None:
    listeners = []
    for name in ("dead", "used"):
        folder = home / f"torch-shm-dir-{name}"
        folder.mkdir()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "manager.sock"))
        listener.listen()
        listeners.append(listener)
    listeners[0].close()
    with listeners[1]:
        assert left(home) == {(home / "torch-shm-dir-dead", "socket")}
        assert remove(home / "torch-shm-dir-dead") == ""
        assert left(home) == set()
    assert (home / "torch-shm-dir-used" / "manager.sock").exists()


def test_the_folder_of_an_agent_in_another_container_is_not_left_behind(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are not seen from here, and the temporary folder may be common to both."""
    monkeypatch.setattr(clear_left, "is_in_use", lambda _: False)
    folder, lock = make_scratch("no-such-run", "node1", {"TMPDIR": str(home)})
    assert clear("no-such-run", "node1", dry_run=False) == []
    os.close(lock)
    (told,) = clear("no-such-run", "node1", dry_run=True)
    assert told == {"path": str(folder), "kind": "temporary folder", "bytes": 0, "problem": ""}
    assert folder.exists()
    assert clear("no-such-run", "node1", dry_run=False) == [told]
    assert not folder.exists()


def test_the_folder_of_an_agent_is_found_in_the_callers_temporary_folder(
    home: Path, tmp_path: Path
) -> None:
    folder, lock = make_scratch("no-such-run", "node1", {"TMPDIR": str(tmp_path)})
    os.close(lock)
    (told,) = clear("no-such-run", "node1", str(tmp_path), dry_run=False)
    assert told["path"] == str(folder)
    assert not folder.exists()


@other_user.needs_root
def test_a_temporary_folder_that_is_closed_to_this_user_has_nothing_of_his(home: Path) -> None:
    (home / "closed" / "temporary").mkdir(parents=True)
    (home / "closed").chmod(0o700)

    def search() -> None:
        assert find("no-such-run", "node1", str(home / "closed" / "temporary")) == []

    other_user.call(search)


def test_no_agent_loses_its_folder_to_a_call_at_the_same_time(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clear_left, "is_in_use", lambda _: False)
    over = threading.Event()

    def keep_clearing() -> int:
        removed = 0
        while True:
            is_last = over.is_set()  # then the last folder is unlocked, and nobody else removes it
            removed += len(clear("no-such-run", "node1", dry_run=False))
            if is_last:
                return removed

    with ThreadPoolExecutor(1) as pool:
        clearing = pool.submit(keep_clearing)
        try:
            for _ in range(300):
                folder, lock = make_scratch("no-such-run", "node1", {"TMPDIR": str(home)})
                (folder / "file").touch()
                assert folder.exists()
                os.close(lock)
        finally:
            over.set()
    assert clearing.result() > 0


def test_what_several_calls_remove_at_the_same_time_is_no_problem(tmp_path: Path) -> None:
    for number in range(30):
        folder = tmp_path / "left" / str(number)
        folder.mkdir(parents=True)
        for file in range(30):
            (folder / str(file)).touch()
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(remove, [tmp_path / "left"] * 4)] == [""] * 4
    assert not (tmp_path / "left").exists()
    assert size_of(tmp_path / "left") == 0
