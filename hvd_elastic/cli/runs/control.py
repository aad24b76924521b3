"""Commands that control runs: stop, scale, policy, drain and debug.

Each but the last writes a request into the run folder and waits for the leader's answer, so it
works from any shell of the same user, even after the run's terminal was lost.
"""

# ruff: noqa: D301  (the backspace tells the command line to keep the lines of the examples)
from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
import sys
import threading
import time
from typing import Annotated, Any

from hvd_elastic.cli.jobs.daemon import ClusterOption, drain_host
from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.options import (
    AsJson,
    RequiredRun,
    argument,
    option,
    parse_duration,
    parse_whole_number,
)
from hvd_elastic.cli.output import print_json, wait_until
from hvd_elastic.cli.runs.shell import hosts_by_ssh
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count
from hvd_elastic.records.json_lines import Follower
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.wording import resume_words
from hvd_elastic.run_events import HostDrained, ReadEvent, RunFinished, RunStarted

DRAIN_TIMEOUT_S = 90.0
"""How long to wait for a host to be drained [s]; longer than replacements take to become warm."""
_POLL_S = 0.1  # between two readings of files that are followed


def stop(
    run: RequiredRun,
    wait: Annotated[bool, option("wait until the run has ended")] = True,
    as_json: AsJson = False,
) -> None:
    """End a run cleanly: its workers finish their step, and no process stays on the hosts.

    \b
    Examples:
      hvd-elastic stop digits-3
      hvd-elastic stop digits-3 --no-wait
    """
    folder = open_run(run)
    message = folder.ask_leader("stop", {"reason": "asked to by hvd-elastic stop"})
    ended = _wait_for_end(folder) if wait else None
    result = ended.status if ended else "stopping"
    if as_json:
        _answer(as_json, message, folder, status=result)
        return
    steps = f" after {count(ended.steps, 'step')}" if ended else ""
    print(f"run {folder.run_id}: {result}{steps}")
    if ended and (way_on := resume_words(ended)):
        print(way_on)


def scale(
    run: RequiredRun,
    np: Annotated[str, argument("Processes to train with, or 'auto': as many as allowed.", "N")],
    as_json: AsJson = False,
) -> None:
    """Set the number of processes of a run; training continues meanwhile.

    \b
    Examples:
      hvd-elastic scale digits-3 4
      hvd-elastic scale digits-3 auto
    """
    wanted = None if np == "auto" else parse_whole_number("N", np, instead=", or 'auto'")
    folder = open_run(run)
    _answer(as_json, folder.ask_leader("scale", {"np": wanted}), folder, np=wanted)


def policy(
    run: RequiredRun,
    do: Annotated[str, argument("What it should do.", "pause|resume")],
    as_json: AsJson = False,
) -> None:
    """Pause or resume the policy that changes the number of processes of a run.

    \b
    Examples:
      hvd-elastic policy digits-3 pause
      hvd-elastic policy digits-3 resume
    """
    if do not in ("pause", "resume"):
        raise UsageError(f"a policy can pause or resume, not {do!r}")
    folder = open_run(run)
    _answer(as_json, folder.ask_leader("policy", {"do": do}), folder, do=do)


def drain(
    names: Annotated[
        list[str],
        argument("A host of the cluster; or a run, and a host of its hostfile.", "[RUN] HOST"),
    ],
    reason: Annotated[
        str | None, option("reason for the drain, shown by hosts", "--reason")
    ] = None,
    at: Annotated[
        str | None,
        option(
            "From when on a host of the cluster is drained, such as 22:00", "--at", metavar="TIME"
        ),
    ] = None,
    leave_in: Annotated[
        str | None,
        option(
            "Time until the host goes away, such as 120s; it is used until replacements are ready",
            "--in",
            metavar="TIME",
        ),
    ] = None,
    undo: Annotated[bool, option("give the host back to the run", "--undo")] = False,
    wait: Annotated[bool, option("wait until the run has left the host")] = True,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Have all jobs of the cluster leave a host until undrain; or one run until --undo.

    \b
    Examples:
      hvd-elastic drain node2 --reason "bad DIMM"
      hvd-elastic drain digits-3 node2
      hvd-elastic drain digits-3 node2 --in 120s --no-wait
      hvd-elastic drain digits-3 node2 --undo
    """
    if len(names) > 2:
        raise UsageError(f"drain takes a host, or a run and a host, not {' '.join(names)}")
    if len(names) == 1:
        if undo:
            raise UsageError(
                f"--undo gives a host back to a run; of the cluster do: hvd-elastic undrain "
                f"{names[0]}"
            )
        if reason is None:
            raise UsageError(
                f"--reason is missing: drain {names[0]} --reason TEXT has all jobs of the cluster "
                f"leave it; one run leaves it by: hvd-elastic drain RUN {names[0]}"
            )
        if at is not None and leave_in is not None:
            raise UsageError("--at is a time of the clock, --in a time from now: give one of them")
        begins = None if at is None else _parse_time("--at", at)
        if leave_in is not None:
            begins = time.time() + parse_duration("--in", leave_in)
        drain_host(names[0], reason, begins, cluster, wait, as_json)
        return
    run, host = names
    for name, value in {"--reason": reason, "--at": at}.items():
        if value is not None:
            raise UsageError(f"{name} is of a host of the cluster: leave it out, or the run")
    if undo and leave_in is not None:
        raise UsageError("--undo gives a host back, --in says when it goes: give one of them")
    leave_in_s = None if leave_in is None else parse_duration("--in", leave_in)
    folder = open_run(run)
    follower = folder.follow_events(last_bytes=0)
    message = folder.ask_leader("drain", {"host": host, "leave_in_s": leave_in_s, "undo": undo})
    drained = None
    if wait and not undo:
        try:
            drained = _wait_until_drained(folder, follower, host, leave_in_s or 0.0)
        except KeyboardInterrupt:
            print(
                f"run {folder.run_id} is still leaving host {host}; give it back with: hvd-elastic "
                f"drain {folder.run_id} {host} --undo",
                file=sys.stderr,
            )
            raise
        message = f"nothing of run {folder.run_id} is left on host {host}"
    _answer(as_json, message, folder, host=host, drained=drained, undone=undo)


def _parse_time(name: str, text: str) -> float:
    """Return a time of the clock [Unix s]: today or tomorrow, or of a day that is named."""
    now = dt.datetime.now().astimezone()
    with contextlib.suppress(ValueError):
        clock = dt.time.fromisoformat(text)
        at = now.replace(hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0)
        if clock.tzinfo is None:
            return (at if at > now else at + dt.timedelta(days=1)).timestamp()
    with contextlib.suppress(ValueError):
        at = dt.datetime.fromisoformat(text).astimezone()
        if at <= now:
            raise UsageError(f"{name} {text} is over; leave it out to drain the host at once")
        return at.timestamp()
    raise UsageError(f"{name} takes a time such as 22:00 or '2026-12-24 22:00', not {text!r}")


def _wait_until_drained(
    folder: RunFolder, follower: Follower[ReadEvent], host: str, leave_in_s: float
) -> bool:
    deadline = time.monotonic() + leave_in_s + DRAIN_TIMEOUT_S
    while True:
        alive = folder.leader_alive()  # before reading, so that its last events are read too
        for event in follower.poll():
            match event:
                case RunFinished():
                    return True
                case HostDrained(host=drained) if drained.lower() == host.lower():
                    return True
        if not alive:
            folder.need_leader("drain")
        if time.monotonic() > deadline:
            raise RunError(
                f"run {folder.run_id} was asked to leave host {host} and still has a worker there: "
                "only that one has the state of the training. Add a host to the hostfile, or see: "
                f"hvd-elastic status {folder.run_id}"
            )
        time.sleep(_POLL_S)


def _wait_for_end(folder: RunFolder) -> RunFinished:
    wait_until(
        lambda: not folder.leader_alive(),
        f"run {folder.run_id} is stopping, and may have a large checkpoint to write "
        f"({folder.leader()}). Ctrl-C ends the waiting alone; see: hvd-elastic logs "
        f"{folder.run_id} --leader",
    )
    ends = (RunFinished, RunStarted)
    ended = [event for event in folder.last_events(*ends) if isinstance(event, ends)]
    if ended and isinstance(ended[-1], RunFinished):
        return ended[-1]
    raise RunError(
        f"run {folder.run_id} has not ended cleanly: its leader died; resume with: "
        f"{folder.resume_command}"
    )


def _answer(as_json: bool, message: str, folder: RunFolder, **more: Any) -> None:
    """Print the leader's answer to a request."""
    if as_json:
        print_json({"run_id": folder.run_id, "ok": True, **more, "message": message})
    else:
        print(message)


def debug(
    run: RequiredRun,
    worker: Annotated[str, argument("The worker, as the warning names it.", "HOST:SLOT")],
) -> None:
    """Join a worker that stands at breakpoint() in the training script: its pdb, here.

    The other ranks wait meanwhile, and no deadline counts for it. When you leave (Ctrl-D, quit),
    training continues; so it does after Ctrl-C. Where no worker stands yet, this waits for it.

    Examples:
      hvd-elastic debug digits-3 node2:0
    """
    from hvd_elastic.hosts.remote_python import start_program
    from hvd_elastic.hosts.ssh import connect

    folder = open_run(run)
    by_ssh = ", and a debugger is joined by ssh"
    instead = "start the script with --np 1 on this machine, or use a hostfile"
    known, options = hosts_by_ssh(folder, "debug", f"{by_ssh}: {instead}")
    found = re.fullmatch(r"(.+):(\d+)", worker)
    if found is None or found[1] not in known or int(found[2]) >= known[found[1]].slots:
        raise UsageError(
            f"{worker} is no worker of run {folder.run_id}; name one as HOST:SLOT, with a host of "
            f"{', '.join(list(known)[:8])}"
        )
    program = "hvd_elastic.programs.join_debugger"
    with connect(known[found[1]], options) as connection:
        process = start_program(connection, program)
        process.stdin.write(json.dumps([folder.run_id, found[1], int(found[2])]).encode() + b"\n")

        def pass_input() -> None:
            with contextlib.suppress(OSError, EOFError):
                for line in sys.stdin:
                    process.stdin.write(line.encode())
                process.stdin.close()

        threading.Thread(target=pass_input, daemon=True).start()
        while output := process.stdout.read(1 << 16):
            sys.stdout.write(output.decode(errors="replace"))
            sys.stdout.flush()
        if status := process.wait():
            raise RunError(f"host {found[1]}: {process.last_line or f'exit status {status}'}")
