#!/usr/bin/env python3
"""Machines for `hvd-elastic cloud`: the hosts of a virtual cluster, each off until it is started.

The links offers, start, list and stop beside this file are the four programs. Each reads one JSON
object and prints one. Make the hosts before, and switch them off:

    virtclust up 4x1 --name rack
    for host in 1 2 3 4; do virtclust crash --name rack $host; done
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CLUSTER = os.environ.get("RACK", "rack")
RECORDS = Path(os.environ.get("RACK_RECORDS", Path.home() / ".rack.json"))
PRICES = {"small": 0.3, "large": 1.2}  # on demand, for an hour


def main(action, asked):
    if action == "offers":
        return {"offers": offers(asked["types"], asked["spot"])}
    with Path(f"{RECORDS}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process, also when that is killed
        return act(action, asked)


def act(action, asked):
    machines = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    hosts = {host["name"]: host for host in json.loads(virtclust("status"))["hosts"]}
    for machine in machines:
        host = hosts.get(machine["host"])  # None: the cluster was made anew, with fewer hosts
        if machine["state"] == "running" and (host is None or host["status"] == "off"):
            machine.update(state="ended", why="it was shut down")
    if action == "start":
        return {"machines": start(asked, machines, hosts)}
    if action == "list":
        return {"machines": [each for each in machines if has(each, asked["tags"])]}
    for machine in machines:
        if machine["id"] in asked["ids"] and machine["state"] == "running":
            virtclust("crash", machine["host"])
    return {}


def offers(types, spot):
    for name in types:
        if name not in PRICES:
            fail("unsupported", f"there is no type {name}; valid: {', '.join(PRICES)}")
    found = [{"type": name, "spot": False, "price": PRICES[name], "slots": 1} for name in types]
    if spot:
        found += [{**each, "spot": True, "price": each["price"] / 3} for each in found]
    return found


def start(asked, machines, hosts):
    before = [each for each in machines if each["tags"]["token"] == asked["token"]]
    if before:  # the answer was lost, and this is the same request again
        return before
    (offer,) = [each for each in offers([asked["type"]], True) if each["spot"] == asked["spot"]]
    used = {each["host"] for each in machines if each["state"] == "running"}
    free = [name for name, host in hosts.items() if name not in used and host["status"] == "off"]
    if not free:
        fail("capacity", "all hosts of the rack are in use")
    new = []
    for host in free[: asked["count"]]:
        machine = {
            **offer,
            "id": f"{host}-{asked['token']}",
            "host": host,
            "address": hosts[host]["address"],
            "state": "running",
            "tags": asked["tags"],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        new.append(machine)
        save([*machines, *new])  # before it boots: what is not recorded would run for ever
        virtclust("boot", host)
        run = (
            "cat > /run/user-data; setsid sh /run/user-data < /dev/null > /run/user-data.log 2>&1 &"
        )
        ssh(host, run, asked["user_data"])
    return new


def has(machine, tags):
    wanted = tags or {"cloud": machine["tags"].get("cloud")}
    return wanted.items() <= machine["tags"].items()


def save(machines):
    new = Path(f"{RECORDS}.new")
    new.write_text(json.dumps(machines, indent=1))
    new.rename(RECORDS)


def virtclust(verb, *hosts):
    command = ["virtclust", verb, "--json", "--name", CLUSTER, *hosts]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fail("other", done.stderr.strip())
    return done.stdout


def ssh(host, command, stdin):
    config = json.loads(virtclust("hostfile"))["ssh_config"]
    subprocess.run(["ssh", "-F", config, host, command], input=stdin, text=True, check=True)


def fail(error, message):
    print(json.dumps({"error": error, "message": message}))
    sys.exit(1)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[0]).name, json.load(sys.stdin))))
