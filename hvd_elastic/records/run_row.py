"""A row of the list of runs: by the last events, and by whether the leader lives."""

from __future__ import annotations

from typing import Any

from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize
from hvd_elastic.records.wording import TRAINS
from hvd_elastic.run_events import Metrics, RunFinished, Waiting, WorkerStarted


def run_row(folder: RunFolder) -> dict[str, Any]:
    """Return a row of the list of runs, read from the last events only to be fast."""
    alive = folder.leader_alive()  # before its last events are read
    asked = folder.read_run()
    plain = bool(asked.get("plain"))
    kinds = (Waiting, WorkerStarted) if plain else (Metrics,)
    summary = summarize(folder.last_events(RunFinished, *kinds))
    if summary.status == "unknown" and summary.ended:
        summary.status = "running"
    state, _ = folder.state_of(summary, alive=alive)
    last, trains = summary.last, state in TRAINS
    size = summary.size or int(last.get("size", 0)) if trains else 0
    done = last.get("done")
    return {
        "run_id": folder.run_id,
        "status": state,
        "created": folder.created,
        "plain": plain,
        "submitted": "slurm" in asked,
        "steps": summary.steps,
        "size": size,
        "throughput": last.get("throughput") if trains else None,
        "done": 1.0 if state == "succeeded" else done if isinstance(done, float) else None,
        "folder": str(folder.path),
    }
