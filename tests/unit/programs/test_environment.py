"""An environment gets its name when it is whole, and goes when nobody uses it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_elastic.programs import clear_left
from hvd_elastic.programs import environment as module
from hvd_elastic.programs.environment import (
    NEW,
    OLD,
    STAMP,
    describe_environment,
    identity,
    left,
    new_name,
    remove,
    seed,
    switch,
    users_of,
)
from tests import other_user
from tests.other_user import open_folder as open_folder
from tests.paths import LIMIT_S


@pytest.fixture(autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache and the runs are, if there are any."""
    folder = tmp_path_factory.mktemp("user")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(folder / "runs"))
    return folder


def make(prefix: Path, text: str) -> Path:
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(sys.executable)
    (prefix / "file").write_text(text)
    return prefix


def test_a_new_environment_begins_with_the_old_files_and_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = make(tmp_path / "env", "old")
    new = Path(new_name(str(prefix)))
    seed(str(prefix))
    assert (new / "file").samefile(prefix / "file")
    (new / "file").unlink()
    (new / "file").write_text("new")
    assert switch(str(prefix), "1") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["env"]
    assert (prefix / "file").read_text() == "new"
    # The second host with the same folder finds it done; another copy's is no answer.
    assert switch(str(prefix), "1") == ""
    monkeypatch.setattr(module, "WAIT_S", 0.0)
    assert switch(str(prefix), "2") == f"{new} is gone; call again"


def test_hosts_that_share_the_folder_switch_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = make(tmp_path / "env", "old")
    make(Path(new_name(str(prefix))), "new")
    both = threading.Barrier(2)

    def in_use(_: str) -> str:
        both.wait(LIMIT_S)
        return ""

    monkeypatch.setattr(module, "in_use", in_use)
    with ThreadPoolExecutor(2) as hosts:
        assert [*hosts.map(lambda _: switch(str(prefix), "1"), range(2))] == ["", ""]
    assert (prefix / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_a_switch_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = make(tmp_path / "env", "old")
    (prefix / STAMP).write_text("1")
    seed(str(prefix))

    rename = os.rename

    def refuse(source: str | Path, target: str | Path) -> None:
        if str(target) == str(prefix) + OLD:
            raise PermissionError
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(PermissionError):
            switch(str(prefix), "2")
    assert (prefix / STAMP).read_text() == "1", "else it counts as switched on other hosts"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env", f"env{NEW}"]
    # Killed as it was renaming.
    Path(new_name(str(prefix))).rename(f"{prefix}{NEW}-1a2b3c4d")
    paths = [each["path"] for each in left(str(prefix)) if each["name"] == "environment"]
    assert paths == [str(prefix), f"{prefix}{NEW}-1a2b3c4d"]
    seed(str(prefix))
    assert switch(str(prefix), "2") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_an_interrupted_switch_is_completed_by_the_next(tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    make(Path(str(prefix) + OLD), "old")
    make(Path(new_name(str(prefix))), "new")
    assert switch(str(prefix), "1") == ""
    assert (prefix / "file").read_text() == "new"
    assert remove(str(prefix), ["environment"])[0]["removed"]
    seed(str(prefix))
    assert not list(tmp_path.iterdir())


def test_an_environment_in_use_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    prefix = make(tmp_path / "env", "old")
    make(Path(new_name(str(prefix))), "new")
    (prefix / STAMP).touch()
    environment = {**os.environ, "HVD_ELASTIC_RUN_ID": "digits-1"}
    with subprocess.Popen(
        [str(prefix / "bin" / "python"), "-c", "print(1, flush=True); input()"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        # Another environment whose path begins alike does not count.
        assert users_of(str(tmp_path / "en")) == []
        why = f"{prefix} is in use there by run digits-1"
        assert switch(str(prefix), "1") == why
        assert describe_environment(str(prefix), None, [])["in_use"] == why
        kept, new = remove(str(prefix), ["environment"])
        assert (kept["stays"], kept["removed"], new["removed"]) == (why, False, True)
        process.communicate(b"\n")
    assert (prefix / "file").read_text() == "old"
    assert remove(str(prefix), ["environment"])[0]["removed"]


def test_hosts_with_one_disk_remove_the_cache_together(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hosts do not see the files that each other's processes have open; threads of one process do.
    monkeypatch.setattr("hvd_elastic.programs.environment.is_in_use", lambda _: False)
    for number in range(500):
        (folders / "cache/hvd_elastic" / str(number)).mkdir(parents=True)
    with ThreadPoolExecutor(3) as hosts:
        found = [*hosts.map(lambda _: remove("", ["cache"]), range(3))]
    assert {each["stays"] for host in found for each in host} == {""}
    assert not (folders / "cache/hvd_elastic").exists()


def test_what_another_host_removes_meanwhile_is_not_listed(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders / "cache/hvd_elastic").mkdir(parents=True)

    def own(path: Path) -> bool:
        path.rmdir()
        return clear_left.own(path)

    monkeypatch.setattr(module, "own", own)
    assert left("") == []


@other_user.needs_root
def test_a_process_of_another_user_counts_too(open_folder: Path) -> None:
    prefix = make(open_folder / "env", "")
    command = [str(prefix / "bin" / "python"), "-c", "print(1, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def look_as_nobody() -> None:
            assert users_of(str(prefix)) == [f"process {process.pid}"]

        other_user.call(look_as_nobody)
        process.communicate(b"\n")


def test_the_same_folder_is_told_from_a_copy(tmp_path: Path) -> None:
    prefix = make(tmp_path / "env", "")
    own = identity(str(prefix))
    assert describe_environment(str(prefix), None, own)["shared"]
    shutil.copytree(prefix, tmp_path / "copy", symlinks=True)
    found = describe_environment(str(tmp_path / "copy"), sys.executable, own)
    assert (found["shared"], found["exists"], found["kept"]) == (False, True, "")
    assert found["base"] == ".".join(map(str, sys.version_info[:3]))
    assert describe_environment(str(tmp_path / "none"), "/no/python", own)["base"] == ""
    (tmp_path / "link").symlink_to(prefix)
    assert "or a link" in describe_environment(str(tmp_path / "link"), None, [])["kept"]


@other_user.needs_root
def test_another_users_environment_and_cache_stay(tmp_path: Path, folders: Path) -> None:
    prefix = make(tmp_path / "env", "")
    (prefix / STAMP).touch()
    (folders / "cache" / "hvd_elastic").mkdir(parents=True)
    for path in (prefix, folders / "cache" / "hvd_elastic"):
        os.chown(path, 65534, 65534)
    assert "another user's" in describe_environment(str(prefix), None, [])["kept"]
    found = remove(str(prefix), ["environment", "cache"])
    assert [each["stays"] for each in found] == ["it is another user's, or a link"] * 2
    assert prefix.is_dir()


def test_runs_and_what_was_made_by_hand_are_listed_and_stay(tmp_path: Path, folders: Path) -> None:
    prefix = make(tmp_path / "env", "")
    for name in ("cache/hvd_elastic", "runs"):
        (folders / name).mkdir(parents=True)
    names = [each["name"] for each in left(str(prefix))]
    assert names == ["own environment", "cache", "runs"]
    (tmp_path / "the leader's").mkdir()  # the folder that its HVD_ELASTIC_HOME names on hosts
    (runs,) = (each for each in left("", str(tmp_path / "the leader's")) if each["name"] == "runs")
    assert runs["path"] == str(tmp_path / "the leader's")
    program = "from hvd_elastic.programs import environment; environment.main()"
    request = {"do": "remove", "prefix": str(prefix), "names": ["environment", "cache"]}
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(request).encode(), capture_output=True
    )
    found = json.loads(done.stdout)["value"]
    assert [each["removed"] for each in found] == [False, True, False]
    assert prefix.is_dir()
    assert sorted(path.name for path in folders.rglob("*")) == ["cache", "runs"]


def test_of_a_folder_of_runs_only_what_is_ours_is_removed(folders: Path) -> None:
    runs = folders / "runs"
    for part in ("runs/digits-1", "spool/digits-1", "imagenet/train"):
        (runs / part).mkdir(parents=True)
    (runs / "known_hosts").write_text("1234")
    (runs / "imagenet/train/1.jpeg").write_bytes(b"image")
    (found,) = left("")
    assert (found["bytes"], found["others"]) == (4, "imagenet")
    (found,) = remove("", ["runs"])
    assert (found["removed"], found["stays"], found["others"]) == (True, "", "imagenet")
    assert [path.name for path in runs.rglob("*")] == ["imagenet", "train", "1.jpeg"]
    shutil.rmtree(runs / "imagenet")
    assert remove("", ["runs"])[0]["others"] == ""
    assert not runs.exists()


def test_a_process_in_what_is_not_ours_does_not_keep_a_folder_of_runs(folders: Path) -> None:
    runs = folders / "runs"
    for part in ("runs/digits-1", "imagenet"):
        (runs / part).mkdir(parents=True)
    stays = []
    for part in ("imagenet", "runs/digits-1"):
        with subprocess.Popen(["sleep", "600"], cwd=runs / part) as process:
            stays.append(left("")[0]["stays"])
            process.kill()
    assert stays == ["", "a process has it in use"]


def test_a_link_in_place_of_the_runs_is_removed_and_not_what_it_leads_to(
    tmp_path: Path, folders: Path
) -> None:
    home, scratch = folders / "runs", tmp_path / "scratch"
    for folder in (home / "spool", scratch / "digits-1"):
        folder.mkdir(parents=True)
    (scratch / "digits-1" / "events").write_bytes(bytes(1_000_000))
    (home / "runs").symlink_to(scratch)
    with (scratch / "digits-1" / "events").open("rb"):
        (found,) = remove("", ["runs"])
    assert (found["removed"], found["stays"]) == (False, "a process has it in use")
    assert (home / "runs").is_symlink()
    (found,) = remove("", ["runs"])
    assert (found["removed"], found["stays"], found["others"]) == (True, "", str(scratch))
    assert found["bytes"] < 1000, "what is not removed does not count"
    assert not home.exists()
    assert (scratch / "digits-1" / "events").exists()


def test_everything_that_is_made_in_the_folder_of_runs_is_known_to_uninstall() -> None:
    package = Path(module.__file__).parents[1]
    path = re.compile(r"""(?<!Path\.)\bhome\(\)[.\w()]* / "([\w.]+)\"""")
    files = package.rglob("*.py")
    made = {name for file in files for name in path.findall(file.read_text(encoding="utf-8"))}
    assert {"runs", "known_hosts", "virtual"} < made
    assert made | {"spool"} == set(module.OF_HOME)
