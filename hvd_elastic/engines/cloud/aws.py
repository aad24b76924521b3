"""Amazon EC2 as a provider, through boto3.

Credentials, region and endpoint come from where boto3 finds them (environment, ``~/.aws``, the role
of this machine). An order is one ``RunInstances`` with a client token, so that a repeated call
starts nothing twice. Spot machines are one-time requests, which the cloud never starts again.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from hvd_elastic.engines.cloud.provider import (
    TAG_PREFIX,
    CapacityError,
    CloudError,
    CredentialsError,
    Machine,
    Offer,
    Order,
    QuotaError,
    State,
    ThrottledError,
    UnsupportedError,
)
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import one_line

_IMAGE = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
)
"""Public parameter with the newest image for GPUs, used without ``--image``."""
_STATES: Mapping[str, State] = {
    "pending": "starting",
    "running": "running",
    "shutting-down": "stopping",
    "stopping": "stopping",
    "stopped": "stopping",  # its disk still costs money, until it is terminated
    "terminated": "ended",
}
_CODES: Mapping[type[CloudError], str] = {
    CapacityError: "InsufficientInstanceCapacity InsufficientHostCapacity SpotMaxPriceTooLow "
    "InsufficientCapacity InsufficientReservedInstanceCapacity InsufficientFreeAddressesInSubnet",
    QuotaError: "InstanceLimitExceeded VcpuLimitExceeded MaxSpotInstanceCountExceeded "
    "MaxSpotFleetRequestCountExceeded PendingVerification",
    ThrottledError: "RequestLimitExceeded Throttling ThrottlingException EC2ThrottledException",
    UnsupportedError: "Unsupported UnsupportedOperation InvalidInstanceType InvalidParameterValue "
    "InvalidParameterCombination InvalidAMIID.NotFound InvalidAMIID.Malformed "
    "InvalidKeyPair.NotFound InvalidGroup.NotFound InvalidGroupId.Malformed MissingParameter "
    "InvalidSubnetID.NotFound InvalidSubnet InvalidAvailabilityZone VPCIdNotSpecified",
    CredentialsError: "AuthFailure UnauthorizedOperation RequestExpired ExpiredToken "
    "ExpiredTokenException InvalidClientTokenId SignatureDoesNotMatch OptInRequired Blocked "
    "AccessDenied AccessDeniedException UnrecognizedClientException IncompleteSignature "
    "MissingAuthenticationToken",
}
_ERRORS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_HINTS: Mapping[str, str] = {
    "RequestExpired": "the credentials have expired, or the clock of this computer is wrong",
    "SignatureDoesNotMatch": "the secret key is wrong, or the clock of this computer is",
    "AuthFailure": "the keys are not valid, or the region is not enabled for the account, or the "
    "clock of this computer is wrong",
    "OptInRequired": "the region or service is not enabled for the account",
    "UnauthorizedOperation": "docs/cloud.md lists the permissions that are needed",
    "ExpiredToken": "log in again, such as with: aws sso login",
    "VcpuLimitExceeded": "ask for a higher quota in the console, under Service Quotas",
    "MaxSpotInstanceCountExceeded": "ask for a higher spot quota under Service Quotas",
}


class AwsProvider:
    """Instances of Amazon EC2 in one region.

    Args:
        settings: ``region``, ``image``, ``key_name``, ``security_group``, ``subnet``; what is
            missing is left to AWS.

    Raises:
        UsageError: boto3 is not installed.
        CredentialsError: there is no region.
    """

    preemption: str | None = "aws"

    def __init__(self, settings: Mapping[str, str]) -> None:
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise UsageError(
                "--provider aws needs boto3: pip install 'hvd-elastic[aws]', or take --provider "
                "command"
            ) from error
        self._settings = settings
        # Of a start that is not answered, we look up what it did; the library must not repeat it
        # blindly beyond its token, nor hide for minutes that calls are throttled.
        config = Config(
            retries={"mode": "standard", "max_attempts": 2}, connect_timeout=10, read_timeout=60
        )
        try:
            session = boto3.Session(region_name=settings.get("region") or None)
            self._client = functools.lru_cache(
                lambda service, **more: session.client(service, config=config, **more)
            )
            if session.region_name is None:
                raise CredentialsError(
                    "no region is set: give --region us-east-1, or set AWS_DEFAULT_REGION"
                )
            self._region = str(session.region_name)
            self._pools: dict[tuple[str, str, bool], Offer] = {}
            """Pools as last offered, by type, zone and market."""
            self._prices: dict[str, float] = {}
            """Prices on demand by type, as far as the price list has said them."""
        except BotoCoreError as error:
            raise CredentialsError(f"aws: {error}") from error

    # -- the four calls --------------------------------------------------------------------

    def offers(self, types: Sequence[str], zones: Sequence[str], spot: bool) -> Sequence[Offer]:
        with _calling("describe what there is"):
            ec2 = self._client("ec2")
            slots = self._slots(types)
            filters = [{"Name": "instance-type", "Values": [*types]}]
            if zones:
                filters.append({"Name": "location", "Values": [*zones]})
            pools = [
                Offer(each["InstanceType"], each["Location"], slots=slots[each["InstanceType"]])
                for page in ec2.get_paginator("describe_instance_type_offerings").paginate(
                    LocationType="availability-zone", Filters=filters
                )
                for each in page["InstanceTypeOfferings"]
            ]
            spot_prices = self._spot_prices(types) if spot else {}
        missing = sorted({*types} - {pool.type for pool in pools})
        if missing:
            place = f"{', '.join(zones)} of {self._region}" if zones else self._region
            raise UnsupportedError(f"aws: {place} has no machines of type {', '.join(missing)}")
        prices = {kind: self._price(kind) for kind in types}
        found = [replace(pool, price=prices[pool.type]) for pool in pools]
        found += [
            replace(pool, spot=True, price=spot_prices[pool.type, pool.zone])
            for pool in pools
            if (pool.type, pool.zone) in spot_prices
        ]
        self._pools |= {(pool.type, pool.zone, pool.spot): pool for pool in found}
        return found

    def start(self, order: Order) -> Sequence[Machine]:
        offer, settings = order.offer, self._settings
        tags = [{"Key": f"{TAG_PREFIX}{key}", "Value": value} for key, value in order.tags.items()]
        tags.append({"Key": "Name", "Value": f"hvd-elastic {order.tags['cloud']}"})
        asked: dict[str, Any] = {
            "ImageId": settings.get("image") or self._newest_image(),
            "InstanceType": offer.type,
            "MinCount": 1,
            "MaxCount": order.count,
            "ClientToken": order.token,
            "UserData": order.user_data,
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "InstanceMetadataTags": "disabled"},
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")
            ],
        }
        if offer.zone and "subnet" not in settings:
            asked["Placement"] = {"AvailabilityZone": offer.zone}
        for setting, name in (("key_name", "KeyName"), ("subnet", "SubnetId")):
            if settings.get(setting):
                asked[name] = settings[setting]
        if settings.get("security_group"):
            asked["SecurityGroupIds"] = settings["security_group"].split(",")
        if offer.spot:
            options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            asked["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
        with _calling("start machines"):
            answer = self._client("ec2").run_instances(**asked)
        return [self._machine(each, offer) for each in answer["Instances"]]

    def list(self, tags: Mapping[str, str]) -> Sequence[Machine]:
        filters = [{"Name": f"tag:{TAG_PREFIX}{k}", "Values": [v]} for k, v in tags.items()]
        filters.append({"Name": "tag-key", "Values": [f"{TAG_PREFIX}cloud"]})
        with _calling("list machines"):
            pages = (
                self._client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
            )
            return [
                self._machine(each)
                for page in pages
                for reservation in page["Reservations"]
                for each in reservation["Instances"]
            ]

    def stop(self, ids: Sequence[str]) -> None:
        ec2 = self._client("ec2")
        try:
            with _calling("end machines"):
                if ids:
                    ec2.terminate_instances(InstanceIds=[*ids])
        except UnknownIdError:  # one unknown id fails the whole call
            for each in ids if len(ids) > 1 else ():
                self.stop([each])

    # -- their parts -----------------------------------------------------------------------

    def _machine(self, found: Mapping[str, Any], offer: Offer | None = None) -> Machine:
        tags = {
            tag["Key"].removeprefix(TAG_PREFIX): tag["Value"]
            for tag in found.get("Tags", ())
            if tag["Key"].startswith(TAG_PREFIX)
        }
        if offer is None:
            zone = found.get("Placement", {}).get("AvailabilityZone", "")
            offer = self._known_offer(
                found["InstanceType"], zone, found.get("InstanceLifecycle") == "spot"
            )
        why = found.get("StateReason", {}).get("Message") or found.get("StateTransitionReason", "")
        private = self._settings.get("addresses") == "private"
        address = "" if private else found.get("PublicIpAddress", "")
        started = found.get("LaunchTime")
        return Machine(
            found["InstanceId"],
            _STATES[found["State"]["Name"]],
            address or found.get("PrivateIpAddress", ""),
            offer,
            tags,
            started.isoformat() if started else "",
            why=why,
        )

    def _known_offer(self, kind: str, zone: str, spot: bool) -> Offer:
        """Return the pool of a machine with its price, as far as AWS says."""
        pool = kind, zone, spot
        if pool not in self._pools:
            with contextlib.suppress(CloudError):
                self.offers([kind], [zone], spot)
            self._pools.setdefault(pool, Offer(*pool))
        return self._pools[pool]

    def _slots(self, types: Sequence[str]) -> dict[str, int]:
        """Return the number of GPUs of each type, or 1 for a type without GPUs."""
        pages = self._client("ec2").get_paginator("describe_instance_types")
        found = {}
        for page in pages.paginate(InstanceTypes=[*types]):
            for each in page["InstanceTypes"]:
                gpus = each.get("GpuInfo", {}).get("Gpus", ())
                found[each["InstanceType"]] = sum(gpu["Count"] for gpu in gpus) or 1
        return found

    def _spot_prices(self, types: Sequence[str]) -> dict[tuple[str, str], float]:
        """Return the present spot price of each type and zone that has one."""
        newest: dict[tuple[str, str], tuple[datetime, float]] = {}
        pages = self._client("ec2").get_paginator("describe_spot_price_history")
        for page in pages.paginate(
            InstanceTypes=[*types],
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(timezone.utc),
        ):
            for each in page["SpotPriceHistory"]:
                pool = each["InstanceType"], each["AvailabilityZone"]
                price = each["Timestamp"], float(each["SpotPrice"])
                newest[pool] = max(newest.get(pool, price), price)
        return {pool: price for pool, (_, price) in newest.items()}

    def _price(self, kind: str) -> float | None:
        """Return the price of a type on demand; None: the price list does not say."""
        asked = {
            "instanceType": kind,
            "regionCode": self._region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in asked.items()]
        with contextlib.suppress(CloudError, KeyError, ValueError, IndexError):
            if kind not in self._prices:
                with _calling("read the price list"):
                    pricing = self._client("pricing", region_name="us-east-1")
                    answer = pricing.get_products(ServiceCode="AmazonEC2", Filters=filters)
                terms = json.loads(answer["PriceList"][0])["terms"]["OnDemand"]
                self._prices[kind] = max(
                    float(dimension["pricePerUnit"]["USD"])
                    for term in terms.values()
                    for dimension in term["priceDimensions"].values()
                )
        return self._prices.get(kind) or None

    @functools.lru_cache  # noqa: B019
    def _newest_image(self) -> str:
        with _calling("find an image, which --image names"):
            answer = self._client("ssm").get_parameter(Name=_IMAGE)
        return str(answer["Parameter"]["Value"])


class UnknownIdError(CloudError):
    """A machine is not known, or not any more."""


@contextlib.contextmanager
def _calling(what: str) -> Iterator[None]:
    """Turn errors of boto3 into ours."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        EndpointConnectionError,
        NoCredentialsError,
        PartialCredentialsError,
    )
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        told = error.response.get("Error", {})
        code, message = told.get("Code", "unknown"), told.get("Message", str(error))
        kind = _ERRORS.get(code, CloudError)
        if code.startswith("InvalidInstanceID"):
            kind = UnknownIdError
        hint = f" ({_HINTS[code]})" if code in _HINTS else ""
        raise kind(f"aws cannot {what}: {message.rstrip('.')}{hint} [{code}]") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise CredentialsError(
            f"aws cannot {what}: no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or run: aws configure"
        ) from error
    except EndpointConnectionError as error:
        raise CloudError(
            f"aws cannot {what}: {error} Is the region written correctly, and the network there?"
        ) from error
    except (BotoCoreError, ResponseParserError) as error:  # the latter: a proxy's page of HTML
        raise CloudError(f"aws cannot {what}: {one_line(str(error), 300)}") from error
