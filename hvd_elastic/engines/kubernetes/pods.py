"""The pods of a run, as what :mod:`hvd_elastic.engines.growth` asks for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from hvd_elastic.engines.dial_in.hosts import DialInHosts
from hvd_elastic.engines.growth import Grant
from hvd_elastic.engines.kubernetes.api import (
    PATIENCE_S,
    Api,
    ApiError,
    is_gated,
    why_ended,
    why_pending,
)
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import duration_words

RUN_LABEL = "hvd-elastic/run"
ROLE_LABEL = "hvd-elastic/role"
_PAUSE_S = 15.0
"""Time before a pod is asked for after one could not be had [s]; it doubles each time."""
_LONGEST_PAUSE_S = 600.0


class Pods:
    """The host pods of a run: each is asked for by itself, and owned by the job of the leader.

    Args:
        hosts: receives what dials in.
        api: the API server.
        pod: manifest of a host pod, see :func:`hvd_elastic.engines.kubernetes.manifests.host_pod`.
        start_limit_s: how long a pod may take until it has dialled in [s]; then it is given up.
        tell: called with what happens to pods, in words.
    """

    host_word = grant_word = "pod"
    start_s: float | None = None
    hosts: tuple[str, ...] = ()
    """All hosts are pods that were asked for."""

    def __init__(
        self,
        hosts: DialInHosts,
        api: Api,
        pod: Mapping[str, Any],
        start_limit_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._dialled, self._api, self._pod = hosts, api, pod
        self._start_limit_s, self._tell = start_limit_s, tell
        self._said: dict[str, str] = {}
        """What was last said of each pod."""
        self._seen: dict[str, float] = {}
        """Since when pods are awaited, by name [monotonic s]."""
        self._came: set[str] = set()
        """Pods that have dialled in."""
        self.going: dict[str, float] = {}
        """Since when pods are known to be deleted, by name [monotonic s]."""
        self._not_before, self._pause_s, self._why = 0.0, _PAUSE_S, ""

    def _all(self, patience_s: float = 0.0) -> Sequence[Mapping[str, Any]]:
        run = self._pod["metadata"]["labels"][RUN_LABEL]
        chosen = quote(f"{RUN_LABEL}={run},{ROLE_LABEL}=host")
        found = self._api.call("GET", f"pods?labelSelector={chosen}", patience_s=patience_s)
        items: Sequence[Mapping[str, Any]] = found["items"]
        return items

    def list(self, patience_s: float = 0.0) -> list[Grant]:
        pods = self._all(patience_s)
        self._came |= {each.host.name for each in self._dialled.dial_in.hosts}
        if self._came & {pod["metadata"]["name"] for pod in pods}:
            self._pause_s = _PAUSE_S
        going = [p["metadata"]["name"] for p in pods if "deletionTimestamp" in p["metadata"]]
        self.going = {name: self.going.get(name, time.monotonic()) for name in going}
        return [grant for pod in pods if (grant := self._grant_of(pod, patience_s)) is not None]

    def _grant_of(self, pod: Mapping[str, Any], patience_s: float) -> Grant | None:
        """Return the grant that a pod is; None: it has ended, or is given up."""
        name, phase = pod["metadata"]["name"], pod["status"].get("phase", "Pending")
        if phase in ("Succeeded", "Failed"):
            if why := why_ended(pod):
                self._say(name, why)
                if name not in self._came:
                    self._pause(f"pod {name} could not be used: {why}")
            if name not in self.going:
                self._api.call("DELETE", f"pods/{name}", patience_s=patience_s)
            return None
        if name in self.going:
            self._say(name, "it is taken away (evicted, drained, preempted or deleted)")
            return None
        has_come = name in self._came
        now = time.monotonic()
        if is_gated(pod):
            self._seen.pop(name, None)  # asked for again, it would lose its place in the queue
        waited_s = now - self._seen.setdefault(name, now)
        if not has_come:
            why = why_pending(pod)
            self._say(name, why)
            if waited_s >= self._start_limit_s:
                why = why or f"it is {phase}, and has not reached the leader"
                self._pause(f"pod {name} is given up after {duration_words(waited_s)}: {why}")
                self._api.call("DELETE", f"pods/{name}", patience_s=patience_s)
                return None
        return Grant(name, phase, name, runs=has_come)

    def _say(self, name: str, why: str) -> None:
        if why and self._said.get(name) != why:
            self._said[name] = why
            self._tell(f"pod {name}: {why}")

    def _pause(self, why: str) -> None:
        self._why, now = why, time.monotonic()
        if now >= self._not_before:  # else several pods have failed together
            self._not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def ask(self, without: Sequence[str], named: str) -> None:
        if time.monotonic() < self._not_before:
            raise RunError(self._why)
        try:
            self._api.call("POST", "pods", self._pod)
        except ApiError as error:
            self._pause(str(error))
            raise

    def cancel(self, grant_ids: Sequence[str]) -> None:
        for name in grant_ids:
            self._api.call("DELETE", f"pods/{name}")

    def join_host(self, grant: Grant) -> None:
        """Do nothing: a pod that has dialled in is in the run."""

    def leave_host(self, grant_id: str, *, is_lost: bool = False) -> None:
        if grant_id not in self.going:  # else it is drained first, and released then
            self._dialled.release_host(grant_id, is_last=True)

    def in_use(self, grant_id: str) -> bool:
        return any(each.host.name == grant_id for each in self._dialled.dial_in.hosts)

    def delete_all(self) -> None:
        """Delete all pods, at the end of the run; those that the job owns end with it otherwise."""
        with contextlib.suppress(RunError):
            for pod in self._all(PATIENCE_S):
                self._api.call("DELETE", f"pods/{pod['metadata']['name']}", patience_s=PATIENCE_S)
