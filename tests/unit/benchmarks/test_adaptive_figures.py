"""What the benchmark of adaptive training makes of what its jobs wrote."""

from __future__ import annotations

import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.adaptive import workloads
from benchmarks.adaptive.examples import Look, examples_rows, median_error, predicted_ratio
from benchmarks.adaptive.jobs.digits import Kind, brute_force, moments, single_gradients
from benchmarks.adaptive.launch import run_together
from benchmarks.adaptive.measure import (
    changes_rows,
    digits_rows,
    prediction_errors,
    rule_rows,
    target_rows,
)
from hvd_elastic.errors import RunError
from hvd_elastic.model.step_time import Observation


def row(seed: int, scale: int, losses: list[float], steps: int) -> dict[str, Any]:
    return {"seed": seed, "scale": scale, "losses": losses, "steps": steps, "least_loss": 1.0}


def test_rules_are_judged_against_the_initial_batch_of_the_same_seed() -> None:
    found = [
        *(row(0, 1, [5.0, 2.0], 100), row(0, 4, [5.5, 2.0], 40)),
        *(row(1, 1, [9.0, 2.0], 100), row(1, 4, [9.0, 1.9], 42)),
    ]
    (four,) = rule_rows(found)
    assert four["scale"] == 4
    assert four["loss_ratio"] == pytest.approx([1.05, 0.975])
    assert four["worst_loss_ratio"] == pytest.approx(1.1)
    assert four["excess_ratio"] == pytest.approx([(4.5 / 4 + 1) / 2, 0.95])
    assert (four["steps"], four["steps_at_scale_1"]) == (41, 100)


def few_digits(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.arange(count) % 10)


def test_brute_force_is_what_single_backward_passes_give() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
    model, examples = nn.Sequential(*layers).eval(), few_digits(70)
    divisors = {name: 0.5 + torch.rand_like(each) for name, each in model.named_parameters()}
    rows = []
    for image, label in zip(*examples.tensors, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        found = torch.autograd.grad(loss, list(model.parameters()))
        parts = [each / divisor for each, divisor in zip(found, divisors.values(), strict=True)]
        rows.append(torch.cat([part.flatten() for part in parts]).double())
    all_of_them = torch.stack(rows)
    mean, trace = float(all_of_them.mean(0).square().sum()), float(all_of_them.var(0).sum())
    count, *measured = moments(single_gradients(model, examples), divisors)
    assert count == 70
    assert measured == pytest.approx([mean, trace], rel=1e-4)
    known = brute_force(Kind("adam", 0, "fixed"), model, examples, 0, divisors)
    assert known == pytest.approx(trace / mean, rel=1e-4)


def test_the_digits_are_put_together_by_kind() -> None:
    kind = {"optimizer": "sgd", "trained_steps": 50, "batch_norm": "fixed", "frozen_steps": 200}
    found = [
        {**kind, "seed": seed, "measured": measured, "brute_force": known}
        for seed, (measured, known) in enumerate([(90.0, 100.0), (240.0, 200.0), (300.0, 300.0)])
    ]
    (other,) = digits_rows([{**found[0], "measured": None}])
    assert (other["median"], other["seeds"], other["without_end"]) == (None, 1, 1)
    found.append({**found[0], "measured": None})
    first, second = digits_rows([*found, {**found[0], "frozen_steps": 1000}])
    assert first == {
        **kind,
        "brute_force": 150.0,
        "seeds": 4,
        "without_end": 1,
        "median": 1.0,
        "lowest": 0.9,
        "highest": 1.2,
    }
    assert (second["frozen_steps"], second["median"]) == (1000, 0.9)


def test_step_times_that_follow_the_model_are_foretold_and_others_are_not() -> None:
    places = list(itertools.product((1, 2), (8, 32, 128, 512), (0, 1, 3)))

    def seen(ranks: int, atomic: int, extra: int) -> float:
        return (extra + 1) * (0.002 + 0.0001 * atomic) + 0.01 * (ranks > 1)

    smooth = [Observation(k, k, m, s, seen(k, m, s)) for k, m, s in places]
    errors = prediction_errors(smooth, splits=4)
    assert len(errors) == 4 * 12
    assert sorted(errors)[24] < 0.05
    jagged = [Observation(k, k, m, s, 0.01 * (1 + 9 * (m in (8, 128)))) for k, m, s in places]
    assert sorted(prediction_errors(jagged, splits=4))[24] > 0.3


def test_a_right_change_goes_towards_the_best_batch_and_brings_more() -> None:
    def training(seed: int, *batches: tuple[int, int, int]) -> dict[str, Any]:
        before, after = (
            {"noise_scale": noise, "pass_s": 0.008, "example_s": 1e-4} for noise in (50.0, 500.0)
        )
        known = {"change": "noise rises", "step": 300, "rest_s": 0.002}
        return {**known, "seed": seed, "before": before, "after": after, "batches": batches}

    first = (0, 32, 0), (20, 100, 0)
    found = [
        training(0, *first, (340, 80, 0), (380, 200, 0), (420, 316, 0)),
        training(1, *first, (310, 1024, 15), (320, 130, 0)),
        training(2, *first, (330, 99, 0)),
    ]
    (row,) = changes_rows(found)
    # sqrt(2 a B / b) examples have the most goodput.
    assert (row["best_before"], row["best_now"], row["batch"]) == (100, 316, 100)
    assert [each["steps"] for each in row["trainings"]] == [80, 20, None]
    assert [each["wrong"] for each in row["trainings"]] == [1, 1, 1]
    assert (row["median"], row["lowest"], row["highest"], row["never"]) == (50, 20, 80, 1)
    assert (row["direction"], row["wrong"]) == ("up", 3)
    worth = [size * 532 / (500 + size) / (0.01 + 1e-4 * size / 2) for size in (316, 100)]
    assert row["gain"] == pytest.approx(worth[0] / worth[1])
    (never,) = changes_rows(found[2:])
    assert never["median"] is None


def test_a_batch_that_misses_the_target_is_not_the_best_one() -> None:
    found = [
        {"batch": batch, "seconds": seconds, "whole_s": whole_s, "last_batch": 64, "accuracy": 0.9}
        for batch, seconds, whole_s in (
            *(("adaptive", 3.0, 6.0), ("adaptive", 4.0, 6.0), ("adaptive", 5.0, 7.0)),
            *((32, 8.0, 9.0), (32, 9.0, 9.0), (64, 5.0, 8.0), (64, 5.0, 8.0)),
            *((128, 1.0, 5.0), (128, None, 5.0), (256, None, 4.0), ("AdaptDL", 12.0, 18.0)),
        )
    ]
    found.append({"batch": "AdaptDL", "failed": "it died"})
    adaptive, default, best, often, never, peer = target_rows(found)
    assert adaptive["times_best_fixed"] == 4.0 / 5.0
    assert (adaptive["whole_s"], adaptive["times_best_fixed_whole"]) == (6.0, 6.0 / 4.0)
    assert default["times_best_fixed"] == 8.5 / 5.0
    assert best["times_best_fixed"] == 1.0
    assert default["times_adaptive"] == 8.5 / 4.0
    assert (often["missed"], often["lowest"], often["median"]) == (1, 1.0, None)
    assert (never["missed"], never["lowest"], never["median"]) == (1, None, None)
    assert (peer["failed"], peer["missed"], peer["median"]) == (1, 0, 12.0)
    assert (peer["times_best_fixed"], peer["times_adaptive"]) == (12.0 / 5.0, 12.0 / 4.0)


def test_a_batch_that_seldom_misses_the_target_may_be_the_best_one() -> None:
    ended = {"whole_s": 9.0, "last_batch": 64, "accuracy": 0.9}
    found: list[dict[str, Any]] = [{**ended, "batch": 64, "seconds": s} for s in (7.0, 8.0, 9.0)]
    found += [{**ended, "batch": 128, "seconds": seconds} for seconds in (4.0, 6.0, None)]
    steady, best = target_rows(found)
    assert (best["median"], best["highest"], best["missed"]) == (6.0, None, 1)
    assert steady["times_best_fixed"] == 8.0 / 6.0


def test_a_race_goes_by_the_mean_of_looks_and_looks_are_not_in_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(workloads, "DISTORTED_STEPS", 300)
    accuracies = [0.5, 0.99, 0.96, 0.97, 0.98, 0.98]

    def judge() -> float:
        clock[0] += 50
        return accuracies.pop(0)

    race = workloads.Race(judge)
    race.start()
    ended = []
    for step in range(1, 11):
        clock[0] += 2
        ended.append(race.over(64 * step, batch=64, progress=30.0 * step))
    assert ended == 9 * [False] + [True]
    assert [look[-1] for look in race.curve] == [60.0, 120.0, 150.0, 210.0, 270.0, 300.0]
    assert race.curve[0] == (4.0, 128, 0.5, 64, 60.0)
    # A single look above the target is none; the mean of the four up to the fifth is on it.
    found = race.result()
    assert (found["seconds"], found["whole_s"], found["accuracy"]) == (18.0, 20.0, 0.98)


def test_the_rate_of_distorted_digits_falls_to_nothing() -> None:
    rates = [workloads.rate_left(workloads.DISTORTED_STEPS * share) for share in (0, 0.25, 1, 1.1)]
    assert rates == [1.0, 0.75, 0.0, 0.0]


def test_distorted_digits_are_new_ones_and_always_the_same() -> None:
    learned, (images, labels) = workloads.distorted_digits()
    again, _ = workloads.distorted_digits()
    plain, (_, plain_labels) = workloads.digits()
    assert torch.equal(learned.tensors[0], again.tensors[0])
    assert len(learned) == workloads.COPIES * len(plain)
    assert images.shape == (workloads.COPIES * len(plain_labels), 1, 8, 8)
    assert torch.equal(labels, plain_labels.repeat(workloads.COPIES))
    off = (learned.tensors[0][: len(plain)] - plain.tensors[0]).abs().mean()
    assert 0.02 < off < 0.3


def test_a_replica_that_dies_ends_the_others_and_says_why(tmp_path: Path) -> None:
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such luck')\n"
    job = [sys.executable, "-c", f"{script}time.sleep(600)"]
    with pytest.raises(RunError, match="no such luck"):
        run_together(job, [{**os.environ, "RANK": rank} for rank in "01"], tmp_path)


def course(batch: int, noise: float, slower: float = 1.0) -> list[Look]:
    """As theory has it: a step is worth ``1 / (1 + noise / batch)`` of one without noise."""
    looks = range(0, 2001, 50)
    return [(slower * step * (batch + noise), 4.0 * 0.99**step, noise) for step in looks]


def training(batch: int, curve: list[Look], seed: int = 0) -> dict[str, Any]:
    row = {"problem": "made up", "batch": batch, "seed": seed, "level": 0.1}
    return {**row, "curve": curve}


def test_trainings_that_follow_the_theory_need_as_many_examples_as_foretold() -> None:
    found = [
        *(training(32, course(32, 100), seed) for seed in (0, 1)),
        *(training(64, course(64, 100), seed) for seed in (0, 1)),
        *(training(512, course(512, 100, slower=1.5), seed) for seed in (0, 1)),
        training(1024, course(1024, 100)[:3]),
    ]
    first, second, third, never = examples_rows(found)
    assert (first["measured"], first["error"], first["seeds"]) == (1.0, 0.0, 2)
    assert second["predicted"] == pytest.approx(164 / 132)
    assert second["error"] == pytest.approx(0.0)
    assert second["fitting_noise_scale"] == pytest.approx(100)
    assert third["measured"] == pytest.approx(1.5 * 612 / 132)
    assert third["error"] == pytest.approx(1 / 1.5 - 1)
    assert (never["examples"], never["measured"], never["error"]) == (None, None, None)
    assert never["predicted"] == pytest.approx(1124 / 132)
    assert median_error([first, second, third]) == pytest.approx((1 - 1 / 1.5) / 2)
    assert median_error([first, third, never, never]) == math.inf


def test_a_noise_scale_that_changes_counts_for_as_long_as_it_lasts() -> None:
    curve: list[Look] = [(0, 9.0, None), (100, 8.0, 32.0), (300, 7.0, 96.0), (900, 6.0, None)]
    # 100 examples at 32, 200 at 96, and then noise without end.
    parts = [100 * (32 + 96) / (32 + 32), 200 * (96 + 96) / (96 + 32), 100]
    assert predicted_ratio(curve, 32, 96, until=400) == pytest.approx(sum(parts) / 400)
    unknown: list[Look] = [(0, 9.0, None), (100, 8.0, None)]
    assert predicted_ratio(unknown, 32, 96, until=100) == 1.0
