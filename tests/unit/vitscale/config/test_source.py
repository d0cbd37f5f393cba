"""The YAML dialect, the line of every key, and files with their bases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.run import PretrainRun
from tests.support.run_files import VALID, errors_of
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import load_run_file
from vitscale.config.source import read_chain, read_override, read_yaml, yaml_flow


def value_of(text: str) -> Any:
    return read_yaml(f"key: {text}", name="x")["key"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("2.", 2.0),
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
    found = value_of(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "x:3: a: key 'a' is given twice; first on line 1"),
        ("a: &x 1", "x:1: a: YAML anchor &x is not supported"),
        ("a: &x {q: 1}\nb: {<<: *x}", "x:2: b.<<: YAML alias *x is not supported"),
        ("a: &x 1\nb: &x 2", "x:2: b: YAML anchor &x is not supported"),
        ("a: !!python/object/apply:os.system [ls]", "x:1: a: YAML tag tag:yaml.org,2002:pyt"),
        ("a: !env HOME", "x:1: a: YAML tag !env is not supported"),
        ("g: {1: a}", "x:1: g: key '1' is not text"),
        ("? [a]\n: 1", "x:1: a list or group cannot be a key"),
        ("a: [1, -.inf]", "x:1: a.1: -.inf is not a finite number"),
        ("a: 1e999", "x:1: a: 1e999 is a number too large"),
        ("a: 99999999999999999999", "x:1: a: 99999999999999999999 is a whole number beyond"),
        ("a: 1\n---\nb: 2", "x:2: not readable as YAML: a second document begins"),
        ("a:\n\t- 1", "x:2: not readable as YAML"),
        ('a: "\\UFFFFFFFF"', "x:1: not readable as YAML"),
        ('a: "\\ud800"', "x:1: a: "),
        ("a: \x00", "x:1: not readable as YAML"),
        ("[" * 5000, "x:1: not readable as YAML: nested deeper than 32 levels"),
    ],
)
def test_unsupported_yaml_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserErrors) as caught:
        read_yaml(text, name="x")
    assert [error for error in caught.value.errors if error.text().startswith(message)]


def test_an_alias_bomb_is_not_expanded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(UserErrors):
        read_yaml("\n".join(lines), name="x")


@pytest.mark.parametrize(
    "text", ["sqlite:///runs/x.db", "a: b", "a # b", "*x", "!x", "C:\\x", "- a", "a=b", "@x"]
)
def test_text_on_the_command_line_needs_no_quotes(text: str) -> None:
    errors: list[UserError] = []
    source = read_override(f"g.k={text}", errors=errors)
    assert source is not None and (source.values, errors) == ({"g": {"k": text}}, [])


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
)  # fmt: skip
KEYS = st.text(min_size=1, max_size=100)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3)
)


@given(VALUES)
def test_written_values_are_read_back(value: Any) -> None:
    back = value_of(yaml_flow(value))
    assert back == value and repr(back) == repr(value)


@given(st.text(max_size=60))
def test_any_text_gives_values_or_errors(text: str) -> None:
    try:
        read_yaml(text, name="x")
    except UserErrors as errors:
        assert all(error.where for error in errors.errors)


@given(st.from_regex(r"[-+]?[0-9]{1,3}(\.[0-9]{0,3})?(e[-+]?[0-9]{1,2})?", fullmatch=True))
def test_numbers_are_python_numbers(text: str) -> None:
    assert math.isclose(value_of(text), float(text))


# ---- files ------------------------------------------------------------------------------------


def test_keys_and_items_carry_their_line(here: Path) -> None:
    (here / "b.yaml").write_text("a:\n  b: 1\n\n  c:\n    - 2\n    - d: 3\n")
    [source] = read_chain("b.yaml", errors=[])
    lines = {".".join(path): place for path, place in source.places.items()}
    assert (lines["a"], lines["a.b"], lines["a.c"]) == ("b.yaml:1", "b.yaml:2", "b.yaml:4")
    assert (lines["a.c.0"], lines["a.c.1.d"]) == ("b.yaml:5", "b.yaml:6")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: \xff\n", "b.yaml:1: is not UTF-8 text"),
        (b"#" * ((1 << 20) + 1), "b.yaml: is larger than 1 MiB"),
        (b"- 1\n", "b.yaml:1: contains a list instead of keys and values"),
        (b"text", "b.yaml:1: contains text instead of keys and values"),
        (b"base: [a.yaml]\n", "b.yaml:1: base: ['a.yaml'] is a list"),
        (b"# card\nbase: A.yml\n", "b.yaml:2: base: there is no file A.yml"),
    ],
)
def test_unreadable_file_is_one_error(here: Path, data: bytes, message: str) -> None:
    (here / "b.yaml").write_bytes(data)
    (error,) = errors_of("b.yaml")
    assert error.startswith(message)


@pytest.mark.parametrize("data", [b"", b"# nothing\n", b"---\n"])
def test_empty_file_lacks_all_required_keys(here: Path, data: bytes) -> None:
    (here / "b.yaml").write_bytes(data)
    missing = [text.splitlines()[0].split(": ")[1] for text in errors_of("b.yaml")]
    assert missing == ["name", "data", "model", "optim", "schedule"]


def test_file_from_windows_is_read(here: Path) -> None:
    (here / "b.yaml").write_bytes(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode())
    assert load_run_file(PretrainRun, "b.yaml") == load_run_file(PretrainRun, "a.yaml")
