"""Runs a training script to measure its loader alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvd_elastic.errors import RunError
from hvd_elastic.input.rate import RESULT_VARIABLE, SECONDS_VARIABLE, InputRate


def measure_input(command: Sequence[str], seconds: float) -> InputRate:
    """Run a training script that reads its batches and does not train.

    Args:
        command: training command; its output goes to stderr.
        seconds: time to read for [s].

    Raises:
        RunError: the command cannot be started, or ended before it had read batches.
    """
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-bench-") as folder:
        result = Path(folder, "rate.json")
        launched = ("HVD_ELASTIC_", "HOROVOD_", "OMPI_")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(launched)
        }
        environment |= {SECONDS_VARIABLE: str(seconds), RESULT_VARIABLE: str(result)}
        try:
            ended = subprocess.run([*command], env=environment, stdout=sys.stderr, check=False)
        except OSError as error:
            raise RunError(f"{command[0]!r} cannot be started: {error.strerror}") from error
        rate = InputRate.read(result)
    if rate is None:
        raise RunError(
            f"the script ended with status {ended.returncode} before it had read batches. Give a "
            "script that iterates hvd.DataLoader (or hvd.dataset) in its training function, with "
            "its arguments"
        )
    return rate
