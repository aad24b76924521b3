"""Jobs on one host do not share a GPU."""

from __future__ import annotations

from hvd_elastic.hosts.hostfile import Host, format_hostfile, parse_hosts
from hvd_elastic.jobs.runs import Devices

HOST = Host("a", slots=4)


def test_jobs_have_different_devices_and_keep_them_while_they_grow():
    devices = Devices()
    assert devices.assign("one", HOST, 1) == (0,)
    assert devices.assign("two", HOST, 2) == (1, 2)
    assert devices.assign("one", HOST, 2) == (0, 3)


def test_a_device_is_free_only_when_the_process_on_it_is_gone():
    devices = Devices()
    devices.assign("one", HOST, 2)
    devices.assign("two", HOST, 2)
    assert devices.assign("one", HOST, 1) == (0,)
    devices.release("one", {"a": 1}, {"a": 2})
    assert devices.assign("two", HOST, 2) == (2, 3)
    devices.release("one", {"a": 1}, {"a": 1})
    assert devices.assign("two", HOST, 3) == (2, 3, 1)
    devices.forget("two")
    assert devices.assign("one", HOST, 3) == (0, 1, 2)


def test_every_slot_has_a_device_even_if_another_job_is_still_leaving_it():
    devices = Devices()
    devices.assign("one", HOST, 2)
    assert devices.assign("two", HOST, 4) == (2, 3, 0, 1)


def test_devices_of_the_cluster_s_hostfile_are_used_and_survive_the_daemon():
    (host,) = parse_hosts("gpu1 slots=2 devices=6,4\n", "hosts")
    devices = Devices()
    assert devices.assign("one", host, 1) == (6,)
    (written,) = parse_hosts(format_hostfile([Host("gpu1", slots=1, devices=(6,))]), "hosts")
    later = Devices()
    later.restore("one", [written])
    assert later.assign("two", host, 1) == (4,)
