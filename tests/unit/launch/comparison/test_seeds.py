"""Runs that differ in their seed alone are one group."""

from __future__ import annotations

from launch.comparison.runs import ComparedRun
from launch.comparison.seeds import seed_groups


def run(**params: str) -> ComparedRun:
    label = params.pop("label", "a")
    return ComparedRun(label=label, source="", folder=None, status=None, params=params, rows=())


def test_equal_settings_with_equal_seeds_are_no_group() -> None:
    """The same run twice says nothing about seeds."""
    twice = [run(seed="0", lr="1"), run(seed="0", lr="1")]
    assert seed_groups(twice) == ()
    (group,) = seed_groups([*twice, run(seed="1", lr="1"), run(seed="1", lr="2"), run(lr="1")])
    assert group.members == (0, 1, 2) and group.label == "a and 2 more"
