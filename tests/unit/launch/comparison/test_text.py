"""Tables of a comparison as text."""

from __future__ import annotations

from launch.comparison.text import Table, plain_text


def test_long_cells_take_several_lines() -> None:
    value = "[" + ", ".join(map(str, range(40))) + "]"
    table = Table(title="T", header=("key", "a", "b"), rows=(("x", value, "1"), ("y", "", "2\x07")))
    title, header, first, *middle, last = plain_text(table).splitlines()
    assert (title, header.split(), last.split()) == ("T", ["key", "a", "b"], ["y", "2?"])
    assert first.startswith("  x    [0, 1,") and first.endswith("  1")
    assert len(middle) == 2 and max(map(len, middle)) < 70
    assert " ".join(line.strip() for line in (first[7:-1], *middle)) == value
