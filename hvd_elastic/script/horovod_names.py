"""Names and arguments of Horovod's modules that ours lack, with what takes their place."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from hvd_elastic.errors import ScriptError

P = ParamSpec("P")
R = TypeVar("R")

_INSTEAD = {
    "broadcast broadcast_ broadcast_async broadcast_object broadcast_parameters "
    "broadcast_optimizer_state broadcast_variables broadcast_global_variables": (
        "leave it out: model, optimizer and values of the State are sent to all ranks"
    ),
    "Sum Average": ("hvd.allreduce(tensor, name) returns the mean, and with average=False the sum"),
    "allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_": (
        "hvd.allreduce(tensor, name) returns a new tensor with the mean, and with average=False "
        "the sum"
    ),
    "allgather_object allgather_async": "hvd.allgather(tensor, name) gathers tensors",
    "barrier join": (
        "leave it out: the ranks meet in each step. Where they have to wait for each other "
        "outside of one, call hvd.allreduce on all of them"
    ),
    "elastic TorchState TensorFlowState TensorFlowKerasState ElasticSampler": (
        "hvd.run, hvd.State and hvd.DataLoader (with TensorFlow hvd.dataset) take the place of "
        "hvd.elastic.run, of its states and of its sampler"
    ),
    "callbacks": "hvd.ElasticCallback() takes the place of all of them",
    "SyncBatchNorm": (
        "leave batch norm as it is, and give hvd.DistributedOptimizer(..., sync_batch_norm=True)"
    ),
    "local_size cross_rank cross_size": (
        "ranks and hosts change while the script runs; use hvd.rank(), hvd.size() and "
        "hvd.local_rank()"
    ),
    "LocalOptimizer": ("it is for PyTorch; with TensorFlow and Keras the ranks meet in each step"),
    "shutdown is_initialized": "leave it out: hvd.init() is all that a script calls",
}
_ARGUMENTS_INSTEAD = {
    "named_parameters": "give the model in its place: hvd.DistributedOptimizer(optimizer, model)",
    "backward_passes_per_step average_aggregated_gradients": (
        "with PyTorch put all passes of a step but the last into optimizer.no_sync(), or give the "
        "loader a max_batch_size, which splits a batch into passes by itself"
    ),
    "op": "gradients are averaged; hvd.allreduce() gives the mean, and with average=False the sum",
    "root_rank": "all ranks get the state of one rank by themselves",
    "process_set": "leave it out: all ranks take part",
    "compression": "leave it out: with TensorFlow gradients are sent as they are",
    "prescale_factor postscale_factor gradient_predivide_factor": (
        "leave it out, or multiply the loss or the tensor by it"
    ),
    "num_groups groups sparse_as_dense device_dense device_sparse scale_local_gradients": (
        "leave it out: gradients are put into groups, and sparse ones made dense, by themselves"
    ),
}


def _by_name(hints: dict[str, str]) -> dict[str, str]:
    return {name: hint for names, hint in hints.items() for name in names.split()}


_HINTS = _by_name(_INSTEAD)
_ARGUMENT_HINTS = _by_name(_ARGUMENTS_INSTEAD)


def missing_name(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module, whose error says what to use for a name of Horovod.

    >>> missing_name("hvd_elastic.torch")("barier")
    Traceback (most recent call last):
    ...
    AttributeError: module 'hvd_elastic.torch' has no attribute 'barier'
    """

    def get(name: str) -> NoReturn:
        hint = f": {_HINTS[name]} (docs/migration.md)" if name in _HINTS else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    return get


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Have a call with arguments that a function lacks, such as Horovod's, end with a sentence.

    >>> @explain_arguments
    ... def allreduce(tensor, name, *, average=True): ...
    >>> allreduce(1.0)
    Traceback (most recent call last):
    ...
    hvd_elastic.errors.ScriptError: hvd.allreduce() needs name=, ...
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                words = _wrong_call(function.__qualname__, signature, set(kwargs), str(error))
            else:
                raise
        raise ScriptError(words)

    return call


def _wrong_call(function: str, signature: inspect.Signature, given: set[str], why: str) -> str:
    """Say which argument of a call is wrong, and what to write instead."""
    function = function.removesuffix(".__init__")
    parameters = [each for name, each in signature.parameters.items() if name != "self"]
    known = [each.name for each in parameters]
    unknown = sorted(given.difference(known))
    if unknown:
        name = unknown[0]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"do you mean {close[0]}=?" if close else f"it has {', '.join(known)}"
        if name in _ARGUMENT_HINTS:
            hint = f"{_ARGUMENT_HINTS[name]} (docs/migration.md)"
        return f"hvd.{function}() has no argument {name}=: {hint}"
    if why == "missing a required argument: 'name'":
        return (
            f"hvd.{function}() needs name=, the same on all ranks and another one for each place "
            f'of the script: hvd.{function}(tensor, "validation_loss")'
        )
    if why == "too many positional arguments":
        named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        return f"hvd.{function}(): {why}; give these by name: {', '.join(named)}"
    return f"hvd.{function}(): {why}; it has {', '.join(known)}"
