"""The objectives of fine-tuning. Needs no torch when imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitscale.config.section import NamedSection, choice_of
from vitscale.objectives.objective import Distillation, Objective, Supervised

OBJECTIVES: dict[str, type[Objective]] = {
    "supervised": Supervised,
    # DeiT's fine-tuning at a higher resolution, with the teacher.
    "distillation": Distillation,
}

# mypy cannot follow a type that is built from a dict.
if TYPE_CHECKING:
    ObjectiveSettings = NamedSection
else:
    ObjectiveSettings = choice_of(OBJECTIVES, default="supervised")
