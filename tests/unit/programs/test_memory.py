"""The memory that a process may use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.programs.usable import Memory, memory_kills, usable_memory
from tests.small_group import SMALL_BYTES, inside, small_group

MACHINE = Memory(64 << 30, 48 << 30)
STAT = "anon 5\n{0}active_file 1073741824\n{0}inactive_file 2147483648\n"


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    meminfo = f"MemTotal:  {64 << 20} kB\nMemAvailable:   {48 << 20} kB\nHugePages_Total:    0\n"
    written(tmp_path / "meminfo", meminfo)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "found"),
    [("max\n", MACHINE), (f"{16 << 30}\n", Memory(16 << 30, 9 << 30)), (f"{99 << 30}\n", MACHINE)],
)
def test_the_limit_of_a_container_counts(proc: Path, limit: str, found: Memory) -> None:
    """Of 10 GiB in use 3 hold files, which the kernel can read again."""
    written(proc / "self/cgroup", "0::/\n")
    written(proc / "groups/memory.max", limit)
    written(proc / "groups/memory.current", f"{10 << 30}\n")
    written(proc / "groups/memory.stat", STAT.format(""))
    assert usable_memory(proc, proc / "groups") == found


def test_the_least_of_all_groups_counts_also_of_version_1(proc: Path) -> None:
    """One of them has no limit, which is a huge number."""
    written(proc / "self/cgroup", "4:memory:/slurm/job\n1:cpu:/\n")
    for group, limit, used in (("slurm", 8 << 30, 7 << 30), ("slurm/job", 0x7FFFFFFFFFFFF000, 0)):
        written(proc / f"groups/memory/{group}/memory.limit_in_bytes", f"{limit}\n")
        written(proc / f"groups/memory/{group}/memory.usage_in_bytes", f"{used}\n")
        written(proc / f"groups/memory/{group}/memory.stat", STAT.format("total_"))
    assert usable_memory(proc, proc / "groups") == Memory(8 << 30, 4 << 30)


def test_without_control_groups_the_memory_of_the_machine_counts(proc: Path) -> None:
    assert usable_memory(proc, proc) == MACHINE


def test_kills_are_those_of_the_group_or_else_of_the_machine(proc: Path) -> None:
    groups = proc / "groups"
    assert memory_kills(proc, groups) == 0
    written(proc / "vmstat", "nr_free_pages 3547387\noom_kill 7\n")
    assert memory_kills(proc, groups) == 7
    written(proc / "self/cgroup", "0::/pod\n")
    written(groups / "pod/memory.events", "low 0\nhigh 3\nmax 9\noom 4\noom_kill 2\n")
    assert memory_kills(proc, groups) == 2
    written(proc / "self/cgroup", "4:memory:/job\n0::/\n")
    written(groups / "memory/job/memory.oom_control", "oom_kill_disable 0\noom_kill 5\n")
    assert memory_kills(proc, groups) == 5


LOOK = f"""
import subprocess, sys
from hvd_elastic.programs.usable import memory_kills, usable_memory
before = memory_kills()
code = subprocess.call([sys.executable, "-c", "b'x' * {2 * SMALL_BYTES}"])
print(*usable_memory(), code, memory_kills() - before)
"""


def test_a_real_limit_is_seen_and_kills_are_counted() -> None:
    with small_group() as group:
        command = inside(group, [sys.executable, "-c", LOOK])
        seen = subprocess.run(command, capture_output=True, check=True)
    total, available, code, kills = map(int, seen.stdout.split())
    assert total == SMALL_BYTES
    assert 0 < available < total
    assert (code, kills) == (-9, 1)
