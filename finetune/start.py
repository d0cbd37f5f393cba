"""Load the weights that fine-tuning starts from (`init`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from finetune.run import FinetuneRun
from vitscale.config.errors import UserError
from vitscale.data.training_set import class_names
from vitscale.evaluation.classes import column_of_each_class
from vitscale.evaluation.trained_model import read_source
from vitscale.models.settings import Architecture
from vitscale.models.weights.files import Weights
from vitscale.models.weights.transfer import (
    head_layers,
    inferred_model,
    transfer_weights,
)

# Fewer matches than this share are a mistake, not a few missing classes.
MIN_SHARE = 0.5
QKV = "blocks.0.attn.qkv.weight"


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
    refuse_other_heads(found, model, arch)
    if run.keep_head:
        found, said = with_head(found, class_names(run.data), keep=run.keep_head)
        messages += said
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
        what = (
            f"{len(left_out)} tensors that this model does not have: {_first(left_out)}"
        )
        messages.append(f"left out {what}")
    messages += _differences(found, run, arch)
    if source is not None:
        return run.init, [*source.warnings, *messages]
    return found.where, messages


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


def refuse_other_heads(found: Weights, model: nn.Module, arch: Architecture) -> None:
    """Raise UserError where the same tensors would be cut into another number of heads."""
    expected, mine = found.known.get("num_heads"), getattr(arch, "num_heads", None)
    own, given = model.state_dict().get(QKV), found.tensors.get(QKV)
    if None in (expected, mine) or expected == mine or own is None or given is None:
        return
    if own.shape == given.shape:
        raise UserError(
            f"these weights have {expected} attention heads, and this run {mine}: the tensors fit, "
            "but would compute something else",
            where="model.num_heads",
            next_step=f"set model.num_heads={expected}",
        )


def _differences(found: Weights, run: FinetuneRun, arch: Architecture) -> Iterator[str]:
    """Yield settings in which the run differs from the weights without a difference in shapes."""
    # A new head may well see another pool.
    left_out = () if run.keep_head else ("pool",)
    left_out = (*left_out, "name", "image_size")
    expected = {
        f"model.{key}": found.known[key] for key in found.known if key not in left_out
    }
    expected |= {f"data.{key}": found.preprocessing[key] for key in ("mean", "std")}
    for key, value in expected.items():
        section, _, name = key.partition(".")
        mine = getattr(arch if section == "model" else run.data, name, value)
        if _in_evaluation(mine) != _in_evaluation(value):
            shown, own = (list(x) if isinstance(x, tuple) else x for x in (value, mine))
            said = "probably expect" if found.assumes(name) else "expect"
            yield f"these weights {said} {key}={shown}; this run has {own}"


def _in_evaluation(value: Any) -> Any:
    """Arguments of timm without those of dropout and drop path, which act in training alone."""
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if "drop" not in name}


# ---- rows of a head -----------------------------------------------------------------------------


def with_head(
    found: Weights, target: Sequence[str], *, keep: bool | str
) -> tuple[Weights, list[str]]:
    """Return the weights with the rows of their classifiers for `target`, in its order, and a
    message about them.

    keep: slice, or true: then the classes are the same ones. A class that is missing gets zero
    weights and the lowest bias of the others, so that it never wins by itself: 21k classes -> 1k,
    as EVA does (Fang et al. 2022).
    Raises UserError without a head, where classes are not found or their names are not as many as
    the rows, and with `slice` where fewer than half of them are.
    """
    weights, where = found.tensors, found.where
    heads = head_layers(weights, timm_name=found.known.get("model"))
    if not heads:
        if keep != "slice":
            return found, []  # the table of misfits says so
        raise UserError(
            "contains no classifier to slice",
            where=where,
            next_step="set keep_head=false",
        )
    num_rows = len(weights[f"{heads[0]}.weight"])
    names = found.names_of(num_rows)
    try:
        matched = column_of_each_class(names, target, num_outputs=num_rows)
    except UserError:
        if keep == "slice" or num_rows != len(target):
            raise
        said = f"kept the head, whose {num_rows:,} classes have no names: "
        said += "taken in the shards' order"
        return found, [said]
    missing = matched.lacking(target)
    num_found = len(target) - len(missing)
    is_too_few = num_found < MIN_SHARE * len(target)
    if is_too_few or (keep != "slice" and (missing or num_rows != len(target))):
        raise UserError(
            f"its {num_rows:,} classes ({', '.join((names or ())[:2]) or 'unknown'}, ...) include "
            f"{num_found:,} of the {len(target):,} that are wanted ({', '.join(target[:2])}, ...)",
            where=where,
            allowed="the same classes with keep_head=true; with keep_head=slice at least half of "
            "them, matched by name",
            next_step="name the classes of the shards alike, or set keep_head=slice or false",
        )
    columns = torch.tensor(matched.columns)
    tensors = dict(weights)
    for head in heads:
        kernel, bias = (
            weights[f"{head}.weight"][columns],
            weights[f"{head}.bias"][columns],
        )
        kernel[columns < 0] = 0
        bias[columns < 0] = bias[columns >= 0].min()
        tensors |= {f"{head}.weight": kernel, f"{head}.bias": bias}
    kept = f"kept {num_found:,} of {len(target):,} classes of the head"
    how = f", {matched.how}" if matched.how else ""
    zero = f"; zero weights for {_first(missing)}" if missing else ""
    return replace(found, tensors=tensors), [f"{kept}{how}{zero}"]
