"""Load the weights that fine-tuning starts from (`init`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from finetune.run import FinetuneRun
from vitscale.config.errors import UserError
from vitscale.data.label_spaces import known_space, space_of_length
from vitscale.data.training_set import class_names
from vitscale.evaluation.trained_model import read_source
from vitscale.models.settings import Architecture
from vitscale.models.weights.files import Weights
from vitscale.models.weights.transfer import inferred_model, transfer_weights

# Fewer matches than this share are a mistake, not a few missing classes.
MIN_SHARE = 0.5


def load_initial_weights(
    model: nn.Module, arch: Architecture, run: FinetuneRun
) -> tuple[str | None, list[str]]:
    """Put the weights of `init` into the model; returns their source, and messages about them.

    Raises UserError when they do not fit or cannot be read; then nothing was loaded.
    """
    if run.init is None:
        return None, []
    found, source = read_source(run.init, weights=run.init_weights, model=run.model)
    messages = [f"starting from {found.format}"]
    if run.keep_head == "slice":
        wanted = class_names(run.data)
        tensors, missing = sliced_head(
            found.tensors, source=found.classes, target=wanted, where=found.where
        )
        found = replace(found, tensors=tensors)
        kept = f"{len(wanted) - len(missing):,} of {len(wanted):,}"
        zero = f"; zero weights for {_first(missing)}" if missing else ""
        messages.append(f"kept {kept} classes of the head, by name{zero}")
    try:
        left_out = transfer_weights(
            model,
            found,
            grid=arch.grid,
            convention=run.position_embedding,
            keep_head=bool(run.keep_head),
            resize_patches=run.init_patch == "resize",
        )
    except UserError as error:
        advice = None if source else _keys_that_fit(found, arch)
        next_step = advice or error.next_step
        raise UserError(
            error.what, where=error.where, allowed=error.allowed, next_step=next_step
        ) from None
    if left_out := [*left_out, *found.left_out]:
        what = f"{len(left_out)} tensors that this model does not have: {_first(left_out)}"
        messages.append(f"left out {what}")
    if source is not None:
        return run.init, [*source.warnings, *messages]
    return found.where, [*messages, *_differences(found, run, arch)]


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"


def _keys_that_fit(found: Weights, mine: Architecture) -> str | None:
    """The keys of `model` that these weights need, where they can be inferred."""
    try:
        wanted, _ = inferred_model(found, chosen=None)
    except UserError:
        return None
    if wanted.name != mine.name:
        return f"set 'model={json.dumps(wanted.model_dump(mode='json', exclude_unset=True))}'"
    free = ("image_size", "num_classes", "layer_norm_eps", "gelu")
    changes = [
        f"model.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in wanted.model_dump(exclude_unset=True).items()
        if key not in free and value != getattr(mine, key)
        if not (key == "layer_scale" and value and mine.model_dump()[key])
    ]
    return f"these weights need {' '.join(changes)}" if changes else None


def _differences(found: Weights, run: FinetuneRun, arch: Architecture) -> Iterator[str]:
    """Yield settings in which the run differs from the weights without a difference in shapes."""
    known = {} if found.known.get("name") == "timm" else found.known
    expected = {f"model.{key}": value for key, value in known.items() if key != "pool"}
    expected |= {f"data.{key}": found.preprocessing[key] for key in ("mean", "std")}
    for key, value in expected.items():
        section, _, name = key.partition(".")
        mine = getattr(arch if section == "model" else run.data, name, value)
        if mine != value:
            shown, own = (list(x) if isinstance(x, tuple) else x for x in (value, mine))
            said = "probably expect" if found.assumes(name) else "expect"
            yield f"these weights {said} {key}={shown}; this run has {own}"


# ---- rows of a head -----------------------------------------------------------------------------


def sliced_head(
    weights: Mapping[str, torch.Tensor],
    *,
    source: Sequence[str] | None,
    target: Sequence[str],
    where: str,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights with the rows of their classifiers that `target` names, in its order, and
    the classes that they lack: 21k classes -> 1k, as EVA does (Fang et al. 2022).

    source: name of each row; None, or names that do not match: the WordNet ids of ImageNet's heads
    of this size. A class that is missing gets zero weights and the lowest bias of the others, so
    that it never wins by itself.
    Raises UserError without a head, and where fewer than half of the classes are found.
    """
    # `head`, with a representation layer `head.2`, and the distillation token's.
    candidates = ("head.2" if "head.2.weight" in weights else "head", "head_dist")
    heads = [name for name in candidates if f"{name}.weight" in weights]
    if not heads:
        raise UserError(
            "contains no classifier to slice", where=where, next_step="set keep_head=false"
        )
    num_rows = len(weights[f"{heads[0]}.weight"])
    space, wanted = space_of_length(num_rows), set(target)
    known = () if space is None else known_space(space)
    names = max((source or (), known), key=lambda each: len(wanted.intersection(each)))
    rows = {name: row for row, name in enumerate(names)}
    missing = [name for name in target if name not in rows]
    if len(names) != num_rows or len(target) - len(missing) < MIN_SHARE * len(target):
        raise UserError(
            f"its {num_rows:,} classes ({', '.join(names[:2]) or 'unknown'}, ...) include "
            f"{len(wanted.intersection(names)):,} of the {len(target):,} that are wanted "
            f"({', '.join(target[:2])}, ...)",
            where=where,
            allowed="at least half, matched by name: WordNet ids for ImageNet's heads, "
            "classes.json of our runs",
            next_step="name the classes of the shards alike, or set keep_head=false",
        )
    chosen = torch.tensor([rows.get(name, -1) for name in target])
    found = dict(weights)
    for head in heads:
        kernel, bias = weights[f"{head}.weight"][chosen], weights[f"{head}.bias"][chosen]
        kernel[chosen < 0] = 0
        bias[chosen < 0] = bias[chosen >= 0].min()
        found |= {f"{head}.weight": kernel, f"{head}.bias": bias}
    return found, missing
