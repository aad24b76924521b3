"""Commands that show runs, from the run folder only: status, list, logs, attach and discover."""

# ruff: noqa: D301  (the backspace tells the command line to keep the lines of the examples)
from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.options import AsJson, OptionalRun, option, whole_number_option
from hvd_elastic.cli.output import print_json, print_rows
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import (
    clock_words,
    count,
    shown_line,
    worker_name,
)
from hvd_elastic.records.events import as_record, decode_output
from hvd_elastic.records.json_lines import Follower, LineFollower
from hvd_elastic.records.run_folder import RunFolder, list_runs
from hvd_elastic.records.run_row import run_row
from hvd_elastic.records.summary import summarize
from hvd_elastic.records.wording import IN_QUEUE, Line, Narrator, status_rows
from hvd_elastic.run_events import (
    HostDraining,
    HostReturned,
    HostsChanged,
    HostSlots,
    Output,
    ReadEvent,
    RunFinished,
    RunStarted,
)

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
    latest: deque[tuple[float, Line]] = deque(maxlen=_LATEST)
    summary = summarize(_told(folder.iter_events(), latest))
    summary.run_id = folder.run_id
    state, until = folder.state_of(summary, alive=alive)
    summary.status = state
    if as_json:
        print_json(
            {
                **summary.as_json(),
                "leader_alive": alive,
                "leader": folder.leader(),
                "leaderless_until": until if state == "leaderless" else None,
                "folder": str(folder.path),
            }
        )
        return
    path, submitted = str(folder.path), folder.is_submitted
    resume, now = folder.resume_command, time.time()
    print_rows(status_rows(summary, state, until, path, now, resume, submitted=submitted))
    if latest:
        print("\nlatest")
    for t, line in latest:
        stamp = clock_words(t)
        first, *more = line.text.splitlines() or [""]
        # Of a traceback the last line says what was wrong.
        print(f"  {stamp}  {first} {more[-1].strip()}" if more else f"  {stamp}  {first}")


def list_(
    as_json: AsJson = False,
    limit: Annotated[
        int, whole_number_option("number of runs to show; 0 = all", "--limit", "-n", least=0)
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
    print(f"{'RUN':<{width}}  {'STATUS':<10} {'STARTED':<16} {'STEPS':>9}  WORKERS")
    for row in rows:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"]))
        queued = row["submitted"] and row["status"] == "never began"
        state = "in queue?" if queued else row["status"]
        print(
            f"{row['run_id']:<{width}}  {state:<10} {started} {_steps_of(row):>9}  "
            f"{row['size'] or ''}"
        )
    if len(rows) < len(runs):
        print(f"and {count(len(runs) - len(rows), 'older run')}: hvd-elastic list -n 0")


def _steps_of(row: Mapping[str, Any]) -> str:
    return "command" if row["plain"] else str(row["steps"])


def logs(
    run: OptionalRun = None,
    follow: Annotated[bool, option("wait for more until the run ends", "--follow", "-f")] = False,
    host: Annotated[str | None, option("show the workers of this host only")] = None,
    lines: Annotated[
        int,
        whole_number_option(
            "number of last lines of each worker; 0 = all", "--lines", "-n", least=0
        ),
    ] = 50,
    leader: Annotated[
        bool, option("show the output of a detached leader instead", "--leader")
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
        found, followers[path] = last_lines(path, lines, whole=follow)
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
    events = folder.follow_events(last_bytes=_HISTORY_BYTES)
    output = Follower(folder.output, decode_output, last_bytes=_HISTORY_BYTES)
    ended: RunFinished | None = None
    follows = ends_now = False
    try:
        with RunView() as view:
            while True:
                alive = folder.leader_alive()
                news = [*events.poll(), *output.poll()]
                for event in sorted(news, key=attrgetter("t")):
                    match event:
                        case RunFinished():
                            ended, ends_now = event, follows
                        case RunStarted():
                            ended, ends_now = None, False
                    if as_json:
                        print(json.dumps(as_record(event)), flush=True)
                    elif isinstance(event, Output):
                        view.output(event.host, event.local_rank, event.line)
                    else:
                        view.show(event)
                # An end before this may be an earlier one, of a run that is just being resumed.
                if ends_now or not alive:
                    break
                follows = True
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        print(
            f"detached; run {folder.run_id} continues. End it with: hvd-elastic stop "
            f"{folder.run_id}",
            file=sys.stderr,
        )
        return
    if ended is None:
        raise RunError(
            f"the leader of run {folder.run_id} is not alive and the run is not finished. "
            f"Go on with: {folder.resume_command}"
            + (f". {IN_QUEUE}" if folder.is_submitted else "")
        )
    if ended.status != "succeeded":
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
    hosts: list[HostSlots] | None = None
    drained: set[str] = set()
    for event in folder.iter_events():
        match event:
            case HostsChanged() | RunStarted():
                hosts = event.hosts
                drained &= {name for name, _ in hosts}
            case HostDraining(host=host):
                drained.add(host)
            case HostReturned(host=host):
                drained.discard(host)
    if hosts is None:
        raise RunError(
            f"run {folder.run_id} has not reported its hosts yet; see: hvd-elastic status "
            f"{folder.run_id}"
        )
    hosts = [host for host in hosts if host.name not in drained]
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


def _told(events: Iterable[ReadEvent], latest: deque[tuple[float, Line]]) -> Iterator[ReadEvent]:
    """Yield the events, and add the lines that tell of them to ``latest``."""
    narrator = Narrator()
    for event in events:
        latest.extend((event.t, line) for line in narrator.tell(event))
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


def last_lines(path: Path, count: int, *, whole: bool) -> tuple[list[bytes], LineFollower]:
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
