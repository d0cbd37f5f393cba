"""Cases of tests as tables, and what a refused one raises."""

import itertools
from collections.abc import Iterable
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


def lines(text: str) -> pytest.MarkDecorator:
    """Parametrize a test with texts. A line is a case, with "|" between two arguments.

    The first line names the arguments; spaces around "|" and empty lines do not count.
    """
    table = []
    for line in text.splitlines():
        # A line that starts with # says what the cases below it stand for.
        if line and not line.startswith("#"):
            cells = line.split("|")
            table.append([cell.strip() for cell in cells])
    names, *cases = table
    return pytest.mark.parametrize(names, cases)


def every(**values: str | Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every combination of values: every(kind="run, npz", stage="0, 3").

    values: per argument a list, or the text of one: YAML without its brackets.
    """
    choices = {}
    for name, given in values.items():
        if isinstance(given, str):
            given = yaml.safe_load(f"[{given}]")
        choices[name] = given
    if len(choices) == 1:
        # Not as tuples of one: its cases may be pytest.param.
        return pytest.mark.parametrize(*choices.popitem())
    # A list, since a mark that two tests share is read twice.
    combinations = list(itertools.product(*choices.values()))
    return pytest.mark.parametrize(list(choices), combinations)


def words(**values: str) -> pytest.MarkDecorator:
    """Parametrize a test with the words of a text: words(kind="run npz")."""
    ((name, text),) = values.items()
    return pytest.mark.parametrize(name, text.split())


def refused(message: str) -> pytest.RaisesExc[UserError]:
    """Expect the one error that bad input gets. message: a pattern in it."""
    return pytest.raises(UserError, match=message)
