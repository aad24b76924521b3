"""Buckets of gradients, with models and scripts of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.errors import ScriptError
from hvd_elastic.torch import gradient_buckets
from hvd_elastic.torch.optimizer import DistributedOptimizer
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.step import Pass
from tests.paths import COSTLY
from tests.unit.real_ranks import run_ranks, worlds


class Alike(LocalCommunicator):
    """The first of two ranks, of which the other does the same."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def sum_async(self, array: Any, name: str) -> Any:
        self.sent.append(array)
        return array.mul_(2)


@pytest.fixture
def ranks(alone: Context) -> Alike:
    alone.worker.communicator = communicator = Alike()
    return communicator


class Tied(nn.Module):
    """Two modules that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


class Images(nn.Module):
    """Convolutions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 2))
        self.layers: Any = layers.to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = inputs.repeat(1, 8).reshape(-1, 3, 4, 4)
        return self.layers(images.to(memory_format=torch.channels_last))


class Words(nn.Module):
    """Sparse gradients, a parameter without any element, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=True)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.words((inputs * 7).long() % 9) + self.none.sum()


class Wide(nn.Module):
    """A gradient of another type than its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).to(torch.bfloat16)
        for parameter in self.layer.parameters():
            parameter.grad_dtype = torch.float32

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs.to(torch.bfloat16)).float()


class Mixed(nn.Module):
    """Parameters of three types."""

    def __init__(self) -> None:
        super().__init__()
        kinds = torch.bfloat16, torch.float32, torch.float64
        self.layers = nn.ModuleList(nn.Linear(6, 6).to(kind) for kind in kinds)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs.to(next(layer.parameters()).dtype))
        return inputs.float()


class Waves(nn.Module):
    """A complex parameter, whose gradient is lazily conjugated, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer((torch.fft.fft(inputs) @ self.weight.conj()).abs())


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).abs()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("build", [Tied, Images, Words, Wide, Mixed, Waves])
def test_a_model_of_any_kind_learns_as_without_ranks(
    alone: Context,
    ranks: Alike,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], nn.Module],
    to_none: bool,
    bucket_bytes: int,
    passes: int,
) -> None:
    """With large gradients alone, in several buckets, and in as few as there can be."""
    if build is Wide and not hasattr(nn.Parameter, "grad_dtype"):
        pytest.skip("this PyTorch has no type of gradients")
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", bucket_bytes)
    torch.manual_seed(0)
    ours = build()
    torch.manual_seed(0)
    plain = build()
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(groups(ours), lr=0.1), ours)
    reference = torch.optim.SGD(groups(plain), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        reference.zero_grad()
        for number in range(passes):
            alone.hand_out(Pass(step_examples=8, weight=1 / passes))
            (plain(inputs(10 * step + number)).square().mean() / passes).backward()
            loss = ours(inputs(10 * step + number)).square().mean()
            if number < passes - 1:
                with optimizer.no_sync():
                    loss.backward()
                alone.step.next_batch(alone.worker.progress)
            else:
                loss.backward()
        optimizer.step()
        reference.step()
    assert {sent.dtype for sent in ranks.sent} <= {torch.float32, torch.float64}
    is_rough = any(each.dtype is torch.bfloat16 for each in ours.parameters())
    tolerance = 1e-2 if is_rough else 1e-5
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        assert mine.grad is not None
        assert mine.grad.stride() == mine.stride()


def new_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data.clone()


def clip_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3)


CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "there and back": lambda model: model.double().float(),
    "another type": lambda model: model.double(),
    "half the bytes": lambda model: model.bfloat16(),
    "other strides": lambda model: model.to(memory_format=torch.channels_last),
    "gradients": new_gradients,
    "weights": clip_weights,
}


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_model_that_is_converted_in_training_is_averaged_as_before(
    alone: Context, ranks: Alike, monkeypatch: pytest.MonkeyPatch, how: str, bucket_bytes: int
) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", bucket_bytes)
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Conv2d(3, 8, 2), nn.Tanh(), nn.Conv2d(8, 2, 3)))
    mine, plain = models
    sgd, reference = (torch.optim.SGD(each.parameters(), lr=0.1) for each in models)
    reference.param_groups[0]["lr"] /= 2
    optimizer = DistributedOptimizer(sgd, mine)
    for step in range(6):
        alone.hand_out(Pass(step_examples=8, weight=0.5))  # so the average is not the own gradient
        for model, each in ((mine, optimizer), (plain, reference)):
            each.zero_grad(set_to_none=step < 4)
            images = inputs(step).repeat(1, 8).reshape(-1, 3, 4, 4)
            model(images.to(next(model.parameters()).dtype)).square().mean().backward()
            each.step()
            if step in (1, 4):
                CONVERSIONS[how](model)
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.stride() == theirs.stride()


def test_a_gradient_that_gets_other_memory_while_it_is_averaged_is_refused(
    alone: Context, ranks: Alike
) -> None:
    (only,), optimizer = trained(alone, 3)
    assert only.grad is not None
    only.grad.data = only.grad.data.clamp(-1, 1)
    with pytest.raises(
        ScriptError, match=r"'parameter\.0' was changed while it was being averaged"
    ):
        optimizer.step()


def test_a_fused_optimizer_follows_the_strides_of_its_parameters(
    alone: Context, ranks: Alike
) -> None:
    """With moments in other strides it would change the wrong weights."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 8, 2)
        adam = torch.optim.Adam(layer.parameters(), lr=0.1, fused=fused)
        optimizer = DistributedOptimizer(adam, layer)
        for step in range(6):
            alone.hand_out(Pass(step_examples=8, weight=1.0))
            optimizer.zero_grad()
            layer(inputs(step).repeat(1, 8).reshape(-1, 3, 4, 4)).square().mean().backward()
            optimizer.step()
            if step == 2:
                layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ends.append(layer.weight.detach())
    torch.testing.assert_close(*ends)


def trained(alone: Context, *sizes: int, tiny: int = 0) -> tuple[list[nn.Parameter], Any]:
    """Return parameters of such sizes with gradients of 3, and their optimizer."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (*sizes, *[1] * tiny)]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    alone.hand_out(Pass(step_examples=8, weight=1.0))
    (3 * torch.cat([*parameters])).sum().backward()
    return parameters, optimizer


def test_ten_thousand_tiny_tensors_are_one_reduction(alone: Context, ranks: Alike) -> None:
    parameters, optimizer = trained(alone, tiny=10_000)
    optimizer.step()
    assert len(ranks.sent) == 1
    assert {parameter.item() for parameter in parameters} == {-3.0}


def test_a_tensor_larger_than_a_bucket_is_reduced_where_it_is(alone: Context, ranks: Alike) -> None:
    size = gradient_buckets.BUCKET_BYTES // 4 + 1
    (large, _), optimizer = trained(alone, size, 5)
    optimizer.synchronize()
    assert large.grad is not None
    assert large.grad.data_ptr() in {sent.data_ptr() for sent in ranks.sent}
    assert large.grad.eq(3).all()
    memory = large.grad.data_ptr()
    optimizer.step()
    alone.hand_out(Pass(step_examples=8, weight=1.0))
    optimizer.zero_grad(set_to_none=False)
    (5 * large).sum().backward()
    assert large.grad.data_ptr() == memory


def test_the_content_of_a_large_tensor_is_added_up_without_a_copy_of_it() -> None:
    large = torch.randn(6, 1 << 20)
    transposed, odd = large.t(), torch.randn(3, 5, 7, dtype=torch.complex64)[:, ::2]
    for tensor in (large, transposed, odd, odd.real.half(), torch.tensor(1.5), torch.empty(0)):
        whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        kind = {2: torch.int16, 4: torch.int32}[whole.itemsize]
        assert gradient_buckets.content_of(tensor) == int(whole.contiguous().view(kind).sum())
    with torch.profiler.profile(profile_memory=True) as seen:
        gradient_buckets.content_of(large)
        gradient_buckets.content_of(transposed)
    assert max(event.self_cpu_memory_usage for event in seen.events()) <= 12 << 20


@COSTLY
@pytest.mark.dist
def test_real_ranks_average_a_tensor_of_4_gb(stores: Any) -> None:
    """Each element of it; the ranks need 10 GB of memory together."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = """
from hvd_elastic.worker import context
from hvd_elastic.worker.step import Pass
import hvd_elastic.torch as hvd
os.environ.update(generations[0])
hvd.init()
ctx = context.current()
rank = ctx.worker.communicator.rank
weights = torch.nn.Parameter(torch.zeros((1 << 30) + 3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0))
ctx.hand_out(Pass(step_examples=4, weight=[0.5, 1.5][rank]))
((2 + rank) * weights.sum()).backward()
optimizer.synchronize()
said += [weights.grad.min().item(), weights.grad.max().item()]
"""
    mean = (0.5 * 2 + 1.5 * 3) / 2
    assert run_ranks(body, worlds(stores, 2)) == [[mean, mean]] * 2


@pytest.mark.dist
@pytest.mark.parametrize("compression", ["none", pytest.param("bf16", marks=COSTLY)])
def test_flags_travel_with_gradients(stores: Any, compression: str) -> None:
    """And a rank at the end of its epoch meets the gradients of one that takes another step."""
    pytest.importorskip("horovod.torch", reason="Horovod is not built")
    body = f"""
from hvd_elastic.communicator.interface import FLAGS
from hvd_elastic.errors import ScriptError
from hvd_elastic.worker import context
from hvd_elastic.worker.step import Pass
import hvd_elastic.torch as hvd
os.environ.update(generations[0])
hvd.init()
ctx = context.current()
rank, ring = ctx.worker.communicator.rank, ctx.worker.communicator
ctx.data.register(400)
weights = torch.nn.Parameter(torch.zeros(400_000)), torch.nn.Parameter(torch.zeros(3))
sgd = torch.optim.SGD(weights, lr=1.0)
optimizer = hvd.DistributedOptimizer(sgd, compression=hvd.Compression.{compression})
def step():
    ctx.hand_out(Pass(step_examples=4, weight=1.0))
    ((2 + rank) * (weights[0].sum() + weights[1].sum())).backward()
    optimizer.step()
    optimizer.zero_grad()
step()
step()
ctx.turn_epoch(0)  # where flags have no gradients to travel with
ctx.worker.stop_reason = "enough" * rank
step()
said += [ctx.worker.progress.stopped, ring.begun().get(FLAGS, 0), weights[0][0].item()]
ctx.worker.progress.stopped, ctx.worker.stop_reason = False, ""
try:
    ctx.turn_epoch(1) if rank else step()
except (ScriptError, GenerationBrokenError) as error:  # it is broken once the other rank has ended
    said.append(str(error) if rank else "")
"""
    found = run_ranks(body, worlds(stores, 2))
    assert [each[:3] for each in found] == [[True, 1, -7.5]] * 2
    assert len(found[0]) == 4, "the other rank has failed as well"
    assert "rank 1 of 2 is at the end of epoch 1, and other ranks take step 4 of it" in found[1][3]


def test_a_full_bucket_is_reduced_while_others_wait(
    alone: Context, ranks: Alike, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 100)
    alone.worker.progress.step = 3  # in 0, 1, 8, 64, … all are sent at the end
    first, last = nn.Parameter(torch.zeros(20)), nn.Parameter(torch.zeros(20))
    optimizer: Any = DistributedOptimizer(torch.optim.SGD([first, last], lr=1.0))
    alone.hand_out(Pass(step_examples=8, weight=1.0))
    last.sum().backward()
    assert len(ranks.sent) == 1
    first.sum().backward()
    assert len(ranks.sent) == 2
    optimizer.step()


def test_the_last_bucket_is_small(alone: Context, ranks: Alike) -> None:
    """Nothing hides it: the first layers, whose gradients come last. Others double in size."""
    quarter = gradient_buckets.BUCKET_BYTES // 4 // 4
    parameters, optimizer = trained(alone, *[quarter] * 9)
    optimizer.synchronize()
    last, *others = sorted(ranks.sent, key=torch.Tensor.numel)
    assert [sent.numel() // quarter for sent in (last, *others)] == [1, 2, 2, 4]
    assert parameters[0].grad is not None
    assert parameters[0].grad.data_ptr() == last.data_ptr()


@pytest.mark.parametrize("at", ["gradient", "before", "after"])
def test_a_hook_that_changes_a_gradient_in_place_is_averaged_or_refused(
    alone: Context, ranks: Alike, at: str
) -> None:
    """Never left on one rank: a hook that runs after the bucket is on its way is refused."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)

    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    if at == "gradient":
        layer.weight.register_hook(lambda gradient: gradient * 2)
    if at == "before":
        layer.weight.register_post_accumulate_grad_hook(double)
    optimizer = DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), layer)
    if at == "after":
        layer.weight.register_post_accumulate_grad_hook(double)
    alone.hand_out(Pass(step_examples=8, weight=1.0))
    layer(torch.ones(1, 1)).sum().backward()
    if at == "after":
        with pytest.raises(ScriptError, match="'weight' was changed while it was being averaged"):
            optimizer.step()
        return
    optimizer.step()
    assert layer.weight.item() == -2.0


def test_a_gradient_that_is_replaced_while_it_is_averaged_is_refused(
    alone: Context, ranks: Alike
) -> None:
    (only,), optimizer = trained(alone, 3)
    only.grad = torch.ones(3)
    with pytest.raises(ScriptError, match=r"'parameter\.0' was changed"):
        optimizer.step()


def test_a_parameter_that_is_put_into_a_group_later_is_refused(
    alone: Context, ranks: Alike
) -> None:
    _, optimizer = trained(alone, 3)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(1)))
    with pytest.raises(ScriptError, match="Give the optimizer all parameters before that"):
        optimizer.step()


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_is_unfrozen_within_a_step_takes_part_from_the_next_one(
    alone: Context, ranks: Alike, size: int
) -> None:
    ranks.size = size
    late, early = nn.Parameter(torch.zeros(1), requires_grad=False), nn.Parameter(torch.zeros(1))
    optimizer: Any = DistributedOptimizer(torch.optim.SGD([late, early], lr=1.0))
    for _ in range(2):
        alone.hand_out(Pass(step_examples=8, weight=1 / size))
        with optimizer.no_sync():
            (late + early).sum().backward()
        alone.step.next_batch(alone.worker.progress)
        late.requires_grad_(True)
        alone.hand_out(Pass(step_examples=8, weight=1 / size))
        (late + early).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (early.item(), late.item()) == (-4 / size, -2 / size)


class Other(Alike):
    """The other rank has parameters of its own, so Horovod refuses the first bucket."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self.told = told

    def wait(self, handle: Any) -> Any:
        if isinstance(handle, torch.Tensor):
            raise ScriptError("what the ranks exchange does not fit together: Mismatched shapes.")
        return handle

    def gather(self, array: Any, name: str) -> Any:
        if name != "hvd_elastic.parameters":
            return np.concatenate([array, array])
        mine = array.tobytes().decode()
        theirs = mine.replace(*self.told.split(" -> ")) if self.told else mine
        return np.frombuffer((mine + theirs).encode(), np.uint8)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("parameter.1 -> q", "parameter 'parameter.1': some have .*: rank 1 of 2 without it"),
        ("(5,) -> (6,)", r"'parameter.1': it is of shape \(5,\).*on rank 0, and of shape \(6,\)"),
        ("group 0 -> group 1", "'parameter.0': it is .* group 0 on rank 0, and .* group 1 on rank"),
        ("", "does not fit together"),
    ],
)
def test_the_parameter_that_ranks_disagree_about_is_named(
    alone: Context, told: str, message: str
) -> None:
    alone.worker.communicator = Other(told)
    _, optimizer = trained(alone, 3, 5)
    with pytest.raises(ScriptError, match=message):
        optimizer.step()


def test_parameters_in_another_order_are_other_buckets() -> None:
    """Though they have as many elements: gradients would be summed with those of others."""
    first, last = torch.zeros(3), torch.zeros(3)
    group = {first: 0, last: 0}
    bucket, *_ = gradient_buckets.divide({first: "a", last: "b"}, group)
    other, *_ = gradient_buckets.divide({last: "b", first: "a"}, group)
    assert bucket.to_send().shape != other.to_send().shape
