"""Real rings between real processes, made and broken and made again."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_elastic.control.ranks import Seat, assign_ranks
from hvd_elastic.leader.agents import rendezvous
from hvd_elastic.run_events import HostSlots
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import compress
from tests.unit.real_ranks import rank_variables, run_ranks, worlds


@pytest.mark.dist
def test_every_collective_at_three_ranks_and_again_at_two(stores: Any) -> None:
    """In the same processes; the third stays out of the second generation."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from hvd_elastic.communicator.interface import BARRIER, GRADIENTS
from hvd_elastic.communicator.ring import _LENGTH_BYTES, _SHORT_BYTES
for env in generations:
    communicator.start(env)
    r, n = communicator.rank, communicator.size
    mean = communicator.wait(communicator.reduce_async(np.array([float(r)]), "m")).item()
    parts = communicator.gather(np.full(r + 1, r), "g").tolist()
    tensors = [torch.full((2, 2), float(r)), torch.tensor([r, r]), torch.empty(0)]
    communicator.broadcast(tensors, n - 1)
    text = communicator.broadcast_bytes(b"of rank %d" % r, 1).decode()
    long = communicator.broadcast_bytes(bytes([r + 1]) * 40_000 + b"end", 0)
    assert long == bytes([1]) * 40_000 + b"end"
    for size in (0, _SHORT_BYTES - _LENGTH_BYTES, _SHORT_BYTES):
        fives = bytes([5]) * size
        assert communicator.broadcast_bytes(bytes(size) if r else fives, 0) == fives
    communicator.barrier()
    assert communicator.waiting_for == BARRIER
    begun = communicator.begun()
    counted = [begun[name] for name in ("allreduce 'm'", "allgather 'g'", BARRIER, GRADIENTS)]
    assert counted == [1, 1, 1, 0], begun
    for _ in range(2):
        for name in ("gradient.a", "gradient.b"):
            communicator.wait(communicator.reduce_async(np.zeros(1), name))
    assert communicator.waiting_for == GRADIENTS
    assert communicator.begun()[GRADIENTS] == 2
    said.append([n, mean, parts, [t.tolist() for t in tensors], text])
    communicator.stop()
"""
    said = run_ranks(body, worlds(stores, 3, 2))
    first = [3, 1.0, [0, 1, 1, 2, 2, 2], [[[2.0, 2.0], [2.0, 2.0]], [2, 2], []], "of rank 1"]
    second = [2, 0.5, [0, 1, 1], [[[1.0, 1.0], [1.0, 1.0]], [1, 1], []], "of rank 1"]
    assert said == [[first, second], [first, second], [first]]


@pytest.mark.dist
def test_a_process_starts_again_with_settings_of_horovod(stores: Any) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
os.environ |= {"HOROVOD_FUSION_THRESHOLD": "1048576", "HOROVOD_CYCLE_TIME": "2"}
for env in generations:
    communicator.start(env)
    said.append(communicator.wait(communicator.reduce_async(np.ones(3), "m")).tolist())
    communicator.stop()
"""
    assert run_ranks(body, worlds(stores, 1, 1, 1)) == [[[1.0] * 3] * 3]


@pytest.mark.dist
def test_ranks_of_a_large_world_meet_through_the_addresses_that_they_read(
    stores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    monkeypatch.setattr(rendezvous, "SMALL_WORLD", 1)
    hosts = [HostSlots("a", 1), HostSlots("b", 2), HostSlots("c", 1)]
    seats = [Seat(f"{h.name}:{slot}", h.name, slot) for h in hosts for slot in range(h.slots)]
    members = assign_ranks(seats, hosts)
    relay = rendezvous.EntryRelay(1, members)
    names = [host.name for host in hosts]

    def forward(opened: list[Any], scope: str, key: str, value: bytes) -> None:
        entry = msg.StoreEntry(1, scope, key, compress(value))
        for host, message in relay.add_entry(entry, members[int(key)].host):
            opened[names.index(host)].put_addresses(message)

    ports = {name: stores(forward) for name in names}
    variables = [rank_variables(each.rank, len(members), ports[each.host]) for each in members]
    for each, mine in zip(members, variables, strict=True):
        mine |= {"HOROVOD_HOSTNAME": each.host, "HOROVOD_GLOO_SINGLE_CONTEXT": "1"}
        mine |= {"HOROVOD_LOCAL_RANK": str(each.local_rank)}
        mine |= {"HOROVOD_LOCAL_SIZE": str(each.local_size)}
    body = """
communicator.start(generations[0])
said.append(communicator.gather(np.array([communicator.rank]), "all").tolist())
communicator.stop()
"""
    assert run_ranks(body, [variables]) == [[[0, 1, 2, 3]]] * 4


@pytest.mark.dist
def test_who_survives_a_kill_hears_of_it_and_can_go_on(stores: Any) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
import time
communicator.start(generations[0])
value = np.ones(3)
communicator.wait(communicator.reduce_async(value, "warm"))
begin = time.monotonic()
if communicator.rank == 2:
    os.kill(os.getpid(), 9)
try:
    for step in range(1000):
        communicator.wait(communicator.reduce_async(np.ones(3), f"s{step}"))
    said.append("never heard")
except GenerationBrokenError:
    # Long before Gloo's own timeout of 30 s.
    waited_s = time.monotonic() - begin
    said.append("broken" if waited_s < 20 else waited_s)
    communicator.stop(broken=True)
communicator.start(generations[1])
rank = np.array([float(communicator.rank)])
said.append(communicator.wait(communicator.reduce_async(rank, "x")).item())
communicator.stop()
"""
    said = run_ranks(body, worlds(stores, 3, 2))
    assert said == [["broken", 0.5], ["broken", 0.5], None]


@pytest.mark.dist
def test_abort_frees_a_rank_whose_peer_is_silent(stores: Any) -> None:
    """As when a cable is pulled: nobody closes anything, only we know."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
import threading, time
communicator.start(generations[0])
communicator.wait(communicator.reduce_async(np.ones(3), "warm"))
threading.Timer(0.5, communicator.abort).start()
begin = time.monotonic()
try:
    if communicator.rank == 0:
        communicator.wait(communicator.reduce_async(np.ones(3), "never"))
    else:
        while True:  # does not take part, and is let go by the abort alone
            communicator.barrier()
    said.append("came true")
except GenerationBrokenError:
    said.append(time.monotonic() - begin < 20)
    communicator.stop(broken=True)
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
    communicator.start(env)
    communicator.barrier()
    if communicator.rank == 0:
        threading.Timer(0.1, communicator.abort).start()
    try:
        if communicator.rank == 0:
            for number in range(1_000_000):
                communicator.reduce_async(torch.ones(3), f"n{number}")
        else:
            communicator.barrier()
        said.append("came true")
    except GenerationBrokenError:
        communicator.stop(broken=True)
        said.append("broken")
"""
    said = run_ranks(body, worlds(stores, *[2] * 5))
    assert said == [["broken"] * 5] * 2


@pytest.mark.dist
def test_horovod_s_thread_keeps_its_python_thread_state(stores: Any) -> None:
    """One made for each freed tensor takes a lock that Python 3.11 may leave locked in a fork."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
import ctypes
python = ctypes.pythonapi
def call(name, *arguments):
    getattr(python, name).restype = ctypes.c_void_p
    return getattr(python, name)(*map(ctypes.c_void_p, arguments))
def states():
    state, count = call("PyInterpreterState_ThreadHead", call("PyInterpreterState_Head")), 0
    while state:
        state, count = call("PyThreadState_Next", state), count + 1
    return count
for env in generations:
    before = states()
    communicator.start(env)
    started = states()
    for _ in range(3):
        communicator.broadcast([torch.zeros(3).detach()], 0)
    said.append([started - before, states() - started])
    communicator.stop()
"""
    assert run_ranks(body, worlds(stores, 2)) == [[[1, 0]], [[1, 0]]]
