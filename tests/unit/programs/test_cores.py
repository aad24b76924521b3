"""The cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_elastic.programs.usable import usable_cores


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.parametrize(
    ("limit", "cores"), [("400000 100000\n", 4), ("250000 100000\n", 3), ("max 100000\n", 64)]
)
def test_the_quota_of_a_container_counts(tmp_path: Path, limit: str, cores: int) -> None:
    written(tmp_path / "self/cgroup", "0::/\n")
    written(tmp_path / "groups/cpu.max", limit)
    assert usable_cores(tmp_path, tmp_path / "groups") == cores


def test_the_least_quota_of_all_groups_counts(tmp_path: Path) -> None:
    written(tmp_path / "self/cgroup", "0::/kubepods/pod1\n")
    written(tmp_path / "groups/kubepods/cpu.max", "200000 100000\n")
    written(tmp_path / "groups/kubepods/pod1/cpu.max", "max 100000\n")
    assert usable_cores(tmp_path, tmp_path / "groups") == 2


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("-1", 64)])
def test_the_quota_of_version_1_counts(tmp_path: Path, quota: str, cores: int) -> None:
    """In a container whose own group is mounted, under the name that it has on the machine."""
    written(tmp_path / "self/cgroup", "4:memory:/a\n1:cpu,cpuacct:/docker/f00\n")
    written(tmp_path / "groups/cpu/cpu.cfs_quota_us", quota)
    written(tmp_path / "groups/cpu/cpu.cfs_period_us", "100000")
    assert usable_cores(tmp_path, tmp_path / "groups") == cores


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path) == 64
