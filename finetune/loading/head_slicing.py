"""Keep of a classifier the rows of other labels, matched by name: 21k classes -> 1k.

Source: EVA (Fang et al. 2022), which fine-tunes on ImageNet from the rows of its 21k head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vitscale.config.errors import UserError
from vitscale.data.label_spaces import known_space, space_of_length

# Fewer matches than this share are a mistake, not a few missing classes.
MIN_SHARE = 0.5


def sliced_head(
    weights: Mapping[str, torch.Tensor],
    *,
    source: Sequence[str] | None,
    target: Sequence[str],
    where: str,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights with rows of their last layers chosen and ordered by `target`, and the classes
    that they lack.

    source: name of each row; None, or names that do not match: the WordNet ids of ImageNet's heads
    of this size. A class that is missing gets zero weights and the lowest bias of the others, so
    that it never wins by itself.
    Raises UserError without a head, and where fewer than half of the classes are found.
    """
    last = _last_layers(weights)
    if not last:
        raise UserError(
            "holds no classifier to slice", where=where, next_step="set keep_head=false"
        )
    num_rows = len(weights[f"{last[0]}.weight"])
    space = space_of_length(num_rows)
    names = _best_names(source, known_space(space) if space else None, target=target)
    rows = {name: row for row, name in enumerate(names)}
    if len(names) != num_rows or sum(name in rows for name in target) < MIN_SHARE * len(target):
        raise _too_few(names, target, num_rows=num_rows, where=where)
    missing = [name for name in target if name not in rows]
    chosen = torch.tensor([rows.get(name, -1) for name in target])
    found = dict(weights)
    for layer in last:
        kernel, bias = weights[f"{layer}.weight"][chosen], weights[f"{layer}.bias"][chosen]
        kernel[chosen < 0] = 0
        bias[chosen < 0] = bias[chosen >= 0].min()
        found |= {f"{layer}.weight": kernel, f"{layer}.bias": bias}
    return found, missing


def _last_layers(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the classifiers: `head`, with a representation layer `head.2`, `head_dist`."""
    candidates = ("head.2" if "head.2.weight" in weights else "head", "head_dist")
    return [name for name in candidates if f"{name}.weight" in weights]


def _best_names(
    given: Sequence[str] | None, known: Sequence[str] | None, *, target: Sequence[str]
) -> Sequence[str]:
    """Of the source's own names and ImageNet's, those that name more of the target's classes."""
    wanted = set(target)
    return max((given or (), known or ()), key=lambda names: len(wanted.intersection(names)))


def _too_few(
    names: Sequence[str], target: Sequence[str], *, num_rows: int, where: str
) -> UserError:
    count = len(set(names).intersection(target))
    theirs = ", ".join(names[:2]) or "unknown"
    return UserError(
        f"its {num_rows:,} classes ({theirs}, ...) include {count:,} of the {len(target):,} that "
        f"are wanted ({', '.join(target[:2])}, ...)",
        where=where,
        allowed="at least half, matched by name: WordNet ids for ImageNet's heads, classes.json of "
        "our runs",
        next_step="name the classes of the shards alike, or set keep_head=false",
    )
