"""Which tests run: the level of each case, and what the machine must have."""

import os
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import pytest


def by_level(
    cases: Iterable[Any], *, fast: Collection[Any] = (), slow: Collection[Any] = ()
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: every case that is not named is exhaustive."""
    # A level that names no case would be a typing error, and the case would be exhaustive.
    cases = list(cases)
    assert {*fast, *slow} <= set(cases)
    assert not {*fast} & {*slow}

    parameters = []
    for case in cases:
        marks = [pytest.mark.exhaustive]
        if case in fast:
            marks = []
        elif case in slow:
            marks = [pytest.mark.slow]
        # A tuple has a value for each argument.
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=marks))
    return parameters


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test; with VITSCALE_REQUIRE_ALL=1, as before a merge, fail it."""
    if os.environ.get("VITSCALE_REQUIRE_ALL") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
