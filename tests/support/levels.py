"""Which tests run: the level of each case, and what the machine must have."""

import os
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import pytest


def by_level(
    cases: Iterable[Any], *, fast: Collection[Any] = (), slow: Collection[Any] = ()
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: every case that is not named is exhaustive."""
    cases = list(cases)
    assert {*fast, *slow} <= set(cases)
    assert not {*fast} & {*slow}

    def marks(case) -> list[pytest.MarkDecorator]:
        if case in fast:
            return []
        return [pytest.mark.slow if case in slow else pytest.mark.exhaustive]

    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case))
        for case in cases
    ]


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test; with VITSCALE_REQUIRE_ALL=1, as before a merge, fail it."""
    if os.environ.get("VITSCALE_REQUIRE_ALL") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
