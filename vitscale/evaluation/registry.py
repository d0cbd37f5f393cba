"""The evaluations. A new one is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitscale.config.section import choice_of
from vitscale.evaluation.interface.evaluation import Evaluation, EvaluationSettingsBase
from vitscale.evaluation.logits.calibration import Calibration
from vitscale.evaluation.logits.classification import Classification
from vitscale.evaluation.logits.confusion import Confusion
from vitscale.evaluation.logits.per_class import PerClass
from vitscale.evaluation.logits.real_labels import RealLabels
from vitscale.evaluation.logits.subset import Subset
from vitscale.evaluation.probes.few_shot import FewShot
from vitscale.evaluation.probes.knn import Knn
from vitscale.evaluation.probes.linear_heads import LinearHeads

EVALUATIONS: dict[str, type[Evaluation]] = {
    "classification": Classification,
    "per_class": PerClass,
    "calibration": Calibration,
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
