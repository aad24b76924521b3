"""The index of a folder of shards: what is read again, kept, refused, and goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.testbed.file_server import FileServer
from datasets_prep import index_shards
from hvd_elastic.data import ShardDataset, build_index, verify
from hvd_elastic.data.scanning import Task, index_shard
from hvd_elastic.errors import DataError
from tests.paths import LIMIT_S, ROOT
from tests.unit.data.shards import features, tar, texts, write_numbers

SCRIPT = ROOT / "datasets_prep/index_shards.py"
TICK_S = 0.02
"""Two files of which the second is written so much later have two times on any kernel."""


@pytest.mark.parametrize(
    ("processes", "moment", "option"),
    [(1, "reads", []), (2, "reads", ["--again"]), (2, "begins", [])],
)
def test_an_interrupted_call_says_so(
    tmp_path: Path, processes: int, moment: str, option: list[str]
) -> None:
    """Also while its processes are loaded: Python would print where each of them was."""
    shards = tmp_path / "shards"
    for number in range(2):
        tar(shards / f"{number}.tar", texts(9))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "def tell(*_):\n"
        f"    os.write(os.open({str(tmp_path / 'pipe')!r}, os.O_RDWR), b'x')\n"
        "    time.sleep(600)\n"
        f"if {moment!r} == 'reads':\n"
        "    from hvd_elastic.data import scanning\n"
        "    scanning.sha256_of = tell\n"
        "elif '--multiprocessing-fork' in sys.argv:\n"
        "    tell()\n"
    )
    words = [sys.executable, str(SCRIPT), str(shards), "--processes", str(processes), *option]
    with subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as call:
        with (tmp_path / "pipe").open("rb", buffering=0) as pipe:
            assert pipe.read(1) == b"x"
        os.killpg(call.pid, signal.SIGINT)
        same = "the same call without --again" if option else "the same call"
        said = call.communicate(timeout=LIMIT_S)[1]
        assert said == f"interrupted; {same} goes on where this one stopped\n"
    assert call.returncode == 130


@pytest.mark.parametrize("place", ["https://x/{0..1}.tar", "/d/{0..1}.tar", "https://x"])
def test_verifying_takes_a_folder(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["index_shards.py", place, "--verify"])
    with pytest.raises(SystemExit, match="2"):
        index_shards.main()
    assert "--verify takes the folder of the shards" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--again", "--classes=x", "--labels-from=0"])
def test_what_goes_with_indexing_does_not_go_with_verifying(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["index_shards.py", "/d", "--verify", option])
    with pytest.raises(SystemExit, match="2"):
        index_shards.main()
    assert f"{option.partition('=')[0]} goes with indexing" in capsys.readouterr().err


def test_the_labels_of_tar_files_count_as_they_are(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", [("k.txt", b"t"), ("k.cls", b"1")])
    with pytest.raises(DataError, match="the labels of tar shards are read as they are; --labels-"):
        build_index(tmp_path, labels_from=1)


def test_one_shard_is_no_folder(tmp_path: Path) -> None:
    shard = tar(tmp_path / "a.tar", texts(1)) / "a.tar"
    for use in (ShardDataset, build_index):
        with pytest.raises(DataError, match=r"a\.tar is a file; name its folder"):
            use(shard)


def test_what_may_be_secret_in_a_url_is_not_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether all is well or not."""
    tar(tmp_path / "shards/0.tar", texts(1))
    index = ["--index", str(tmp_path / "index"), "--processes", "1"]
    with FileServer(tmp_path / "shards").serving() as server:
        url = server.url.replace("://", "://user:PASS@")
        for words in ([f"{url}/{{0..0}}.tar?sig=SIGN", *index], [f"{url}?sig=SIGN"]):
            monkeypatch.setattr(sys, "argv", ["index_shards.py", *words])
            index_shards.main()
        monkeypatch.setattr(sys, "argv", ["index_shards.py", "http://[PASS/{0..1}.tar", *index])
        assert index_shards.main() == 1
    said = "".join(capsys.readouterr())
    assert "1 examples in 1 shards" in said
    assert "a server does not list its files" in said
    assert "a URL is not valid" in said
    assert not [word for word in ("PASS", "SIGN", "user") if word in said]


def test_an_error_names_the_field_that_cannot_be_decoded(tmp_path: Path) -> None:
    build_index(tar(tmp_path / "a.tar", [("k.txt", b"t"), ("k.json", b"{")]))
    with pytest.raises(DataError, match=r"example 'k' cannot be decoded: its json: "):
        ShardDataset(tmp_path)[0]
    with pytest.raises(DataError, match=r"example 'k'.*its json: "):
        ShardDataset(tmp_path, on_error="skip")[0]


def test_one_name_is_no_list_of_fields(tmp_path: Path) -> None:
    build_index(tar(tmp_path / "a.tar", texts(1)))
    with pytest.raises(DataError, match=r"fields is 'txt', it must be a tuple .*: \('txt',\)"):
        ShardDataset(tmp_path, fields="txt")
    with pytest.raises(DataError, match=r"optional is 'txt', it must be a tuple"):
        ShardDataset(tmp_path, optional="txt")


def test_an_index_lies_elsewhere_and_has_shards_of_subfolders(tmp_path: Path) -> None:
    shards, index = tmp_path / "shards", tmp_path / "index"
    for number in range(3):
        tar(shards / f"{number}/s-{number}.tar", texts(2, 2 * number))
    with pytest.raises(DataError, match=r"its folders 0, 1, 2 do: name one, or --subfolders"):
        build_index(shards)
    before = sorted(shards.rglob("*"))
    build_index(shards, out=index, subfolders=True, processes=2)
    verify(shards, index)
    assert sorted(shards.rglob("*")) == before
    assert list(ShardDataset(shards, index=index)) == list("012345")
    assert list(ShardDataset(f"{shards}/{{2/s-2,0/s-0}}.tar", index=index)) == list("4501")
    changed = shards / "2" / "s-2.tar"
    changed.write_bytes(changed.read_bytes().replace(b"k4", b"K4"))
    with pytest.raises(DataError, match=rf"SHA-256.*index_shards.py {shards} --index {index}"):
        verify(shards, index)
    other = write_numbers(tmp_path / "other", [3])
    with pytest.raises(DataError, match=r"shards/s-00.tar, a shard of the index in .*other"):
        ShardDataset(shards, index=other)


def test_links_to_folders_and_unreadable_ones_are_named_among_subfolders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shards = tmp_path / "shards"
    for number in range(2):
        tar(shards / f"{number}/s-{number}.tar", texts(2, 2 * number))
    (shards / "linked").symlink_to(shards / "0")
    (shards / "loop").symlink_to("loop")
    (shards / "lost+found").mkdir()
    scan, refused = os.scandir, ["lost+found"]

    def refuse(path: Any) -> Any:
        if Path(path).name in refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert len(build_index(shards, subfolders=True).shards) == 2
    assert f"{shards}: 1 links to folders are left out" in caplog.text
    refused.append("1")
    with pytest.raises(PermissionError):
        build_index(shards, subfolders=True)


def test_braces_name_some_of_the_shards(tmp_path: Path) -> None:
    for number in range(12):
        tar(tmp_path / f"s-{number:02}.tar", texts(1, number))
    build_index(tmp_path)
    assert list(ShardDataset(f"{tmp_path}/s-{{08..11}}.tar")) == ["8", "9", "10", "11"]
    assert list(ShardDataset(f"{tmp_path}/{{s-03,s-01}}.tar")) == ["3", "1"]
    with pytest.raises(DataError, match=r"lacks 2 of 4 shards, such as s-12.tar"):
        ShardDataset(f"{tmp_path}/s-{{10..13}}.tar")
    with pytest.raises(DataError, match=r"braces stand for numbers, \{000..127\}"):
        ShardDataset(f"{tmp_path}/s-{{x}}.tar")
    with pytest.raises(DataError, match=r"11..08 counts down; write 08..11"):
        ShardDataset(f"{tmp_path}/s-{{11..08}}.tar")
    with pytest.raises(DataError, match=r"names s-01.tar twice"):
        ShardDataset(f"{tmp_path}/s-{{01,01}}.tar")
    assert len(build_index(f"{tmp_path}/s-{{00..01}}.tar", out=tmp_path / "i").shards) == 2


def test_only_shards_that_have_changed_are_read_again(tmp_path: Path) -> None:
    for number in range(3):
        tar(tmp_path / f"s-{number}.tar", texts(2, 2 * number))
    time.sleep(TICK_S)
    before = build_index(tmp_path)
    tables = [tmp_path / f"s-{number}.tar.npy" for number in range(3)]
    written = [table.stat().st_mtime_ns for table in tables]
    tar(tmp_path / "s-1.tar", [*texts(2, 10), ("z.json", b"1")])
    after = build_index(tmp_path)
    assert [table.stat().st_mtime_ns == at for table, at in zip(tables, written, strict=True)] == [
        *(True, False, True),
    ]
    assert after.shards[2].sha256 == before.shards[2].sha256
    verify(tmp_path)
    dataset = ShardDataset(tmp_path, optional=("json", "txt"))
    assert [txt for txt, _ in dataset] == ["0", "1", "10", "11", None, "4", "5"]
    assert dataset[4] == (None, 1)
    (tmp_path / "s-0.tar").unlink()
    assert len(build_index(tmp_path).shards) == 2


@pytest.mark.parametrize("text", ['{"version": 2, "shards": []}', '{"a": 1}\n{"a": 2}\n', "hello"])
def test_an_index_of_another_program_is_not_overwritten(tmp_path: Path, text: str) -> None:
    tar(tmp_path / "s.tar", texts(1))
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"not an index of hvd_elastic, and is not overwritten"):
        build_index(tmp_path)
    build_index(tmp_path, out=tmp_path / "i")
    assert list(ShardDataset(tmp_path, index=tmp_path / "i")) == ["0"]


def test_shards_behind_a_url_without_an_index_are_indexed_and_read(tmp_path: Path) -> None:
    for number in range(3):
        tar(tmp_path / f"there/s-{number}.tar", texts(2, 2 * number))
    with FileServer(tmp_path / "there").serving() as server:
        pattern, index = f"{server.url}/s-{{0..2}}.tar", tmp_path / "index"
        build_index(pattern, out=index)
        assert not list(index.glob(".*"))
        for place in (pattern, server.url):
            dataset = ShardDataset(place, index=index, cache=tmp_path / "cache")
            assert list(dataset) == list("012345")
        assert server.requests == {f"s-{number}.tar": 2 for number in range(3)}
        with pytest.raises(DataError, match="a server does not list its files"):
            build_index(server.url, out=index)


def test_a_url_that_serves_web_pages_is_called_so(tmp_path: Path) -> None:
    folder = write_numbers(tmp_path / "there", [3])
    with FileServer(folder).serving() as server:
        dataset = ShardDataset(server.url, cache=tmp_path / "cache")
        for name in ("s-00.tar", "index.json"):
            (folder / name).write_text("<!DOCTYPE html><html>log in</html>")
        with pytest.raises(DataError, match=r"s-00.tar is a web page; check the URL"):
            dataset[0]
        with pytest.raises(DataError, match=r"index.json is a web page and not an index"):
            ShardDataset(server.url, cache=tmp_path / "cache")
        with pytest.raises(DataError, match=rf"^{server.url}/s-00.tar is a web page; check"):
            build_index(f"{server.url}/{{s-00,s-01}}.tar", out=tmp_path / "i")
        (folder / "s-00.tar").write_bytes(b"1" * 999)
        with pytest.raises(DataError, match=rf"^{server.url}/s-00.tar is not a whole tar file"):
            build_index(f"{server.url}/{{s-00,s-01}}.tar", out=tmp_path / "i")


def written(folder: Path) -> dict[str, int]:
    """Return when each table was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}


def test_a_killed_call_goes_on(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    for number in range(4):
        tar(shards / f"{number}.tar", texts(2, 2 * number))
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "from hvd_elastic.data import scanning\n"
        "whole = scanning.sha256_of\n"
        "def kill_at(path):\n"
        "    return os.kill(os.getpid(), 9) if path.name == '2.tar' else whole(path)\n"
        "scanning.sha256_of = kill_at\n"
    )
    words = [sys.executable, str(SCRIPT), str(shards), "--processes", "1"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with (shards / ".indexed.jsonl").open("a") as journal:
        journal.write('{"shard": {"na')  # killed in the middle of a line
    kept = written(shards)
    assert [*sorted(kept)] == ["0.tar.npy", "1.tar.npy"]
    build_index(shards)
    assert kept.items() <= written(shards).items()
    verify(shards)
    assert list(ShardDataset(shards)) == list("01234567")
    assert not list(shards.glob(".*"))


def test_a_call_behind_a_url_that_failed_fetches_only_what_is_missing(tmp_path: Path) -> None:
    for number in range(3):
        tar(tmp_path / f"there/s-{number}.tar", texts(2, 2 * number))
    with FileServer(tmp_path / "there").serving() as server:
        pattern, index = f"{server.url}/s-{{0..2}}.tar", tmp_path / "index"
        server.faults = {"s-2.tar": [404]}
        with pytest.raises(DataError, match="404"):
            build_index(pattern, out=index)
        (index / ".fetched-x").mkdir()  # of a call that was killed
        build_index(pattern, out=index)
        assert server.requests == {"s-0.tar": 1, "s-1.tar": 1, "s-2.tar": 2}
        assert not list(index.glob(".*"))
        build_index(pattern, out=index)
        assert server.requests["s-0.tar"] == 2, "it may be another one by now"


def test_a_cache_does_not_keep_the_table_of_an_earlier_index(tmp_path: Path) -> None:
    """The shard is the same, and is read otherwise because of another one."""
    folder = features(tmp_path / "there", {"label": 3})
    with FileServer(folder).serving() as server:
        build_index(folder)
        dataset = ShardDataset(server.url, cache=tmp_path / "cache", fields=("cls",))
        assert dataset[0] == 3
        features(folder, {"label": [1, 2]}, name="b.tfrecord")
        build_index(folder)
        lists = ShardDataset(server.url, cache=tmp_path / "cache")
        assert [label.tolist() for label in lists] == [[3], [1, 2]]


def test_labels_of_two_kinds_are_refused(tmp_path: Path) -> None:
    """Those of ``image/class/label`` count from 1, and those of ``label`` from 0."""
    features(tmp_path, {"image/class/label": 1})
    build_index(tmp_path)
    features(tmp_path, {"label": 1}, name="b.tfrecord")
    with pytest.raises(DataError, match=r"b\.tfrecord: labels are in image/class/label in some"):
        build_index(tmp_path)


def test_all_shards_are_read_again_on_request(tmp_path: Path) -> None:
    """Also by the plain call after one that was interrupted."""
    for number in range(3):
        tar(tmp_path / f"{number}.tar", texts(1, number))
    time.sleep(TICK_S)
    build_index(tmp_path)
    first = written(tmp_path)
    build_index(tmp_path)
    assert written(tmp_path) == first
    shard = tmp_path / "2.tar"
    whole = shard.read_bytes()
    shard.write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        build_index(tmp_path, again=True)
    second = written(tmp_path)
    assert [second[name] > at for name, at in first.items() if name[0] != "2"] == [True, True]
    shard.write_bytes(whole)
    build_index(tmp_path)
    assert {**written(tmp_path), "2.tar.npy": 0} == {**second, "2.tar.npy": 0}
    verify(tmp_path)


def test_an_index_of_an_older_release_is_not_read_and_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One gave the feature ``cls`` of TFRecord files label 0."""
    folder, table = features(tmp_path, {"cls": 3}), tmp_path / "a.tfrecord.npy"
    build_index(folder, list("abcd"))
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"version": 2', '"version": 1'))
    rows = np.load(table)
    rows["label"] = -1
    np.save(table, rows)
    for use in (ShardDataset, verify):
        with pytest.raises(DataError, match=r"index.json has version 1 of the index.*index_sh"):
            use(folder)
    monkeypatch.setattr(sys, "argv", ["index_shards.py", str(folder), "--processes", "1"])
    assert index_shards.main() == 0
    assert list(ShardDataset(folder, fields=("cls",))) == [3]
    assert "index.json was made by another release; all shards are read again" in caplog.text
    assert ShardDataset(folder).classes == tuple("abcd")
    features(folder, {"cls": 4})
    with pytest.raises(DataError, match=r"label 4, and 4 classes are in the index.json that is th"):
        build_index(folder)


def test_a_table_that_was_written_by_an_interrupted_call_is_not_that_of_the_index(
    tmp_path: Path,
) -> None:
    tar(tmp_path / "a.tar", texts(1))
    build_index(tmp_path)
    tar(tmp_path / "a.tar", texts(1, 5))
    index_shard(Task(tmp_path, "a.tar", "tar", tmp_path))
    build_index(tmp_path)
    verify(tmp_path)


def test_an_index_elsewhere_is_of_one_folder_of_shards(tmp_path: Path) -> None:
    """Two folders may hold shards of the same names, sizes and age."""
    for number in range(2):
        tar(tmp_path / f"{number}/a.tar", texts(1, number))
    for number in range(2):
        build_index(tmp_path / str(number), out=tmp_path / "index")
        verify(tmp_path / str(number), tmp_path / "index")
