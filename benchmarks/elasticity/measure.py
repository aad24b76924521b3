"""Runs the benchmark: rows by launchers by repetitions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.elasticity.breakdown import Breakdown, measure_breakdown
from benchmarks.elasticity.ratio import TrainingRatio, measure_ratio
from benchmarks.elasticity.results import Observation, as_json, elasticity_tables
from benchmarks.elasticity.rows import Row
from benchmarks.elasticity.stage import STEP_TIME_S, FailedPlayError, Stage
from benchmarks.testbed.environments import PeerMissingError
from benchmarks.testbed.figures import Conditions, Result, conditions
from benchmarks.testbed.launchers import OURS, PEERS, TORCHFT, Launcher
from hvd_elastic.errors import HvdElasticError, RunError, UsageError

__all__ = ["elasticity_result", "measure_elasticity", "parse_peers"]

_NOTE = (
    f"All ranks on this one machine; steps are padded with a sleep of {STEP_TIME_S * 1000:.0f} ms "
    "(rows 13 and 14: 50 ms instead of computing, row 12: none). Launchers take turns."
)


def parse_peers(text: str) -> list[Launcher]:
    """The launchers that ``--peers`` names, in the order of the table.

    >>> [launcher.key for launcher in parse_peers("torchrun,ours")]
    ['ours', 'torchrun']

    Raises:
        UsageError: names what is no launcher.
    """
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [key for key in wanted if key not in PEERS]
    if unknown or not wanted:
        raise UsageError(
            f"--peers {text}: {', '.join(unknown) or 'nothing'} is not known. "
            f"Valid: {', '.join(PEERS)}"
        )
    return [launcher for key, launcher in PEERS.items() if key in wanted]


def measure_elasticity(
    rows: Sequence[Row],
    launchers: Sequence[Launcher],
    repetitions: int,
    say: Callable[[str], None],
    *,
    limit_s: float,
    etr_minutes: float = 0.0,
    breakdown: bool = False,
    seed: int = 0,
) -> Result:
    """Measure the rows.

    Args:
        rows: what to do.
        launchers: to whom.
        repetitions: how often.
        say: told what is going on.
        limit_s: patience with a job that does not go on [s].
        etr_minutes: length of the run with random kills; 0 for none [min].
        breakdown: whether to look into our own stall as well.
        seed: of the random kills.
    """
    if os.geteuid() != 0:
        raise UsageError(
            "this benchmark cuts cables and limits links, which needs root (network namespaces). "
            "Run it as root; python benchmarks/startup.py works without"
        )
    load_before = os.getloadavg()
    missing: dict[str, str] = {}
    shares: list[Path] = []
    for launcher in launchers:
        try:
            say(f"{launcher.name}: looking for what it needs")
            shares += launcher.prepare()
        except PeerMissingError as error:
            missing[launcher.key] = str(error)
            say(f"{launcher.name}: not measured: {error}")
    present = [launcher for launcher in launchers if launcher.key not in missing]
    observations: list[Observation] = []
    ratios: list[TrainingRatio] = []
    parts: list[Breakdown] = []
    with Stage(limit_s, shares) as stage:
        for number in range(1, repetitions + 1):
            for row in rows:
                for launcher in present:
                    if launcher.key not in row.without:
                        where = f"round {number} of {repetitions}, row {row.number}"
                        say(f"{where}: {launcher.name}: {row.title}")
                        for seen in list(_observe(stage, row, launcher)):
                            observations.append(seen)
                            told = seen.why_none or f"{seen.value:.3f}"
                            say(f"{where}: {launcher.name}: {seen.case}: {told}")
        if breakdown and OURS in present:
            parts = measure_breakdown(stage, repetitions, say)
        if etr_minutes:
            ratios = [
                measure_ratio(stage, launcher, etr_minutes * 60.0, seed, say)
                for launcher in (OURS, TORCHFT)
                if launcher in present
            ]
        hosts = stage.description
    versions = {name: text for each in present for name, text in each.versions().items()}
    return elasticity_result(
        conditions(hosts, _NOTE, load_before, versions),
        repetitions,
        rows,
        observations,
        {launcher.key: launcher.name for launcher in launchers},
        missing,
        ratios,
        parts,
    )


def elasticity_result(
    taken: Conditions,
    repetitions: int,
    rows: Sequence[Row],
    observations: Sequence[Observation],
    names: Mapping[str, str],
    missing: Mapping[str, str],
    ratios: Sequence[TrainingRatio] = (),
    parts: Sequence[Breakdown] = (),
) -> Result:
    """Tables and file of what was measured.

    Args:
        taken: the conditions.
        repetitions: how often each row was played.
        rows: those that were played.
        observations: of all of them.
        names: launcher's key → its name, in the order of the columns.
        missing: launcher's key → why it was not measured at all.
        ratios: effective training times.
        parts: of our own stall.
    """
    body = {
        "repetitions": repetitions,
        **as_json(rows, observations, names, missing),
        "breakdown": [part.as_json() for part in parts],
        "effective_training_time": [ratio.as_json() for ratio in ratios],
    }
    shown = [*elasticity_tables(rows, observations, names, missing)] if rows else []
    shown += [part.table() for part in parts]
    shown += [ratio.sentence(names) for ratio in ratios]
    return Result("elasticity", taken, body, shown)


def _observe(stage: Stage, row: Row, launcher: Launcher) -> Iterator[Observation]:
    """One play, with a reason for each figure that it does not come to."""
    left = [case.name for case in row.cases]
    try:
        for seen in row.play(stage, launcher):
            left.remove(seen.case)
            yield Observation(row.number, launcher.key, seen.case, round(seen.value, 4))
    except FailedPlayError as error:
        short, detail = error.short, error.detail
    except RunError as error:
        short, detail = str(error).splitlines()[0], str(error)
    except HvdElasticError:
        raise
    else:
        return
    for case in left:
        yield Observation(row.number, launcher.key, case, None, short, detail)
