"""Train on three virtual hosts of one machine while hosts join, leave and fail.

A convolutional network learns handwritten digits on two hosts. The third host joins, one is asked
to leave and comes back, and a worker is killed with ``kill -9``. At the end the demo prints the
accuracy, whether every example was used exactly once in each epoch, the pause of each rescale, and
the path of an HTML report.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hvd_elastic.bench.digits_data import write_digits
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.hosts.ssh import SshOptions
from hvd_elastic.programs.processes import environment
from hvd_elastic.records.audit import AuditResult
from hvd_elastic.records.run_folder import RunFolder, new_run_id
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.run_events import Metrics, RescaleFinished
from hvd_elastic.signals import ended_by_signals
from hvd_elastic.tools.copy.copying import copy_to_hosts
from hvd_elastic.views.report import write_report
from hvd_elastic.virtual import VirtualCluster

_TRAINING = Path(__file__).with_name("digits.py")
"""The training script; in a checkout a link to the example of that name."""
ACCURACY_WANTED = 0.97
_DEADLINE_S = 600.0
"""Time limit for a job that hangs; the demo takes two minutes on two idle cores."""
_STEPS_BETWEEN = 60
"""Training steps between two changes of the cluster."""


@dataclass
class Act:
    """A change of the cluster.

    Attributes:
        do: function that makes the change.
        size_after: number of processes once training has adapted to it.
        generations: number of rescales until then.
    """

    title: str
    do: Callable[[], None]
    size_after: int
    generations: int


class Story:
    """Follows the events of a run and makes the changes of the cluster one after the other."""

    def __init__(self, folder: RunFolder, acts: list[Act], say: Callable[[str], None]) -> None:
        self._events = folder.follow_events()
        self._acts = acts
        self._say = say
        self._current: Act | None = None
        self._generations = 0
        self._size = 0
        self._settled_at: int | None = None
        self._step = 0

    @property
    def over(self) -> bool:
        """Return whether training has adapted to every change."""
        return not self._acts and self._current is None

    def read_events(self) -> None:
        """Read new events; begin the next act when training has gone on for a while."""
        for event in self._events.poll():
            match event:
                case RescaleFinished(size=size):
                    self._generations += 1
                    self._size = size
                    self._settled_at = self._step
                case Metrics(step=step):
                    self._step = step
                    if self._settled_at is None:
                        self._settled_at = step
        act = self._current
        if (
            act is not None
            and self._generations >= act.generations
            and (self._size == act.size_after)
        ):
            self._current = None
            self._settled_at = self._step
        quiet = self._settled_at is not None and self._step - self._settled_at >= _STEPS_BETWEEN
        if self._current is None and self._acts and self._generations and quiet:
            act = self._acts.pop(0)
            act.generations += self._generations
            self._current = act
            self._say(act.title)
            act.do()


def play(console: Console, loopback: bool, epochs: int, as_json: bool) -> int:
    """Create the hosts, run the job, and print the result.

    Args:
        loopback: whether to use loopback addresses instead of network namespaces.

    Returns:
        The exit status.
    """

    def say(text: str) -> None:
        console.print(f"[bold cyan]demo[/]  {text}")

    say("making three virtual hosts, each with its own sshd")
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="hvd_elastic-demo-") as temporary,
        # Workers start in the current folder.
        VirtualCluster.up(3, 1, loopback=loopback or None, shares=[Path.cwd()]) as cluster,
    ):
        first, second, third = cluster.hosts
        where = "addresses of the loopback network" if cluster.loopback else "network namespaces"
        say(f"{', '.join(cluster.hosts)}: {where}")
        data = cluster.folder / "digits" if cluster.loopback else Path("/data/digits")
        say(f"copying the data set to {data} of every host")
        prepare_data(Path(temporary) / "digits", data, cluster)
        hostfile = Path(temporary) / "hosts"

        def use(*hosts: str) -> None:
            replacement = hostfile.with_suffix(".new")
            replacement.write_text("".join(f"{host} slots=1\n" for host in hosts))
            replacement.replace(hostfile)

        def kill_worker() -> None:
            os.kill(worker_on(cluster, second), signal.SIGKILL)

        use(first, second)
        run_id = new_run_id()
        acts = [
            Act(
                f"{third} joins: a line is added to the hostfile", lambda: use(*cluster.hosts), 3, 1
            ),
            Act(
                f"{first} is asked to leave: its line is taken out",
                lambda: use(second, third),
                2,
                1,
            ),
            Act(f"{first} comes back", lambda: use(*cluster.hosts), 3, 1),
            Act(f"kill -9 of the worker on {second}", kill_worker, 3, 2),
        ]
        command = [
            *(sys.executable, "-m", "hvd_elastic.cli.app", "run", "--run-id", run_id),
            *("--hostfile", str(hostfile), "--ssh-config", str(cluster.ssh_config)),
            *("--audit", "--checkpoint-every", "5", "--", sys.executable),
            *(str(_TRAINING), "--data", str(data)),
            *("--epochs", str(epochs), "--step-time", "0.015", "--quiet"),
        ]
        say(f"hvd-elastic run --hostfile {hostfile} -- python {_TRAINING} …")
        begin = time.monotonic()
        with leader(command, quiet=as_json) as process:
            story: Story | None = None
            while process.poll() is None:
                time.sleep(0.05)
                if story is None:
                    with contextlib.suppress(RunError):
                        story = Story(RunFolder.open(run_id), acts, say)
                else:
                    story.read_events()
                if time.monotonic() - begin > _DEADLINE_S:
                    raise RunError(f"the demo did not end within {_DEADLINE_S:.0f} s; see {run_id}")
        result = write_report(RunFolder.open(run_id))
        complete = story is not None and story.over
    return show(console, result.summary, result.audit, result.path, complete, as_json)


def prepare_data(folder: Path, target: Path, cluster: VirtualCluster) -> None:
    """Write the dataset and copy it to every host."""
    write_digits(folder)
    hosts = parse_hostfile(cluster.hostfile).hosts
    options = SshOptions(config_path=cluster.ssh_config)
    for result in copy_to_hosts(hosts, folder, str(target), options):
        if not result.ok:
            raise RunError(f"copying to {result.host.name} failed: {result.error}")


@contextlib.contextmanager
def leader(command: list[str], *, quiet: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Run the leader in another process, which ends with the context."""
    output = subprocess.DEVNULL if quiet else None
    # The virtual hosts share the cores of this machine, so each worker gets one thread.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, stdout=output, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        if process.poll() is None:
            process.kill()


def worker_on(cluster: VirtualCluster, host: str) -> int:
    """Return the process id of the training worker on a host."""
    for pid in sorted(cluster.pids(host)):
        if environment(pid).get("HVD_ELASTIC_HOST") == host:
            return pid
    raise RunError(f"no worker was found on {host}")


def show(
    console: Console,
    summary: RunSummary,
    audit: AuditResult,
    report: Path,
    complete: bool,
    as_json: bool,
) -> int:
    """Print the summary and return the exit status."""
    accuracy = summary.final_metrics().get("test_accuracy")
    accurate = accuracy is not None and accuracy >= ACCURACY_WANTED
    good = summary.status == "succeeded" and audit.ok and accurate and complete
    if as_json:
        content: dict[str, Any] = {
            "ok": good,
            "test_accuracy": accuracy,
            "summary": summary.as_json(),
            "exactly_once": audit.ok,
            "report": str(report),
        }
        print(json.dumps(content, indent=2))
        return 0 if good else 1
    table = Table(title="What came of it", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "status",
        f"{summary.status}, {count(summary.steps, 'step')}, {count(summary.epochs, 'epoch')}",
    )
    shown = "none" if accuracy is None else f"{accuracy:.2%}"
    table.add_row("test accuracy", f"{shown} (wanted: at least {ACCURACY_WANTED:.0%})")
    table.add_row("examples", audit.sentence())
    for rescale in summary.rescales:
        pause_s = rescale.pause_s
        pause = "" if pause_s is None else f" (pause {duration_words(pause_s)})"
        table.add_row(f"{rescale.from_size} → {rescale.to_size} slots", f"{rescale.reason}{pause}")
    table.add_row("report", str(report))
    console.print(table)
    if not complete:
        console.print("[red]training ended before everything of the demo had happened[/]")
    return 0 if good else 1
