"""The training script on an input host: it reads for the ranks and does not train."""

from __future__ import annotations

from typing import NoReturn

from hvd_elastic.errors import ScriptError
from hvd_elastic.input.server import ReadingProcesses
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.context import Context

_LOOK_S = 0.2
"""Time between two looks whether this worker is asked for something else [s]."""


def serve_ranks(ctx: Context) -> NoReturn:
    """Read for the ranks until the run needs this worker no more; ends the script.

    Raises:
        ScriptError: the script has made no loader yet, or several.
    """
    worker, source = ctx.worker, ctx.data.input_source
    link = worker.link
    assert link is not None
    if source is None:
        raise ScriptError(
            "this host reads for the ranks (--input-hosts), and the script has made no loader yet "
            "when it calls its training function. Make it before, at the top level of the script: "
            f"{worker.frontend.loader}"
        )
    if ctx.data.loaders > 1:
        raise ScriptError(
            "this host reads for the ranks (--input-hosts), and the script has made "
            f"{ctx.data.loaders} loaders before it calls its training function, so it is not known "
            f"for which. Make one {worker.frontend.loader} there; evaluate with "
            f"{worker.frontend.other_loader}"
        )
    ctx.ready()
    while (task := link.wait_for_task()) is not None:
        # The next leader has a certificate of its own, so other processes are forked for it.
        processes = ReadingProcesses(source, task.processes, task.address, task.certificate)
        try:
            worker.sink.send(msg.InputServing(ports=processes.ports))
            while link.task is task and not link.pending(worker.generation):
                if processes.any_ended(_LOOK_S):
                    raise SystemExit("a process that reads for the ranks has ended")
        finally:
            processes.close()
    raise SystemExit(0)
