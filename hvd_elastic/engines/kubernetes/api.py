"""Call the API server of the Kubernetes cluster that this pod runs in, and say what a pod lacks."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.json_text import parse_json

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token of its service account."""
PATIENCE_S = 120.0
"""How long a run waits for the API server at its begin and at its end [s]."""
_AGAIN_S = 1.0
_TIMEOUT_S = 10.0
"""Time limit of a call [s]."""
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
"""Reasons why a container waits that have to do with its image."""
_LACKS = (
    ("hvd_elastic", re.compile("No module named '?hvd_elastic")),
    ("python3 on its PATH", re.compile("python3.*not found")),
)
"""What an image lacks, by the last words of its container."""


class ApiError(RunError):
    """The API server has refused a call, or does not answer.

    Attributes:
        status: status of the answer; 0: there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        if self.is_passing:
            self.exit_status = os.EX_TEMPFAIL  # the job makes another leader

    @property
    def is_passing(self) -> bool:
        """Whether the same call may succeed later: the server is away, or has too much to do."""
        return self.status in (0, http.client.TOO_MANY_REQUESTS) or self.status >= 500


class Api:
    """The API server, as the service account of this pod may use it.

    Args:
        environment: variables of the pod, with the address of the server.
        account: folder with the token, the certificate of the server and the namespace.

    Raises:
        RunError: this process runs in no pod, or the pod has no service account.
    """

    def __init__(self, environment: Mapping[str, str], account: Path = ACCOUNT) -> None:
        self._host = environment.get("KUBERNETES_SERVICE_HOST", "").strip("[]")
        self._port = int(environment.get("KUBERNETES_SERVICE_PORT") or 443)
        self._token = account / "token"
        if not self._host:
            raise RunError(
                "there is no pod of Kubernetes here (KUBERNETES_SERVICE_HOST is not set). Submit a "
                "run: hvd-elastic k8s submit --pods 2 --image IMAGE -- python train.py"
            )
        try:
            self.namespace = (account / "namespace").read_text(encoding="ascii").strip()
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise RunError(
                f"this pod has no token of a service account in {account}: give it the one of "
                "hvd-elastic k8s setup, and leave automountServiceAccountToken out"
            ) from error

    def call(
        self, method: str, path: str, body: Any = None, patience_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the answer to a call about objects of the namespace; one to delete may be gone.

        Args:
            path: path behind that of the namespace, such as ``pods/NAME``.
            patience_s: how long the call is repeated while the server is away or busy [s].

        Raises:
            ApiError: it was refused, or there is no answer.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._call_once(method, path, body)
            except ApiError as error:
                if method == "DELETE" and error.status == http.client.NOT_FOUND:
                    return {}
                if not error.is_passing or time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_S)

    def _call_once(self, method: str, path: str, body: Any) -> dict[str, Any]:
        # Not through a proxy of the environment; the token is replaced every hour.
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=_TIMEOUT_S, context=self._context
        )
        try:
            token = self._token.read_text(encoding="ascii").strip()
            connection.request(
                method,
                f"/api/v1/namespaces/{self.namespace}/{path}",
                None if body is None else json.dumps(body),
                {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            found: dict[str, Any] = parse_json(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"the API server of Kubernetes does not answer ({error})") from error
        finally:
            connection.close()
        if answer.status >= 400:
            said = str(found.get("message") or answer.reason)
            raise ApiError(refusal_words(answer.status, said, self.namespace), answer.status)
        return found


def refusal_words(status: int, said: str, namespace: str) -> str:
    """Return why a call was refused, and what to do.

    >>> refusal_words(403, 'pods "a" is forbidden: exceeded quota: small', "ml")
    'the quota of the namespace ml is used up (pods "a" is forbidden: exceeded quota: small): ...
    """
    if status == http.client.FORBIDDEN and "exceeded quota" in said:
        return (
            f"the quota of the namespace {namespace} is used up ({said}): delete pods that are not "
            "needed, ask for less with --pods, or have the quota raised"
        )
    if status == http.client.FORBIDDEN:
        return (
            f"{said}. The service account needs the Role of: hvd-elastic k8s setup --namespace "
            f"{namespace} | kubectl apply -f -"
        )
    return f"Kubernetes refuses: {said}"


def is_gated(pod: Mapping[str, Any]) -> bool:
    """Return whether a queue, such as Kueue's, holds a pod back."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each.get("reason") == "SchedulingGated" for each in conditions)


def why_pending(pod: Mapping[str, Any]) -> str:
    """Return why a pod has not started yet, and what to do; empty: it is about to."""
    status = pod.get("status", {})
    if is_gated(pod):
        return "a queue, such as Kueue's, holds it back until there is room for it"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return (
                f"no node has room for it ({condition.get('message', 'no reason is given')}): it "
                "waits for one, which an autoscaler may add"
            )
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting") or {}
        reason, said = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE:
            return (
                f"its image {container.get('image')} cannot be pulled ({reason}: {said}): mend "
                "--image, or give --pod-template with imagePullSecrets"
            )
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return f"its container cannot start ({reason}: {said})"
    return ""


def why_ended(pod: Mapping[str, Any]) -> str:
    """Return why a pod has ended before its time, and what to do; empty: it has ended well."""
    status = pod.get("status", {})
    if reason := status.get("reason"):
        return f"{reason}: {status.get('message', 'no message')}"
    for container in status.get("containerStatuses", ()):
        ended = container.get("state", {}).get("terminated") or {}
        reason, code = ended.get("reason", ""), ended.get("exitCode", 0)
        last = (ended.get("message") or "").strip().rpartition("\n")[2]
        if reason == "OOMKilled":
            return (
                "it was killed because it used more memory than its limit: raise "
                "resources.limits.memory in --pod-template, or take smaller batches"
            )
        for lacks, words in _LACKS:
            if words.search(last):
                return f"its image {container.get('image')} has no {lacks} ({last}): install it"
        if code:
            return f"it ended with exit status {code} ({last or reason})"
    return ""
