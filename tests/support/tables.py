"""Cases of tests as tables, and what a refused one raises."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from vitscale.config.errors import UserError

Values = dict[str, Any]
"""Settings by their names."""


def rows(text: str) -> pytest.MarkDecorator:
    """Parametrize a test. text: YAML, a list of rows, the first of which names the arguments."""
    names, *cases = yaml.safe_load(text)
    return pytest.mark.parametrize(names, cases)


def words(**values: str) -> pytest.MarkDecorator:
    """Parametrize a test with the words of a text: words(kind="run npz")."""
    ((name, text),) = values.items()
    return pytest.mark.parametrize(name, text.split())


def refused(message: str) -> pytest.RaisesExc[UserError]:
    """Expect the one error that bad input gets. message: a pattern in it."""
    return pytest.raises(UserError, match=message)
