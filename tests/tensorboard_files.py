"""Event files as TensorBoard itself reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["read_scalars"]


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → (step, value) in the order of the files, without what was purged."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(point.step, round(point.value, 6)) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
