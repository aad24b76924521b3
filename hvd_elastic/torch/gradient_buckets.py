"""Flat memory for the gradients of several parameters, which are reduced as one tensor."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from hvd_elastic.communicator.buckets import divide as cut_into_kinds
from hvd_elastic.torch.finite_check import is_finite
from hvd_elastic.worker.step import MOST_FLAGS

BUCKET_BYTES = 4 << 20
"""Largest bucket. A smaller one begins to be reduced earlier in the backward pass, and a larger one
takes less time for each byte."""
_TINY = 1 << 14
"""Mean number of elements below which gradients are copied in one call and then scaled together;
larger ones are scaled while they are copied."""
_IN_CACHE = 1 << 17
"""Elements of a large gradient that are scaled and looked at together: they fit into the cache of a
core, so that the look reads no memory."""
_PADDINGS = 1024
"""Number of different paddings of the first bucket, and the most elements of one."""
_EXACT = (torch.float32, torch.float64)
_REDUCED_AS = {torch.bfloat16: torch.float32}
"""Types that Horovod's PyTorch binding lacks, with those that they are reduced as."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of whole numbers by size [bytes]."""
_SUMMED = 1 << 20
"""Numbers of which the bits are added up at a time."""


class Bucket:
    """Gradients of parameters of one parameter group, type and device.

    In each step gradients are added to it, times a factor. Then they are the parameters' gradients
    again, as views of its memory, which is reduced in place. A parameter of at least
    ``BUCKET_BYTES`` has a bucket to itself, whose memory is that of the step's gradient.

    Args:
        parameters: its parameters, none or more.
        like: tensor with the type and the device of the gradients.
        padding: number of elements after the gradients.

    Attributes:
        padding: number of elements after the gradients.
        missing: number of gradients that the backward pass has yet to compute.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], like: torch.Tensor, padding: int = 0
    ) -> None:
        self.parameters = parameters
        self.missing = 0
        self._views: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._contents: list[int] = []
        self._sent: torch.Tensor | None = None
        self.padding = padding
        self._in_place = any(map(is_large, parameters))
        sizes = [parameter.numel() for parameter in parameters]
        elements = 0 if self._in_place else sum(sizes) + padding
        self._flat = torch.zeros(elements, dtype=_gradient_type(like), device=like.device)
        self._pieces: Sequence[torch.Tensor] = ()
        self._forms = [(parameter.shape, _strides(parameter)) for parameter in parameters]
        if not self._in_place:
            self._pieces = self._flat.split([*sizes, padding])
            self._make_views()
        self._at_once = bool(self._views) and (
            self._flat.is_cuda or elements < _TINY * len(parameters)
        )
        self.open()

    def _make_views(self) -> None:
        # `data`, since a view has the version counter of the whole bucket.
        pieces = zip(self._pieces, self._forms, strict=False)
        self._views = [piece.as_strided(*form).data for piece, form in pieces]
        self._addresses = _addresses(self._views)

    def follow(self) -> None:
        """Renew the views if the script has given gradients other memory since the last step.

        ``p.grad.data = ...`` and ``model.double()`` do: they keep the object, which is a view here.
        """
        if not self._in_place and _addresses(self._views) != self._addresses:
            self._make_views()

    def open(self) -> None:
        """Begin a step: no gradient is here yet."""
        self.missing = len(self.parameters)
        self._held = [False] * len(self.parameters)
        self._finite: bool | None = None
        self._contents = []
        if self._in_place:  # its gradient may be freed
            self._views, self._flat = [self._flat[:0]], self._flat[:0]

    @property
    def holds(self) -> bool:
        """Return whether a gradient of the step is here."""
        return any(self._held)

    @torch.no_grad()
    def add_gradients(
        self,
        factor: float,
        look: Callable[[torch.Tensor], None] | None = None,
        *,
        checks: bool = False,
    ) -> None:
        """Move the parameters' gradients here, times a factor; add them to those of before.

        Args:
            look: called with all that was moved, in flat pieces, each soon after it was written,
                while the processor has it in its cache; not allowed if gradients of before are
                here.
            checks: see in the same way whether the gradients are finite.
        """
        self._finite = True if checks and not (self.holds or self._flat.is_cuda) else None
        found = [each.grad for each in self.parameters if each.grad is not None]
        whole = len(found) == len(self.parameters)
        if self._at_once and whole and all(map(_is_dense, found)) and not self.holds:
            torch._foreach_copy_(self._views, found)
            flat = self._flat[: self._flat.numel() - self.padding]
            for piece in (flat,) if self._finite is None else flat.split(_IN_CACHE):
                _multiply(piece, factor, out=piece)
                self._check(piece)
            self._held = [True] * len(found)
        else:
            begin = end = 0  # elements that were moved, and not looked at yet
            for number, parameter in enumerate(self.parameters):
                gradient = parameter.grad
                if gradient is not None:
                    self._add_gradient(number, gradient, factor, look)
                    end += parameter.numel()
                if not self._in_place and (gradient is None or end - begin >= _IN_CACHE):
                    self._check(self._flat[begin:end])
                    begin = end = end + parameter.numel() * (gradient is None)
            if not self._in_place:
                self._check(self._flat[begin:end])
        if look is not None and not self._in_place:
            pieces = zip(self._pieces, self._held, strict=False)
            for piece in [self.flat] if whole else [each for each, held in pieces if held]:
                look(piece)
        for parameter in self.parameters:
            parameter.grad = None

    def _add_gradient(
        self,
        number: int,
        gradient: torch.Tensor,
        factor: float,
        look: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        if not _is_dense(gradient):
            gradient = gradient.to_dense()
        if self._held[number]:
            if factor:
                self._views[number].add_(gradient, alpha=factor)
            return
        self._held[number] = True
        if not self._in_place:
            _multiply(gradient, factor, out=self._views[number])
            return
        self._adopt(gradient.detach().resolve_conj())
        if self._finite and look is None and factor and self._flat.dtype is torch.float32:
            bad = torch.zeros(())
            # One pass over the memory; GradScaler unscales by it.
            torch._amp_foreach_non_finite_check_and_unscale_(
                [self._flat], bad, torch.tensor(factor)
            )
            self._finite = not bad.item()
            return
        whole = look is None and self._finite is None
        for piece in (self._flat,) if whole else self._flat.split(_IN_CACHE):
            _multiply(piece, factor, out=piece)
            self._check(piece)
            if look is not None:
                look(piece)

    def _check(self, piece: torch.Tensor) -> None:
        if self._finite and piece.numel():
            self._finite = is_finite(piece)

    def _adopt(self, gradient: torch.Tensor) -> None:
        """Use a gradient's memory as this bucket's; all ranks have to order it alike."""
        (parameter,) = self.parameters
        if gradient.stride() != _strides(parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        self._views, self._addresses = [gradient], [gradient.data_ptr()]
        self._flat = gradient.data.as_strided((gradient.numel(),), (1,))

    def mark_if_not_finite(self) -> list[torch.Tensor]:
        """Make the first number NaN if one of this rank's gradients is not finite.

        Returns:
            The parameters whose gradients are not finite on this rank.

        The weighted sum of finite gradients is finite, so after the reduction the first number
        tells of all ranks. On a GPU all are looked at after the reduction, for which this process
        waits anyway.
        """
        if self._flat.is_cuda or not self.flat.numel():
            return []
        finite = is_finite(self.flat) if self._finite is None else self._finite
        if finite:
            return []
        each = zip(self.parameters, self._views, strict=True)
        found = [parameter for parameter, view in each if not is_finite(view)]
        self._flat[0] = torch.nan
        return found

    def is_finite(self, *, whole: bool) -> bool:
        """Return whether the averages are finite; ``whole``: look at all of them."""
        if not self.flat.numel():
            return True
        return is_finite(self.flat if whole or self._flat.is_cuda else self._flat[:1])

    def scale(self, factor: float) -> None:
        """Multiply what is here."""
        if self.holds:
            _multiply(self._flat, factor, out=self._flat)

    @torch.no_grad()
    def give(self, *, absent: bool) -> None:
        """Set the parameters' gradients to those here; ``absent``: and to 0 where there is none."""
        for number, parameter in enumerate(self.parameters):
            if not self._held[number]:
                if not absent:
                    continue
                self._add_gradient(number, torch.zeros_like(parameter), 0.0)
            parameter.grad = self._views[number]
        self._versions = [view._version for view in self._views]

    def note_contents(self) -> None:
        """Have :meth:`changed` find what is changed by ``grad.data.clamp_()`` from now on."""
        self._contents = [*map(content_of, self._views)]

    def changed(self) -> torch.Tensor | None:
        """Return a parameter whose gradient was changed or replaced since :meth:`give`, or None."""
        contents = zip(self._contents, self.parameters, map(content_of, self._views), strict=False)
        for content, parameter, now in contents:
            if now != content:
                return parameter
        addresses = _addresses(self._views)
        found = zip(
            *(self.parameters, self._views, self._versions, addresses, self._addresses), strict=True
        )
        for parameter, view, version, address, given in found:
            if parameter.grad is not view or view._version != version or address != given:
                return parameter
        return None

    @property
    def flat(self) -> torch.Tensor:
        """The gradients of the step in flat memory, without the padding."""
        return self._flat[: len(self._flat) - self.padding]

    def to_send(self) -> torch.Tensor:
        """Return the flat tensor to be reduced in place."""
        if self._flat.is_complex():
            return torch.view_as_real(self._flat).view(-1)
        kind = _REDUCED_AS.get(self._flat.dtype)
        if kind is None:
            return self._flat
        if self._sent is None:
            self._sent = torch.empty_like(self._flat, dtype=kind)
        return self._sent.copy_(self._flat)

    def receive(self) -> None:
        """Take over what the tensor of :meth:`to_send` holds by now."""
        if self._sent is not None:
            self._flat.copy_(self._sent)


def divide(
    names: dict[torch.Tensor, str], group_of: Mapping[torch.Tensor, int], *, apart: bool = False
) -> list[Bucket]:
    """Divide parameters into buckets, in the reverse of their order.

    The backward pass computes gradients in about this order. It follows from the parameters alone,
    so all ranks have the same buckets without being told, newcomers too. Where they differ the
    first bucket does: its padding is a hash of all parameters, so that Horovod reports different
    shapes on all ranks, even if the parameters have as many elements.

    Args:
        names: parameters that require a gradient, with their names.
        group_of: number of the parameter group of every parameter of the optimizer.
        apart: whether the first bucket has no parameter in any case.

    Returns:
        The buckets; the first is never one of a large parameter, and may have no parameter. It has
        room for flags, and so has the last one of small parameters unless ``apart``.
    """
    order = [*reversed(names)]
    kinds = [(group_of[each], each.device, _gradient_type(each)) for each in order]
    found = cut_into_kinds(kinds, [*map(_bytes, order)], BUCKET_BYTES)
    several = [[order[index] for index in indices] for indices in found]
    small = [each for each in several if not is_large(each[0])]
    large = [each for each in several if is_large(each[0])]
    first, *others = small if small and not apart else [[], *small]
    described = "\n".join(f"{name} {text}" for name, text in description(names, group_of).items())
    padding = MOST_FLAGS + 1 + zlib.crc32(described.encode()) % _PADDINGS
    head = Bucket(first, next(iter(first or group_of)), padding)
    room = 0 if apart else MOST_FLAGS
    following = [Bucket(each, each[0], room * (each is others[-1])) for each in others]
    return [head, *following, *(Bucket(each, each[0]) for each in large)]


def carrier_of(buckets: Sequence[Bucket]) -> Bucket:
    """Return the bucket with room for the flags of a step that is filled last."""
    return next(bucket for bucket in reversed(buckets) if bucket.padding >= MOST_FLAGS)


def carry_flags(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether gradients of these parameters can carry flags, which are float32 on a CPU."""
    return all(not p.is_cuda and _gradient_type(p) in _EXACT for p in parameters)


def description(
    names: Mapping[torch.Tensor, str], group_of: Mapping[torch.Tensor, int]
) -> dict[str, str]:
    """Return by name what ranks have to have in common of each parameter, in words."""
    return {
        name: f"of shape {tuple(parameter.shape)}, strides {_strides(parameter)} and type "
        f"{_gradient_type(parameter)} in parameter group {group_of[parameter]}"
        for parameter, name in names.items()
    }


def is_large(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a bucket to itself."""
    return _bytes(parameter) >= BUCKET_BYTES


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * _gradient_type(parameter).itemsize


def _gradient_type(parameter: torch.Tensor) -> torch.dtype:
    # The attribute came with PyTorch 2.10.
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient: its own, or those of compact memory."""
    return torch.empty_like(parameter, device="meta").stride()


def memory_of(tensor: torch.Tensor, *, content: bool) -> tuple[int, int, int]:
    """Return what changes if a gradient or parameter is changed in place or given other memory.

    ``content``: also through its ``data``; see :func:`content_of`.
    """
    address = tensor.data_ptr() if _is_dense(tensor) else 0
    return tensor._version, address, content_of(tensor) if content else 0


@torch.no_grad()
def content_of(tensor: torch.Tensor) -> int:
    """Return a sum of the bits of a tensor, which changes with any of its numbers.

    It shows what its version does not: ``tensor.data`` is another tensor with the same memory.
    """
    if not _is_dense(tensor):
        return 0
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = parts.view(_BITS[parts.itemsize])
    if bits.numel() <= _SUMMED:
        return int(bits.sum())
    # Processors add whole numbers up in a copy of 64 bits each, so little is added up at a time.
    bits = bits.view(-1) if bits.is_contiguous() else bits
    rows = max(1, _SUMMED * len(bits) // bits.numel())
    return int(torch.stack([part.sum() for part in bits.split(rows)]).sum())


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [*map(torch.Tensor.data_ptr, tensors)]


def _is_dense(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided


def _multiply(gradient: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    if factor:
        torch.mul(gradient, factor, out=out)
    else:
        out.zero_()  # a multiplication by 0 would keep NaN and infinity
