"""Program of a worker in an engine's run: executes the task that was sent to its host.

``python -m hvd_elastic.engines.dial_in.run_task``. Under an agent it is an elastic worker, and rank
0 saves the outcome as a file of the run. Otherwise its ranks are fixed: it reads their variables as
a line of JSON, and writes its outcome to standard output; what the task prints goes to standard
error.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from hvd_elastic.engines.dial_in.task import (
    LENGTH,
    OUTCOME_FILE,
    TASK_FILE,
    Outcome,
    Task,
    exit_status,
)
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.interfaces import interface_of, own_address
from hvd_elastic.programs.dial_back import FOLDER_VARIABLE
from hvd_elastic.worker.launch import OtherLauncherError

_LOOK_S = 0.1
"""Time between two looks whether there is a new process group [s]."""
_CHUNK_BYTES = 1 << 16
_OF_FIXED_RANKS = re.compile(r"\b((LOCAL_)?RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b")
"""Variables of torchrun, by which a function that needs fixed ranks fails without them."""


def main() -> None:
    """Execute the task of this host."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    if "HVD_ELASTIC_AGENT" in os.environ:
        _run_elastic(folder)
    else:
        _run_fixed(folder)


def _run_elastic(folder: Path) -> None:
    from hvd_elastic.script.saving import save_file
    from hvd_elastic.worker import context
    from hvd_elastic.worker.debugging.uncaught import tell_uncaught
    from hvd_elastic.worker.rescaling import WorkerLeaves

    tell_uncaught()  # as hvd.init() does, for what fails before it
    try:
        task = Task.unpack((folder / TASK_FILE).read_bytes())
        try:
            value = task.run(folder)
        except SystemExit as error:
            if isinstance(error, WorkerLeaves) or exit_status(error):
                raise
            value = None
        if not (context.is_initialized() and context.current().worker.has_ranks):
            raise RunError(
                f"{task.name} has ended without training. It was run elastically, which is for "
                "what calls hvd.init() of hvd_elastic.torch, .keras or .tensorflow, and trains in "
                "a function under @hvd.run; DDP, Lightning and others need elastic=False"
            )
    except Exception as error:  # noqa: BLE001  # as the interpreter handles it
        error = error.with_traceback(_of_the_task(error))
        if not context.is_initialized() and (asked := _OF_FIXED_RANKS.search(str(error))):
            error = RunError(
                f"{asked[0]} is asked for ({type(error).__name__}: {error}), and ranks are not "
                "fixed where training is elastic: give elastic=False for DDP, Lightning and the "
                "like, or train with hvd_elastic.torch (docs/migration.md)"
            )
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    worker = context.current().worker
    save_file(
        worker,
        OUTCOME_FILE,
        lambda file: file.write(Outcome.of_value(value, task.name).pack()),
    )


def _run_fixed(folder: Path) -> None:
    os.environ.update(json.loads(sys.stdin.buffer.readline()))
    link = threading.Thread(target=_end_with, args=(os.dup(0),), name="link", daemon=True)
    link.start()
    null = os.open(os.devnull, os.O_RDONLY)  # whoever reads from here finds the end at once
    os.dup2(null, 0)
    os.close(null)
    interface = interface_of(own_address("127.0.0.1"))
    if interface is not None:  # else Gloo looks for that of the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    threading.Thread(target=_keep_process_groups, name="process groups", daemon=True).start()
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    status = 0
    try:
        task = Task.unpack((folder / TASK_FILE).read_bytes())
        value = task.run(folder)
        is_first = os.environ["RANK"] == "0"
        outcome = Outcome.of_value(value, task.name) if is_first else Outcome()
    except SystemExit as error:
        status = exit_status(error)
        said = "" if isinstance(error.code, int) else str(error.code)
        if status:
            outcome = Outcome(error=said or f"it ended with exit status {status}")
        else:
            outcome = Outcome.of_value(None, "")
    except OtherLauncherError:
        why = "it trains with hvd_elastic, which has no fixed ranks: leave elastic=False out"
        outcome, status = Outcome(error=why), 1
    except BaseException as error:  # noqa: BLE001  # all are told to the driver
        lines = traceback.format_exception(type(error), error, _of_the_task(error))
        outcome, status = Outcome(error="".join(lines)), 1
    data = outcome.pack()
    sys.stdout.flush()
    sys.stderr.flush()
    with channel:
        channel.write(LENGTH.pack(len(data)) + data)
    sys.exit(status)


def _end_with(stdin: int) -> None:
    """End this process when the original standard input ends.

    The driver holds it open until the rank has ended. If the link to the driver breaks, the driver
    starts all ranks again, also on this host. The host's process ends the children of this one.
    """
    while os.read(stdin, _CHUNK_BYTES):
        pass
    os._exit(1)


def _keep_process_groups() -> None:
    """Keep PyTorch's process groups until this process ends.

    Where the last reference to one is dropped, as after ``destroy_process_group()``, PyTorch waits
    with Python's lock for threads of Gloo that may want it, and so now and then for ever
    (pytorch/pytorch#75097).
    """
    kept: list[Any] = []
    while True:
        distributed: Any = sys.modules.get("torch.distributed")  # incomplete while it is imported
        if hasattr(distributed, "is_initialized") and distributed.is_initialized():
            group = distributed.group.WORLD
            if not any(group is each for each in kept):
                kept.append(group)
        time.sleep(_LOOK_S)


def _of_the_task(error: BaseException) -> Any:
    """Return the traceback of an exception from the task's own code on."""
    trace, ours = error.__traceback__, (__file__, sys.modules[Task.__module__].__file__)
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in ours and not name.startswith("<frozen"):
            break
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
