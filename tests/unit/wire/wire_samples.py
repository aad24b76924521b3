"""Messages as agents and workers send them, for tests that care about few of their fields."""

from __future__ import annotations

from typing import Any

from hvd_elastic import __version__
from hvd_elastic.checkpoint.shards import ShardInfo
from hvd_elastic.wire import messages as msg

__all__ = ["agent_hello", "checkpoint_written", "leader_hello", "saved_file"]


def agent_hello(**fields: Any) -> msg.AgentHello:
    known: dict[str, Any] = {
        "protocol": msg.PROTOCOL,
        "version": __version__,
        "python": "3.11.7",
        "spool": "/home/spool/unit/node1",
        "spooled": [],
        "saved": [],
        "executable": "/usr/bin/python3",
        "pid": 7,
        "hostname": "node1",
        "interface": "lo",
        "interfaces": {"lo": "127.0.0.1"},
        "cpus": 2,
        "machine": "",
        "swept": 0,
        "held": None,
    }
    return msg.AgentHello(**{**known, **fields})


def leader_hello(**fields: Any) -> msg.LeaderHello:
    known: dict[str, Any] = {
        "run_id": "unit",
        "host": "node1",
        "leader": "first",
        "led_by": "a test",
        "led_since": 5.0,
        "take_over": False,
        "failure_timeout_s": 3600.0,
        "leader_grace_s": 0.0,
        "env": {},
        "cwd": "/",
        "command": ("true",),
        "run": {},
        "interface": None,
        "local_address": "127.0.0.1",
        "heartbeat_s": 0.1,
        "preemption": None,
        "preemption_command": None,
        "options": msg.WorkerOptions(),
    }
    return msg.LeaderHello(**{**known, **fields})


def checkpoint_written(shard: ShardInfo, blocked_s: float) -> msg.CheckpointWritten:
    return msg.CheckpointWritten(
        shard=shard.manifest(),
        step=shard.step,
        epoch=shard.epoch,
        examples=shard.examples,
        path=str(shard.path),
        bytes=shard.bytes,
        seconds=0.5,
        blocked_s=blocked_s,
    )


def saved_file(name: str, size: int, sha256: str, **fields: Any) -> msg.SavedFile:
    known = {"step": 1, "epoch": 0, "host": "node0", "generation": 1, "life": "now"}
    known |= {"number": 1, "created": 1.0}
    return msg.SavedFile(**{"name": name, "bytes": size, "sha256": sha256, **known, **fields})
