"""A cloud on this machine: EC2's interface by moto, and virtual hosts as its instances.

moto starts no machines, and lacks what clouds do when they are busy. So this stands before it:
tokens of requests are honoured, capacity, quota and prices are set by the test, new instances take
a while to be listed, instances shut down, and spot instances are interrupted.
"""

from __future__ import annotations

import base64
import io
import json
import math
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from xml.sax.saxutils import escape

from typing_extensions import Self

from benchmarks.testbed.bodies import Bodies
from hvd_elastic.errors import VirtualClusterError

_SETTINGS = (
    *("capacity", "unsupported", "quota", "throttle", "credentials", "regions_off", "clock_off_s"),
    *("hidden_s", "shutdown_s", "prices", "spot_price", "before_answer", "calls"),
)
ACCOUNT = "123456789012"
REGION = "us-east-1"
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
_LOOK_S = 0.1
_DATE = "%Y%m%dT%H%M%SZ"
_SKEW_S = 900.0
"""How far the clock of a caller may be off [s]."""

_BY_USER = "Client.UserInitiatedShutdown: User initiated shutdown"
_Answer = tuple[str, list[tuple[str, str]], bytes]
"""Status, headers and body."""
Pool = tuple[str, str, bool]
"""Type, zone and whether it is spot."""


@dataclass
class Instance:
    """An instance with its body, and what it costs.

    Attributes:
        model: moto's object for it.
        host: virtual host that is its body.
        began, ended: when it was started, and ended for its owner [s]; None: it runs.
        why: why it has ended.
        is_gone: whether its body is gone as well, and the host is free.
    """

    model: Any
    host: str
    pool: Pool
    began: float
    ended: float | None = None
    why: str = ""
    is_gone: bool = False
    booted: threading.Event = field(default_factory=threading.Event)

    @property
    def id(self) -> str:
        return str(self.model.id)

    @property
    def tags(self) -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in self.model.get_tags()}

    @property
    def hours(self) -> float:
        """How long it has cost money [h]."""
        return ((self.ended or time.time()) - self.began) / 3600


class RefusalError(Exception):
    """An error of EC2."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Cloud:
    """The front and its settings, which a test may change at any time.

    Attributes:
        capacity: instances that a pool has; a pool that is not in it has all hosts.
        unsupported: types that a zone does not have, as (type, zone).
        quota: most instances of the account on demand and spot, as (False, N) and (True, N).
        throttle: number of calls that are refused next.
        credentials: ``valid``, ``expired`` or ``unknown``.
        regions_off: regions that are not enabled for the account.
        clock_off_s: how far the cloud's clock is ahead of the machine's [s].
        hidden_s: how long new instances are not listed [s].
        shutdown_s: how long an instance is shutting down [s].
        prices: on-demand price by type [USD per hour].
        spot_price: returns the spot price of a type in a zone.
        before_answer: called with the action of each call before it is answered; the answer is
            lost if it raises ``ConnectionResetError``.
        calls: action and time of each call.
    """

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self.instances: list[Instance] = []
        self.capacity: dict[Pool, int] = {}
        self.unsupported: set[tuple[str, str]] = set()
        self.quota: dict[bool, int] = {}
        self.throttle = 0
        self.credentials = "valid"
        self.regions_off: set[str] = set()
        self.clock_off_s = 0.0
        self.hidden_s = 1.0
        self.shutdown_s = 0.5
        self.prices: dict[str, float] = {
            "g5.xlarge": 1.006,
            "g5.12xlarge": 5.672,
            "m5.large": 0.096,
        }
        self.spot_price: Callable[[str, str], float] = lambda type_, _: self.prices[type_] / 3
        self.before_answer: Callable[[str], None] = lambda _: None
        self.calls: list[tuple[str, float]] = []
        self._answers: dict[str, tuple[str, _Answer]] = {}
        """Answer to each request to start instances, with what was asked, by its token."""
        self._lock = threading.RLock()
        self._events: list[tuple[float, Callable[[], None]]] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._boots = threading.Lock()
        """Held while a host boots or is switched off: virtclust does one at a time anyway."""

    # -- life cycle ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        from moto.ec2 import ec2_backends
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        self._moto = DomainDispatcherApplication(create_backend_app)
        self.backend = ec2_backends[ACCOUNT][REGION]
        self.backend.reset()
        for name in ("describe_instances", "get_reservations_by_instance_ids"):
            setattr(self.backend, name, self._without_hidden(getattr(self.backend, name)))

        class QuietHandler(MotoRequestHandler):
            def log_request(self, *_: object) -> None:
                pass

        self._server = make_server(
            "127.0.0.1", 0, self, threaded=True, request_handler=QuietHandler
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        for target in (self._server.serve_forever, self._watch):
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        self._end_everything()
        self.backend.reset()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which boto3 finds this cloud, and credentials that it accepts."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    # -- for tests -------------------------------------------------------------------------

    def live(self, **tags: str) -> list[Instance]:
        """Return the instances that cost money, with these tags."""
        with self._lock:
            return [
                each
                for each in self.instances
                if each.ended is None and tags.items() <= each.tags.items()
            ]

    def ending(self) -> list[Instance]:
        """Return the instances that shut down: they cost nothing, but their hosts still run."""
        with self._lock:
            return [each for each in self.instances if each.ended is not None and not each.is_gone]

    def add_key(self, name: str, public_key: str) -> None:
        """Import a key pair."""
        self.backend.import_key_pair(name, public_key.encode(), {})

    def reset(self) -> None:
        """End all instances, and return to the settings of the beginning."""
        self._end_everything()
        fresh = Cloud(self.bodies)
        for name in _SETTINGS:
            setattr(self, name, getattr(fresh, name))

    def start_bystander(
        self, type_: str = "m5.large", zone: str = ZONES[0], **tags: str
    ) -> Instance:
        """Start an instance that belongs to somebody else."""
        model = self.backend.run_instances(
            "ami-1",
            1,
            None,
            [],
            instance_type=type_,
            is_instance_type_default=False,
            placement=zone,
            region_name=REGION,
            tags={"instance": {"Name": "somebody's", **tags}},
        ).instances[0]
        with self._lock:
            instance = self._adopt(model, (type_, zone, False))
            instance.began -= self.hidden_s  # it is there for a while, so lists have it
        self._boot(instance, "", "")
        return instance

    def end_by_hand(self, instance: Instance) -> None:
        """End an instance as somebody does in the cloud's console."""
        self._end(instance, _BY_USER)

    def recommend_rebalance(self, instance: Instance) -> None:
        """Tell an instance that it may be interrupted soon."""
        text = json.dumps({"noticeTime": _iso(0.0)})
        self.bodies.put_metadata(instance.host, "events/recommendations/rebalance", text)

    def interrupt(self, instance: Instance, notice_s: float = 120.0) -> None:
        """Interrupt a spot instance after a notice."""
        assert instance.pool[2], f"{instance.id} is on demand"
        text = json.dumps({"action": "terminate", "time": _iso(notice_s)})
        self.bodies.put_metadata(instance.host, "spot/instance-action", text)
        why = "Server.SpotInstanceTermination: Spot instance termination"
        with self._lock:
            self._events.append((time.time() + notice_s, lambda: self._end(instance, why)))

    # -- WSGI ------------------------------------------------------------------------------

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        params = dict(urllib.parse.parse_qsl(body.decode())) if not target else json.loads(body)
        action = target.rpartition(".")[2] or params.get("Action", "")
        try:
            self._check_call(environ, action)
            if action == "RunInstances" and params.get("DryRun") != "true":
                answer = self._run(environ, params)
            elif action == "TerminateInstances":
                answer = self._terminate(environ, body, params)
            elif action == "DescribeSpotPriceHistory":
                answer = _answered(self._price_history(params))
            elif action == "GetProducts":
                answer = _answered(self._products(params), "application/x-amz-json-1.1")
            else:
                answer = self._forward(environ, body)
        except RefusalError as error:
            text = (
                f"<Response><Errors><Error><Code>{error.code}</Code><Message>{escape(str(error))}"
                "</Message></Error></Errors><RequestID>1</RequestID></Response>"
            )
            if target:
                text = json.dumps({"__type": error.code, "message": str(error)})
            answer = (f"{error.status} refused", [("Content-Type", "text/xml")], text.encode())
        try:
            self.before_answer(action)
        except ConnectionResetError:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)  # else the caller waits for it
            raise
        status, headers, content = answer
        start_response(status, [*headers, ("Content-Length", str(len(content)))])
        return [content]

    def _check_call(self, environ: Mapping[str, Any], action: str) -> None:
        self.calls.append((action, time.monotonic()))
        if self.credentials == "expired":
            raise RefusalError(400, "RequestExpired", "Request has expired.")
        scope = environ.get("HTTP_AUTHORIZATION", "").split("/")
        region = scope[2] if len(scope) > 2 else ""
        if self.credentials == "unknown" or region in self.regions_off:
            told = "AWS was not able to validate the provided access credentials"
            raise RefusalError(401, "AuthFailure", told)
        sent = datetime.strptime(environ["HTTP_X_AMZ_DATE"], _DATE).replace(tzinfo=timezone.utc)
        if abs(time.time() + self.clock_off_s - sent.timestamp()) > _SKEW_S:
            raise RefusalError(400, "RequestExpired", "Request has expired.")
        with self._lock:
            if self.throttle > 0:
                self.throttle -= 1
                raise RefusalError(503, "RequestLimitExceeded", "Request limit exceeded.")

    def _forward(self, environ: Mapping[str, Any], body: bytes) -> _Answer:
        """Have moto answer a call."""
        told: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], *_: object) -> None:
            told[:] = [status, [each for each in headers if each[0].lower() != "content-length"]]

        given = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        content = b"".join(self._moto(given, start_response))
        return told[0], told[1], content

    # -- instances -------------------------------------------------------------------------

    def _run(self, environ: Mapping[str, Any], params: dict[str, str]) -> _Answer:
        type_, token = params["InstanceType"], params.get("ClientToken", "")
        self._public_key(params.get("KeyName"))
        spot = params.get("InstanceMarketOptions.MarketType") == "spot"
        least, most = int(params["MinCount"]), int(params["MaxCount"])
        asked = json.dumps(params, sort_keys=True)
        with self._lock:
            if token in self._answers:
                before, answer = self._answers[token]
                if before != asked:
                    told = f"Arguments on this idempotent request are inconsistent with {token}"
                    raise RefusalError(400, "IdempotentParameterMismatch", told)
                return answer
            zone = params.get("Placement.AvailabilityZone") or max(
                ZONES, key=lambda each: self._left((type_, each, spot))
            )
            number = self._number((type_, zone, spot), least, most)
            body = urllib.parse.urlencode(
                {
                    **params,
                    "MinCount": number,
                    "MaxCount": number,
                    "Placement.AvailabilityZone": zone,
                }
            ).encode()
            known = {id(each.model) for each in self.instances}
            status, headers, content = self._forward(environ, body)
            new = []
            for reservation in self.backend.reservations.values():
                for model in reservation.instances:
                    if id(model) not in known:
                        old = model.nics[0].private_ip_address
                        instance = self._adopt(model, (type_, zone, spot))
                        address = self.bodies.cluster.address(instance.host)
                        content = content.replace(f">{old}<".encode(), f">{address}<".encode())
                        new.append(instance)
            content = content.replace(b"<name>running</name>", b"<name>pending</name>")
            answer = (status, headers, content)
            if token and new:
                self._answers[token] = (asked, answer)
        user_data = base64.b64decode(params.get("UserData", "")).decode()
        for instance in new:
            given = (instance, user_data, self._public_key(params.get("KeyName")))
            threading.Thread(target=self._boot, args=given, daemon=True).start()
        return answer

    def _terminate(
        self, environ: Mapping[str, Any], body: bytes, params: Mapping[str, str]
    ) -> _Answer:
        ids = [text for name, text in params.items() if name.startswith("InstanceId.")]
        with self._lock:
            answer = self._forward(environ, body)
            if answer[0].startswith("200"):
                for instance in [each for each in self.instances if each.id in ids]:
                    self._end(instance, _BY_USER)
                    if not instance.is_gone:  # moto says terminated at once
                        _set_state(instance.model, "shutting-down", 32)
        return answer

    def _public_key(self, name: str | None) -> str:
        if name is None:
            return ""
        if name not in self.backend.key_pairs:
            raise RefusalError(
                400, "InvalidKeyPair.NotFound", f"The key pair '{name}' does not exist"
            )
        text = self.backend.key_pairs[name].material_public
        return text.decode() if isinstance(text, bytes) else str(text)

    def _left(self, pool: Pool) -> int:
        """Return how many more instances a pool has."""
        used = sum(each.pool == pool for each in self.live())
        free = len(self.bodies.cluster.hosts) - len(self._hosts_in_use())
        return min(self.capacity.get(pool, free + used) - used, free)

    def _number(self, pool: Pool, least: int, most: int) -> int:
        """Return how many instances a request gets."""
        type_, zone, spot = pool
        if type_ not in self.prices:
            told = f"Invalid value '{type_}' for InstanceType."
            raise RefusalError(400, "InvalidParameterValue", told)
        if (type_, zone) in self.unsupported:
            raise RefusalError(
                400,
                "Unsupported",
                f"Your requested instance type ({type_}) is not supported in your requested "
                f"Availability Zone ({zone}).",
            )
        allowed = self.quota.get(spot, most) - sum(each.pool[2] == spot for each in self.live())
        if spot in self.quota and allowed < least:
            code = "MaxSpotInstanceCountExceeded" if spot else "VcpuLimitExceeded"
            told = (
                f"You have requested more vCPU capacity than your current limit of {allowed} allows"
            )
            raise RefusalError(400, code, told)
        number = min(most, self._left(pool), allowed if spot in self.quota else most)
        if number < least:
            raise RefusalError(
                500,
                "InsufficientInstanceCapacity",
                f"We currently do not have sufficient {type_} capacity in the Availability Zone "
                f"you requested ({zone}).",
            )
        return number

    def _hosts_in_use(self) -> set[str]:
        return {each.host for each in self.instances if not each.is_gone}

    def _adopt(self, model: Any, pool: Pool) -> Instance:
        """Give an instance of moto a host as its body; the caller holds the lock."""
        taken = self._hosts_in_use()
        host = next(host for host in self.bodies.cluster.hosts if host not in taken)
        instance = Instance(model, host, pool, time.time())
        self.instances.append(instance)
        for nic in model.nics.values():
            nic.private_ip_address = self.bodies.cluster.address(host)
            nic.public_ip = nic.private_ip_address
        _set_state(model, "pending", 0)
        return instance

    def _boot(self, instance: Instance, user_data: str, key: str) -> None:
        metadata = {"instance-id": instance.id, "placement/availability-zone": instance.pool[1]}
        with self._boots:
            if instance.ended is None:
                self.bodies.boot(instance.host, user_data, [key], metadata)
        with self._lock:
            instance.booted.set()
            if instance.ended is None:
                _set_state(instance.model, "running", 16)

    def _end(self, instance: Instance, why: str) -> None:
        """End an instance: it is shutting down for a while, and its body dies."""
        with self._lock:
            if instance.ended is not None:
                return
            instance.ended, instance.why = time.time(), why
            _set_state(instance.model, "shutting-down", 32)
            code, _, _ = why.partition(":")
            instance.model.state_reason.code, instance.model.state_reason.message = code, why
            self._events.append((time.time() + self.shutdown_s, lambda: self._finish(instance)))

    def _end_everything(self) -> None:
        for instance in self.instances:
            self._end(instance, "the test is over")
        while self._events:
            self._do_due(math.inf)

    def _finish(self, instance: Instance) -> None:
        try:
            with self._boots:
                self.bodies.end(instance.host)
        except VirtualClusterError:  # a busy machine takes long to end processes: once more
            with self._lock:
                self._events.append((time.time(), lambda: self._finish(instance)))
            return
        with self._lock:
            instance.is_gone = True
            _set_state(instance.model, "terminated", 48)

    def _watch(self) -> None:
        """End bodies and instances when it is time, also those that have shut themselves down."""
        while not self._over.wait(_LOOK_S):
            self._do_due(time.time())
            for instance in self.live():
                if instance.booted.is_set() and not self.bodies.is_on(instance.host):
                    self._end(
                        instance, "Client.InstanceInitiatedShutdown: Instance initiated shutdown"
                    )

    def _do_due(self, now: float) -> None:
        with self._lock:
            due = [act for at, act in self._events if at <= now]
            self._events = [event for event in self._events if event[0] > now]
        for act in due:
            act()

    def _without_hidden(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of moto that lists reservations, without instances that are too new."""

        def listed(*args: Any, **options: Any) -> list[Any]:
            newest = time.time() - self.hidden_s
            hidden = {each.id for each in self.instances if each.began > newest}
            found = function(*args, **options)
            for reservation in found:
                reservation.instances = [
                    each for each in reservation.instances if each.id not in hidden
                ]
            return [reservation for reservation in found if reservation.instances]

        return listed

    # -- prices ----------------------------------------------------------------------------

    def price(self, pool: Pool) -> float:
        """Return the present price of a pool [USD per hour]."""
        type_, zone, spot = pool
        return self.spot_price(type_, zone) if spot else self.prices[type_]

    def _price_history(self, params: Mapping[str, str]) -> str:
        types = [text for name, text in params.items() if name.startswith("InstanceType.")]
        zone = params.get("AvailabilityZone")
        for number in range(1, 9):
            if params.get(f"Filter.{number}.Name") == "availability-zone":
                zone = params.get(f"Filter.{number}.Value.1")
        items = "".join(
            f"<item><instanceType>{type_}</instanceType><availabilityZone>{each}</availabilityZone>"
            "<productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{self.spot_price(type_, each):.6f}</spotPrice>"
            f"<timestamp>{_iso(0.0)}</timestamp></item>"
            for type_ in types
            for each in ZONES
            if type_ in self.prices
            and zone in (None, each)
            and (type_, each) not in self.unsupported
        )
        return (
            '<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
            f"<requestId>1</requestId><spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken/>"
            "</DescribeSpotPriceHistoryResponse>"
        )

    def _products(self, asked: Mapping[str, Any]) -> str:
        wanted = {each["Field"]: each["Value"] for each in asked.get("Filters", [])}
        products = [
            json.dumps(
                {
                    "product": {"attributes": {"instanceType": type_, "regionCode": REGION}},
                    "terms": {
                        "OnDemand": {
                            "A.B": {
                                "priceDimensions": {
                                    "A.B.C": {
                                        "unit": "Hrs",
                                        "pricePerUnit": {"USD": f"{price:.10f}"},
                                    }
                                }
                            }
                        }
                    },
                }
            )
            for type_, price in self.prices.items()
            if wanted.get("instanceType", type_) == type_
        ]
        return json.dumps({"FormatVersion": "aws_v1", "PriceList": products})


def _set_state(model: Any, name: str, code: int) -> None:
    model._state.name, model._state.code = name, code


def _answered(text: str, kind: str = "text/xml") -> _Answer:
    return "200 OK", [("Content-Type", kind)], text.encode()


def _iso(in_s: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
