"""One job on the virtual hosts, which is controlled and watched through its run folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.controller.workloads import HOSTS, MOST_HOSTS, SLOTS, Change, Workload
from benchmarks.elasticity.stage import Stage
from benchmarks.testbed.hosts import Testbed
from benchmarks.testbed.launchers import OURS, Job, Order
from benchmarks.testbed.links import limit_link
from hvd_elastic.records.json_lines import Follower, Record, decode_record
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.virtual.plan import parse_rate

Result = TypeVar("Result")

_SCRIPT = Path(__file__).with_name("device_job.py")
_LIMIT_S = 240.0
"""Limit of every wait; long, since all workers start at the same time on few cores."""
_SHARES_S = 6.0
"""Time until unequal ranks have their shares: three reviews a second apart, and their decisions."""
_PARTS, _GROWTH_S = 10, 40.0
"""Number of steps in which noise grows, and the time that it takes."""


class Play:
    """A running job.

    Args:
        bed: virtual hosts.
        job: the job on them.
        control: folder with the files that the job follows.
        workload: workload of the job.
        hosts: number of hosts that it began with.

    Attributes:
        records: events of the run so far.
    """

    def __init__(
        self, bed: Testbed, job: Job, control: Path, workload: Workload, hosts: int
    ) -> None:
        self._workload = workload
        self._hosts = bed.hosts[:hosts]
        self._bed = bed
        self._job = job
        self._control = control
        self._follower = Follower(job.events_path, decode_record)
        self._folder = RunFolder(job.events_path.parent)
        self.records: list[Record] = []

    # -- watching --------------------------------------------------------------------------

    def poll(self) -> None:
        """Read the run's new events."""
        self.records += self._follower.poll()

    def wait(self, look: Callable[[], Result | None], what: str) -> Result:
        """Wait until ``look`` returns something other than None; return that.

        Raises:
            FailedPlayError: it did not within the limit; the message contains ``what``.
        """

        def see() -> Result | None:
            self.poll()
            return look()

        return self._job.wait(see, _LIMIT_S, what)

    def train(self, seconds: float) -> None:
        """Let the job train for some time."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end, "did not go on")

    def settle(self, least_s: float, most_s: float, calm_s: float) -> None:
        """Let the job train until slots, batch and shares have stopped changing.

        Args:
            least_s, most_s: shortest and longest time to train [s].
            calm_s: time without changes that is waited for [s].
        """
        begin = time.monotonic()

        def settled() -> bool:
            now = time.monotonic()
            moved = self.since(now - calm_s, "rescale_started", "batch_plan", "shares")
            return now >= begin + (least_s if not moved else most_s)

        self.wait(settled, "did not go on")

    def since(self, mono: float, *kinds: str) -> list[Record]:
        """Return the events of these kinds after a time [s, monotonic]."""
        return [r for r in self.records if r["mono"] > mono and r["kind"] in kinds]

    # -- control ---------------------------------------------------------------------------

    def pause_policy(self) -> None:
        """Pause the scaling policy, so that slots change only by :meth:`use`."""
        self._folder.ask_leader("policy", {"do": "pause"})

    def use(self, slots: int, batch: int | None) -> None:
        """Train with a number of slots and a batch size; return when both are in use.

        Args:
            slots: number of slots, taken from the hosts in the order of the hostfile.
            batch: global batch size; None lets the job choose it.
        """
        if batch is not None:
            _write(self._control / "batch", batch)
        asked = time.monotonic()
        moves = slots != self.since(0.0, "metrics")[-1]["size"]
        # Sent even if the slots are right: the policy may have changed them just before its pause.
        self._folder.ask_leader("scale", {"np": slots})

        def in_force() -> bool:
            told = [r for r in self.since(asked, "metrics") if r["size"] == slots]
            return bool(told) and batch in (None, told[-1]["global_batch_size"])

        self.wait(in_force, f"did not train on {slots} slots with a batch of {batch}")
        if moves and (self._control / "slow").exists():
            self.train(_SHARES_S)

    def make(self, change: Change) -> float:
        """Carry out a change; return when it began [s, monotonic]."""
        began = time.monotonic()
        hosts = self._hosts
        if change.rate is not None:
            limit_links(self._bed, change.rate)
        if change.slow != 1.0:
            _write(self._control / "slow", {hosts[-1]: change.slow})
        if change.appear:
            there = self._bed.hosts[: len(hosts) + change.appear]
            self._job.use(dict.fromkeys(there, SLOTS))
        for host in hosts[len(hosts) - change.drain :]:
            self._folder.ask_leader("drain", {"host": host, "leave_in_s": None, "undo": False})
        if change.flips is not None:
            first = self._workload.flips
            for part in range(1, _PARTS + 1):
                flips = first + (change.flips - first) * part / _PARTS
                _write(self._control / "flips", flips)
                self.train(_GROWTH_S / _PARTS)
        return began


@contextlib.contextmanager
def playing(
    stage: Stage,
    workload: Workload,
    hosts: int = HOSTS,
    options: Sequence[str] = (),
    slots: int = SLOTS,
) -> Iterator[Play]:
    """Start a job on one slot that trains for the length of the block."""
    bed = stage.slow_bed
    limit_links(bed, workload.rate)
    control = bed.scratch / "control"
    control.mkdir(exist_ok=True)
    for path in control.iterdir():
        path.unlink()
    _write(control / "flips", workload.flips)
    if workload.slow != 1.0:
        _write(control / "slow", {bed.hosts[hosts - 1]: workload.slow})
    numbers = (workload.pass_s, workload.example_s, workload.ballast_mb)
    order = Order(
        dict.fromkeys(bed.hosts[:hosts], slots),
        [str(_SCRIPT), str(control), *map(str, numbers)],
        max_np=MOST_HOSTS * SLOTS,
        np=1,
        options=("--checkpoint-every", "0", *options),
    )
    with OURS.job(bed, order) as job:
        job.wait(job.events_path.exists, _LIMIT_S, "did not start")
        play = Play(bed, job, control, workload, hosts)
        play.wait(lambda: play.since(0.0, "metrics"), "did not begin to train")
        yield play


def limit_links(bed: Testbed, rate: str) -> None:
    """Limit the links of all hosts to a rate such as "100mbit"."""
    for host in bed.hosts:
        limit_link(bed.cluster, host, parse_rate(rate).bits_per_s)


def _write(path: Path, content: object) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)
