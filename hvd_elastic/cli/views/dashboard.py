"""Implement ``hvd-elastic dashboard`` and ``hvd-elastic top``: look on while runs train."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Annotated

from hvd_elastic.cli.options import OptionalRun, argument, number_option, option, port_option
from hvd_elastic.formatting import clock_words, count, printable, unfiltered

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
    """Show a run on the terminal as it goes on, until it ends or Ctrl-C.

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
    from hvd_elastic.records.wording import Narrator, run_state, status_rows
    from hvd_elastic.views.allocation import host_rows
    from hvd_elastic.views.costs import forecast_words, predict_end
    from hvd_elastic.views.points import thin_out

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
        until = None if alive else folder.leaderless_until(summary.ended)
        waiting = bool(summary.waiting)
        state = run_state(summary.status, alive=alive, waiting=waiting, until=until)
        shown = Table.grid(padding=(0, 2))
        rate = summary.last.get("throughput")
        path, resume, now = str(folder.path), folder.resume_command, time.time()
        rows = status_rows(summary, state, until, path, now, resume, submitted=submitted)
        for name, text in rows:
            shown.add_row(name, plain(text))
            if name == "progress" and rate and summary.size:
                shown.add_row("speed", f"{rate:,.0f} examples/s on {count(summary.size, 'worker')}")
            done = summary.last.get("done")
            if name == "progress" and summary.size and isinstance(done, float):
                shown.add_row("to go", forecast_words(summary, done, predict_end(summary)))
        busy = Table(box=None, padding=(0, 2, 0, 0))
        for head in ("host", "slots", "step", "CPU", "memory", "sent", "received"):
            busy.add_column(head, justify="left" if head == "host" else "right")
        for name, cells in host_rows(summary):
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
