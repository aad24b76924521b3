"""The manifests of a run on Kubernetes, as objects that JSON can hold, and as YAML."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from hvd_elastic.engines.kubernetes.pods import ROLE_LABEL, RUN_LABEL
from hvd_elastic.errors import UsageError

ACCOUNT = "hvd-elastic"
"""Service account of the leader, and name of its Role."""
PORT = 7733
"""Port at which the leader's pod listens for its hosts."""
HOME = "/mnt/hvd_elastic"
"""Where the home of the run is mounted in the pod of the leader."""
INVITATION = "/run/hvd_elastic"
"""Where the invitation of the leader is mounted in the pods of hosts."""
POD_VARIABLE = "HVD_ELASTIC_HOST_POD"
"""Variable of the leader's container with the manifest of a host pod, as JSON."""
GPU = "nvidia.com/gpu"
FOR_GOOD = (1, 2)
"""Exit statuses of a leader that no other leader can fix; after others the next one continues."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 40
_LONGEST_LABEL = 63


def check_name(run_id: str) -> str:
    """Return the name of a run's objects.

    Raises:
        UsageError: the run id cannot be part of one.

    >>> check_name("digits-3")
    'hvd-digits-3'
    """
    if not _NAME.fullmatch(run_id) or len(run_id) > _LONGEST_NAME:
        raise UsageError(
            f"--run-id {run_id!r} cannot be the name of a job of Kubernetes: take at most "
            f"{_LONGEST_NAME} of a-z, 0-9 and -, with a letter or digit at both ends"
        )
    return f"hvd-{run_id}"


def check_namespace(namespace: str) -> str:
    """Return a namespace.

    Raises:
        UsageError: none can have that name (a label of RFC 1123).

    >>> check_namespace("ml")
    'ml'
    """
    if not _NAME.fullmatch(namespace) or len(namespace) > _LONGEST_LABEL:
        raise UsageError(
            f"--namespace {namespace!r} is not valid: it has 1 to {_LONGEST_LABEL} of a-z, 0-9 and "
            "-, with a letter or digit at both ends. See: kubectl get namespaces"
        )
    return namespace


@dataclass(frozen=True)
class Asked:
    """What a run asks of Kubernetes.

    Attributes:
        run_id: its name.
        image: image of all pods; empty: that of the template.
        gpus: GPUs of each host pod.
        home: claim with the home of the run; None: one is made.
        volumes: claims and where all pods have them.
        template: manifest of a pod, with one container, that all pods follow.
    """

    run_id: str
    image: str
    gpus: int = 0
    home: str | None = None
    volumes: Sequence[tuple[str, str]] = ()
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return check_name(self.run_id)

    def _pod(self, role: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the manifest of a pod, and its container in it."""
        pod = copy.deepcopy(dict(self.template))
        given, spec = pod.get("metadata", {}), pod.setdefault("spec", {})
        labels = {**given.get("labels", {}), RUN_LABEL: self.run_id, ROLE_LABEL: role}
        metadata: dict[str, Any] = {"labels": labels}
        if annotations := given.get("annotations"):
            metadata["annotations"] = annotations
        container = spec.setdefault("containers", [{}])[0]
        container["name"] = role
        container["image"] = self.image or container.get("image", "")
        container["terminationMessagePolicy"] = "FallbackToLogsOnError"
        for number, (claim, path) in enumerate(self.volumes):
            _mount(spec, f"volume-{number}", _of_claim(claim), path)
        _set(container, "POD_NAME", {"fieldRef": {"fieldPath": "metadata.name"}})
        spec["restartPolicy"] = "Never"
        spec["enableServiceLinks"] = False
        return {"metadata": metadata, "spec": spec}, container

    def host_pod(self) -> dict[str, Any]:
        """Return the manifest of a pod that is a host; the leader adds the owner to it."""
        pod, container = self._pod("host")
        container["command"] = ["python3", "-m", "hvd_elastic.engines.kubernetes.host"]
        container["args"] = [f"{INVITATION}/invitation"]
        if self.gpus:
            limits = container.setdefault("resources", {}).setdefault("limits", {})
            limits[GPU] = self.gpus
        spec = pod["spec"]
        secret = {"secret": {"secretName": self.name}}
        _mount(spec, "invitation", secret, INVITATION, readOnly=True)
        spec["automountServiceAccountToken"] = False
        spec.setdefault("terminationGracePeriodSeconds", 30)
        # One pod for a node where there are enough, since a drained node takes all of its pods.
        others = {"labelSelector": {"matchLabels": pod["metadata"]["labels"]}}
        term = {**others, "topologyKey": "kubernetes.io/hostname"}
        apart = spec.setdefault("affinity", {}).setdefault("podAntiAffinity", {})
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        apart.setdefault("preferredDuringSchedulingIgnoredDuringExecution", preferred)
        # The leader notices a lost node in seconds: its pod is replaced before the usual 300 s.
        lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
        keys = [f"node.kubernetes.io/{state}" for state in ("unreachable", "not-ready")]
        tolerations = [{"key": key, **lost} for key in keys]
        spec["tolerations"] = [*spec.get("tolerations", ()), *tolerations]
        named = {"generateName": f"{self.name}-host-", **pod["metadata"]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": spec}

    def job(self, command: Sequence[str], *, policy: bool = True) -> dict[str, Any]:
        """Return the manifest of the job in whose pod the run is led.

        Args:
            command: arguments of ``hvd-elastic k8s lead``.
            policy: whether the cluster knows policies about failed pods (Kubernetes 1.26).
        """
        pod, container = self._pod("leader")
        spec = pod["spec"]
        container["command"] = ["python3", "-m", "hvd_elastic.cli.app", "k8s", "lead"]
        container["args"] = [*command]
        container["resources"] = {"requests": {"cpu": "250m", "memory": "512Mi"}}
        _set(container, "HVD_ELASTIC_HOME", HOME)
        _set(container, POD_VARIABLE, json.dumps(self.host_pod(), indent=1))
        _mount(spec, "home", _of_claim(self.home or self.name), HOME)
        spec["serviceAccountName"] = ACCOUNT
        spec["terminationGracePeriodSeconds"] = 10
        # Without the policy, a pod that is deleted does not count, and one that has failed does.
        job: dict[str, Any] = {"backoffLimit": 1000 if policy else 4, "template": pod}
        if policy:
            ended = {"containerName": "leader", "operator": "In", "values": [*FOR_GOOD]}
            moved = {"type": "DisruptionTarget", "status": "True"}
            job["podFailurePolicy"] = {
                "rules": [
                    # The schema of 1.25 demands the empty list too.
                    {"action": "FailJob", "onExitCodes": ended, "onPodConditions": []},
                    {"action": "Ignore", "onPodConditions": [moved]},
                ]
            }
        made = self._object("batch/v1", "Job", spec=job)
        made["metadata"]["labels"] |= self.template.get("metadata", {}).get("labels", {})
        return made

    def service(self) -> dict[str, Any]:
        """Return the manifest of the name by which hosts find the leader, wherever its pod is."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: self.run_id, ROLE_LABEL: "leader"},
            "ports": [{"name": "hosts", "port": PORT}],
        }
        return self._object("v1", "Service", spec=spec)

    def claim_made(self) -> dict[str, Any] | None:
        """Return the manifest of the claim with the home of the run; None: the user has one."""
        if self.home is not None:
            return None
        size = {"requests": {"storage": "10Gi"}}
        spec = {"accessModes": ["ReadWriteOnce"], "resources": size}
        return self._object("v1", "PersistentVolumeClaim", spec=spec)

    def _object(self, version: str, kind: str, **more: Any) -> dict[str, Any]:
        metadata = {"name": self.name, "labels": {RUN_LABEL: self.run_id}}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


def account_and_role() -> list[dict[str, Any]]:
    """Return the manifests of the leader's service account and of the smallest Role for it."""
    allowed = {"pods": ["create", "get", "list", "delete"], "secrets": ["create", "delete"]}
    rules = [{"apiGroups": [""], "resources": [k], "verbs": v} for k, v in allowed.items()]
    group = "rbac.authorization.k8s.io"
    bound = {
        "roleRef": {"apiGroup": group, "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT}],
    }
    return [
        {"apiVersion": version, "kind": kind, "metadata": {"name": ACCOUNT}, **more}
        for version, kind, more in (
            ("v1", "ServiceAccount", {}),
            (f"{group}/v1", "Role", {"rules": rules}),
            (f"{group}/v1", "RoleBinding", bound),
        )
    ]


def _of_claim(claim: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": claim}}


def _mount(spec: dict[str, Any], name: str, source: dict[str, Any], path: str, **more: Any) -> None:
    """Give the container of a pod a volume."""
    spec.setdefault("volumes", []).append({"name": name, **source})
    mount = {"name": name, "mountPath": path, **more}
    spec["containers"][0].setdefault("volumeMounts", []).append(mount)


def _set(container: dict[str, Any], name: str, value: str | dict[str, Any]) -> None:
    """Set a variable of a container."""
    entry = {"value": value} if isinstance(value, str) else {"valueFrom": value}
    rest = [each for each in container.get("env", ()) if each["name"] != name]
    container["env"] = [*rest, {"name": name, **entry}]


_PLAIN = re.compile(r"[A-Za-z/][\w./-]+")
"""Text that no parser of YAML takes for anything else; the library quotes ``true`` and ``null``."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # kubectl's parser takes 1e-3 and y for a number and a truth value, other than the library's.
    style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


def as_yaml(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Return manifests as documents of YAML.

    >>> print(as_yaml([{"kind": "Job", "spec": {"args": ["1e-3", "y", "true"]}}]), end="")
    kind: Job
    spec:
      args:
      - "1e-3"
      - "y"
      - 'true'
    """
    made = yaml.dump_all(
        manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize
    )
    return str(made)
