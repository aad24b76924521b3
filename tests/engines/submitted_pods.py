"""A run that was submitted to Kubernetes, as the tests follow it."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.testbed.kubernetes import Nodes
from tests.dist.running import Stage
from tests.engines.submitted_run import POLL_S, SubmittedProcess, SubmittedRun
from tests.paths import LIMIT_S, LITTLE_WORK, WORKER_PYTHONPATH

IMAGE = "registry.example/train:1"


class SubmittedPods(SubmittedRun):
    """``hvd-elastic k8s submit`` with the probe script.

    Args:
        resources: what each host pod asks for, and is limited to.
    """

    def __init__(
        self,
        nodes: Nodes,
        stage: Stage,
        *options: str,
        resources: dict[str, dict[str, str]] | None = None,
        **more: Any,
    ) -> None:
        self.nodes, self.control = nodes, nodes.control
        self.stage = stage
        template = stage.folder / "pod.json"
        environment = {"PYTHONPATH": WORKER_PYTHONPATH, "DIST_TEST_LIFE": "1", **LITTLE_WORK}
        container: dict[str, Any] = {
            "name": "any",
            "workingDir": str(stage.folder),
            "env": [{"name": name, "value": value} for name, value in environment.items()],
            "resources": {"requests": {"cpu": "100m"}, **(resources or {})},
        }
        pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}}
        pod["spec"] = {"containers": [container]}
        nodes.adapt(pod)
        template.write_text(json.dumps(pod))
        verb = ("k8s", "submit", "--image", IMAGE, "--pod-template", str(template))
        super().__init__(stage, None, *options, verb=verb, **more)
        assert self.process.wait(LIMIT_S) == 0, self.output.read_text()
        self.process = _Job(self)  # type: ignore[assignment]

    @property
    def home_name(self) -> str:  # type: ignore[override]
        return str(self.nodes.claims / self.name)

    @property
    def name(self) -> str:
        """Name of the job."""
        return f"hvd-{self.run_id}"

    def environment(self) -> dict[str, str]:
        found = super().environment()
        found["PATH"] = f"{self.nodes.bin}:{found['PATH']}"
        return found | {"KUBECONFIG": str(self.control.kubeconfig)}

    def k8s(self, *words: str) -> str:
        return self.command("k8s", *words)

    def pods(self, role: str = "host") -> dict[str, dict[str, Any]]:
        """Return the pods of the run that are not being deleted, by name."""
        found = self.control.pods(self.run_id, role).items()
        return {name: pod for name, pod in found if "deletionTimestamp" not in pod["metadata"]}

    def gone(self, name: str) -> bool:
        """Return whether the API server knows no pod of this name any more."""
        text = self.control.kubectl("get", "pod", name, "--ignore-not-found", "-oname")
        return not text.strip()

    def output_of_leaders(self) -> str:
        return self.nodes.output_of(self.name)

    def story(self) -> str:
        return super().story() + self.output_of_leaders()[-6000:]


class _Job(SubmittedProcess):
    """The job in which a run is led, as a process."""

    def __init__(self, pods: SubmittedPods) -> None:
        super().__init__(pods.name)
        self._pods = pods
        self._looked_at = 0.0
        self._status: int | None = None

    def begin_anew(self) -> None:
        """Follow the next job of the same name."""
        self._status = None

    def poll(self) -> int | None:
        if self._status is None and time.monotonic() > self._looked_at + POLL_S:
            self._looked_at = time.monotonic()
            try:
                path = f"/apis/batch/v1/namespaces/default/jobs/{self._pods.name}"
                status = self._pods.control.call("GET", path)["status"]
            except OSError:
                return None  # the API server is away
            for each in status.get("conditions", ()):
                self._status = {"Complete": 0, "Failed": 1}.get(each["type"])
        return self._status

    def kill(self) -> None:
        words = ("delete", "job", self._pods.name, "--ignore-not-found", "--wait=false")
        self._pods.control.kubectl(*words)
        self._status = 1
        for name in self._pods.pods():
            sys.stderr.write(f"{name} is deleted\n")
