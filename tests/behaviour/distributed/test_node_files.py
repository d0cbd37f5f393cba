"""A value is made once per node and mapped by the other ranks; nothing is left behind."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.support.ranks.thread_ranks import run_ranks
from tests.support.waiting import wait_until
from vitscale.config.errors import StorageError
from vitscale.distributed.node_files import Column, once_per_node
from vitscale.distributed.processes import is_alive, node_name

PER_NODE = 4


def test_one_rank_of_a_node_makes_it() -> None:
    made = []

    def make(rank: int) -> dict[str, Any]:
        made.append(rank)
        rows = np.arange(1000)
        return {"rows": rows, "same": rows, "empty": np.empty(0), "names": ("a", "b")}

    values = run_ranks(
        3, lambda rank, gather: once_per_node(lambda: make(rank), is_maker=rank == 0, gather=gather)
    )
    assert made == [0]
    for value in values:
        assert np.array_equal(value["rows"], np.arange(1000)) and value["names"] == ("a", "b")
        assert not value["rows"].flags.writeable and value["empty"].size == 0
        assert value["rows"].path == value["same"].path


def test_columns_pickle_as_their_path_and_parts_as_arrays() -> None:
    column: Column = once_per_node(
        lambda: np.arange(100_000), is_maker=True, gather=lambda own: [own]
    )
    assert len(pickle.dumps(column)) < 1000
    for array in (column, column[7:90], column + 1):
        assert np.array_equal(pickle.loads(pickle.dumps(array)), array)


def test_error_of_any_rank_is_raised_on_all() -> None:
    def make(rank: int) -> int:
        if rank == PER_NODE:
            raise StorageError("no index", where="shards")
        return rank

    def one(rank: int, gather: Any) -> str:
        with pytest.raises(StorageError) as caught:
            once_per_node(lambda: make(rank), is_maker=rank % PER_NODE == 0, gather=gather)
        return str(caught.value)

    assert set(run_ranks(2 * PER_NODE, one)) == {"shards: no index"}


MAKER = """
import pickle, sys
import numpy as np
from vitscale.distributed.node_files import once_per_node
column = once_per_node(lambda: np.arange(5), is_maker=True, gather=lambda own: [own])
sys.stdout.buffer.write(pickle.dumps(column))
sys.stdout.flush()
sys.stdin.read()
"""


def test_what_another_process_made_outlives_it() -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with maker:
        assert maker.stdout is not None
        column = pickle.load(maker.stdout)
        maker.kill()
    wait_until(lambda: not is_alive(maker.pid))
    for array in (column, pickle.loads(pickle.dumps(column))):
        assert array.tolist() == [0, 1, 2, 3, 4]
    # As in a container, where the maker does not exist, or is another process.
    place = node_name(), column.path, (1, 1)
    found = once_per_node(lambda: "own", is_maker=False, gather=lambda own: [own, place])
    assert found == "own"
