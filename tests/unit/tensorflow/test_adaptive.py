"""A batch that adapts: passes are added up, gradients sampled and rates scaled in the graph."""

from __future__ import annotations

from tests.paths import COSTLY, skip_module_without_tensorflow

skip_module_without_tensorflow()

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_elastic.tensorflow as hvd
from hvd_elastic.communicator.interface import FLAGS_NAME, RingRank
from hvd_elastic.errors import ScriptError
from hvd_elastic.model.goodput import BatchPlan
from hvd_elastic.model.lr_rules import Adjustment
from hvd_elastic.policy.sampling import GradientNoise
from hvd_elastic.tensorflow import gradients
from hvd_elastic.tensorflow.optimizer import averager_of
from hvd_elastic.worker import context
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.adaptive import AdaptivePlanner
from hvd_elastic.worker.progress import Progress

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(64, 5)).astype(np.float32)
TARGETS = (INPUTS @ RANDOM.normal(size=(5, 1)) + RANDOM.normal(size=(64, 1))).astype(np.float32)


class Training:
    """A linear model and a compiled step that trains it on an adaptive batch."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        options = {"batch_size": 16, "max_batch_size": 16, **options}
        rule = options.pop("lr_rule", None)
        targets = options.pop("targets", TARGETS)
        worker = context.current().worker
        worker.in_train = False
        self.dataset = hvd.dataset((INPUTS, targets), **options)
        worker.in_train = True
        self.model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        self.optimizer = hvd.DistributedOptimizer(optimizer, lr_rule=rule)
        self.state = hvd.State(model=self.model, optimizer=self.optimizer)
        found = averager_of(self.optimizer)
        assert found is not None
        self.averager = found
        self.traces = 0
        self.step = tf.function(self._step, reduce_retracing=True)

    def _step(self, inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(inputs, training=True) - targets))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @property
    def planner(self) -> AdaptivePlanner:
        planner = context.current().planner
        assert isinstance(planner, AdaptivePlanner)
        return planner

    def weights(self) -> np.ndarray:
        kernel, bias = self.model.trainable_variables
        return np.append(kernel.numpy().ravel(), bias.numpy())

    def train(self, epochs: int = 1, each: Callable[[], object] = lambda: None) -> None:
        for _ in range(epochs):
            for _ in hvd.epochs(context.current().worker.progress.epoch + 1):
                for batch in self.dataset:
                    self.step(*batch)
                    each()


def statistics_of(training: Training) -> Any:
    assert training.averager._adaptation is not None
    return training.averager._adaptation.statistics


def sums_of(training: Training) -> Any:
    assert training.averager._adaptation is not None
    return [each.numpy() for each in training.averager._adaptation._sums]


@pytest.fixture
def unreviewed(alone: Context, monkeypatch: pytest.MonkeyPatch) -> Context:
    """The plan stays as the test sets it."""
    monkeypatch.setattr(AdaptivePlanner, "review_if_due", lambda *_: None)
    return alone


def torch_rows(
    kind: Any, epochs: int, rule: str | None = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Train the same model on the same data with PyTorch; return samples and weights."""
    import hvd_elastic.torch as hvd_torch
    from hvd_elastic.torch.frontend import TorchFrontend
    from hvd_elastic.torch.optimizer import averager_of as torch_averager_of

    made = Context(Mode.ALONE, TorchFrontend())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "_context", made)
        pairs = list(zip(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS), strict=True))
        loader: Any = hvd_torch.DataLoader(pairs, 16, max_batch_size=16)
        made.worker.in_train = True
        model = torch.nn.Linear(5, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = hvd_torch.DistributedOptimizer(
            kind(model.parameters(), **options), model, lr_rule=rule
        )
        hvd_torch.State(model=model, optimizer=optimizer)
        for _ in hvd_torch.epochs(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        averager = torch_averager_of(optimizer)
        assert averager is not None
        weights = np.append(model.weight.detach().numpy().ravel(), model.bias.detach().numpy())
        return averager.gradients.sampling.statistics.drain(), weights


def noise_scale(rows: np.ndarray) -> float:
    noise = GradientNoise(1, 16, len(INPUTS))
    assert all(noise.add_samples([rows]))
    return noise.scale


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_the_noise_scale_is_that_of_pytorch(unreviewed: Context, name: str) -> None:
    own = keras.optimizers.Adam(0.01, epsilon=1e-8) if name == "Adam" else keras.optimizers.SGD(0.1)
    training = Training(own)
    training.train(6)
    rows = statistics_of(training).drain()
    options: dict[str, Any] = {"lr": 0.01, "eps": 1e-8} if name == "Adam" else {"lr": 0.1}
    theirs, weights = torch_rows(getattr(torch.optim, name), 6, **options)
    assert len(rows) == (18 if name == "Adam" else 24), "two passes show the noise of one rank"
    assert training.weights() == pytest.approx(weights, abs=1e-3)
    assert rows[:, :3].tolist() == theirs[:, :3].tolist()
    assert rows[:, 3:] == pytest.approx(theirs[:, 3:], rel=5e-3)
    assert noise_scale(rows) == pytest.approx(noise_scale(theirs), rel=0.01)


def undisturbed(optimizer: Any, batch_size: int) -> np.ndarray:
    """Weights after an epoch without the library."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer, "mse")
    model.fit(INPUTS, TARGETS, batch_size, epochs=1, shuffle=False, verbose=0)
    kernel, bias = model.trainable_variables
    return np.append(kernel.numpy().ravel(), bias.numpy())


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=COSTLY), 4])
def test_a_step_of_several_passes_is_that_of_one(unreviewed: Context, passes: int) -> None:
    made = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    training = Training(made, max_batch_size=32, lr_rule="none")
    training.planner.sampling.probe_every = 1000
    training.planner.choice.plan = BatchPlan(32, passes - 1)
    sizes: list[int] = []
    for number, batch in enumerate(training.dataset):
        before = training.weights()
        training.step(*batch)
        sizes.append(unreviewed.step.passes[-1].examples)
        if unreviewed.step.accumulating:
            assert (training.weights() == before).all(), "only the last pass changes the model"
            assert int(made.iterations) == number // passes
    last = [8, 8] if passes == 1 else []  # the first step of a rank alone is sampled
    assert sizes == [16, 16, 32] if last else [32 // passes] * (2 * passes)
    reference = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    assert training.weights() == pytest.approx(undisturbed(reference, 32), abs=1e-6)
    assert int(made.iterations) == unreviewed.worker.progress.step == 2
    assert all(len(each) == 0 for each in sums_of(training)), "they take memory in a step only"


def test_changes_of_the_batch_trace_nothing_anew(unreviewed: Context) -> None:
    training = Training(keras.optimizers.Adam(0.01), max_batch_size=64)
    plans = [BatchPlan(16), BatchPlan(24, 1), BatchPlan(64, 2), BatchPlan(48), BatchPlan(64, 3)]
    traced = []
    for plan in plans:
        training.planner.choice.plan = plan
        training.train()
        traced.append(training.traces)
    assert traced == [1, 2, 2, 2, 2], "a second shape generalises the first"


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_the_learning_rate_follows_the_batch_as_in_pytorch(unreviewed: Context, name: str) -> None:
    rule = Adjustment(1.5, rate=4.0, gain=0.5)
    adam = name == "Adam"
    own = keras.optimizers.Adam(0.01, epsilon=1e-8) if adam else keras.optimizers.SGD(0.1)
    rates: list[float] = []
    training = Training(own, lr_rule=lambda _: rule)
    training.train(1, lambda: rates.append(float(own.learning_rate)))
    options: dict[str, Any] = {"lr": 0.01 * 1.5, "eps": 1e-8 / 2, "betas": (0.6, 0.996)}
    _, weights = torch_rows(
        getattr(torch.optim, name), 2, **(options if adam else {"lr": 0.1 * 1.5}), rule="none"
    )
    assert training.weights() == pytest.approx(weights, abs=2e-4)
    assert set(rates) == {rates[0]}, "outside of a step it is the script's"
    assert not adam or (own.beta_1, own.beta_2, own.epsilon) == (0.9, 0.999, 1e-8)
    assert training.planner.progress == 8 * 0.5


def test_a_step_whose_gradients_are_not_finite_is_left_out(unreviewed: Context) -> None:
    training = Training(keras.optimizers.SGD(0.1, momentum=0.9), targets=TARGETS * np.nan)
    with pytest.raises(ScriptError, match="not finite in 10 steps running"):
        training.train()
    assert not training.weights().any()
    assert int(training.optimizer.iterations) == 0
    assert training.planner.skipped.consecutive == 10


def test_the_passes_of_a_step_that_fails_are_dropped(unreviewed: Context) -> None:
    training = Training(keras.optimizers.SGD(0.1), lr_rule="none")
    batches = iter(training.dataset)
    training.step(*next(batches))
    assert len(sums_of(training)[0]) == 6
    batches.close()  # as after a failure
    unreviewed.step_failed()
    unreviewed.worker.averagers.reset()
    assert len(sums_of(training)[0]) == 0
    training.train()
    reference = undisturbed(keras.optimizers.SGD(0.1), 16)
    assert training.weights() == pytest.approx(reference, abs=1e-6)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Training(keras.optimizers.SGD(), lr_rule="cubic"), "'cubic' is not known"),
        (
            lambda: Training(keras.optimizers.SGD(gradient_accumulation_steps=2)),
            "gradient_accumulation_steps=2",
        ),
        (
            lambda: Training(keras.optimizers.SGD(), max_batch_size=8),
            r"hvd\.dataset\(batch_size=16, ",
        ),
        (
            lambda: Training(keras.optimizers.SGD(), drop_last=True),
            r"hvd\.dataset\(drop_last=True, max",
        ),
    ],
)
def test_what_cannot_adapt_is_explained(
    alone: Context, made: Callable[[], object], said: str
) -> None:
    with pytest.raises(ScriptError, match=said):
        made()


def test_a_tape_cannot_adapt(alone: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvd.DistributedGradientTape, "_averager", None)
    alone.worker.in_train = False
    hvd.dataset(INPUTS, 16, max_batch_size=32)
    weights = tf.Variable(1.0)
    with hvd.DistributedGradientTape() as tape:
        loss = weights * 2
    with pytest.raises(ScriptError, match="with DistributedGradientTape"):
        tape.gradient(loss, [weights])


def halving() -> Any:
    return keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.4, 0.2, 0.1])


def test_a_schedule_follows_progress(unreviewed: Context) -> None:
    own = keras.optimizers.SGD(hvd.follow_progress(halving()))
    training = Training(own, lr_rule=lambda _: Adjustment(1.0, gain=2.0))
    moved: list[tuple[float, float]] = []
    before = [float(own.learning_rate)]

    def look() -> None:
        if not unreviewed.step.accumulating:
            moved.append((before[0], float(training.planner.progress)))
        before[0] = float(own.learning_rate)

    for batch in training.dataset:
        training.step(*batch)
        look()
    rates = [round(rate, 3) for rate, _ in moved]
    assert rates == [0.4, 0.2, 0.1, 0.1], "steps 0, 2, 4 and 6 at the initial batch size"
    assert training.traces == 1
    assert training.state.schedules() == {}


def test_a_schedule_of_a_fixed_batch_counts_steps(alone: Context) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(hvd.follow_progress(halving())))
    optimizer.iterations.assign(2)
    assert float(optimizer.learning_rate) == pytest.approx(0.2)


def test_a_schedule_that_counts_steps_is_known(alone: Context) -> None:
    training = Training(keras.optimizers.SGD(halving()))
    training.optimizer.iterations.assign(7)
    (schedule,) = training.state.schedules().values()
    assert schedule == (7, "PiecewiseConstantDecay")
    with pytest.raises(ScriptError, match=r"follow_progress\(float\)"):
        hvd.follow_progress(0.1)


def test_a_saved_optimizer_is_one_of_keras(alone: Context) -> None:
    wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(hvd.follow_progress(halving())))
    saved = keras.saving.serialize_keras_object(wrapped)
    assert "hvd_elastic" not in str(saved)
    assert type(keras.saving.deserialize_keras_object(saved)) is keras.optimizers.Adam


def test_a_reduction_that_fails_after_several_passes_changes_nothing(
    unreviewed: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [""]

    def reduce(tensor: tf.Tensor, name: str, *, average: bool = False) -> tf.Tensor:
        def fail(values: np.ndarray) -> np.ndarray:
            if name == failing[0]:
                raise RuntimeError(f"node {name}: Connection closed by peer")
            return values

        return tf.numpy_function(fail, [tensor], tensor.dtype)

    monkeypatch.setattr(gradients, "reduce_in_graph", reduce)
    unreviewed.worker.communicator.size = 2  # the other rank adds nothing
    training = Training(keras.optimizers.Adam(0.1), lr_rule="none")
    training.averager._in_ring = True
    training.planner.choice.plan = BatchPlan(16, 1)
    for failing[0] in ("gradient.0", "hvd_elastic.change", ""):
        batches = iter(training.dataset)
        training.step(*next(batches))
        assert unreviewed.step.accumulating
        last = next(batches)
        if failing[0]:
            with pytest.raises(tf.errors.OpError):
                training.step(*last)
            assert not training.weights().any()
            assert int(training.optimizer.iterations) == 0
            batches.close()
            unreviewed.step_failed()
        else:
            training.step(*last)
    assert training.weights() == pytest.approx(0.1 * np.sign(training.weights()), rel=1e-3)
    assert training.traces == 1


def test_the_samples_of_two_ranks_are_those_of_two_passes_of_one(
    unreviewed: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Training(keras.optimizers.SGD(0.1))
    batches = iter(alone.dataset)
    for _ in range(2):
        alone.step(*next(batches))
    next(batches)  # counts the step
    (expected,) = statistics_of(alone).drain()
    sent: dict[tuple[int, str], np.ndarray] = {}

    def reduce(tensor: tf.Tensor, name: str, *, average: bool) -> tf.Tensor:
        assert average

        def exchange(values: np.ndarray) -> np.ndarray:
            rank = unreviewed.worker.communicator.rank
            sent[rank, name] = np.array(values)
            other = values if name == FLAGS_NAME else sent.get((1 - rank, name), np.zeros(1, "f4"))
            return (values + other) / np.float32(2)

        return tf.numpy_function(exchange, [tensor], tensor.dtype)

    monkeypatch.setattr(gradients, "reduce_in_graph", reduce)
    communicator = unreviewed.worker.communicator
    communicator.size = 2
    rows = {}
    for rank in (0, 1, 0):  # in the second turn it gets what the other one has sent
        communicator.rank = RingRank(rank)
        unreviewed.step_failed()
        unreviewed.worker.progress = Progress()
        unreviewed.data.last_reader = None
        unreviewed.worker.averagers.choose([])  # as in another process
        training = Training(keras.optimizers.SGD(0.1))
        training.averager._in_ring = True
        batch = next(iter(training.dataset))
        training.step(*batch)
        training.averager.collect(collectives=False)
        (rows[rank],) = statistics_of(training).drain()
    both = rows[0][3:] + rows[1][3:]
    assert rows[0][:3].tolist() == rows[1][:3].tolist() == [0, 16, 1]
    assert both == pytest.approx(expected[3:], rel=1e-4)
