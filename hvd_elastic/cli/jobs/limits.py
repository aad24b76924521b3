"""Implement ``hvd-elastic limits``: what each user of a cluster has, and may have at a time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hvd_elastic.cli.jobs.daemon import ClusterOption, warn_of_no_daemon
from hvd_elastic.cli.options import AsJson
from hvd_elastic.cli.output import print_json, table_lines
from hvd_elastic.formatting import duration_words


def limits(cluster: ClusterOption = None, as_json: AsJson = False) -> None:
    """Show the shares of the users of a cluster, their limits, and what they have now.

    FAIR is the part of the slots in use that was due to a user by WEIGHT and by what the jobs could
    use, USED the part that they had; both count half after the half-life. The daemon reads weights
    and limits from limits.toml in the folder of the cluster, whenever it is saved:

      half_life = "7d"
      each.weight = 1
      each.most_slots = 8
      each.most_jobs = 4
      user.ada.weight = 2
      group.students.most_slots = 16
      all.longest_time = "2d"

    Examples:
      hvd-elastic limits

      hvd-elastic limits --cluster /srv/queue --json
    """
    from hvd_elastic.jobs.job import ShowLimits
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.server import ask_daemon

    place = open_cluster(cluster)
    is_up = place.daemon_alive()
    if is_up or place.is_others:
        answer = ask_daemon(place, ShowLimits())
        found = answer.data
        if answer.message:
            print(f"warning: {answer.message}", file=sys.stderr)
    else:
        from hvd_elastic.jobs.limits import Limits
        from hvd_elastic.jobs.rights import open_queue
        from hvd_elastic.jobs.shares import ClusterShares

        shares = ClusterShares(place.shares, lambda _: None)
        found = shares.rows(Limits.read(place.limits), open_queue(place).active())
    if as_json:
        print_json(found)
        return
    if not is_up:
        warn_of_no_daemon(place)
    for line in limit_lines(found):
        print(line)


def limit_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table, the head first."""
    rows = [(row["user"], row) for row in found["users"]]
    rows.append(("each other", found["each"]))
    rows += [(f"group {row['group']}", row) for row in found["groups"]]
    rows.append(("all", found["all"]))
    columns = ["JOBS", "AT MOST", "SLOTS", "AT MOST"]
    if has_shares := found["half_life_s"] is not None:
        columns = ["WEIGHT", "FAIR", "USED", *columns]
    if has_times := any(row["longest_s"] for _, row in rows):
        columns.append("TIME AT MOST")
    cells = [["USER", *columns]]
    for name, row in rows:
        line = [row.get("jobs", ""), row["most_jobs"] or "-", row.get("slots", "")]
        line.append(row["most_slots"] or "-")
        if has_shares:
            parts = [_part(row.get(key)) for key in ("fair_share", "used_share")]
            weight = row["weight"] or (None if name == "all" or "group" in row else 1.0)
            line = ["" if weight is None else f"{weight:g}", *parts, *line]
        if has_times:
            line.append(duration_words(row["longest_s"]) if row["longest_s"] else "-")
        cells.append([name, *map(str, line)])
    return table_lines(cells, left={0})


def _part(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}".replace("%", " %")
