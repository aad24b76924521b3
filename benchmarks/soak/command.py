"""Causes random faults of every kind while a real model trains on virtual hosts.

``python benchmarks/soak.py --minutes 10 --seed 3``. After every fault training must continue. At
the end every example must have been used exactly once in each epoch, all ranks must hold the same
parameters, nothing may be left on any host, and no process may have leaked memory. A seed always
gives the same faults, so a failed soak can be repeated, in full or in part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.soak.disks import small_disks
from benchmarks.soak.growth import grown, measure_growth
from benchmarks.soak.job import Ground, SoakJob, checked_end
from benchmarks.soak.player import Bounds, Player
from benchmarks.soak.records import check_steps, epochs_between, split_audit, step_problems
from benchmarks.soak.report import SoakResult, show_soak, write_soak
from benchmarks.soak.schedule import (
    KINDS,
    Fault,
    faults_of_seed,
    hosts_before,
    parse_kinds,
    parse_only,
    selected,
    starting_hosts,
)
from benchmarks.testbed.command import Say, end_with
from benchmarks.testbed.figures import conditions
from hvd_elastic.bench.digits_data import write_digits
from hvd_elastic.errors import UsageError
from hvd_elastic.records.audit import AuditResult, check_audit
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.virtual import VirtualCluster
from hvd_elastic.virtual.netns import why_no_namespaces

# Processes are found by the run's id, and several soaks may run on one machine.
_RUN_ID = f"soak-{os.getpid()}"
_CALM_RUN_ID = f"calm-{os.getpid()}"
_END_PATIENCE_S = 180.0
_CALM_S_PER_EPOCH = 10.0
_MOST_CALM_EPOCHS = 200  # the accuracy no longer changes then
_ACCURACY_TOLERANCE = 0.01


def main(arguments: list[str] | None = None) -> int:
    """Run the soak with its command line; return the exit status."""
    options = _parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)

    def measure() -> int:
        _check_options(options)
        with _progress(console) as (say, show):
            soak = Soak(options, say)
            if options.list:
                return soak.print_schedule()
            result = soak.run(show)
        page = write_soak(result, options.report) if options.report is not None else None
        show_soak(result, console)
        if page is not None:
            console.print(f"report: {page}", highlight=False, soft_wrap=True)
        return 130 if result.interrupted else 0 if result.ok else 1

    return end_with(measure)


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {name:16} {kind.meaning}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="soak.py",
        description=__doc__,
        epilog=f"kinds of faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="no fault begins later (5)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (1)")
    parser.add_argument("--hosts", type=int, default=4, help="virtual hosts, 4 or more (4)")
    told = "kinds to make, as kill_worker,cut; to leave out: --faults=-cut,-crash"
    parser.add_argument("--faults", help=told)
    parser.add_argument("--only", help="numbers of the faults to make, as 12-17")
    parser.add_argument("--list", action="store_true", help="print the schedule and do nothing")
    told = "of hvd-elastic run [s] (5)"
    parser.add_argument("--failure-timeout", type=float, default=5.0, help=told)
    parser.add_argument("--step-time", type=float, default=0.03, help="added to each step [s]")
    told = "longest time without a step where training can go on [s] (failure timeout + 15)"
    parser.add_argument("--stall-bound", type=float, help=told)
    told = "from the end of a fault to training in every slot [s] (120)"
    parser.add_argument("--recovery-bound", type=float, default=120.0, help=told)
    told = "no undisturbed run to compare accuracies with"
    parser.add_argument("--no-baseline", action="store_true", help=told)
    parser.add_argument("--loopback", action="store_true", help="hosts without network namespaces")
    parser.add_argument("--report", type=Path, help="JSON file; a page of Markdown comes beside it")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    if options.minutes <= 0 or options.failure_timeout <= 0 or options.step_time < 0:
        raise UsageError(
            "--minutes and --failure-timeout must be more than 0, --step-time not less"
        )
    if options.report is not None and not options.report.absolute().parent.is_dir():
        raise UsageError(f"--report {options.report}: there is no such folder")


class Soak:
    """One soak with the options of the command line.

    Args:
        options: checked options.
        say: prints a line.

    Raises:
        UsageError: the faults cannot be caused on this machine.
    """

    def __init__(self, options: argparse.Namespace, say: Say) -> None:
        self._options = options
        self._say = say
        self._namespaces = not options.loopback and why_no_namespaces() is None
        possible = [n for n, kind in KINDS.items() if self._namespaces or not kind.namespaces]
        self._kinds = parse_kinds(options.faults, possible)
        self._only = parse_only(options.only)
        # Names used in the schedule; the real names of the hosts depend on the process id.
        self._names = [f"h{number}" for number in range(1, options.hosts + 1)]

    def print_schedule(self) -> int:
        """Print the first hundred faults."""
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader, such as head, may close early
        for fault in islice(selected(self._schedule(), self._kinds, self._only), 100):
            print(f"{fault.text()}, {fault.after_s:g} s after the last")
        return 0

    def _schedule(self) -> Iterator[Fault]:
        options = self._options
        return faults_of_seed(options.seed, self._names, options.failure_timeout)

    def run(self, show: Say) -> SoakResult:
        """Create the hosts, play the schedule, and check everything.

        Args:
            show: shows a status line, which replaces the previous one.
        """
        options = self._options
        load_before = os.getloadavg()
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            show("making hosts")
            ground = self._make_ground(stack)
            real = dict(zip(self._names, ground.hosts, strict=True))
            start = starting_hosts(self._names)
            first = 1 if self._only is None else self._only.start
            before = hosts_before(self._schedule(), self._kinds, first, start)
            job = self._job(ground, _RUN_ID, {real[host]: n for host, n in before.items()})
            stack.enter_context(job)
            stall_s = options.stall_bound or options.failure_timeout + 15.0
            faults = (
                replace(fault, hosts=tuple((real[host], n) for host, n in fault.hosts))
                for fault in selected(self._schedule(), self._kinds, self._only)
            )
            bounds = Bounds(stall_s, options.recovery_bound)
            player = Player(job, faults, bounds, self._say, show)
            note = f"Every step is padded with a sleep of {options.step_time * 1000:.0f} ms."
            taken = conditions(ground.description, note, load_before)
            told = {
                name: value
                for name, value in vars(options).items()
                if name not in ("seed", "report", "list") and value not in (None, False)
            }
            result = SoakResult(options.seed, told, taken, began, 0.0, player.incidents)
            self._play_and_check(job, player, result)
            result.seconds = time.monotonic() - began
            result.conditions = replace(taken, load_after=os.getloadavg()[0])
            if not result.ok and not result.interrupted:
                result.kept = tempfile.mkdtemp(prefix="hvd_elastic-soak-failed-")
                job.keep(Path(result.kept))
            return result

    def _make_ground(self, stack: contextlib.ExitStack) -> Ground:
        """Return virtual hosts with the data set; the stack takes them down."""
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd_elastic-soak-")))
        data = scratch / "digits"
        write_digits(data)
        (scratch / "home").mkdir()
        count = len(self._names)
        hosts = tuple(f"{_RUN_ID}-{number}" for number in range(1, count + 1))
        if self._namespaces:
            disks = small_disks(scratch / "home", _RUN_ID, hosts, self._options.minutes)
            stack.enter_context(disks)
        cluster = VirtualCluster.up(
            count, 1, name=_RUN_ID, loopback=not self._namespaces, shares=[scratch]
        )
        stack.enter_context(cluster)
        return Ground(hosts, scratch, data, cluster)

    def _job(
        self, ground: Ground, run_id: str, hosts: dict[str, int], epochs: int | None = None
    ) -> SoakJob:
        """Return a run; with ``epochs`` it is the undisturbed one, without padded steps."""
        return SoakJob(
            ground,
            run_id,
            hosts,
            failure_timeout_s=self._options.failure_timeout,
            step_time_s=self._options.step_time if epochs is None else 0.0,
            epochs=epochs,
        )

    def _play_and_check(self, job: SoakJob, player: Player, result: SoakResult) -> None:
        """Run from the start to the last check; Ctrl-C ends the run early and still checks it."""
        options = self._options
        try:
            job.start()
            hosts = dict(job.hosts)
            player.play(60 * options.minutes)
            if not player.incidents and not player.problem:
                result.problems.append("no fault was made: more --minutes, or other --faults")
            if player.problem and not any(incident.problems for incident in player.incidents):
                result.problems.append(player.problem)
            self._say("ending the run and checking it")
            problem = player.problem
            if not problem and (problem := checked_end(job, _END_PATIENCE_S)):
                result.problems.append(problem)
            if problem:
                job.end_at_once()
            else:
                result.checks["the run"] = f"succeeded after {job.chronicle.step:,} steps"
            audit = _check_records(job, result, finished=not problem)
            _check_clean(job, result)
            if not problem and audit.epochs and not options.no_baseline:
                self._compare_accuracy(job.ground, result, len(audit.epochs), hosts)
        except KeyboardInterrupt:
            result.interrupted = True
            self._say("interrupted: ending the run")
            with contextlib.suppress(KeyboardInterrupt):
                job.end_at_once()
                _check_records(job, result, finished=False)
                _check_clean(job, result)
        result.growths = [
            growth
            for target, samples in player.samples.items()
            for growth in measure_growth(target.label, samples)
        ]
        found = grown(result.growths)
        result.problems += [f"it grows: {text}" for text in found]
        seen = len({growth.process for growth in result.growths})
        said = f"{len(found)} findings in {seen} long-lived processes"
        result.checks["growth"] = said if seen else "no process lived long enough to say"

    def _compare_accuracy(
        self, ground: Ground, result: SoakResult, epochs: int, hosts: dict[str, int]
    ) -> None:
        """Train undisturbed for as many epochs, without padded steps, and compare accuracies."""
        calm_epochs = min(epochs, _MOST_CALM_EPOCHS)
        self._say(f"training {calm_epochs} epochs undisturbed, to compare accuracies")
        for host in ground.hosts:
            if ground.cluster.status(host) == "off":
                ground.cluster.boot(host)
        with self._job(ground, _CALM_RUN_ID, hosts, calm_epochs) as job:
            job.start()
            status = job.wait(_END_PATIENCE_S + _CALM_S_PER_EPOCH * calm_epochs)
            if status != 0:
                told = f"the undisturbed run ended with status {status}:\n{job.output_tail()}"
                result.problems.append(told)
                return
        disturbed, calm = (_accuracy(ground, run_id) for run_id in (_RUN_ID, _CALM_RUN_ID))
        if disturbed is None or calm is None:
            result.problems.append("a run did not report its test accuracy")
            return
        told = f"{disturbed:.2%} after {epochs} epochs; undisturbed {calm:.2%} after {calm_epochs}"
        result.checks["test accuracy"] = told
        if disturbed < calm - _ACCURACY_TOLERANCE:
            result.problems.append(f"test accuracy: {told}: more than one point below")


# -- at the end --------------------------------------------------------------------------------


def _check_records(job: SoakJob, result: SoakResult, *, finished: bool) -> AuditResult:
    """Check exactly-once use of examples, needlessly repeated steps, and equal parameters."""
    job.poll()
    examples = _examples(job.ground.data)
    seen = check_steps(job.records.read_all(), examples, finished=finished)
    result.checks["examples, as the ranks saw it"] = seen.sentence()
    if not seen.ok:
        result.problems += [f"as the ranks saw it: {text}" for text in seen.problems()]
    written = check_audit(read_records(job.folder.audit), finished=finished)
    said = written.sentence()
    full = [(i.began, i.undone) for i in result.incidents if i.fault.kind == "full_run_disk"]
    excused = epochs_between(job.records.read_all(), full)
    faulty, wrong = split_audit(written, excused)
    if faulty:
        said = f"records of epochs {faulty} are missing, as the disk was full then"
    if wrong:
        said = written.sentence()
    result.problems += [f"by the audit of the run: {text}" for text in wrong]
    result.checks["examples, by the run's audit"] = said
    problems, lost = step_problems(job.records.read_all())
    result.problems += problems
    returns = f"{len(lost)} returns to a checkpoint cost {sum(lost)} steps"
    result.checks["steps done again"] = f"{returns}; else at most the one in flight"
    chronicle = job.chronicle
    equal = f"compared {chronicle.compared:,} times in {len(chronicle.worlds)} worlds"
    result.checks["parameters of the ranks"] = f"{equal}, {len(chronicle.differences)} differences"
    result.problems += chronicle.differences[:10]
    if not chronicle.compared:
        result.problems.append("the parameters of the ranks were never compared")
    return seen


def _examples(data: Path) -> int:
    import numpy as np

    with np.load(data / "train.npz") as arrays:
        return len(arrays["labels"])


def _check_clean(job: SoakJob, result: SoakResult) -> None:
    left = job.left_behind()
    result.checks["left behind"] = "nothing" if not left else f"{len(left)} things"
    result.problems += [f"left behind: {what}" for what in left]


def _accuracy(ground: Ground, run_id: str) -> float | None:
    """Return the last test accuracy that the run recorded, or None."""
    found = None
    for event in read_records(ground.scratch / "home/runs" / run_id / "events.jsonl"):
        if event["kind"] == "metrics" and "test_accuracy" in event:
            found = float(event["test_accuracy"])
    return found


# -- on the terminal ---------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[tuple[Say, Say]]:
    """Yield functions that print a line, and that show a status line below (on a terminal)."""
    began = time.monotonic()
    status = console.status("…")

    def say(text: str) -> None:
        seconds = time.monotonic() - began
        console.print(f"{seconds:7.1f} s  {escape(text)}", highlight=False, soft_wrap=True)

    def show(text: str) -> None:
        seconds = time.monotonic() - began
        status.update(f"{int(seconds) // 60}:{int(seconds) % 60:02d}  {escape(text)}")

    if console.is_terminal:
        status.start()
    try:
        yield say, show
    finally:
        status.stop()
