"""Collectives that the script itself calls, for every frontend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from hvd_elastic.communicator.interface import Communicator, GenerationBrokenError
from hvd_elastic.errors import ScriptError
from hvd_elastic.script.horovod_names import explain_arguments
from hvd_elastic.worker import context

Tensor = TypeVar("Tensor")


@contextlib.contextmanager
def script_collective(
    kind: str, name: str, *, changes_state: bool = False
) -> Iterator[Communicator]:
    """Register a collective of the script; turn its failure after training into a ScriptError.

    Args:
        kind: function of the script, for messages.
        changes_state: whether what follows it in the loop body is run in any case.
    """
    ctx = context.current()
    ctx.worker.averagers.collect()
    ctx.rollback.collective_begins(name, changes_state=changes_state)
    try:
        yield ctx.worker.communicator
    except GenerationBrokenError as error:
        if ctx.worker.in_train:
            raise
        why = str(error).partition(". ")[0]
        raise ScriptError(
            f"hvd.{kind}(..., {name!r}) was called after training, and another rank has ended "
            f"without it ({why}). Ranks may end at any time once the training function has "
            "returned: call it on all ranks, best at the end of that function"
        ) from None


@explain_arguments
def allreduce(tensor: Tensor, name: str, *, average: bool = True) -> Tensor:
    """Return the mean (or sum) of ``tensor`` over all ranks; all ranks must call it."""
    frontend = context.current().worker.frontend
    value, received = frontend.script_tensor("allreduce", tensor, name, average=average)
    with script_collective("allreduce", name) as communicator:
        begin = communicator.reduce_async if average else communicator.sum_async
        result: Tensor = received(communicator.wait(begin(value, f"user.{name}")))
        return result


@explain_arguments
def allgather(tensor: Tensor, name: str) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order."""
    value, received = context.current().worker.frontend.script_tensor("allgather", tensor, name)
    with script_collective("allgather", name) as communicator:
        result: Tensor = received(communicator.gather(value, f"user.{name}"))
        return result
