"""A cluster with its daemon in a home of its own, as a user calls it on the command line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.testbed.launchers import OUR_PROGRAM
from hvd_elastic.records.json_lines import Record, read_records
from hvd_elastic.virtual import VirtualCluster

_DEADLINE_S = 180.0
_SCRIPT = Path(__file__).with_name("emulated.py")


class Cluster:
    """A cluster in a home of its own; the caller starts and ends its daemon.

    Args:
        home: a folder, which all hosts see.
        hosts: text of its hostfile.
        options: options of ``up``.

    Attributes:
        script: script that trains on an emulated device.
        folder: folder of the cluster, with the events of its queue.
    """

    def __init__(self, home: Path, hosts: str, *options: object) -> None:
        home.mkdir(exist_ok=True)
        self.home = home
        self.hostfile = home / "hosts"
        self.hostfile.write_text(hosts, encoding="utf-8")
        self.script = home / _SCRIPT.name
        shutil.copyfile(_SCRIPT, self.script)
        self.folder = home / "clusters" / "hosts"
        self._options = options

    @contextlib.contextmanager
    def up(self) -> Iterator[Cluster]:
        """Have the daemon run for the length of the block; it ends all jobs that are left."""
        self.start()
        try:
            yield self
        finally:
            self.call("down")

    def start(self) -> None:
        """Start the daemon."""
        self.call("up", self.hostfile, "--detach", *self._options)

    def call(self, *arguments: object) -> str:
        """Run ``hvd-elastic`` to its end and return what it printed."""
        done = subprocess.run(
            [*OUR_PROGRAM, *map(str, arguments)],
            env={**os.environ, "HVD_ELASTIC_HOME": str(self.home), "OMP_NUM_THREADS": "1"},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def timed(self, *arguments: object) -> float:
        """Return how long a command takes, from its start to its end [s]."""
        began = time.perf_counter()
        self.call(*arguments)
        return time.perf_counter() - began

    def submit(self, *arguments: object) -> str:
        """Submit a job; return its run id."""
        answer = self.call("submit", "--json", *arguments)
        return str(json.loads(answer)["run_ids"][0])

    def queue_events(self) -> list[Record]:
        """Return the events of the queue."""
        return read_records(self.folder / "events.jsonl")

    def events(self, run_id: str, kind: str) -> list[Record]:
        """Return the events of one kind of a run."""
        found = read_records(self.home / "runs" / run_id / "events.jsonl")
        return [event for event in found if event["kind"] == kind]

    def wait_event(self, run_id: str, kind: str, **fields: Any) -> Record:
        """Wait for an event with these fields."""
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            for event in self.events(run_id, kind):
                if fields.items() <= event.items():
                    return event
            if time.monotonic() > deadline:
                raise RuntimeError(f"{run_id}: no {kind} {fields} within {_DEADLINE_S:g} s")
            time.sleep(0.02)


@contextlib.contextmanager
def this_machine(slots: int) -> Iterator[Cluster]:
    """Yield a cluster of this machine whose daemon runs."""
    with tempfile.TemporaryDirectory(prefix="jobs-") as folder:
        with Cluster(Path(folder), f"localhost slots={slots}\n").up() as cluster:
            yield cluster


@contextlib.contextmanager
def virtual_hosts(hosts: int, slots: int, folder: Path) -> Iterator[VirtualCluster]:
    """Yield virtual hosts that see a folder."""
    with VirtualCluster.up(hosts, slots, shares=[folder]) as cluster:
        yield cluster
