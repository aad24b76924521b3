"""The cluster tools as Fabric tasks, to use as they are or to start a fabfile of one's own from.

fab -r scripts runclust --hostfile hosts --command 'nvidia-smi -L'
fab -r scripts copyclust --hostfile hosts --source ~/data/set --destination /data/
fab -r scripts killclust --hostfile hosts --run digits-1
fab -r scripts checkclust --hostfile hosts
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fabric import task
from fabric.exceptions import GroupException

from hvd_elastic.cluster import HostGroup
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.tools.check.health import check_cluster
from hvd_elastic.tools.kill import Target, kill_run


def hosts_of(hostfile: str) -> HostGroup:
    """Return the hosts, reached by the ssh configuration that the tools use."""
    config = os.environ.get("HVD_ELASTIC_SSH_CONFIG")
    options = SshOptions(config_path=None if config is None else Path(config))
    try:
        return HostGroup.from_hostfile(hostfile, options=options)
    except HvdElasticError as error:
        sys.exit(f"error: {error}")


def report(call: Callable[[], object]) -> None:
    """Call; name each host that failed, and end with status 1 if one did."""
    try:
        call()
    except GroupException as error:
        for member, why in error.result.failed.items():
            print(f"{member.host}: {why}", file=sys.stderr)
        sys.exit(1)
    except HvdElasticError as error:
        sys.exit(f"error: {error}")


@task
def runclust(_: Any, hostfile: str, command: str) -> None:
    """Run a shell command on every host."""
    report(lambda: hosts_of(hostfile).run(command))


@task
def copyclust(_: Any, hostfile: str, source: str, destination: str) -> None:
    """Copy a file or folder to every host, from host to host."""
    report(lambda: hosts_of(hostfile).put(source, destination))


@task
def killclust(_: Any, hostfile: str, run: str) -> None:
    """End what a crashed run left on every host."""
    group, failed = hosts_of(hostfile), False
    for found in kill_run(group.hosts, Target(run=run), group.options):
        failed |= not found.ok
        print(f"{found.host.name}: {found.error or f'{len(found.answer.processes)} ended'}")
    sys.exit(int(failed))


@task
def checkclust(_: Any, hostfile: str) -> None:
    """Find what would break a run on these hosts."""
    group, failed = hosts_of(hostfile), False
    for found in check_cluster(group.hosts, group.options).hosts:
        failed |= not found.ok
        print(f"{found.host.name}: {found.error or 'ready'}")
    sys.exit(int(failed))
