"""Asks the metadata service of a cloud whether this machine will be preempted.

A further cloud is a class as :class:`Cloud` describes it, and an entry of :data:`CLOUDS`.
"""

from __future__ import annotations

import asyncio
import email.utils
import http.client
import io
import time
from collections.abc import Callable, Mapping
from datetime import timezone
from typing import Any, ClassVar, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from hvd_elastic.agent.preemption.notice import NOTICE_S, seconds_left
from hvd_elastic.formatting import duration_words
from hvd_elastic.json_text import parse_json

_POLL_S = 1.0
"""Time between two looks, as Azure recommends: its shortest notice is 30 s, and so is Google's."""
_LIMIT_S = 5.0
"""Time limit of a request."""
_MAX_BYTES = 1 << 20
_LINK_LOCAL = "http://169.254.169.254"
"""Where all three clouds have the service, reachable from the machine itself only."""


class Notice(NamedTuple):
    """A cloud's notice about this machine.

    Attributes:
        leave_in_s: time until then [s].
    """

    cause: str
    leave_in_s: float


class ServiceError(Exception):
    """The service cannot be reached, or its answer is not what its documentation says."""


class Service:
    """A metadata service, which is asked without a proxy.

    Args:
        address: URL, or host and port.

    Raises:
        ServiceError: the address is none.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        try:
            port = parts.port or 80
        except ValueError as error:
            raise ServiceError(f"{address!r} is no address: {error}") from None
        if parts.scheme != "http" or not parts.hostname:
            raise ServiceError(f"{address!r} is no address: give http://HOST:PORT, or HOST:PORT")
        self.address = f"http://{parts.netloc}"
        self._host, self._port, self._name = parts.hostname, port, parts.netloc

    async def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        """Return status and body of the answer.

        Args:
            path: path and query.
            method: of HTTP.
            headers: with ``_`` in place of ``-``.

        Raises:
            ServiceError: there is none, or it is no HTTP.
        """
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._name}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if method == "PUT":
            lines.append("Content-Length: 0")
        try:
            data = await asyncio.wait_for(
                self._exchange("\r\n".join([*lines, "", ""]).encode()), _LIMIT_S
            )
            response = http.client.HTTPResponse(cast("Any", _Received(data)), method=method)
            response.begin()
            return response.status, response.read().decode(errors="replace").strip()
        except asyncio.TimeoutError:
            raise ServiceError(f"{self.address} does not answer within {_LIMIT_S:g} s") from None
        except OSError as error:
            raise ServiceError(f"{self.address}: {error.strerror or error}") from None
        except (http.client.HTTPException, ValueError) as error:
            text = f"{self.address} answers {path} with what is no HTTP: {error!r}"
            raise ServiceError(text) from None

    async def _exchange(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(request)
            data = b""
            while (piece := await reader.read(_MAX_BYTES)) and len(data) < _MAX_BYTES:
                data += piece
            return data
        finally:
            writer.close()


class _Received:
    """Bytes that :class:`http.client.HTTPResponse` reads in place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: str) -> io.BytesIO:
        return io.BytesIO(self._data)


class Cloud(Protocol):
    """A cloud's way to announce that it preempts a machine.

    Attributes:
        variable: variable with the service's address, which the cloud's own libraries read.
        patience_s: time without a proper answer after which the user is told [s].
    """

    variable: ClassVar[str]
    patience_s: ClassVar[float]

    async def read_notice(self, service: Service) -> Notice | None:
        """Return the notice for this machine, None: there is none.

        Raises:
            ServiceError: the service cannot be reached or understood.
        """

    def warning(self) -> str:
        """Return what the last look found that is no notice yet; empty: nothing."""


class Aws:
    """Spot instances of AWS, by version 2 of the service, with a session token.

    Source: Amazon EC2 User Guide, "Spot Instance interruption notices" and "EC2 instance rebalance
    recommendations".
    """

    variable: ClassVar[str] = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
    patience_s: ClassVar[float] = 15.0

    def __init__(self) -> None:
        self._token = ""
        self._recommended = ""

    async def read_notice(self, service: Service) -> Notice | None:
        """See :class:`Cloud`."""
        text = await self._get(service, "spot/instance-action")
        if text:
            action = _parse(service, text).get("action", "stop")
            return Notice(f"AWS will {action} it", seconds_left(text, time.time()))
        text = await self._get(service, "events/recommendations/rebalance")
        self._recommended = str(_parse(service, text).get("noticeTime", "")) if text else ""
        return None

    def warning(self) -> str:
        """See :class:`Cloud`."""
        if not self._recommended:
            return ""
        return (
            f"AWS may take this host away soon (rebalance recommendation of {self._recommended}); "
            "`hvd-elastic drain RUN HOST` leaves it now"
        )

    async def _get(self, service: Service, path: str) -> str:
        """Return what the service says; empty: it has nothing of that kind."""
        status = 0
        for _ in range(2):  # the token may have expired
            if not self._token:
                lifetime = {"X_aws_ec2_metadata_token_ttl_seconds": "21600"}
                status, text = await service.ask("/latest/api/token", "PUT", **lifetime)
                if status != http.client.OK or not text.isprintable():
                    raise ServiceError(f"{service.address} gives no token (HTTP status {status})")
                self._token = text
            token = {"X_aws_ec2_metadata_token": self._token}
            status, text = await service.ask(f"/latest/meta-data/{path}", **token)
            if status == http.client.OK:
                return text
            if status == http.client.NOT_FOUND:
                return ""
            self._token = ""
        raise ServiceError(f"{service.address} answers {path} with HTTP status {status}")


class Gcp:
    """Spot and preemptible machines of Google, and machines that end for a host's maintenance.

    Source: Compute Engine documentation, "Preemptible VM instances" and "Monitor and plan for a
    host maintenance event".
    """

    variable: ClassVar[str] = "GCE_METADATA_HOST"
    patience_s: ClassVar[float] = 15.0
    _MAINTENANCE_S = 60.0
    """Shortest time between the maintenance event and the end of the machine."""

    async def read_notice(self, service: Service) -> Notice | None:
        """See :class:`Cloud`."""
        if await self._get(service, "preempted") == "TRUE":
            return Notice("Google preempts it", NOTICE_S)
        if await self._get(service, "maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice("Google ends it for maintenance of its host", self._MAINTENANCE_S)
        return None

    def warning(self) -> str:
        """See :class:`Cloud`."""
        return ""

    async def _get(self, service: Service, name: str) -> str:
        path = f"/computeMetadata/v1/instance/{name}"
        status, text = await service.ask(path, Metadata_Flavor="Google")
        if status != http.client.OK or not text.replace("_", "").isalpha():
            shown = f"{text[:40]!r} (HTTP status {status})"
            raise ServiceError(f"{service.address} answers {name} with {shown}")
        return text


class Azure:
    """Scheduled events of Azure that end or restart the machine, or evict it.

    Source: Azure documentation, "Scheduled Events for Linux VMs".
    """

    variable: ClassVar[str] = "AZURE_POD_IDENTITY_AUTHORITY_HOST"
    # The first request switches the service on, which takes up to two minutes.
    patience_s: ClassVar[float] = 150.0
    _TAKEN_BY: ClassVar = {
        "Preempt": "Azure evicts it",
        "Terminate": "Azure deletes it",
        "Reboot": "Azure restarts it",
        "Redeploy": "Azure moves it to another machine, which restarts it",
    }

    def __init__(self) -> None:
        self._name = ""

    async def read_notice(self, service: Service) -> Notice | None:
        """See :class:`Cloud`."""
        if not self._name:
            path = "instance/compute/name?api-version=2021-02-01&format=text"
            name = await self._get(service, path)
            if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                raise ServiceError(f"{service.address} names this machine {name[:40]!r}")
            self._name = name
        text = await self._get(service, "scheduledevents?api-version=2020-07-01")
        events = _parse(service, text).get("Events", [])
        try:
            for event in events:
                # Those of the other machines of the same group are listed as well.
                names = [name.lower() for name in event["Resources"]]
                if event["EventType"] in self._TAKEN_BY and self._name.lower() in names:
                    return Notice(self._TAKEN_BY[event["EventType"]], _until(event["NotBefore"]))
        except (AttributeError, KeyError, TypeError):
            raise ServiceError(f"{service.address} lists events as {text[:200]!r}") from None
        return None

    def warning(self) -> str:
        """See :class:`Cloud`."""
        return ""

    async def _get(self, service: Service, path: str) -> str:
        status, text = await service.ask(f"/metadata/{path}", Metadata="true")
        if status != http.client.OK:
            raise ServiceError(f"{service.address} answers {path} with HTTP status {status}")
        return text


CLOUDS: Mapping[str, Callable[[], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
"""Clouds by the name that ``--preemption`` takes."""


class CloudWatch:
    """Asks the metadata service every second.

    Args:
        cloud: name of the cloud in :data:`CLOUDS`.
        environment: variables, of which one may hold the address of the service.
        on_notice: called with the cause and the seconds left when a notice arrives.
        on_trouble: called with the reason if the service has not answered for a while.
        on_risk: called with what is no notice yet.
    """

    def __init__(
        self,
        cloud: str,
        environment: Mapping[str, str],
        on_notice: Callable[[str, float], None],
        on_trouble: Callable[[str], None],
        on_risk: Callable[[str], None],
    ) -> None:
        self._on_risk = on_risk
        self._cloud = CLOUDS[cloud]()
        self._name = cloud
        self._address = environment.get(self._cloud.variable) or _LINK_LOCAL
        self._on_notice = on_notice
        self._on_trouble = on_trouble

    async def watch(self) -> None:
        """Look until cancelled, or return if the address of the service is wrong."""
        try:
            service = Service(self._address)
        except ServiceError as error:
            self._on_trouble(f"--preemption {self._name}: {self._cloud.variable}: {error}")
            return
        told_cause, told_warning, is_told = "", "", False
        answered = time.monotonic()
        while True:
            try:
                notice = await self._cloud.read_notice(service)
            except ServiceError as error:
                silent_s = time.monotonic() - answered
                if silent_s > self._cloud.patience_s and not is_told:
                    is_told = True
                    self._on_trouble(
                        f"--preemption {self._name} would see no notice, for "
                        f"{duration_words(silent_s)} now: {error}"
                    )
            else:
                answered, is_told = time.monotonic(), False
                cause = notice.cause if notice else ""
                if notice and cause != told_cause:
                    self._on_notice(*notice)
                warning = self._cloud.warning()
                if warning and warning != told_warning:
                    self._on_risk(warning)
                told_cause, told_warning = cause, warning
            await asyncio.sleep(_POLL_S)


def _parse(service: Service, text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServiceError(f"{service.address} answers with what is no JSON object: {text[:40]!r}")
    return found


def _until(text: str) -> float:
    """Return the seconds until a time as in e-mails; :data:`NOTICE_S` if there is none."""
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return NOTICE_S
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return max(0.0, when.timestamp() - time.time())
