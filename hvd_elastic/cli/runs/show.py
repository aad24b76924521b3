"""Commands that show runs, from the run folder only: status, list, logs, attach and discover."""

# ruff: noqa: D301  (the backspace tells the command line to keep the lines of the examples)
from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.numbers import whole_number_option
from hvd_elastic.cli.output import print_json, print_rows
from hvd_elastic.cli.shared_options import AsJson, OptionalRun
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import (
    bytes_words,
    count,
    duration_words,
    number_words,
    shown_line,
    worker_name,
)
from hvd_elastic.records.json_lines import EventFollower, LineFollower, Record, iter_events
from hvd_elastic.records.run_folder import RunFolder, list_runs
from hvd_elastic.records.run_state import run_row, run_state
from hvd_elastic.records.summary import Draining, RunSummary, summarize
from hvd_elastic.records.wording import Line, Narrator, left_out_words, progress_words

_POLL_S = 0.1  # between two readings of files that are followed
_TAIL_BYTES = 256 * 1024  # holds most tails of logs
_LATEST = 8  # lines that fit below the status
_HISTORY_BYTES = 8 << 20  # of events and of output before attach: hours, where a run takes weeks


def status(run: OptionalRun = None, as_json: AsJson = False) -> None:
    """Show the status of a run: progress, hosts, rescales and the policy's last decision.

    \b
    Examples:
      hvd-elastic status
      hvd-elastic status digits-3 --json
    """
    folder = open_run(run)
    alive = folder.leader_alive()
    latest: deque[tuple[Record, Line]] = deque(maxlen=_LATEST)
    summary = summarize(_told(folder.iter_events(), latest))
    summary.run_id = folder.run_id
    until = None if alive else folder.leaderless_until(summary.ended)
    state = run_state(summary.status, alive=alive, waiting=bool(summary.waiting), until=until)
    if as_json:
        print_json(
            {
                **summary.as_json(),
                "status": state,
                "leader_alive": alive,
                "leader": folder.leader(),
                "leaderless_until": until if state == "leaderless" else None,
                "folder": str(folder.path),
            }
        )
        return
    print_rows(status_rows(folder, summary, state, until))
    if latest:
        print("\nlatest")
    for event, line in latest:
        stamp = time.strftime("%H:%M:%S", time.localtime(event.get("t")))
        print(f"  {stamp}  {line.text.splitlines()[0] if line.text else ''}")


def list_(
    as_json: AsJson = False,
    limit: Annotated[
        int, whole_number_option("--limit", "-n", least=0, help="How many runs; 0 = all.")
    ] = 20,
) -> None:
    """List runs, newest first.

    \b
    Examples:
      hvd-elastic list
      hvd-elastic list -n 0 --json
    """
    runs = list_runs()
    rows = [run_row(run) for run in (runs[:limit] if limit else runs)]
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no runs in {runs_folder()}")
        return
    width = max(len(row["run_id"]) for row in rows)
    print(f"{'RUN':<{width}}  {'STATUS':<10} {'STARTED':<16} {'STEPS':>9}  SIZE")
    for row in rows:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"]))
        print(
            f"{row['run_id']:<{width}}  {row['status']:<10} {started} {_steps_of(row):>9}  "
            f"{row['size'] or ''}"
        )
    if len(rows) < len(runs):
        print(f"and {count(len(runs) - len(rows), 'older run')}: hvd-elastic list -n 0")


def _steps_of(row: Mapping[str, Any]) -> str:
    return "command" if row["plain"] else str(row["steps"])


def logs(
    run: OptionalRun = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more until the run ends.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Only the workers of this host.")] = None,
    lines: Annotated[
        int,
        whole_number_option("--lines", "-n", least=0, help="Last lines of each worker; 0 = all."),
    ] = 50,
    leader: Annotated[
        bool, typer.Option("--leader", help="The output of a detached leader instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show or follow the output of the workers, each line with its worker.

    \b
    Examples:
      hvd-elastic logs
      hvd-elastic logs digits-3 -f --host node2
      hvd-elastic logs digits-3 --leader -n 200
    """
    folder = open_run(run)
    followers: dict[Path, LineFollower] = {}
    paths = _log_paths(folder, host, leader)
    alive = folder.leader_alive()
    if not paths and not (follow and alive):
        _explain_no_logs(folder, host, leader, alive)
    for path in paths:
        found, followers[path] = _last_lines(path, lines, whole=follow)
        for line in found:
            _print_log_line(path, line, as_json)
    # Whether the leader is alive is checked before reading, so that its last output is shown.
    while follow and folder.leader_alive():
        time.sleep(_POLL_S)
        for path in _log_paths(folder, host, leader):
            for line in followers.setdefault(path, LineFollower(path)).poll():
                _print_log_line(path, line, as_json)
    for path in _log_paths(folder, host, leader) if follow else []:
        for line in followers.setdefault(path, LineFollower(path)).poll_rest():
            _print_log_line(path, line, as_json)


def attach(run: OptionalRun = None, as_json: AsJson = False) -> None:
    """Follow a run as if it ran in this terminal; Ctrl-C detaches and leaves it running.

    The exit status is 0 when the run succeeded or was detached from, else 1.

    \b
    Examples:
      hvd-elastic attach
      hvd-elastic attach digits-3
      hvd-elastic attach digits-3 --json     one event a line
    """
    from hvd_elastic.views.terminal import RunView

    folder = open_run(run)
    # Events are read first: when the end of the run is read, all output can be read too.
    paths = (folder.events, folder.output)
    followers = [EventFollower(path, last_bytes=_HISTORY_BYTES) for path in paths]
    ended: Record | None = None
    try:
        with RunView() as view:
            while True:
                alive = folder.leader_alive()
                news = [event for follower in followers for event in follower.poll()]
                for event in sorted(news, key=lambda event: float(event.get("t") or 0.0)):
                    if as_json:
                        print(json.dumps(event), flush=True)
                    elif event["kind"] == "output":
                        view.output(event["host"], event["local_rank"], event["line"])
                    else:
                        view.show(event)
                    if event["kind"] in {"run_finished", "run_started"}:
                        ended = event if event["kind"] == "run_finished" else None
                if ended is not None or not alive:
                    break
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        print(
            f"detached; run {folder.run_id} goes on. End it with: hvd-elastic stop {folder.run_id}",
            file=sys.stderr,
        )
        return
    if ended is None:
        raise RunError(
            f"the leader of run {folder.run_id} is not alive and the run is not finished. "
            f"Go on with: hvd-elastic run --resume {folder.run_id}"
        )
    if ended.get("status") != "succeeded":
        raise typer.Exit(1)


def discover(run: OptionalRun = None, as_json: AsJson = False) -> None:
    """Print a run's current hosts in the format of horovodrun --host-discovery-script.

    \b
    Examples:
      hvd-elastic discover digits-3
      echo 'exec hvd-elastic discover digits-3' > hosts.sh; chmod +x hosts.sh
      horovodrun -np 2 --host-discovery-script ./hosts.sh python train.py
    """
    folder = open_run(run)
    hosts = None
    drained: set[str] = set()
    for event in iter_events(folder.events):
        if event["kind"] in {"hosts_changed", "run_started"} and "hosts" in event:
            hosts = [(str(name), int(slots)) for name, slots in event["hosts"]]
            drained &= {name for name, _ in hosts}
        elif event["kind"] == "host_draining":
            drained.add(event["host"])
        elif event["kind"] == "host_returned":
            drained.discard(event["host"])
    if hosts is None:
        raise RunError(
            f"run {folder.run_id} has not told its hosts yet; see: hvd-elastic status "
            f"{folder.run_id}"
        )
    hosts = [(name, slots) for name, slots in hosts if name not in drained]
    if not folder.leader_alive():
        print(
            f"warning: run {folder.run_id} has no live leader; these are its last hosts",
            file=sys.stderr,
        )
    if as_json:
        print_json([{"host": name, "slots": slots} for name, slots in hosts])
        return
    for name, slots in hosts:
        if slots > 0:
            print(f"{name}:{slots}")


def status_rows(
    folder: RunFolder, summary: RunSummary, state: str, until: float | None
) -> list[tuple[str, str]]:
    """Return what there is to say of a run: label and text of each row."""
    words = {
        "leaderless": (
            "the leader is gone, and the hosts train on without one until about "
            f"{time.strftime('%H:%M:%S', time.localtime(until))}; take them over with: "
            f"hvd-elastic run --resume {folder.run_id}"
        ),
        "died": f"died: no live leader; go on with: hvd-elastic run --resume {folder.run_id}",
        "waiting": summary.waiting,
        "failed": f"failed: {summary.message}" if summary.message else "failed",
        "succeeded": f"succeeded: {summary.message}" if summary.stopped_for else "succeeded",
    }
    began = failure = checkpoint = ""
    if summary.started is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.started))
        began += f", {duration_words(summary.duration_s)} until its last event"
    if summary.checkpoints:
        checkpoint = f"step {summary.checkpoints[-1].step}, {summary.checkpoints[-1].path}"
    if summary.failure:
        last_line = summary.failure.rstrip().rpartition("\n")[2]
        failure = f"worker {summary.failed_worker}: {last_line}"
        if summary.plain:
            failure = ""  # the status says it
    # The last metrics may belong to an earlier epoch than the last step.
    epoch = summary.last.get("epoch") if summary.ended_in is None else summary.ended_in
    reached = {**summary.last, "step": summary.steps, "epoch": epoch}
    own = {name: value for name, value in summary.final_metrics().items() if name != "loss"}
    hosts = [f"{name}:{slots}" for name, slots in summary.hosts]
    reading = [f"{name} ({count(n, 'process')})" for name, n in summary.input_hosts.items()]
    draining = [
        f"{name}: {'drained' if found.empty else _time_left_words(summary, found)} ({found.cause})"
        for name, found in summary.draining.items()
    ]
    decided = [said.text for said in summary.decisions if said.kind == "decision"]
    rows = [
        ("run", folder.run_id),
        ("status", words.get(state, state)),
        ("started", began),
        ("progress", "" if summary.plain else progress_words(reached, summary.size)),
        ("metrics", metric_words(own)),
        ("left out", left_out_words(summary.last)),
        ("batch", _batch_words(summary) if summary.batch_plan else ""),
        ("hosts", " ".join(hosts)),
        ("input hosts", " ".join(reading)),
        ("data", summary.input),
        ("shares", summary.shares),
        ("pinned", " ".join(summary.pinned)),
        *(("draining", text) for text in draining),
        ("rescales", "" if summary.plain else rescale_words(summary)),
        ("decision", decided[-1] if decided else ""),
        ("missed", summary.missed),
        ("checkpoint", checkpoint),
        ("saved", saved_words(summary)),
        ("folder", str(folder.path)),
        ("failure", failure),
    ]
    return [(label, text) for label, text in rows if text]


def _time_left_words(summary: RunSummary, found: Draining) -> str:
    """Return a text that says how much time is left to drain a host."""
    if found.leave_in_s is None or summary.started is None:
        return "being left"
    left_s = summary.started + found.at_s + found.leave_in_s - time.time()
    return f"being left, {duration_words(left_s)} remain" if left_s > 0 else "being left, overdue"


def _batch_words(summary: RunSummary) -> str:
    plan = summary.batch_plan
    text = f"{number_words(plan.get('global_batch_size'))} examples"
    limits = plan.get("limits")
    if isinstance(limits, dict):
        initial, most = (limits.get(f"{name}_batch_size") for name in ("initial", "max"))
        text += f" ({number_words(initial)} at first, at most {number_words(most)})"
    for name, unit in (("noise_scale", " examples"), ("efficiency", "")):
        if name in summary.last:
            text += f", {name.replace('_', ' ')} {number_words(summary.last[name])}{unit}"
    return text


def metric_words(metrics: dict[str, Any]) -> str:
    """Return names and values of metrics, as one line."""
    return ", ".join(f"{name} {number_words(value)}" for name, value in metrics.items())


def saved_words(summary: RunSummary) -> str:
    """Return the files that the script has saved: name, step and size of each."""
    return ", ".join(
        f"{name} (step {saved.step}, {bytes_words(saved.size_bytes)})"
        for name, saved in summary.saved.items()
    )


def rescale_words(summary: RunSummary) -> str:
    """Return how many rescales a run had, and the longest pause of one."""
    pause_s = summary.longest_pause_s
    longest = f", longest pause {duration_words(pause_s)}" if pause_s is not None else ""
    return f"{len(summary.live_rescales)}{longest}"


def _told(events: Iterable[Record], latest: deque[tuple[Record, Line]]) -> Iterator[Record]:
    """Yield the events, and add the lines that tell of them to ``latest``."""
    narrator = Narrator()
    for event in events:
        latest.extend((event, line) for line in narrator.tell(event))
        yield event


def _log_paths(folder: RunFolder, host: str | None, leader: bool) -> list[Path]:
    if leader:
        return [folder.leader_log] if folder.leader_log.exists() else []
    paths = [path for path in folder.logs.glob("*.log") if path.is_file()]
    if host is not None:
        paths = [path for path in paths if _worker_of(path)[0] == host]
    return sorted(paths, key=lambda path: (_worker_of(path)[0], len(path.name), path.name))


def _worker_of(path: Path) -> tuple[str, str]:
    host, _, local_rank = path.stem.rpartition(".")
    return host, local_rank


def _explain_no_logs(folder: RunFolder, host: str | None, leader: bool, alive: bool) -> None:
    """Print that there are no logs; raise RunError if a specific log was requested."""
    if leader:
        raise RunError(
            f"run {folder.run_id} has no {folder.leader_log.name}: only a run started with "
            "--detach has one"
        )
    hosts = sorted({_worker_of(path)[0] for path in _log_paths(folder, None, False)})
    if host is not None and hosts:
        raise RunError(
            f"run {folder.run_id} has no log of host {host!r}. It has logs of: {', '.join(hosts)}"
        )
    printed = "have printed nothing yet" if alive else "printed nothing"
    print(f"the workers of run {folder.run_id} {printed}", file=sys.stderr)


def _last_lines(path: Path, count: int, *, whole: bool) -> tuple[list[bytes], LineFollower]:
    """Return the last lines of a file (0 = all), and a follower for later lines.

    With ``whole``, an incomplete last line is left to the follower.
    """
    size = path.stat().st_size
    tail_bytes = _TAIL_BYTES
    while True:
        start = max(0, size - tail_bytes) if count else 0
        follower = LineFollower(path, offset=start)
        found = follower.poll() if whole else follower.poll_rest()
        if start and count:
            if len(found) <= count:  # the first is only part of a line
                tail_bytes *= 8
                continue
            found = found[1:]
        return (found[-count:] if count else found), follower


def _print_log_line(path: Path, line: bytes, as_json: bool) -> None:
    text = shown_line(line.decode("utf-8", "replace"))
    host, local_rank = _worker_of(path)
    if as_json:
        print(json.dumps({"host": host, "local_rank": local_rank, "line": text}), flush=True)
    else:
        print(f"{worker_name(host, local_rank)} | {text}", flush=True)
