"""Writes the events of a made-up training run of any length, finished or as it goes on."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import IO, Any

from hvd_elastic.records.run_folder import RunFolder

SLOTS = 2
PRICES = {"node1": 0.9, "node2": 0.9, "node3": 0.35, "node4": 0.35}
GB = 1_000_000_000


class Replay:
    """A run on up to four hosts whose batch adapts; :meth:`train` lets time pass.

    Args:
        root: folder of the runs.
        run_id: its id.
        start: when it began [Unix seconds].
        hours: how long it would train in all.
        seed: of its numbers.
        speed: examples/s of a process.
    """

    def __init__(
        self,
        root: Path,
        run_id: str,
        *,
        start: float,
        hours: float = 1.0,
        seed: int = 1,
        speed: float = 900.0,
    ) -> None:
        self.folder = RunFolder.create(run_id, root=root)
        self.folder.write_run({"command": ["python", "train.py", "--epochs", "90"]})
        self._file: IO[str] = self.folder.events.open("w", encoding="utf-8")
        self._dice = random.Random(seed)
        self._whole, self._speed = 3600 * hours * 6 * speed, speed
        self.start = self.now = start
        self.hosts: dict[str, int] = {}
        self.generation, self.step, self.examples, self.batch = 0, 0, 0, 256
        self.slow: dict[str, float] = {}
        self._sampled = self.now
        known = [[name, SLOTS] for name in PRICES]
        self.add(
            "run_started", run_id=run_id, hosts=known, min_np=1, max_np=8, np=None, pinned=[],
            command=["python", "train.py"], resumed=False,
        )  # fmt: skip
        self.add("hosts_changed", hosts=known, prices=PRICES)

    def add(self, kind: str, **fields: Any) -> None:
        stamp = {"t": round(self.now, 4), "mono": round(self.now - self.start, 4), "kind": kind}
        self._file.write(json.dumps({**stamp, **fields}, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        self._file.flush()

    @property
    def size(self) -> int:
        return sum(self.hosts.values())

    def rescale(self, hosts: dict[str, int], reason: str, pause_s: float | None) -> None:
        before, self.hosts = self.size, dict(hosts)
        self.generation += 1
        slots = list(hosts.values())
        self.add(
            "rescale_started", generation=self.generation, from_size=before, to_size=self.size,
            hosts=list(hosts), slots=slots, reason=reason,
        )  # fmt: skip
        self.now += pause_s or 4.0
        self.add("rescale_finished", generation=self.generation, size=self.size, pause_s=pause_s)

    def begin(self, *names: str) -> None:
        self.now += 3.0
        for rank, name in enumerate(names):
            self.add("worker_joined", host=name, local_rank=0, rank=rank * SLOTS)
        slots = len(names) * SLOTS
        self.rescale(dict.fromkeys(names, SLOTS), f"start with {slots} slots", None)
        limits = {"initial_batch_size": 256, "max_batch_size": 4096, "max_atomic_batch_size": None}
        self._plan(1.0, "the batch that the script asks for", limits)

    def join(self, name: str) -> None:
        after = {**self.hosts, name: SLOTS}
        reason = f"goodput 1.31 x that of now at a cost of 0.4 s: host {name} joins"
        self.add("decision", action="grow", reason=reason, np=sum(after.values()))
        self.add("worker_joined", host=name, local_rank=0, rank=self.size)
        self.rescale(after, f"host {name} joined: {self.size} → {self.size + SLOTS} slots", 0.14)

    def kill(self, name: str, cause: str = "was killed by signal 9 (SIGKILL)") -> None:
        """One worker of a host dies."""
        self.add("worker_left", host=name, local_rank=1, cause=cause, how="died")
        after = {**self.hosts, name: self.hosts[name] - 1}
        text = f"worker {name}:1 {cause}: {self.size} → {self.size - 1} slots"
        self.rescale({host: n for host, n in after.items() if n}, text, 0.38)

    def lose(self, name: str) -> None:
        """A host goes silent."""
        self.add("host_lost", host=name, cause="gave no sign of life for 5.0 s", silent_s=5.0)
        self.add("warning", message=f"host {name}: lost, its agent gave no sign of life for 5.0 s")
        after = {host: n for host, n in self.hosts.items() if host != name}
        text = f"host {name} was lost: {self.size} → {sum(after.values())} slots"
        self.rescale(after, text, 5.6)

    def grow_batch(self, batch: int) -> None:
        scale = math.sqrt(batch / 256)
        self.batch = batch
        self._plan(scale, f"noise scale {self._noise():.0f}: goodput 1.12 x", None)

    def _plan(self, scale: float, reason: str, limits: dict[str, int | None] | None) -> None:
        bounds: dict[str, int | None] = {"initial_batch_size": 256, "max_batch_size": 4096}
        bounds |= {"min_atomic_batch_size": 1, "max_accumulation_steps": 15, **(limits or {})}
        bounds.setdefault("max_atomic_batch_size", None)
        self.add(
            "batch_plan", step=self.step, global_batch_size=self.batch,
            atomic_batch_size=self.batch // max(1, self.size), accumulation_steps=0,
            lr_scale=round(scale, 3), limits=bounds, reason=reason,
        )  # fmt: skip

    @property
    def _part(self) -> float:
        return min(0.999, self.examples / self._whole)

    def _noise(self) -> float:
        return 800 + 6000 * self._part**1.5

    def train(self, seconds: float, every_s: float = 0.25) -> None:
        """Let time pass; metrics come every ``every_s``."""
        until = self.now + seconds
        uniform = self._dice.uniform
        while self.now < until:
            self.now += every_s
            rate = self.size * self._speed * (1 + self.batch / 8192) * uniform(0.94, 1.05)
            self.step += max(1, round(rate * every_s / self.batch))
            self.examples += round(rate * every_s)
            noise, part = self._noise() * uniform(0.9, 1.1), self._part
            efficiency = (noise + 256) / (noise + self.batch)
            self.add(
                "metrics", step=self.step, epoch=self.examples // 1_281_167,
                position=self.examples % 1_281_167, examples=self.examples, size=self.size,
                throughput=round(rate, 2), rank_wait=round(uniform(0.06, 0.11), 4),
                data_wait=round(uniform(0.004, 0.02), 4), lr=round(0.1 * (1 - part), 6),
                global_batch_size=self.batch, noise_scale=round(noise, 1),
                efficiency=round(efficiency, 4), goodput=round(rate * efficiency, 2),
                skipped_steps=0, done=round(part, 6),
                loss=round(0.4 + 5.8 * math.exp(-5 * part) * uniform(0.95, 1.06), 4),
            )  # fmt: skip
            if self.now - self._sampled >= 10:
                self._sample()
        self.flush()

    def _sample(self) -> None:
        self._sampled = self.now
        uniform = self._dice.uniform
        for name in self.hosts:
            slow = self.slow.get(name, 1.0)
            self.add(
                "host_sample", host=name, cpu=round(uniform(0.62, 0.86), 3),
                memory=round(uniform(0.31, 0.34), 3), memory_bytes=128 * GB,
                sent=round(uniform(70, 96) * 1e6), received=round(uniform(70, 96) * 1e6),
                read=round(uniform(20, 60) * 1e6), written=round(uniform(0.1, 2) * 1e6),
                gpus=[
                    {"busy": round(uniform(0.86, 0.97), 2), "memory": 0.71, "memory_bytes": 80 * GB}
                    for _ in range(SLOTS)
                ],
                step_s=round(0.031 * slow * uniform(0.97, 1.03), 6),
                rank_wait=round(uniform(0.06, 0.1) / slow, 4),
            )  # fmt: skip

    def end(self, status: str = "succeeded") -> None:
        self.add(
            "run_finished", status=status, message="", run_id=self.folder.run_id, steps=self.step,
            examples=self.examples, epochs=90, checkpoint_step=self.step, led_elsewhere=False,
        )  # fmt: skip
        self._file.close()

    def close(self) -> None:
        self._file.close()
