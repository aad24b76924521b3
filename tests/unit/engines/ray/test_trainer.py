"""What a trainer refuses at once; no Ray is needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.errors import ArgumentError
from hvd_elastic.ray import ElasticTrainer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scaling": (1, 2, 3)}, r"the least and largest number, not \(1, 2, 3\)"),
        (
            {"scaling": SimpleNamespace(num_workers=4, use_gpu=True, resources_per_worker=None)},
            r"write scaling=4, resources_per_worker={'GPU': 1}",  # for a ScalingConfig of Ray
        ),
        ({"scaling": (3, 1)}, "at least 3 and at most 1"),
        ({"scaling": 0}, "least number of processes is 0"),
        ({"scaling": 1.5}, r"least number of processes is 1\.5"),
        ({"train_fn_args": {"lr": 0.1}}, r"write \({'lr': 0.1},\)"),
        ({"datasets": [1, 2]}, "by name"),
        ({"resources_per_worker": {"GPU": -1}}, "GPU is -1"),
        ({"train_fn": 3}, "3 cannot be trained"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        ElasticTrainer(**{"train_fn": print, "scaling": (1, 2), **changes})
