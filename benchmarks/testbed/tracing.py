"""Traces the parts of our own rescales in a worker, without changes to the package.

The methods that make up a rescale are wrapped in the traced process; each call writes a line
``{"mark": "span", "name", "begin", "end"}`` to the marks.
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
"""Names of spans in the order of a rescale, and their meaning."""


def install(write: Callable[[dict[str, Any]], None]) -> None:
    """Wrap the methods in this process.

    Args:
        write: called with each record.
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
