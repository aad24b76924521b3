"""Runs on a real control plane of Kubernetes, whose nodes are virtual hosts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.testbed import kubernetes
from benchmarks.testbed.kubelet import RealNode
from benchmarks.testbed.kubernetes import ControlPlane, Nodes
from hvd_elastic.engines.kubernetes.manifests import Asked, account_and_role, as_yaml
from tests.dist.running import Stage
from tests.dist.test_saved import SCRIPT, check_bytes
from tests.engines.submitted_pods import IMAGE, SubmittedPods
from tests.paths import ALL, COSTLY, LIMIT_S
from tests.waiting import until

_MEMORY = 2 << 30
BARE_IMAGE = "registry.example/bare:1"

# The build of Kubernetes counts in the first test; it is nice, and waits where others work.
pytestmark = [pytest.mark.dist, pytest.mark.root, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def built(stage: Stage) -> None:
    why = kubernetes.why_not() or ("needs namespaces" if stage.cluster.loopback else "")
    why = why or kubernetes.build(kubelet=ALL)
    if why:
        pytest.skip(f"{why}; see make test-engines")


@pytest.fixture(scope="module")
def nodes(stage: Stage, built: None) -> Iterator[Nodes]:
    folder = stage.folder / "kubernetes"
    with (
        ControlPlane(folder, stage.cluster.leader_address) as control,
        Nodes(control, stage.cluster, {IMAGE, BARE_IMAGE}) as nodes,
    ):
        control.kubectl("apply", "-f", "-", input=as_yaml(account_and_role()))
        yield nodes


def needs_memory_groups() -> None:
    if not kubernetes.has_memory_groups():
        pytest.skip("needs control groups for memory (version 1)")


def test_evicted_and_drained_pods_cost_a_pause_and_no_example(stage, nodes) -> None:
    with SubmittedPods(nodes, stage, "--pods", "2-3") as job:
        job.wait_size(3)
        job.wait_steps(10)

        since = job.mark()
        evicted = next(iter(job.pods()))
        job.control.evict(evicted)
        job.wait_for(lambda: job.gone(evicted), "the end of the evicted pod")
        job.wait_size(3, since)

        # All pods of a node: it takes the place of the leader too, if that is there.
        since = job.mark()
        drained, pod = next(iter(job.pods().items()))
        node = pod["spec"]["nodeName"]
        words = ("--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=100s")
        nodes.control.kubectl("drain", node, *words)
        job.wait_size(3, since)
        nodes.control.kubectl("uncordon", node)
        assert drained not in job.pods()
        assert [event["status"] for event in job.kinds("run_finished")] == []

        status = job.k8s("status", job.run_id)
        assert "running" in status
        job.wait_steps(10)
        job.finish()
        report = job.folder / "report.html"
        job.k8s("report", job.run_id, "--out", str(report))  # in a pod that is made for it
        assert job.run_id in report.read_text()
        nodes.control.kubectl("delete", "job", job.name)
        job.wait_for(lambda: not _left(job), "the end of all that was made", ended_too=True)


@COSTLY
def test_pods_of_a_real_kubelet_are_evicted_and_replaced(stage, built) -> None:
    needs_memory_groups()
    with (
        ControlPlane(stage.folder / "real", stage.cluster.leader_address) as control,
        RealNode(control, stage.cluster, IMAGE, [stage.folder]) as node,
    ):
        control.kubectl("apply", "-f", "-", input=as_yaml(account_and_role()))
        with SubmittedPods(node, stage, "--pods", "2-3") as job:
            job.wait_size(3)
            job.wait_steps(10)
            since = job.mark()
            evicted = next(iter(job.pods()))
            job.control.evict(evicted)
            job.wait_event("host_drained", since, host=evicted)
            job.wait_for(lambda: job.gone(evicted), "the end of the evicted pod")
            job.wait_size(3, since)
            assert "running" in job.k8s("status", job.run_id)

            pods = {*job.pods()}
            (leader,) = job.pods("leader")
            since = job.mark()
            control.kubectl("delete", "pod", leader, "--wait=false")
            job.wait_event("taken_over", since, size=3)
            assert {*job.pods()} == pods
            job.finish()
            control.kubectl("delete", "job", job.name)
            job.wait_for(lambda: not _left(job), "the end of all that was made", ended_too=True)


def _left(job: SubmittedPods) -> str:
    kinds = "pods,secrets,services,pvc,jobs"
    chosen = f"--selector=hvd-elastic/run={job.run_id}"
    named = job.control.kubectl("get", "secret", job.name, "--ignore-not-found", "-oname")
    return job.control.kubectl("get", kinds, chosen, "-oname").strip() + named.strip()


@pytest.fixture
def clocks_that_differ(stage: Stage, nodes: Nodes) -> Iterator[None]:
    nodes.ahead_s |= {host: number * 10_000 for number, host in enumerate(stage.hosts)}
    yield
    nodes.ahead_s.clear()


def test_the_next_leader_goes_on_in_the_same_processes(stage, nodes, clocks_that_differ) -> None:
    with SubmittedPods(nodes, stage, "--pods", "2") as job:
        job.wait_size(2)
        kubectl = [str(nodes.bin / "kubectl"), "exec"]
        clocks = [
            int(subprocess.check_output([*kubectl, name, "--", "date", "+%s"], text=True))
            for name in job.pods()
        ]
        assert max(clocks) - min(clocks) > 1000
        job.wait_steps(10)
        pods = {*job.pods()}
        (leader,) = job.pods("leader")
        since = job.mark()
        nodes.control.kubectl("delete", "pod", leader, "--wait=false")
        job.wait_event("taken_over", since, size=2)
        job.wait_steps(10)
        assert {*job.pods()} == pods
        job.finish()


def test_training_needs_no_api_server_and_a_silent_node_is_replaced(stage, nodes) -> None:
    with SubmittedPods(nodes, stage, "--pods", "2") as job:
        job.wait_size(2)
        since = job.mark()
        nodes.control.pause()
        try:
            back_at = time.monotonic() + (60.0 if ALL else 10.0)
            while time.monotonic() < back_at:
                job.wait_steps(20)
        finally:
            nodes.control.go_on()
        assert not job.kinds("rescale_started", since)

        (leader,) = job.pods("leader").values()
        hosts = job.pods().items()
        name, node = next(
            (name, pod["spec"]["nodeName"])
            for name, pod in hosts
            if pod["spec"]["nodeName"] != leader["spec"]["nodeName"]
        )
        since = job.mark()
        stage.cluster.cut(node)
        job.wait_event("host_lost", since, host=name)
        job.wait_for(lambda: len({*job.pods()} - {name}) == 2, "another pod")
        job.wait_size(2, since)
        stage.cluster.heal(node)
        job.wait_steps(10)
        job.finish_leaving_files()


@COSTLY
def test_a_job_that_is_suspended_gives_its_pods_back_and_goes_on_later(stage, nodes) -> None:
    """As Kueue does it; this Kubernetes suspends a job by a parallelism of 0."""

    def allow(leaders: int) -> None:
        patch = json.dumps({"spec": {"parallelism": leaders}})
        nodes.control.kubectl("patch", f"job/{job.name}", "--type=merge", f"--patch={patch}")

    with SubmittedPods(nodes, stage, "--pods", "2", "--leader-grace", "3") as job:
        job.wait_size(2)
        job.wait_steps(10)
        allow(0)
        ended = ("Succeeded", "Failed")
        job.wait_for(
            lambda: {pod["status"]["phase"] for pod in job.pods().values()} <= {*ended},
            "the end of all pods",
        )
        since = job.mark()
        allow(1)
        job.wait_event("restored", since)
        job.wait_size(2, since)
        job.finish()


def test_a_run_is_followed_scaled_and_copied_from_outside(stage, nodes) -> None:
    path = stage.folder / "saving.py"
    path.write_text(f"print('the script begins', flush=True)\n{SCRIPT}")
    script = [sys.executable, str(path), "FOLDER"]
    with SubmittedPods(nodes, stage, "--pods", "1-2", script=script) as job:
        job.wait_size(2)
        attach = [sys.executable, "-m", "hvd_elastic.cli.app", "k8s", "attach", job.run_id]
        with subprocess.Popen(
            attach,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=job.environment(),
        ) as attached:
            job.wait_event("saved", 0)
            copy = job.folder / "copy.pt"
            job.k8s("get", job.run_id, "best.pt", str(copy))
            check_bytes(job, copy.read_bytes())
            assert "best.pt" in job.k8s("get", job.run_id)
            assert "the script begins" in job.k8s("logs", job.run_id)
            since = job.mark()
            job.k8s("scale", job.run_id, "1")
            job.wait_size(1, since)
            job.wait_for(lambda: len(job.pods()) == 1, "a pod that is given back")
            (job.folder / "enough").touch()
            assert job.wait() == 0, job.story()
            followed, _ = attached.communicate(timeout=LIMIT_S)
        assert "succeeded" in followed, followed
        assert "final.pt" in job.k8s("get", job.run_id), "in a pod that is made for it"


def test_a_run_is_stopped_and_goes_on_in_another_job(stage, nodes) -> None:
    with SubmittedPods(nodes, stage, "--pods", "1") as job:
        job.wait_size(1)
        job.wait_steps(10)
        job.k8s("stop", job.run_id)
        assert job.wait() == 0
        stopped = job.kinds("run_finished")[-1]
        assert (stopped["status"], stopped["checkpoint_step"]) == ("stopped", stopped["steps"])
        since = job.mark()
        job.k8s("submit", "--resume", job.run_id, "--pods", "2")
        job.process.begin_anew()  # type: ignore[attr-defined]
        assert job.wait_event("restored", since)["step"] == stopped["steps"]
        job.wait_size(2, since)
        job.finish()


def test_a_quota_and_a_right_that_is_missing_are_told_and_the_others_train(stage, nodes) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    quota["spec"] = {"hard": {"pods": "3"}}
    nodes.control.kubectl("create", "-f", "-", input=json.dumps(quota))
    try:
        # It binds once a controller has seen it.
        seen = ("get", "quota", "small", "-o", "jsonpath={.status.hard.pods}")
        until(lambda: nodes.control.kubectl(*seen), "the quota binds")
        with SubmittedPods(nodes, stage, "--pods", "1-4") as job:
            job.wait_size(2)
            told = "the quota of the namespace default is used up"
            job.wait_for(lambda: told in job.output_of_leaders(), told)
            job.wait_steps(10)

            nodes.control.kubectl("delete", "rolebinding", "hvd-elastic")
            since = job.mark()
            job.control.evict(next(iter(job.pods())))
            told = "The service account needs the Role of: hvd-elastic k8s setup"
            job.wait_for(lambda: told in job.output_of_leaders(), told)
            job.wait_size(1, since)
            job.wait_steps(10)
            since = job.mark()
            nodes.control.kubectl("apply", "-f", "-", input=as_yaml(account_and_role()))
            job.wait_size(2, since)
            job.finish()
    finally:
        nodes.control.kubectl("delete", "quota", "small")
        nodes.control.kubectl("apply", "-f", "-", input=as_yaml(account_and_role()))


def test_pods_that_cannot_be_made_or_are_killed_are_told_and_the_others_train(stage, nodes) -> None:
    """One uses more memory than its limit, and the image is not there for the next one."""
    needs_memory_groups()
    limit = {"limits": {"memory": f"{_MEMORY}"}}
    with SubmittedPods(nodes, stage, "--pods", "1-2", resources=limit) as job:
        job.wait_size(2)
        since = job.mark()
        nodes.images.remove(IMAGE)
        try:
            nodes.use_memory(next(iter(job.pods())), 2 * _MEMORY)
            told = ("it used more memory than its limit", "cannot be pulled")
            job.wait_for(lambda: all(each in job.output_of_leaders() for each in told), str(told))
            job.wait_size(1, since)
            job.wait_steps(10)
            since = job.mark()
        finally:
            nodes.images.add(IMAGE)
        job.wait_size(2, since)
        job.finish()


def test_a_pod_that_finds_no_room_is_given_up(stage, nodes) -> None:
    words = ("--pods", "1", "--start-limit", "4", "--gpus-per-pod", "9")
    with SubmittedPods(nodes, stage, *words) as job:
        told = ("Insufficient nvidia.com/gpu", "is given up after")
        job.wait_for(lambda: all(each in job.output_of_leaders() for each in told), str(told))


@pytest.mark.parametrize(
    ("image", "told"),
    [
        ("registry.example/none:1", "its image registry.example/none:1 cannot be pulled"),
        (BARE_IMAGE, f"its image {BARE_IMAGE} has no python3 on its PATH"),
    ],
)
def test_an_image_that_cannot_be_used_is_told(stage, nodes, image: str, told: str) -> None:
    with SubmittedPods(nodes, stage, "--pods", "1", "--image", image) as job:
        status = [sys.executable, "-m", "hvd_elastic.cli.app", "k8s", "status", job.run_id]

        def said() -> str:
            return subprocess.run(
                status, capture_output=True, text=True, env=job.environment()
            ).stderr

        job.wait_for(lambda: told in said(), told)


@COSTLY
def test_a_pod_of_a_higher_priority_takes_the_place_of_a_host(stage, nodes) -> None:
    """The host has all GPUs of its node, and so has the pod that preempts it."""
    high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    nodes.control.kubectl(
        "apply", "-f", "-", input=json.dumps({**high, "metadata": {"name": "high"}})
    )
    with SubmittedPods(
        nodes, stage, "--pods", "1-4", "--gpus-per-pod", "2", "--slots-per-pod", "1"
    ) as job:
        job.wait_size(4)
        since = job.mark()
        limits: dict[str, Any] = {"limits": {"nvidia.com/gpu": 2}}
        container = {
            "name": "any",
            "image": IMAGE,
            "command": ["sleep", "1000"],
            "resources": limits,
        }
        spec = {
            "priorityClassName": "high",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "high"}, "spec": spec}
        nodes.control.kubectl("create", "-f", "-", input=json.dumps(pod))
        job.wait_size(3, since)
        job.wait_for(lambda: "no node has room for it" in job.output_of_leaders(), "words")
        since = job.mark()
        nodes.control.kubectl("delete", "pod", "high")
        job.wait_size(4, since)
        job.finish()


def test_the_role_suffices_and_allows_nothing_else(nodes) -> None:
    account = "--as=system:serviceaccount:default:hvd-elastic"

    def may(verb: str, what: str) -> bool:
        kind, _, part = what.partition("/")
        words = ("auth", "can-i", verb, kind, f"--subresource={part}", account)
        return nodes.control.kubectl(*words, check=False).startswith("yes")

    verbs = ("create", "get", "list", "delete", "update", "patch", "watch")
    allowed = {"pods": {"create", "get", "list", "delete"}, "secrets": {"create", "delete"}}
    for what in ("pods", "secrets", "pods/exec", "nodes", "configmaps", "jobs.batch", "pods/log"):
        assert {verb for verb in verbs if may(verb, what)} == allowed.get(what, set())


def test_kubectl_reads_what_is_printed_as_it_was_given(nodes) -> None:
    words = ["--lr", "1e-3", "y", "no", "012", "0x1f", "1_000", "null", "~", "a: b", "- c", "#d"]
    words += ["'", '"', "\\", "é", "", " e ", "line\nline", '{"f": [1]}', "2001-01-01", "12:30"]
    job = Asked("printed", IMAGE).job(words, policy=False)
    dry = ("create", "--dry-run=server", "--output=json", "--filename=-")
    made = json.loads(nodes.control.kubectl(*dry, input=as_yaml([job])))
    assert made["spec"]["template"]["spec"]["containers"][0]["args"] == words


def _anothers(nodes: Nodes, what: str, value: str) -> str:
    """A kubeconfig that differs from the right one."""
    text = nodes.control.kubeconfig.read_text()
    path = nodes.control.folder / f"other-{what}"
    right = {"token": '"token": "admin"', "current-context": '"current-context": "own"'}
    path.write_text(text.replace(right[what], f'"{what}": "{value}"'))
    assert path.read_text() != text
    return str(path)


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (("token", "old"), (), "log in again"),
        (("token", "nobody"), (), "whoever administers the cluster gives this right"),
        (("current-context", "gone"), (), "kubectl config get-contexts"),
        (None, (), "set KUBECONFIG"),
        ((), ("--namespace", "none"), "kubectl get namespaces"),
        ((), ("--volume", "none:/data"), "kubectl get pvc"),
        ((), ("--home", "none"), "kubectl get pvc"),
        ((), ("--run-id", "taken"), "take another --run-id"),
        ((), ("--run-id", "over"), "kubectl describe quota"),
    ],
)
def test_what_is_wrong_outside_is_told_and_nothing_is_left(nodes, config, options, told) -> None:
    environment = {**os.environ, "PATH": f"{nodes.bin}:{os.environ['PATH']}"}
    environment["KUBECONFIG"] = str(nodes.control.kubeconfig)
    if config is None:
        environment["KUBECONFIG"] = "/nowhere"
    elif config:
        environment["KUBECONFIG"] = _anothers(nodes, *config)
    control = nodes.control
    control.kubectl("create", "job", "hvd-taken", "--image=none")
    if "quota" in told:
        control.kubectl("create", "quota", "jobs", "--hard=count/jobs.batch=1")
    try:
        words = ["-m", "hvd_elastic.cli.app", "k8s", "submit", "--pods", "1", "--image", IMAGE]
        done = subprocess.run(
            [sys.executable, *words, *options, "--", "true"],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 1, done
        assert told in done.stderr
        assert "Traceback" not in done.stderr
        assert control.kubectl("get", "jobs", "-oname").split() == ["job.batch/hvd-taken"]
    finally:
        control.kubectl("delete", "--ignore-not-found", "quota/jobs", "job/hvd-taken")


@COSTLY
def test_random_faults_cost_no_example(stage, nodes) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    with SubmittedPods(nodes, stage, "--pods", "2-3") as job:
        job.wait_size(3)
        for number in range(20):
            fault = chance.choice(("evict", "delete", "kill", "leader", "api"))
            print(f"seed {seed}, fault {number}: {fault}")
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                if fault == "api":
                    nodes.control.pause()
                    time.sleep(3.0)
                    nodes.control.go_on()
                elif pods := [*job.pods("leader" if fault == "leader" else "host")]:
                    name = chance.choice(pods)
                    if fault == "evict":
                        job.control.evict(name)
                    else:
                        how = ("--grace-period=0", "--force") if fault == "kill" else ()
                        how = (*how, "--wait=false", "--ignore-not-found")
                        nodes.control.kubectl("delete", "pod", name, *how)
            job.wait_steps(chance.randrange(20))
        job.finish_leaving_files()


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(25, 38)])
def test_manifests_are_valid(version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="see make test-engines")
    asked = Asked("r1", IMAGE, 2, None, [("data", "/data")], {"metadata": {"labels": {"a": "b"}}})
    made = [asked.job(["--pods", "2"]), asked.service(), asked.claim_made(), asked.host_pod()]
    for manifest in [*made, *account_and_role()]:
        schemas.validate(manifest, version, strict=True)
