"""Check that a model's outputs are the classes of the shards, in the same order."""

from __future__ import annotations

from vitscale.config.errors import UserError
from vitscale.evaluation.interface.evaluation import Subject


def check_head(subject: Subject, *, name: str) -> None:
    """Raise UserError where the model has no head or the shards have no labels."""
    if not subject.val.classes:
        raise UserError(
            f"{name} needs labels, but the shards of {subject.val.folder} have none",
            where="evaluate",
            next_step="set data.path to labelled shards",
        )
    if subject.num_outputs == 0:
        raise UserError(
            f"{name} needs a classifier, but the model has no head",
            where="init",
            next_step="evaluate its features with knn, or a model that was fine-tuned",
        )


def check_labels(subject: Subject, *, name: str) -> None:
    """Raise UserError where output i of the head is not class i of the shards."""
    check_head(subject, name=name)
    shards, model = subject.val.classes, subject.classes
    where = f"label map of {subject.val.folder}"
    if subject.num_outputs != len(shards):
        raise UserError(
            f"{name}: {len(shards)} classes (the first is {shards[0]!r}), but the model's head "
            f"has {subject.num_outputs}",
            where=where,
            next_step="evaluate {name: subset}, which maps classes by name, or other shards",
        )
    if model is None or model == shards:
        return
    label = next(i for i, pair in enumerate(zip(model, shards, strict=True)) if pair[0] != pair[1])
    order = "in another order" if sorted(model) == sorted(shards) else "other classes"
    raise UserError(
        f"{name}: {order} than the model's: label {label} is {shards[label]!r} here and "
        f"{model[label]!r} in the model",
        where=where,
        next_step="evaluate {name: subset}, which maps classes by name, or other shards",
    )
