"""Compare configurations: the settings that differ and have an effect, for one purpose.

Owns: the one list of settings without effect. Leaves out: what a difference means to its reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import yaml

from vitscale.config.redaction import flatten, shown_setting

Purpose = Literal["resume", "output", "chain", "evaluation", "result", "table"]
"""resume: what a training is told of its last start. output: an existing output of a data
preparation. chain: a finished run of a chain. evaluation: existing results. result: what runs may
owe their result to, so that others are repetitions. table: the parameters that people compare."""

Changes = dict[str, tuple[str | None, str | None]]
"""Dotted key -> text before and now, without secrets; None where one side lacks the key."""

# A key, or a group of keys: the purposes for which it has no effect; for `resume` all keys count.
# The first ones are the name and place of a run, and what is told about it; the next say where and
# how fast it is made. Those of a data preparation follow, whose manifest names its source
# elsewhere, and the results of an evaluation.
WITHOUT_EFFECT = {
    key: purposes.split()
    for key, purposes in yaml.safe_load("""
name: chain result table
output: chain result output table
tracking: chain result
tracking.tags: table
launch: chain result output
checkpoint: chain result
compute.batch: chain result
compute.num_threads: chain result
compute.timeout_min: chain result
data.num_workers: chain result
data.planned_num_samples: chain result
data.remote: chain result
engine.max_micro_batch: chain result
engine.num_threads: chain result
engine.profile_steps: chain result
engine.timeout_min: chain result
num_workers: chain result output
script: output
source.path: chain result output
results: evaluation
""").items()
}


def has_effect(key: str, purpose: Purpose) -> bool:
    """Return True if a setting counts for a purpose. key: dotted."""
    parts = key.split(".")
    # A key has no effect if one of the groups around it has none.
    groups = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return not any(purpose in WITHOUT_EFFECT.get(group, ()) for group in groups)


def keys_without_output() -> dict[str, Any]:
    """The keys that do not count for an output, as pydantic's `exclude` takes them."""
    found: dict[str, Any] = {}
    for key, purposes in WITHOUT_EFFECT.items():
        group, _, name = key.rpartition(".")
        if "output" in purposes:
            # A key without a group stands at the top.
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
