"""Temporary files of workers."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from hvd_elastic.agent.worker import compiler_cache, make_scratch
from tests import other_user
from tests.other_user import open_folder as open_folder


def test_what_a_killed_agent_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    left, lock = make_scratch("run", "a", environment)
    os.close(lock)
    (left / "pymp-1").mkdir()
    kept = [make_scratch(run, host, environment)[0] for run, host in (("run", "b"), ("other", "a"))]
    # A run of the same name may have another home.
    kept += [make_scratch("run", "a", environment)[0] for _ in range(2)]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert left not in kept


def test_a_folder_that_is_not_on_this_host_is_not_used(tmp_path: Path) -> None:
    made, _ = make_scratch("run", "a", {"TMPDIR": str(tmp_path / "missing")})
    made.rmdir()
    assert not (tmp_path / "missing").exists()


def test_names_are_short_however_long_the_run_id_is(tmp_path: Path) -> None:
    made, _ = make_scratch("r" * 200, "h" * 200, {"TMPDIR": str(tmp_path)})
    assert len(made.name) < 30


@pytest.fixture
def cache(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the user's caches, in one of all users such as /tmp."""
    open_folder.chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_folder / "cache"))
    return open_folder / "cache"


def test_compiled_code_is_kept_for_later_workers_of_this_user_alone(
    tmp_path: Path, cache: Path
) -> None:
    before = os.umask(0)
    try:
        made, why = compiler_cache(tmp_path)
    finally:
        os.umask(before)
    assert why == ""
    assert made == cache / "hvd_elastic" / f"torchinductor-{socket.gethostname()}"
    for folder in (made, made.parent, cache):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert compiler_cache(tmp_path) == (made, "")


@other_user.needs_root
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_of_another_user_in_the_place_of_the_compilers_cache_is_not_used(
    tmp_path: Path, cache: Path, depth: int
) -> None:
    folder = [cache, cache / "hvd_elastic", compiler_cache(tmp_path)[0]][depth]
    shutil.rmtree(cache)

    def plant() -> None:
        folder.mkdir(parents=True)
        folder.chmod(0o777)

    other_user.call(plant)
    found, why = compiler_cache(tmp_path)
    assert found.parent == tmp_path
    assert re.fullmatch(f"{cache}.* belongs to {re.escape(other_user.WORDS)}", why)


def test_a_cache_that_others_may_write_to_is_not_used(tmp_path: Path, cache: Path) -> None:
    made, _ = compiler_cache(tmp_path)
    for folder in (made, made.parent):
        folder.chmod(0o777)
        assert compiler_cache(tmp_path)[0].parent == tmp_path
        why = compiler_cache(tmp_path)[1]
        assert why.startswith(f"all users may write in {folder}, which belongs to user root")
        assert why.endswith(f": chmod o-w {folder}")
        folder.chmod(0o700)
    assert compiler_cache(tmp_path) == (made, "")


def test_without_a_folder_that_can_be_written_the_cache_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found, why = compiler_cache(tmp_path)
    assert (found.parent, why) == (tmp_path, "")
