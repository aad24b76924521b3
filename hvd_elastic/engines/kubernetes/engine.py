"""Lead a run whose hosts are pods: they dial in, and others are asked for when some are missing."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from hvd_elastic import __version__
from hvd_elastic.engines.base import HostSource, repeating
from hvd_elastic.engines.dial_in.hosts import DialInHosts
from hvd_elastic.engines.growth import Growth, Limits, growing
from hvd_elastic.engines.kubernetes.api import PATIENCE_S, Api, ApiError
from hvd_elastic.engines.kubernetes.manifests import PORT
from hvd_elastic.engines.kubernetes.pods import Pods
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.certificate import make_certificate
from hvd_elastic.hosts.hostfile import Hostfile
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.replaced_files import write_whole
from hvd_elastic.run_events import HostDrained, HostDraining

_LOOK_S = 0.2
"""Time between two looks at what has happened in the run [s]."""
_RETURN_S = 20.0
"""How long a new leader waits for the hosts of the one before [s]; they dial every second."""
_TERMINATED = 128 + signal.SIGTERM
_NOTICE_S = 3.0
"""How long the notice of a pod that is deleted may take to arrive [s]."""
_LEAVE_IN_S = 10.0
"""Time that such a pod is given if it does not arrive [s]."""
_MARGIN_S = 2.0
"""Part of a pod's grace time that is kept for its end [s]."""


class KubernetesSource(HostSource):
    """What a run is led on with in the pod of its leader, by ``hvd-elastic k8s lead`` alone."""

    def hosts(self, environment: Mapping[str, str]) -> Hostfile:
        raise RunError("pods are hosts of runs of hvd-elastic k8s submit alone")

    def lead(
        self, folder: RunFolder, environment: Mapping[str, str]
    ) -> AbstractContextManager[DialInHosts]:
        raise RunError(f"run {folder.run_id} is led in a pod: {folder.resume_command}")

    def clean(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {}  # workers have the variables of their own pod


@contextlib.contextmanager
def kubernetes_engine(
    folder: RunFolder,
    api: Api,
    own: Mapping[str, Any],
    pod: dict[str, Any],
    limits: Limits,
    spec: RunSpec,
    start_limit_s: float,
    tell: Callable[[str], None],
) -> Iterator[DialInHosts]:
    """Yield the pods of a run as its hosts, when the fewest have come.

    Args:
        folder: folder of the run, whose lock this process holds.
        own: the pod of this process.
        pod: manifest of a host pod.
        limits: how many pods there are.
        start_limit_s: see :class:`Pods`.
        tell: called with what is done, in words.

    Raises:
        ApiError: the API server refuses a call, or is away for too long. If it is away, hosts and
            pods stay: the Job makes another leader, which continues with them.
        RunError: the run was stopped before it began.
    """

    def check() -> None:
        if [*folder.take_requests("stop")]:
            raise RunError("the run was stopped before it began")

    owner = own["metadata"]["ownerReferences"][0]
    grace_s = max(60.0, 2 * spec.leader_grace_s)
    again: Any = {"grace_s": grace_s, "port": PORT, "certificate": _certificate(folder)}
    hosts = DialInHosts(folder.hosts, own["status"]["podIP"], tell, **again)
    owned = {"ownerReferences": [{**owner, "controller": False, "blockOwnerDeletion": False}]}
    pod["metadata"] |= owned
    pods = Pods(hosts, api, pod, start_limit_s, tell)
    is_over = True
    try:
        notice_s = pod["spec"]["terminationGracePeriodSeconds"] - _MARGIN_S
        invitation = {
            **hosts.dial_in.invitation,
            "address": f"{owner['name']}.{api.namespace}.svc",
            "slots": limits.slots_per_host,
            "version": __version__,
            "after_sigterm_s": max(1.0, notice_s),
        }
        _tell_invitation(api, owner["name"], owned, invitation)
        growth = Growth(pods, limits, spec, tell)
        earlier = len(pods.list(PATIENCE_S))  # pods of an earlier leader
        least = max(limits.least, min(earlier, limits.most))
        with growing(growth, folder, tell), _draining(folder, hosts, pods):
            tell(f"waiting for {count(least, 'pod')}")
            slots, fewest = least * limits.slots_per_host, limits.least * limits.slots_per_host
            hosts.wait_for(slots, check, _RETURN_S, fewest, math.inf)
            yield hosts
    except ApiError as error:
        is_over = not error.is_passing
        raise
    finally:
        if is_over:
            hosts.close()
            pods.delete_all()
            with contextlib.suppress(ApiError):
                api.call("DELETE", f"secrets/{owner['name']}")


def _certificate(folder: RunFolder) -> str:
    """Return the key by which hosts know this run's leaders: that of the one before, if any."""
    path = folder.path / "dial_in.pem"
    if not path.exists():
        write_whole(path, make_certificate(), mode=0o600)
    return path.read_text(encoding="ascii")


def _tell_invitation(
    api: Api, name: str, owned: Mapping[str, Any], invitation: Mapping[str, Any]
) -> None:
    """Put the invitation where host pods find it, in a Secret."""
    secret = {
        "metadata": {"name": name, **owned},
        "stringData": {"invitation": json.dumps(invitation)},
    }
    api.call("DELETE", f"secrets/{name}", patience_s=PATIENCE_S)
    try:
        api.call("POST", "secrets", secret, PATIENCE_S)
    except ApiError as error:
        if error.status != http.client.CONFLICT:  # made by a call whose answer was lost
            raise


@contextlib.contextmanager
def _draining(folder: RunFolder, hosts: DialInHosts, pods: Pods) -> Iterator[None]:
    """Have each drained host end at once: it does not come back, and its pod waits for nothing.

    A pod is drained by its own notice; if no leader has heard it, by a request.
    """
    follower = folder.follow_events()
    follower.poll()  # what an earlier leader has seen
    draining: set[str] = set()

    def look() -> bool:
        for event in follower.poll():
            match event:
                case HostDraining(host=host):
                    draining.add(host)
                case HostDrained(host=host):
                    hosts.release_host(host, is_last=True)
        for name, since in [*pods.going.items()]:
            if time.monotonic() > since + _NOTICE_S and name not in draining and pods.in_use(name):
                folder.send_request("drain", {"host": name, "leave_in_s": _LEAVE_IN_S})
                draining.add(name)
        return False

    with repeating("drained hosts", _LOOK_S, look):
        yield


def leave_at_sigterm() -> None:
    """Have this process end at SIGTERM and leave the hosts as they are.

    The pod of the leader is taken away then, not the run: the next pod of its job leads it on, in
    the same processes. Called before other threads begin, which take over what is blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(_TERMINATED)  # as if it were killed, which the first process of a pod cannot be

    threading.Thread(target=wait, name="SIGTERM", daemon=True).start()


def own_pod(api: Api) -> dict[str, Any]:
    """Return the pod of this process, which a job owns, when its address is known.

    Raises:
        RunError: the service account may not read it, or no job owns it.
    """
    name = os.environ.get("POD_NAME") or socket.gethostname()
    while True:
        pod = api.call("GET", f"pods/{name}", patience_s=PATIENCE_S)
        if "podIP" in pod["status"]:  # the kubelet reports it a moment after the start
            break
        time.sleep(_LOOK_S)
    owners = pod["metadata"].get("ownerReferences", ())
    if not any(each["kind"] == "Job" for each in owners):
        raise RunError(
            f"the pod {name} belongs to no Job, so nothing would collect the pods of its hosts: "
            "lead the run in a Job, as in docs/kubernetes.md"
        )
    return pod
