from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hvd_elastic.errors import RunError
from hvd_elastic.records.events import append_event
from hvd_elastic.records.json_lines import (
    EventLog,
    Follower,
    LineFollower,
    decode_record,
    read_records,
)
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize
from hvd_elastic.run_events import Metrics
from tests.paths import LIMIT_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_what_is_written_is_read(path: Path) -> None:
    fields = {"host": "nöde3", "silent_s": 4.5, "cause": "a\nb"}
    with EventLog(path) as log:
        written = log.append("host_lost", fields)
    assert written == {"t": written["t"], "mono": written["mono"], "kind": "host_lost", **fields}
    assert read_records(path) == [written]
    assert path.read_bytes().count(b"\n") == 1


def test_stamps_are_the_writers(path: Path) -> None:
    with EventLog(path) as log:
        assert log.append("warning", {"t": 1.0, "kind": "other", "message": "m"})["t"] != 1.0
    assert read_records(path)[0]["kind"] == "warning"


def test_numbers_of_other_libraries_and_nan(path: Path) -> None:
    with EventLog(path) as log:
        fields = {
            "loss": float("nan"),
            "step": np.int64(3),
            "rate": np.float32("inf"),
            "indices": np.arange(3),
            "names": {"b", "a"},
            "path": Path("x/y"),
            "nested": [1.0, {"low": float("-inf")}],
        }
        log.append("metrics", fields)
    line = path.read_text()
    assert "NaN" not in line
    assert "Infinity" not in line
    record = json.loads(line)
    assert {key: record[key] for key in fields} == {
        "loss": None, "step": 3, "rate": None, "indices": [0, 1, 2], "names": ["a", "b"],
        "path": "x/y", "nested": [1.0, {"low": None}],
    }  # fmt: skip


def test_no_file_is_no_event(path: Path) -> None:
    assert read_records(path) == []
    assert Follower(path, decode_record, last_bytes=0).poll() == []


def test_a_torn_last_line_is_skipped_and_does_not_swallow_the_next_record(path: Path) -> None:
    with EventLog(path) as log:
        log.append("a")
    with path.open("ab") as file:
        file.write(b'{"t": 3.0, "kind": "to')
    assert [record["kind"] for record in read_records(path)] == ["a"]
    with EventLog(path) as log:
        log.append("b")
        log.append("c")
    assert [record["kind"] for record in read_records(path)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe\n",
        b"[1]\n",
        b"3\n",
        b'{"no": "kind"}\n',
        b"\0" * 400 + b"\n",
        b'{"a":' + b"[" * 9999 + b"\n",
    ],
)
def test_lines_that_are_no_records_are_skipped(path: Path, line: bytes) -> None:
    path.write_bytes(b'{"kind":"a"}\n' + line + b'{"kind":"b"}\n')
    assert [record["kind"] for record in read_records(path)] == ["a", "b"]
    assert [record["kind"] for record in Follower(path, decode_record).poll()] == ["a", "b"]
    latest = Follower(path, decode_record, last_bytes=path.stat().st_size - 1).poll()
    assert [record["kind"] for record in latest] == ["b"], "the first line is not whole"


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot open .*missing/events.jsonl.*No such file"):
        EventLog(tmp_path / "missing" / "events.jsonl")


def test_a_full_disk_is_told_once_and_the_losses_afterwards(path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    log = EventLog(path)
    log.append("a")
    working, log._fd = log._fd, full
    with pytest.raises(RunError, match="No space left on device"):
        log.append("b", {"step": 1})
    assert log.append("c")["kind"] == "c"
    assert log.append("d")["kind"] == "d"
    os.close(full)
    log._fd = working
    log.append("e")
    log.append("f")
    log.close()
    records = read_records(path)
    assert [record["kind"] for record in records] == ["a", "warning", "e", "f"]
    assert "3 records before this one were lost" in records[1]["message"]


SHORT_WRITES = """
import resource, sys
from pathlib import Path
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.errors import RunError
path = Path(sys.argv[1])
log = EventLog(path)
log.append("metrics", {"step": 0})
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
part_of_a_line = 20
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + part_of_a_line, hard))
told = 0
for number in range(1, 10):
    try:
        log.append("metrics", {"step": number})
    except RunError:
        told += 1
assert log.lost > 1, log.lost
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.append("last")
print(told)
"""


def test_a_record_cut_by_a_limit_leaves_one_broken_line(path: Path) -> None:
    """A real short write: the kernel takes the part of the line that still fits."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT_WRITES, str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    records = read_records(path)
    assert [record["kind"] for record in records[-2:]] == ["warning", "last"]
    steps = [record["step"] for record in records[:-2]]
    assert steps == list(range(len(steps)))
    broken = [line for line in path.read_bytes().split(b"\n") if line and b"}" not in line[-1:]]
    assert len(broken) == 1


WRITER = """
import sys
from pathlib import Path
from hvd_elastic.records.json_lines import EventLog
log = EventLog(Path(sys.argv[1]))
number = int(sys.argv[2])
while True:
    log.append("metrics", {"number": number, "text": "x" * (number % 3000)})
    number += 1
    if number % 50 == 0:
        print(number, flush=True)
"""


def test_killing_the_writer_loses_nothing_it_wrote(path: Path) -> None:
    told = 0
    for _ in range(5):
        start = read_records(path)[-1]["number"] + 1 if told else 0
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(4):
            told = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        writer.stdout.close()
        writer.wait()
        numbers = [record["number"] for record in read_records(path)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= told


def test_threads_do_not_mix_their_lines(path: Path) -> None:
    with EventLog(path) as log:

        def write(name: int) -> None:
            for number in range(200):
                log.append("metrics", {"name": name, "number": number, "text": "y" * 500})

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_records(path)) == len(path.read_bytes().splitlines()) == 800


def test_a_follower_hands_out_each_record_once_and_waits_for_the_end_of_a_line(path: Path) -> None:
    follower = Follower(path, decode_record)
    assert follower.poll() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"kind":"a"}\n{"kind":')
        assert [record["kind"] for record in follower.poll()] == ["a"]
        assert follower.poll() == []
        file.write(b'"b"}\n')
        assert [record["kind"] for record in follower.poll()] == ["b"]


def test_a_line_follower_starts_again_when_the_file_was_replaced(path: Path) -> None:
    path.write_bytes(b"one\ntwo\n")
    follower = LineFollower(path)
    assert follower.poll() == [b"one", b"two"]
    path.write_bytes(b"new\nend")
    assert follower.poll() == [b"new"]
    assert follower.poll_rest() == [b"end"]
    assert follower.poll_rest() == []


def test_lines_longer_than_a_read_arrive_whole(path: Path) -> None:
    path.write_bytes(b"a" * 3_000_000 + b"\nb\n")
    assert [len(line) for line in LineFollower(path).poll()] == [3_000_000, 1]


def test_the_end_of_a_long_file(path: Path) -> None:
    with EventLog(path) as log:
        for step in range(1000):
            log.append("metrics", {"step": step})
    tail = Follower(path, decode_record, last_bytes=1000).poll()
    assert 5 < len(tail) < 30
    assert tail[-1]["step"] == 999


def test_a_hundred_thousand_events_take_seconds_not_minutes(tmp_path: Path) -> None:
    folder = RunFolder.create("long", root=tmp_path)
    began = time.process_time()
    with EventLog(folder.events) as log:
        for step in range(100_000):
            told = Metrics(step, 0, 0, step, 4, 100.0, values={"loss": 0.5})
            append_event(log, told)
    wrote = time.process_time()
    summary = summarize(folder.read_events())
    read = time.process_time()
    assert summary.steps == 99_999
    # Processor time of this process; generous, for small and busy machines.
    assert wrote - began < 20
    assert read - wrote < 10
