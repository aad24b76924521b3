"""A made-up run with everything in it, as the leader would have recorded it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from hvd_elastic.records.run_folder import RunFolder
from tests.unit.records.made_events import whole

START = 1_790_000_000.0
EXAMPLES = 1437
BATCH = 64


def sample_events(epochs: int = 12, *, status: str = "succeeded") -> list[dict[str, Any]]:
    """Two hosts start, node3 joins, node2 is asked to leave, node3 is killed and comes back."""
    dice = random.Random(7)
    events: list[dict[str, Any]] = []
    now = START

    def add(kind: str, **fields: Any) -> None:
        stamps = {"t": round(now, 4), "mono": round(now - START, 4)}
        events.append(whole({**stamps, "kind": kind, **fields}))

    def rescale(generation: int, before: int, after: int, reason: str, pause_s: float | None):
        nonlocal now
        add(
            "rescale_started", generation=generation, from_size=before, to_size=after, reason=reason
        )
        now += pause_s or 0.4
        add("rescale_finished", generation=generation, size=after, pause_s=pause_s)
        return after

    add(
        "run_started",
        run_id="digits-3",
        hosts=[["node1", 1], ["node2", 1]],
        min_np=1,
        max_np=4,
    )
    now += 2.1
    for rank, host in enumerate(["node1", "node2"]):
        add("agent_started", host=host, python="3.11.2", seconds=0.8)
        add("worker_standby", host=host, local_rank=0, warm_s=1.9)
        add("worker_joined", host=host, local_rank=0, rank=rank)
    size = rescale(1, 0, 2, "start with 2 slots", None)

    steps_per_epoch = math.ceil(EXAMPLES / BATCH)
    total = steps_per_epoch * epochs
    changes = {
        int(total * 0.25): ("join", 3, "host node3 joined: 2 → 3 slots", 0.12),
        int(total * 0.5): ("leave", 2, "host node2 was taken out of the hostfile: 3 → 2", 0.07),
        int(total * 0.7): ("die", 1, "worker node3:0 was killed by signal 9: 2 → 1", 0.83),
        int(total * 0.8): ("join", 2, "worker node3:0 is back: 1 → 2 slots", 0.15),
    }
    generation, used = 1, 0
    for step in range(1, total + 1):
        if step in changes:
            what, after, reason, pause_s = changes[step]
            generation += 1
            if what == "join":
                hosts = [["node1", 1], ["node2", 1], ["node3", 1]]
                add("hosts_changed", hosts=hosts if generation == 2 else hosts[::2])
                add("worker_standby", host="node3", local_rank=0, warm_s=2.2)
                add("worker_joined", host="node3", local_rank=0, rank=after - 1)
            elif what == "leave":
                add("hosts_changed", hosts=[["node1", 1], ["node3", 1]])
                add("worker_left", host="node2", local_rank=0, cause="asked to leave", how="left")
            else:
                add("worker_left", host="node3", local_rank=0, cause="killed by signal 9")
            size = rescale(generation, size, after, reason, pause_s)
        now += 0.06 / size * dice.uniform(0.8, 1.25)
        epoch = (step - 1) // steps_per_epoch
        used = min(used + BATCH, EXAMPLES * (epoch + 1))
        add(
            "metrics",
            step=step,
            epoch=epoch,
            examples=used,
            throughput=size * 1050 * dice.uniform(0.85, 1.1),
            lr=0.05,
            loss=2.4 * math.exp(-4.5 * step / total) * dice.uniform(0.7, 1.3) + 0.01,
        )
        if step % steps_per_epoch == 0:
            accuracy = 0.98 - 0.88 * math.exp(-0.9 * epoch)
            add("metrics", step=step, epoch=epoch, examples=used, accuracy=accuracy)
        if step % 100 == 0:
            path = f"step-{step:012d}.pt"
            add("checkpoint", step=step, path=path, bytes=412_345, seconds=0.03, blocked_s=0.0018)
    if status != "running":
        now += 0.2
        add("run_finished", status=status, steps=total, examples=used)
    return events


def sample_audit(epochs: int = 12, *, seed: int = 3) -> list[dict[str, Any]]:
    """What two workers report, with one step that a dead worker did and the others did again."""
    dice = random.Random(seed)
    lines: list[dict[str, Any]] = [{"kind": "dataset", "n": EXAMPLES, "epochs": epochs}]
    step = 0
    for epoch in range(epochs):
        order = list(range(EXAMPLES))
        dice.shuffle(order)
        for position in range(0, EXAMPLES, BATCH):
            step += 1
            generation = 1 + step // 40
            line = {
                "kind": "used",
                "generation": generation,
                "step": step,
                "epoch": epoch,
                "position": position,
                "indices": order[position : position + BATCH],
                "padding": [],
            }
            if step % 40 == 0:
                lines.append({**line, "generation": generation - 1})
            lines += [line, line]
    return lines


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def sample_folder(root: Path, run_id: str = "digits-3", **about: Any) -> RunFolder:
    folder = RunFolder.create(run_id, root=root)
    folder.write_run({"command": ["python", "train.py", "--epochs", "12"]})
    write_lines(folder.events, sample_events(**about))
    write_lines(folder.audit, sample_audit())
    return folder
