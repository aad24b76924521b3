"""Names of Horovod's modules that ours lack, with what takes their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

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
    "callbacks": "hvd.ElasticCallback() takes the place of all of them",
    "SyncBatchNorm": (
        "leave batch norm as it is, and give hvd.DistributedOptimizer(..., sync_batch_norm=True)"
    ),
    "local_size cross_rank cross_size": (
        "ranks and hosts change while the script runs; use hvd.rank(), hvd.size() and "
        "hvd.local_rank()"
    ),
    "shutdown is_initialized": "leave it out: hvd.init() is all that a script calls",
}
_HINTS = {name: hint for names, hint in _INSTEAD.items() for name in names.split()}


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
