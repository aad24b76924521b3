"""A loss that is a sum over the batch is seen, and its gradients are added up over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hvd_elastic.torch.summed_losses import (
    _DIVIDED,
    _LISTED,
    _MEAN,
    _OTHER,
    _SUM,
    _VALID,
    Counts,
    Seen,
    Weights,
    kinds_of,
    summed_losses_are_added,
)
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.step import Pass

EXAMPLES, STEP = 6, 12
COUNTS = Counts(EXAMPLES, STEP, share=EXAMPLES)
weights = torch.nn.Parameter(torch.ones(4))
data = torch.arange(EXAMPLES * 4.0).reshape(EXAMPLES, 4)
other = torch.ones(EXAMPLES, 4)
classes = torch.arange(EXAMPLES) % 4
MASK = torch.tensor([True, False, True, True, False, True])
CLASS_WEIGHTS = torch.arange(1.0, 5.0)
parameter = torch.nn.Parameter(torch.ones(3))
CONSTANTS = torch.arange(1.0, 1.0 + EXAMPLES)
SHARES = torch.full((EXAMPLES,), 1 / EXAMPLES)
"""Weights of the examples that were divided by their sum."""


def outputs(examples: int = EXAMPLES) -> torch.Tensor:
    return data[:examples] * weights


def penalised() -> torch.Tensor:
    return torch.cat([weights.view(-1), parameter])


def inputs_of_gradients() -> torch.Tensor:
    return data.clone().requires_grad_()


def smoothed(**options: Any) -> torch.Tensor:
    return F.cross_entropy(outputs(), classes, label_smoothing=0.1, **options)


def kl() -> torch.Tensor:
    return F.kl_div(outputs().log_softmax(1), other.softmax(1), reduction="batchmean")


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [
        (lambda: F.mse_loss(outputs(), other), {_MEAN}),
        (lambda: F.mse_loss(outputs(), other, reduction="sum"), {_SUM}),
        (lambda: F.cross_entropy(outputs(), classes, reduction="sum"), {_SUM}),
        (lambda: F.cross_entropy(outputs(), classes, label_smoothing=0.1), {_MEAN}),
        (lambda: smoothed(ignore_index=0), {_VALID, _DIVIDED}),
        (lambda: smoothed(reduction="sum"), {_SUM}),
        (lambda: F.cross_entropy(outputs(), classes, ignore_index=0), {_VALID}),
        (lambda: F.cross_entropy(outputs(), classes, ignore_index=7), {_MEAN}),
        (lambda: F.cross_entropy(outputs(), classes, weight=CLASS_WEIGHTS), {_MEAN}),
        (lambda: F.l1_loss(outputs(), other, reduction="sum") * 1e-3, {_SUM}),
        (lambda: -outputs().log().sum(1).sum(), {_SUM}),
        (lambda: outputs().sum(1).mean(), {_MEAN}),
        (lambda: outputs().sum() / EXAMPLES, {_MEAN}),
        (lambda: 512 * (outputs().sum() * (1 / EXAMPLES)), {_DIVIDED}),
        (lambda: 0.5 * outputs().sum(), {_SUM}),
        (lambda: outputs().sum() / 12, {_DIVIDED}),
        (lambda: F.cross_entropy(outputs(), classes, reduction="sum") / MASK.sum(), {_DIVIDED}),
        (lambda: outputs().sum() * (1 / MASK.sum()), {_DIVIDED}),
        (lambda: outputs().sum() * torch.tensor(1024.0), {_SUM}),  # a gradient scaler
        (outputs()[MASK].sum, {_SUM}),
        (lambda: outputs().masked_select(MASK[:, None]).mean(), {_VALID}),
        (outputs()[MASK].mean, {_VALID}),
        (outputs()[torch.arange(EXAMPLES), classes].mean, {_MEAN}),
        (outputs()[:, torch.tensor([True, False, True, True])].mean, {_MEAN}),
        (lambda: outputs()[MASK].sum() / EXAMPLES, {_MEAN}),
        (lambda: outputs().square().sum() / (3 * EXAMPLES), {_MEAN}),
        (lambda: outputs().square().sum() / STEP, {_DIVIDED}),
        ((outputs() / EXAMPLES).sum, {_MEAN}),
        ((outputs() / MASK.sum()).sum, {_DIVIDED}),
        (lambda: outputs().view(-1).sum(), {_SUM}),
        (outputs().T.sum, {_SUM}),
        (lambda: outputs().sum(0).mean(), {_SUM}),
        (lambda: outputs().sum(-2).mean(), {_SUM}),
        (lambda: torch.stack([outputs().mean(1)] * 3).sum(0).mean(), {_MEAN}),  # of 3 time steps
        (lambda: torch.stack([outputs().mean(1)] * EXAMPLES).sum(0).mean(), {_MEAN}),
        (lambda: ((outputs() - other) / 2).pow(2).sum(), {_SUM}),
        (lambda: outputs().mean((0, 1)), {_MEAN}),
        (lambda: inputs_of_gradients().sum(), {_SUM}),
        (lambda: F.linear(inputs_of_gradients(), torch.ones(2, 4)).sum(), {_SUM}),
        (lambda: outputs().mean(0).sum(), {_MEAN}),
        (lambda: outputs().mean(1).sum(), {_SUM}),
        (kl, {_MEAN}),
        (lambda: torch.stack([outputs().mean()] * 3).sum(), {_OTHER}),
        (lambda: torch.stack([outputs().mean()] * EXAMPLES).sum(), {_OTHER}),
        (lambda: torch.cat([outputs().mean().view(1)] * EXAMPLES).sum(), {_OTHER}),
        ((CONSTANTS * torch.stack([outputs().mean()] * EXAMPLES)).sum, {_OTHER}),
        (lambda: torch.stack([outputs().mean(), outputs().sum()] * 3).sum(), {_MEAN, _SUM}),
        (lambda: torch.stack([outputs().sum()] * EXAMPLES).sum(), {_SUM}),
        (lambda: torch.stack([outputs().sum()] * 3).mean(), {_SUM}),
        (lambda: torch.stack([outputs().sum() / EXAMPLES] * EXAMPLES).sum(), {_OTHER}),
        (lambda: torch.stack([outputs()[MASK].mean()] * 3).sum(), {_VALID}),
        (lambda: torch.stack([weights.pow(2).sum()] * EXAMPLES).sum(), {_OTHER}),
        (lambda: torch.stack([weights.norm()] * EXAMPLES).sum(), {_OTHER}),
        (torch.stack(list(outputs().mean(1))).sum, {_SUM}),
        ((SHARES * outputs().mean(1)).sum, {_MEAN}),
        ((outputs().mean(1) * SHARES.bfloat16()).sum, {_MEAN}),
        ((outputs().mean(1) / SHARES.reciprocal()).sum, {_MEAN}),
        (lambda: (SHARES * outputs().mean(1)).sum() * 2, {_MEAN}),
        ((SHARES[:, None] * outputs()).sum, {_DIVIDED}),
        ((SHARES * torch.nan * outputs().mean(1)).sum, {_SUM}),
        ((SHARES[:0] * outputs()[:0].mean(1)).sum, {_SUM}),
        ((SHARES * EXAMPLES * outputs().mean(1)).sum, {_SUM}),
        ((MASK.float() * outputs().mean(1)).sum, {_SUM}),
        (((classes == 1).float() * outputs().sum(1)).sum, {_SUM}),
        ((F.one_hot(torch.tensor(2), EXAMPLES).float() * outputs().mean(1)).sum, {_SUM}),
        ((torch.full((4,), 0.25) * outputs()).sum, {_SUM}),
        ((torch.full((4,), 0.25) * outputs().sum(0)).sum, {_SUM}),
        ((1 / MASK.sum() * outputs()).sum, {_DIVIDED}),
        (lambda: torch.tensor(1024.0) * outputs().sum(), {_SUM}),
        (lambda: sum([outputs().mean()] * 3), {_MEAN}),
        (lambda: outputs().sum() - 0.5 * (1 + outputs()).sum(), {_SUM}),  # a VAE's
        (lambda: outputs().sum() + outputs().mean(), {_SUM, _MEAN}),
        (lambda: outputs().mean() + 1e-4 * parameter.square().sum(), {_MEAN, _OTHER}),
        (lambda: outputs().mean() + weights.square().sum(), {_MEAN, _OTHER}),
        (lambda: outputs().mean() + penalised().abs().sum(), {_MEAN, _OTHER}),
        (lambda: outputs().sum() * parameter[0], set()),
    ],
)
def test_what_a_loss_is_over_the_batch(loss: Callable[[], Any], kinds: set[str]) -> None:
    assert kinds_of(loss(), COUNTS) == kinds


# -- losses of well-known projects, with as many features as examples, and with another number ---

layer = torch.nn.Linear(4, 6)
wide = torch.nn.Linear(4, 7)


def vae() -> torch.Tensor:
    """pytorch/examples; divided by the batch in many others."""
    decoded, mu, logvar = outputs().sigmoid(), layer(data), layer(data)
    bce = F.binary_cross_entropy(decoded, other, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def beta_vae() -> torch.Tensor:
    """PyTorch-VAE."""
    mu, logvar = layer(data), layer(data)
    kld = torch.mean(-0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1), dim=0)
    return F.mse_loss(outputs(), other) + 0.00025 * kld


def barlow_twins(net: torch.nn.Module) -> torch.Tensor:
    """facebookresearch/barlowtwins."""
    c = (net(data).T @ net(other)).div_(EXAMPLES)
    size = len(c)
    off = c.flatten()[:-1].view(size - 1, size + 1)[:, 1:].flatten()
    return torch.diagonal(c).add_(-1).pow_(2).sum() + 0.0051 * off.pow_(2).sum()


def vicreg(net: torch.nn.Module) -> torch.Tensor:
    """facebookresearch/vicreg."""
    x, y = net(data), net(other)
    repr_loss = F.mse_loss(x, y)
    x = x - x.mean(dim=0)
    std_loss = torch.mean(F.relu(1 - torch.sqrt(x.var(dim=0) + 0.0001)))
    cov = (x.T @ x) / (EXAMPLES - 1)
    size = len(cov)
    off = cov.flatten()[:-1].view(size - 1, size + 1)[:, 1:].flatten()
    return 25 * repr_loss + 25 * std_loss + off.pow_(2).sum().div(size)


def feature_matching(net: torch.nn.Module) -> torch.Tensor:
    return (net(data).mean(0) - net(other).mean(0)).pow(2).sum()


def nt_xent() -> torch.Tensor:
    """Spijkervet/SimCLR: a sum divided by the 2 N rows."""
    z = torch.cat([layer(data), layer(other)])
    similar = F.cosine_similarity(z[:, None], z[None], dim=2) / 0.5
    rows = torch.arange(2 * EXAMPLES)
    return F.cross_entropy(similar, rows, reduction="sum") / (2 * EXAMPLES)


def clip() -> torch.Tensor:
    """openai/CLIP."""
    logits = 14.3 * layer(data) @ layer(other).T
    labels = torch.arange(EXAMPLES)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def orthogonality(net: torch.nn.Linear) -> torch.Tensor:
    w = net.weight
    return (w @ w.T - torch.eye(len(w))).pow(2).sum()


def gradients() -> tuple[torch.Tensor, ...]:
    loss = F.mse_loss(wide(layer(data)[:, :4]), torch.zeros(EXAMPLES, 7))
    return torch.autograd.grad(loss, [*wide.parameters(), *layer.parameters()], create_graph=True)


def wgan_gp() -> torch.Tensor:
    inputs = data.clone().requires_grad_()
    (slope,) = torch.autograd.grad(layer(inputs).sum(), inputs, create_graph=True)
    gp = ((slope.norm(2, dim=1) - 1) ** 2).mean()
    return layer(other).mean() - layer(data).mean() + 10 * gp


def gpt(**options: Any) -> torch.Tensor:
    """karpathy/nanoGPT, with logits of 3 tokens for each of two texts."""
    return F.cross_entropy(layer(data).view(2, 3, 6).view(-1, 6), classes, **options)


def focal(divisor: Any) -> torch.Tensor:
    """torchvision's RetinaNet: a sum that is divided by the number of foreground anchors."""
    p, ce = outputs().sigmoid(), F.binary_cross_entropy_with_logits(outputs(), other)
    return (ce * ((1 - p) ** 2)).sum() / divisor


def masked_tokens() -> torch.Tensor:
    """Means over tokens as Hugging Face's losses are."""
    logits = layer(data).view(2, 3, 6)
    losses = F.cross_entropy(logits.view(-1, 6), classes, reduction="none").view(2, 3)
    mask = MASK.view(2, 3).float()
    return (losses * mask).sum() / mask.sum()


def elastic_weights() -> torch.Tensor:
    """EWC: the Fisher information times squares of the distance to earlier weights."""
    return (torch.rand(6, 4) * (layer.weight - torch.rand(6, 4)) ** 2).sum()


MEANS = F.mse_loss(layer(data), torch.ones(6, 6))


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [
        (vae, {_SUM}),
        (lambda: vae() / EXAMPLES, {_MEAN}),
        (beta_vae, {_MEAN}),
        (lambda: barlow_twins(layer), {_OTHER}),
        (lambda: barlow_twins(wide), {_OTHER}),
        (lambda: vicreg(layer), {_MEAN, _OTHER}),
        (lambda: vicreg(wide), {_MEAN, _OTHER}),
        (lambda: feature_matching(layer), {_OTHER}),
        (lambda: feature_matching(wide), {_OTHER}),
        (nt_xent, {_MEAN}),
        (clip, {_MEAN}),
        (lambda: MEANS + 1e-3 * orthogonality(layer), {_MEAN, _OTHER}),
        (lambda: MEANS + 1e-3 * orthogonality(wide), {_MEAN, _OTHER}),
        (lambda: MEANS + 0.1 * sum(g.pow(2).sum() for g in gradients()), {_MEAN, _OTHER}),
        (lambda: MEANS + 0.1 * sum(g.norm() for g in gradients()), {_MEAN, _OTHER}),
        (wgan_gp, {_MEAN}),
        (lambda: MEANS + sum(p.pow(2).sum() for p in layer.parameters()), {_MEAN, _OTHER}),
        (lambda: MEANS + sum(p.abs().sum() for p in wide.parameters()), {_MEAN, _OTHER}),
        (lambda: MEANS + elastic_weights(), {_MEAN, _OTHER}),
        (gpt, {_MEAN}),
        (lambda: gpt(ignore_index=0), {_VALID}),
        (lambda: gpt(reduction="sum"), {_SUM}),
        (lambda: gpt(reduction="sum") / EXAMPLES, {_MEAN}),
        (lambda: focal(5), {_DIVIDED}),
        (lambda: focal(max(torch.tensor(4), 1)), {_DIVIDED}),
    ],
)
def test_losses_of_well_known_projects(loss: Callable[[], Any], kinds: set[str]) -> None:
    """No penalty, correlation or statistic of a batch passes for a sum over it."""
    assert kinds_of(loss(), COUNTS) == kinds


def one_by_one(**options: Any) -> torch.Tensor:
    each = zip(data.split(1), classes.split(1), strict=True)
    return torch.stack([F.cross_entropy(layer(x), y, **options) for x, y in each])


def sequences() -> torch.Tensor:
    """A loss of each example, which is a mean over its 3 tokens."""
    return torch.stack([F.mse_loss(layer(x.expand(3, 4)), torch.ones(3, 6)) for x in data])


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda: one_by_one().sum(), _SUM),
        (lambda: one_by_one().mean(), _MEAN),
        (lambda: one_by_one().sum() / EXAMPLES, _MEAN),
        ((one_by_one() / EXAMPLES).sum, _MEAN),
        (lambda: torch.stack([each / EXAMPLES for each in one_by_one()]).sum(), _MEAN),
        (lambda: one_by_one(reduction="sum").sum(), _SUM),
        (lambda: one_by_one(reduction="sum").mean(), _MEAN),
        (lambda: torch.cat([each.view(1) for each in one_by_one()]).sum(), _SUM),
        (lambda: sequences().sum(), _LISTED),
        (lambda: sequences().mean(), _MEAN),
        (lambda: sequences().sum() / EXAMPLES, _MEAN),
    ],
)
def test_a_list_with_a_loss_of_each_example(loss: Callable[[], Any], kind: str) -> None:
    assert kinds_of(loss(), COUNTS) == {kind}


def test_a_list_with_the_loss_of_one_example_may_be_that_of_the_batch() -> None:
    loss = torch.stack([F.cross_entropy(layer(data[:1]), classes[:1])]).sum()
    assert kinds_of(loss, Counts(examples=1, step_examples=3, share=1)) == {_LISTED}


def test_weights_of_one_example_are_what_those_of_more_were() -> None:
    def loss(examples: int) -> torch.Tensor:
        return (torch.full((examples,), 1 / examples) * outputs(examples).mean(1)).sum()

    one = Counts(examples=1, step_examples=3, share=1, seen=Seen())
    assert kinds_of(loss(1), one) == {_DIVIDED}
    assert kinds_of(loss(2), one._replace(examples=2)) == {_MEAN}
    assert kinds_of(loss(1), one) == {_MEAN}


@pytest.mark.parametrize("kind", [_MEAN, _SUM])
def test_weights_on_a_gpu_are_read_rarely(kind: str) -> None:
    unreadable = Weights(torch.empty(EXAMPLES, device="meta"), False, (EXAMPLES,))
    assert COUNTS._replace(seen=Seen(kind)).kind_of_weighted([unreadable]) == kind


def test_a_mean_over_the_tokens_of_texts_is_a_sum_that_is_divided() -> None:
    assert kinds_of(masked_tokens(), Counts(examples=2, step_examples=4, share=2)) == {_DIVIDED}


def test_a_rank_that_reads_an_example_again_has_no_examples_to_divide_by() -> None:
    loss = layer(data[:1]).sum() / 5
    assert kinds_of(loss, Counts(examples=0, step_examples=7, share=3)) == {_MEAN}


@pytest.mark.parametrize("examples", [1, EXAMPLES])
def test_a_loss_of_each_example_is_a_sum(examples: int) -> None:
    loss = outputs(examples).mean(1)
    assert kinds_of(loss, Counts(examples, 2 * examples, examples), is_vector=True) == {_SUM}


def weight_after(alone: Context, loss: torch.Tensor, ranks: int = 2) -> float:
    alone.worker.communicator.size = ranks
    alone.step.begin_step(Pass(step_examples=13, weight=0.9, examples=EXAMPLES))
    with summed_losses_are_added(alone):
        loss.backward()
    return alone.step.weight


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_a_sum_are_added_up(alone: Context, ranks: int) -> None:
    """The average of ``ranks`` times each of them is their sum, however large the shares are."""
    assert weight_after(alone, outputs().sum(), ranks) == ranks
    assert weight_after(alone, outputs().mean(), ranks) == 0.9


def test_a_rank_alone_and_losses_outside_of_training_are_left_alone(alone: Context) -> None:
    backward = torch.autograd.backward
    assert weight_after(alone, outputs().sum(), 1) == 0.9
    assert torch.autograd.backward is backward


def test_gradients_of_inputs_alone_do_not_say_what_the_loss_of_the_step_is(alone: Context) -> None:
    alone.worker.communicator.size = 2
    alone.step.begin_step(Pass(step_examples=13, weight=0.9, examples=EXAMPLES))
    inputs = data.clone().requires_grad_()
    trained = torch.nn.Parameter(torch.ones(4))
    with summed_losses_are_added(alone):
        (inputs * trained).sum().backward(inputs=[inputs])
        assert alone.step.weight == 0.9
        (inputs * trained).sum().backward(inputs=[trained])
        assert alone.step.weight == 2


def test_a_mean_over_valid_targets_is_warned_of_unless_weighted(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", warnings.append)
    alone.worker.communicator.size = 2
    with summed_losses_are_added(alone):
        for _ in range(2):
            alone.step.begin_step(Pass(step_examples=12, weight=1.0, examples=EXAMPLES))
            F.cross_entropy(outputs(), classes, ignore_index=0).backward()
    (warning,) = warnings
    assert "targets that are not ignored" in warning
    assert "hvd.step_weight" in warning


def test_a_list_of_as_many_losses_as_examples_is_warned_of(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", warnings.append)
    assert weight_after(alone, sequences().sum()) == 0.9
    (warning,) = warnings
    assert "a sum of as many losses as this rank has examples. Ranks average" in warning


def test_a_loss_of_sums_and_means_is_warned_of_once(
    alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(alone.worker, "warn", warnings.append)
    alone.worker.communicator.size = 2
    alone.step.begin_step(Pass(step_examples=12, weight=1.0, examples=EXAMPLES))
    with summed_losses_are_added(alone):
        for _ in range(2):
            (outputs().sum() + outputs().mean()).backward()
    assert alone.step.weight == 1.0
    (warning,) = warnings
    assert "the loss adds a sum over the batch and a mean. Ranks average" in warning
