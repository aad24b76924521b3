"""Scripts with Horovod's process sets end as they do with an unpatched Horovod."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.real_ranks import run_ranks, worlds

ROUNDS = 10
"""Each has two processes that end: twenty in all."""

BODY = """
import atexit
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
os.environ.update(generations[0], **{more})
first = hvd.ProcessSet([0])
hvd.init(process_sets=[first, hvd.ProcessSet([1])] if {static} else None)
if not {static}:
    hvd.add_process_set(first)
said += hvd.allreduce(torch.ones(2) * (hvd.rank() + 1), op=hvd.Sum, name="all").tolist()
if hvd.rank() == 0:
    said += hvd.allreduce(torch.ones(1), process_set=first, name="one").tolist()
"""
ENDS = BODY + "hvd.barrier()\natexit._run_exitfuncs()\n"  # a forked process does not run them
DIES = """
hvd.barrier()
if hvd.rank() == 1:
    os.kill(os.getpid(), 9)
try:
    hvd.allreduce(torch.ones(2), name="again")
except HorovodInternalError:
    said = "raised"
hvd.shutdown()
"""


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_ranks_with_process_sets_end_cleanly(stores: Any, round_number: int) -> None:
    static = round_number % 2 == 0
    more = {"HOROVOD_GLOO_SINGLE_CONTEXT": str(round_number // 2 % 2)}
    if not static:
        more["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    body = ENDS.format(static=static, more=more)
    assert run_ranks(body, worlds(stores, 2)) == [[3, 3, 1], [3, 3]]


def test_a_rank_whose_peer_dies_gets_an_error_with_process_sets_too(stores: Any) -> None:
    body = BODY.format(static=True, more={}) + DIES
    assert run_ranks(body, worlds(stores, 2)) == ["raised", None]
