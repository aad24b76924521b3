"""Decide which pool of machines to ask next, after what the cloud has refused."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_elastic.engines.cloud.provider import (
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
        self._refusals: dict[tuple[str, str, bool | None], tuple[float, str]] = {}
        """Until when and why pools are left out, by type, zone and market."""
        self.not_before = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def refused(self, offer: Offer, error: CloudError, now: float) -> None:
        """Take a refusal into account."""
        if isinstance(error, ThrottledError):
            self.not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return
        zone = "" if isinstance(error, QuotaError) else offer.zone
        spot = None if isinstance(error, UnsupportedError) else offer.spot
        self._refusals[offer.type, zone, spot] = now + self._left_out_s, str(error)

    def started(self) -> None:
        """Take into account that the cloud has started machines."""
        self._pause_s = _FIRST_PAUSE_S

    def why_not(self, offer: Offer, now: float) -> str:
        """Return why a pool is left out; empty: it may be asked."""
        zone, spot = offer.zone, offer.spot
        for key in ((offer.type, zone, spot), (offer.type, "", spot), (offer.type, zone, None)):
            until, why = self._refusals.get(key, (now, ""))
            if until > now:
                return why
        return ""

    def usable(self, offers: Sequence[Offer], now: float) -> list[Offer]:
        """Return the pools that may be asked."""
        return [offer for offer in offers if not self.why_not(offer, now)]
