"""Classifies how workers ended, explains script errors, and derives the result of the run."""

from __future__ import annotations

import enum
import re
import signal

from hvd_elastic.control.commands import Finish
from hvd_elastic.control.events import WorkerExited

_SHELL_SIGNAL_BASE = 128  # a shell reports a child that died of signal N as exit status 128 + N
_LAST_SIGNAL = 31  # the last of the standard signals
_CRASHES = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV}
"""Signals that a process causes itself."""
NEEDS_LESS_MEMORY = (
    "Its host, or the control group there, has too little memory for the script: a smaller batch, "
    "fewer num_workers, or fewer slots in the hostfile need less"
)

# Patterns in the output of Python's tracebacks, of its faulthandler, and of the C++ runtime.
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_ERROR = re.compile(r"^(?P<type>\w+)(?:: (?P<text>.*))?$", re.MULTILINE)
_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3|<")
_FAULT, _CURRENT, _OTHER = "Fatal Python error: ", "Current thread", "Thread"
_UNCAUGHT_CPP = "terminate called"

# Environment variables that torchrun sets; a script that needs them fails with a KeyError.
_TORCHRUN_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
# What torch.distributed raises if there is no process group, and where its files are.
_GROUP_ERRORS = {"ValueError", "RuntimeError"}
_TORCH_DISTRIBUTED = "/torch/distributed/"
_NEEDS_GROUP = {"_get_default_group", "_get_env_or_raise"}
"""Functions of torch.distributed that raise if torchrun has not set up the process."""


class StopCause(enum.Enum):
    """The party that asked for the end of a run; the values appear in events."""

    INTERRUPT = "Ctrl-C"
    TERMINATE = "SIGTERM"
    HANGUP = "SIGHUP"
    COMMAND = "stop command"
    ALLOCATION = "the allocation of its hosts has ended"
    MACHINES = "the time of its machines is over"


class _ScriptCause(enum.Enum):
    """Why a script written for torchrun failed, with the text that says what to change."""

    EXPECTS_TORCHRUN = (
        "this expects the process group of torchrun; remove init_process_group, "
        "DistributedDataParallel, and RANK, LOCAL_RANK and the like, and use hvd.init(), "
        "hvd.DistributedOptimizer(optimizer, model), hvd.rank() and hvd.local_rank() of "
        "hvd_elastic.torch instead (docs/migration.md shows both side by side)"
    )
    EXPECTS_SHARDING = (
        "this expects the process group of torchrun, and nothing here shards a model; remove FSDP "
        "and init_process_group, and use hvd.init() and hvd.DistributedOptimizer(optimizer, model) "
        "of hvd_elastic.torch instead, or keep torchrun for a model that needs more than one "
        "device (docs/migration.md)"
    )
    EXPECTS_SAMPLER_SHARES = (
        "this DistributedSampler expects the process group of torchrun; leave the sampler out, and "
        "its set_epoch(): hvd.DataLoader(dataset, batch_size, shuffle=True) of hvd_elastic.torch "
        "gives each rank its share of every batch (docs/migration.md)"
    )


def how_it_ended(event: WorkerExited) -> tuple[int | None, str]:
    """Return the exit status, None if a signal ended the process, and a description.

    >>> how_it_ended(WorkerExited("w", code=1))
    (1, 'ended with exit status 1')
    >>> how_it_ended(WorkerExited("w", code=137))
    (None, 'was killed by signal 9')
    >>> how_it_ended(WorkerExited("w", signal=9, out_of_memory=True))
    (None, 'was killed by the kernel, out of memory')
    """
    number = _signal_of(event)
    if event.out_of_memory:
        return None, "was killed by the kernel, out of memory"
    if number is not None:
        return None, f"was killed by signal {number}"
    if event.code is not None:
        return event.code, f"ended with exit status {event.code}"
    return None, "ended for an unknown reason"


def crashed(event: WorkerExited) -> bool:
    """Return whether a worker was ended by what its own code did, and not by somebody else.

    >>> crashed(WorkerExited("w", signal=11)), crashed(WorkerExited("w", signal=9))
    (True, False)
    """
    return event.out_of_memory or _signal_of(event) in _CRASHES


def _signal_of(event: WorkerExited) -> int | None:
    """Return the signal that ended a process, or its child under a shell; None: none did."""
    if event.code is None:
        return event.signal
    number = event.code - _SHELL_SIGNAL_BASE
    return number if 0 < number <= _LAST_SIGNAL else None


def explain_script_error(traceback: str) -> str | None:
    """Return what to change in a script that failed because it expects torchrun; else None.

    >>> explain_script_error("KeyError: 'RANK'").partition(";")[0]
    'this expects the process group of torchrun'
    """
    frames = list(_FRAME.finditer(traceback))
    cause = _script_cause(traceback, frames[-1] if frames else None)
    if cause is None:
        return None
    own = [frame for frame in frames if not _INSTALLED.search(frame["file"])]
    place = f"{own[-1]['file']}, line {own[-1]['line']}: " if own else ""
    return f"{place}{cause.value}"


def _script_cause(traceback: str, innermost: re.Match[str] | None) -> _ScriptCause | None:
    errors = {(error["type"], error["text"]) for error in _ERROR.finditer(traceback)}
    if any(("KeyError", repr(name)) in errors for name in _TORCHRUN_VARIABLES):
        needs_group = True
    else:
        needs_group = (
            innermost is not None
            and not _GROUP_ERRORS.isdisjoint(kind for kind, _ in errors)
            and _TORCH_DISTRIBUTED in innermost["file"]
            and (innermost["function"] in _NEEDS_GROUP or "/fsdp/" in innermost["file"])
        )
    if not needs_group:
        return None
    if re.search(r"torch.utils.data.distributed\.py|DistributedSampler\(", traceback):
        return _ScriptCause.EXPECTS_SAMPLER_SHARES
    shards = re.search("fsdp|fully_shard", traceback, re.IGNORECASE)
    return _ScriptCause.EXPECTS_SHARDING if shards else _ScriptCause.EXPECTS_TORCHRUN


def crash_stack(log: str) -> str:
    r"""Return the stack that Python's faulthandler wrote for the crashed thread; "" if none.

    Args:
        log: last part of the worker's output.

    >>> print(crash_stack("step 1\nFatal Python error: Aborted\n\n"
    ...     "Thread 0x7f01 (most recent call first):\n  File \"threading.py\", line 9 in run\n\n"
    ...     "Current thread 0x7f02 (most recent call first):\n  File \"a.py\", line 3 in f\n\n"
    ...     "Extension modules: numpy (total: 1)"))
    Fatal Python error: Aborted
    Current thread (most recent call first):
      File "a.py", line 3 in f
    """
    before, found, after = log.rpartition(_FAULT)
    if not found:
        return ""
    # The C++ runtime describes an uncaught exception on the two lines before.
    thrown = before.rstrip().splitlines()[-2:]
    shown = thrown if thrown and thrown[0].startswith(_UNCAUGHT_CPP) else []
    error, *stacks = after.split("\n\n")
    current = [stack for stack in stacks if stack.startswith(_CURRENT)]
    if not current:  # a library's thread without Python code crashed: show the main thread
        current = [stack for stack in stacks if stack.startswith(_OTHER)][-1:]
    text = "\n".join([*shown, found + error.strip(), *current]).rstrip()
    return re.sub(r"^((?:Current t|T)hread) 0x[0-9a-f]+", r"\1", text, flags=re.MULTILINE)


class Endings:
    """Records how workers that had joined ended, and derives the result of the run."""

    def __init__(self) -> None:
        self._well: set[str] = set()
        self._badly: dict[str, str] = {}

    def well(self, worker: str) -> None:
        """Record that a worker's training function returned and its process ended with status 0."""
        self._well.add(worker)

    def badly(self, worker: str, cause: str) -> None:
        """Record that a worker ended in any other way."""
        self._badly[worker] = cause

    def verdict(self, chief: str) -> Finish:
        """Return the result of the run.

        Args:
            chief: rank 0 of the last generation that ran. It usually writes the results, so its
                end decides, unless it left on request.
        """
        if chief in self._well or (self._well and chief not in self._badly):
            return Finish("succeeded", "the training function returned on every worker")
        cause = self._badly.get(chief, "nobody's training function returned")
        text = f"rank 0 did not come to its end: {cause}; resume to complete the run"
        return Finish("failed", text)
