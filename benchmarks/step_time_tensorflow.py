"""Measures a training step of TensorFlow beside stock Horovod and MultiWorkerMirroredStrategy.

Run it: ``python benchmarks/step_time_tensorflow.py --out step_time_tensorflow.json``. Each round
starts every launcher once for each model. A row's figure is the median over the rounds of ours
divided by the peer, where each is the median step of its job, of the slower rank.

With ``--in-turn`` one job trains with ours and with stock Horovod in turn, in the same processes
and the same ring, ten steps each, and a row's figure is the median over pairs of blocks. So a
machine that is busy with other things disturbs both alike.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.options import mark_step
from benchmarks.step_time import (
    BLOCK,
    RANKS,
    START_LIMIT_S,
    WARM_BLOCKS,
    WARM_STEPS,
    Cost,
    in_blocks,
    interval,
)
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import KERAS, MIRRORED, STATIC_TENSORFLOW, Job, Order

STEPS = {"small": 150, "large": 30}
SHARE = 32
SHAPE = {"small": (28, 28, 1), "large": (1024,)}
LAUNCHERS = {"ours": KERAS, "horovod": STATIC_TENSORFLOW, "mirrored": MIRRORED}
VARIANTS = {"ours": "ours", "adaptive": "ours", "horovod": "horovod", "mirrored": "mirrored"}
ENVIRONMENT = {"TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


# -- the training script, in a worker --------------------------------------------------------


def build(name: str) -> Any:
    """Return the model: two convolutions with 1.2 M parameters, or an MLP of 100 MB."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    if name == "large":
        inner = [layers.Dense(4096, "relu"), layers.Dense(4096, "relu"), layers.Dense(1024)]
    else:
        inner = [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu")]
        inner += [layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(128, "relu")]
        inner += [layers.Dense(10)]
    return keras.Sequential([keras.Input(SHAPE[name]), *inner])


def examples(name: str) -> Any:
    """Return the inputs of 64 steps."""
    import numpy as np

    return np.random.default_rng(0).normal(size=(SHARE * RANKS * 64, *SHAPE[name])).astype("f4")


def step_of(model: Any, apply: Callable[[Any, Any, Any], object]) -> Any:
    """Return a compiled step; ``apply(tape, loss, variables)`` takes that of the optimizer."""
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True)))
        apply(tape, loss, model.trainable_variables)
        return loss

    return step


def train_ours(name: str, *, adaptive: bool, in_turn: bool, settle: int) -> None:
    """Train with this library; with ``in_turn`` and with stock Horovod, after ``settle`` steps."""
    import keras

    import hvd_elastic.tensorflow as hvd

    hvd.init()
    plain = keras.optimizers.Optimizer.apply  # in training the library refuses other optimizers
    model, batch = build(name), SHARE * RANKS
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4))
    largest = batch if adaptive else None
    dataset = hvd.dataset(examples(name), batch, shuffle=True, max_batch_size=largest)
    step = step_of(model, lambda tape, loss, v: optimizer.apply(tape.gradient(loss, v), v))
    steps = itertools.count(1 - settle)

    @hvd.run
    def train(state: Any) -> None:
        others = horovod_steps(name, hvd.rank(), plain) if in_turn else iter(())
        for _ in hvd.epochs(10**9):
            for inputs in dataset:
                state.commit(loss=step(inputs))
                mark_step(hvd.size())
                number = next(steps)
                if number > 0 and number % BLOCK == 0:
                    for _ in itertools.islice(others, BLOCK):
                        mark_step(hvd.size())

    train(hvd.State(model=model, optimizer=optimizer))


def shuffled(name: str, rank: int) -> Any:
    """Return an endless tf.data.Dataset of a rank's share, as scripts of peers read it."""
    import tensorflow as tf

    own = examples(name)[rank::RANKS]
    return tf.data.Dataset.from_tensor_slices(own).shuffle(len(own)).repeat().batch(SHARE)


def train_horovod(name: str) -> None:
    """Train with stock Horovod."""
    import horovod.tensorflow as hvd

    hvd.init()
    for _ in horovod_steps(name, hvd.rank()):
        mark_step(hvd.size())


def horovod_steps(name: str, rank: int, plain: Any = None) -> Iterator[None]:
    """Take a step with stock Horovod for each item; ``plain``: Keras' own ``Optimizer.apply``."""
    import horovod.tensorflow as hvd
    import keras

    model, optimizer = build(name), keras.optimizers.SGD(1e-4)

    def apply(tape: Any, loss: Any, variables: Any) -> None:
        values = [each.value for each in variables]
        averaged = hvd.DistributedGradientTape(tape).gradient(loss, values)
        (plain or type(optimizer).apply)(optimizer, averaged, variables)

    step = step_of(model, apply)
    for inputs in shuffled(name, rank).prefetch(1):
        float(step(inputs))
        yield


def train_mirrored(name: str) -> None:
    """Train with TensorFlow's own strategy."""
    import json

    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = build(name), keras.optimizers.SGD(1e-4)
        optimizer.build(model.trainable_variables)
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    one = step_of(model, lambda tape, loss, v: optimizer.apply(tape.gradient(loss, v), v))

    @tf.function
    def step(inputs: Any) -> Any:
        return strategy.run(one, args=(inputs,))

    data = strategy.distribute_datasets_from_function(lambda _: shuffled(name, rank).prefetch(1))
    for inputs in data:
        strategy.experimental_local_results(step(inputs))[0].numpy()
        mark_step(strategy.num_replicas_in_sync)


# -- the measurement -------------------------------------------------------------------------


def step_cost(bed: Testbed, who: str, name: str) -> Cost:
    """Start a job and return the cost of its steps.

    Raises:
        FailedPlayError: the job ended, or took too long.
    """
    order = Order(
        slots=dict.fromkeys(bed.hosts[:RANKS], 1),
        training=[__file__, "--train", who, "--model", name],
        min_np=RANKS,
        environment=ENVIRONMENT,
    )
    wanted = WARM_STEPS + STEPS[name]

    def ranks_are_done(job: Job) -> bool:
        steps = [[each for each in p.steps if each.size == RANKS] for p in job.marks.processes]
        return sum(len(each) > wanted for each in steps) == RANKS

    with LAUNCHERS[VARIANTS[who]].job(bed, order) as job:
        job.wait(lambda: ranks_are_done(job), START_LIMIT_S)
        costs = [Cost.of(each.steps[WARM_STEPS : wanted + 1]) for each in job.marks.processes]
        return max(costs, key=lambda cost: cost.step_s)


def costs_in_turn(
    bed: Testbed, who: str, name: str, rounds: int, settle: int
) -> dict[str, list[Cost]]:
    """Start a job that trains with ours and stock Horovod in turn; return the costs of each block.

    Args:
        bed: the hosts.
        who: ``ours`` or ``adaptive``.
        name: name of the model.
        rounds: number of blocks of each.
        settle: steps of ours before the first block.

    Raises:
        FailedPlayError: the job ended, or took too long.
    """
    script = [__file__, "--train", who, "--model", name, "--in-turn", "--settle", str(settle)]
    order = Order(
        slots=dict.fromkeys(bed.hosts[:RANKS], 1),
        training=script,
        min_np=RANKS,
        environment=ENVIRONMENT,
    )
    blocks = WARM_BLOCKS + 2 * rounds
    wanted = settle + blocks * BLOCK

    def ranks_are_done(job: Job) -> bool:
        return sum(len(each.steps) >= wanted for each in job.marks.processes) == RANKS

    with LAUNCHERS["ours"].job(bed, order) as job:
        job.wait(lambda: ranks_are_done(job), START_LIMIT_S)
        ranks = [each.steps[settle:wanted] for each in job.marks.processes]
        found = in_blocks(ranks, blocks)[WARM_BLOCKS:]
        return {who: found[::2], "horovod": found[1::2]}


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure all rows, one job of each launcher in every round."""
    check_names("--models", options.models, STEPS)
    check_names("--launchers", options.launchers, VARIANTS)
    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    with make_testbed(RANKS) as bed:
        for who, name in itertools.product(options.launchers, options.models):
            if options.in_turn and VARIANTS[who] == "ours":
                turns = costs_in_turn(bed, who, name, options.rounds, options.settle)
                rows += [_row(name, each, turns) for each in turns]
                say(f"{name}, {who} / horovod: {rows[-2]['to_horovod']}")
        for name in options.models if not options.in_turn else ():
            found: dict[str, list[Cost]] = {who: [] for who in options.launchers}
            for number in range(1, options.rounds + 1):
                for who in random.Random(number).sample(options.launchers, len(found)):
                    found[who].append(step_cost(bed, who, name))
                latest = ", ".join(f"{who} {1e3 * c[-1].step_s:.1f}" for who, c in found.items())
                say(f"{name}, round {number} of {options.rounds} [ms]: {latest}")
            rows += [_row(name, who, found) for who in found]
    note = "Two ranks with one thread each; every job's figure is the slower rank's median step."
    if options.in_turn:
        note = f"Two ranks with one thread each; ours and Horovod in turn in one job, {BLOCK} steps"
        note += f" each, after {options.settle} steps of ours."
    hosts = f"{RANKS} virtual hosts (namespaces)"
    return Result("step_time_tensorflow", conditions(hosts, note, load_before), {"steps": rows})


def _row(name: str, who: str, found: dict[str, list[Cost]]) -> dict[str, Any]:
    times = [cost.step_s for cost in found[who]]
    row: dict[str, Any] = {"model": name, "launcher": who}
    row["step_ms"] = round(1e3 * statistics.median(times), 2)
    row["cpu_ms"] = round(1e3 * statistics.median(cost.cpu_s for cost in found[who]), 2)
    row["switches"] = round(statistics.median(cost.switches for cost in found[who]))
    for peer in itertools.chain(("horovod", "mirrored"), ("ours",) if who == "adaptive" else ()):
        if VARIANTS[who] == "ours" and peer in found:
            ratios = [m / o.step_s for m, o in zip(times, found[peer], strict=True)]
            row[f"to_{peer}"] = round(statistics.median(ratios), 3)
            row[f"to_{peer}_interval"] = [round(each, 3) for each in interval(ratios)]
    return {**row, "samples_s": [round(each, 5) for each in times]}


def main() -> int:
    """Run the benchmark, or with ``--train`` its script; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    if "--train" in sys.argv:
        parser.add_argument("--train", choices=VARIANTS)
        parser.add_argument("--model", choices=STEPS)
        parser.add_argument("--in-turn", action="store_true")
        parser.add_argument("--settle", type=int, default=0)
        args = parser.parse_args()
        if VARIANTS[args.train] == "ours":
            adaptive = args.train == "adaptive"
            train_ours(args.model, adaptive=adaptive, in_turn=args.in_turn, settle=args.settle)
        else:
            {"horovod": train_horovod, "mirrored": train_mirrored}[args.train](args.model)
        return 0
    told = "models, separated by commas: small (5 MB of gradients), large (100 MB)"
    parser.add_argument("--models", type=names, default=list(STEPS), help=told)
    told = "launchers: ours, adaptive (a batch that adapts), horovod, mirrored"
    parser.add_argument("--launchers", type=names, default=list(VARIANTS), help=told)
    told = "jobs of each launcher; 12 at least decide a ratio"
    parser.add_argument("--rounds", type=at_least_one, default=12, help=told)
    told = "train with ours and stock Horovod in turn in one job"
    parser.add_argument("--in-turn", action="store_true", help=told)
    told = "with --in-turn: steps of ours first; after 600 an adaptive batch knows its noise"
    parser.add_argument("--settle", type=int, default=0, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
