"""Gradients in 16 bits between the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.torch import compression, gradient_buckets
from hvd_elastic.torch.compression import Compression, Packed
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.step import Pass
from tests.unit.real_ranks import run_ranks, worlds
from tests.unit.torch.test_gradient_buckets import Alike

KINDS = [Compression.fp16, Compression.bf16]


@pytest.mark.parametrize("ranks", [2, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_the_same_sum_with_one_rounding_of_it(
    monkeypatch: pytest.MonkeyPatch, kind: Compression, ranks: int
) -> None:
    monkeypatch.setattr(compression, "_PIECE", 1000)
    torch.manual_seed(ranks)
    flats = [torch.rand(1700) for _ in range(ranks)]
    assert kind.value is not None
    packed = [Packed(kind.value, flat, ranks) for flat in flats]
    rows = [list(each.rows(flat)) for each, flat in zip(packed, flats, strict=True)]
    joined = [
        torch.cat(
            [own.sum(torch.stack([row[rank] for row in piece])) for rank, own in enumerate(packed)]
        )
        for piece in zip(*rows, strict=True)
    ]
    exact = torch.stack([flat.to(kind.value).double() for flat in flats]).sum(0)
    for each, flat in zip(packed, flats, strict=True):
        each.unpack(joined, flat)
    for flat in flats:
        assert torch.equal(flat, flats[0])
        torch.testing.assert_close(
            flat.double(), exact, rtol=torch.finfo(kind.value).eps, atol=1e-6
        )


class AlikePacked(Alike):
    """It packs its gradients as well."""

    def exchange_async(self, array: Any, name: str) -> Any:
        self.sent.append(array)
        self._rows = array.clone()
        return torch.stack([array[0], array[0]])

    def gather(self, array: Any, name: str) -> Any:
        if isinstance(array, np.ndarray):
            return np.concatenate([array, array])
        bits = self._rows.view(torch.bfloat16) if self.bf16 else self._rows
        return torch.cat([array, (2 * bits[1].float()).to(bits.dtype).view(torch.float16)])

    bf16 = False


@pytest.mark.parametrize("kind", KINDS)
def test_large_and_wide_gradients_alone_are_packed(
    alone: Context, monkeypatch: pytest.MonkeyPatch, kind: Compression
) -> None:
    """One parameter is larger than a bucket; float16 and bfloat16 ones are sent as without it."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 100)
    alone.worker.communicator = ranks = AlikePacked()
    ranks.bf16 = kind is Compression.bf16
    sizes = {"large": (60, torch.float32), "half": (9, torch.float16)}
    parameters = {
        name: torch.nn.Parameter(torch.zeros(n, dtype=t)) for name, (n, t) in sizes.items()
    }
    sgd = torch.optim.SGD(parameters.values(), lr=1.0)
    optimizer: Any = hvd.DistributedOptimizer(sgd, compression=kind)
    for _ in range(2):
        optimizer.zero_grad()
        alone.hand_out(Pass(step_examples=8, weight=1.0))
        (3 * torch.cat([each.float() for each in parameters.values()])).sum().backward()
        optimizer.step()
    assert {*parameters["large"].tolist(), *parameters["half"].tolist()} == {-6.0}
    elements = sorted(each.numel() for each in ranks.sent[:3] if each.dim() > 1)
    assert elements == [60]


def test_what_is_no_compression_is_refused(alone: Context) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ScriptError, match=r"compression='bf16'\): use none, fp16 or bf16 of hvd.C"):
        hvd.DistributedOptimizer(sgd, compression="bf16")  # type: ignore[arg-type]


def test_the_noise_scale_is_that_of_whole_gradients(alone: Context) -> None:
    """Norms of a pass are those before packing; those of the mean differ by a rounding."""
    rows = []
    parameter = torch.nn.Parameter(torch.zeros(50))
    for kind in Compression:
        alone.worker.communicator = ranks = AlikePacked()
        ranks.bf16 = kind is Compression.bf16
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=kind)
        planner = AdaptivePlanner(BatchLimits(8, 16), examples=64)
        alone.register_data(64, 0, planner)
        (averager,) = alone.worker.averagers
        alone.hand_out(Pass(step_examples=8, weight=1.0, examples=4))
        (parameter * torch.linspace(0.1, 7, 50)).sum().backward()
        averager.synchronize()  # type: ignore[attr-defined]
        assert planner._statistics is not None
        (row,) = planner._statistics.drain()
        rows.append(row)
        alone.worker.averagers.reset()
        alone.step.forget()
    whole, *packed = rows
    for row in packed:
        assert row[3] == whole[3]
        assert row[4] == pytest.approx(whole[4], rel=1e-2)


@pytest.mark.dist
def test_real_ranks_learn_alike_and_tell_what_differs(stores: Any) -> None:
    """Bit for bit, with unequal weights; then one freezes what the other trains."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker import context
from hvd_elastic.worker.step import Pass
from hvd_elastic.torch import compression
import hvd_elastic.torch as hvd
os.environ.update(generations[0])
hvd.init()
ctx = context.current()
rank = ctx.worker.communicator.rank
for kind in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
    compression._PIECE = 1 << 20
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1100, 1000), torch.nn.Linear(1000, 7))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model, compression=kind)
    for step in range(3):
        ctx.hand_out(Pass(step_examples=4, weight=[0.5, 1.5][rank]))
        drawn = torch.Generator().manual_seed(step + rank)
        inputs = torch.randn(1 + 2 * rank, 1100, generator=drawn)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    said.append([each.double().sum().item() for each in model.parameters()])
model[1].bias.requires_grad_(rank == 1)
ctx.hand_out(Pass(step_examples=4, weight=1.0))
optimizer.zero_grad()
model(inputs).sum().backward()
try:
    optimizer.step()
except ScriptError as error:
    said.append(str(error))
"""
    first, second = run_ranks(body, worlds(stores, 2))
    assert first == second
    whole, fp16, bf16, differs = first
    assert fp16 == pytest.approx(whole, rel=1e-2, abs=1e-2)
    assert bf16 == pytest.approx(whole, rel=1e-2, abs=1e-2)
    assert "disagree about parameter '1.bias': some have frozen it" in differs
