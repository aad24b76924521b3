"""A day on spot machines in minutes: real training on machines that come and go as in a trace.

The cloud is EC2 by moto, its machines are virtual hosts, and an hour of the trace takes some
seconds. The cost that the cloud counts is compared with the simulation of the same trace. Example:
``python benchmarks/spot_day.py --hours 6 -v``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.bodies import Bodies
from benchmarks.testbed.cloud import ZONES, Cloud, Instance, Pool
from benchmarks.testbed.command import Say, at_least_one, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from hvd_elastic.errors import RunError
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize
from hvd_elastic.run_events import HostDrained, Metrics, ReadEvent, WorkerJoined
from hvd_elastic.sim.spot import (
    RULES,
    SpotJob,
    SpotOutcome,
    SpotTrace,
    generate_trace,
    simulate_spot,
)
from hvd_elastic.virtual import VirtualCluster

_BENCHMARK = "spot_day"
_TYPE, _NAME, _KEY = "g5.xlarge", "day", "bench"
_BATCH, _STEP_S = 24, 1.2
"""Examples of a step, and how long it takes on one machine [s]."""
_NOTICE_S = 5.0
"""Time between the notice and the end of a machine [s]; not as short as the rest of the day."""
_LEFT_OUT_S = 5.0
"""How long a pool without capacity is not asked again [s]."""
_LEAST_STEPS = 20
"""Steps on some machines from which their speed is known."""
_JOB = Path(__file__).resolve().parent / "sharing/emulated.py"


class Day:
    """One day: a cloud whose capacity follows a trace, and a run on its machines.

    Args:
        name: name of the run.
        trace: availability and prices relative to on demand.
        hour_s: how long an hour of the trace takes [s].
        work_h: time that the job takes on all machines [h].
        machines: most machines of the job.
    """

    def __init__(
        self,
        name: str,
        cloud: Cloud,
        trace: SpotTrace,
        hour_s: float,
        work_h: float,
        machines: int,
    ) -> None:
        self.name, self.cloud, self.trace, self.hour_s = name, cloud, trace, hour_s
        self.machines = machines
        self.examples = round(machines * work_h * hour_s / _STEP_S) * _BATCH
        self.home = cloud.bodies.cluster.folder.parents[1]
        self.notices: list[tuple[Instance, float]] = []
        """The machines that were told of their end, and when [s]."""
        self._tick = -1
        self._told: set[str] = set()
        self._first = len(cloud.instances)
        self._price = cloud.prices[_TYPE]

    @property
    def pools(self) -> list[Pool]:
        return [(_TYPE, zone, True) for zone, _ in zip(ZONES, self.trace.pools, strict=False)]

    def live_through(self, say: Say) -> None:
        """Run the job while machines come and go, up to its end."""
        script = (
            *(sys.executable, str(_JOB), "--examples", str(self.examples)),
            *("--batch", str(_BATCH), "--example-s", str(_STEP_S / _BATCH)),
        )
        zones = ",".join(pool[1] for pool in self.pools)
        config = self.home / "ssh_config"
        key = self.cloud.bodies.cluster.folder / "id_ed25519"
        config.write_text(f"Host *\n    IdentityFile {key}\n    IdentitiesOnly yes\n")
        self._play(0.0)
        self._call(
            *("cloud", "up", _NAME, "--region", "us-east-1", "--type", _TYPE, "--zone", zones),
            *("--image", "ami-12345678", "--key-name", _KEY, "--login", "root", "--spot"),
            *("--instances", f"1-{self.machines}", "--max-hours", "2", "--no-start"),
            *("--ssh-config", str(config)),
        )
        self.began = time.time()
        run = ("run", "--cloud", _NAME, "--run-id", self.name, "--audit", "--", *script)
        with (self.home / f"{self.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hvd_elastic.cli.app", *run],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
            )
            try:
                while process.poll() is None:
                    self._play((time.time() - self.began) / self.hour_s)
                    time.sleep(0.05)
            finally:
                process.terminate()
                process.wait()
        say(f"the run ended after {(time.time() - self.began) / self.hour_s:.1f} h")
        if process.returncode:
            told = Path(log.name).read_text(errors="replace")[-2000:]
            raise RunError(f"the run ended with {process.returncode}: {told}")
        self._call("cloud", "down", _NAME)

    def figures(self) -> dict[str, Any]:
        """Return what the day has cost, beside the simulation, and how notices were answered."""
        folder = RunFolder(self.home / "runs" / self.name)
        events = [*folder.iter_events()]
        started = [each for each in self.cloud.instances[self._first :] if each.pool[2]]
        # The cloud's hours are this machine's; those of the trace are shorter.
        hours = sum(each.hours for each in started) * 3600 / self.hour_s
        cost = sum(self._cost(each) for each in started)
        joined = [event for event in events if isinstance(event, WorkerJoined)]
        ends = [event for event in events if isinstance(event, HostDrained)]
        drained = [
            min(
                (e.t - at for e in ends if e.host == self._address(each) and e.t >= at),
                default=math.inf,
            )
            for each, at in self.notices
            # Some machines are told before the run uses them.
            if any(self._is_on(each, event) and event.t <= at for event in joined)
        ]
        starts = [
            min((e.t - each.began for e in joined if self._is_on(each, e)), default=None)
            for each in started
        ]
        start_s = float(np.mean([took_s for took_s in starts if took_s is not None]))
        result = check_audit(
            read_records(self.home / "runs" / self.name / "audit.jsonl"), finished=True
        )
        job = self._job(start_s, events)
        elastic, gang = (self._simulate(rule, job) for rule in ("elastic", "gang"))
        on_demand = self.machines * job.work_h * self._price
        summary = summarize(events)
        until = [*(at_s for at_s, _ in summary.placements[1:]), summary.duration_s]
        trained_s = sum(
            (end - at_s) * len(held)
            for (at_s, held), end in zip(summary.placements, until, strict=True)
        )
        return {
            "audit": "exact" if result.ok else "; ".join(result.problems()),
            "machine_hours": round(hours, 2),
            "simulated_machine_hours": round(elastic.spot_h, 2),
            "training_machine_hours": round(trained_s / self.hour_s, 2),
            "cost": round(cost / on_demand, 3),
            "simulated_cost": round(elastic.relative_cost, 3),
            "simulated_gang_cost": round(gang.relative_cost, 3),
            "difference": round(cost / on_demand / elastic.relative_cost - 1, 3),
            "machines_started": len(started),
            "machines_interrupted": len(self.notices),
            "start_s": round(start_s, 1),
            "drained": len(drained),
            "median_drain_s": round(float(np.median(drained)), 2) if drained else None,
            "longest_drain_s": round(max(drained), 2) if drained else None,
            "exponent": round(job.exponent, 3),
        }

    def _job(self, start_s: float, events: list[ReadEvent]) -> SpotJob:
        """Return the job for the simulation, with its speed and the start-up time as measured."""
        by_size: dict[int, list[float]] = {}
        for event in events:
            if isinstance(event, Metrics) and event.size and event.throughput:
                by_size.setdefault(event.size, []).append(event.throughput)
        speeds = {
            size: float(np.median(found))
            for size, found in by_size.items()
            if len(found) >= _LEAST_STEPS or size == self.machines
        }
        least, most = min(speeds), max(speeds)
        exponent = 1.0
        if least < most:
            exponent = math.log(speeds[most] / speeds[least]) / math.log(most / least)
        ratio = 3600 / self.hour_s
        return SpotJob(
            self.machines,
            self.examples / speeds[self.machines] / self.hour_s,
            math.inf,
            start_s=start_s * ratio,
            notice_s=0.0,
            left_out_s=_LEFT_OUT_S * ratio,
            exponent=exponent,
        )

    def _simulate(self, rule: str, job: SpotJob) -> SpotOutcome:
        """Simulate the day; machines go with their notice, as the run leaves them then."""
        ticks = math.ceil(_NOTICE_S / self.hour_s * 3600 / self.trace.gap_s)
        pools = tuple(
            replace(
                pool,
                counts=tuple(
                    min(pool.counts[tick : tick + ticks + 1]) for tick in range(self.trace.ticks)
                ),
            )
            for pool in self.trace.pools
        )
        trace = replace(self.trace, pools=pools)
        return simulate_spot(trace, job, RULES[rule](trace, job))

    def _is_on(self, instance: Instance, event: WorkerJoined) -> bool:
        """Return whether a worker is on an instance; its address may have been another's before."""
        ended = instance.ended or math.inf
        return event.host == self._address(instance) and instance.began < event.t < ended

    def _address(self, instance: Instance) -> str:
        return self.cloud.bodies.cluster.address(instance.host)

    # -- the cloud -------------------------------------------------------------------------

    def _play(self, hour: float) -> None:
        """Have the cloud follow the trace; machines are told before the tick that takes them."""
        gap_h = self.trace.gap_s / 3600
        tick = int(hour / gap_h)
        if tick >= self.trace.ticks:
            raise RunError("the trace is over before the job has ended; give more --hours")
        if tick != self._tick:
            self._tick = tick
            self.cloud.spot_price = self._spot_price
        soon = min(int((hour + _NOTICE_S / self.hour_s) / gap_h), self.trace.ticks - 1)
        for pool, of in zip(self.pools, self.trace.pools, strict=True):
            least = min(of.counts[tick : soon + 1])
            self.cloud.capacity[pool] = least
            there = [each for each in self.cloud.live() if each.pool == pool]
            kept = [each for each in there if each.id not in self._told]
            for instance in kept[least:]:
                self._told.add(instance.id)
                instance.booted.wait(_NOTICE_S)
                self.notices.append((instance, time.time()))
                self.cloud.interrupt(instance, _NOTICE_S)

    def _spot_price(self, _type: str, zone: str) -> float:
        number = ZONES.index(zone)
        if number >= len(self.trace.pools):
            return self._price  # a zone that the day does not use
        return self._price * self.trace.pools[number].prices[max(0, self._tick)]

    def _cost(self, instance: Instance) -> float:
        """Return the cost of an instance by the prices of the trace, in hours of the trace."""
        prices = self.trace.pools[ZONES.index(instance.pool[1])].prices
        gap_h = self.trace.gap_s / 3600
        at, ends = ((t - self.began) / self.hour_s for t in (instance.began, instance.ended or 0.0))
        cost = 0.0
        while at < ends:
            tick = min(int(at / gap_h + 1e-9), len(prices) - 1)
            until = min(ends, (tick + 1) * gap_h)
            cost += (until - at) * prices[tick] * self._price
            at = until
        return cost

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "AWS_"))}
        settings = {"SETTLE": "2", "LEASE": "60", "START_LIMIT": "60", "LOOK": "1"}
        settings["LEFT_OUT"] = str(_LEFT_OUT_S)
        return {
            **kept,
            **self.cloud.environment,
            **{f"HVD_ELASTIC_CLOUD_{name}_S": text for name, text in settings.items()},
            "HVD_ELASTIC_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
        }

    def _call(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "hvd_elastic.cli.app", *words],
            capture_output=True,
            text=True,
            env=self._environment(),
        )
        if done.returncode:
            raise RunError(f"hvd-elastic {' '.join(words[:2])}: {done.stderr}")


def undisturbed(trace: SpotTrace) -> SpotTrace:
    """Return a trace in which all machines are always there."""
    pools = tuple(
        replace(pool, counts=(max(pool.counts),) * len(pool.counts)) for pool in trace.pools
    )
    return replace(trace, pools=pools)


def make_trace(seed: int, hours: float, pools: int, machines: int) -> SpotTrace:
    """Return a generated trace that begins with a machine."""
    rng = np.random.default_rng(seed)
    while True:
        trace = generate_trace(rng, hours, pools, machines)
        if any(pool.counts[0] for pool in trace.pools):
            return trace


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Live through an undisturbed day and one of the trace."""
    load_before = os.getloadavg()
    trace = make_trace(options.seed, 6 * options.hours, options.pools, options.machines)
    rows = []
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-spot-") as home:
        os.environ["HVD_ELASTIC_HOME"] = home
        cluster = VirtualCluster.up(options.machines + 2, 1, loopback=False)
        with cluster, Cloud(Bodies(cluster)) as cloud:
            cloud.hidden_s = cloud.shutdown_s = 0.2
            cloud.add_key(_KEY, (cluster.folder / "id_ed25519.pub").read_text())
            days: Mapping[str, SpotTrace] = {"undisturbed": undisturbed(trace), "spot": trace}
            for name, of in days.items():
                say(f"the {name} day")
                day = Day(name, cloud, of, options.hour_seconds, options.hours, options.machines)
                day.live_through(say)
                rows.append({"day": name, **day.figures()})
                say(json.dumps(rows[-1]))
    note = (
        f"{options.hours} h of work on {options.machines} machines, {options.pools} pools, seed "
        f"{options.seed}; an hour takes {options.hour_seconds:g} s. Cost relative to machines on "
        "demand for the time of the work alone."
    )
    taken = conditions(f"{options.machines + 2} virtual hosts", note, load_before)
    return Result(_BENCHMARK, taken, {"days": rows})


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=at_least_one, default=6, help="hours of work (6)")
    parser.add_argument("--hour-seconds", type=float, default=40.0, help="length of an hour (40)")
    parser.add_argument("--machines", type=at_least_one, default=3, help="most machines (3)")
    parser.add_argument("--pools", type=at_least_one, default=2, help="pools of them (2)")
    parser.add_argument("--seed", type=int, default=4, help="of the trace (4)")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
