"""Implement ``dashboard`` and ``top``, which show runs while they train, and ``report``."""

# ruff: noqa: D301  (the backspace tells the command line to keep the lines of the examples)
from __future__ import annotations

import sys
import time
import webbrowser
from collections import deque
from pathlib import Path
from typing import Annotated

from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.options import (
    AsJson,
    OptionalRun,
    argument,
    number_option,
    option,
    port_option,
)
from hvd_elastic.cli.output import print_json, print_rows
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import clock_words, count, duration_words, printable, unfiltered
from hvd_elastic.records.audit import AuditResult
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.records.wording import (
    left_out_words,
    metric_words,
    outcome_words,
    rescale_words,
    saved_words,
    skipped_words,
)

_PIECE_BYTES = 1 << 21
"""Bytes of events that are read together."""


def dashboard(
    runs: Annotated[
        list[str] | None, argument("a run, or several to compare (default: all runs)", "RUN")
    ] = None,
    host: Annotated[str, option("address to listen on", metavar="ADDRESS")] = ("127.0.0.1"),
    port: Annotated[int, port_option("port to listen on; 0: a free one")] = 0,
    control: Annotated[
        bool, option("let pages scale, drain and stop runs; with a token", "--control")
    ] = False,
) -> None:
    """Serve live pages of the runs of this machine, until Ctrl-C.

    It reads run folders only: a run that is over, or was copied from elsewhere, is shown as well.
    From another machine, log in by [bold]ssh -L 8000:localhost:8000[/bold] and give --port 8000.
    With another address than one of this machine alone, the printed address has a token.

    Examples:
      hvd-elastic dashboard

      hvd-elastic dashboard digits-3 --port 8000

      hvd-elastic dashboard digits-3 digits-4
    """
    from hvd_elastic.cli.jobs.naming import open_run
    from hvd_elastic.views.server import Dashboard, serve_until_interrupted

    shown = [open_run(run).run_id for run in runs or []]
    server = Dashboard(host, port, control=control)
    url = server.url_of(shown)
    print(f"dashboard: {url}   (Ctrl-C ends it; /metrics is for Prometheus)", flush=True)
    serve_until_interrupted(server)


def top(
    run: OptionalRun = None,
    interval: Annotated[
        float, number_option("seconds between two looks", "--interval", above=True)
    ] = 1.0,
) -> None:
    """Show a run live on the terminal, until it ends or Ctrl-C.

    Examples:
      hvd-elastic top

      hvd-elastic top digits-3 --interval 5
    """
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from hvd_elastic.cli.jobs.naming import open_run
    from hvd_elastic.records.summary import RunSummary, take_events
    from hvd_elastic.records.wording import Narrator, status_rows
    from hvd_elastic.views.allocation import host_rows
    from hvd_elastic.views.costs import forecast_words, predict_end
    from hvd_elastic.views.page import thin_out

    folder = open_run(run)
    submitted = folder.is_submitted
    follower, narrator, summary = folder.follow_events(), Narrator(), RunSummary()
    latest: deque[str] = deque(maxlen=8)

    def plain(text: str) -> Text:
        return Text(printable(text))  # of a str rich would take [red] for a colour

    def look() -> tuple[Group, bool]:
        alive = folder.leader_alive()
        while events := follower.poll(_PIECE_BYTES):
            take_events(summary, events)
            thin_out(summary)
            for event in events:
                stamp = clock_words(event.t)
                latest.extend(f"{stamp}  {line.text}" for line in narrator.tell(event))
        summary.run_id = folder.run_id
        state, until = folder.state_of(summary, alive=alive)
        shown = Table.grid(padding=(0, 2))
        rate, size = summary.last.get("throughput"), summary.trains_now(state)
        path, resume, now = str(folder.path), folder.resume_command, time.time()
        rows = status_rows(summary, state, until, path, now, resume, submitted=submitted)
        for name, text in rows:
            shown.add_row(name, plain(text))
            if name == "progress" and rate and size:
                shown.add_row("speed", f"{rate:,.0f} examples/s on {count(size, 'worker')}")
            done = summary.last.get("done")
            if name == "progress" and size and isinstance(done, float):
                shown.add_row("to go", forecast_words(summary, done, predict_end(summary)))
        busy = Table(box=None, padding=(0, 2, 0, 0))
        for head in ("host", "slots", "step", "CPU", "memory", "sent", "received"):
            busy.add_column(head, justify="left" if head == "host" else "right")
        for name, cells in host_rows(summary, state):
            busy.add_row(*map(plain, (name, *cells)))
        told = Table.grid()
        for line in reversed(latest):  # where the window ends, the oldest are cut off
            told.add_row(plain(line.splitlines()[0]))
        hosts: list[RenderableType] = [busy, ""] if busy.row_count else []
        return Group(shown, "", *hosts, told), alive or state in ("starting", "leaderless")

    console = Console(file=unfiltered(sys.stdout))
    on_screen = console.is_terminal
    with Live(console=console, auto_refresh=False, screen=on_screen, transient=True) as live:
        while True:
            group, goes_on = look()
            live.update(group, refresh=True)
            if not goes_on:
                break
            time.sleep(interval)
    console.print(group)  # a screen of its own is gone


def report(
    run: OptionalRun = None,
    out: Annotated[
        Path | None, option("file to write (default: report.html in the run folder)")
    ] = None,
    cluster: Annotated[
        bool, option("report on a cluster that jobs share; RUN is its name", "--cluster")
    ] = False,
    compare: Annotated[
        list[str] | None,
        option("plot this run in the same plots; may be repeated", "--compare", metavar="RUN"),
    ] = None,
    open_: Annotated[bool, option("open it in a browser", "--open")] = False,
    as_json: AsJson = False,
) -> None:
    """Summarize a run, and plot it in one HTML file that needs no network.

    \b
    Examples:
      hvd-elastic report
      hvd-elastic report digits-3 --out digits.html --open
      hvd-elastic report digits-3 --compare digits-2
      hvd-elastic report --cluster gpus
    """
    from hvd_elastic.views.report import write_report

    if cluster:
        if compare:
            raise UsageError("--compare is for runs, and --cluster for the cluster of many jobs")
        path = _report_cluster(run, out, as_json=as_json)
        if open_:
            _open(path)
        return
    folder = open_run(run)
    if compare:
        path = folder.path / "comparison.html" if out is None else out
        _compare([folder, *map(open_run, compare)], path, as_json)
        if open_:
            _open(path)
        return
    result = write_report(folder, out)
    if as_json:
        print_json(
            {
                "path": str(result.path),
                "audit": {
                    "recorded": result.audit.recorded,
                    "ok": result.audit.ok,
                    "sentence": result.audit.sentence(),
                    "problems": result.audit.problems(),
                    "unrecorded": result.audit.unrecorded,
                    "skipped": result.audit.skipped,
                },
                **result.summary.as_json(),
            }
        )
    else:
        rows = _report_rows(result.summary, result.audit)
        print_rows([*rows, ("report", str(result.path))])
    if open_:
        _open(result.path)


def _report_cluster(name: str | None, out: Path | None, *, as_json: bool) -> Path:
    from hvd_elastic.views.cluster_page import write_cluster_report

    path, summary = write_cluster_report(name, out)
    if as_json:
        print_json({"path": str(path), **summary.as_json()})
        return path
    ended = [job for job in summary.jobs.values() if job.ended_s is not None]
    waits_s = [job.wait_s(summary.duration_s) for job in summary.jobs.values()]
    took_s = [job.ended_s - job.submitted_s for job in ended if job.ended_s is not None]
    rows = [
        (
            "cluster",
            f"{summary.name}: {count(len(summary.hosts), 'host')}, {count(summary.slots, 'slot')}",
        ),
        ("jobs", f"{len(summary.jobs)}, {len(ended)} of them over"),
        ("wait", f"{duration_words(sum(waits_s) / len(waits_s))} in the mean"),
    ]
    if took_s:
        mean_s = sum(took_s) / len(took_s)
        rows.append(("completion", f"{duration_words(mean_s)} in the mean"))
    print_rows([*rows, ("report", str(path))])
    return path


def _compare(folders: list[RunFolder], path: Path, as_json: bool) -> None:
    from hvd_elastic.views.comparison import write_comparison

    found = write_comparison(folders, path)
    if as_json:
        print_json({"path": str(path), "runs": [summary.as_json() for summary in found]})
        return
    for summary in found:
        outcome = _outcome(summary, summary.status)
        print(f"{summary.run_id}: {outcome}, {duration_words(summary.duration_s)}")
    print(f"report: {path}")


def _outcome(summary: RunSummary, state: str) -> str:
    steps, examples = None if summary.plain else summary.steps, summary.examples
    return outcome_words(state, steps, examples, summary.message, exact=summary.exact)


def _open(path: Path) -> None:
    if not webbrowser.open(path.resolve().as_uri()):
        print(f"no browser found here; open {path} yourself", file=sys.stderr)


def _report_rows(summary: RunSummary, audit: AuditResult) -> list[tuple[str, str]]:
    """Return the rows of a report: label and text."""
    rows = [
        ("run", f"{summary.run_id}: {_outcome(summary, summary.status)}"),
        ("took", duration_words(summary.duration_s)),
    ]
    metrics = summary.final_metrics()
    if metrics:
        rows.append(("metrics", metric_words(metrics)))
    left_out = left_out_words(summary.last)
    if left_out:
        rows.append(("left out", left_out))
    if summary.skipped:
        rows.append(("skipped", skipped_words(summary.skipped)))
    if not summary.plain:
        rows.append(("rescales", rescale_words(summary)))
    if summary.input:
        rows.append(("data", summary.input))
    if summary.saved:
        rows.append(("saved", saved_words(summary)))
    if audit.recorded:
        rows.append(("examples", audit.sentence()))
    return rows
