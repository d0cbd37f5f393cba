"""The YAML dialect: what a scalar means, what is refused, and the line of every value."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.config.errors import UserError
from vitscale.config.loader import yaml_flow
from vitscale.config.yaml_source import (
    MAX_KEY_LENGTH,
    MAX_NODES,
    YamlNode,
    node_at,
    parse_value,
    parse_yaml,
    plain_value,
)


def read(text: str) -> tuple[YamlNode | None, list[str]]:
    errors: list[UserError] = []
    root = parse_yaml(text, name="x.yaml", errors=errors)
    return root, [error.text() for error in errors]


def value_of(text: str) -> Any:
    root, errors = read(f"key: {text}")
    assert root is not None and not errors
    return plain_value(root)["key"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("2.", 2.0),
        ("-3", -3),
        ("+3", 3),
        ("-1.5e+2", -150.0),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        *((word, word) for word in ("on", "off", "yes", "no", "y", "N", "1_000", "1:30", "1e")),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("[1, a, null]", [1, "a", None]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("=", "="),
    ],
)
def test_scalars_resolve_to_typed_values(text: str, value: Any) -> None:
    read_value = value_of(text)
    assert read_value == value and type(read_value) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "x.yaml:3: a: key 'a' is given twice; first on line 1"),
        ("g:\n  a: 1\n  a: 2", "x.yaml:3: g.a: key 'a' is given twice; first on line 2"),
        ("a: &x 1", "x.yaml:1: a: YAML anchor &x is not supported"),
        ("a: &x 1\nb: *x", "x.yaml:2: b: YAML alias *x is not supported"),
        ("a: &x {q: 1}\nb: {<<: *x}", "x.yaml:2: b.<<: YAML alias *x is not supported"),
        ("a: !!python/object/apply:os.system [ls]", "x.yaml:1: a: YAML tag tag:yaml.org,2002:pyt"),
        ("a: !env HOME", "x.yaml:1: a: YAML tag !env is not supported"),
        ("1: a", "x.yaml:1: key '1' is not text"),
        (f"{'k' * 101}: a", "is longer than 100 characters"),
        ("true: a", "x.yaml:1: key 'true' is not text"),
        ("? [a]\n: 1", "x.yaml:1: a list or group cannot be a key"),
        ("a: .nan", "x.yaml:1: a: .nan is not a finite number"),
        ("a: [1, -.inf]", "x.yaml:1: a.1: -.inf is not a finite number"),
        ("a: 1e999", "x.yaml:1: a: 1e999 is a number too large"),
        ("a: 99999999999999999999", "x.yaml:1: a: 99999999999999999999 is a whole number beyond"),
        ("a: 1\n---\nb: 2", "x.yaml:2: not readable as YAML: expected a single document"),
        ("a: [1, 2", "x.yaml:1: not readable as YAML"),
        ("a:\n\t- 1", "x.yaml:2: not readable as YAML"),
        ("a: b: c", "x.yaml:1: not readable as YAML: mapping values are not allowed here"),
        ("a: *gone", "x.yaml:1: a: YAML alias *gone is not supported"),
        ('a: "\\UFFFFFFFF"', "x.yaml:1: "),
        ('a: "\\ud800"', "x.yaml:1: a: "),
        ("a: \x00", "x.yaml:1: not readable as YAML"),
        ("[" * 5000, "x.yaml:1: nested deeper than 32 levels"),
        ("a:\n" + "  - 1\n" * MAX_NODES, "more than 20000 keys and values"),
    ],
)
def test_unsupported_yaml_is_refused(text: str, message: str) -> None:
    _, errors = read(text)
    assert [error for error in errors if message in error]


def test_anchors_of_one_name_are_each_reported() -> None:
    root, errors = read("a: &x 1\nb: &x 2\nc: 3\n")
    assert len(errors) == 2
    assert root is not None and plain_value(root) == {"c": 3}


def test_alias_bomb_is_not_expanded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    root, errors = read("\n".join(lines))
    assert errors and root is not None


def test_nodes_carry_the_line_of_their_key() -> None:
    root, _ = read("a:\n  b: 1\n\n  c:\n    - 2\n    - 3\n")
    assert root is not None
    assert node_at(root, ("a", "b"))[0].place == "x.yaml:2"
    assert node_at(root, ("a", "c"))[0].place == "x.yaml:4"
    assert node_at(root, ("a", "c", "1"))[0].place == "x.yaml:6"


@pytest.mark.parametrize(
    "text", ["sqlite:///runs/x.db", "a: b", "a # b", "*x", "!x", "C:\\x", "- a", "a=b", "@x"]
)
def test_override_text_needs_no_quotes(text: str) -> None:
    errors: list[UserError] = []
    node = parse_value(text, place="command line", where="command line: k", errors=errors)
    assert (node.content, errors) == (text, [])


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
)  # fmt: skip
KEYS = st.text(min_size=1, max_size=MAX_KEY_LENGTH)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3)
)


@given(VALUES)
def test_written_values_are_read_back(value: Any) -> None:
    root, errors = read(f"key: {yaml_flow(value)}\n")
    assert root is not None and not errors
    back = plain_value(root)["key"]
    assert back == value and repr(back) == repr(value)


@given(st.text(max_size=60))
def test_any_text_gives_values_or_errors(text: str) -> None:
    root, errors = read(text)
    assert root is not None or errors


@given(st.from_regex(r"[-+]?[0-9]{1,3}(\.[0-9]{0,3})?(e[-+]?[0-9]{1,2})?", fullmatch=True))
def test_numbers_are_python_numbers(text: str) -> None:
    assert math.isclose(value_of(text), float(text))
