"""A model whose outputs are not the classes of the shards is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vitscale.config.errors import UserError
from vitscale.evaluation.interface.labels import check_labels


def subject(
    *shards: str, outputs: int = 3, model: tuple[str, ...] | None = ("cat", "dog", "eel")
) -> Any:
    val = SimpleNamespace(classes=shards, folder="shards")
    return SimpleNamespace(val=val, num_outputs=outputs, classes=model)


@pytest.mark.parametrize("model", [("cat", "dog", "eel"), None])
def test_equal_classes_pass(model: tuple[str, ...] | None) -> None:
    check_labels(subject("cat", "dog", "eel", model=model), name="calibration")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (subject(), ("needs labels", "labelled shards")),
        (subject("cat", outputs=0), ("has no head", "knn")),
        (subject("cat", "dog"), ("2 classes", "head has 3", "subset")),
        (subject("cat", "eel", "dog"), ("in another order", "label 1 is 'eel'", "'dog'")),
        (subject("cat", "dog", "fox"), ("other classes", "label 2 is 'fox'", "subset")),
    ],
)
def test_other_classes_are_refused(given: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        check_labels(given, name="classification")
    assert all(part in str(error.value) for part in parts)
