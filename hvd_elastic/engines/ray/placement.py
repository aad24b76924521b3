"""Place the actors of a training in a Ray cluster, and others for those that are lost."""

from __future__ import annotations

import logging
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hvd_elastic.engines.dial_in.hosts import HostProcess, last_error, missing_package
from hvd_elastic.engines.ray.data import RowServer, StoredRows
from hvd_elastic.errors import DataError, RunError
from hvd_elastic.formatting import count

log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Time between two looks whether actors have ended [s]; agents notice a lost host by themselves."""
_PAUSE_S = 5.0
"""Pause before an actor is placed where others have failed to start [s]."""
_THREADS = 2
"""Methods that an actor executes at a time: one waits for the end."""


def room_for(nodes: Sequence[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """Return the number of workers that nodes have room for.

    Args:
        nodes: resources of each node by name.
        each: resources of a worker by name; those of 0 need no room.

    >>> room_for([{"CPU": 4, "GPU": 1}, {"CPU": 16}, {"CPU": 4, "GPU": 2}], {"CPU": 2, "GPU": 1})
    3
    """
    needs = {name: amount for name, amount in each.items() if amount}
    if not needs:
        return sys.maxsize
    return sum(
        min(math.floor(node.get(name, 0) / amount) for name, amount in needs.items())
        for node in nodes
    )


def check_room(nodes: Sequence[Mapping[str, float]], each: Mapping[str, float], least: int) -> None:
    """Check that a cluster can hold the workers of a training, if nothing else runs on it.

    Raises:
        RunError: it cannot; says what it has.
    """
    for name, amount in each.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if amount > most:
            has = f"no node has more than {most:g}" if most else "no node of the cluster has any"
            known = sorted({n for node in nodes for n in node if n.isidentifier()})
            raise RunError(
                f"resources_per_worker asks for {amount:g} {name}, and {has}. The nodes have "
                f"{', '.join(known) or 'nothing'}"
            )
    room = room_for(nodes, each)
    if room < least:
        asked = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
        raise RunError(
            f"scaling asks for {count(least, 'worker')} at least, of {asked} each, and the cluster "
            f"of {count(len(nodes), 'node')} has room for {room}. Add nodes, or ask for less by "
            "scaling or resources_per_worker"
        )


class HostActor:
    """One place for a worker: runs a host process, and serves rows to the worker.

    Args:
        invitation: of the leader; it reaches the actor through Ray, with the cluster's token.
        datasets: names of the data sets that will be offered.
    """

    def __init__(self, invitation: Mapping[str, Any], datasets: Collection[str]) -> None:
        self._rows = RowServer(datasets)
        self._process = HostProcess(invitation, platform.node(), 1, self._rows.variables)

    def serve(self) -> None:
        """Wait until the leader has no more use for this host; see :meth:`HostProcess.wait`."""
        self._process.wait()

    def offer(self, name: str, stored: StoredRows | DataError) -> None:
        """Serve a data set, or say why there is none."""
        self._rows.offer(name, stored)


class Placement:
    """Has Ray keep up to a number of actors, each wherever and whenever there is room for one.

    An actor that has to wait for room waits in Ray's own queue, so it starts when a node joins the
    cluster or when another program gives its resources back, and Ray's autoscaler sees it.

    Args:
        invitation: of the leader, for the host processes.
        resources: resources of each actor by name.
        sizes: number of actors until all data sets are there, and from then on.
        stored: references to the :class:`StoredRows` of the data sets, by name.
        take_released: returns whether the run has left an actor that has ended, so that no other
            takes its place.
    """

    def __init__(
        self,
        invitation: Mapping[str, Any],
        resources: Mapping[str, float],
        sizes: tuple[int, int],
        stored: Mapping[str, Any],
        take_released: Callable[[], bool],
    ) -> None:
        import ray

        self._ray = ray
        self._arguments = (dict(invitation), [*stored])
        self._class = ray.remote(HostActor).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources={name: n for name, n in resources.items() if name not in ("CPU", "GPU")},
            max_concurrency=_THREADS,
            max_restarts=0,  # another one takes its place, under another name
        )
        self._least, self._most = sizes
        self._take_released = take_released
        self._awaited = {ref: name for name, ref in stored.items()}
        self._stored: dict[str, Any] = {}
        """References to the data sets that are there, or why there is none, by name."""
        self._actors: dict[Any, Any] = {}
        """Actors by the reference to the end of their service."""
        self._failure, self._failed_at = "", -math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="placement", daemon=True)
        self._thread.start()

    def check(self, *, is_short: bool) -> None:
        """Check that actors can start.

        Args:
            is_short: whether there are fewer workers than the training needs.

        Raises:
            RunError: there are too few, and the next ones cannot start; says why.
        """
        if is_short and time.monotonic() < self._failed_at + 2 * _PAUSE_S:
            raise RunError(self._failure)

    def close(self) -> None:
        """End all actors, also those that wait for room."""
        self._closed.set()
        self._thread.join()
        for actor in self._actors.values():
            self._ray.kill(actor)

    def _keep(self) -> None:
        from ray.exceptions import RayError

        try:
            while not self._closed.is_set():
                while len(self._actors) < (self._least if self._awaited else self._most):
                    self._place()
                done, _ = self._ray.wait([*self._actors, *self._awaited], timeout=_LOOK_S)
                for ref in done:
                    if ref in self._awaited:
                        self._offer(ref, self._awaited.pop(ref))
                    else:
                        self._replace(ref)
        except (RayError, OSError) as error:  # workers that are there go on
            self._failure, self._failed_at = f"the Ray cluster is lost: {error}", math.inf
        except Exception as error:  # noqa: BLE001  # as Ray Tune does without resources for actors
            self._failure, self._failed_at = f"Ray refuses a worker: {error}", math.inf

    def _place(self) -> None:
        actor = self._class.remote(*self._arguments)
        self._actors[actor.serve.remote()] = actor
        for name, ref in self._stored.items():
            actor.offer.remote(name, ref)

    def _offer(self, ref: Any, name: str) -> None:
        try:
            wait_for_rows({name: ref})
        except DataError as error:
            ref = error
        self._stored[name] = ref
        for actor in self._actors.values():
            actor.offer.remote(name, ref)

    def _replace(self, ended: Any) -> None:
        """Forget an actor whose service has ended, so that the next one is placed."""
        from ray.exceptions import RayActorError, RayError

        actor = self._actors.pop(ended)
        try:
            self._ray.get(ended)
            if self._take_released():
                self._most -= 1
                self._least = min(self._least, self._most)
        except RayActorError as error:
            if error.actor_init_failed:  # else it was lost, as a host is
                self._note_failure(why_not_started(str(error)))
        except (RayError, RunError) as error:
            self._note_failure(why_not_started(str(error)))
        self._ray.kill(actor)

    def _note_failure(self, why: str) -> None:
        if why != self._failure:
            log.warning("%s", why)
        self._failure, self._failed_at = why, time.monotonic()
        self._closed.wait(_PAUSE_S)


def wait_for_rows(stored: Mapping[str, Any]) -> None:
    """Wait until data sets are there.

    Args:
        stored: references to their :class:`StoredRows` by name.

    Raises:
        DataError: one cannot be prepared; says why.
    """
    import ray

    for name, ref in stored.items():
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            why = last_error(str(error))
            raise DataError(f"data set {name!r} cannot be prepared: {why}") from error


def why_not_started(said: str) -> str:
    """Return why an actor could not start, for the user, from what Ray says of it."""
    if package := missing_package(said):
        return (
            f"a node of the Ray cluster has no package {package!r}. Install the same version as "
            "here for the Python that runs Ray there"
        )
    return f"a worker cannot start: {last_error(said)}"
