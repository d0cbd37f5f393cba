"""Keep of a classifier the rows of other labels, matched by name: 21k classes -> 1k.

Owns: the names of ImageNet's heads by their number of classes, and the sliced head.
Source: EVA (Fang et al. 2022), which fine-tunes on ImageNet from the rows of its 21k head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

import torch

from vitscale.config.errors import UserError

# Number of classes -> timm's list of WordNet ids in the order of such heads: big_vision's and
# AugReg's 21k, the autumn 2011 release, Microsoft's, timm's 12k, the two of ImageNet-21k-P, and 1k.
SYNSET_LISTS = {
    21_843: "imagenet21k_goog_synsets.txt",
    21_841: "imagenet22k_synsets.txt",
    21_842: "imagenet22k_ms_synsets.txt",
    11_821: "imagenet12k_synsets.txt",
    11_221: "imagenet21k_miil_synsets.txt",
    10_450: "imagenet21k_miil_w21_synsets.txt",
    1_000: "imagenet_synsets.txt",
}
# Fewer matches than this share are a mistake, not a few missing classes.
MIN_SHARE = 0.5
HEADS = ("head.", "head_dist.")


@cache
def synsets_of_head(num_classes: int) -> tuple[str, ...] | None:
    """WordNet ids of ImageNet's classes in label order; None for another number of classes."""
    name = SYNSET_LISTS.get(num_classes)
    if name is None:
        return None
    return tuple((resources.files("timm") / "data" / "_info" / name).read_text().split())


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
    names = _best_names(source, synsets_of_head(num_rows), target=target)
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
        allowed="at least half, matched by name: WordNet ids for ImageNet's heads of "
        f"{', '.join(f'{n:,}' for n in SYNSET_LISTS)} classes, classes.json of our runs",
        next_step="name the classes of the shards alike, or set keep_head=false",
    )
