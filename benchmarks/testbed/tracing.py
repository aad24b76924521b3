"""Where the time of a rescale of ours goes, seen in the worker without changing the product.

The methods that a rescale is made of are wrapped in the process that is watched; each call writes a
line ``{"mark": "span", "name", "begin", "end"}`` beside the steps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

SPANS = {
    "stop": "hvd.shutdown()",
    "wait": "leader: the next generation is announced",
    "start": "hvd.init(): rendezvous, Gloo contexts",
    "header": "broadcast of the state's structure",
    "tensors": "broadcast of the tensors",
}
"""Names of spans in the order in which a rescale passes through them, and what they mean."""


def install(write: Callable[[dict[str, Any]], None]) -> None:
    """Wrap the methods in this process.

    Args:
        write: takes one record.
    """
    from hvd_elastic.communicator.ring import HorovodCommunicator
    from hvd_elastic.training.agent_link import AgentLink

    for owner, method, name in (
        (HorovodCommunicator, "stop", "stop"),
        (AgentLink, "wait", "wait"),
        (HorovodCommunicator, "start", "start"),
        (HorovodCommunicator, "broadcast_bytes", "header"),
        (HorovodCommunicator, "broadcast", "tensors"),
    ):
        setattr(owner, method, _timed(getattr(owner, method), name, write))


def _timed(
    method: Callable[..., Any], name: str, write: Callable[[dict[str, Any]], None]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return method(*args, **kwargs)
        finally:
            write({"mark": "span", "name": name, "begin": begin, "end": time.monotonic()})

    return timed
