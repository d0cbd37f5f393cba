"""A process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine.array_subject import one_rank


@pytest.fixture
def group() -> Iterator[None]:
    with one_rank():
        yield
