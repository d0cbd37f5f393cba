"""The evaluations. A new one is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitscale.config.section import choice_of
from vitscale.evaluation.classification import Classification
from vitscale.evaluation.confusion import Confusion
from vitscale.evaluation.evaluation import Evaluation, EvaluationSettingsBase
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
    EvaluationSettings = EvaluationSettingsBase
else:
    EvaluationSettings = choice_of(EVALUATIONS)
