"""Run evaluations on one subject; those that read the same output of the model share a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vitscale.evaluation.interface.evaluation import Evaluation, Subject
from vitscale.evaluation.interface.one_pass import LogitsEvaluation, in_one_pass


def results(evaluations: Sequence[Evaluation], subject: Subject) -> Iterator[dict[str, float]]:
    """Metrics of each evaluation, in their order. Collective; equal on every rank."""
    found: dict[int, dict[str, float]] = {}
    try:
        for number, each in enumerate(evaluations):
            if number in found:
                pass
            elif isinstance(each, LogitsEvaluation):
                group = {
                    later: other
                    for later, other in enumerate(evaluations)
                    if isinstance(other, LogitsEvaluation) and other.needs == each.needs
                }
                found |= zip(group, in_one_pass(list(group.values()), subject), strict=True)
            else:
                found[number] = each.metrics(subject)
            yield found[number]
    finally:
        # The next results may be of other weights.
        subject.features.forget()
