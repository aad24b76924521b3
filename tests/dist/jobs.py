"""Real jobs for tests: the command line as a user calls it, and what it left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from typing_extensions import Self

from hvd_elastic.records.audit import AuditResult, check_audit
from hvd_elastic.records.json_lines import Record, read_records
from hvd_elastic.virtual import VirtualCluster
from tests.dist.running import END_S, Stage, processes_with
from tests.paths import LIMIT_S, LITTLE_WORK, WORKER_PYTHONPATH
from tests.waiting import until

MARK = "HVD_ELASTIC_TEST_JOB"
START_S = CLEAN_S = LIMIT_S

TINY = '''\
"""A small model on made-up data; goes wrong, waits or tells what it sees, as asked."""
import argparse
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--examples", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=10)
parser.add_argument("--step-time", type=float, default=0.0)
parser.add_argument("--example-time", type=float, default=0.0, help="of an example's pass [s]")
parser.add_argument("--until", type=Path, help="train until this file is there")
parser.add_argument("--fail-at", type=int, help="raise in this step; -1 at import")
parser.add_argument("--show", nargs="*", default=[], help="environment variables to print")
args = parser.parse_args()
if args.fail_at == -1:
    raise ValueError("broken at import")

import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

hvd.init()
for name in args.show:
    print(f"{name}={os.environ.get(name)}")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model)
data = TensorDataset(torch.randn(args.examples, 4), torch.randint(2, (args.examples,)))
loader = hvd.DataLoader(data, args.batch_size, shuffle=True)


def epochs():
    for epoch in hvd.epochs(args.epochs if args.until is None else 10**9):
        yield epoch
        if args.until is not None:
            there = torch.tensor([float(args.until.exists())])
            if hvd.allreduce(there, "until", average=False) > 0:
                return


@hvd.run
def train(state):
    for epoch in epochs():
        for inputs, targets in loader:
            if args.fail_at is not None and state.steps == args.fail_at:
                raise ValueError(f"broken in step {args.fail_at}")
            optimizer.zero_grad()
            time.sleep(args.example_time * len(inputs))
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            time.sleep(args.step_time)
            state.steps += 1
            state.commit(loss=loss)


train(hvd.State(model=model, optimizer=optimizer, steps=0))
print("trained", hvd.size())
'''


def write_script(folder: Path, text: str = TINY, name: str = "tiny.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def command(*arguments: object) -> list[str]:
    """``hvd-elastic`` with these arguments, of this checkout and this Python."""
    return [sys.executable, "-m", "hvd_elastic.cli.app", *map(str, arguments)]


def environment(home: Path, **more: str) -> dict[str, str]:
    """Of a user's shell, with our home in ``home``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HVD_ELASTIC")}
    own = {"HVD_ELASTIC_HOME": str(home), "PYTHONPATH": WORKER_PYTHONPATH}
    return {**kept, **own, **LITTLE_WORK, **more}


def call(
    *arguments: object, home: Path, cwd: Path | None = None, timeout_s: float = END_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run one command of ours to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd or home,
        env=environment(home, **more),
        timeout=timeout_s,
    )


class Job:
    """A ``hvd-elastic run`` that goes on beside the test; ended at the latest with the block."""

    def __init__(
        self,
        *arguments: object,
        home: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.run_id = f"job-{secrets.token_hex(4)}"
        self.home = home
        self.folder = home / "runs" / self.run_id
        self.mark = secrets.token_hex(8)
        self.output = home / f"{self.run_id}.out"
        options = [*arguments]
        at = options.index("--")
        # What gets no processor time for a while is not lost.
        options[at:at] = ["--run-id", self.run_id]
        options[:0] = ["--failure-timeout", "30"]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command("run", *options),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd or home,
                env=environment(home, **{MARK: self.mark, **(env or {})}),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def events(self, kind: str | None = None) -> list[Record]:
        found = read_records(self.folder / "events.jsonl")
        return found if kind is None else [event for event in found if event["kind"] == kind]

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
        """Wait for ``condition``, as long as the run lives."""
        return until(condition, what, timeout_s, process=self.process, said=lambda: self.text)

    def until_trains(self, size: int | None = None) -> None:
        """Wait until steps are made by ``size`` processes."""

        def trains() -> bool:
            made = self.events("metrics")
            return bool(made) and (size is None or made[-1]["size"] == size)

        self.until(trains, f"training with {size or 'any number of'} processes")

    def wait(self, timeout_s: float = END_S) -> int:
        """Exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {timeout_s} s\n{self.text}") from None

    def audit(self) -> AuditResult:
        return audit_of(self.folder)


def times_all_trained(events: Iterable[Record], ranks: int) -> int:
    """How often training with all ranks began; it need not shrink in between.

    Where the survivor of a kill is late, the replacement joins in the same rescale.
    """
    return [e["size"] for e in events if e["kind"] == "rescale_finished"].count(ranks)


def audit_of(folder: Path) -> AuditResult:
    return check_audit(read_records(folder / "audit.jsonl"), finished=True)


def marked(mark: str, name: str = MARK) -> list[psutil.Process]:
    """Processes with the mark in their environment."""
    return [*processes_with(name, mark)]


def assert_nothing_left(
    mark: str = "", run_id: str = "", cluster: VirtualCluster | None = None
) -> None:
    """No process of the job, here or on a host of the cluster, within the time we promise."""

    def left() -> list[Any]:
        found: list[Any] = []
        if mark:
            found += marked(mark)
        if run_id:
            found += marked(run_id, "HVD_ELASTIC_RUN_ID")
        if cluster is not None:
            for host in cluster.hosts:
                for pid in cluster.pids(host):
                    with contextlib.suppress(psutil.Error):
                        found.append((host, psutil.Process(pid).cmdline()))
        return found

    deadline = time.monotonic() + CLEAN_S
    while found := left():
        assert time.monotonic() < deadline, f"left behind: {found}"
        time.sleep(0.05)


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """End a process of the test, and what is in its session, with the block."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def hostfile_of(path: Path, hosts: Iterable[str], slots: int = 1) -> Path:
    path.write_text("".join(f"{host} slots={slots}\n" for host in hosts), encoding="utf-8")
    return path


@pytest.fixture
def shared(stage: Stage) -> Path:
    """A folder that this machine and every virtual host see."""
    return stage.folder


@pytest.fixture
def hosts(stage: Stage) -> VirtualCluster:
    """The virtual hosts, all of them up."""
    stage.boot_all()
    return stage.cluster
