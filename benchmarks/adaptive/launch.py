"""Starts the jobs of this benchmark, ours and AdaptDL's, and reads what they wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.testbed.environments import PeerEnvironment
from hvd_elastic.errors import RunError

__all__ = ["ROOT", "AdaptDL", "run_job", "run_together"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 3600
_PEERS = ROOT / "benchmarks/peers"


def run_job(name: str, ranks: int, *arguments: object) -> Any:
    """What rank 0 of one job on this machine wrote; ``name`` is one of those in ``jobs/``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        job = [sys.executable, "-m", "benchmarks.adaptive.jobs", name, str(out)]
        job += [str(argument) for argument in arguments]
        if ranks > 1:
            launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo"]
            job = [*launcher, "-np", str(ranks), *job]
        print(f"{name} on {ranks} rank(s) {' '.join(map(str, arguments))}", file=sys.stderr)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(
                job, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{' '.join(job)} took more than {LIMIT_S} s") from None
        if done.returncode != 0 or not out.exists():
            raise RunError(f"{' '.join(job)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


class AdaptDL:
    """AdaptDL without its scheduler: replicas on this machine that adapt the batch by themselves.

    Its release is of 2022 and needs packages of then; PyTorch is the one that all others have.
    """

    name = "AdaptDL"

    def __init__(self) -> None:
        self._environment = PeerEnvironment(
            "adaptdl",
            (
                *("adaptdl==0.2.11", "numpy==1.23.5", "scipy==1.10.1", "pandas==1.5.3"),
                *("setuptools<81", "requests"),
            ),
            "adaptdl.torch",
        )

    def prepare(self) -> None:
        """Make its environment unless it is there.

        Raises:
            PeerMissingError: it cannot be had.
        """
        self._environment.make()

    def versions(self) -> dict[str, str]:
        """Of its packages that matter."""
        return {"adaptdl": self._environment.version("adaptdl")}

    def run_job(self, script: str, replicas: int, *arguments: object) -> Any:
        """What replica 0 of one job wrote.

        Raises:
            RunError: a replica died, or took too long.
        """
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            job = [str(self._environment.python), str(_PEERS / script), str(out)]
            job += [str(argument) for argument in arguments]
            shared = {
                **{name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
                "OMP_NUM_THREADS": "1",
                "ADAPTDL_MASTER_ADDR": "127.0.0.1",
                "ADAPTDL_MASTER_PORT": str(_free_port()),
                "ADAPTDL_NUM_REPLICAS": str(replicas),
                "ADAPTDL_NUM_NODES": "1",
                "ADAPTDL_NUM_RESTARTS": "0",
                "ADAPTDL_CHECKPOINT_PATH": folder,
                # Its checkpoints hold more than tensors.
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
            }
            ranked = [{**shared, "ADAPTDL_REPLICA_RANK": str(rank)} for rank in range(replicas)]
            run_together(job, ranked, Path(folder))
            if not out.exists():
                raise RunError(f"{' '.join(job)} ended without a result")
            return json.loads(out.read_text(encoding="utf-8"))


def run_together(job: list[str], environments: Sequence[Mapping[str, str]], logs: Path) -> None:
    """Run the same command in each environment; the first that fails ends all."""
    processes: list[subprocess.Popen[bytes]] = []

    def finish(rank: int) -> None:
        try:
            status = processes[rank].wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"{' '.join(job)} took more than {LIMIT_S} s") from None
        if status != 0:
            said = (logs / f"log{rank}").read_text(encoding="utf-8", errors="replace")
            raise RunError(f"{' '.join(job)} ended with {status}:\n{said[-3000:]}")

    with ThreadPoolExecutor(len(environments)) as pool:
        try:
            for rank, environment in enumerate(environments):
                with (logs / f"log{rank}").open("wb") as log:
                    processes.append(
                        subprocess.Popen(job, env=environment, stdout=log, stderr=subprocess.STDOUT)
                    )
            ends = [pool.submit(finish, rank) for rank in range(len(processes))]
            for end in wait(ends, return_when=FIRST_EXCEPTION).done:
                end.result()
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
