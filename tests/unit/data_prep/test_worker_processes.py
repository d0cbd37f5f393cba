"""Results of worker processes come in order; errors and deaths are reported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from data_prep.worker_processes import PENDING_PER_WORKER, ordered_results
from vitscale.config.errors import UserError
from vitscale.distributed.processes import descendants


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_come_in_the_order_of_the_items(num_workers: int) -> None:
    items, taken = [(number, 0.05 if number % 3 == 0 else 0) for number in range(50)], []

    def lazily() -> Iterator[tuple[int, float]]:
        for item in items:
            taken.append(item)
            yield item

    found = []
    for item, result in ordered_results(str, lazily(), num_workers=num_workers):
        found.append(item)
        assert result == str(item)
        assert len(taken) <= len(found) + PENDING_PER_WORKER * num_workers
    assert found == items


def test_an_error_is_raised_here_and_ends_the_workers() -> None:
    before = descendants(os.getpid())
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(ordered_results(int, ["1", "x", "2"], num_workers=2))
    assert "in a worker process" in caught.value.__notes__[0]
    assert len(descendants(os.getpid())) <= len(before) + 2  # the server and its tracker


def test_a_dead_worker_process_is_reported() -> None:
    with pytest.raises(UserError, match="a worker process died"):
        list(ordered_results(os._exit, [1, 1, 1], num_workers=2))
