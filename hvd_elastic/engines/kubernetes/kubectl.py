"""The user's side of a run on Kubernetes: everything goes through ``kubectl`` and its log-in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_elastic.engines.kubernetes.manifests import check_namespace
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.json_text import parse_json

_ADVICE = (
    (
        r"localhost:8080|current-context is not set|no configuration has been provided",
        "kubectl has no cluster: set KUBECONFIG, or choose one (kubectl config use-context NAME)",
    ),
    (
        r"context \S+ does not exist|context was not found",
        "kubectl config get-contexts lists those that there are",
    ),
    (
        r"Unauthorized|must be logged in|token.* expired|getting credentials",
        "the log-in of kubectl has expired or is not valid: log in again",
    ),
    (r'namespaces "?\S+ not found', "kubectl get namespaces lists those that there are"),
    (
        r"forbidden: exceeded quota",
        "kubectl describe quota shows what is used: delete what is not needed, or ask for less",
    ),
    (r"forbidden", "whoever administers the cluster gives this right"),
    (
        r'serviceaccounts "hvd-elastic" not found',
        "make it with: hvd-elastic k8s setup | kubectl apply -f - (and the same --namespace)",
    ),
    (r"persistentvolumeclaims \S+ not found", "kubectl get pvc lists the claims that there are"),
    (
        r'jobs.batch "\S+" already exists',
        "take another --run-id, resume that run (--resume), or delete it (kubectl delete job)",
    ),
    (r'jobs.batch "\S+" not found', "kubectl get jobs lists those that there are"),
    (r"Unable to connect|connection refused|i/o timeout|no such host", "is the cluster up?"),
)
"""What to do, by what kubectl has said."""


class Kubectl:
    """Calls ``kubectl`` for a namespace.

    Args:
        namespace: None: that of kubectl's context.

    Raises:
        UsageError: no namespace can have that name.
    """

    def __init__(self, namespace: str | None = None) -> None:
        self._options = [] if namespace is None else [f"--namespace={check_namespace(namespace)}"]

    def command(self, *words: str) -> list[str]:
        """Return a command line.

        Raises:
            RunError: there is no kubectl.
        """
        if shutil.which("kubectl") is None:
            raise RunError(
                "kubectl is not on PATH: install it, since it knows your log-in, or print what is "
                "to be applied (--dry-run)"
            )
        return ["kubectl", *self._options, *words]

    def call(self, *words: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        """Return what a command has printed.

        Args:
            timeout_s: its time limit [s].

        Raises:
            RunError: it failed; says what to do where that is known.
        """
        try:
            done = subprocess.run(
                self.command(*words),
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(f"kubectl {words[0]} took longer than {timeout_s:g} s") from error
        if done.returncode:
            raise RunError(f"kubectl {words[0]} failed: {_with_advice(done.stderr)}")
        return done.stdout

    def get(self, *words: str) -> dict[str, Any]:
        """Return an object, or a list of them.

        Raises:
            RunError: as of :meth:`call`.
        """
        found: dict[str, Any] = parse_json(self.call("get", *words, "--output=json").encode())
        return found

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object and return it as it is then.

        Raises:
            RunError: as of :meth:`call`.
        """
        text = self.call("create", "--filename=-", "--output=json", stdin=json.dumps(manifest))
        found: dict[str, Any] = parse_json(text.encode())
        return found

    def knows_failure_policies(self) -> bool:
        """Return whether the cluster has policies about failed pods: from Kubernetes 1.26 on.

        Raises:
            RunError: as of :meth:`call`.
        """
        server = parse_json(self.call("version", "--output=json").encode())["serverVersion"]
        minor = re.match(r"\d+", server["minor"])
        return server["major"] != "1" or (minor is not None and int(minor[0]) >= 26)

    def read_template(self, path: Path) -> dict[str, Any]:
        """Return the manifest of a pod from a file of YAML or JSON.

        Raises:
            UsageError: it is no pod with one container.
            RunError: as of :meth:`call`.
        """
        if not path.is_file():
            raise UsageError(f"--pod-template {path}: no such file")
        words = ("patch", "--local", "--type=merge", "--patch={}", "--output=json")
        try:
            pod = parse_json(self.call(*words, f"--filename={path}").encode())
        except RunError as error:
            if "not on PATH" in str(error):
                raise
            raise UsageError(
                f"--pod-template {path} cannot be read: {error}. It is the manifest of a Pod, with "
                "apiVersion, kind, metadata.name and spec.containers"
            ) from error
        containers = pod.get("spec", {}).get("containers") or [{}]
        if pod.get("kind") != "Pod" or len(containers) != 1:
            what = f"{len(containers)} containers" if pod.get("kind") == "Pod" else pod.get("kind")
            raise UsageError(
                f"--pod-template {path} has {what}: it takes a Pod with one container, in which "
                "the leader or the workers of a host run"
            )
        found: dict[str, Any] = pod
        return found


_LOG = re.compile(r"[EFIW]\d{4} \d\d:\d\d:")
"""Begin of a line of kubectl's own log, which is on its stderr too."""


def _with_advice(said: str) -> str:
    r"""Return the last words of kubectl with what to do.

    >>> _with_advice('Error from server (NotFound): namespaces "ml" not found')
    'namespaces "ml" not found. kubectl get namespaces lists those that there are'
    >>> _with_advice('E1129 14:33:18.4 230 memcache.go:265] "Unhandled Error"\nit was refused')
    'it was refused'
    """
    lines = said.strip().split("\n")
    text = " ".join(([each for each in lines if not _LOG.match(each)] or lines)[-2:])
    text = text or "it says nothing"
    text = re.sub(r"^(error: |Error from server \(\w+\): )+", "", text).strip().rstrip(".")
    advice = next((each for pattern, each in _ADVICE if re.search(pattern, said)), "")
    return f"{text}. {advice}" if advice else text
