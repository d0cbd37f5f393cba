"""The evaluations, and those of a run when due. A new one is one file and one line here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitscale.config.section import NAME, Problems, choice_of
from vitscale.evaluation.classification import Classification
from vitscale.evaluation.confusion import Confusion
from vitscale.evaluation.evaluation import (
    Evaluation,
    NonFiniteOutputs,
    SettingsBase,
    Subject,
    results,
)
from vitscale.evaluation.few_shot import FewShot
from vitscale.evaluation.knn import Knn
from vitscale.evaluation.linear_heads import LinearHeads
from vitscale.evaluation.real_labels import RealLabels
from vitscale.evaluation.subset import Subset

EVALUATIONS: dict[str, type[Evaluation]] = {
    "classification": Classification,
    "confusion": Confusion,
    "real_labels": RealLabels,
    "subset": Subset,
    "knn": Knn,
    "few_shot": FewShot,
    "linear_heads": LinearHeads,
}

if TYPE_CHECKING:
    from vitscale.engine.engine import Engine

    # mypy cannot follow a type that is built from a dict.
    EvaluationSettings = SettingsBase
else:
    EvaluationSettings = choice_of(EVALUATIONS)


def groups_of_names(value: Any) -> Any:
    """Turn names of evaluations, as in evaluate=knn,few_shot, into groups; keep all else."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        return value
    return [{NAME: item.strip()} if isinstance(item, str) else item for item in value]


def listed_twice(evaluations: Sequence[SettingsBase]) -> Problems:
    """Yield a problem for each evaluation whose metrics would replace those of another one."""
    counts = Counter(settings.name for settings in evaluations)
    for name in sorted(name for name, count in counts.items() if count > 1):
        yield (
            "evaluate",
            f"{name} is listed twice; its metrics would have the same names",
        )


class ScheduledEvaluations:
    """The `evaluate:` section of a run. Without a validation split nothing is ever due."""

    def __init__(
        self,
        settings: Sequence[SettingsBase],
        subject: Subject | None,
        *,
        engine: Engine,
        has_average: bool,
    ) -> None:
        """has_average: the engine keeps an average of the weights (`optim.ema`).

        Raises UserError when an evaluation does not suit the model and the split.
        """
        self.subject = subject
        self._engine = engine
        self._has_average = has_average
        self._evaluations: list[Evaluation] = []
        if subject is None:
            return

        # A run of days should not fail at its first evaluation.
        for section in settings:
            evaluation = EVALUATIONS[section.name](section)
            evaluation.check(subject)
            self._evaluations.append(evaluation)

    def due(self, step: int, *, is_last: bool) -> list[Evaluation]:
        if is_last:
            return self._evaluations
        # Each evaluation has a pace of its own: probes cost far more than a pass.
        due = []
        for evaluation in self._evaluations:
            every_steps = evaluation.settings.every_steps
            if every_steps is not None and step % every_steps == 0:
                due.append(evaluation)
        return due

    def run(self, step: int, *, is_last: bool) -> Iterator[dict[str, float]]:
        """Metrics of each due evaluation: of the weights, `val/...`, then of their average,
        `val/ema_...`, with its files in a folder of their own. Collective.

        Raises NonFiniteOutputs.
        """
        due = self.due(step, is_last=is_last)
        assert self.subject is not None
        subject = replace(self.subject, draws=is_last)

        # Dropout and drop path must be off, and on again after an error, too.
        self._engine.eval()
        try:
            for metrics in results(due, subject):
                yield {f"val/{name}": value for name, value in metrics.items()}
            if not self._has_average:
                return

            # Files of the average would replace those of the weights.
            if subject.folder is not None:
                subject = replace(subject, folder=subject.folder / "ema")
            not_finite: NonFiniteOutputs | None = None
            with self._engine.averaged():
                try:
                    for metrics in results(due, subject):
                        yield {
                            f"val/ema_{name}": value for name, value in metrics.items()
                        }
                except NonFiniteOutputs as error:
                    # All ranks have it here, and training goes on: with its own weights.
                    not_finite = error
            if not_finite is not None:
                raise not_finite
        finally:
            self._engine.train()
