"""Work in threads: its order, its amount, its errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from data_prep.pipeline.image_reading import thread_results


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_results_come_in_order_and_few_items_are_pending(num_threads: int) -> None:
    taken, most, given = 0, 0, 0

    def items() -> Iterator[int]:
        nonlocal taken
        for i in range(40):
            taken += 1
            yield i

    def work(i: int) -> int:
        time.sleep(0.001 * (i % 3))
        return i * i

    for result in thread_results(work, items(), num_threads=lambda: num_threads):
        assert result == given * given
        given += 1
        most = max(most, taken - given)
    assert given == 40 and most <= num_threads


def test_the_number_of_threads_is_asked_for_again_and_again() -> None:
    wanted, names = iter([1] * 5 + [4] * 20 + [1] * 25), []

    def work(i: int) -> int:
        names.append(threading.current_thread().name)
        time.sleep(0.002)
        return i

    assert list(thread_results(work, range(50), num_threads=lambda: next(wanted))) == list(
        range(50)
    )
    main = threading.main_thread().name
    assert names[:5] == [main] * 5 and main not in names[5:25] and names[-1] == main
    assert len(set(names)) > 2


def test_an_error_in_a_thread_is_raised_and_ends_the_work() -> None:
    done = []

    def work(i: int) -> int:
        if i == 3:
            raise MemoryError("no room")
        done.append(i)
        return i

    with pytest.raises(MemoryError, match="no room"):
        list(thread_results(work, range(1000), num_threads=lambda: 2))
    assert len(done) < 20
