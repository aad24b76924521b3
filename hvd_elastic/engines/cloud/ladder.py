"""Decide which pool of machines to ask next, after what the cloud has refused."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_elastic.engines.cloud.provider import (
    CapacityError,
    CloudError,
    Offer,
    QuotaError,
    ThrottledError,
    UnsupportedError,
)

LEFT_OUT_S = 600.0
"""How long a pool without capacity is not asked again [s]; AWS ParallelCluster waits as long."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0


class Ladder:
    """Knows which pools are left out, and since when nothing at all may be asked.

    What is left out depends on what was said: one pool (no capacity), all zones of a type (a quota
    is for a region), both markets of a type in a zone (the type does not exist there), or
    everything for a pause that doubles each time (too many calls).

    Args:
        left_out_s: how long a pool is left out [s].
    """

    def __init__(self, left_out_s: float = LEFT_OUT_S) -> None:
        self._left_out_s = left_out_s
        self._until: dict[tuple[str, str, bool | None], float] = {}
        self._why: dict[tuple[str, str, bool | None], str] = {}
        self.not_before = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def refused(self, offer: Offer, error: CloudError, now: float) -> None:
        """Take a refusal into account."""
        key: tuple[str, str, bool | None]
        match error:
            case CapacityError():
                key = (offer.type, offer.zone, offer.spot)
            case QuotaError():
                key = (offer.type, "", offer.spot)
            case UnsupportedError():
                key = (offer.type, offer.zone, None)
            case ThrottledError():
                self.not_before = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                return
            case _:
                key = (offer.type, offer.zone, offer.spot)
        self._until[key] = now + self._left_out_s
        self._why[key] = str(error)

    def started(self) -> None:
        """Take into account that the cloud has started machines."""
        self._pause_s = _FIRST_PAUSE_S

    def why_not(self, offer: Offer, now: float) -> str:
        """Return why a pool is left out; empty: it may be asked."""
        for key in (
            (offer.type, offer.zone, offer.spot),
            (offer.type, "", offer.spot),
            (offer.type, offer.zone, None),
        ):
            if self._until.get(key, now) > now:
                return self._why[key]
        return ""

    def usable(self, offers: Sequence[Offer], now: float) -> list[Offer]:
        """Return the pools that may be asked."""
        return [offer for offer in offers if not self.why_not(offer, now)]
