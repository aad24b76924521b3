"""The loader, with several ranks simulated in one process by several contexts."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import c_bool
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from hvd_elastic.data import Mixture
from hvd_elastic.data import Stream as DataStream
from hvd_elastic.errors import ScriptError
from hvd_elastic.input.data_order import Place
from hvd_elastic.model.sharding import Blocks, block_order, epoch_order
from hvd_elastic.torch.data import DataLoader
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.wire.messages import UseInput, WorkerOptions
from hvd_elastic.worker.input_times import InputTimes
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.batch_bounds import batch_limits
from hvd_elastic.worker.planning.planner import Planner
from hvd_elastic.worker.progress import Progress
from hvd_elastic.worker.script_data import ScriptData
from hvd_elastic.worker.step import Pass, Step
from hvd_elastic.worker.worker import DataSets
from tests.paths import LIMIT_S, WORKER_PYTHONPATH
from tests.waiting import until


class Numbers:
    """Example i is the pair (i, 10 i)."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return index, 10 * index


class NumbersAtOnce(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:
        raise AssertionError("__getitems__ is there to be used")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [(i, 10 * i) for i in indices]


class FakeLoopWatch:
    """Undoes nothing."""

    def loop_begins(self, *, in_step: bool) -> int:
        return 1

    def body_ended(self, *, voided: bool) -> None: ...

    def loop_ended(self, *, within_epoch: bool) -> None: ...

    def loop_left(self, loop: int, *, within_epoch: bool) -> None: ...

    def is_current(self, loop: int) -> bool:
        return True


@dataclass
class FakeContext:
    """One rank's context and worker; ``boundary`` runs at each step boundary, as a rescale does."""

    rank: int = 0
    size: int = 1
    generation: int = 1
    audit: bool = True
    waited_s: float = 0.0
    progress: Progress = field(default_factory=Progress)
    handed: list[Pass] = field(default_factory=list)
    marked: int = 0
    registered: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    warned_of: set[str] = field(default_factory=set)
    boundary: Any = None
    rollback: FakeLoopWatch = field(default_factory=FakeLoopWatch)
    step: Step = field(default_factory=Step)
    data: ScriptData = field(default_factory=ScriptData)
    input_times: InputTimes = field(default_factory=InputTimes)
    options: WorkerOptions = field(default_factory=WorkerOptions)
    link: Any = None
    data_sets: DataSets = field(default_factory=DataSets)
    mode: Mode = Mode.ALONE
    has_ranks = True
    frontend = TorchFrontend()

    @property
    def worker(self) -> FakeContext:
        return self

    communicator = worker

    @property
    def reading(self) -> Progress:
        return self.progress

    def check_has_ranks(self, what: str) -> None: ...

    def refuse_open_period(self) -> None: ...

    def count_committed(self) -> None: ...

    def step_boundary(self) -> None:
        if self.boundary is not None:
            self.boundary(self)

    def hand_out(self, batch: Pass) -> None:
        self.handed.append(batch)

    def pass_ends(self) -> None:
        raise AssertionError("each step is one pass")

    def body_left(self) -> None: ...

    def mark_consumed(self) -> None:
        self.marked += 1
        self.consume()

    def register_data(self, examples: int, dropped: int, planner: Planner) -> None:
        self.registered.append(examples)

    def warn_once(self, message: str, of: str = "") -> None:
        if self.rank == 0 and (of or message) not in self.warned_of:
            self.warned_of.add(of or message)
            self.warnings.append(message)

    def consume(self) -> None:
        """What the optimizer does after its step."""
        self.progress.advance(self.handed[-1].step_examples)


def fake(*args: Any, **options: Any) -> Any:
    """Return a :class:`FakeContext`, in place of a real one."""
    return FakeContext(*args, **options)


class World:
    """Ranks in lockstep: each has its context, loader and iterator; ranks come and go."""

    def __init__(self, n: int, batch_size: int, dataset: Any = None, **options: Any) -> None:
        self.batch_size, self.options = batch_size, options
        self.dataset = Numbers(n) if dataset is None else dataset
        self.progress = Progress()
        self.generation = 0
        self.ranks: list[tuple[Any, Any, Iterator[Any]]] = []
        self.read: list[int] = []
        self.steps = 0

    def resize(self, size: int) -> None:
        """Some ranks go, others are new; those that stay do so in place, with another rank."""
        self.generation += 1
        for _, gone, _ in self.ranks[:-size]:
            gone.close()
        self.ranks = self.ranks[-size:]
        for rank, (context, _, _) in enumerate(self.ranks):
            context.rank, context.size, context.generation = rank, size, self.generation
        for rank in range(len(self.ranks), size):
            # A newcomer takes its progress from the others.
            context = fake(rank, size, self.generation, progress=replace(self.progress))
            loader: Any = DataLoader(self.dataset, self.batch_size, context=context, **self.options)
            self.ranks.append((context, loader, iter(loader)))

    def step(self, *, indices_are_values: bool = True) -> bool:
        """One global step on all ranks; False if the epoch is over, which all must agree on."""
        shares = [share for _, _, it in self.ranks if (share := next(it, None)) is not None]
        if not shares:
            return False
        assert len(shares) == len(self.ranks)
        batches = [context.handed[-1] for context, _, _ in self.ranks]
        assert len({b.step_examples for b in batches}) == 1
        assert sum(b.weight for b in batches) == pytest.approx(len(batches))
        most = max(len(values) for values, _ in shares)
        assert {loader.largest_share() for _, loader, _ in self.ranks} == {most}
        for (values, tens), batch in zip(shares, batches, strict=True):
            assert tens.tolist() == [10 * i for i in values.tolist()]
            if indices_are_values:
                assert batch.indices == values.tolist()  # what was fetched is what was told
            assert (batch.weight == 0.0) is batch.padding
            if not batch.padding:
                self.read += values.tolist()
        for context, _, _ in self.ranks:
            context.consume()
        self.progress = replace(self.ranks[0][0].progress)
        assert all(context.progress == self.progress for context, _, _ in self.ranks)
        self.steps += 1
        return True

    def next_epoch(self) -> None:
        self.progress.next_epoch()
        self.read = []
        for place, (context, loader, _) in enumerate(self.ranks):
            context.progress.next_epoch()
            self.ranks[place] = (context, loader, iter(loader))

    def close(self) -> None:
        for _, loader, _ in self.ranks:
            loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shares_may_change_between_any_two_steps(num_workers: int) -> None:
    """Those that readers have fetched ahead are dropped."""
    options = {"num_workers": num_workers, "prefetch_factor": 2} if num_workers else {}
    world = World(100, 12, shuffle=True, unequal_shares=True, **options)
    try:
        for parts in [(), (9, 3), (9, 3), (2, 10), (), (3, 3, 6), (6, 6)]:
            if len(parts or (0, 0)) != len(world.ranks):
                world.resize(len(parts or (0, 0)))
            for _, loader, _ in world.ranks:
                loader.planner.balance.parts = parts
            assert world.step()
            read = [len(context.handed[-1].indices or []) for context, _, _ in world.ranks]
            assert read == list(parts or (6, 6))
        while world.step():
            pass
        assert sorted(world.read) == list(range(100))
    finally:
        world.close()


@given(
    n=st.integers(1, 120),
    batch_size=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
)
@settings(max_examples=60)
def test_each_epoch_is_read_exactly_once_whatever_the_world_does(
    n: int, batch_size: int, sizes: list[int], seed: int, shuffle: bool
) -> None:
    world = World(n, batch_size, seed=seed, shuffle=shuffle)
    schedule = iter(sizes)
    world.resize(next(schedule))
    for epoch in range(2):
        while world.step():
            if (size := next(schedule, None)) is not None:
                world.resize(size)
        order = epoch_order(seed, epoch, n)(np.arange(n)) if shuffle else np.arange(n)
        assert world.read == order.tolist()
        assert world.progress.position == n
        world.next_epoch()
    assert world.progress.examples == 2 * n


def test_an_order_of_the_scripts_own_is_read_whatever_the_world_does() -> None:
    def by_length(epoch: int) -> list[int]:
        return [*range(epoch, 60, 2), *range(1 - epoch, 60, 2)]

    world = World(60, 8, order=by_length)
    world.resize(2)
    for epoch in range(2):
        for size in (3, 1, 2):
            world.step()
            world.resize(size)
        while world.step():
            pass
        assert world.read == by_length(epoch)
        world.next_epoch()

    context = fake(audit=False)
    weighted: Any = DataLoader(Numbers(5), 2, order=lambda _: [4, 4, 0, 4], context=context)
    assert (len(weighted), context.registered) == (2, [4])
    found = []
    for values, _ in weighted:
        found += values.tolist()
        context.consume()
    assert found == [4, 4, 0, 4]
    with pytest.raises(ScriptError, match=r"--audit, .* has some several times"):
        DataLoader(Numbers(5), 2, order=lambda _: [4, 4, 0, 4], context=fake())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": [0, 1]}, "is a list: give a function that returns the indices of an epoch"),
        ({"order": range, "shuffle": True}, "with shuffle=True: .* leave shuffle out"),
        ({"order": lambda _: 7}, r"order\(0\) must return the indices of epoch 0"),
        ({"order": lambda _: []}, "returns no index"),
        ({"order": lambda e: [0.5, 1]}, "returns a float64 array"),
        ({"order": lambda e: [0, 9]}, "returns the index 9, and the data set has 5 examples"),
    ],
)
def test_an_order_that_is_none_is_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        next(iter(DataLoader(Numbers(5), 2, context=fake(audit=False), **options)))


def test_an_order_that_changes_its_length_is_explained() -> None:
    context = fake(audit=False, progress=Progress(epoch=1))
    loader: Any = DataLoader(Numbers(5), 2, order=lambda e: [0] * (3 - e), context=context)
    with pytest.raises(ScriptError, match=r"order\(1\) returns 2 indices, and 3 for epoch 0"):
        next(iter(loader))


class NumbersInBlocks(Numbers):
    blocks = Blocks((20, 0, 31, 9, 40), 2)


def test_blocks_are_read_in_the_same_order_at_every_world_size_from_the_middle_too() -> None:
    dataset = NumbersInBlocks(100)
    order = block_order(5, 0, dataset.blocks.sizes, 2)(np.arange(100)).tolist()
    for sizes in ((1,), (2,), (3,), (7,), (1, 2, 3, 7), (7, 3, 2, 1)):
        world = World(100, 12, dataset, seed=5, shuffle=True)
        schedule = iter(sizes)
        world.resize(next(schedule))
        while world.step():
            if (size := next(schedule, None)) is not None:
                world.resize(size)
        assert world.read == order
        world.close()
    plain = World(100, 12, dataset)
    plain.resize(2)
    while plain.step():
        pass
    assert plain.read == list(range(100)), "shuffle=False reads in the order of the data set"


def test_blocks_that_are_not_the_data_set_are_explained() -> None:
    with pytest.raises(ScriptError, match="has 101 examples, and its blocks have 100 together"):
        DataLoader(NumbersInBlocks(101), 12, shuffle=True, context=fake())


class Prefetched(Numbers):
    blocks = Blocks((20, 13, 27, 15, 25), 2)

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.told: list[list[int]] = []

    def prefetch_blocks(self, blocks: list[int]) -> None:
        self.told.append(list(blocks))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_data_set_is_told_which_blocks_come_next(shuffle: bool) -> None:
    """Whatever the world does: those that the order reads, each before it does."""
    dataset = Prefetched(100)
    world = World(100, 4, dataset, seed=5, shuffle=shuffle)
    block_of = np.repeat(np.arange(5), dataset.blocks.sizes)
    sizes = iter((1, 3, 2))
    world.resize(2)
    for _ in range(2):
        while world.step():
            coming = dataset.told[-1]
            read = block_of[world.read[-4:]].tolist()
            assert {*read} <= {*coming[:4]}
            assert read[0] in coming[: 2 if shuffle else 1], "no step later than it is read"
            assert len(coming) >= 6, "of the next epoch too"
            if (size := next(sizes, None)) is not None:
                world.resize(size)
        world.next_epoch()
    loaders, groups = 4, 3 if shuffle else 5
    assert len(dataset.told) <= 2 * loaders * groups, "only when others come than before"
    world.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mixture_goes_on_from_epoch_to_epoch_whatever_the_world_does(num_workers: int) -> None:
    mixture = Mixture([(Numbers(30), 2), (Numbers(50), 1)], length=40)
    world = World(40, 12, mixture, num_workers=num_workers)
    sizes = iter((3, 1, 2))
    world.resize(2)
    try:
        for epoch in range(3):
            used: list[int] = []
            while world.step(indices_are_values=False):
                used += [i for context, _, _ in world.ranks for i in context.handed[-1].indices]
                if (size := next(sizes, None)) is not None:
                    world.resize(size)
            assert sorted(used) == list(range(40)), "each place once, as the audit counts"
            expected = mixture.__getitems__(range(40 * epoch, 40 * epoch + 40))
            assert world.read == [value for value, _ in expected]
            world.next_epoch()
    finally:
        world.close()


def numbers_of_share(epoch: int, share: int, start: int) -> Iterator[tuple[int, int]]:
    return ((i, 10 * i) for i in range(1000 * epoch + 100 * share + start, 10**9))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_read_once_whatever_the_world_does(num_workers: int) -> None:
    stream = DataStream(numbers_of_share, length=60, shares=4, chunk=3)
    world = World(60, 12, stream, num_workers=num_workers)
    sizes = iter((3, 1, 4, 2))
    world.resize(2)
    try:
        for epoch in range(3):
            while world.step(indices_are_values=False):
                if (size := next(sizes, None)) is not None:
                    world.resize(size)
            share = np.arange(15) + 1000 * epoch
            assert (
                sorted(world.read) == np.concatenate([share + 100 * s for s in range(4)]).tolist()
            )
            world.next_epoch()
    finally:
        world.close()
    with pytest.raises(ScriptError, match="a Stream can only be read in its own order; leave"):
        DataLoader(stream, 12, shuffle=True, context=fake())


def test_another_order_in_the_middle_of_an_epoch_is_refused() -> None:
    def read(progress: Progress, dataset: Any, **options: Any) -> Any:
        context = fake(progress=Progress.from_dict(progress.as_state()))
        options = {"shuffle": True, "seed": 5, **options}
        loader: Any = DataLoader(dataset, 20, context=context, **options)
        read = iter(loader)
        next(read)
        context.consume()
        return context.progress

    class OtherWindow(NumbersInBlocks):
        blocks = Blocks(NumbersInBlocks.blocks.sizes, 3)

    class OtherData(NumbersInBlocks):
        order_key = "weights"

    class SameInArray(NumbersInBlocks):
        sizes: Any = np.array(NumbersInBlocks.blocks.sizes)
        blocks = Blocks(sizes, NumbersInBlocks.blocks.window)

    first = NumbersInBlocks(100)
    middle = read(Progress(), first)
    for same in (first, SameInArray(100)):
        assert read(middle, same).position == 40
    for dataset, options, said in (
        (OtherWindow(100), {}, "seed=5, shuffle=True, shuffle_window=3"),
        (OtherData(100), {}, "shuffle_window=2"),
        (Mixture([(first, 1)]), {"shuffle": False}, "100 examples, seed=5, shuffle=False"),
        (Numbers(100), {}, "shuffle=True"),
        (first, {"seed": 6}, "seed=6, shuffle=True, shuffle_window=2"),
        (first, {"shuffle": False}, "seed=5, shuffle=False"),
    ):
        with pytest.raises(ScriptError, match=rf"epoch 0 was begun in another .*{said}[)] some of"):
            read(middle, dataset, **options)
        # Unknown before the first step; and another epoch may have another order.
        assert read(replace(middle, order_hash=0), dataset, **options).position == 40
        assert read(replace(middle, position=0, epoch=1), dataset, **options).position == 20
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$\.order_hash`"):
        Progress.from_dict({**middle.as_state(), "order_hash": "x"})


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n", [10**7, 10**12, sys.maxsize // 10])
def test_a_huge_dataset_takes_no_more_memory_than_a_small_one(n: int, shuffle: bool) -> None:
    tracemalloc.start()
    world = World(n, 1000, seed=1, shuffle=shuffle)
    for size in (1, 3, 2):
        world.resize(size)
        assert world.step()
    order = epoch_order(1, 0, n, shuffle=shuffle)(np.arange(3000))
    assert world.read == order.tolist()
    world.close()
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_an_epoch_of_many_examples_is_read_exactly_once_through_rescales() -> None:
    n = 80_000
    world = World(n, 7_000, seed=1, shuffle=True)
    sizes = iter([1, 3, 3, 2, 1, 4, 2])
    world.resize(2)
    while world.step():
        if (size := next(sizes, None)) is not None:
            world.resize(size)
    assert world.read == epoch_order(1, 0, n)(np.arange(n)).tolist()
    assert sorted(world.read) == list(range(n))


@pytest.mark.parametrize("persistent", [False, True])
def test_exactly_once_with_reading_processes(persistent: bool) -> None:
    world = World(
        90, 8, shuffle=True, seed=3, num_workers=2, prefetch_factor=2, persistent_workers=persistent
    )
    schedule = iter([1, 1, 2, 2, 1, 2])
    world.resize(2)
    for epoch in range(2):
        while world.step():
            if (size := next(schedule, None)) is not None:
                world.resize(size)
        assert world.read == epoch_order(3, epoch, 90)(np.arange(90)).tolist()
        world.next_epoch()
    world.close()


@given(
    n=st.integers(1, 100),
    batch_size=st.integers(1, 30),
    before=st.integers(1, 5),
    after=st.integers(1, 9),
    steps=st.integers(0, 8),
)
@settings(max_examples=40)
def test_a_restart_at_another_size_reads_exactly_the_rest(
    n: int, batch_size: int, before: int, after: int, steps: int
) -> None:
    first = World(n, batch_size, shuffle=True, seed=1)
    first.resize(before)
    for _ in range(steps):
        if not first.step():
            break
    second = World(n, batch_size, shuffle=True, seed=1)
    second.progress = first.progress
    second.resize(after)
    said = second.ranks[0][1].steps_left()
    while second.step():
        pass
    assert first.read + second.read == epoch_order(1, 0, n)(np.arange(n)).tolist()
    assert second.steps == said


def test_padding_is_said_with_its_indices_when_ranks_outnumber_examples() -> None:
    world = World(3, 64)
    world.resize(8)
    assert world.step()
    assert not world.step()
    padded = [context.handed[0] for context, _, _ in world.ranks if context.handed[0].padding]
    assert len(padded) == 7
    # Two, so that batch normalisation works on what is read again.
    assert all(batch.weight == 0.0 and batch.indices == [1, 2] for batch in padded)


def test_length_is_a_whole_epoch_and_steps_left_is_the_rest() -> None:
    context = fake(progress=Progress(position=64))
    loader: Any = DataLoader(Numbers(100), 32, context=context)
    assert (len(loader), loader.steps_left(), loader.position) == (4, 2, 64)
    assert len(list(loader)) == 2


def test_habits_of_samplers_are_told_what_to_write() -> None:
    loader: Any = DataLoader(Numbers(100), 32, context=fake())
    with pytest.raises(AttributeError, match=r"Leave sampler.set_epoch\(\) out"):
        loader.sampler.set_epoch(1)


def test_length_before_the_ranks_are_known_is_that_of_one_rank() -> None:
    context = fake(size=8)
    loader: Any = DataLoader(Numbers(100), 32, context=context)
    assert len(loader) == 3  # the rest of four examples is too little for eight ranks
    context.worker.has_ranks = False
    assert len(loader) == 4


def test_drop_last_leaves_the_short_step_out() -> None:
    context = fake(size=3)
    loader: Any = DataLoader(Numbers(100), 32, drop_last=True, context=context)
    assert len(loader) == len(list(loader)) == 3
    assert context.progress.position == 96


def test_a_script_without_our_optimizer_is_marked_when_it_comes_back() -> None:
    context = fake()
    loader: Any = DataLoader(Numbers(10), 4, context=context)
    batches = iter(loader)
    next(batches)
    assert context.marked == 0
    next(batches)
    assert (context.marked, context.progress.position) == (1, 4)


def test_a_batch_that_was_looked_at_and_not_used_comes_again() -> None:
    context = fake()
    loader: Any = DataLoader(Numbers(10), 4, context=context)
    peeked, _ = next(iter(loader))
    assert [values.tolist() for values, _ in loader][:1] == [peeked.tolist()]
    assert context.progress.position == 10


def test_the_boundary_comes_before_every_batch_and_not_after_the_last() -> None:
    seen: list[int] = []
    context = fake(boundary=lambda c: seen.append(c.progress.position))
    loader: Any = DataLoader(Numbers(10), 4, context=context)
    assert len(list(loader)) == 3
    assert seen == [0, 4, 8]


def test_a_rescale_inside_the_boundary_takes_effect_on_the_next_share() -> None:
    def grow(context: FakeContext) -> None:
        if context.progress.position == 16:
            context.rank, context.size, context.generation = 1, 2, 2

    context = fake(boundary=grow)
    loader: Any = DataLoader(Numbers(32), 16, num_workers=1, context=context)
    assert [values.tolist() for values, _ in loader] == [list(range(16)), list(range(24, 32))]


class ReadByKeptProcesses(Numbers):
    """Tells what is read; index 4 takes until the world has changed."""

    handle = -1
    wanted: Any = None

    def __init__(self, n: int, told: int) -> None:
        super().__init__(n)
        self.told = told
        self.begun = RawValue(c_bool)

    def __getitem__(self, index: int) -> tuple[int, int]:
        assert self.handle == os.getpid(), "set by worker_init_fn"
        os.write(self.told, f"{index} ".encode())
        self.begun.value |= index == 4
        while index == 4 and self.wanted.value < 2:
            time.sleep(0.001)
        return super().__getitem__(index)


def test_processes_are_kept_while_the_world_changes_and_skip_what_is_of_no_use() -> None:
    reader, writer = os.pipe()
    pids: list[list[int]] = []

    def start(_: int) -> None:
        os.write(writer, b"started ")
        info: Any = get_worker_info()
        info.dataset.handle = os.getpid()

    def change(context: FakeContext) -> None:
        if context.progress.position:
            pids.append(loader._plain._pids())
        if context.progress.position == 4:
            until(lambda: dataset.begun.value)
            context.rank, context.size, context.generation = 1, 2, 2

    dataset = ReadByKeptProcesses(36, writer)
    loader: Any = DataLoader(
        *(dataset, 4),
        num_workers=1,
        prefetch_factor=4,
        worker_init_fn=start,
        context=fake(boundary=change),
    )
    dataset.wanted = loader._plain._wanted
    read = [values.tolist() for values, _ in loader]
    os.close(writer)
    with os.fdopen(reader) as told:
        words = told.read().split()
    assert read == [[0, 1, 2, 3], *([first, first + 1] for first in range(6, 36, 4))]
    second_of_old_world = range(4, 8)
    assert words[0] == "started"
    assert [*map(int, words[1:])] == [*range(4), *second_of_old_world, *chain(*read[1:])]
    (pid,) = pids[0]
    assert pids == len(pids) * [[pid]]
    assert not Path(f"/proc/{pid}").exists(), "it ends with the loop"


class Augmented(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, [random.random(), float(np.random.random()), float(torch.rand(()))]


@pytest.mark.parametrize("slow_s", [0.0, 0.5])
def test_random_numbers_of_kept_processes_are_those_of_new_ones(slow_s: float) -> None:
    """Those of one too that is not ready before it is asked for other passes."""

    def begin_slowly(number: int) -> None:
        time.sleep(number * slow_s)

    def change(context: FakeContext) -> None:
        if context.progress.position == 16:
            context.rank, context.size, context.generation = 1, 2, 2

    options: Any = {"num_workers": 2, "seed": 3, "worker_init_fn": begin_slowly}
    changed: Any = DataLoader(Augmented(64), 16, context=fake(boundary=change), **options)
    later = fake(1, 2, progress=Progress(position=16))
    new: Any = DataLoader(Augmented(64), 16, context=later, **options)
    kept = [(values.tolist(), torch.stack(drawn).tolist()) for values, drawn in changed]
    expected = [(values.tolist(), torch.stack(drawn).tolist()) for values, drawn in new]
    assert len(expected) == 3
    assert kept[1:] == expected
    assert kept[0][1] != kept[1][1]


def test_an_interruption_at_the_boundary_is_the_scripts_to_see_and_reading_goes_on_after() -> None:
    class InterruptionError(Exception):
        pass

    def interrupt(context: FakeContext) -> None:
        if context.progress.position == 4 and context.generation == 1:
            raise InterruptionError

    context = fake(boundary=interrupt)
    loader: Any = DataLoader(Numbers(12), 4, num_workers=1, context=context)
    read: list[int] = []
    with pytest.raises(InterruptionError):
        read.extend(int(value) for values, _ in loader for value in values)
    context.generation = 2
    for values, _ in loader:
        read += values.tolist()
    assert read == list(range(12))


def test_state_taken_over_from_a_later_epoch_ends_this_one() -> None:
    def take_over(context: FakeContext) -> None:
        if context.progress == Progress(1, 0, 4, 4):
            context.progress = Progress(3, 1, 0, 12)

    context = fake(boundary=take_over)
    loader: Any = DataLoader(Numbers(12), 4, context=context)
    assert len(list(loader)) == 1
    assert context.progress.epoch == 1


def test_iterating_twice_in_an_epoch_is_explained() -> None:
    context = fake()
    loader: Any = DataLoader(Numbers(8), 4, context=context)
    assert len(list(loader)) == 2
    with pytest.raises(ScriptError, match=r"all 8 examples of epoch 0 .* hvd\.epochs"):
        list(loader)
    context.progress.next_epoch()
    assert len(list(loader)) == 2


def test_an_epoch_resumed_at_its_end_is_simply_over() -> None:
    context = fake(progress=Progress(2, 0, 8, 8))
    loader: Any = DataLoader(Numbers(8), 4, context=context)
    assert list(loader) == []
    # The training function runs again after a failure late in the epoch (validation, say).
    context.generation += 1
    assert list(loader) == []


def test_a_second_loader_in_an_epoch_is_refused() -> None:
    context = fake()
    training: Any = DataLoader(Numbers(8), 4, context=context)
    bigger: Any = DataLoader(Numbers(20), 4, context=context)
    smaller: Any = DataLoader(Numbers(4), 4, context=context)
    list(training)
    with pytest.raises(ScriptError, match=r"two loaders .* torch\.utils\.data\.DataLoader"):
        list(bigger)
    with pytest.raises(ScriptError, match="stands at example 8, but the loader's dataset has 4"):
        list(smaller)


def test_indices_are_those_of_getitems_and_a_collate_function_sees_samples_only() -> None:
    context = fake()
    loader: Any = DataLoader(
        NumbersAtOnce(6), 4, collate_fn=lambda samples: samples, context=context
    )
    assert list(loader) == [[(0, 0), (1, 10), (2, 20), (3, 30)], [(4, 40), (5, 50)]]
    assert [batch.indices for batch in context.handed] == [[0, 1, 2, 3], [4, 5]]


def test_without_audit_the_dataset_is_the_scripts_own_and_no_indices_are_told() -> None:
    context = fake(audit=False)
    loader: Any = DataLoader(
        Numbers(6), 4, num_workers=1, worker_init_fn=_want_own_dataset, context=context
    )
    assert [values.tolist() for values, _ in loader] == [[0, 1, 2, 3], [4, 5]]
    assert [batch.indices for batch in context.handed] == [None, None]


def test_with_audit_a_worker_init_fn_still_sees_its_dataset() -> None:
    context = fake(audit=True)
    loader: Any = DataLoader(
        Numbers(6), 6, num_workers=1, worker_init_fn=_want_own_dataset, context=context
    )
    assert len(list(loader)) == 1


def _want_own_dataset(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.dataset.n == 6  # type: ignore[attr-defined]


def test_spawned_workers_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", WORKER_PYTHONPATH)
    context = fake()
    loader: Any = DataLoader(
        Numbers(6), 6, num_workers=1, multiprocessing_context="spawn", context=context
    )
    assert [values.tolist() for values, _ in loader] == [[0, 1, 2, 3, 4, 5]]


def test_reading_leaves_the_scripts_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    loader: Any = DataLoader(Numbers(6), 3, shuffle=True, context=fake())
    list(loader)
    assert torch.rand(3).tolist() == expected


def test_all_passes_of_a_step_come_from_one_reader() -> None:
    """Input hosts join in the middle of a step."""
    context = fake(audit=False)
    loader: Any = DataLoader(Numbers(12), 4, context=context)
    place = Place(0, (0, 0, 1), loader.planner.cut)
    following = place._replace(start=4)
    (first, _), _ = loader._read(context, place, following, is_first=True)
    context.link = SimpleNamespace(input=UseInput("", []))
    (second, _), _ = loader._read(context, place, following, is_first=False)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    (again, _), _ = loader._read(context, place, following, is_first=True)
    assert loader._shared._reader is not None
    assert again.tolist() == [0, 1, 2, 3]
    loader.close()


def test_the_passes_of_a_step_read_its_whole_share_where_it_cannot_be_divided() -> None:
    loader: Any = DataLoader(Numbers(16), 11, context=fake())
    loader.planner.passes = lambda *_: 3
    place = Place(0, (0, 0, 1), loader.planner.cut)
    passes = list(loader._order.indices(place, Progress()))
    assert [len(indices) for indices in passes] == [3, 4, 4, 1, 2, 2]
    assert [*chain(*passes)] == list(range(16))
    # A planner that samples gradients divides some steps only: those that the loop divides.
    loader.planner.passes = lambda step, *_: 1 + step % 2
    passes = list(loader._order.indices(place, Progress(step=1)))
    assert [len(indices) for indices in passes] == [5, 6, 5]
    # Divided, padding would be too small for batch normalisation.
    padded = place._replace(start=11, world=(0, 7, 8))
    assert list(loader._order.indices(padded, Progress(step=1))) == [[15]]


def test_loader_is_registered_once_for_each_context() -> None:
    context = fake()
    loader: Any = DataLoader(Numbers(6), 3, context=context)
    list(loader)
    assert context.registered == [6]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {"batch_size": 4}, r"\(Stream\) cannot be read by index, .* map-style"),
        (iter([1]), {"batch_size": 4}, "cannot be read by index"),
        (Unsized(), {"batch_size": 4}, r"\(Unsized\) has no length"),
        (Numbers(0), {"batch_size": 4}, r"\(Numbers\) is empty"),
        (Numbers(2**63), {"batch_size": 4}, r"length that Python refuses .* from 1 to 92233720368"),
        (Numbers(-1), {"batch_size": 4}, r"length that Python refuses .* __len__ must return"),
        (Numbers(4), {"batch_size": 0}, r"batch_size=0\): it must be a whole number of at least 1"),
        (Numbers(4), {"batch_size": 2.0}, r"batch_size=2\.0"),
        (Numbers(4), {"batch_size": 4, "seed": -1}, r"seed=-1\): .* at least 0"),
        (Numbers(4), {"batch_size": 5, "drop_last": True}, "leaves nothing to train on"),
    ],
)
def test_what_cannot_work_is_explained(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        DataLoader(dataset, context=fake(), **options)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    def read(whole: type) -> list[list[int]]:
        options = {"seed": whole(3), "num_workers": whole(0), "shuffle": True}
        loader: Any = DataLoader(Numbers(9), whole(4), context=fake(), **options)
        assert type(loader.batch_size) is type(loader.seed) is int
        return [batch[0].tolist() for batch in loader]

    def limits(whole: type) -> str:
        return repr(batch_limits(4, whole(8), (whole(1), whole(4)), True, 9))

    assert limits(np.int64) == limits(int)
    assert read(np.int64) == read(np.uint8) == read(int)
    wrong: Any = np.bool_(False)
    with pytest.raises(ScriptError, match=r"batch_size=np.False_\)"):
        DataLoader(Numbers(4), wrong, context=fake())


def test_pytorch_refuses_its_own_options_at_once() -> None:
    with pytest.raises(ValueError, match="prefetch_factor"):
        DataLoader(Numbers(4), 2, prefetch_factor=2, context=fake())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_smaller_than_the_world_is_warned_of_once(rank: int) -> None:
    context = fake(rank=rank, size=4)
    loader: Any = DataLoader(Numbers(9), 3, context=context)
    list(loader)
    assert len(context.warnings) == (rank == 0)
    said = "the batch of 3 is for all ranks together and there are 4: 1 of them have no example"
    assert all(warning.startswith(said) for warning in context.warnings)


def test_an_error_of_the_dataset_reaches_the_script() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> tuple[int, int]:
            raise KeyError(f"example {index} is missing")

    for workers in (0, 1):
        loader: Any = DataLoader(Broken(4), 2, num_workers=workers, context=fake())
        with pytest.raises(KeyError, match="example 0 is missing"):
            next(iter(loader))


def test_reading_processes_do_not_hold_the_ranks_connections() -> None:
    """A peer must see the end of a connection that the rank closes, or dies with."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        loader: Any = DataLoader(Numbers(40), 4, num_workers=2, context=fake())
        batches = iter(loader)
        next(batches)
        next(batches)
        ours.close()
        readable, _, _ = select.select([theirs], [], [], 5)
        assert readable
        assert theirs.recv(1) == b""
        next(batches)
        loader.close()


RANK = """
import os, sys, time
import torch.utils.data._utils.worker
from hvd_elastic.torch.data import DataLoader
from hvd_elastic.torch.frontend import TorchFrontend
from hvd_elastic.worker.planning.planner import Planner
from tests.unit.torch.test_data import Numbers, fake

class Telling(Numbers):
    def __getitem__(self, index):
        os.write(int(sys.argv[1]), b"%d\\n" % os.getpid())
        return super().__getitem__(index)

# PyTorch's own watch of the parent, every 5 s, is not what ends the reading process.
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 600
loader = DataLoader(Telling(10 ** 6), 1, num_workers=1, context=fake())
batches = iter(loader)
next(batches)
print("reading", flush=True)
time.sleep(600)
"""


def test_reading_processes_die_with_their_rank() -> None:
    reader, writer = os.pipe()
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RANK), str(writer)],
        pass_fds=[writer],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": WORKER_PYTHONPATH},
    )
    os.close(writer)
    with ExitStack() as afterwards:
        told = afterwards.enter_context(os.fdopen(reader, "rb"))
        afterwards.callback(rank.wait)
        afterwards.callback(rank.kill)
        assert rank.stdout is not None
        with rank.stdout:
            assert rank.stdout.readline() == "reading\n"
        # The first batch and the two that are read ahead; then it waits for work.
        readers = {int(told.readline()) for _ in range(3)}
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        assert len(readers) == 1
        assert rank.pid not in readers
        # The pipe ends when the last process that holds it has: the kernel ends it.
        os.set_blocking(reader, False)
        ended = False
        while not ended and select.select([reader], [], [], LIMIT_S)[0]:
            ended = os.read(reader, 65536) == b""
        assert ended


def test_orders_of_epochs_differ_and_ranks_share_them() -> None:
    world = World(50, 10, shuffle=True, seed=4)
    world.resize(2)
    orders = []
    for _ in range(2):
        while world.step():
            pass
        orders.append(list(world.read))
        world.next_epoch()
    assert orders[0] != orders[1]
    assert Counter(orders[0]) == Counter(orders[1]) == Counter(range(50))
