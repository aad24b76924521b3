"""Asking a host's actor for rows, as far as it needs no Ray."""

from __future__ import annotations

import importlib
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvd_elastic.engines.ray.data import PLACE_VARIABLE, RayDataset, RowServer, StoredRows, _examine
from hvd_elastic.errors import DataError, StrangerError
from tests import other_user
from tests.paths import LIMIT_S


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> RowServer:
    made = RowServer(["train", "lost"])
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


def test_rows_are_read_only_in_a_training_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLACE_VARIABLE, raising=False)
    with pytest.raises(DataError, match="not one of such a training"):
        RayDataset()


def test_an_unknown_name_and_a_failed_data_set_are_told(server: RowServer) -> None:
    with pytest.raises(DataError, match="no data set 'test'; the trainer was given: train, lost"):
        RayDataset("test")
    server.offer("lost", DataError("a transform failed"))
    with pytest.raises(DataError, match="a transform failed"):
        RayDataset("lost")


def test_nulls_that_would_change_integers_are_found_by_column():
    pa = pytest.importorskip("pyarrow")
    columns = {"f": pa.array([0.5, None]), "s": pa.array([None, "x"]), "i": pa.array([1, 2])}
    assert _examine(pa.table(columns)) == (2, "")
    for bad in ([2**53 + 1, None], [[1, None], [3]]):
        assert _examine(pa.table({**columns, "bad": pa.array(bad)})) == (2, "bad")


def test_who_has_not_the_key_is_refused(server: RowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import AuthenticationError

    name = server.variables[PLACE_VARIABLE].partition(":")[0]
    monkeypatch.setenv(PLACE_VARIABLE, f"{name}:{'0' * 32}")
    with pytest.raises((DataError, AuthenticationError)):
        RayDataset()


@other_user.needs_root
def test_another_user_who_says_nothing_keeps_no_worker_waiting(server: RowServer) -> None:
    """They find its name in /proc/net/unix."""
    name = server.variables[PLACE_VARIABLE].partition(":")[0]
    program = "c = socket.socket(socket.AF_UNIX)\nc.connect('\\0' + sys.argv[1])\nprint(c.recv(1))"
    silent = other_user.start(program, name)
    assert silent.communicate(timeout=LIMIT_S)[0] == "b''\n", "it is not even asked for the key"
    with pytest.raises(DataError, match="no data set 'test'"):
        RayDataset("test")


@other_user.needs_root
def test_the_key_is_not_proved_to_another_user_who_has_taken_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with other_user.Holder("@hvd-ray-0123") as holder:
        monkeypatch.setenv(PLACE_VARIABLE, "hvd-ray-0123:0123")
        with pytest.raises(
            StrangerError, match=f"{re.escape(other_user.WORDS)} holds the local socket"
        ):
            RayDataset()
        assert holder.got() == "nothing"


def test_process_of_a_lost_host_waits_for_its_own_end(
    server: RowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of its script would end the run."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    name, _, key = server.variables[PLACE_VARIABLE].partition(":")
    monkeypatch.setenv(PLACE_VARIABLE, f"{name}-which-has-ended:{key}")
    with pytest.raises(DataError, match="the actor of this host, which serves it, is gone"):
        RayDataset()
    assert sum(waits) >= 5


def test_rows_are_read_by_index_from_their_blocks(
    server: RowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray.data") and importlib.import_module("ray")
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(ray, "get", lambda blocks: blocks)  # they are no references here
    blocks = tuple(pyarrow.table({"id": ids}) for ids in ([0, 1, 2], [3, 4]))
    server.offer("train", StoredRows(blocks, (3, 2)))
    data = RayDataset("train", shuffle_window=1)
    assert len(data) == 5
    assert [int(row["id"]) for row in data.__getitems__([4, 0, -2, 2])] == [4, 0, 3, 2]
    with ThreadPoolExecutor(1) as another_thread:
        assert another_thread.submit(data.__getitem__, 1).result() == {"id": 1}
    assert data.blocks == ((3, 2), 1)
    with pytest.raises(IndexError, match="row 5 of 5"):
        data[5]
    with pytest.raises(DataError, match="must be 1 or more"):
        RayDataset("train", shuffle_window=0)
