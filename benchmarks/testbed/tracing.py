"""Traces the parts of our own rescales, or of our own steps, without changes to the package.

In the traced process methods are wrapped. Of a rescale each call writes a line ``{"mark": "span",
"name", "begin", "end"}`` to the marks. Of a step the time between two optimizer steps is divided
among the calls, each moment to the innermost of them, and written as ``{"mark": "parts", ...}``.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

Write = Callable[[dict[str, Any]], None]
"""Function that is called with each record."""

SPANS = {
    "stop": "hvd.shutdown()",
    "wait": "leader: the next generation is announced",
    "start": "hvd.init(): rendezvous, Gloo contexts",
    "header": "broadcast of the state's structure",
    "tensors": "broadcast of the tensors",
}
"""Names of spans in the order of a rescale, and their meaning."""

PARTS = {
    "loader": "the loader reads a batch",
    "script": "forward pass, and the rest of the script",
    "backward": "backward pass without our hooks",
    "hooks": "hooks on parameters, and beginning reductions",
    "copies": "copies into buckets, times weight and 1/size",
    "statistics": "statistics of gradients, where the batch adapts",
    "waiting": "waiting for gradients of the other ranks",
    "sums": "sums in float32 and copies of compressed gradients",
    "agreement": "agreement of the ranks, with waiting for it",
    "optimizer": "the optimizer's own step",
    "between": "between steps: commit, metrics, reviews of the batch",
}
"""Parts of a step in about their order, and their meaning."""


def install(write: Write) -> None:
    """Record the parts of rescales in this process."""
    from hvd_elastic.communicator.ring import HorovodCommunicator
    from hvd_elastic.worker.agent_link import AgentLink

    for owner, method, name in (
        (HorovodCommunicator, "stop", "stop"),
        (AgentLink, "wait", "wait"),
        (HorovodCommunicator, "start", "start"),
        (HorovodCommunicator, "broadcast_bytes", "header"),
        (HorovodCommunicator, "broadcast", "tensors"),
    ):
        setattr(owner, method, _timed(getattr(owner, method), name, write))


def _timed(method: Callable[..., Any], name: str, write: Write) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return method(*args, **kwargs)
        finally:
            write({"mark": "span", "name": name, "begin": begin, "end": time.monotonic()})

    return timed


class Parts:
    """Divides the time of one thread among nested calls.

    >>> parts = Parts(clock=iter([0.0, 2.0, 3.0, 7.0, 7.5, 8.0]).__next__)
    >>> outer, inner = parts.wrap(lambda: inner(), "outer"), parts.wrap(lambda: None, "inner")
    >>> outer()
    >>> parts.take()
    {'script': 2.5, 'outer': 1.5, 'inner': 4.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open = ["script"]
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._since = clock()

    def take(self) -> dict[str, float]:
        """Return the time of each part since the last call [s]."""
        self._switch()
        spent = dict(self._spent)
        self._spent.clear()
        return spent

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the function, whose time counts for ``part``."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._begin(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._end()

        return wrapped

    def wrap_iterator(
        self, function: Callable[..., Iterator[Any]], part: str
    ) -> Callable[..., Iterator[Any]]:
        """Return the generator function, whose time counts for ``part``."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Iterator[Any]:
            iterator = function(*args, **kwargs)
            following = self.wrap(functools.partial(next, iterator, None), part)
            while (found := following()) is not None:
                yield found

        return wrapped

    def _begin(self, part: str) -> None:
        self._switch()
        self._open.append(part)

    def _end(self) -> None:
        self._switch()
        self._open.pop()

    def _switch(self) -> None:
        now = self._clock()
        self._spent[self._open[-1]] += now - self._since
        self._since = now


def install_steps(write: Write) -> None:
    """Record the parts of steps in this process."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from hvd_elastic.communicator.interface import FLAGS, GRADIENTS
    from hvd_elastic.communicator.ring import HorovodCommunicator
    from hvd_elastic.torch.compression import Packed
    from hvd_elastic.torch.data import DataLoader
    from hvd_elastic.torch.gradient_buckets import Bucket
    from hvd_elastic.torch.gradient_statistics import GradientStatistics
    from hvd_elastic.torch.state import State
    from hvd_elastic.torch.step_gradients import StepGradients
    from hvd_elastic.worker.context import Context

    parts = Parts()
    wrapped: list[tuple[Any, str, str]] = [
        (torch.Tensor, "backward", "backward"),
        (torch.optim.SGD, "step", "optimizer"),
        (StepGradients, "_ready", "hooks"),
        (Bucket, "add_gradients", "copies"),
        (Packed, "sum", "sums"),
        (Packed, "unpack", "sums"),
        (Context, "begin_exchange", "agreement"),
        (Context, "exchange", "agreement"),
        (Context, "step_boundary", "between"),
        (State, "commit", "between"),
    ]
    sampling = ("see", "see_flat", "see_mean", "end_pass", "end_step")
    wrapped += [(GradientStatistics, name, "statistics") for name in sampling]
    for owner, method, part in wrapped:
        setattr(owner, method, parts.wrap(getattr(owner, method), part))
    wrapped_batches: Any = parts.wrap_iterator(DataLoader.batches, "loader")
    DataLoader.batches = wrapped_batches  # type: ignore[method-assign]
    wait: Any = HorovodCommunicator.wait
    waits = {FLAGS: parts.wrap(wait, "agreement"), GRADIENTS: parts.wrap(wait, "waiting")}

    def wait_for(ring: Any, handle: Any, **options: Any) -> Any:
        return waits.get(handle.name, wait)(ring, handle, **options)

    HorovodCommunicator.wait = wait_for  # type: ignore[method-assign, assignment]

    def after_step(*_: Any) -> None:
        write({"mark": "parts", "s": parts.take()})

    register_optimizer_step_post_hook(after_step)
