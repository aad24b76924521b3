"""Records a few steps of one rank with the framework's profiler: ``hvd-elastic run --profile``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hvd_elastic.checkpoint.whole_files import HashingWriter
from hvd_elastic.errors import CheckpointError
from hvd_elastic.worker.worker import Worker

_AFTER_STEPS, _STEPS = 20, 5
"""Steps that warm up, and that are recorded then; more make a file that viewers are slow with."""


class StepProfile:
    """Profile of this process, if it has the rank that the user has named, and once.

    It is recorded between two steps, and saved as by ``hvd.save``, whatever the rank.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._steps = 0
        self._profiler: Any = None

    def step_counted(self) -> None:
        """Begin or end the record where it is time.

        Raises:
            ScriptError: the framework has no profiler that is used here.
        """
        worker = self._worker
        if self._steps < _AFTER_STEPS and worker.rank != worker.options.profile:
            return
        self._steps += 1
        if self._profiler is None:  # made at once: a framework that has none is told of now
            self._profiler = worker.frontend.profiler()
        if self._steps == _AFTER_STEPS:
            self._profiler.start()
        elif self._steps == _AFTER_STEPS + _STEPS:
            self._save()

    def training_ends(self) -> None:
        """Save what was recorded; warn if that is nothing."""
        if 0 < self._steps < _AFTER_STEPS:
            self._worker.warn(
                f"--profile: training ends after {self._steps} steps of this rank, and what is "
                f"recorded begins after {_AFTER_STEPS}"
            )
        elif _AFTER_STEPS <= self._steps < _AFTER_STEPS + _STEPS:
            self._save()

    def _save(self) -> None:
        worker, self._steps = self._worker, _AFTER_STEPS + _STEPS
        self._profiler.stop()
        name = f"profile-rank{worker.options.profile}-step{worker.progress.step}.json.gz"
        try:
            worker.keep_file(name, self._write)
        except CheckpointError as error:  # training is worth more than its profile
            worker.warn(f"{name} is lost: {error}")

    def _write(self, file: HashingWriter) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json.gz")
            self._profiler.export_chrome_trace(str(path))
            with path.open("rb") as written:
                shutil.copyfileobj(written, file)
