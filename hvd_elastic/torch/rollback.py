"""Undoes what the script changed in its state when a step, or the code between two epochs, fails.

Parameters and optimizer state are never copied: they change in an optimizer's step alone, so at all
times they are those of a whole step. Everything else in the state is copied when a loop body, or
the loader's loop, has ended, and put back when what follows fails before its end.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from hvd_elastic.errors import ScriptError
from hvd_elastic.training.progress import Phase, Progress

if TYPE_CHECKING:
    from hvd_elastic.torch.context import Context

__all__ = ["Rollback", "Snapshot", "SnapshotSource", "StepVoidedError"]

_LARGE_BYTES = 1 << 20
"""Helper objects whose state is larger (a copy of the model, say) are copied at the end of an epoch
and not after each step: a copy of 1 MiB takes less than 1 % of a step of 30 ms."""


class StepVoidedError(RuntimeError):
    """The step was called off on all ranks, since a pass did not fit into the memory of one.

    Raised by the optimizer's step, and caught by ``hvd.run``, so that all ranks leave the loop body
    at the same place and enter the function again.
    """


@runtime_checkable
class SnapshotSource(Protocol):
    """An object of the library that copies itself at less cost than by its ``state_dict()``."""

    def snapshot(self) -> Any: ...

    def roll_back(self, values: Any) -> None: ...


class Snapshot:
    """What a state holds at one point, except parameters and optimizer state.

    Args:
        plain: the plain values.
        objects: name → object with ``state_dict()`` and ``load_state_dict()``. Names that begin
            with an underscore are the library's own, and copied only if they are a
            :class:`SnapshotSource`.
        large: names of objects known to be too large to be copied after each step; added to.
        tensors: copy buffers, modules that no optimizer trains, and large objects too. For the end
            of an epoch.

    Raises:
        ScriptError: a value cannot be copied; names it.
    """

    def __init__(
        self,
        plain: Mapping[str, Any],
        objects: Mapping[str, Any],
        large: set[str],
        *,
        tensors: bool = False,
    ) -> None:
        self._plain = {name: _dump(name, value) for name, value in plain.items()}
        self._dumped: dict[str, bytes] = {}
        self._own: dict[str, Any] = {}
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, item in objects.items():
            if name.startswith("_"):
                if isinstance(item, SnapshotSource):
                    self._own[name] = item.snapshot()
            elif isinstance(item, torch.optim.Optimizer):
                self._dumped[name] = _dump(name, [_options(group) for group in item.param_groups])
            elif not isinstance(item, torch.nn.Module) and (tensors or name not in large):
                dumped = _dump(name, item.state_dict())
                if len(dumped) > _LARGE_BYTES:
                    large.add(name)
                if tensors or name not in large:
                    self._dumped[name] = dumped
        if tensors:
            self._tensors = [
                (tensor, tensor.detach().to("cpu", copy=True))
                for tensor in _untrained(objects)
                if not tensor.is_inference()
            ]

    def restore(self, plain: dict[str, Any], objects: Mapping[str, Any]) -> None:
        """Put everything back, in place; plain values that came since are removed."""
        for name in [name for name in plain if name not in self._plain]:
            del plain[name]
        for name, dumped in self._plain.items():
            plain[name] = _put_back(plain.get(name), _load(dumped))
        for name, item in objects.items():
            if name in self._own:
                item.roll_back(self._own[name])
            elif name not in self._dumped:
                continue
            elif isinstance(item, torch.optim.Optimizer):
                saved = _load(self._dumped[name])
                for group, options in zip(item.param_groups, saved, strict=False):
                    _set_options(group, options)
            else:
                item.load_state_dict(_load(self._dumped[name]))
        for tensor, copied in self._tensors:
            _copy(tensor, copied)

    def differences(self, later: Snapshot) -> set[str]:
        """Return the names of the values that another snapshot has otherwise."""
        pairs = ((self._plain, later._plain), (self._dumped, later._dumped))
        return {
            name
            for mine, theirs in pairs
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        }


def _dump(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle and what it calls raise many kinds
        raise ScriptError(
            f"State: {name!r} cannot be copied ({type(error).__name__}: {error}), which is needed "
            "to undo a step that fails. Keep numbers, strings, lists, dicts and tensors in it"
        ) from error


def _load(dumped: bytes) -> Any:
    return pickle.loads(dumped)  # noqa: S301  (it never left this process)


def _put_back(present: Any, saved: Any) -> Any:
    """Return what was saved: where possible as the present object, which the script may hold."""
    if type(present) is not type(saved):
        return saved
    if isinstance(saved, list):
        present[:] = saved
    elif isinstance(saved, (dict, set)):
        present.clear()
        present.update(saved)
    elif isinstance(saved, torch.Tensor) and present.shape == saved.shape:
        _copy(present, saved)
    else:
        return saved
    return present


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Learning rate and the like."""
    return {name: value for name, value in group.items() if name != "params"}


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for name, value in options.items():
        present = group.get(name)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            _copy(present, value)  # a compiled step holds on to the tensor
        else:
            group[name] = value


def _untrained(objects: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the buffers of all modules, and all tensors of modules that no optimizer trains."""
    trained = {
        id(parameter)
        for item in objects.values()
        if isinstance(item, torch.optim.Optimizer)
        for group in item.param_groups
        for parameter in group["params"]
    }
    for item in objects.values():
        if isinstance(item, torch.nn.Module):
            yield from item.buffers()
            parameters = list(item.parameters())
            if not any(id(parameter) in trained for parameter in parameters):
                yield from parameters


_PARTIAL = 0
_NEWNESS = {Phase.DONE: 1, Phase.LOOP: 2, Phase.HEAD: 3, Phase.TAIL: 4}
"""Which survivor's state is taken by all, among those that made the same steps: the higher one's.

A rank that failed between its optimizer's step and the end of the loop body comes last, since the
rest of that body is never run. Of ranks that went back to different parts of an epoch, those that
are least far come first, so that no rank skips a part of which another has not seen the end.
"""


class Rollback:
    """The point to which one process goes back when it fails.

    The script is told apart into loop bodies and the parts before and after the loader's loop. Each
    of them has an effect on the state once: a part that fails is undone and run again. One
    exception: when a collective of the script's own fails between the optimizer's step and the end
    of the loop body, the step cannot be undone; what the body did before stays, and the rest of it
    is not run.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._at = Progress()
        self._steps = 0
        self._entered = False
        self._loop = 0
        self._loops_in_turn = 0
        self._left: Snapshot | None = None
        self._epoch_end: tuple[Progress, Snapshot] | None = None
        """The end of the last loop, until a step of the next epoch shows that no rank is before
        it any more: so what rank 0 alone does in the tail is done, whoever dies there."""
        self._collective: tuple[str, Snapshot, int] | None = None
        self._warned = False
        self.partial = False
        """Whether this rank failed after a step that cannot be undone, so others may be further."""

    def save(self, snapshot: Snapshot | None = None) -> None:
        """Make the state as it is now, or was at an earlier snapshot, the point to go back to."""
        state = self._context.state
        if state is not None:
            state.save_values(snapshot)
            self._at, self._steps = replace(self._context.progress), self._steps_made()

    def synchronized(self) -> None:
        """All ranks have taken the state of one of them."""
        self.partial = False
        self._entered = True
        self._epoch_end = None
        self._save_part()

    @property
    def newness(self) -> int:
        """Which survivor is preferred, among those that made the same steps: the highest."""
        return _PARTIAL if self.partial else _NEWNESS[self._at.phase]

    def fail(self) -> None:
        """Go back to the end of the last loop body, or of the last loop if no step followed it."""
        context = self._context
        self._left = self._collective = None
        if (context.progress.step, self._steps_made()) != (self._at.step, self._steps):
            self.partial = True
            self._epoch_end = None
            self.save()
        elif context.state is not None:
            if self._epoch_end is not None:
                self._at, snapshot = self._epoch_end
                context.state.save_values(snapshot)
            context.state.roll_back()
            context.progress = replace(self._at)

    # -- the script's parts ----------------------------------------------------------------

    def function_entered(self) -> None:
        """The training function is called, for the first time or again."""
        self._entered = True
        self._left = None
        self._loops_in_turn = 0
        state = self._context.state
        if state is not None and self._context.progress.phase is Phase.LOOP:
            # What the head of the epoch does to buffers and the like is to be undone as well.
            state.roll_back()
            state.save_values(state.take_snapshot(tensors=True))

    def epochs_begin(self) -> None:
        """``epochs()`` is called: what the function did before was done in an earlier call."""
        progress, state = self._context.progress, self._context.state
        begins = progress.step == 0 and progress.epoch == 0 and progress.phase is Phase.HEAD
        if self._entered and self._context.elastic and not begins and state is not None:
            state.roll_back()

    def function_returned(self) -> Phase:
        """The training function has returned; return the part of the epoch it was in."""
        progress = self._context.progress
        phase, progress.phase = progress.phase, Phase.DONE
        self._left = None
        self.save()
        return phase

    def loop_begins(self) -> int:
        """The loader is iterated; return the number of this loop, or 0 if nothing is left to read.

        Where the function was entered in the middle of an epoch, what it did before the loop has
        had its effect already, so the state is put back to what it was in the loop, or after it.
        """
        context = self._context
        context.refuse_outside()
        again, self._entered = self._entered, False
        self._left = None
        self._loop += 1
        self._loops_in_turn += 1
        if not again or context.progress.phase is Phase.HEAD:
            context.progress.phase = Phase.LOOP
            self.save()
            return self._loop
        if context.state is not None:
            context.state.roll_back()
        return self._loop if context.progress.phase is Phase.LOOP else 0

    def body_ended(self) -> None:
        """The loop body has come back for the next step."""
        context = self._context
        if context.voided:
            if context.state is not None:
                context.state.roll_back()
        else:
            self._warn_of_late_changes()
            self._epoch_end = None
            self.save()
        self._collective = None
        self._entered = False

    def loop_ended(self) -> None:
        """The loader has handed out the last batch of the epoch, and its body has ended."""
        self._context.progress.phase = Phase.TAIL
        self._save_part()

    def loop_left(self, loop: int) -> None:
        """The loop was left early: by ``break`` or ``return``, or by an exception.

        One that is left long ago says so late. A script that goes on with further loops in the same
        turn of ``epochs()`` has not ended the epoch by leaving one.
        """
        if loop != self._loop or self._loops_in_turn > 1:
            return
        self._entered = False
        self._context.epoch_left()
        state = self._context.state
        # After a failure the device may never finish what a copy would wait for.
        if state is not None and self._context.in_train and not self._context.engine.broken:
            self._left = state.take_snapshot(tensors=True)

    def collective_begins(self, name: str, *, changes_state: bool = False) -> None:
        """The script calls a collective of its own; ``changes_state``: that is its purpose."""
        context, state = self._context, self._context.state
        if state is None or not context.in_train:
            return
        if self._left is not None:
            context.progress.phase = Phase.TAIL
            self._save_part(self._left)
            self._left = None
        elif not (self._warned or changes_state or context.engine.size == 1) and (
            context.progress.phase is Phase.LOOP and context.progress.step != self._at.step
        ):
            self._collective = (name, state.take_snapshot(), state.module_versions())

    def epoch_turns(self, epoch: int) -> None:
        """``epochs()`` is asked for the next epoch."""
        context = self._context
        self._left = None
        self._loops_in_turn = 0
        context.mark_consumed()
        if context.progress.epoch == epoch:  # else a state taken over on the way is in another one
            context.progress.next_epoch()
        self.save()

    def _save_part(self, snapshot: Snapshot | None = None) -> None:
        context = self._context
        if context.progress.phase is Phase.TAIL and context.state is not None:
            snapshot = snapshot or context.state.take_snapshot(tensors=True)
            self._epoch_end = (replace(context.progress), snapshot)
        self.save(snapshot)

    def _steps_made(self) -> int:
        averager = self._context.averager
        return 0 if averager is None else averager.steps

    def _warn_of_late_changes(self) -> None:
        state = self._context.state
        if self._collective is None or state is None:
            return
        name, before, versions = self._collective
        now = state.take_snapshot()
        # Tensors that a state_dict() makes anew have other bytes each time.
        changes = before.differences(now) - now.differences(state.take_snapshot())
        if versions != state.module_versions():
            changes.add("a module")
        if changes:
            self._warned = True
            changed = min(changes)
            if self._context.engine.rank == 0:
                self._context.warn(
                    f"{changed} of the State changes in the loop body after the collective "
                    f"{name!r}, which comes after optimizer.step(). If a rank fails in that "
                    "collective, the rest of the body is not run for this step, and the change is "
                    "missing. Call the collective before optimizer.step(), or at the end of the "
                    "loop body"
                )
