"""The search of ``search_digits.py`` with Ray Tune's asynchronous halving, a slot for each trial.

``python benchmarks/peers/search_tune.py DATA REPORTS RATES WIDTHS EPOCHS``, on a node of Ray.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.search_digits import (
    BATCH,
    accuracy_of,
    make_model,
    note,
    read_data,
    take_step,
)


def train(config: dict[str, Any]) -> None:
    """Train a trial."""
    import torch
    from ray import tune

    torch.set_num_threads(1)
    train_data, valid = read_data(Path(config["data"]))
    model = make_model(config["width"])
    optimizer = torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)
    loader = torch.utils.data.DataLoader(train_data, BATCH, shuffle=True)
    for epoch in range(config["epochs"]):
        for images, labels in loader:
            take_step(model, optimizer, images, labels)
        accuracy = accuracy_of(model, valid)
        told = {"lr": config["lr"], "width": config["width"], "epoch": epoch, "accuracy": accuracy}
        note(Path(config["reports"]), **told)
        tune.report({"accuracy": accuracy, "training_iteration": epoch + 1})


def main() -> None:
    """Search."""
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    data, reports, rates, widths, told = sys.argv[1:]
    epochs = int(told)
    ray.init(log_to_driver=False)
    space = {
        "lr": tune.grid_search([float(rate) for rate in rates.split(",")]),
        "width": tune.grid_search([int(width) for width in widths.split(",")]),
        "data": data,
        "reports": reports,
        "epochs": epochs,
    }
    halving = ASHAScheduler(max_t=epochs, grace_period=epochs // 9, reduction_factor=3)
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=halving),
        run_config=tune.RunConfig(storage_path=str(Path(reports).parent / "tune"), verbose=0),
    )
    tuner.fit()


if __name__ == "__main__":
    main()
