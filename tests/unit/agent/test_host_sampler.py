"""What an agent measures of its host."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_elastic.agent import host_sampler
from hvd_elastic.agent.gpus import Gpus, usable_gpus
from hvd_elastic.agent.host_sampler import HostSampler, MemoryKills
from hvd_elastic.control.progress import Activity
from hvd_elastic.policy.input import Reading
from hvd_elastic.run_events import GpuSample
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import MessageDecoder, encode
from tests.unit.played_nvml import build_nvml
from tests.waiting import Clock

NVML = """
#include <string.h>
typedef struct { unsigned int gpu, memory; } use_t;
typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    *handle = (void *)(0x7fff00000000 + index); return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, use_t *use) {
    if (handle == (void *)0x7fff00000001) return 15;  /* NVML_ERROR_GPU_IS_LOST */
    use->gpu = 73; use->memory = 1; return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    memory->total = 80ULL << 30; memory->used = 20ULL << 30; memory->free = 60ULL << 30; return 0;
}
"""


def test_a_sample_has_the_figures_of_this_machine(tmp_path: Path) -> None:
    sampler = HostSampler(None, "node1")
    with (tmp_path / "some").open("wb") as file:
        file.write(b"x" * 1_000_000)
    time.sleep(0.05)
    sample = sampler.sample({})
    assert 0 <= sample.cpu <= 1
    assert 0 < sample.memory < 1
    assert sample.memory_bytes > 1 << 28
    assert min(sample.sent, sample.received, sample.read, sample.written) >= 0
    assert (sample.step_s, sample.rank_wait) == (None, None)
    assert sample.host == "node1"
    message = msg.HostSampled(sample=sample)
    line = encode(message).removesuffix(b"\n")
    assert MessageDecoder(msg.AgentToLeader, "host node1").decode(line) == message


def test_a_kill_for_lack_of_memory_is_new_for_a_while_and_once() -> None:
    counted = [3]
    kills = MemoryKills(lambda: counted[0])
    assert not kills.any_new(), "before the agent"
    counted[0] += 1
    kills.count_kills()  # its victim takes long to end
    assert kills.any_new()
    assert not kills.any_new(), "who is killed now was killed by somebody else"
    counted[0] += 1
    for _ in range(2):
        kills.count_kills()
    assert not kills.any_new(), "long ago"


def test_the_compute_time_of_a_step_leaves_waits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(host_sampler, "time", SimpleNamespace(monotonic=clock))
    sampler = HostSampler(None, "node1")
    clock.now += 10
    then = {"w": Activity(generation=1, step=100, waited_s=1.0, reading=Reading(wait_s=2.0))}
    assert sampler.sample(then).step_s is None, "there is nothing to compare with yet"
    clock.now += 10
    now = {
        "w": Activity(generation=1, step=200, waited_s=5.0, reading=Reading(wait_s=3.0)),
        "new": Activity(generation=1, step=200),
    }
    sample = sampler.sample(now)
    assert sample.step_s == pytest.approx(0.05)
    assert sample.rank_wait == pytest.approx(0.4)
    clock.now += 10
    moved = {"w": Activity(generation=2, step=300), "new": Activity(generation=1, step=200)}
    assert sampler.sample(moved).step_s is None, "one has changed the world, one has stood still"


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a library that answers as NVML does on a host with two GPUs."""
    return str(build_nvml(tmp_path_factory.mktemp("nvml"), NVML))


def test_gpus_are_asked_through_nvml(nvml: str) -> None:
    expected = GpuSample(busy=0.73, memory=0.25, memory_bytes=80 << 30)
    assert Gpus(nvml).sample_use() == [expected], "a lost GPU is left out"


def test_a_host_without_a_driver_has_no_gpus() -> None:
    assert Gpus("libno-such-library.so.1").sample_use() == []
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, "libno-such-library.so.1") == 0


@pytest.mark.parametrize(
    ("visible", "usable"),
    [
        (None, 2),
        ("1", 1),
        ("0, 1", 2),
        ("", 0),
        ("-1", 0),
        ("1,-1,0", 1),
        ("0,1,2,3", 2),
        ("MIG-a,MIG-b,MIG-c", 3),
    ],
)
def test_cuda_visible_devices_counts(nvml: str, visible: str | None, usable: int) -> None:
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert usable_gpus(given, nvml) == usable
