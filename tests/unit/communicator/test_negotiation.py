"""Ranks of Horovod negotiate when all have something to exchange, and sleep until then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.real_ranks import run_ranks, worlds

pytestmark = pytest.mark.dist
START = """
import random, resource, time
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
communicator.start(generations[0])
rank, size = hvd.rank(), hvd.size()

def error_of(name):
    try:
        hvd.allreduce(torch.ones(1), name=name)
    except HorovodInternalError:
        return "told"
    return "reduced"
"""


@pytest.fixture(autouse=True)
def _horovod() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built")


def test_ranks_that_begin_in_different_orders_exchange_all(stores: Any) -> None:
    body = """
own = random.Random(rank)
for _ in range(30):
    handles = {}
    for number in own.sample(range(8), 8):
        if own.random() < 0.2:
            time.sleep(own.random() * 0.01)
        mine = torch.full((10 + number,), float(rank + number))
        handles[number] = hvd.allreduce_async_(mine, name=f"sum.{number}", op=hvd.Sum)
    sums = {number: hvd.synchronize(handle) for number, handle in handles.items()}
    said.append([(sums[number] == 3 + 3 * number).all().item() for number in range(8)])
hvd.barrier()
for _ in range(rank):
    hvd.allreduce(torch.ones(1), name="uneven")
said.append(hvd.join())
communicator.stop()
"""
    for said in run_ranks(START + body, worlds(stores, 3)):
        assert said == [[True] * 8] * 30 + [2]


def test_a_rank_without_collectives_sleeps(stores: Any) -> None:
    body = """
communicator.barrier()
since, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
time.sleep(1)
switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
said.append(switches / (time.monotonic() - since))
communicator.barrier()
communicator.stop()
"""
    # Gloo's threads look at their sockets 100 times a second; a cycle of 1 ms makes it thousands.
    assert max(said[0] for said in run_ranks(START + body, worlds(stores, 3))) < 600


def test_a_rank_may_be_late_by_more_than_the_time_limit_of_gloo(
    stores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "15")
    body = """
if rank == 2:
    time.sleep(16)
said.append(error_of("late"))
communicator.stop()
"""
    assert run_ranks(START + body, worlds(stores, 3)) == [["reduced"]] * 3


def test_a_frozen_rank_is_not_waited_for_without_end(
    stores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "15")
    body = """
import signal
frozen = communicator.gather(np.array([os.getpid()]), "processes").tolist()[2]
if rank == 2:
    os.kill(frozen, signal.SIGSTOP)
said.append(error_of("with a frozen rank"))
os.kill(frozen, signal.SIGCONT)
communicator.stop(broken=True)
"""
    assert run_ranks(START + body, worlds(stores, 3)) == [["told"]] * 3


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_shutdown_reaches_a_rank_that_waits_and_one_that_sleeps(
    waiting: int, stores: Any
) -> None:
    body = f"""
if rank != 2:
    time.sleep(0 if rank == {waiting} else 1)
    said.append(error_of(f"only.{{rank}}"))
communicator.stop()
"""
    assert run_ranks(START + body, worlds(stores, 3)) == [["told"], ["told"], []]


def test_a_shutdown_by_one_rank_needs_nothing_of_ranks_that_sleep(
    stores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank waits for a tensor that the others lack, so it has voted before it shuts down."""
    monkeypatch.setenv("DOWN", str(tmp_path / "down"))
    body = """
from pathlib import Path
down = Path(os.environ["DOWN"])
if rank == 2:
    pending = hvd.allreduce_async_(torch.ones(1), name="only.2")
    time.sleep(0.5)
    communicator.stop()
    down.touch()
else:
    while not down.exists():
        time.sleep(0.02)
    said.append(error_of("later"))
    communicator.stop()
"""
    assert run_ranks(START + body, worlds(stores, 3)) == [["told"], ["told"], []]
