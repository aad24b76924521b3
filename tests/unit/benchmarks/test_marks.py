"""What is made of the marks that training processes write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed.marks import (
    MarkFolder,
    Process,
    Span,
    Step,
    first_step,
    measure_change,
    newcomer_step,
    step_times,
)
from tests.paths import LIMIT_S, WORKER_PYTHONPATH


def worker(*times: tuple[float, int], host: str = "a", born: float = 0.0, slot: int = 0) -> Process:
    return Process(host, 1, born, steps=[Step(mono, size) for mono, size in times], slot=slot)


def test_no_step_no_first_step():
    assert first_step([]) is None
    assert first_step([worker()]) is None


def test_the_longest_gap_after_the_request_is_the_pause():
    # A gap of 5 s before the request does not count, nor one after the new world has settled.
    stayed = worker((1, 2), (6, 2), (6.5, 2), (7, 2), (9, 3), (9.5, 3), (20, 3))
    newcomer = worker((9, 3), (9.5, 3), (20, 3), host="b")
    change = measure_change([stayed, newcomer], asked=6.2, size=3, settle_steps=2)
    assert change is not None
    assert change.pause_s == 2.0
    assert change.survivors == 1


def test_a_pause_that_began_before_the_request_counts_in_full():
    change = measure_change([worker((1, 2), (4, 3))], asked=2.0, size=3, settle_steps=1)
    assert change is not None
    assert change.pause_s == 3.0


def test_the_worst_survivor_counts():
    first = worker((1, 2), (2, 3))
    second = worker((1, 2), (2.5, 3), host="b")
    change = measure_change([first, second], asked=1.0, size=3, settle_steps=1)
    assert change is not None
    assert (change.pause_s, change.survivors) == (1.5, 2)


def test_nothing_is_measured_before_the_new_world_has_settled():
    assert measure_change([worker((1, 2), (2, 3))], asked=1.0, size=3, settle_steps=2) is None
    assert measure_change([worker((1, 2), (2, 2))], asked=1.0, size=3, settle_steps=1) is None


def test_all_survivors_must_have_settled():
    first = worker((1, 2), (2, 3))
    late = worker((1, 2), host="b")
    assert measure_change([first, late], asked=1.0, size=3, settle_steps=1) is None
    change = measure_change([first, late], asked=1.0, size=3, settle_steps=1, victims=[("b", 0)])
    assert change is not None
    assert change.survivors == 1


def test_a_restarted_worker_carries_on_in_its_place():
    before = worker((1, 2), (2, 2))
    # It begins alone, and in the same size as before: both are the new world.
    after = worker((9, 2), (9.5, 2), born=4.0)
    killed = worker((1, 2), (2, 2), slot=1)
    change = measure_change(
        [before, after, killed], asked=2.0, size=1, settle_steps=2, victims=[("a", 1)]
    )
    assert change is not None
    assert change.pause_s == 7.0
    assert change.survivors == 1


def test_full_size_is_back_with_a_newcomers_step_not_with_the_last_old_one():
    survivor = worker((1, 2), (2.1, 2), (3, 1), (5, 2))
    spare = worker((5.2, 2), host="b")
    assert newcomer_step([survivor], asked=2.0, size=2) is None
    assert newcomer_step([survivor, spare], asked=2.0, size=2) == 5.2
    assert newcomer_step([survivor, spare], asked=2.0, size=3) is None


def test_step_times_of_a_block_do_not_reach_over_its_border():
    process = worker((0, 2), (1, 2), (2, 2), (12, 2), (14, 2), (16, 2), (26, 2), (27, 2))
    process.notes = [(0, "no commit"), (3, "commit"), (6, "no commit")]
    assert step_times(process, "commit") == [2.0, 2.0]
    assert step_times(process, "no commit") == [1.0, 1.0, 1.0]


def test_a_newcomer_is_no_survivor():
    assert measure_change([worker((2, 3), (3, 3))], asked=1.0, size=3, settle_steps=1) is None


def test_marks_are_read_while_they_grow(tmp_path: Path):
    marks = MarkFolder(tmp_path)
    marks.poll()
    assert marks.processes == []
    path = tmp_path / "a-7-0.jsonl"
    begin = {"mark": "process", "host": "a", "pid": 7, "born": 1.0, "mono": 1.1}
    path.write_text(json.dumps(begin) + '\n{"mark":"torch","mono":2.0}\n{"mark":"st')
    marks.poll()
    assert marks.processes == [Process("a", 7, 1.0, torch=2.0)]
    with path.open("a") as file:
        file.write('ep","mono":3.0,"size":2}\n')
    marks.poll()
    assert marks.processes[0].steps == [Step(3.0, 2)]


def test_what_scripts_and_tracing_add_to_the_marks_is_read(tmp_path: Path):
    lines = [
        {"mark": "process", "host": "a", "slot": 1, "pid": 7, "born": 1.0, "mono": 1.1},
        {"mark": "ready", "mono": 2.0},
        {"mark": "note", "mono": 2.5, "text": "commit"},
        {"mark": "step", "mono": 3.0, "size": 2},
        {"mark": "span", "name": "start", "begin": 3.1, "end": 3.2},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    marks = MarkFolder(tmp_path)
    marks.poll()
    (process,) = marks.processes
    assert process.lane == ("a", 1)
    assert process.ready == 2.0
    assert process.notes == [(0, "commit")]
    assert process.spans == [Span("start", 3.1, 3.2)]


def test_a_script_runs_as_if_it_were_run_directly(tmp_path: Path):
    pytest.importorskip("torch")
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, neighbour\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--x', '1'], sys.argv\n"
        "weight = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "optimizer.world_size = lambda: 5\n"
        "for _ in range(3):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
    )
    folder = tmp_path / "marks"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.testbed.marking", str(folder), str(script)]
    environment = {**os.environ, "HVD_ELASTIC_HOST": "host-1", "LOCAL_RANK": "2"}
    environment["PYTHONPATH"] = WORKER_PYTHONPATH
    environment["HVD_ELASTIC_BENCH_SLOT"] = "1"
    for name in ("HVD_ELASTIC_AGENT", "HVD_ELASTIC_LOCAL_RANK", "HOROVOD_LOCAL_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        [*command, "--x", "1"], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    marks = MarkFolder(folder)
    marks.poll()
    (process,) = marks.processes
    assert process.lane == ("host-1", 3)
    assert [step.size for step in process.steps] == [5, 5, 5]
    assert process.torch is not None
    assert process.born < process.torch < process.steps[0].mono
