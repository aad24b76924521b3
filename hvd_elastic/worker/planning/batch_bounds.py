"""Checks the loader's arguments for an adaptive batch, and whether the ranks can meet them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import as_whole, count
from hvd_elastic.model.goodput import BatchLimits, nearest_plan


def require_whole(name: str, value: Any, least: int, meaning: str, loader: str) -> int:
    """Return an argument that must be a whole number of at least ``least``; else ScriptError."""
    number = as_whole(value)
    if not _whole(number, least):
        raise ScriptError(
            f"{loader}({name}={value!r}): it must be a whole number of at least {least} ({meaning})"
        )
    return int(number)


def batch_limits(
    batch_size: int,
    max_batch_size: int,
    bounds: tuple[int, int | None] | None,
    accumulation: bool,
    examples: int,
    loader: str = "DataLoader",
) -> BatchLimits:
    """Return the limits of an adaptive batch from the loader's arguments.

    ``batch_size`` has been checked already; ``loader`` is the loader's name, for messages.

    Raises:
        ScriptError: an argument is invalid, or no number of ranks could meet the limits.
    """
    largest = "examples of all ranks in the largest step"
    max_batch_size = require_whole("max_batch_size", max_batch_size, 1, largest, loader)
    if max_batch_size < batch_size:
        raise ScriptError(
            f"{loader}(batch_size={batch_size}, max_batch_size={max_batch_size}): the largest "
            "batch is below the one to begin with; make max_batch_size at least batch_size"
        )
    if examples < batch_size:
        raise ScriptError(
            f"the dataset has {examples} examples, fewer than one global batch of {batch_size}; a "
            f"batch that adapts needs batch_size of at most {examples}"
        )
    low, high = _pair(bounds, loader)
    # An epoch has at least one step, so no batch is larger than the dataset.
    most = min(max_batch_size, examples)
    # Fewest passes that can hold the initial batch, on any number of ranks.
    passes = 1 if high is None else -(-batch_size // high)
    if passes * low > most:
        told = f"the {examples} examples of the dataset"
        if most == max_batch_size:
            told = f"max_batch_size={max_batch_size}"
        held = (
            "one pass" if passes == 1 else f"{passes} passes, needed for batch_size={batch_size},"
        )
        raise ScriptError(
            f"{loader}(atomic_batch_size_bounds=({low}, {high})): {held} of at least {low} are "
            f"more than {told}, on any number of ranks; make the first bound at most "
            f"{most // passes}" + ("" if passes == 1 else ", or the second one larger")
        )
    limits = BatchLimits(batch_size, most, low, high)
    return limits if accumulation else replace(limits, max_accumulation_steps=0)


def _pair(bounds: Any, loader: str) -> tuple[int, int | None]:
    if bounds is None:
        return 1, None
    given = f"{loader}(atomic_batch_size_bounds={bounds!r})"
    try:
        low, high = map(as_whole, bounds)
    except (TypeError, ValueError):
        low = high = 0
    if not (_whole(low, 1) and (high is None or _whole(high, 1))):
        raise ScriptError(
            f"{given}: it must be a pair of whole numbers of at least 1, the fewest and the most "
            "examples in a pass on one rank, for example (8, 128), or (8, None) for as many as fit "
            "into memory"
        )
    if high is not None and low > high:
        raise ScriptError(
            f"{given}: they exclude each other; the first, the fewest examples in a pass, must be "
            "at most the second"
        )
    return low, high


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def bounds_at_odds(limits: BatchLimits, ranks: int) -> str:
    """Return a warning that this number of ranks cannot meet the script's bounds, or "".

    The loader itself warns of ranks that have no example at all.

    >>> print(bounds_at_odds(BatchLimits(64, 512, min_atomic_batch_size=24), ranks=4))
    at 4 ranks the batch has at least 96 examples, more than batch_size=64: a pass has at least ...
    """
    low, high = limits.min_atomic_batch_size, limits.max_atomic_batch_size
    wanted = limits.initial_batch_size
    plan = nearest_plan(limits, wanted, ranks)
    size, passes = plan.global_batch_size, plan.accumulation_steps + 1
    fewest = size // ranks // passes
    world = f"at {count(ranks, 'rank')}"
    bounds = f"of atomic_batch_size_bounds=({low}, {high})"
    if size < wanted:
        room = -(-wanted // (ranks * passes))
        made = "pass (accumulation=False)" if passes == 1 else f"{passes} passes at the most"
        return (
            f"{world} the batch has at most {size} examples, fewer than batch_size={wanted}, which "
            f"the learning rate was tuned for: a rank makes its share in {made}, of at most {high} "
            f"examples {bounds}. Make the second bound at least {room}, or use more ranks"
        )
    if 0 < fewest < low:
        way = "use fewer ranks" if passes == 1 else f"the second one at least {-(-size // ranks)}"
        return (
            f"{world} passes have {fewest} examples, fewer than the least {bounds}: a batch of "
            f"{size} has no more for each. Make the first bound at most {fewest}, or {way}"
        )
    if fewest and size > wanted:
        return (
            f"{world} the batch has at least {size} examples, more than batch_size={wanted}: a "
            f"pass has at least {low} {bounds}. Make the first bound smaller, or use fewer ranks"
        )
    least = max(2, low)
    probes = ranks > 1 or limits.max_accumulation_steps == 0  # the latter is said elsewhere
    if not probes and wanted < min(2 * least, limits.max_batch_size):
        return (
            f"{world} batch_size={wanted} does not adapt: the noise of the gradients is measured "
            f"between two passes, which have at least {least} examples each. Make batch_size at "
            f"least {2 * least}, or use more ranks"
        )
    return ""
