"""Real communicators between real processes, made and broken and made again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.torch.engine import HorovodEngine, LocalEngine, dump_plain, load_plain

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 90


@pytest.fixture
def stores() -> Iterator[Any]:
    """Opens a store for each generation; all ranks are on this machine."""
    import asyncio

    from hvd_elastic.agent.rendezvous import GenerationStore

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    opened: list[GenerationStore] = []

    def open_store() -> int:
        async def body() -> int:
            store = GenerationStore(lambda *_: None)
            opened.append(store)
            return await store.open()

        return asyncio.run_coroutine_threadsafe(body(), loop).result(TIMEOUT_S)

    async def close() -> None:
        for store in opened:
            store.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    yield open_store
    asyncio.run_coroutine_threadsafe(close(), loop).result(TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "CROSS_RANK": 0}
    sizes = {"SIZE": size, "LOCAL_SIZE": size, "CROSS_SIZE": 1}
    how = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "HOSTNAME": "here"}
    where = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo"}
    return {f"HOROVOD_{k}": str(v) for k, v in {**ranks, **sizes, **how, **where}.items()}


def worlds(stores: Any, *sizes: int) -> list[list[dict[str, str]]]:
    """Generations of these sizes, each with a store of its own."""
    ports = [stores() for _ in sizes]
    return [
        [rank_variables(rank, size, port) for rank in range(size)]
        for size, port in zip(sizes, ports, strict=True)
    ]


PREAMBLE = """
import json, os, sys
import torch
from hvd_elastic.torch.engine import GenerationBrokenError, HorovodEngine
generations = json.loads(sys.argv[1])  # rank variables, one after the other
engine = HorovodEngine()
said = []
"""


def run_ranks(body: str, generations: list[list[dict[str, str]]]) -> list[Any]:
    """Run ``body`` once for each rank; returns what each left in ``said``."""
    size = len(generations[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["HOROVOD_LOG_LEVEL"] = "fatal"
    program = PREAMBLE + body + "\nprint(json.dumps(said))\n"
    processes = []
    try:
        for rank in range(size):
            mine = [generation[rank] for generation in generations if rank < len(generation)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", program, json.dumps(mine)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
        answers: list[Any] = []
        for process in processes:
            output, errors = process.communicate(timeout=TIMEOUT_S)
            if process.returncode == -9:
                answers.append(None)
                continue
            assert process.returncode == 0, errors
            answers.append(json.loads(output.strip().splitlines()[-1]))
        return answers
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.dist
def test_every_collective_at_three_ranks_and_again_at_two(stores: Any) -> None:
    """In the same processes; the third stays out of the second generation."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from hvd_elastic.torch.engine import _LENGTH_BYTES, _SHORT_BYTES, BARRIER, GRADIENTS
for env in generations:
    engine.start(env)
    r, n = engine.rank, engine.size
    mean = engine.wait(engine.reduce_async(torch.tensor([float(r)]), "m")).item()
    parts = engine.gather(torch.full((r + 1,), r), "g").tolist()
    tensors = [torch.full((2, 2), float(r)), torch.tensor([r, r]), torch.empty(0)]
    engine.broadcast(tensors, n - 1)
    text = engine.broadcast_bytes(b"of rank %d" % r, 1).decode()
    long = engine.broadcast_bytes(bytes([r + 1]) * 40_000 + b"end", 0)
    assert long == bytes([1]) * 40_000 + b"end"
    for size in (0, _SHORT_BYTES - _LENGTH_BYTES, _SHORT_BYTES):
        fives = bytes([5]) * size
        assert engine.broadcast_bytes(bytes(size) if r else fives, 0) == fives
    engine.barrier()
    assert engine.waiting_for == BARRIER
    begun = engine.begun()
    counted = [begun[name] for name in ("allreduce 'm'", "allgather 'g'", BARRIER, GRADIENTS)]
    assert counted == [1, 1, 1, 0], begun
    for _ in range(2):
        for name in ("gradient.a", "gradient.b"):
            engine.wait(engine.reduce_async(torch.zeros(1), name))
    assert engine.waiting_for == GRADIENTS
    assert engine.begun()[GRADIENTS] == 2
    said.append([n, mean, parts, [t.tolist() for t in tensors], text])
    engine.stop()
"""
    said = run_ranks(body, worlds(stores, 3, 2))
    first = [3, 1.0, [0, 1, 1, 2, 2, 2], [[[2.0, 2.0], [2.0, 2.0]], [2, 2], []], "of rank 1"]
    second = [2, 0.5, [0, 1, 1], [[[1.0, 1.0], [1.0, 1.0]], [1, 1], []], "of rank 1"]
    assert said == [[first, second], [first, second], [first]]


@pytest.mark.dist
def test_ranks_that_do_not_exchange_the_same_are_all_told(stores: Any) -> None:
    """One has frozen a parameter that the other trains: no rank waits for the other for ever."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from hvd_elastic.errors import ScriptError
from hvd_elastic.torch import context
from hvd_elastic.torch.optimizer import DistributedOptimizer
os.environ.update(generations[0])
ctx = context.initialize()
model = torch.nn.Linear(1, 1)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
for both in (True, False):
    model.weight.requires_grad_(ctx.engine.rank == 1 and not both)
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    try:
        optimizer.step()
        said.append(model.weight.grad is None)
    except ScriptError as error:
        said.append(str(error))
try:
    ctx.engine.gather(torch.zeros(2, 1 + ctx.engine.rank), "g")
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
def test_who_survives_a_kill_hears_of_it_and_can_go_on(stores: Any) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
import time
engine.start(generations[0])
value = torch.ones(3)
engine.wait(engine.reduce_async(value, "warm"))
begin = time.monotonic()
if engine.rank == 2:
    os.kill(os.getpid(), 9)
try:
    for step in range(1000):
        engine.wait(engine.reduce_async(torch.ones(3), f"s{step}"))
    said.append("never heard")
except GenerationBrokenError:
    # Long before Gloo's own timeout of 30 s.
    waited_s = time.monotonic() - begin
    said.append("broken" if waited_s < 20 else waited_s)
    engine.stop(broken=True)
engine.start(generations[1])
said.append(engine.wait(engine.reduce_async(torch.full((1,), float(engine.rank)), "x")).item())
engine.stop()
"""
    said = run_ranks(body, worlds(stores, 3, 2))
    assert said == [["broken", 0.5], ["broken", 0.5], None]


@pytest.mark.dist
def test_a_newcomer_that_dies_amid_the_hand_over_leaves_nothing_behind(stores: Any) -> None:
    """Several pieces are on their way; Horovod keeps them until it uses their numbers again."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from horovod.torch import mpi_ops
from hvd_elastic.torch import engine as module
module._BUCKET_BYTES = 1 << 20
engine.start(generations[0])
if engine.rank == 2:
    scatter, seen = module._scatter, []
    def dying(*args):
        seen.append(scatter(*args))
        if len(seen) == 5:
            os.kill(os.getpid(), 9)
    module._scatter = dying
state = torch.full((10_000_000,), 7.0 if engine.rank < 2 else 0.0)
try:
    engine.hand_over([state], [False, False, True])
    said.append("came true")
except GenerationBrokenError:
    engine.stop(broken=True)
    said.append("broken")
engine.start(generations[1])
if engine.rank == 1:
    state.zero_()
engine.hand_over([state], [False, True])
said.append(len(mpi_ops._handle_map))
said.append(state.mean().item())
engine.stop()
"""
    said = run_ranks(body, worlds(stores, 3, 2))
    assert said == [["broken", 0, 7.0], ["broken", 0, 7.0], None]


@pytest.mark.dist
def test_abort_frees_a_rank_whose_peer_is_silent(stores: Any) -> None:
    """As when a cable is pulled: nobody closes anything, only we know."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
import threading, time
engine.start(generations[0])
engine.wait(engine.reduce_async(torch.ones(3), "warm"))
threading.Timer(0.5, engine.abort).start()
begin = time.monotonic()
try:
    if engine.rank == 0:
        engine.wait(engine.reduce_async(torch.ones(3), "never"))
    else:
        while True:  # does not take part, and is let go by the abort alone
            engine.barrier()
    said.append("came true")
except GenerationBrokenError:
    said.append(time.monotonic() - begin < 20)
    engine.stop(broken=True)
"""
    said = run_ranks(body, worlds(stores, 2))
    assert said == [[True], [True]]


@pytest.mark.dist
def test_an_end_amid_a_burst_of_reductions_does_not_deadlock(stores: Any) -> None:
    """Horovod's thread frees tensors, for which it takes Python's lock, while we queue more."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
import threading
for env in generations:
    engine.start(env)
    engine.barrier()
    if engine.rank == 0:
        threading.Timer(0.1, engine.abort).start()
    try:
        if engine.rank == 0:
            for number in range(1_000_000):
                engine.reduce_async(torch.ones(3), f"n{number}")
        else:
            engine.barrier()
        said.append("came true")
    except GenerationBrokenError:
        engine.stop(broken=True)
        said.append("broken")
"""
    said = run_ranks(body, worlds(stores, *[2] * 5))
    assert said == [["broken"] * 5] * 2


def test_a_gpu_of_its_own_is_wanted_where_nccl_is(monkeypatch: pytest.MonkeyPatch) -> None:
    horovod = pytest.importorskip("horovod.torch", reason="Horovod is not built")
    engine = HorovodEngine()
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(horovod, "nccl_built", lambda: 22809)
    engine.check_device(1, 2)
    with pytest.raises(ScriptError, match=r"slot 2 has no GPU .* has 2 GPUs .*slots=2 in the"):
        engine.check_device(2, 2)
    monkeypatch.setenv("NCCL_HOSTID", "own")
    engine.check_device(2, 2)
    monkeypatch.delenv("NCCL_HOSTID")
    monkeypatch.setattr(horovod, "nccl_built", lambda: 0)
    engine.check_device(2, 2)  # by way of the CPU


def test_alone_every_collective_is_the_identity() -> None:
    engine = LocalEngine()
    value = torch.tensor([1.0, 2.0])
    engine.start({})
    assert engine.wait(engine.reduce_async(value, "x")) is value
    assert engine.gather(value, "x") is value
    assert engine.broadcast_bytes(b"x", 0) == b"x"
    engine.broadcast([value], 0)
    engine.barrier()
    engine.stop(broken=True)
    assert (engine.rank, engine.size, value.tolist()) == (0, 1, [1.0, 2.0])


def test_plain_data_travels_and_code_does_not(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, "x"], "t": torch.arange(3)}
    taken = load_plain(dump_plain(value))
    assert taken["a"] == value["a"]
    assert torch.equal(taken["t"], torch.arange(3))

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    with pytest.raises(Exception, match=r"weights_only|Weights only|Unsupported"):
        load_plain(dump_plain(Evil()))
    assert not (tmp_path / "executed").exists()


@pytest.mark.dist
@pytest.mark.parametrize("single_context", [0, 1])
def test_those_who_have_a_state_hand_it_over_in_shares(stores: Any, single_context: int) -> None:
    """Any type, cut into several messages, to two ranks that lack it, from two that have it."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from hvd_elastic.torch import engine as module, spread as spreading
module._BUCKET_BYTES = 100
engine.start(generations[0])
lacking = [False, True, False, True]
sign = -1 if lacking[engine.rank] else 1
tensors = [
    torch.arange(50, dtype=torch.float32).reshape(5, 10) * sign,
    torch.arange(7, dtype=torch.bfloat16) * sign,
    torch.tensor(sign, dtype=torch.int64),
    torch.empty(0),
    torch.tensor([sign > 0, True]),
    (torch.arange(12, dtype=torch.float64).reshape(3, 4) * sign).t(),
]
live = [tensor.data_ptr() for tensor in tensors]
engine.hand_over(tensors, lacking)
assert [tensor.data_ptr() for tensor in tensors] == live
said += [tensor.float().tolist() for tensor in tensors]
own = [torch.full((30,), float(engine.rank)).t(), torch.tensor([engine.rank > 1])]
engine.broadcast(own, 2)
said += [own[0].sum().item(), own[1].item(), engine.horovod.local_rank()]

# The trained tensors of rank 1 are not whole, and rank 3 has another frozen one than the rest.
sent = []
give, take = engine.broadcast, engine.hand_over
engine.broadcast = lambda some, root: (sent.append([len(t) for t in some]), give(some, root))
engine.hand_over = lambda some, lacks: (sent.append([len(t) for t in some]), take(some, lacks))
spreading._COMPARED_BYTES = 100
trained = torch.full((60,), 0.0 if engine.rank == 1 else 7.0)
same = torch.arange(50.0)
differs = torch.arange(40.0) + (engine.rank == 3)
small = torch.tensor([float(engine.rank)])
known = [True, False, False, False]
spreading.spread([trained, same, differs, small], known, engine.rank != 1, engine, 2)
said += [sent, trained.sum().item(), same.sum().item(), differs.sum().item(), small.item()]
engine.stop()
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
