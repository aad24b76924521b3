"""The emulated device of the scaling benchmark, by a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hvd_elastic.bench import synthetic_torch


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(synthetic_torch, "time", made)
    return made


def test_gradients_come_one_after_the_other_the_last_layer_first(clock: Clock) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    ready: dict[int, float] = {}
    for number, parameter in enumerate(model.parameters()):

        def note(_: Any, number: int = number) -> None:
            ready[number] = clock.now - 10

        parameter.register_post_accumulate_grad_hook(note)
    loss = synthetic_torch.Device(model, 1.5).loss()
    assert clock.now == pytest.approx(10.5), "the forward pass"
    loss.backward()
    assert ready == pytest.approx({3: 0.75, 2: 1.0, 1: 1.25, 0: 1.5})
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_what_the_processor_does_meanwhile_takes_no_time_of_the_device(clock: Clock) -> None:
    model = nn.Linear(2, 3)
    model.weight.register_post_accumulate_grad_hook(lambda _: clock.sleep(0.1))
    model.bias.register_post_accumulate_grad_hook(lambda _: clock.sleep(0.1))
    device = synthetic_torch.Device(model, 1.5)
    device.loss().backward()
    assert clock.now == pytest.approx(11.6)
    device.loss().backward()
    assert clock.now == pytest.approx(13.2)
