"""Detects how this process was launched from the environment variables of the launcher.

=====================  ==================================================================
``python``             one process, no Horovod needed
``horovodrun -np``     static ranks (also under ``mpirun``)
``horovodrun`` elastic Horovod's own elastic driver changes the ranks
``hvd-elastic run``    generations announced by the leader, through the agent
=====================  ==================================================================
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from enum import Enum

from hvd_elastic.errors import RunError, ScriptError
from hvd_elastic.wire.messages import NOT_FINITE_CHOICES

_OTHER_LAUNCHERS = {
    "WORLD_SIZE": "torchrun, or a launcher like it,",
    "SLURM_STEP_NUM_TASKS": "srun",
    "PMI_SIZE": "an mpirun other than Open MPI's",
}
"""Variables with the number of processes that a launcher has started, and what launcher it is."""


class OtherLauncherError(RunError):
    """Several processes were started by a launcher whose ranks are not used here."""


class Mode(Enum):
    """Launcher of this process, which decides on its rank."""

    ALONE = "python"
    STATIC = "horovodrun"
    HOROVOD_ELASTIC = "horovodrun elastic"
    AGENT = "hvd-elastic"


def detect_mode(environment: Mapping[str, str]) -> Mode:
    """Return how this process was launched.

    >>> detect_mode({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}).value
    'horovodrun'
    """
    if "HVD_ELASTIC_AGENT" in environment:
        return Mode.AGENT
    if environment.get("HOROVOD_ELASTIC") == "1":
        return Mode.HOROVOD_ELASTIC
    if "HOROVOD_RANK" in environment or int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return Mode.STATIC
    return Mode.ALONE


def not_finite_choice(environment: Mapping[str, str]) -> str:
    """Return what is done about gradients that are not finite, without a leader that tells it.

    Raises:
        ScriptError: the variable ``HVD_ELASTIC_ON_NOT_FINITE`` is none of the choices.

    >>> not_finite_choice({})
    'skip'
    """
    choice = environment.get("HVD_ELASTIC_ON_NOT_FINITE", NOT_FINITE_CHOICES[0])
    if choice not in NOT_FINITE_CHOICES:
        raise ScriptError(
            f"HVD_ELASTIC_ON_NOT_FINITE={choice}: it is {' or '.join(NOT_FINITE_CHOICES)}"
        )
    return choice


def refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """Raise OtherLauncherError if one whose ranks are not used here has started several processes.

    Each of them would train on all the data, alone, without a word.

    >>> refuse_other_launchers({"WORLD_SIZE": "1"})
    """
    if detect_mode(environment) is not Mode.ALONE:
        return
    for name, launcher in _OTHER_LAUNCHERS.items():
        count = environment.get(name, "")
        if count.isdigit() and int(count) > 1:
            raise OtherLauncherError(
                f"{launcher} has started {count} of this process ({name}={count}), and each would "
                "train alone, on all the data. Start the script once instead: hvd-elastic run "
                f"--hostfile HOSTS -- python train.py (on this machine: --np {count}), or use "
                f"horovodrun. To train in one process, unset {name}"
            )


def is_started_by_worker() -> bool:
    """Return whether the script of a worker has started this process by multiprocessing."""
    # While such a process imports the script, under this name, it does not know its parent yet.
    name = "__mp_main__"
    imports = getattr(sys.modules.get(name), "__name__", "") == name
    is_child = imports or multiprocessing.parent_process() is not None
    return "HVD_ELASTIC_AGENT" in os.environ and is_child


def refuse_to_train_beside_worker() -> None:
    """Raise ScriptError if this process was started by a worker's script and is to train."""
    if is_started_by_worker():
        raise ScriptError(
            f"training begins in {multiprocessing.current_process().name}, a process that "
            "multiprocessing has started, while a slot trains in one process. If that process "
            "has come here since it imports the script, put what the script does under "
            "`if __name__ == '__main__':`. If it was started to train (torch.multiprocessing."
            "spawn), call the function itself: hvd-elastic run starts a worker for each slot"
        )


def local_rank() -> int:
    """Return the slot of this process on its host: it never changes while the process lives."""
    for name in ("HVD_ELASTIC_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0
