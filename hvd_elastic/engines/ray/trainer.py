"""Elastic training on a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.engines.ray.data import Preparer
from hvd_elastic.errors import ArgumentError, RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import own_address_towards
from hvd_elastic.records.events import as_record
from hvd_elastic.run_events import Metrics

if TYPE_CHECKING:
    from hvd_elastic.engines.dial_in.hosts import DialInHosts

_ON_HEAD = "node:__internal_head__"
"""Resource that Ray gives to the head node."""
_DEFAULT_RESOURCES: Mapping[str, float] = {"CPU": 1}


@dataclass(frozen=True)
class Result:
    """Result of a training.

    Attributes:
        value: value that the function returned at rank 0.
        run_id: id of the run, for ``hvd-elastic report`` and the other commands.
        folder: folder of the run on the driver's machine, with events, logs and saved files.
        checkpoint: newest complete checkpoint; None if the run wrote none.
        metrics: last metrics of the run (step, examples, throughput, loss, …), by name.
    """

    value: Any
    run_id: str
    folder: Path
    checkpoint: Path | None
    metrics: dict[str, Any]


class ElasticTrainer:
    """Trains a function on a Ray cluster, elastically: workers come and go without a restart.

    Each worker has an actor, which Ray places by ``resources_per_worker``. As long as there are
    fewer than the largest number, actors wait in Ray's queue, so a node that joins the cluster
    joins the training. A worker, actor or node that fails is noticed by the heartbeats of this
    package's agents, and the others continue.

    The function uses :mod:`hvd_elastic.torch`, :mod:`hvd_elastic.tensorflow` or
    :mod:`hvd_elastic.keras`, as a training script does.

    Args:
        train_fn: function to train, or path of a training script.
        train_fn_args: its arguments.
        train_fn_kwargs: its keyword arguments.
        scaling: least and largest number of workers; one number: both.
        resources_per_worker: resources that Ray reserves for each worker, by name: ``CPU``,
            ``GPU``, or one of your own; on clusters of ``hvd-elastic ray up`` also ``slots``.
        datasets: Ray Datasets by name, or functions that return one (needed where the driver is
            connected by ``ray://``). Their transforms are carried out once, on processors that
            are not reserved for workers; the function reads the rows by
            :class:`hvd_elastic.ray.RayDataset`.
        dataset_options: ``ray.data.ExecutionOptions`` of the transforms, such as a label selector
            that keeps them on some nodes.
        run_options: options of ``hvd-elastic run``, such as ``run_id``, ``audit``,
            ``checkpoint_folder`` or ``policy``; see
            :data:`hvd_elastic.engines.dial_in.training.OPTIONS`.

    Raises:
        ArgumentError: an argument cannot be used.

    Example::

        def train(epochs):
            import hvd_elastic.torch as hvd
            from hvd_elastic.ray import RayDataset

            hvd.init()
            loader = hvd.DataLoader(RayDataset("train"), batch_size=256, shuffle=True)
            ...

        ElasticTrainer(
            train, (10,), scaling=(2, 8), datasets={"train": ray.data.read_parquet("/data")}
        ).fit()
    """

    def __init__(
        self,
        train_fn: Callable[..., Any] | str | Path,
        train_fn_args: Sequence[Any] = (),
        train_fn_kwargs: Mapping[str, Any] | None = None,
        *,
        scaling: tuple[int, int] | int,
        resources_per_worker: Mapping[str, float] | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_options: Any = None,
        run_options: Mapping[str, Any] | None = None,
    ) -> None:
        from hvd_elastic.engines.dial_in.task import Task
        from hvd_elastic.engines.dial_in.training import Sizes

        if (number := getattr(scaling, "num_workers", None)) is not None:
            of_each = getattr(scaling, "resources_per_worker", None)
            of_each = of_each or {"GPU" if getattr(scaling, "use_gpu", False) else "CPU": 1}
            raise ArgumentError(
                f"scaling takes numbers of workers and no {type(scaling).__name__}: write "
                f"scaling={number!r}, resources_per_worker={of_each!r}"
            )
        both = tuple(scaling) if isinstance(scaling, (tuple, list)) else (scaling, scaling)
        if len(both) != 2:
            raise ArgumentError(f"scaling takes the least and largest number, not {scaling!r}")
        if isinstance(train_fn_args, (str, Mapping)):
            raise ArgumentError(
                f"train_fn_args takes a sequence of arguments: write ({train_fn_args!r},) where "
                "that is the only one"
            )
        if not isinstance(datasets or {}, Mapping):
            raise ArgumentError("datasets takes data sets by name, such as {'train': dataset}")
        least, most = both
        sizes = Sizes(least, least, most)
        self._least, self._most = sizes.wanted, sizes.limit
        self._task = Task.of(train_fn, tuple(train_fn_args), train_fn_kwargs or {})
        self._resources = dict(resources_per_worker or _DEFAULT_RESOURCES)
        for name, amount in self._resources.items():
            if not amount >= 0:
                raise ArgumentError(
                    f"resources_per_worker: {name} is {amount}, it must be 0 or more"
                )
        self._datasets = dict(datasets or {})
        self._dataset_options = dataset_options
        self._options = dict(run_options or {})

    def fit(self) -> Result:
        """Train to the end; return the result.

        Raises:
            ArgumentError: the function cannot be sent to the workers; names what, and why.
            RunError: the cluster cannot hold the workers, or the training failed.
            DataError: a data set cannot be prepared.
        """
        from hvd_elastic.engines.dial_in.training import Sizes, train
        from hvd_elastic.engines.ray.placement import check_room, room_for
        from hvd_elastic.records.run_folder import RunFolder
        from hvd_elastic.records.summary import summarize

        self._task.pack()  # what cannot be sent is told before Ray is connected to
        ray = _connected_ray()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        resources = [node["Resources"] for node in nodes]
        check_room(resources, self._resources, self._least)
        cpus = sum(node.get("CPU", 0) for node in resources)
        spare = cpus - self._least * self._resources.get("CPU", 0)
        at_once = min(self._most, room_for(resources, self._resources))
        folders: list[RunFolder] = []
        value = train(
            self._task,
            Sizes(self._least if self._datasets else at_once, self._least, self._most),
            own_address_towards(Host(nodes[0]["NodeManagerAddress"])),
            "ray",
            functools.partial(self._acquire, spare_cpus=spare),
            self._options,
            began=folders.append,
        )
        (folder,) = folders
        events = folder.read_events()
        past = summarize(events)
        last = [event for event in events if isinstance(event, Metrics)][-1:]
        metrics = as_record(last[0]) if last else {}
        return Result(
            value,
            folder.run_id,
            folder.path,
            Path(past.kept_checkpoint.path) if past.kept_checkpoint else None,
            {name: value for name, value in metrics.items() if name not in ("t", "mono", "kind")},
        )

    @contextlib.contextmanager
    def _acquire(self, hosts: DialInHosts, spare_cpus: float) -> Iterator[Callable[[], None]]:
        """Have Ray place actors until the context ends; see :data:`training.Acquire`."""
        import ray

        from hvd_elastic.engines.ray.placement import Placement, wait_for_rows

        preparing: Any = _preparer(ray) if self._datasets else contextlib.nullcontext()
        with preparing as preparer:
            stored = {
                name: preparer.store.remote(dataset, self._dataset_options)
                for name, dataset in self._datasets.items()
            }
            if spare_cpus < 1:  # the first workers would leave nothing for the transforms
                wait_for_rows(stored)
            placement = Placement(
                hosts.dial_in.invitation,
                self._resources,
                (self._least, self._most),
                stored,
                hosts.take_released,
            )
            try:
                yield lambda: placement.check(is_short=hosts.slots < self._least)
            finally:
                placement.close()


def _connected_ray() -> Any:
    """Return the module ``ray``, connected to a cluster as ``ray.init()`` chooses it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise RunError(
            "ElasticTrainer needs Ray: pip install 'ray[client,data,train]' cloudpickle"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init()
        except (ConnectionError, RuntimeError) as error:
            raise RunError(f"Ray cannot be connected to: {error}") from error
    return ray


@contextlib.contextmanager
def _preparer(ray: Any) -> Iterator[Any]:
    """Yield the actor that prepares data sets."""
    preparer = ray.remote(Preparer).options(num_cpus=0, resources={_ON_HEAD: 0.001}).remote()
    try:
        yield preparer
    finally:
        ray.kill(preparer)
