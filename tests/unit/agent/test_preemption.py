"""Notices of a preemption: what commands print, and metadata services as the clouds have them."""

from __future__ import annotations

import asyncio
import email.utils
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hvd_elastic.agent.preemption import clouds
from hvd_elastic.agent.preemption.clouds import CLOUDS, CloudWatch, Notice, Service
from hvd_elastic.agent.preemption.notice import NOTICE_S, seconds_left
from tests.paths import LIMIT_S

NOW = 1_790_000_000.0  # 2026-09-21T14:13:20Z


@pytest.mark.parametrize(
    ("output", "seconds"),
    [
        ('{"action": "terminate", "time": "2026-09-21T14:15:20Z"}', 120.0),
        ('{"EventId": "A", "NotBefore": "2026-09-21T14:13:50+00:00"}', 30.0),
        ("2026-09-21T16:14:20+02:00\n", 60.0),
        ("2026-09-21T14:14:20", 60.0),
        ("2026-09-21T14:00:00Z", 0.0),
        ("45\n", 45.0),
        ("45.5 s", 45.5),
        ("TRUE", NOTICE_S),
        ("", NOTICE_S),
        ("2026-99-21T14:14:20Z", NOTICE_S),
    ],
)
def test_seconds_left(output: str, seconds: float) -> None:
    assert seconds_left(output, NOW) == seconds


class MetadataService(BaseHTTPRequestHandler):
    """The services of the three clouds, each with its own header.

    ``says`` holds the answers by path (without the query), which tests change; others are 404.
    """

    says: dict[str, str]
    token: str
    tokens: int
    answers: Any

    def do_PUT(self) -> None:
        """Give a token, as AWS does where session tokens are required (IMDSv2, the default)."""
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        assert self.path == "/latest/api/token"
        assert seconds.isdigit()
        assert 1 <= int(seconds) <= 21600
        type(self).tokens += 1
        self._answer(200, self.token)

    def do_GET(self) -> None:
        """Answer a question."""
        path = self.path.partition("?")[0]
        if self.answers is not None:
            type(self).answers(self)
        elif path.startswith("/latest/") and (
            self.headers.get("X-aws-ec2-metadata-token") != self.token
        ):
            self._answer(401, "401 - Unauthorized")
        elif path.startswith("/computeMetadata/") and (
            self.headers.get("Metadata-Flavor") != "Google"
        ):
            self._answer(403, "Missing Metadata-Flavor:Google header.")
        elif path.startswith("/metadata/") and (
            self.headers.get("Metadata") != "true" or "api-version=" not in self.path
        ):
            self._answer(400, '{"error": "Bad request"}')
        elif path in self.says:
            self._answer(200, self.says[path])
        else:
            self._answer(404, "404 - Not Found")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests clean."""


AWS, AWS_REBALANCE = (
    f"/latest/meta-data/{name}"
    for name in ("spot/instance-action", "events/recommendations/rebalance")
)
GCP, GCP_EVENT = (
    f"/computeMetadata/v1/instance/{name}" for name in ("preempted", "maintenance-event")
)
AZURE, AZURE_NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"
AT_REST = {
    "aws": {},
    "gcp": {GCP: "FALSE", GCP_EVENT: "NONE"},
    "azure": {AZURE: '{"DocumentIncarnation": 1, "Events": []}', AZURE_NAME: "node_3"},
}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address."""
    for name, value in {"says": {}, "token": "AQAE-x_8==", "tokens": 0, "answers": None}.items():
        monkeypatch.setattr(MetadataService, name, value, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), MetadataService) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clouds, "_POLL_S", 0.02)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for services that give no answer: a busy machine is late with a good one."""
    monkeypatch.setattr(clouds, "_LIMIT_S", 0.3)
    for cloud in CLOUDS.values():
        monkeypatch.setattr(cloud, "patience_s", 0.5)


class Watch:
    """A watch that runs while the test goes through its steps."""

    def __init__(self, cloud: str, address: str) -> None:
        self.notices: list[tuple[str, float]] = []
        self.troubles: list[str] = []
        variable = {
            "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
            "gcp": "GCE_METADATA_HOST",
            "azure": "AZURE_POD_IDENTITY_AUTHORITY_HOST",
        }[cloud]
        if cloud != "gcp":  # Google's libraries have a host and port there, the others a URL
            address = f"http://{address}"
        self.risks: list[str] = []
        told = (
            lambda *notice: self.notices.append(notice),
            self.troubles.append,
            self.risks.append,
        )
        self._watch = CloudWatch(cloud, {variable: address}, *told)
        self._looks, self._enough = 0, 0
        read_notice = self._watch._cloud.read_notice

        async def look(service: Service) -> Notice | None:
            found = await read_notice(service)
            self._looks += 1
            return found

        self._watch._cloud.read_notice = look  # type: ignore[method-assign]

    def goes_through(self, *steps: Callable[[], Any]) -> None:
        """Wait until each step returns something true, one after the other."""

        async def follow() -> None:
            watching = asyncio.ensure_future(self._watch.watch())
            for number, step in enumerate(steps):
                end = time.monotonic() + LIMIT_S
                while not step():
                    assert time.monotonic() < end, (number, self.notices, self.troubles)
                    await asyncio.sleep(0.01)
            watching.cancel()

        asyncio.run(follow())

    def looks_on(self) -> bool:
        """Let it look twice, as the first may have begun before; true."""
        self._enough = self._enough or self._looks + 2
        if self._looks < self._enough:
            return False
        self._enough = 0
        return True


def says(answers: dict[str, str]) -> Callable[[], bool]:
    """Return a step after which the service says something else."""

    def change() -> bool:
        MetadataService.says = answers
        return True

    return change


def at(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def mail_date(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


def azure_event(kind: str, resource: str, not_before: str) -> dict[str, str]:
    event = {"EventId": "A", "EventType": kind, "Resources": [resource], "NotBefore": not_before}
    return {**AT_REST["azure"], AZURE: json.dumps({"Events": [event]})}


@pytest.mark.parametrize(
    ("cloud", "answers", "cause", "left_s"),
    [
        ("aws", lambda: {AWS: json.dumps({"action": "terminate", "time": at(120)})}, "AWS", 120),
        ("aws", lambda: {AWS: json.dumps({"action": "hibernate", "time": at(90)})}, "AWS", 90),
        ("gcp", lambda: {**AT_REST["gcp"], GCP: "TRUE"}, "Google preempts it", 30),
        (
            "gcp",
            lambda: {**AT_REST["gcp"], GCP_EVENT: "TERMINATE_ON_HOST_MAINTENANCE"},
            "maintenance",
            60,
        ),
        ("azure", lambda: azure_event("Preempt", "Node_3", mail_date(40)), "Azure evicts it", 40),
        ("azure", lambda: azure_event("Terminate", "node_3", ""), "Azure deletes it", 30),
    ],
)
def test_a_notice_is_told_once_with_the_time_that_is_left(
    cloud: str, answers: Callable[[], dict[str, str]], cause: str, left_s: float, service: str
) -> None:
    MetadataService.says = AT_REST[cloud]
    watch = Watch(cloud, service)
    watch.goes_through(
        watch.looks_on,
        lambda: not watch.notices,
        says(answers()),
        lambda: watch.notices,
        watch.looks_on,
    )
    ((said, left),) = watch.notices
    assert cause in said
    assert left_s - 25 < left <= left_s
    assert not watch.troubles


def test_a_notice_that_was_taken_back_may_come_again(service: str) -> None:
    watch = Watch("gcp", service)
    MetadataService.says = {**AT_REST["gcp"], GCP: "TRUE"}
    watch.goes_through(
        lambda: len(watch.notices) == 1,
        says(AT_REST["gcp"]),
        watch.looks_on,
        says({**AT_REST["gcp"], GCP: "TRUE"}),
        lambda: len(watch.notices) == 2,
    )


@pytest.mark.parametrize(
    "answers",
    [
        azure_event("Preempt", "node_4", "Mon, 19 Sep 2026 18:29:47 GMT"),
        azure_event("Freeze", "node_3", "Mon, 19 Sep 2026 18:29:47 GMT"),
    ],
)
def test_events_of_other_machines_and_short_freezes_are_none_of_ours(
    answers: dict[str, str], service: str
) -> None:
    MetadataService.says = answers
    watch = Watch("azure", service)
    watch.goes_through(watch.looks_on)
    assert watch.notices == []


def test_aws_gives_a_new_token_when_the_old_one_has_expired(service: str) -> None:
    watch = Watch("aws", service)

    def expires() -> bool:
        MetadataService.token = "another"
        return True

    watch.goes_through(watch.looks_on, expires, watch.looks_on)
    assert MetadataService.tokens == 2
    assert not watch.troubles


def test_a_rebalance_recommendation_is_a_warning(service: str) -> None:
    MetadataService.says = {AWS_REBALANCE: '{"noticeTime": "2026-10-27T08:22:00Z"}'}
    watch = Watch("aws", service)
    watch.goes_through(lambda: watch.risks, watch.looks_on)
    (said,) = watch.risks
    assert "2026-10-27T08:22:00Z" in said
    assert "hvd-elastic drain" in said
    assert not watch.notices


def _silent(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(1.0)


def _rubbish(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"\x00\xff" * 300)


def _page(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n<html>Please log in</html>")


def _broken(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("answers", [_silent, _rubbish, _page, _broken])
def test_a_service_that_gives_no_proper_answer_is_told_once_and_asked_on(
    cloud: str, answers: Any, service: str
) -> None:
    MetadataService.answers = answers
    watch = Watch(cloud, service)

    def recovers() -> bool:
        MetadataService.answers = None
        MetadataService.says = {
            "aws": {AWS: json.dumps({"action": "stop", "time": at(60)})},
            "gcp": {**AT_REST["gcp"], GCP: "TRUE"},
            "azure": azure_event("Reboot", "node_3", ""),
        }[cloud]
        return True

    watch.goes_through(lambda: watch.troubles, recovers, lambda: watch.notices)
    (said,) = watch.troubles
    assert said.startswith(f"--preemption {cloud} would see no notice")
    assert service in said


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("cloud", CLOUDS)
def test_no_service_at_all_is_told(cloud: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        watch = Watch(cloud, f"127.0.0.1:{taken.getsockname()[1]}")
        watch.goes_through(lambda: watch.troubles)
    assert "would see no notice" in watch.troubles[0]


def test_an_address_that_is_none_is_told_with_its_variable() -> None:
    watch = Watch("azure", "host:port")
    watch.goes_through(lambda: watch.troubles)
    assert "AZURE_POD_IDENTITY_AUTHORITY_HOST" in watch.troubles[0]
