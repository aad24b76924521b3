"""The table of the engines that ``hvd-elastic run`` can be started in, and what engines share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import duration_words
from hvd_elastic.hosts.connection import Engine
from hvd_elastic.hosts.hostfile import Hostfile
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder

INSIDE = {"slurm": "the nodes of this Slurm allocation"}
"""What each engine gives to a run that is started inside of it, in words."""
_TELL_S = 60.0
"""Time between two reports of what is still waited for [s]."""
_END_S = 10.0
"""How long the end of a block waits for a call that has begun [s]: what it asks may be busy."""


class HostSource(Protocol):
    """Gives the hosts of what this process runs in, such as an allocation."""

    def is_around(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with this environment runs in one, if it is not named."""
        return False

    def hosts(self, environment: Mapping[str, str]) -> Hostfile:
        """Return its hosts.

        Raises:
            HvdElasticError: there is none, or it cannot be used.
        """

    def adapt(self, spec: RunSpec) -> RunSpec:
        """Return the specification of a run with what reaching its hosts takes."""
        return spec

    def lead(
        self, folder: RunFolder, environment: Mapping[str, str]
    ) -> AbstractContextManager[Engine]:
        """Return the engine of a run, whose hosts it writes to the hostfile of the run folder."""

    def clean(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment without variables that are right for this host alone."""
        return dict(environment)


CLOUD = "cloud:"
"""What the engine of a run on machines of a cloud begins with; the name of the cloud follows."""


def engine_named(name: str) -> HostSource:
    """Return an engine of :data:`INSIDE`, ``kubernetes``, or a cloud such as ``cloud:lab``.

    Raises:
        HvdElasticError: this computer knows no such cloud.
    """
    if name.startswith(CLOUD):
        from hvd_elastic.engines.cloud.engine import CloudSource

        return CloudSource(name.removeprefix(CLOUD))
    if name == "kubernetes":
        from hvd_elastic.engines.kubernetes.engine import KubernetesSource

        return KubernetesSource()
    from hvd_elastic.engines.slurm.engine import SlurmSource

    return {"slurm": SlurmSource}[name]()


def engine_around(environment: Mapping[str, str]) -> str | None:
    """Return the engine that a process with this environment runs in; None: in none."""
    return next((name for name in INSIDE if engine_named(name).is_around(environment)), None)


class WaitReport:
    """Reports what is waited for: whenever that changes, and every minute.

    Args:
        tell: called with it, in words.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._began = self._told_at = time.monotonic()
        self._said = ""

    def say(self, text: str) -> None:
        """Report what is waited for now."""
        now = time.monotonic()
        if text == self._said and now < self._told_at + _TELL_S:
            return
        waited = f" (after {duration_words(now - self._began)})" if text == self._said else ""
        self._tell(f"{text}{waited}")
        self._said, self._told_at = text, now


@contextlib.contextmanager
def repeating(name: str, every_s: float, act: Callable[[], bool]) -> Iterator[None]:
    """Call a function now and then in a thread, until it returns True or the block ends.

    One that fails, as on a full disk, is called again at its time.

    Args:
        every_s: time between two calls [s].
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(RunError, OSError):
                if act():
                    return

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_S)
