"""Compare configurations: the settings that differ and have an effect, for one purpose.

Owns: the one list of settings without effect. Leaves out: what a difference means to its reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from vitscale.config.redaction import flatten, shown_setting

Purpose = Literal["resume", "output", "chain", "evaluation", "result", "table"]
"""resume: what a training is told of its last start. output: an existing output of a data
preparation. chain: a finished run of a chain. evaluation: existing results. result: what runs may
owe their result to, so that others are repetitions. table: the parameters that people compare."""

Changes = dict[str, tuple[str | None, str | None]]
"""Dotted key -> text before and now, without secrets; None where one side lacks the key."""

OF_RUNS: tuple[Purpose, ...] = ("chain", "result")
# A key, or a group of keys -> the purposes for which it has no effect. For `resume` all count.
WITHOUT_EFFECT: dict[str, tuple[Purpose, ...]] = {
    # The name of a run, where it is, and what is told about it.
    "name": (*OF_RUNS, "table"),
    "output": (*OF_RUNS, "output", "table"),
    "tracking": OF_RUNS,
    "tracking.tags": ("table",),
    # Where and how fast a run is made.
    "launch": (*OF_RUNS, "output"),
    "checkpoint": OF_RUNS,
    "compute.batch": OF_RUNS,
    "compute.num_threads": OF_RUNS,
    "compute.timeout_min": OF_RUNS,
    "data.num_workers": OF_RUNS,
    "data.planned_num_samples": OF_RUNS,
    "data.remote": OF_RUNS,
    "engine.max_micro_batch": OF_RUNS,
    "engine.num_threads": OF_RUNS,
    "engine.profile_steps": OF_RUNS,
    "engine.timeout_min": OF_RUNS,
    # Of a data preparation. The manifest names its source elsewhere.
    "num_workers": (*OF_RUNS, "output"),
    "script": ("output",),
    "source.path": (*OF_RUNS, "output"),
    # Of an evaluation: what it has found.
    "results": ("evaluation",),
}


def has_effect(key: str, purpose: Purpose) -> bool:
    """Return True if a setting counts for a purpose. key: dotted."""
    parts = key.split(".")
    groups = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return not any(purpose in WITHOUT_EFFECT.get(group, ()) for group in groups)


def keys_without_effect(purpose: Purpose) -> dict[str, Any]:
    """The keys that do not count, as pydantic's `exclude` takes them: {output: True}."""
    found: dict[str, Any] = {}
    for key, purposes in WITHOUT_EFFECT.items():
        group, _, name = key.rpartition(".")
        if purpose in purposes:
            (found.setdefault(group, {}) if group else found)[name] = True
    return found


def with_effect(settings: Mapping[str, Any], purpose: Purpose) -> dict[str, str]:
    """{dotted key: text} of the settings that count. settings: nested, or flat already."""
    return {
        key: text for key, text in flatten(settings).items() if has_effect(key, purpose)
    }


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], *, purpose: Purpose
) -> Changes:
    """The settings that count and differ, by key. Empty: the same, for this purpose."""
    old = with_effect(before, purpose)
    new = with_effect(now, purpose)
    return {
        key: (shown_setting(key, old.get(key)), shown_setting(key, new.get(key)))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }
