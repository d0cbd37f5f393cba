"""Run the evaluations of a run when they are due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vitscale.engine.engine import Engine
from vitscale.evaluation.evaluation import EvaluationSettingsBase, Subject, results
from vitscale.evaluation.registry import EVALUATIONS


class ScheduledEvaluations:
    """The `evaluate:` section of a run. Without a validation split nothing is ever due."""

    def __init__(
        self,
        settings: Sequence[EvaluationSettingsBase],
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
        self._evaluations = [EVALUATIONS[each.name](each) for each in settings] if subject else []
        for each in self._evaluations:
            assert subject is not None
            each.check(subject)

    def due(self, step: int, *, is_last: bool) -> bool:
        return any(_is_due(each.settings, step, is_last=is_last) for each in self._evaluations)

    def run(self, step: int, *, is_last: bool) -> Iterator[dict[str, float]]:
        """Metrics of each due evaluation: of the weights, `val/...`, then of their average,
        `val/ema_...`. Collective."""
        due = [each for each in self._evaluations if _is_due(each.settings, step, is_last=is_last)]
        if not due:
            return
        assert self.subject is not None
        engine = self._engine
        engine.eval()
        for metrics in results(due, self.subject):
            yield {f"val/{name}": value for name, value in metrics.items()}
        if self._has_average:
            with engine.averaged():
                for metrics in results(due, _of_average(self.subject)):
                    yield {f"val/ema_{name}": value for name, value in metrics.items()}
        engine.train()


def _of_average(subject: Subject) -> Subject:
    """The same, with its files in a folder of their own."""
    return subject if subject.folder is None else replace(subject, folder=subject.folder / "ema")


def _is_due(settings: EvaluationSettingsBase, step: int, *, is_last: bool) -> bool:
    every = settings.every_steps
    return is_last or (every is not None and step % every == 0)
