"""Rows of a head are kept by the names of their classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.start import sliced_head
from vitscale.config.errors import UserError
from vitscale.data.label_spaces import known_space

TEDDY_BEAR = "n04399382"


def head(num_classes: int, *, names: tuple[str, ...] = ("head",)) -> dict[str, torch.Tensor]:
    """Row i has weights i and bias -i."""
    rows = torch.arange(float(num_classes))
    found = {"cls_token": torch.ones(1, 1, 2)}
    for name in names:
        found |= {f"{name}.weight": rows[:, None].repeat(1, 2), f"{name}.bias": -rows}
    return found


def sliced(weights: dict[str, torch.Tensor], **options: Any) -> tuple[Any, list[str]]:
    return sliced_head(weights, where="there", **options)


def test_999_of_imagenets_classes_are_in_the_21k_head() -> None:
    target = known_space("imagenet_1k")
    found, missing = sliced(head(21_843), source=None, target=target)
    assert missing == [TEDDY_BEAR] and target.index(TEDDY_BEAR) == 850
    assert found["head.weight"].shape == (1000, 2)
    lacking = found["head.weight"].abs().sum(1) == 0
    assert lacking.nonzero().flatten().tolist() == [850]
    assert found["head.bias"][850] == found["head.bias"].min()
    full = known_space("imagenet_21k_goog")
    assert [full[int(row)] for row in found["head.weight"][:3, 0]] == list(target[:3])
    assert torch.equal(found["cls_token"], torch.ones(1, 1, 2))


@pytest.mark.parametrize("names", [("head",), ("head", "head_dist"), ("head.2",)])
def test_own_names_choose_and_order_the_rows(names: tuple[str, ...]) -> None:
    weights = head(4, names=names) | {"head.0.weight": torch.ones(2, 2)}
    source = ("cat", "dog", "cow", "owl")
    found, missing = sliced(weights, source=source, target=("owl", "cat"))
    assert missing == []
    for name in names:
        assert found[f"{name}.weight"].tolist() == [[3, 3], [0, 0]]
        assert found[f"{name}.bias"].tolist() == [-3, 0]


@pytest.mark.parametrize(
    "weights, source, message",
    [
        (head(4), ("a", "b", "c", "d"), r"\(a, b, ...\) include 0 of the 3"),
        (head(4), None, r"\(unknown, ...\) include 0 of the 3"),
        (head(4), ("cat", "b", "c", "d"), "include 1 of the 3"),
        (head(5), ("cat", "dog", "cow", "d"), "include 3 of the 3"),  # one name is missing
        ({"cls_token": torch.ones(1)}, None, "holds no classifier"),
    ],
)
def test_too_few_matches_are_one_error(weights: Any, source: Any, message: str) -> None:
    before = {name: tensor.clone() for name, tensor in weights.items()}
    with pytest.raises(UserError, match=message):
        sliced(weights, source=source, target=("cat", "dog", "cow"))
    assert all(torch.equal(weights[name], before[name]) for name in before)
