"""Measures the eviction of one of three pods: ours, and with all pods deleted and started again.

Run it: ``python benchmarks/kubernetes.py --repetitions 3``. The second way is that of AdaptDL's
scheduler, which deletes all pods of a job whose allocation changes; our own run is treated in that
way here, so both have the same training, image and cluster. The control plane of Kubernetes is
real (built once); nodes are virtual hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, at_least_one, run_benchmark
from benchmarks.testbed.figures import Result, conditions, figure, table
from benchmarks.testbed.hosts import Testbed
from benchmarks.testbed.kubernetes import ControlPlane, Nodes, build, why_not
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT
from benchmarks.testbed.marks import longest_gap
from hvd_elastic.engines.kubernetes.manifests import account_and_role, as_yaml
from hvd_elastic.errors import RunError
from hvd_elastic.virtual import VirtualCluster

_PODS = 3
_LIMIT_S = 300.0
_CALM_S = 3.0
_IMAGE = "registry.example/train:1"
_FIGURES = (
    *("the pod is gone", "of that the pod's own end"),
    *("pause at the eviction", "pause at the join", "without training"),
)
_NOTE = (
    "Steps are padded to 15 ms. The pod's own end: from SIGTERM until its processes have ended; "
    "the rest is the API server's and the kubelet's, which looks every 0.25 s. Without training: "
    "all times between two steps of the run that are longer than 0.1 s and than any in the 3 s "
    "before, from the eviction to the tenth step of three pods again."
)


class _Job:
    """A run of three pods, and the times of its steps."""

    def __init__(self, nodes: Nodes, bed: Testbed, folder: Path, number: int) -> None:
        self.nodes, self.control, self.folder = nodes, nodes.control, folder
        self.run_id = f"bench{number}"
        template = folder / "pod.json"
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        variables = [{"name": name, "value": value} for name, value in environment.items()]
        container = {"name": "any", "workingDir": str(folder), "env": variables}
        pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}}
        template.write_text(json.dumps({**pod, "spec": {"containers": [container]}}))
        submit = [*OUR_PROGRAM, "k8s", "submit", "--run-id", self.run_id, "--image", _IMAGE]
        submit += ["--pods", f"{_PODS}", "--pod-template", str(template)]
        submit += ["--checkpoint-every", "2", "--", "python3", "-m", "benchmarks.testbed.marking"]
        submit += [str(folder / "marks"), str(ROOT / "benchmarks/peers/train_ours.py")]
        path = f"{nodes.bin}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path}
        self._environment["KUBECONFIG"] = str(self.control.kubeconfig)
        words = [*submit, "--data", str(bed.data)]
        subprocess.run(words, check=True, env=self._environment, stdout=subprocess.DEVNULL)

    def steps(self) -> list[tuple[float, int]]:
        """Return when steps were finished, and by how many ranks, oldest first."""
        found = []
        for path in (self.folder / "marks").glob("*.jsonl"):
            for line in path.read_text().rpartition("\n")[0].splitlines():
                mark = json.loads(line)
                if mark["mark"] == "step":
                    found.append((mark["mono"], mark["size"]))
        return sorted(found)

    def wait(self, is_so: Callable[[], Any], what: str) -> float:
        """Wait until something is so, and return when it was [s, monotonic]."""
        deadline = time.monotonic() + _LIMIT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise RunError(f"{self.run_id}: {what}: not in {_LIMIT_S:g} s")
            time.sleep(0.1)
        return time.monotonic()

    def wait_trains(self, since: float) -> None:
        """Wait until all pods have made ten steps since a time."""
        self.wait(lambda: len(self._whole(since)) >= 10 * _PODS, "training on all pods")

    def _whole(self, since: float) -> list[float]:
        return [t for t, size in self.steps() if t > since and size == _PODS]

    def names(self, role: str) -> list[str]:
        return [*self.control.pods(self.run_id, role)]

    def pauses(self) -> list[float]:
        """Return the pauses of the changes so far [s]."""
        events = self.nodes.claims / f"hvd-{self.run_id}" / "runs" / self.run_id / "events.jsonl"
        told = map(json.loads, events.read_text().splitlines())
        return [e["pause_s"] for e in told if e["kind"] == "rescale_finished" and e["pause_s"]]

    def lost_s(self, since: float) -> float:
        """Return the time without training from a time to the tenth step on all pods [s]."""
        times = [t for t, _ in self.steps()]
        end = self._whole(since)[-1]
        first = max(t for t in times if t <= since)
        inside = [t for t in times if first <= t <= end]
        calm = [t for t in times if since - _CALM_S <= t <= since]
        usual_s = max(0.1, longest_gap(calm))
        gaps = [later - earlier for earlier, later in itertools.pairwise(inside)]
        return sum(gap for gap in gaps if gap > usual_s)

    def end(self) -> None:
        with contextlib.suppress(AssertionError):
            self.control.kubectl("delete", "job", f"hvd-{self.run_id}", "--wait=true")
        # None is started any more on the hosts, which are restored now.
        self.wait(lambda: not self.names("host") + self.names("leader"), "the end of all pods")


def _evict(job: _Job) -> dict[str, float]:
    name = job.names("host")[-1]
    before = len(job.pauses())
    asked = time.monotonic()
    job.control.evict(name)
    gone = job.wait(lambda: name not in job.names("host"), "the end of the pod")
    job.wait(lambda: len(job.pauses()) >= before + 2, "another pod")
    job.wait_trains(time.monotonic())
    leave_s, join_s = job.pauses()[before:][:2]
    values = (gone - asked, job.nodes.left_s[name], leave_s, join_s, job.lost_s(asked))
    return dict(zip(_FIGURES, values, strict=True))


def _delete_all(job: _Job) -> dict[str, float]:
    asked = time.monotonic()
    pods = job.names("host")
    job.control.kubectl("delete", "pod", "--wait=false", *pods, *job.names("leader"))
    gone = job.wait(lambda: not {*pods} & {*job.names("host")}, "the end of the pods")
    job.wait_trains(gone)
    left_s = max(job.nodes.left_s[name] for name in pods)
    return {"the pod is gone": gone - asked, _FIGURES[1]: left_s, _FIGURES[-1]: job.lost_s(asked)}


_WAYS = {"ours": _evict, "all pods deleted": _delete_all}


@contextlib.contextmanager
def _nodes(scratch: Path) -> Iterator[tuple[Nodes, Testbed]]:
    if why := why_not() or build():
        raise RunError(f"no Kubernetes here: {why}")
    with VirtualCluster.up(_PODS + 1, 1, shares=[scratch]) as cluster:
        bed = Testbed(cluster, scratch)
        with (
            ControlPlane(scratch / "kubernetes", cluster.leader_address) as control,
            Nodes(control, cluster, {_IMAGE}) as nodes,
        ):
            control.kubectl("apply", "-f", "-", input=as_yaml(account_and_role()))
            yield nodes, bed


def measure_evictions(options: argparse.Namespace, say: Say) -> Result:
    """Measure each way in turn."""
    load_before = os.getloadavg()
    samples: dict[tuple[str, str], list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hvd-kubernetes-") as scratch,
        _nodes(Path(scratch)) as (nodes, bed),
    ):
        for number in range(options.repetitions):
            for place, (way, act) in enumerate(_WAYS.items()):
                with bed.job_folder() as folder:
                    job = _Job(nodes, bed, folder, number * len(_WAYS) + place)
                    try:
                        job.wait_trains(0.0)
                        time.sleep(_CALM_S)  # a checkpoint is written
                        found = act(job)
                    finally:
                        job.end()
                say(f"round {number}, {way}: {found}")
                for name, value in found.items():
                    samples.setdefault((way, name), []).append(value)
        hosts = bed.description
    rows = [
        {"way": way, **{name: figure(samples.get((way, name), [])) for name in _FIGURES}}
        for way in _WAYS
    ]
    shown = [[str(cell) for cell in row.values()] for row in rows]
    headings = ("way", *_FIGURES)
    return Result(
        "kubernetes",
        conditions(hosts, _NOTE, load_before, {"kubernetes": "1.20.2"}),
        {"rows": rows},
        [table("One of three pods is evicted", headings, shown)],
    )


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="kubernetes.py", description=__doc__)
    told = "rounds (3)"
    parser.add_argument("--repetitions", "-n", type=at_least_one, default=3, help=told)
    return run_benchmark(parser, measure_evictions)


if __name__ == "__main__":
    sys.exit(main())
