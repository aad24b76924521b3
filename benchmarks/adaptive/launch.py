"""Starts the jobs of this benchmark, ours and AdaptDL's, and reads their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.testbed.environments import PeerEnvironment
from benchmarks.testbed.launchers import ROOT, free_port, start_logged
from hvd_elastic.errors import RunError

LIMIT_S = 3600

# AdaptDL's last release is from 2022 and needs packages of that time; PyTorch is the same for all.
ADAPTDL = PeerEnvironment(
    "adaptdl",
    (
        *("adaptdl==0.2.11", "numpy==1.23.5", "scipy==1.10.1", "pandas==1.5.3"),
        *("setuptools<81", "requests"),
    ),
    "adaptdl.torch",
)


def run_job(name: str, ranks: int, *arguments: object) -> Any:
    """Run a job of ``jobs/`` on this machine; return the rows that its rank 0 wrote.

    Raises:
        RunError: the job failed, or took too long.
    """
    print(f"{name} on {ranks} rank(s) {' '.join(map(str, arguments))}", file=sys.stderr)
    launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks)]
    command = [*(launcher if ranks > 1 else ()), sys.executable, "-m", "benchmarks.adaptive.jobs"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        return _written([*command, name], [environment], Path(folder), arguments)


def run_adaptdl(script: str, replicas: int, *arguments: object) -> Any:
    """Run a job of AdaptDL without its scheduler; return the rows that its replica 0 wrote.

    Raises:
        RunError: a replica died, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ADAPTDL.python), str(ROOT / "benchmarks/peers" / script)]
        shared = {
            **{name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
            "OMP_NUM_THREADS": "1",
            "ADAPTDL_MASTER_ADDR": "127.0.0.1",
            "ADAPTDL_MASTER_PORT": str(free_port()),
            "ADAPTDL_NUM_REPLICAS": str(replicas),
            "ADAPTDL_NUM_NODES": "1",
            "ADAPTDL_NUM_RESTARTS": "0",
            "ADAPTDL_CHECKPOINT_PATH": folder,
            # AdaptDL's checkpoints hold more than tensors, which PyTorch refuses by default.
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        }
        ranked = [{**shared, "ADAPTDL_REPLICA_RANK": str(rank)} for rank in range(replicas)]
        return _written(command, ranked, Path(folder), arguments)


def _written(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    arguments: Sequence[object],
) -> Any:
    out = folder / "out.json"
    job = [*command, str(out), *map(str, arguments)]
    run_together(job, environments, folder)
    if not out.exists():
        raise RunError(f"{' '.join(job)} ended without a result")
    return json.loads(out.read_text(encoding="utf-8"))


def run_together(job: list[str], environments: Sequence[Mapping[str, str]], logs: Path) -> None:
    """Run the same command in each environment at once; the first failure ends all."""
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
                processes.append(start_logged(job, logs / f"log{rank}", environment))
            ends = [pool.submit(finish, rank) for rank in range(len(processes))]
            for end in wait(ends, return_when=FIRST_EXCEPTION).done:
                end.result()
        finally:
            for process in processes:
                process.kill()
                process.wait()
