"""Ask the user once whether to accept host keys and to install the leader's key on hosts."""

from __future__ import annotations

import getpass
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from hvd_elastic.cli.cluster.host_options import HostOptions
from hvd_elastic.cli.options import option
from hvd_elastic.cli.output import print_json_line
from hvd_elastic.formatting import count
from hvd_elastic.hosts.fanout import HostResult
from hvd_elastic.hosts.hostfile import Host, fold_hosts
from hvd_elastic.hosts.ssh import own_known_hosts
from hvd_elastic.tools.bootstrap import bring_key, find_leader_key
from hvd_elastic.tools.trust import ShownKey, TrustState, trust_hosts

Bootstrap = Annotated[
    bool, option("First accept host keys and install your own key there.", "--bootstrap")
]
Yes = Annotated[bool, option("With --bootstrap: accept without asking.", "--yes", "-y")]
REFUSED = (TrustState.DECLINED, TrustState.REFUSED, TrustState.UNREACHABLE)


def accept_host_keys(
    chosen: HostOptions,
    yes: bool,
    also: str = "",
    then: Callable[[list[ShownKey]], None] = lambda _: None,
) -> list[ShownKey]:
    """Show the unknown keys of the hosts, ask once, and accept them.

    Args:
        yes: whether to accept without asking.
        also: a further action that the answer is about, such as "let …"; with it, the question is
            asked even if all keys are known.
        then: does that with the hosts, those of jump hosts before the ones behind them.

    Returns:
        One entry for each host.

    Raises:
        typer.Exit: the answer to ``also`` alone was no.
    """
    asked = yes

    def confirm(unknown: list[ShownKey]) -> bool:
        nonlocal asked
        first, asked = not asked, True
        if not chosen.as_json:
            width = max(len(entry.host) for entry in unknown)
            for entry in unknown:
                kind = entry.key.key_type if entry.key else ""
                print(f"{entry.host:{width}}  {kind}  {entry.fingerprint}", flush=True)
        what = f"Accept {count(len(unknown), 'key')}" + (f", and {also}" if also and first else "")
        return yes or _ask(chosen, what)

    def trusted(shown: list[ShownKey]) -> None:
        nonlocal asked
        if shown and also and not asked and not _ask(chosen, also[:1].upper() + also[1:]):
            raise typer.Exit(1)
        asked = asked or bool(shown)
        then(shown)

    shown = trust_hosts(chosen.hosts, chosen.ssh, confirm, chosen.fanout, trusted)
    counts = Counter(entry.state for entry in shown)
    for entry in shown:
        if chosen.as_json:
            print_json_line(
                {
                    "kind": "key" if also else "host",
                    "host": entry.host,
                    "state": entry.state.value,
                    "key_type": entry.key.key_type if entry.key else None,
                    "fingerprint": entry.fingerprint or None,
                    "error": entry.message,
                }
            )
        elif entry.message:
            print(f"{entry.host}: {entry.state.value}: {entry.message}", file=sys.stderr)
    if not chosen.as_json:
        words = [f"{number} {state.value}" for state, number in counts.items()]
        print(
            f"{count(len(shown), 'host')}: {', '.join(words)} ({own_known_hosts()})",
            file=sys.stderr,
        )
    return shown


def bootstrap_hosts(chosen: HostOptions, yes: bool) -> None:
    """Accept host keys and install the leader's key on the hosts that lack it.

    Raises:
        typer.Exit: the user declined.
    """
    key = find_leader_key(chosen.hosts, chosen.ssh)
    what = key.fingerprint or "a new one"
    number = count(len(chosen.hosts), "host")

    def ask_password(refusing: Sequence[Host]) -> str | None:
        if chosen.as_json or not sys.stdin.isatty():
            return None
        names = fold_hosts([host.name for host in refusing])
        return getpass.getpass(f"Password for {names} (used once, not kept): ") or None

    results: list[HostResult[str]] = []

    def bring(shown: list[ShownKey]) -> None:
        nonlocal key
        fit = {entry.host for entry in shown if entry.state not in REFUSED}
        hosts = [host for host in chosen.hosts if host.name in fit]
        if hosts and all(entry.state is not TrustState.DECLINED for entry in shown):
            key = key.make()
            results.extend(bring_key(hosts, key, chosen.ssh, ask_password, chosen.fanout))

    also = f"let your key {key.path} ({what}) log in on the {number} of the hostfile"
    shown = accept_host_keys(chosen, yes, also, bring)
    if any(entry.state is TrustState.DECLINED for entry in shown):
        raise typer.Exit(1)
    if chosen.as_json:
        return
    done = Counter(result.value for result in results if result.ok)
    for result in results:
        if not result.ok:
            print(result.error, file=sys.stderr)
    words = [f"{number} {word}" for word, number in done.items()]
    print(f"key {key.path}: {', '.join(words) or 'on no host'}", file=sys.stderr)


def _ask(chosen: HostOptions, what: str) -> bool:
    if chosen.as_json or not sys.stdin.isatty():
        if not chosen.as_json:
            print(f"{what}? Not asked: this is no terminal; --yes accepts", file=sys.stderr)
        return False
    print(f"{what}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
