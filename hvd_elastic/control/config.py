"""Limits and timeouts of the machine that controls a run."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_elastic.control.backoff import HOST_PAUSES_S


@dataclass(frozen=True)
class MachineConfig:
    """Limits and timeouts of a run.

    Args:
        min_np, max_np: smallest and largest number of workers that train; None: no upper limit.
        np: requested number of workers; None: as many as allowed.
        pinned: hosts whose slots are used before all others.
        spares: number of warm standbys beyond that, which replace a lost worker at once.
        join_window_s: how long a ready newcomer always waits for others to join with it [s].
        longest_join_window_s: the same for others that were started at about the same time [s].
        start_grace_s: how long the start waits for the rest once ``min_np`` are ready [s].
        restart_backoff_s: delays before a slot's next worker after 1, 2, … deaths in a row [s].
        max_worker_failures: number of workers in a row that may die without ever having joined
            before their slot is given up.
        regroup_timeout_s: how long to wait for members that do not answer to the end of a
            generation, for workers that were asked to leave, and for replacements of members that
            have to leave [s].
        agent_retry_s: delays before a host's next agent after 1, 2, … failures in a row [s].
        max_unknown_tries: attempts to look up the host names after which a run fails that has
            never trained and knows none of them.
        slow_start_s: how long workers may take to start before the slow ones are reported [s].
        max_stuck_generations: number of generations in a row that may break at the same step
            without a death, or by crashes without progress, before the run fails; another attempt
            would not help.
        plain: whether the command is no training script: then it succeeds with exit status 0, and
            is not started again if a signal ends it.

    Raises:
        ValueError: a value is outside its limits.
    """

    min_np: int = 1
    max_np: int | None = None
    np: int | None = None
    pinned: tuple[str, ...] = ()
    spares: int = 0
    join_window_s: float = 0.5
    longest_join_window_s: float = 3.0
    start_grace_s: float = 5.0
    restart_backoff_s: tuple[float, ...] = (0.1, 1.0, 2.0, 5.0, 10.0)
    max_worker_failures: int = 3
    regroup_timeout_s: float = 60.0
    agent_retry_s: tuple[float, ...] = HOST_PAUSES_S
    max_unknown_tries: int = 4
    slow_start_s: float = 5.0
    max_stuck_generations: int = 8
    plain: bool = False

    def __post_init__(self) -> None:
        if self.min_np < 1:
            raise ValueError(f"min_np is {self.min_np}, at least 1 worker is needed")
        if self.max_np is not None and self.max_np < self.min_np:
            raise ValueError(f"max_np is {self.max_np}, less than min_np, which is {self.min_np}")
        if self.spares < 0:
            raise ValueError(f"spares is {self.spares}, it must be 0 or more")
        if not self.restart_backoff_s or not self.agent_retry_s:
            raise ValueError("restart_backoff_s and agent_retry_s need at least one delay each")
