"""Make the script that each machine runs when it boots, and renew a machine's lease over ssh.

The machine ends itself in three ways, without credentials of the cloud: when nobody has renewed its
lease, at its deadline, and by a plain timer somewhat later if the program that does both has died.
"""

from __future__ import annotations

import shlex

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.remote_python import source_of

LEASE_S = 1200.0
"""How long a machine stays without a renewal [s]."""
LEASE_FILE = "/run/hvd_elastic_lease"
_SECOND_TIMER_S = 300.0
"""How long after the deadline the plain timer ends the machine [s]."""
_LIMIT_S = 20.0
"""Time limit for a renewal [s]."""

_SCRIPT = """#!/bin/sh
# Written by hvd_elastic: this machine ends itself, see docs/cloud.md.
max={max_s:.0f}
kept=/var/lib/cloud/instance
if [ -d $kept ]; then  # cloud-init runs it once; after a reboot it is to run again
    [ -s $kept/hvd_elastic_end ] || echo $(($(date +%s) + max)) > $kept/hvd_elastic_end
    left=$(($(cat $kept/hvd_elastic_end) - $(date +%s)))
    [ $left -gt $max ] || max=$left
    [ $max -gt 60 ] || max=60
    renewed=$kept/hvd_elastic_lease
    if [ "$0" != /var/lib/cloud/scripts/per-boot/hvd_elastic ]; then
        cp "$0" /var/lib/cloud/scripts/per-boot/hvd_elastic
        chmod 755 /var/lib/cloud/scripts/per-boot/hvd_elastic
    fi
fi
setsid sh -c "sleep $((max + {second_s:.0f})); shutdown -h now" < /dev/null > /dev/null 2>&1 &
{key}cat > {file}.py <<'HVD_ELASTIC_END'
{program}
HVD_ELASTIC_END
if command -v python3 > /dev/null; then
    setsid python3 {file}.py {file} {lease_s:g} $max {user} $renewed < /dev/null > {file}.log 2>&1 &
else
    echo "hvd_elastic: this image has no python3, so the machine ends soon" > /dev/console
    setsid sh -c 'sleep {lease_s:.0f}; shutdown -h now' < /dev/null > /dev/null 2>&1 &
fi
"""
_KEY = """home=$(getent passwd {user} | cut -d: -f6)
if [ -n "$home" ]; then
    mkdir -p "$home/.ssh"
    echo {key} >> "$home/.ssh/authorized_keys"
    chown -R {user} "$home/.ssh"
    chmod 700 "$home/.ssh"
    chmod 600 "$home/.ssh/authorized_keys"
fi
"""


def user_data(max_s: float, lease_s: float, login: str, public_key: str) -> str:
    """Return the script that a machine runs as root when it boots.

    Args:
        max_s: time until its deadline [s].
        lease_s: time until its lease ends, if nobody renews it [s].
        login: user who renews it.
        public_key: public key that may log in as that user; empty: the image or provider does it.
    """
    user = shlex.quote(login)
    return _SCRIPT.format(
        max_s=max_s,
        lease_s=lease_s,
        second_s=_SECOND_TIMER_S,
        file=LEASE_FILE,
        user=user,
        program=source_of("hvd_elastic.programs.lease").rstrip(),
        key=_KEY.format(user=user, key=shlex.quote(public_key)) if public_key else "",
    )


def renew_lease(connection: Connection, lease_s: float) -> None:
    """Have a machine stay for so long from now, but not beyond its deadline.

    Raises:
        SshError: it cannot be reached, or has no lease, so that nothing would end it in time.
    """
    text = f"[ -e {LEASE_FILE} ] && echo {lease_s:.1f} > {LEASE_FILE}"
    result = connection.run(["sh", "-c", text], timeout_s=_LIMIT_S)
    if result.exit_status < 0:
        raise SshError(f"host {connection.host.name}: the connection was lost")
    if not result.ok:
        said = result.stderr.decode(errors="replace").strip()
        raise SshError(
            f"host {connection.host.name}: its lease cannot be renewed: {said or LEASE_FILE}"
            f"{'' if said else ' is not there, so its image has not run the user data'}"
        )
