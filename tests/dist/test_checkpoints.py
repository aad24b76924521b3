"""Checkpoints of several ranks on several hosts, while ranks, leaders and disks fail."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.checkpoint.manifests import find_checkpoints, newest_valid
from hvd_elastic.checkpoint.shards import find_shards
from tests.dist.conftest import EVERY_STYLE, StartJob
from tests.dist.running import PROBE, PROBES, RunningJob, Stage
from tests.paths import COSTLY
from tests.small_disk import mounted

pytestmark = pytest.mark.dist

# The probe, as if its parameters were many; ``gate-write-<host>`` in its folder holds the writing
# of shards on that host, which says so by making ``at-write-<host>``; ``gate-write-<host>.<slot>``
# that of one worker.
SHARDED = """
import os, pathlib, runpy, sys, time
from hvd_elastic.checkpoint import stream, writer

del sys.argv[0]
folder, host = pathlib.Path(sys.argv[1]), os.environ["HVD_ELASTIC_HOST"]
slot = os.environ["HVD_ELASTIC_LOCAL_RANK"]

def gated(*arguments, write=writer.write_shard):
    for place in (host, f"{host}.{slot}"):
        while (folder / f"gate-write-{place}").exists():
            (folder / f"at-write-{place}").touch()
            time.sleep(0.02)
    return write(*arguments)

writer.write_shard = gated
stream.SHARD_BYTES = 64
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def start_sharded(stage: Stage, start_job: StartJob, style: str) -> Any:
    """Start the probe so that every rank writes a shard."""

    def start(
        hosts: dict[str, int], *options: str, script_options: tuple[str, ...] = ()
    ) -> RunningJob:
        script = stage.folder / "sharded.py"
        script.write_text(SHARDED)
        command = [sys.executable, str(script), *PROBES[style], *script_options]
        return start_job(hosts, *options, script=command)

    return start


def folder_of(job: RunningJob) -> Path:
    return job.home / "runs" / job.run_id / "checkpoints"


def spool_of(job: RunningJob, host: str) -> Path:
    return job.home / "spool" / job.run_id / host


@EVERY_STYLE
def test_every_rank_writes_a_shard_and_any_number_goes_on_from_them(
    stage: Stage, start_sharded: Any
) -> None:
    a, b, c, _ = stage.hosts
    job = start_sharded({a: 2, b: 1})
    job.wait_size(3)

    def of_three_shards() -> Any:
        for event in reversed(job.kinds("checkpoint")):
            with contextlib.suppress(FileNotFoundError):  # only the newest few are kept
                if event["shards"] == 3:
                    return json.loads(Path(event["path"]).read_text())
        return None

    manifest = job.wait_for(of_three_shards, "three shards")
    job.wait_for(
        lambda: any(0 <= e["blocked_s"] < 5 for e in job.kinds("checkpoint")),
        "a checkpoint for which no rank was held up, as a busy machine does",
    )
    assert [shard["host"] for shard in manifest["shards"]] == [a, a, b]
    assert manifest["run"] == job.run_id
    job.command("stop", job.run_id)
    assert job.wait() == 130
    job.check_nothing_left()
    newest = newest_valid(folder_of(job))
    assert newest is not None
    since = job.mark()
    job.use({c: 1})
    # As if the folder were not mounted yet.
    away = folder_of(job).rename(job.folder / "away")
    job.resume()
    why = f"though that of step {newest.step} was written: "
    job.wait_for(  # a busy host may have answered late, which is a warning too
        lambda: any(
            why in event["message"] and event["message"].endswith("; trying again")
            for event in job.kinds("warning", since)
        ),
        why,
    )
    for path in sorted(away.iterdir()):  # the manifests after their shards
        path.rename(folder_of(job) / path.name)
    restored = job.wait_event("restored", since)
    assert (restored["step"], restored["path"]) == (newest.step, str(newest.path))
    job.wait_size(1, since)
    job.wait_for(
        lambda: [e for e in job.kinds("checkpoint", since) if e["shards"] == 1], "one shard"
    )
    job.finish()


@EVERY_STYLE
@COSTLY
def test_ranks_killed_while_shards_are_written_cost_that_checkpoint_alone(
    stage: Stage, start_sharded: Any
) -> None:
    a, b, *_ = stage.hosts
    job = start_sharded({a: 1, b: 1})
    job.wait_size(2)
    job.wait_for(lambda: [e for e in job.kinds("checkpoint") if e["shards"] == 2], "a checkpoint")
    gate = job.folder / f"gate-write-{b}"
    gate.touch()
    job.wait_for((job.folder / f"at-write-{b}").exists, "a shard is being written")

    def half() -> list[int]:
        here, there = ({s.step for s in find_shards(spool_of(job, host))} for host in (a, b))
        return list(here - there - {event["step"] for event in job.kinds("checkpoint")})

    (step,) = job.wait_for(half, "the other shard is there")
    since = job.mark()
    job.kill_workers()
    gate.unlink()
    restored = job.wait_event("restored", since)
    collected = [e["step"] for e in job.kinds("checkpoint") if e["mono"] < restored["mono"]]
    assert restored["step"] == max(collected) < step
    job.wait_size(2, since)
    job.wait_for(
        lambda: [e for e in job.kinds("checkpoint", since) if e["shards"] == 2], "the next one"
    )
    assert not job.kinds("warning", since)
    job.finish()


@COSTLY
def test_a_truncated_shard_is_skipped_and_a_host_that_cannot_take_the_one_before_leaves_it(
    stage: Stage, start_sharded: Any
) -> None:
    a, b, *_ = stage.hosts
    job = start_sharded({a: 1, b: 1})
    job.wait_for(lambda: len(job.kinds("checkpoint")) > 1, "two checkpoints")
    job.command("stop", job.run_id)
    assert job.wait() == 130
    newest, before, *_ = find_checkpoints(folder_of(job))
    cut = newest.shards[-1].path
    os.truncate(cut, 10)
    since = job.mark()
    next_generation = job.kinds("rescale_started")[-1]["generation"] + 1
    in_the_way = spool_of(job, a) / f"restore-{next_generation}"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    job.resume()
    restored = job.wait_event("restored", since)
    assert restored["step"] == before.step
    said = [event["message"] for event in job.kinds("warning", since)]
    assert any(f"{cut} was skipped: it is truncated: 10 of" in message for message in said), said
    assert any(f"the workers take the checkpoint from host {b}" in message for message in said), (
        said
    )
    job.wait_size(2, since)
    job.finish()


@pytest.fixture
def small_disk(stage: Stage) -> Iterator[Path]:
    if stage.cluster.loopback:
        pytest.skip("needs hosts in namespaces: without root no file system can be mounted")
    with mounted(stage.folder / "small-disk", "64k", lazy=True) as disk:
        yield disk


@pytest.mark.root
def test_a_full_disk_costs_checkpoints_and_is_said_once(
    stage: Stage, start_sharded: Any, small_disk: Path
) -> None:
    a, b, *_ = stage.hosts
    job = start_sharded({a: 1, b: 1}, "--checkpoint-dir", str(small_disk))
    job.wait_event("checkpoint", 0)
    since, filler = job.mark(), small_disk / "filler"

    def fill() -> None:
        """Also what an older checkpoint leaves."""
        with pytest.raises(OSError, match="No space left"), filler.open("ab", buffering=0) as file:  # noqa: PT012
            while True:
                file.write(b"x" * 4096)

    def said() -> list[str]:
        fill()
        words = [event["message"] for event in job.kinds("warning", since)]
        return [message for message in words if f"{small_disk} is full" in message]

    job.wait_for(said, "a warning that names the disk")
    metrics = len(job.kinds("metrics"))
    job.wait_for(
        lambda: said() and len(job.kinds("metrics")) > metrics + 16, "four checkpoints later"
    )
    assert len(said()) == 1, said()
    assert newest_valid(small_disk) is not None
    filler.unlink()
    job.wait_for(lambda: job.kinds("checkpoint", job.mark() - 1), "there is room again")
    job.finish()


def test_what_a_dead_leader_did_not_collect_is_put_together_by_the_next_at_another_size(
    stage: Stage, start_sharded: Any
) -> None:
    a, b, c, _ = stage.hosts
    options = ("--checkpoint-copies", "1", "--leader-grace", "0")
    # The processes that read for a worker have temporary folders and sockets of their own.
    job = start_sharded({a: 1, b: 1}, *options, script_options=("--num-workers", "1"))
    job.wait_for(lambda: [e for e in job.kinds("checkpoint") if e["shards"] == 2], "a checkpoint")
    job.wait_for(
        lambda: all(len({s.index for s in find_shards(spool_of(job, h))}) == 2 for h in (a, b)),
        "each host has a copy of the other's shard",
    )
    job.process.kill()
    job.wait()
    job.check_nothing_left(but_spools=True)
    # The disks of the leader and of one host are lost.
    for path in folder_of(job).iterdir():
        path.unlink()
    subprocess.run(["rm", "-rf", str(spool_of(job, b))], check=True)
    held = {shard.step for shard in find_shards(spool_of(job, a)) if shard.index == 1}
    since = job.mark()
    job.use({c: 1, a: 1, b: 1})
    job.resume()
    restored = job.wait_event("restored", since)
    assert restored["step"] in held
    job.wait_size(3, since)
    assert [worker.host for worker in job.workers()] == [a, b, c]
    job.wait_steps(5)
    job.finish()


@COSTLY
def test_what_is_written_after_the_grace_time_is_whole_however_long_a_shard_takes(
    stage: Stage, start_sharded: Any
) -> None:
    a, b, *_ = stage.hosts
    job = start_sharded({a: 2, b: 1}, "--leader-grace", "1", "--checkpoint-every", "600")
    job.wait_size(3)
    job.wait_steps(5)
    slow = [f"{a}.1", b]
    for place in slow:
        (job.folder / f"gate-write-{place}").touch()
    job.process.kill()
    job.wait()
    there = lambda name: (job.folder / name).exists()  # noqa: E731
    for place in slow:
        job.wait_for(
            functools.partial(there, f"at-write-{place}"), "a shard is written", ended_too=True
        )
    job.wait_for(lambda: find_shards(spool_of(job, a)), "another one is there", ended_too=True)
    (job.folder / f"gate-write-{slow[0]}").unlink()
    job.wait_for(lambda: not job.workers(a), "a host goes before the other", ended_too=True)
    assert job.workers(b)
    (job.folder / f"gate-write-{b}").unlink()
    job.wait_for(lambda: not job.workers(), "the grace time is over", ended_too=True)
    made = max(record["step"] for record in job.digests())
    since = job.mark()
    job.resume()
    assert job.wait_event("restored", since)["step"] >= made
    job.wait_size(3, since)
    job.finish()


def test_a_run_resumes_with_its_model_and_not_with_another(
    stage: Stage, start_job: StartJob
) -> None:
    a, *_ = stage.hosts
    script = stage.folder / "wide.py"
    text = PROBE.read_text()
    script.write_text(text)
    job = start_job({a: 1}, script=[sys.executable, str(script), "FOLDER"])
    job.wait_event("checkpoint", 0)
    job.command("stop", job.run_id)
    assert job.wait() == 130
    # A checkpoint of another model ends the run, and nothing is lost.
    held = sorted(path.name for path in folder_of(job).iterdir())
    wide = text.replace("nn.Linear(8, 16)", "nn.Linear(8, 20)").replace("(16, 3)", "(20, 3)")
    script.write_text(wide)
    job.resume()
    assert job.wait() == 1
    said = job.output.read_text()
    assert "model.layers.0.weight is (16, 8) in the checkpoint and (20, 8) in this script" in said
    assert f"checkpoint {folder_of(job)}/step-" in said, "not the copy in the spool"
    assert "Traceback" not in said
    assert sorted(path.name for path in folder_of(job).iterdir()) == held
    job.check_nothing_left()
    script.write_text(text)
    since = job.mark()
    job.resume()
    job.wait_event("restored", since)
    job.wait_event("checkpoint", since)
    job.finish_without_audit()
