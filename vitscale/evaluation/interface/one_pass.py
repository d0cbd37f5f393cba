"""Run evaluations on one subject; those that read the logits share a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from vitscale.evaluation.interface.evaluation import Evaluation, Output, Outputs, Subject
from vitscale.evaluation.interface.labels import check_labels


class LogitsEvaluation(Evaluation):
    """Reads each validation image's logits once; several of them share one pass (`in_one_pass`).

    A subclass defines `start`, `add` and `finish`, in this order, and not `metrics`.
    """

    needs: ClassVar[Output] = "logits"

    def check(self, subject: Subject) -> None:
        """The head has one output for each class of the shards, in their order."""
        check_labels(subject, name=self.settings.name)

    def start(self, subject: Subject) -> None:
        """Prepare to count."""
        raise NotImplementedError

    def add(self, outputs: Outputs) -> None:
        """Count one batch of this rank."""
        raise NotImplementedError

    def finish(self) -> dict[str, float]:
        """Return what `metrics` returns. Collective."""
        raise NotImplementedError

    def metrics(self, subject: Subject) -> dict[str, float]:
        (found,) = in_one_pass([self], subject)
        return found


def in_one_pass(
    evaluations: Sequence[LogitsEvaluation], subject: Subject
) -> Iterator[dict[str, float]]:
    """Yield the metrics of each. Collective."""
    import torch

    from vitscale.distributed.world import sum_over_ranks

    for each in evaluations:
        each.start(subject)
    samples = torch.zeros((), dtype=torch.float64, device=subject.model.world.device)
    for outputs in subject.outputs(subject.val, "logits"):
        samples += outputs.weights_B.double().sum()
        for each in evaluations:
            each.add(outputs)
    counted, expected = int(sum_over_ranks(samples)), subject.val.num_samples
    assert counted == expected, f"evaluated {counted} of {expected} samples"
    for each in evaluations:
        yield each.finish()


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
                    if isinstance(other, LogitsEvaluation)
                }
                found |= zip(group, in_one_pass(list(group.values()), subject), strict=True)
            else:
                found[number] = each.metrics(subject)
            yield found[number]
    finally:
        # The next results may be of other weights.
        subject.features.forget()
