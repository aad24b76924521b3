"""Causes each kind of fault on a running job, and undoes it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.disks import fill, free, spool_of
from benchmarks.soak.job import SoakJob, Target
from benchmarks.soak.schedule import KINDS, Fault
from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.virtual.plan import Rate


@dataclass
class Made:
    """A fault that was caused.

    Attributes:
        what: what it hit, for the reader; or why it hit nothing.
        undo: undoes the fault when its time is over; None: nothing to undo.
        changes_world: whether the present world cannot continue.
        lost: number of workers that cannot train until it is over or they are replaced.
        damaged: name of the damaged checkpoint file; empty: none.
        problems: messages about what went wrong while causing or undoing it.
    """

    what: str
    undo: Callable[[], None] | None = None
    changes_world: bool = False
    lost: int = 0
    damaged: str = ""
    problems: list[str] = field(default_factory=list)


def make_fault(job: SoakJob, fault: Fault) -> Made:
    """Cause a fault now."""
    return _MAKERS[fault.kind](job, fault)


# -- targets -----------------------------------------------------------------------------------


def _host(job: SoakJob, fault: Fault) -> str:
    """Return one of the hosts that train now, or of the hostfile if none does."""
    world = job.chronicle.current
    hosts = sorted(set(world.hosts.values()) & set(job.hosts)) if world is not None else []
    hosts = hosts or sorted(job.hosts)
    return hosts[fault.where % len(hosts)]


def _worker(job: SoakJob, fault: Fault) -> list[Target]:
    """Return the worker of a rank of the current world; empty if it has ended."""
    world = job.chronicle.current
    if world is None:
        return []
    who = job.chronicle.worker_of_rank(fault.where % world.size)
    return [worker for worker in job.workers() if (worker.host, worker.name) == who]


def _named(targets: list[Target]) -> str:
    return ", ".join(target.label for target in targets) or "nobody was there"


def _is_member(job: SoakJob, targets: list[Target]) -> bool:
    """Return whether one of the targets trains now: losing a newcomer changes no world."""
    world = job.chronicle.current
    if world is None:
        return False
    members = {job.chronicle.worker_of_rank(rank) for rank in world.members}
    return any((target.host, target.name) in members for target in targets)


# -- processes killed --------------------------------------------------------------------------


def _killed(job: SoakJob, targets: list[Target]) -> Made:
    changes = _is_member(job, targets)
    hit = [target for target in targets if target.send(signal.SIGKILL)]
    return Made(_named(hit), changes_world=changes and bool(hit), lost=len(hit))


def _kill_worker(job: SoakJob, fault: Fault) -> Made:
    return _killed(job, _worker(job, fault))


def _kill_host(job: SoakJob, fault: Fault) -> Made:
    return _killed(job, job.workers(_host(job, fault)))


def _kill_agent(job: SoakJob, fault: Fault) -> Made:
    host = _host(job, fault)
    changes = _is_member(job, job.workers(host))
    hit = [agent for agent in job.agents(host) if agent.send(signal.SIGKILL)]
    return Made(_named(hit), changes_world=changes and bool(hit), lost=len(hit))


def _kill_workers(job: SoakJob, _: Fault) -> Made:
    return _killed(job, job.workers())


def _kill_leader(job: SoakJob, _: Fault) -> Made:
    assert job.process is not None
    job.process.kill()
    job.process.wait()
    return Made("the leader", job.resume)


def _kill_all(job: SoakJob, _: Fault) -> Made:
    targets = job.targets()
    for target in targets:
        target.send(signal.SIGKILL)
    assert job.process is not None
    job.process.wait()
    return Made(f"{len(targets)} processes", job.resume, changes_world=True)


def _corrupt(job: SoakJob, fault: Fault) -> Made:
    """Kill every worker and damage the checkpoint that training would restore."""
    whole = sorted(job.folder.checkpoints.glob("step-*.json"))
    made = _kill_workers(job, fault)
    if len(whole) < 2:
        made.what += "; no checkpoint was damaged, since there are fewer than two"
        return made
    shards = job.folder.checkpoints.glob(f"{whole[-1].stem}*.shard")
    victim = max(shards, key=lambda path: path.stat().st_size)
    size = victim.stat().st_size
    with victim.open("r+b") as file:
        if fault.amount:
            file.seek(size // 2)
            file.write(bytes(byte ^ 0xFF for byte in victim.read_bytes()[size // 2 :][:64]))
        else:
            file.truncate(size // 2)
    how = "damaged" if fault.amount else "truncated"
    return Made(f"{made.what}; {victim.name} {how}", None, True, damaged=victim.name)


# -- processes stopped -------------------------------------------------------------------------


def _stopped(targets: list[Target], lost: int = 0) -> Made:
    hit = [target for target in targets if target.send(signal.SIGSTOP)]

    def go_on() -> None:
        for target in hit:
            target.send(signal.SIGCONT)

    return Made(_named(hit), go_on, lost=lost if hit else 0)


def _stop_worker(job: SoakJob, fault: Fault) -> Made:
    return _stopped(_worker(job, fault), lost=1)


def _stop_agent(job: SoakJob, fault: Fault) -> Made:
    host = _host(job, fault)
    return _stopped(job.agents(host), lost=len(job.workers(host)))


def _stop_leader(job: SoakJob, _: Fault) -> Made:
    return _stopped([target for target in job.targets() if target.role == "leader"])


# -- hosts and cables --------------------------------------------------------------------------


def _crash(job: SoakJob, fault: Fault) -> Made:
    host, cluster = _host(job, fault), job.ground.cluster
    workers = job.workers(host)
    changes = _is_member(job, workers)
    if cluster.status(host) == "off":
        return Made(f"{host} is off already")
    cluster.crash(host, silent=fault.kind == "power_off")
    return Made(host, lambda: cluster.boot(host), changes, len(workers))


def _cut(job: SoakJob, fault: Fault) -> Made:
    host, cluster = _host(job, fault), job.ground.cluster
    if cluster.status(host) != "up":
        return Made(f"{host} is not up")
    lost = len(job.workers(host))
    cluster.cut(host)
    return Made(host, lambda: cluster.heal(host), lost=lost)


def _rate(job: SoakJob, fault: Fault) -> Made:
    host, cluster = _host(job, fault), job.ground.cluster
    words = Rate(fault.amount * 10**6).arguments.split()
    done = cluster.run_on(host, ["tc", "qdisc", "replace", "dev", "eth0", "root", *words])
    if done.returncode != 0:
        return Made(f"{host}: its link stays as it is: {done.stderr.strip()}")

    def as_before() -> None:
        with contextlib.suppress(VirtualClusterError):
            cluster.run_on(host, ["tc", "qdisc", "delete", "dev", "eth0", "root"])

    return Made(host, as_before)


# -- disks -------------------------------------------------------------------------------------


def _full(what: str, folder: Path) -> Made:
    fill(folder)
    return Made(what, lambda: free(folder))


def _full_run_disk(job: SoakJob, _: Fault) -> Made:
    return _full("the disk of the run folder", job.folder.path.parent)


def _full_spool(job: SoakJob, fault: Fault) -> Made:
    # Half of the time that of rank 0, which writes the first shard, else any other.
    who = job.chronicle.worker_of_rank(0)
    host = who[0] if who is not None and fault.where % 2 else _host(job, fault)
    return _full(host, spool_of(job.home, job.run_id, host))


# -- actions of a user -------------------------------------------------------------------------


def _hosts(job: SoakJob, fault: Fault) -> Made:
    job.hosts = dict(fault.hosts)
    job.write_hostfile()
    return Made("")


def _broken_hostfile(job: SoakJob, _: Fault) -> Made:
    job.write_hostfile("no such line slots=many\n")
    return Made("a line that makes no sense", job.write_hostfile)


def _scale(job: SoakJob, fault: Fault) -> Made:
    wanted = min(fault.amount, sum(job.hosts.values()))
    made = Made("")

    def ask(number: str) -> None:
        begin = time.monotonic()
        done = job.command("scale", job.run_id, number)
        if done.returncode != 0:
            told = (done.stderr or done.stdout).strip()
            made.problems.append(
                f"hvd-elastic scale {job.run_id} {number} ended with status {done.returncode} "
                f"after {time.monotonic() - begin:.1f} s: {told}"
            )

    def as_before() -> None:
        ask("auto")
        job.wanted = None

    ask(str(wanted))
    if not made.problems:
        job.wanted = wanted
    made.undo = as_before
    return made


_MAKERS: dict[str, Callable[[SoakJob, Fault], Made]] = {
    "kill_worker": _kill_worker,
    "kill_host": _kill_host,
    "kill_agent": _kill_agent,
    "kill_leader": _kill_leader,
    "kill_workers": _kill_workers,
    "kill_all": _kill_all,
    "corrupt": _corrupt,
    "crash": _crash,
    "power_off": _crash,
    "blip": _cut,
    "cut": _cut,
    "pause_worker": _stop_worker,
    "pause_agent": _stop_agent,
    "pause_leader": _stop_leader,
    "freeze_worker": _stop_worker,
    "freeze_agent": _stop_agent,
    "freeze_leader": _stop_leader,
    "full_run_disk": _full_run_disk,
    "full_spool": _full_spool,
    "hosts": _hosts,
    "broken_hostfile": _broken_hostfile,
    "scale": _scale,
    "rate": _rate,
}
assert _MAKERS.keys() == KINDS.keys(), "every kind can be drawn and made"
