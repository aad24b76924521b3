"""PyTorch's tensors between real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_elastic.torch.collectives import to_gather, to_reduce
from tests.unit.real_ranks import rank_variables, run_ranks, worlds

SUMMED = torch.float16, torch.float32, torch.float64, torch.int32, torch.int64
"""Types that Horovod reduces; it gathers these and integers of 8 and 16 bits."""
KINDS = (*SUMMED, torch.bool, torch.uint8, torch.int8, torch.int16, torch.bfloat16, torch.complex64)


@pytest.mark.parametrize("kind", KINDS)
def test_horovod_is_given_types_and_layouts_that_it_takes(kind: torch.dtype) -> None:
    given = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=kind).t()
    for average in (False, True):
        sent, received = to_reduce(given, average=average)
        assert sent.is_contiguous()
        assert sent.dtype in SUMMED
        own = kind if kind.is_floating_point or kind.is_complex else None
        whole = torch.float64 if average else torch.int64
        assert received(sent).dtype is (own or whole)
        assert torch.equal(received(sent).to(kind), given)
        sent.fill_(7)
        assert given.sum() != 42, "the script's own tensor stays as it is"
    sent, received = to_gather(given)
    assert sent.is_contiguous()
    assert sent.dtype in (*SUMMED, torch.uint8, torch.int8, torch.int16)
    assert torch.equal(received(torch.cat([sent, sent])), torch.cat([given, given]))
    assert received(to_gather(given[0, 0])[0]).shape == (1,)


@pytest.mark.dist
def test_ranks_that_do_not_exchange_the_same_are_all_told(stores: Any) -> None:
    """One has frozen a parameter that the other trains: no rank waits for the other for ever."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker import context
import hvd_elastic.torch as hvd
from hvd_elastic.torch.optimizer import DistributedOptimizer
os.environ.update(generations[0])
hvd.init()
ctx = context.current()
model = torch.nn.Linear(1, 1)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
for both in (True, False):
    model.weight.requires_grad_(ctx.worker.communicator.rank == 1 and not both)
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    try:
        optimizer.step()
        said.append(model.weight.grad is None)
    except ScriptError as error:
        said.append(str(error))
try:
    ctx.worker.communicator.gather(torch.zeros(2, 1 + ctx.worker.communicator.rank), "g")
except ScriptError as error:
    said.append(str(error))
"""
    said = run_ranks(body, worlds(stores, 2))
    assert said[0] == said[1]
    frozen_on_both, frozen_on_one, gathered = said[0]
    assert frozen_on_both is True
    assert "the ranks disagree about parameter 'weight': some have" in frozen_on_one
    assert "what the ranks exchange does not fit together: Mismatched ALLGATHER" in gathered


@pytest.mark.dist
def test_a_newcomer_that_dies_amid_the_hand_over_leaves_nothing_behind(stores: Any) -> None:
    """Several pieces are on their way; Horovod keeps them until it uses their numbers again."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from horovod.torch import mpi_ops
from hvd_elastic.communicator import buckets, ring
buckets.BUCKET_BYTES = 1 << 20
communicator.start(generations[0])
if communicator.rank == 2:
    scatter, seen = ring.scatter, []
    def dying(*args):
        seen.append(scatter(*args))
        if len(seen) == 5:
            os.kill(os.getpid(), 9)
    ring.scatter = dying
state = torch.full((10_000_000,), 7.0 if communicator.rank < 2 else 0.0)
try:
    communicator.hand_over([state], [False, False, True])
    said.append("came true")
except GenerationBrokenError:
    communicator.stop(broken=True)
    said.append("broken")
communicator.start(generations[1])
if communicator.rank == 1:
    state.zero_()
communicator.hand_over([state], [False, True])
said.append(len(mpi_ops._handle_map))
said.append(state.mean().item())
communicator.stop()
"""
    said = run_ranks(body, worlds(stores, 3, 2))
    assert said == [["broken", 0, 7.0], ["broken", 0, 7.0], None]


@pytest.mark.dist
@pytest.mark.parametrize("single_context", [0, 1])
def test_those_who_have_a_state_hand_it_over_in_shares(stores: Any, single_context: int) -> None:
    """Any type, cut into several messages, to two ranks that lack it, from two that have it."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from horovod.torch import local_rank
from hvd_elastic.communicator import buckets
from hvd_elastic.script import spread as spreading
from hvd_elastic.torch.checkpoint import content_of
buckets.BUCKET_BYTES = 100
communicator.start(generations[0])
lacking = [False, True, False, True]
sign = -1 if lacking[communicator.rank] else 1
tensors = [
    torch.arange(50, dtype=torch.float32).reshape(5, 10) * sign,
    torch.arange(7, dtype=torch.bfloat16) * sign,
    torch.tensor(sign, dtype=torch.int64),
    torch.empty(0),
    torch.tensor([sign > 0, True]),
    (torch.arange(12, dtype=torch.float64).reshape(3, 4) * sign).t(),
]
live = [tensor.data_ptr() for tensor in tensors]
communicator.hand_over(tensors, lacking)
assert [tensor.data_ptr() for tensor in tensors] == live
said += [tensor.float().tolist() for tensor in tensors]
own = [torch.full((30,), float(communicator.rank)).t(), torch.tensor([communicator.rank > 1])]
communicator.broadcast(own, 2)
said += [own[0].sum().item(), own[1].item(), local_rank()]

# The trained tensors of rank 1 are not whole, and rank 3 has another frozen one than the rest.
sent = []
give, take = communicator.broadcast, communicator.hand_over
def count(some):
    sent.append([len(tensor) for tensor in some])
communicator.broadcast = lambda some, root: (count(some), give(some, root))
communicator.hand_over = lambda some, lacks: (count(some), take(some, lacks))
spreading._COMPARED_BYTES = 100
trained = torch.full((60,), 0.0 if communicator.rank == 1 else 7.0)
same = torch.arange(50.0)
differs = torch.arange(40.0) + (communicator.rank == 3)
small = torch.tensor([float(communicator.rank)])
known = [True, False, False, False]
tensors = [trained, same, differs, small]
spreading.spread(tensors, known, communicator.rank != 1, communicator, 2, content_of)
said += [sent, trained.sum().item(), same.sum().item(), differs.sum().item(), small.item()]
communicator.stop()
"""
    store = stores()
    variables = [rank_variables(rank, 4, store) for rank in range(4)]
    for each in variables:
        each["HOROVOD_GLOO_SINGLE_CONTEXT"] = str(single_context)
    said = run_ranks(body, [variables])
    want = [
        [[float(10 * row + column) for column in range(10)] for row in range(5)],
        [float(value) for value in range(7)],
        1.0,
        [],
        [1.0, 1.0],
        [[float(4 * row + column) for row in range(3)] for column in range(4)],
        60.0,
        True,
    ]
    spread = [[[60], [40], [1]], 420.0, 1225.0, 780.0, 2.0]
    assert said == [[*want, rank, *spread] for rank in range(4)]
