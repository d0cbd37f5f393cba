"""The metric that says which run, and which checkpoint of a run, is the best.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Which direction is better, by the suffix of a metric's name.
BETTER = {
    "loss": "lower",
    "error": "lower",
    "data_wait": "lower",
    "top1": "higher",
    "top5": "higher",
    "accuracy": "higher",
    "images_per_s": "higher",
    "mfu": "higher",
}
# The first of these that was measured counts, then any other of val/.
PREFERRED = (
    "val/top1",
    "val/linear_top1",
    "val/knn_top1",
    "val/class_mean_top1",
    "val/loss",
)
AVERAGE = "val/ema_"


def direction(key: str) -> str | None:
    """higher or lower; None where it is not known which one is better."""
    name = key.rsplit("/", 1)[-1]
    return next((way for suffix, way in BETTER.items() if name.endswith(suffix)), None)


def preference(key: str) -> tuple[int, bool, str]:
    """Sorts metrics, the main one first."""
    # Metrics that are not listed come after all that are.
    place = len(PREFERRED)
    if key in PREFERRED:
        place = PREFERRED.index(key)
    return place, direction(key) != "higher", key


def score_of(metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """The main metric of an evaluation, as JSON; None where none is finite and has a direction.

    With averaged weights, which all commands take, it is theirs. Of two scores that with the larger
    `order` is better: by the preferred metric, then by its value.
    """
    known = [key for key in metrics if direction(key) and math.isfinite(metrics[key])]
    averaged = [key for key in known if key.startswith(AVERAGE)]
    # By the name that the weights' own metric has.
    names = {key.replace(AVERAGE, "val/"): key for key in averaged or known}
    if not names:
        return None
    name = min(names, key=preference)
    place, is_lower, _ = preference(name)
    value = float(metrics[names[name]])

    # The larger gain is always better, so that scores can be compared as lists.
    gain = -value if is_lower else value
    return dict(metric=names[name], value=value, order=[-place, name, gain])
