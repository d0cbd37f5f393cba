"""Accuracy by super-classes: a prediction is right if it is of the true class's super-class.

A super-class is a hypernym in WordNet; the classes of the shards are synsets such as n01440764.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from vitscale.config.errors import UserError
from vitscale.evaluation.interface.evaluation import (
    EvaluationSettingsBase,
    Outputs,
    Share,
    Subject,
)
from vitscale.evaluation.interface.one_pass import LogitsEvaluation
from vitscale.evaluation.logits.per_class import write_class_table
from vitscale.evaluation.logits.wordnet import Noun, ancestor, read_nouns


class SuperClassesSettings(EvaluationSettingsBase):
    name: Literal["super_classes"] = "super_classes"
    """Metrics: val/super_top1, val/super_mean_top1 (mean over super-classes). File:
    super_classes.csv."""
    metrics: ClassVar[tuple[str, ...]] = ("super_top1", "super_mean_top1")
    wordnet: str = "/usr/share/wordnet/data.noun"
    """WordNet's nouns; Debian's package wordnet-base puts them here."""
    depth: int = Field(default=6, gt=0)
    """Super-classes are the hypernyms at this depth below the root, "entity"; a class that is less
    deep is its own. 6: animals are one super-class, devices another."""
    synsets: tuple[str, ...] = Field(default=(), strict=False)
    """Or: these are the super-classes, the nearest one above each class."""


class SuperClasses(LogitsEvaluation):
    Settings = SuperClassesSettings

    def check(self, subject: Subject) -> None:
        super().check(subject)
        self._parents(subject)

    def start(self, subject: Subject) -> None:
        import torch

        self._subject, device = subject, subject.model.world.device
        parents, nouns = self._parents(subject)
        supers = sorted(set(parents))
        self._names = [f"{name} {nouns[name].lemma}" for name in supers]
        position = {name: number for number, name in enumerate(supers)}
        self._super_C = torch.tensor([position[name] for name in parents], device=device)
        # Rows: images, correct ones.
        self._counts = torch.zeros(2, len(supers), dtype=torch.float64, device=device)

    def add(self, outputs: Outputs) -> None:
        import torch

        guesses_B = self._super_C[outputs.values_BX.argmax(dim=1)]
        labels_B = self._super_C[outputs.labels_B]
        correct_B = (guesses_B == labels_B).double()
        rows = torch.stack([torch.ones_like(correct_B), correct_B]) * outputs.weights_B
        self._counts.index_add_(1, labels_B, rows)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        images, correct = sum_over_ranks(self._counts).long().tolist()
        rows = list(zip(self._names, images, correct, strict=True))
        self._subject.write("super_classes.csv", lambda path: write_class_table(path, rows))
        shares = [right / number for _, number, right in rows if number]
        return {
            "super_top1": Share(sum(correct), sum(images)),
            "super_mean_top1": sum(shares) / len(shares),
        }

    def _parents(self, subject: Subject) -> tuple[list[str], dict[str, Noun]]:
        """The super-class of each class, and all nouns. Raises UserError."""
        nouns = read_nouns(Path(self.settings.wordnet).expanduser())
        classes, chosen = subject.val.classes, self.settings.synsets
        for names, where in (
            (chosen, "synsets of super_classes"),
            (classes, f"label map of {subject.val.folder}"),
        ):
            unknown = [name for name in names if name not in nouns]
            if unknown:
                raise UserError(
                    f"super_classes: {len(unknown)} of {len(names)} names are no nouns of WordNet "
                    f"(the first is {unknown[0]!r})",
                    where=where,
                    allowed="synset ids such as n01440764",
                    next_step="remove super_classes, or prepare shards with "
                    "labels.space=imagenet_1k",
                )
        depth = self.settings.depth
        return [ancestor(name, nouns, depth=depth, among=chosen) for name in classes], nouns
