"""Real ranks on this machine, each a process of its own with a program to run."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.paths import LIMIT_S, ROOT
from tests.unit.forked import start_program

TIMEOUT_S = LIMIT_S
Forward = Callable[[Any, str, str, bytes], None]


@pytest.fixture
def stores() -> Iterator[Any]:
    """Opens a store for each generation; all ranks are on this machine.

    ``forward`` is called with all stores and each entry that other hosts would need.
    """
    import asyncio

    from hvd_elastic.agent.rendezvous import GenerationStore

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    opened: list[GenerationStore] = []

    def open_store(forward: Forward = lambda *_: None) -> int:
        async def body() -> int:
            store = GenerationStore(lambda *entry: forward(opened, *entry))
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
import numpy as np
import torch
from hvd_elastic.communicator.interface import GenerationBrokenError
from hvd_elastic.communicator.ring import HorovodCommunicator
from hvd_elastic.torch.collectives import TorchCollectives
generations = json.loads(sys.argv[1])  # rank variables, one after the other
communicator = HorovodCommunicator(TorchCollectives())
said = []
"""


def run_ranks(body: str, generations: list[list[dict[str, str]]]) -> list[Any]:
    """Run ``body`` once for each rank; returns what each left in ``said``."""
    size = len(generations[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["HOROVOD_LOG_LEVEL"] = "fatal"
    program = PREAMBLE + body + "\nprint(json.dumps(said))\n"
    processes = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, str(rank)) for rank in range(size)]
        try:
            for rank, folder in enumerate(folders):
                folder.mkdir()
                mine = [generation[rank] for generation in generations if rank < len(generation)]
                processes.append(start_program(program, json.dumps(mine), environment, folder))
            answers: list[Any] = []
            for process, folder in zip(processes, folders, strict=True):
                process.join(TIMEOUT_S)
                if process.exitcode == -signal.SIGKILL:
                    answers.append(None)
                    continue
                assert process.exitcode == 0, (folder / "err").read_text()
                answers.append(json.loads((folder / "out").read_text().splitlines()[-1]))
            return answers
        finally:
            for process in processes:
                process.kill()
                process.join()
