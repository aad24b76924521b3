"""A run that was submitted to Slurm, as the tests follow it."""

from __future__ import annotations

import time

from benchmarks.testbed.slurm import SlurmCluster
from tests.dist.running import Stage
from tests.engines.submitted_run import POLL_S, SubmittedProcess, SubmittedRun
from tests.paths import LIMIT_S

START_S = LIMIT_S


class SubmittedJob(SubmittedRun):
    """``hvd-elastic slurm submit`` with the probe script, which gets ``script_options``."""

    home_name = "home #50%j"  # as little as Slurm makes of such a name

    def __init__(
        self,
        slurm: SlurmCluster,
        stage: Stage,
        *options: str,
        script_options: tuple[str, ...] = (),
    ) -> None:
        verb = ("slurm", "submit")
        super().__init__(stage, None, *options, script_options=script_options, verb=verb)
        self._slurm = slurm
        assert self.process.wait(START_S) == 0, self.output.read_text()
        self.process = _Jobs(slurm, f"hvd-{self.run_id}")  # type: ignore[assignment]

    def output_of_jobs(self) -> str:
        """Return what the batch scripts have printed."""
        logs = (self._run_folder / "slurm").glob("*.log")
        return "\n".join(log.read_text(encoding="utf-8") for log in logs)

    def first_job(self) -> str:
        """Return the number of the job in which the run is led."""
        (job_id,) = self._slurm.jobs(f"hvd-{self.run_id}", "--states=RUNNING")
        return job_id

    def further_jobs(self) -> list[str]:
        """Return the numbers of the jobs that have added a node."""
        return self._slurm.jobs(f"hvd-{self.run_id}+", "--states=RUNNING")

    def hosts(self) -> int:
        """Return the number of hosts that the run has."""
        return len(self.kinds("hosts_changed")[-1]["hosts"])

    def story(self) -> str:
        return super().story() + self.output_of_jobs()[-6000:]


class _Jobs(SubmittedProcess):
    """The jobs in which a run is led, one after the other, as a process."""

    def __init__(self, slurm: SlurmCluster, name: str) -> None:
        super().__init__(name)
        self._slurm = slurm
        self._looked_at = -POLL_S

    def poll(self) -> int | None:
        if time.monotonic() < self._looked_at + POLL_S:
            return None
        self._looked_at = time.monotonic()
        return None if self._slurm.jobs(self.name) else 0

    def kill(self) -> None:
        self._slurm.call("scancel", "--me")
