"""The models of benchmarks and recipes have the sizes and the behaviour of the literature."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvd_elastic.bench.models import GPT2, resnet50  # noqa: E402


def parameters(model: Any) -> int:
    return sum(each.numel() for each in model.parameters())


def test_parameter_counts_are_those_of_the_literature() -> None:
    with torch.device("meta"):
        assert parameters(resnet50()) == 25_557_032
        assert parameters(GPT2()) == 124_439_808


def test_resnet_halves_the_image_five_times_and_trains() -> None:
    torch.manual_seed(0)
    model = resnet50(classes=7, zero_init_residual=True)
    sizes: list[tuple[int, ...]] = []
    last = model.get_submodule("layer4")
    last.register_forward_hook(lambda *seen: sizes.append(tuple(seen[2].shape)))
    logits = model(torch.randn(2, 3, 64, 96))
    assert sizes == [(2, 2048, 2, 3)]
    assert logits.shape == (2, 7)
    logits.sum().backward()
    gradient = model.conv1.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_resnet_loads_names_of_torchvision() -> None:
    with torch.device("meta"):
        names = set(resnet50().state_dict())
    assert {"conv1.weight", "layer1.0.downsample.1.running_var", "layer4.2.bn3.bias"} <= names
    assert "fc.weight" in names


def test_a_token_of_gpt2_does_not_see_later_ones() -> None:
    torch.manual_seed(0)
    model = GPT2(vocabulary=50, context=16, layers=2, heads=2, width=16)
    first = torch.randint(0, 50, (1, 8))
    second = first.clone()
    second[0, 5] = (second[0, 5] + 1) % 50
    one, other = model(first), model(second)
    assert one.shape == (1, 8, 50)
    torch.testing.assert_close(one[:, :5], other[:, :5])
    assert (one[:, 5:] - other[:, 5:]).abs().max() > 1e-4


def test_gpt2_begins_near_even_odds() -> None:
    torch.manual_seed(0)
    model = GPT2(vocabulary=64, context=16, layers=2, heads=2, width=32)
    tokens = torch.randint(0, 64, (4, 16))
    targets = torch.randint(0, 64, (4 * 16,))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets)
    assert abs(loss.item() - torch.tensor(64.0).log().item()) < 0.2
