"""Pods as what a run grows by: what is asked for, given up and said."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.engines.dial_in.hosts import DialInHosts
from hvd_elastic.engines.growth import Growth, Limits
from hvd_elastic.engines.kubernetes import engine
from hvd_elastic.engines.kubernetes.api import Api, ApiError, why_ended
from hvd_elastic.engines.kubernetes.engine import kubernetes_engine, own_pod
from hvd_elastic.engines.kubernetes.manifests import Asked
from hvd_elastic.engines.kubernetes.pods import Pods
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder


class Cluster:
    """In place of an API server and of the leader's end of what dials in."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.refusal: ApiError | None = None
        self.released: list[str] = []
        self.connected: list[str] = []
        self.dial_in = self

    @property
    def hosts(self) -> list[Any]:
        return [SimpleNamespace(host=SimpleNamespace(name=name)) for name in self.connected]

    def release_host(self, name: str, *, is_last: bool) -> None:
        self.released.append(name)

    def call(
        self, method: str, path: str, body: Any = None, patience_s: float = 0.0
    ) -> dict[str, Any]:
        if method == "GET":
            return {"items": [*self.pods.values()]}
        if method == "DELETE":
            del self.pods[path.removeprefix("pods/")]
            return {}
        if self.refusal is not None:
            raise self.refusal
        name = f"{body['metadata']['generateName']}{len(self.pods)}"
        self.pods[name] = {"metadata": {"name": name}, "status": {"phase": "Pending"}}
        return {}

    def come(self, name: str) -> None:
        self.pods[name]["status"] = {"phase": "Running"}
        self.connected.append(name)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def said() -> list[str]:
    return []


def pods_of(cluster: Cluster, said: list[str], start_limit_s: float = 1e9) -> Pods:
    pod = Asked("r1", "image:1").host_pod()
    return Pods(cluster, cluster, pod, start_limit_s, said.append)  # type: ignore[arg-type]


def growth_of(
    cluster: Cluster, said: list[str], least: int, most: int, policy: str, np: int | None = None
) -> Growth:
    limits = Limits(most, 1, 0.0, 120.0, least=least, most_pending=most)
    spec = RunSpec(("true",), "/", policy=policy, np=np)
    return Growth(pods_of(cluster, said), limits, spec, said.append)


def test_the_fewest_pods_are_asked_for_although_fewer_processes_are_wanted(cluster, said) -> None:
    """The run begins with the fewest, and would wait for the others without end."""
    growth = growth_of(cluster, said, 3, 8, "fixed", np=1)
    growth.look_at_grants(0.0)
    assert len(cluster.pods) == 3


@pytest.mark.parametrize(("policy", "asked"), [("fixed", 8), ("goodput", 2)])
def test_a_run_asks_for_all_pods_or_for_the_fewest_if_a_policy_decides(
    cluster, said, policy, asked
) -> None:
    growth_of(cluster, said, 2, 8, policy).look_at_grants(0.0)
    assert len(cluster.pods) == asked


def test_a_pod_that_is_taken_away_is_replaced_and_is_drained_before_it_ends(cluster, said) -> None:
    growth = growth_of(cluster, said, 1, 2, "fixed")
    growth.look_at_grants(0.0)
    first, second = cluster.pods
    cluster.come(first)
    cluster.come(second)
    growth.look_at_grants(2.0)
    cluster.pods[first]["metadata"]["deletionTimestamp"] = "now"
    growth.look_at_grants(4.0)
    assert len(cluster.pods) == 3
    assert cluster.released == []
    assert any("it is taken away" in line for line in said)


def test_a_policy_does_not_give_back_the_fewest_pods(cluster, said) -> None:
    growth = growth_of(cluster, said, 2, 8, "goodput")
    growth.look_at_grants(0.0)
    for name in [*cluster.pods]:
        cluster.come(name)
    growth.look_at_grants(2.0)
    growth.look_at_grants(1000.0)
    assert cluster.released == []


def test_a_refusal_is_not_repeated_every_two_seconds(cluster, said) -> None:
    pods = pods_of(cluster, said)
    cluster.refusal = ApiError("exceeded quota", 403)
    with pytest.raises(ApiError):
        pods.ask([], "")
    cluster.refusal = None
    with pytest.raises(Exception, match="exceeded quota"):
        pods.ask([], "")
    assert not cluster.pods


def test_a_pod_that_does_not_start_is_told_and_given_up(cluster, said) -> None:
    pods = pods_of(cluster, said, start_limit_s=0.0)
    pods.ask([], "")
    (name,) = cluster.pods
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    cluster.pods[name]["status"]["containerStatuses"] = [
        {"image": "image:1", "state": {"waiting": waiting}}
    ]
    assert pods.list() == []
    assert "its image image:1 cannot be pulled" in said[0]
    assert not cluster.pods
    with pytest.raises(Exception, match="is given up after"):
        pods.ask([], "")


def test_a_pod_that_a_queue_holds_back_is_not_given_up(cluster, said, monkeypatch) -> None:
    pods = pods_of(cluster, said, start_limit_s=10.0)
    pods.ask([], "")
    (name,) = cluster.pods
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    cluster.pods[name]["status"]["conditions"] = [condition]
    for now in (0.0, 1000.0):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        assert [grant.grant_id for grant in pods.list()] == [name]
    assert "a queue, such as Kueue's, holds it back" in said[0]
    del condition["reason"]
    monkeypatch.setattr(time, "monotonic", lambda: 1009.0)
    assert [grant.grant_id for grant in pods.list()] == [name]
    monkeypatch.setattr(time, "monotonic", lambda: 1011.0)
    assert pods.list() == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        ({"reason": "OOMKilled", "exitCode": 137}, "more memory than its limit"),
        ({"exitCode": 1, "message": "\nNo module named 'hvd_elastic'\n"}, "has no hvd_elastic"),
        (
            {"exitCode": 128, "message": 'exec: "python3": executable file not found in $PATH'},
            "has no python3 on its PATH",
        ),
        ({"exitCode": 3, "reason": "Error", "message": "first\nlast"}, "exit status 3 (last)"),
        ({"exitCode": 0}, ""),
    ],
)
def test_the_end_of_a_pod_is_put_in_words(status: dict[str, Any], words: str) -> None:
    container = {"image": "image:1", "state": {"terminated": status}}
    told = status if status.get("reason") == "Evicted" else {"containerStatuses": [container]}
    assert words in why_ended({"status": told})


def test_a_leader_that_is_faster_than_its_kubelet_waits_for_its_address(monkeypatch) -> None:
    owned = {"metadata": {"ownerReferences": [{"kind": "Job"}]}}
    answers = [{**owned, "status": status} for status in ({}, {"podIP": "10.0.0.1"})]
    api: Any = SimpleNamespace(call=lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert own_pod(api)["status"]["podIP"] == "10.0.0.1"


def test_a_server_that_is_away_is_called_again_and_a_refusal_ends_the_run(monkeypatch) -> None:
    answers: list[Any] = [ApiError("away"), ApiError("busy", 429), {"kind": "Pod"}]

    def answer(*_: object) -> Any:
        found = answers.pop(0)
        if isinstance(found, ApiError):
            raise found
        return found

    monkeypatch.setattr(Api, "_call_once", answer)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    api = Api.__new__(Api)
    assert api.call("GET", "pods/a", patience_s=60.0) == {"kind": "Pod"}
    for refusal, patience_s, status in (("", 0.0, 75), ("no", 60.0, 1)):
        answers[:] = [ApiError(refusal, 403 if refusal else 0)]
        with pytest.raises(ApiError) as end:
            api.call("GET", "pods/a", patience_s=patience_s)
        assert end.value.exit_status == status


@pytest.mark.parametrize(("status", "leaves"), [(503, True), (403, False)])
def test_hosts_stay_for_the_next_leader_if_the_server_is_away_when_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, leaves: bool
) -> None:
    calls: list[tuple[str, str]] = []
    patience: list[float] = []
    made: list[Any] = []

    def call(method: str, path: str, body: Any = None, patience_s: float = 0.0) -> dict[str, Any]:
        calls.append((method, path))
        if method == "GET":
            patience.append(patience_s)
            raise ApiError("no", status)
        return {}

    class Hosts(DialInHosts):
        is_closed = False

        def __init__(self, *words: Any, **again: Any) -> None:
            super().__init__(*words, **again)
            made.append(self)

        def close(self) -> None:
            self.is_closed = True
            super().close()

    monkeypatch.setattr(engine, "DialInHosts", Hosts)
    monkeypatch.setattr(engine, "PORT", 0)
    owner = {"kind": "Job", "name": "r1", "uid": "1"}
    own = {"metadata": {"ownerReferences": [owner]}, "status": {"podIP": "127.0.0.1"}}
    leading = kubernetes_engine(
        RunFolder.create("r1", {}, root=tmp_path),
        SimpleNamespace(call=call, namespace="ml"),  # type: ignore[arg-type]
        own,
        Asked("r1", "image:1").host_pod(),
        Limits(2, 1, 0.0, 120.0, least=1),
        RunSpec(("true",), "/"),
        60.0,
        lambda _: None,
    )
    with pytest.raises(ApiError), leading:
        pass
    (hosts,) = made
    assert hosts.is_closed is not leaves
    hosts.close()
    assert patience[0] > 0
    begun = [("DELETE", "secrets/r1"), ("POST", "secrets")]  # whatever an earlier leader has made
    assert calls[:2] == begun
    assert [path for method, path in calls[2:] if method == "DELETE"] == (
        [] if leaves else ["secrets/r1"]
    )
