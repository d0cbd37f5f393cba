"""Say which run is better, in sentences: by what, by how much, and what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from launch.comparison.differences import (
    Comparison,
    MetricLine,
    Points,
    Spread,
    finite,
    importance,
    spread,
)
from launch.comparison.report import format_point, format_spent, format_spread
from launch.comparison.runs import ComparedRun
from vitscale.config.changes import changed_settings
from vitscale.config.loader import shorten
from vitscale.evaluation.metric_texts import difference, format_value, shares

MAX_SENTENCES = 8
MAX_REASONS = 5
SHOWN_ORDER = 3


class Side(NamedTuple):
    """A run, or a group of seeds."""

    label: str
    place: int
    """Of the run, or of the first of the group, in `Comparison.runs`."""
    over: Spread
    text: str
    """The value, with its step where runs are not equally long."""


def verdict(comparison: Comparison) -> Iterator[str]:
    """Yield sentences: the best run, its metric, its differences to the second, and what speaks
    against this order."""
    line = comparison.deciding
    if line is None:
        yield "No metric says which run is better."
        return

    ranked = ranking(comparison, line, comparison.decisive(line))
    steps = list(_steps(comparison, line))
    at = ""
    equal = ""
    if comparison.budget is not None:
        equal = format_spent(comparison.budget.axis, comparison.budget.total)
    if comparison.is_asked:
        at = f" at {equal}"
    if len(ranked) > 1:
        yield from _against_second(comparison, line, ranked, at)
    # Of a single way its steps say all.
    elif not steps:
        for side in ranked:
            yield f"{side.label} has {line.key} {side.text}{at}."
    yield from steps[:MAX_SENTENCES]

    # Of one run there is no order.
    orders = {f"At equal cost, {equal}": line.equal, "By the best values": line.best}
    for title, points in orders.items():
        sides = ranking(comparison, line, points)[:SHOWN_ORDER]
        if len(sides) > 1 and points != line.final and not comparison.is_asked:
            yield f"{title}: {', '.join(f'{side.label} {side.text}' for side in sides)}."
    yield from _unranked(comparison, line, at)


def ranking(comparison: Comparison, line: MetricLine, points: Points) -> list[Side]:
    """Rank groups of seeds by their means, and all other runs, from best to worst."""
    groups = dict(comparison.seeds)
    grouped = {place for members in groups.values() for place in members}
    for place in comparison.rivals - grouped:
        groups[comparison.runs[place].label] = (place,)

    sides = []
    for label, members in groups.items():
        over = spread(finite(points[member] for member in members))
        if over is None or members[0] not in comparison.rivals:
            continue
        text = format_spread(line.key, over)
        if len(members) == 1 and (comparison.budget or points is line.best):
            text = format_point(line.key, points[members[0]], with_place=True)
        sides.append(Side(label, members[0], over, text))
    # Of equal runs the first one that was named.
    sides.sort(key=attrgetter("place"))
    return sorted(
        sides, key=lambda side: side.over.mean, reverse=line.better == "higher"
    )


def _against_second(
    comparison: Comparison, line: MetricLine, ranked: Sequence[Side], at: str
) -> Iterator[str]:
    """Yield the order of the first two, and what speaks for and against it."""
    # Only the first two are compared in words; the tables have the rest.
    first, second, *_ = ranked
    run = comparison.runs[first.place]
    other = comparison.runs[second.place]
    gap = abs(first.over.mean - second.over.mean)
    if gap:
        yield (
            f"{first.label} is best{at}: {line.key} {first.text}; "
            f"next is {second.label}, {second.text}."
        )
    else:
        yield f"{first.label} and {second.label} are equal{at}: {line.key} {first.text}."

    # Of two results on other images the difference means nothing.
    chance = _chance(line.key, run, first.over.mean, other, second.over.mean)
    if chance:
        yield f"The difference is {chance}."

    # Seeds are no difference where their spread is known.
    changes = changed_settings(run.params, other.params, purpose="result")
    if first.over.deviation is not None or second.over.deviation is not None:
        changes.pop("seed", None)
    reasons = []
    for key in sorted(changes, key=importance):
        absent = "random weights" if key == "init" else "none"
        ours, theirs = (
            absent if text in (None, "null") else shorten(str(text))
            for text in changes[key]
        )
        reasons.append(f"{key} ({ours} against {theirs})")
    if reasons:
        yield f"They differ in {_few(reasons)}."

    # What speaks against the order: a single seed, a gap within the spread, unequal budgets.
    single = [side.label for side in (first, second) if side.over.deviation is None]
    if comparison.seeds and single:
        yield f"Of {' and '.join(single)} there is one seed, whose spread is not known."
    largest = max(side.over.deviation or 0.0 for side in ranked)
    if gap < largest:
        size = format_value(line.key, largest)
        yield f"The difference is within the spread of the seeds ({size})."
    batches = {each.params.get("data.global_batch") for each in comparison.runs} - {
        None
    }
    budget = comparison.budget
    if len(batches) > 1 and (budget is None or budget.axis == "steps"):
        yield "They have not seen equally many samples: compare them with --at samples."


def _chance(
    key: str, run: ComparedRun, value: float, other: ComparedRun, other_value: float
) -> str:
    """How the difference of two results compares with chance; empty where that is unknown."""
    if run.val_data == other.val_data:
        found = shares(key, run.val_data, *sorted([value, other_value]))
        return difference(*found) if found else ""
    if run.val_data and other.val_data:
        images = f"{run.val_data}; {other.val_data}"
        return f"not comparable, evaluated on different images: {images}"
    return ""


def _few(words: Sequence[str]) -> str:
    """The first of these words, and how many more there are."""
    text = ", ".join(words[:MAX_REASONS])
    if len(words) > MAX_REASONS:
        text += f" and {len(words) - MAX_REASONS} more"
    return text


def _steps(comparison: Comparison, line: MetricLine) -> Iterator[str]:
    """Yield what each training has brought that started from another one."""
    points = comparison.decisive(line)
    for run, origin, after in zip(
        comparison.runs, comparison.origins, points, strict=True
    ):
        before = points[origin]
        if run.is_evaluation or origin < 0 or len(finite([before, after])) < 2:
            continue
        other = comparison.runs[origin]
        gain = after.value - before.value
        change = "no better"
        if gain:
            change = "better" if (gain > 0) == (line.better == "higher") else "worse"
        values = [format_point(line.key, point) for point in (before, after)]
        chance = _chance(line.key, run, after.value, other, before.value)
        yield (
            f"{run.label} started from {other.label} and is {change}: "
            f"{line.key} from {' to '.join(values)}{chance and f', {chance}'}."
        )


def _unranked(comparison: Comparison, line: MetricLine, at: str) -> Iterator[str]:
    """Yield a sentence about the runs without a finite value where runs are compared."""
    labels = []
    for place, point in enumerate(comparison.decisive(line)):
        if place in comparison.rivals and not finite([point]):
            labels.append(comparison.runs[place].label)
    if labels:
        yield f"Not ranked{at}, since they have no finite {line.key}: {_few(labels)}."
