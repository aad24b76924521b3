"""Plain Horovod on three ranks, which begin the same collectives in different orders and times."""

import os
import random
import resource
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

LATE_S = 8.0
IDLE_S = 1.0


def wait_for_all() -> None:
    """Return when every rank has imported everything, since Gloo's time limit is short here."""
    Path(f"imported-{os.environ['HOROVOD_RANK']}").touch()
    while len(list(Path.cwd().glob("imported-*"))) < int(os.environ["HOROVOD_SIZE"]):
        time.sleep(0.02)


def begin_in_different_orders() -> None:
    """Begin the same reductions in an order, and after pauses, of this rank's own."""
    own = random.Random(rank)
    for _ in range(30):
        handles = {}
        for number in own.sample(range(8), 8):
            if own.random() < 0.2:
                time.sleep(own.random() * 0.01)
            mine = torch.full((10 + number,), float(rank + number))
            handles[number] = hvd.allreduce_async_(mine, name=f"order.{number}", op=hvd.Sum)
        for number, handle in handles.items():
            total = sum(range(size)) + size * number
            assert hvd.synchronize(handle).tolist() == [total] * (10 + number)


def switches_a_second() -> float:
    """Return how often threads of this process go to sleep in a second without collectives."""
    since, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(IDLE_S)
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
    return switches / (time.monotonic() - since)


wait_for_all()
hvd.init()
rank, size = hvd.rank(), hvd.size()
last = size - 1

begin_in_different_orders()
hvd.barrier()
switches = switches_a_second()
if rank == last:
    time.sleep(LATE_S)
hvd.allreduce(torch.ones(1), name="late")
for _ in range(rank):
    hvd.allreduce(torch.ones(1), name="uneven")
assert hvd.join() == last

# One rank shuts down while another waits for a tensor and the third has nothing to do.
ended = False
if rank != last:
    if rank != int(sys.argv[1]):
        time.sleep(IDLE_S)
    try:
        hvd.allreduce(torch.ones(1), name=f"only.{rank}")
    except HorovodInternalError:
        ended = True
hvd.shutdown()
Path(f"rank-{rank}").write_text(f"{ended} {switches:.0f}")
