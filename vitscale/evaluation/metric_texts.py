"""How the values of metrics read: titles, percent, few digits, and what chance leaves open.

Needs no torch. Leaves out: which metric decides (`main_metric`).
"""

from __future__ import annotations

import math
import re

from vitscale.evaluation.evaluation import Share

# Metrics in the order in which people ask for them, each with its title.
TITLES = dict(
    line.strip().split(": ")
    for line in """\
    val/top1: Accuracy
    val/linear_top1: Accuracy of a linear head
    val/knn_top1: Accuracy of nearest neighbours
    val/loss: Loss on validation images
    train/loss: Loss on training images
    val/top5: Accuracy in five guesses
    val/class_mean_top1: Accuracy, mean of the classes
    val/worst_classes_top1: Accuracy of the worst classes
    val/ece: Error of the stated confidence
    train/lr: Learning rate
    train/grad_norm: Length of the gradient
    vitals/images_per_s: Images per second
    vitals/data_wait: Time spent waiting for data
    vitals/memory_gib: Memory, GiB
    vitals/mfu: Use of the GPU's arithmetic""".splitlines()
)
# Metrics that are shares of a whole, by the end of their name.
SHARES = ("top1", "top5", "accuracy", "ece", "data_wait", "mfu")
# Those of them that count right images, so that chance has a known size.
COUNTED = "val/top1 val/linear_top1 val/knn_top1 val/top5".split()
# Their number in the tag that names the evaluated images.
NUM_IMAGES = re.compile(r", ([\d,]+) images")


def metric_place(key: str) -> tuple[int, bool, str]:
    """Sort key of a metric: what is asked first, then other results, then the rest."""
    order = [*TITLES, key]
    return order.index(key), not key.startswith("val/"), key


def format_value(key: str, value: float) -> str:
    """The value of a metric as people read it: shares as percent, others with four digits."""
    if key.endswith(SHARES) and math.isfinite(value):
        return f"{100 * value:.1f} %"
    return f"{value:.4g}"


def shares(key: str, val_data: str, *values: float) -> list[Share]:
    """The values of a metric as shares of the evaluated images; empty for other metrics.

    val_data: the tag that names the images.
    """
    found = NUM_IMAGES.search(val_data)
    if key not in COUNTED or found is None:
        return []
    num_images = int(found[1].replace(",", ""))
    return [Share(value * num_images, num_images) for value in values]


def difference(lower: Share, higher: Share) -> str:
    """How many images two shares of the same images differ by, and whether by chance.

    It is chance where the 95 % interval of the difference holds 0. Source: Newcombe 1998, "Interval
    estimation for the difference between independent proportions", method 10, which takes Wilson's
    interval of each.
    """
    below = math.hypot(higher - higher.interval()[0], lower.interval()[1] - lower)
    gap = higher - lower
    size = "more than chance"
    if gap <= below:
        size = "within chance"
    return f"{round(gap * lower.images):,} of {lower.images:,} images: {size}"
