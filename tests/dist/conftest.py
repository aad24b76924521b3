"""One virtual cluster for all tests with real ranks, and jobs on it that cannot outlive a test."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_elastic.virtual import VirtualCluster
from tests.dist.running import RunningJob, Stage
from tests.paths import COSTLY, NEEDS_TENSORFLOW

# Training scripts of the tests: run by workers, not to be imported for their doctests.
collect_ignore = ["scripts", "styles"]

LOOPBACK = "HVD_ELASTIC_TEST_LOOPBACK"
"""Set to 1 to run as without root: hosts on the loopback interface."""


def styles(*always: str) -> pytest.MarkDecorator:
    """Have a test run with PyTorch, with ``model.fit``, and with a TensorFlow loop of its own.

    Args:
        always: which of "torch", "fit" and "loop" are no costly variants.
    """
    every: list[Any] = []
    for name in ("torch", "fit", "loop"):
        marks = [
            *([] if name == "torch" else [NEEDS_TENSORFLOW]),
            *([] if name in always else [COSTLY]),
        ]
        every.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("style", every, indirect=True, scope="module")


EVERY_STYLE = styles("torch")

StartJob = Callable[..., RunningJob]


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Four hosts."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built; see make horovod")
    # Whoever ends the tests from outside (a time limit, say) must not leave hosts behind.
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", 143))
    folder = tmp_path_factory.mktemp("dist")
    home = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ELASTIC_HOME", str(home))
        loopback = True if os.environ.get(LOOPBACK) == "1" else None
        made = VirtualCluster.up(4, 2, loopback=loopback, shares=[folder])
    with made as cluster:
        yield Stage(cluster, folder)
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def style(request: pytest.FixtureRequest) -> str:
    """The style of training of the probe."""
    return str(getattr(request, "param", "torch"))


@pytest.fixture
def start_job(stage: Stage, style: str) -> Iterator[StartJob]:
    """Start jobs that end with the test at the latest."""
    stage.boot_all()
    with contextlib.ExitStack() as jobs:

        def start(*arguments: Any, **options: Any) -> RunningJob:
            return jobs.enter_context(RunningJob(stage, *arguments, style=style, **options))

        yield start


@pytest.fixture(scope="module")
def shared_jobs(stage: Stage, style: str) -> Iterator[list[RunningJob]]:
    """Holds the job that the tests of one module disturb one after the other."""
    jobs: list[RunningJob] = []
    yield jobs
    for job in jobs:
        with job:
            pass


def current_job(
    stage: Stage, jobs: list[RunningJob], baseline: dict[str, int], *options: str, **more: Any
) -> RunningJob:
    """Return the job that a module shares, another one if it has ended, with these hosts."""
    stage.boot_all()
    if not jobs or jobs[-1].process.poll() is not None:
        jobs.append(RunningJob(stage, baseline, *options, **more))
        jobs[-1].wait_size(sum(baseline.values()))
    jobs[-1].use(baseline)
    return jobs[-1]


def trains(
    stage: Stage, jobs: list[RunningJob], baseline: dict[str, int], *options: str, **more: Any
) -> Iterator[RunningJob]:
    """Yield that job once it trains on the hosts, and check parameters and audit after the test."""
    job = current_job(stage, jobs, baseline, *options, **more)
    job.wait_for(lambda: job.settled_on(baseline), f"training on {baseline}")
    job.wait_steps(5)
    yield job
    job.check_equal_parameters()
    job.check_audit()
