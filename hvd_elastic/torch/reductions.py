"""The reductions of one optimizer's gradients in a step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from hvd_elastic.communicator.interface import gradient_prefix
from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import plural
from hvd_elastic.torch.compression import Compression, Packed
from hvd_elastic.torch.gradient_buckets import (
    Bucket,
    carrier_of,
    carry_flags,
    description,
    divide,
    memory_of,
)
from hvd_elastic.worker.worker import Worker

_LOOKED_AT = frozenset((0, *(8**each for each in range(16))))
"""Numbers of steps that are looked at for changes that only the content of gradients shows."""


class _Noted(NamedTuple):
    """A parameter, the gradient that a backward pass has left, and what shows its changes."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    memory: tuple[int, int, int]


class Reductions:
    """Buckets of gradients, which are filled and summed over the ranks in each step.

    Args:
        worker: this process, whose communicator changes with the generation.
        names: names of the trained parameters.
        group_of: number of the parameter group of every parameter of the optimizer.
        compression: how gradients are sent.

    Attributes:
        is_open: whether gradients of a step are in the buckets, or on their way.
        is_filling: whether gradients of the last pass of a step arrive.
        carrier: bucket that can carry the flags of a step; None: gradients cannot.
        are_done: whether the gradients of the step hold their averages.
        checks: whether it is found out if they are finite.
        are_finite: whether the averages of the last step are finite, the same on all ranks.
        bad_here: parameters whose gradients of that step this rank has seen not to be finite, as
            its own passes have computed them.
    """

    def __init__(
        self,
        worker: Worker,
        names: dict[torch.Tensor, str],
        group_of: Mapping[torch.Tensor, int],
        compression: Compression,
    ) -> None:
        self._worker = worker
        self._names = names
        self._group_of = group_of
        self._compression = compression
        self._prefix = gradient_prefix(0)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[torch.Tensor, Bucket] = {}
        self._missing: dict[torch.Tensor, Bucket] = {}
        self._packed: dict[Bucket, Packed] = {}
        self._begun: dict[Bucket, tuple[list[Any], torch.Tensor]] = {}
        self._later: dict[Bucket, np.ndarray | None] = {}
        """Buckets whose reduction waits for :meth:`wait`, with their flags."""
        self._noted: dict[Bucket | None, list[_Noted]] = {}
        """Gradients that a backward pass has left where they are, by bucket; None: of one rank."""
        self.carrier: Bucket | None = None
        self._flags: Callable[[], np.ndarray] | None = None
        self.is_open = self.is_filling = self.are_done = False
        self.checks = worker.on_not_finite != "ignore"
        self.are_finite = True
        self.bad_here: list[torch.Tensor] = []

    def number(self, number: int) -> None:
        """Set the optimizer's number among those that train, from 0."""
        self._prefix = gradient_prefix(number)

    def divide_again(self) -> None:
        """Divide the parameters into other buckets from the next step on."""
        self._buckets = []

    def open(self) -> None:
        """Begin a step."""
        self.bad_here = []
        for bucket in self._buckets:
            bucket.follow()
        if not self._buckets:
            # The shape of the first bucket is compared, so it is sent as it is.
            apart = self._compression is not Compression.none
            self._buckets = divide(self._names, self._group_of, apart=apart)
            self._packed = {}
            self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
            self.carrier = carrier_of(self._buckets) if self.flags_meet else None
            self._missing = self._bucket_of.copy()
        self.is_open = True

    @property
    def flags_meet(self) -> str:
        """See :attr:`Averager.flags_meet`: the first bucket is in every step."""
        return f"{self._prefix}0" if carry_flags(self._group_of) else ""

    def arrived(self, parameter: torch.Tensor) -> Bucket | None:
        """Note that a gradient is computed; return its bucket if it was the last one of it.

        Raises:
            ScriptError: a gradient of the parameter has arrived before.
        """
        bucket = self._missing.pop(parameter, None)
        if bucket is None:  # just unfrozen: it takes part from the next step on
            self.refuse_if_reduced(parameter)
            return None
        bucket.missing -= 1
        return None if bucket.missing else bucket

    def refuse_if_reduced(self, parameter: torch.Tensor) -> None:
        """Raise ScriptError if a gradient is computed that has been reduced in this step."""
        if parameter in self._bucket_of:
            self.refuse_twice(parameter)

    def refuse_twice(self, parameter: torch.Tensor) -> NoReturn:
        """Raise ScriptError since a gradient is computed twice in a step."""
        raise ScriptError(
            f"the gradient of {self._names[parameter]!r} was computed twice before "
            "optimizer.step(). Call backward() once, for the sum of several losses, and step() "
            "after it; to add up gradients of several batches, put every backward() of a step but "
            "the last into `with optimizer.no_sync():`. Compute gradients that step() does not "
            "use, as SAM's first, by torch.autograd.grad(). A layer that is used twice under "
            "torch.utils.checkpoint needs use_reentrant=False there"
        )

    def pass_ends(self) -> None:
        """Note the gradients in buckets that the backward pass has not filled."""
        self._noted = {bucket: self._note(bucket.parameters) for bucket in self.waiting}

    @property
    def waiting(self) -> list[Bucket]:
        """Buckets that are not being reduced yet."""
        return [bucket for bucket in self._buckets if bucket not in self._begun]

    @property
    def are_begun(self) -> bool:
        """Return whether buckets are being reduced, or gradients of the last pass have arrived."""
        return bool(self._begun) or len(self._missing) < len(self._bucket_of)

    def scale(self, factor: float) -> None:
        """Multiply the gradients of earlier passes, which are in the buckets."""
        if factor != 1:
            for bucket in self.waiting:
                bucket.scale(factor)

    @property
    def looks(self) -> bool:
        """Return whether it is looked at whether the script changes gradients by ``grad.data``.

        The buckets of such a step are sent when all are full.
        """
        return self._worker.progress.step in _LOOKED_AT

    def reduce_bucket(
        self, bucket: Bucket, flags: np.ndarray | None = None, *, later: bool
    ) -> None:
        """Begin to sum a bucket over the ranks, and set the gradients to its views.

        Args:
            bucket: bucket with the gradients of the step.
            flags: this rank's flags of the step, which the bucket carries.
            later: send it in :meth:`wait`, and note what it holds for :meth:`refuse_changed`.
        """
        bucket.give(absent=True)
        if self.checks:
            self.bad_here += bucket.mark_if_not_finite()
        if later:
            bucket.note_contents()
            self._later[bucket], self._begun[bucket] = flags, ([], bucket.flat)
            return
        self._send(bucket, flags)

    def _send(self, bucket: Bucket, flags: np.ndarray | None) -> None:
        flat, communicator = bucket.to_send(), self._worker.communicator
        number = self._buckets.index(bucket)
        kind = self._compression.sent_as(flat.dtype) if number and len(flat) else None
        if kind is None:
            self._begun[bucket] = [self._reduce(number, flat, flags)], flat
            return
        packed = self._packed.get(bucket)
        if packed is None or not packed.fits(communicator.size):
            packed = self._packed[bucket] = Packed(kind, flat, communicator.size)
        name = f"{self._prefix}{number}."
        pieces = enumerate(packed.rows(flat))
        handles = [communicator.exchange_async(rows, f"{name}{piece}") for piece, rows in pieces]
        self._begun[bucket] = handles, flat

    def begin_left_out(self, *, unaveraged: bool = False) -> Any:
        """Begin to reduce a number in place of the first bucket, with another shape.

        Args:
            unaveraged: the step is not left out, but continues in ``no_sync()``: one more shape.
        """
        device = next(iter(self._group_of)).device
        number = torch.zeros((1,) * (3 + unaveraged), dtype=torch.float32, device=device)
        return self._reduce(0, number)

    def note_all(self) -> None:
        """Note the gradients that a backward pass has left whose end begins no reduction.

        So it is at a single rank, and with several optimizers.
        """
        self._noted = {None: self._note(self._names)}

    def _note(self, parameters: Iterable[torch.Tensor]) -> list[_Noted]:
        held = [(each, each.grad) for each in parameters if each.grad is not None]
        return [_Noted(each, grad, memory_of(grad, content=self.looks)) for each, grad in held]

    def refuse_changed(self) -> None:
        """Raise ScriptError if the script has changed a gradient before it was averaged.

        At a single rank too, in the steps that are looked at: the script will not stay alone.
        """
        noted, self._noted = self._noted, {}
        changed = [bucket.changed() for bucket in self._buckets if bucket in self._begun]
        for bucket, held in noted.items():
            for each in held if bucket not in self._begun else ():
                same = each.parameter.grad is each.gradient
                now = memory_of(each.gradient, content=self.looks)
                changed.append(None if same and now == each.memory else each.parameter)
        parameter = next((each for each in changed if each is not None), None)
        if parameter is not None:
            raise ScriptError(
                f"the gradient of {self._names[parameter]!r} was changed while it was being "
                "averaged over the ranks, so they would go apart; call optimizer.synchronize() "
                "after backward() and before clipping, or changing gradients in another way"
            )

    def wait(self, look: Callable[[Bucket], None] | None = None) -> np.ndarray | None:
        """Wait until all gradients hold the sums over the ranks.

        Args:
            look: called with each bucket as soon as it holds them, while others are awaited.

        Returns:
            The average of the flags of all ranks; None: the gradients carried none.

        Raises:
            ScriptError: the ranks have reduced tensors of different shapes.
        """
        for bucket, flags in self._later.items():
            self._send(bucket, flags)
        # The first bucket first: if ranks differ, its reduction fails and others may never end.
        communicator = self._worker.communicator
        wait = communicator.wait
        gathers: list[tuple[Bucket, list[Any]]] = []
        for number, bucket in enumerate(self._buckets):
            handles, _ = self._begun[bucket]
            packed = self._packed.get(bucket)
            if packed is None:
                wait(*handles)
                bucket.receive()
                if look is not None:
                    look(bucket)
                continue
            name = f"{self._prefix}{number}.sums."
            sums = enumerate(packed.sum(wait(handle)) for handle in handles)
            begun = [communicator.gather_async(part, f"{name}{piece}") for piece, part in sums]
            gathers.append((bucket, begun))
        for bucket, handles in gathers:
            self._packed[bucket].unpack(map(wait, handles), self._begun[bucket][1])
            bucket.receive()
            if look is not None:
                look(bucket)
        if self.checks:
            averages, compressed = self._buckets, self._packed  # 16 bits may overflow
            self.are_finite = all(each.is_finite(whole=each in compressed) for each in averages)
        told = None if self._flags is None else self._flags()
        self.clear()
        return told

    def begin_step(self) -> None:
        """Forget the gradients of the step before, which the script may have thrown away."""
        self.are_done = False
        self._noted.clear()

    def clear(self) -> None:
        """Forget the step: it has ended, or the ring is broken."""
        self._begun.clear()
        self._later.clear()
        self._noted.clear()
        if self.is_open:
            for bucket in self._buckets:
                bucket.open()
            self._missing = self._bucket_of.copy()
        self._flags = None
        self.is_open = self.is_filling = False

    def refuse_differences(self) -> None:
        """Compare the trained parameters of all ranks; all of them call this.

        Raises:
            ScriptError: they differ; names the first parameter that does.
        """
        own = json.dumps(description(self._names, self._group_of)) + "\n"
        told = self._worker.communicator.gather(
            np.frombuffer(own.encode(), np.uint8).copy(), "hvd_elastic.parameters"
        )
        ranks: list[dict[str, str]] = list(map(json.loads, told.tobytes().splitlines()))
        for name in dict.fromkeys(itertools.chain(*ranks)):
            found = [each.get(name) for each in ranks]
            other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
            if other is None:
                continue
            problem = f"the ranks disagree about parameter {name!r}: "
            if None not in found:
                raise ScriptError(
                    f"{problem}it is {found[0]} on rank 0, and {found[other]} on rank {other}. "
                    "Make the same model and the same parameter groups on all ranks"
                )
            frozen = [str(rank) for rank, each in enumerate(found) if each is None]
            raise ScriptError(
                f"{problem}some have frozen it (requires_grad=False) and others not, or their "
                f"models differ: {plural('rank', len(frozen))} {', '.join(frozen)} of {len(ranks)} "
                "without it. Freeze it on all ranks between the same two steps"
            )
        for names in zip(*ranks, strict=True):
            if len(set(names)) > 1:
                raise ScriptError(
                    f"the ranks disagree about the order of the parameters: where rank 0 has "
                    f"{names[0]!r}, others do not. Give the optimizer its parameters in the same "
                    "order on all ranks, for instance not from a set"
                )

    def _reduce(self, number: int, tensor: torch.Tensor, flags: np.ndarray | None = None) -> Any:
        communicator, name = self._worker.communicator, f"{self._prefix}{number}"
        if flags is None:
            return communicator.sum_async(tensor, name)
        handle, self._flags = communicator.sum_with_flags_async(tensor, flags, name)
        return handle
