"""The level of each case of a parametrised test."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_level(
    cases: Iterable[Any], *, fast: Collection[Any] = (), slow: Collection[Any] = ()
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: every case that is not named is exhaustive."""
    cases = list(cases)
    assert {*fast, *slow} <= set(cases) and not {*fast} & {*slow}

    def marks(case: Any) -> list[pytest.MarkDecorator]:
        if case in fast:
            return []
        return [pytest.mark.slow if case in slow else pytest.mark.exhaustive]

    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case))
        for case in cases
    ]
