"""Spark tasks as hosts of a run: each dials back, and runs an agent or ranks until the run is over.

Each host is a Spark job of its own with one task. So a lost executor fails the job of its host
alone, Spark tries that task again on an executor that is free, and a job that has failed too often
is submitted again. No task waits for another one, as those of a barrier stage do.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_elastic.engines.dial_in.hosts import DialInHosts, HostProcess, last_error, missing_package
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count
from hvd_elastic.programs.nvidia import ask_nvidia_smi

_AGAIN_S = 2.0
"""Time until the job of a host that has failed is submitted again [s]."""
_MOST_FAILURES = 3
"""Jobs in a row that may fail before any host has come."""
_BARRIER = "spark.scheduler.barrier.maxConcurrentTasksCheck"
"""Settings of how long Spark's own class waits for executors to register, and their defaults: it
looks ``maxFailures`` times at ``interval``."""
_INTERVAL, _LOOKS = "15s", 40
_DESCRIPTION = "spark.job.description"
_CANCELLED = re.compile(
    r"Job \S+ cancelled\b[^\n]*?(?=\s*(SQLSTATE|$))|OPERATION_CANCELED", re.MULTILINE
)
"""What Spark and Spark Connect say of a job that was cancelled, with the reason."""
_END_S = 5.0
"""How long jobs get to end after their hosts have been told to [s]; then they are cancelled."""


@dataclass(frozen=True)
class Request:
    """A request for executors of Spark.

    Attributes:
        hosts: number of tasks, each of which is a host.
        least: fewest of them that the run can begin with.
        use_gpu: whether they get the GPUs that Spark has assigned to the task, or none.
    """

    hosts: int
    least: int
    slots: int
    use_gpu: bool


class Executors:
    """The jobs of a run, until the context ends.

    Args:
        spark: session of the user.
        hosts: where the tasks dial in.
        request: what is asked of Spark.
    """

    def __init__(self, spark: Any, hosts: DialInHosts, request: Request) -> None:
        self._spark, self._hosts, self._request = spark, hosts, request
        self._tag = f"hvd_elastic-{os.getpid()}-{id(self):x}"
        self._over = threading.Event()
        self._failures = 0
        self._failed = ""
        self._cancelled = ""
        """Why Spark ended a job of the training that did not fail; empty: it did not."""
        self._were_enough = False
        self._short_since = time.monotonic()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Callable[[], None]:
        be_host = host_task(self._hosts.dial_in.invitation, self._request)
        for number in range(self._request.hosts):
            keep = _as_here(self._spark, self._keep)
            thread = threading.Thread(
                target=keep, args=(be_host,), name=f"Spark job {number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        return self.check

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if not self._all_end():  # a task waits for an executor
            self._cancel()
            self._all_end()

    def _all_end(self) -> bool:
        deadline = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def check(self) -> None:
        """Raise RunError if Spark gives no hosts, or has no room for as many as are needed.

        Once there were enough, an executor that is lost is waited for.
        """
        if is_stopped(self._spark):
            raise RunError("the Spark session was stopped, which ends the training")
        if self._cancelled:
            raise RunError(f"{self._cancelled}, which ends the training")
        there = len(self._hosts.hosts)
        if there:
            self._failures = 0
        self._were_enough = self._were_enough or there >= self._request.least
        if self._failures >= _MOST_FAILURES:
            raise RunError(self._failed)
        if self._were_enough:
            return
        now, room = time.monotonic(), self._room()
        if room is None or room >= self._request.least:
            self._short_since = now
        elif now >= self._short_since + (waited_s := self._patience_s()):
            wanted = count(self._request.least * self._request.slots, "process")
            when = f" after {waited_s:g} s" if waited_s else ""
            raise RunError(
                f"{wanted} wanted, and the executors of the cluster have room for "
                f"{count(room, 'task')}{when}, each for {count(self._request.slots, 'process')}: "
                "ask for fewer, or start more executors (spark.executor.instances, "
                "spark.cores.max, spark.task.cpus)"
            )

    def _room(self) -> int | None:
        """Return how many tasks Spark can run at a time; None: that is not known, or may grow."""
        if is_remote(self._spark):
            return None
        if self._spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
            return None
        context = self._spark.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().defaultResourceProfile()
        return int(context.maxNumConcurrentTasks(profile))

    def _patience_s(self) -> float:
        """Return how long executors are waited for that register late, as Spark's class does."""
        if has_local_master(self._spark):
            return 0.0
        settings = self._spark.sparkContext._jsc.sc().conf()
        looks = settings.getInt(f"{_BARRIER}.maxFailures", _LOOKS)
        return float(settings.getTimeAsSeconds(f"{_BARRIER}.interval", _INTERVAL) * looks)

    def _keep(self, be_host: Callable[..., Any]) -> None:
        """Have a host, again after each failure, until the run is over or has left it."""
        while not self._over.is_set():
            try:
                self._run_job(be_host)
            except Exception as error:  # noqa: BLE001  # the errors of py4j and of Spark Connect
                if self._over.is_set() or is_stopped(self._spark):
                    return
                if cancelled := _CANCELLED.search(str(error)):
                    self._cancelled = f"Spark ended a job of the training: {cancelled[0].rstrip()}"
                    return
                self._failures += 1
                self._failed = explain(str(error))
                self._over.wait(_AGAIN_S)
            else:
                if self._hosts.take_released():
                    return
                if not self._over.wait(_AGAIN_S) and not self._hosts.hosts:
                    self._failures += 1
                    address = self._hosts.address_towards([])
                    self._failed = (
                        f"the executors cannot connect to the driver at {address}; set "
                        "spark.driver.host to an address of this machine that they reach"
                    )

    def _run_job(self, be_host: Callable[..., Any]) -> None:
        if not is_remote(self._spark):
            context = self._spark.sparkContext
            context.addJobTag(self._tag)  # the job's group is the user's
            context.setInterruptOnCancel(True)
            if context.getLocalProperty(_DESCRIPTION) is None:
                context.setLocalProperty(_DESCRIPTION, "hosts of hvd_elastic")
        else:
            self._spark.addTag(self._tag)
        one = self._spark.range(0, 1, 1, 1)
        one.mapInArrow(be_host, "ended long").collect()

    def _cancel(self) -> None:
        with contextlib.suppress(Exception):  # of py4j or Spark Connect: the session has ended
            if not is_remote(self._spark):
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
            else:
                self._spark.interruptTag(self._tag)


def _as_here(spark: Any, target: Callable[..., None]) -> Callable[..., None]:
    """Return a function for a thread whose jobs have the caller's group, pool, tags and so on."""
    from pyspark import __version__
    from pyspark.util import inheritable_thread_target

    if is_remote(spark) or int(__version__.partition(".")[0]) >= 4:
        return inheritable_thread_target(spark)(target)
    return inheritable_thread_target(target)


def host_task(invitation: Mapping[str, Any], request: Request) -> Callable[..., Any]:
    """Return the function of a Spark task that is a host of a run."""

    def be_host(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        resources = {} if context is None else context.resources()
        gpus = resources["gpu"].addresses if request.use_gpu and "gpu" in resources else []
        environment = {"CUDA_VISIBLE_DEVICES": visible_gpus(gpus)}
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
        HostProcess(invitation, name, request.slots, environment).wait()
        yield from ()

    return be_host


def visible_gpus(assigned: list[str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for the GPUs that Spark has assigned, by their number here."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = before.split(",") if before else []
    return ",".join(names[int(gpu)] if names else gpu for gpu in assigned)


def gpus_here() -> list[str]:
    """Return the GPUs of this machine that its processes may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    answer = ask_nvidia_smi("--query-gpu=index")
    return answer.lines if answer is not None and answer.status == 0 else []


def explain(text: str) -> str:
    """Return why a job has failed, from what Spark says of it."""
    if "PYTHON_VERSION_MISMATCH" in text:
        own = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"the executors have another Python than the driver, which has {own}: point "
            "PYSPARK_PYTHON (or spark.pyspark.python) to the same minor version on all machines"
        )
    if package := missing_package(text):
        return (
            f"the executors have no package {package!r}: install it for the Python that "
            "PYSPARK_PYTHON names, on all of them"
        )
    return f"Spark cannot run a task: {last_error(text)}"


def is_remote(spark: Any) -> bool:
    """Return whether a session is one of Spark Connect, whose driver is elsewhere."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def has_local_master(spark: Any) -> bool:
    """Return whether the driver is the only executor of a session."""
    return re.match(r"local($|\[)", spark.conf.get("spark.master", "")) is not None


def is_stopped(spark: Any) -> bool:
    """Return whether a session has been stopped, or its driver has ended."""
    if is_remote(spark):
        return bool(getattr(spark, "is_stopped", False))  # pyspark 3.5 does not tell
    try:
        context = spark.sparkContext._jsc
        return context is None or bool(context.sc().isStopped())
    except Exception:  # noqa: BLE001  # py4j's many, which finds no driver
        return True
