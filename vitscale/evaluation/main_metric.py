"""The metric that says which run, and which checkpoint of a run, is the best.

Needs no torch.
"""

from __future__ import annotations

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
    "val/knn_top1",
    "val/linear_top1",
    "val/class_mean_top1",
    "val/loss",
)


def direction(key: str) -> str | None:
    """higher or lower; None where it is not known which one is better."""
    name = key.rsplit("/", 1)[-1]
    return next((way for suffix, way in BETTER.items() if name.endswith(suffix)), None)


def preference(key: str) -> tuple[int, bool, str]:
    """Sorts metrics, the main one first."""
    place = len(PREFERRED)
    if key in PREFERRED:
        place = PREFERRED.index(key)
    return place, direction(key) != "higher", key
