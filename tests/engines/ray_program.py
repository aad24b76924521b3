"""A user's Ray program on the head: trains on a Ray Dataset, and writes the result as JSON.

Arguments: folder for the result, least and largest number of workers, epochs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray.data

from hvd_elastic.ray import ElasticTrainer

ROWS = 480


def add_features(batch: dict[str, Any]) -> dict[str, Any]:
    """The transform: features and a label of each row, by its number."""
    numbers = batch["id"]
    return {"x": np.sin(np.outer(numbers + 1.0, np.arange(1, 9))), "label": numbers % 3, **batch}


def train(epochs: int) -> dict[str, Any]:
    """What a user writes."""
    import torch

    import hvd_elastic.torch as hvd
    from hvd_elastic.ray import RayDataset

    hvd.init()
    model = torch.nn.Linear(8, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    data = RayDataset("train", lambda row: (row["x"].astype("float32"), row["label"]))
    loader: Any = hvd.DataLoader(data, batch_size=24, shuffle=True, num_workers=1)
    state = hvd.State(model=model, optimizer=optimizer)

    @hvd.run
    def loop(state: Any) -> float:
        loss = torch.zeros(())
        for _ in hvd.epochs(epochs):
            for features, labels in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(features), labels)
                loss.backward()
                optimizer.step()
        return float(loss.detach())

    return {"loss": loop(state), "rank": hvd.rank(), "rows": len(data)}


if __name__ == "__main__":
    folder, least, most, epochs = sys.argv[1], *map(int, sys.argv[2:])
    data = ray.data.range(ROWS, override_num_blocks=6).map_batches(add_features)
    result = ElasticTrainer(
        train,
        [epochs],
        scaling=(least, most),
        resources_per_worker={"slots": 2},
        datasets={"train": data},
        run_options={"audit": True},
    ).fit()
    found = {"value": result.value, "folder": str(result.folder), "metrics": result.metrics}
    Path(folder, "result.json").write_text(
        json.dumps({**found, "checkpoint": str(result.checkpoint)}), encoding="utf-8"
    )
