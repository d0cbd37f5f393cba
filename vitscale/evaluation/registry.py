"""The evaluations, and those of a run when due. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vitscale.config.section import choice_of
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

    EvaluationSettings = SettingsBase
else:
    EvaluationSettings = choice_of(EVALUATIONS)


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
        self.subject, self._engine = subject, engine
        self._has_average = has_average
        self._evaluations = (
            [EVALUATIONS[each.name](each) for each in settings] if subject else []
        )
        for each in self._evaluations:
            assert subject is not None
            each.check(subject)

    def due(self, step: int, *, is_last: bool) -> list[Evaluation]:
        return [
            each
            for each in self._evaluations
            if is_last
            or (every := each.settings.every_steps) is not None
            and step % every == 0
        ]

    def run(self, step: int, *, is_last: bool) -> Iterator[dict[str, float]]:
        """Metrics of each due evaluation: of the weights, `val/...`, then of their average,
        `val/ema_...`, with its files in a folder of their own. Collective.

        Raises NonFiniteOutputs.
        """
        due, subject, engine = (
            self.due(step, is_last=is_last),
            self.subject,
            self._engine,
        )
        assert subject is not None
        engine.eval()
        try:
            for metrics in results(due, subject):
                yield {f"val/{name}": value for name, value in metrics.items()}
            if self._has_average:
                folder = None if subject.folder is None else subject.folder / "ema"
                not_finite: NonFiniteOutputs | None = None
                with engine.averaged():
                    try:
                        for metrics in results(due, replace(subject, folder=folder)):
                            yield {
                                f"val/ema_{name}": value
                                for name, value in metrics.items()
                            }
                    except NonFiniteOutputs as error:
                        # All ranks have it here, and training goes on: with its own weights.
                        not_finite = error
                if not_finite is not None:
                    raise not_finite
        finally:
            engine.train()
