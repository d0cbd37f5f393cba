"""Load the weights that a training starts from (`init`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any

import torch
from torch import nn

from vitscale.config.errors import UserError
from vitscale.data.training_set import class_names
from vitscale.evaluation.classes import column_of_each_class
from vitscale.evaluation.trained_model import read_source
from vitscale.models.settings import Architecture
from vitscale.models.weights.files import Weights
from vitscale.models.weights.transfer import (
    OF_OBJECTIVE,
    head_layers,
    inferred_model,
    transfer_weights,
)
from vitscale.runs.training import TrainingRun

# Settings that any weights fit, whatever their value.
FREE_KEYS = ("image_size", "num_classes", "layer_norm_eps", "gelu")
# Fewer matches than this share are a mistake, not a few missing classes.
MIN_SHARE = 0.5
QKV = "blocks.0.attn.qkv.weight"


def load_initial_weights(
    model: nn.Module, arch: Architecture, run: TrainingRun
) -> tuple[str, list[str]]:
    """Put the weights of `init` into the model; returns their source, and messages about them.

    Raises UserError when they do not fit or cannot be read; then nothing was loaded.
    """
    assert run.init is not None
    weights, source = read_source(run.init, weights=run.init_weights, model=run.model)
    messages = []
    if source is not None:
        messages += source.warnings
    messages.append(f"starting from {weights.format}")

    # Shapes do not show the number of heads, so nothing else would notice another one.
    refuse_other_heads(weights, model, arch)
    keep = run.keep_head
    if not arch.num_classes:
        keep = False
    target = class_names(run.data) if keep else ()
    if keep == "auto":
        keep = has_same_head(weights, model, arch, target)
        if not keep:
            messages.append("the head is new: init has none for these classes")
    if keep:
        weights, head_messages = with_head(weights, target, keep=keep)
        messages += head_messages
    try:
        left_out = transfer_weights(
            model,
            weights,
            grid=arch.grid,
            convention=run.position_embedding,
            keep_head=bool(keep),
            resize_patches=run.init_patch == "resize",
        )
    except UserError as error:
        # The user cannot look up the architecture of external weights; their shapes tell it.
        next_step = error.next_step
        if source is None:
            next_step = _keys_that_fit(weights, arch) or next_step
        raise UserError(
            error.what, where=error.where, allowed=error.allowed, next_step=next_step
        ) from None

    # What an objective trains beside the model comes along where it is the same.
    module = getattr(model, "objective", None)
    if module is not None:
        own = {
            name.removeprefix(OF_OBJECTIVE): tensor
            for name, tensor in weights.tensors.items()
            if name.startswith(OF_OBJECTIVE)
        }
        is_same = all(
            name in own and own[name].shape == parameter.shape
            for name, parameter in module.named_parameters()
        )
        # An average of the weights has no buffers, such as DINO's centres.
        if is_same:
            module.load_state_dict(own, strict=False)
            left_out = [name for name in left_out if not name.startswith(OF_OBJECTIVE)]
        origin = "of init" if is_same else "new: init has none like it"
        messages.append(
            f"what {run.objective.name} trains beside the model is {origin}"
        )

    # Reading leaves out tensors that no model has; the transfer those that this one lacks.
    left_out = [*left_out, *weights.left_out]
    if left_out:
        messages.append(
            f"left out {len(left_out)} weights that this model has no place for: {_first(left_out)}"
        )
    messages += _differences(weights, run, arch, keeps_head=bool(keep))
    if source is not None:
        return run.init, messages
    return weights.where, messages


def _first(names: Sequence[str]) -> str:
    shown = [*names[:3]]
    if len(names) > 3:
        shown.append("...")
    return ", ".join(shown)


def _keys_that_fit(weights: Weights, arch: Architecture) -> str | None:
    """The keys of `model` that these weights need, where they can be inferred."""
    try:
        expected, _ = inferred_model(weights, chosen=None)
    except UserError:
        return None

    # The keys of one family mean nothing in another, so a whole section is given.
    if expected.name != arch.name:
        values = expected.model_dump(mode="json", exclude_unset=True)
        return f"set 'model={json.dumps(values)}'"

    changes = []
    for key, value in expected.model_dump(exclude_unset=True).items():
        current = getattr(arch, key)
        if key in FREE_KEYS or value == current:
            continue
        # The weights replace the initial value of a layer scale; they only need to have one.
        if key == "layer_scale" and value and current:
            continue
        shown = str(value).lower() if isinstance(value, bool) else value
        changes.append(f"model.{key}={shown}")
    if not changes:
        return None
    return f"these weights need {' '.join(changes)}"


def has_same_head(
    weights: Weights, model: nn.Module, arch: Architecture, target: Sequence[str]
) -> bool:
    """Whether the head of the weights is for the classes `target`, all named, and fits the model.

    Then nothing is gained by a new one, which would first have to be learned.
    """
    heads = head_layers(weights.tensors, timm_name=weights.known.get("model"))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    fits = heads and all(
        weights.tensors[f"{head}.weight"].shape == shapes.get(f"{head}.weight")
        for head in heads
    )
    pool = getattr(arch, "pool", None)
    if not fits or weights.known.get("pool", pool) != pool:
        return False

    names = weights.names_of(len(target))
    if names is None:
        return False
    matched = column_of_each_class(names, target, num_outputs=len(names))
    return not matched.lacking(target)


def refuse_other_heads(weights: Weights, model: nn.Module, arch: Architecture) -> None:
    """Raise UserError where the same tensors would be cut into another number of heads."""
    expected = weights.known.get("num_heads")
    current = getattr(arch, "num_heads", None)
    if expected is None or current is None or expected == current:
        return

    # Tensors of other shapes are refused anyway, with all that does not fit.
    given = weights.tensors.get(QKV)
    target = model.state_dict().get(QKV)
    if given is None or target is None or given.shape != target.shape:
        return
    raise UserError(
        f"these weights have {expected} attention heads, and this run {current}: the tensors fit, "
        "but would compute something else",
        where="model.num_heads",
        next_step=f"set model.num_heads={expected}",
    )


def _differences(
    weights: Weights, run: TrainingRun, arch: Architecture, *, keeps_head: bool
) -> Iterator[str]:
    """Yield a warning of settings in which the run differs from the weights without a difference
    in shapes."""
    # The image size is expected to differ, and a new head may well see another pool.
    skipped = {"name", "image_size"}
    if not keeps_head:
        skipped.add("pool")
    known = {key: value for key, value in weights.known.items() if key not in skipped}
    # The colours are always known: a format that does not say has a convention.
    colors = {key: weights.preprocessing[key] for key in ("mean", "std")}

    wanted = []
    given = []
    is_sure = True
    for section, settings, expected in (
        ("model", arch, known),
        ("data", run.data, colors),
    ):
        for name, value in expected.items():
            current = getattr(settings, name, value)
            if _in_evaluation(current) == _in_evaluation(value):
                continue
            wanted.append(quote(f"{section}.{name}={_listed(value)}"))
            given.append(f"{name}={_listed(current)}")
            # A value that the format does not state is a guess from its convention.
            is_sure = is_sure and not weights.assumes(name)

    if wanted:
        verb = "expect" if is_sure else "probably expect"
        yield (
            f"warning: this run has {' '.join(given)}; its weights {verb} other values; "
            f"next: {' '.join(wanted)}"
        )


def _in_evaluation(value: Any) -> Any:
    """Arguments of timm without those of dropout and drop path, which act in training alone."""
    if not isinstance(value, dict):
        return value
    return {name: argument for name, argument in value.items() if "drop" not in name}


def _listed(value: Any) -> Any:
    """A value as it is written in YAML."""
    return list(value) if isinstance(value, tuple) else value


# ---- rows of a head -----------------------------------------------------------------------------


def with_head(
    weights: Weights, target: Sequence[str], *, keep: bool | str
) -> tuple[Weights, list[str]]:
    """Return the weights with the rows of their classifiers for `target`, in its order, and a
    message about them.

    keep: slice, or true: then the classes are the same ones. A class that is missing gets zero
    weights and the lowest bias of the others, so that it never wins by itself: 21k classes -> 1k,
    as EVA does (Fang et al. 2022).
    Raises UserError without a head, where classes are not found or their names are not as many as
    the rows, and with `slice` where fewer than half of them are.
    """
    heads = head_layers(weights.tensors, timm_name=weights.known.get("model"))
    if not heads:
        # The transfer refuses them, with a table of all that is missing.
        if keep != "slice":
            return weights, []
        raise UserError(
            "contains no classifier to slice",
            where=weights.where,
            next_step="set keep_head=false",
        )

    # All heads of a model have the same classes, so the first one stands for them.
    num_rows = len(weights.tensors[f"{heads[0]}.weight"])
    names = weights.names_of(num_rows)
    try:
        matched = column_of_each_class(names, target, num_outputs=num_rows)
    except UserError:
        # Without names only the number can be compared, and the order is the user's word.
        if keep == "slice" or num_rows != len(target):
            raise
        return weights, [
            f"kept the head, whose {num_rows:,} classes have no names: "
            "taken in the shards' order"
        ]

    missing = matched.lacking(target)
    num_kept = len(target) - len(missing)
    is_same = num_rows == len(target) and not missing
    if num_kept < MIN_SHARE * len(target) or not (is_same or keep == "slice"):
        raise UserError(
            f"its {num_rows:,} classes ({', '.join((names or ())[:2]) or 'unknown'}, ...) include "
            f"{num_kept:,} of the {len(target):,} that are wanted ({', '.join(target[:2])}, ...)",
            where=weights.where,
            allowed="the same classes with keep_head=true; with keep_head=slice at least half of "
            "them, matched by name",
            next_step="name the classes of the shards alike, or set keep_head=slice or false",
        )

    # A negative column has no row of its own; what indexing gives for it is replaced.
    columns = torch.tensor(matched.columns)
    is_missing = columns < 0
    tensors = dict(weights.tensors)
    for head in heads:
        kernel = tensors[f"{head}.weight"][columns]
        kernel[is_missing] = 0
        bias = tensors[f"{head}.bias"][columns]
        bias[is_missing] = bias[~is_missing].min()
        tensors |= {f"{head}.weight": kernel, f"{head}.bias": bias}

    message = f"kept {num_kept:,} of {len(target):,} classes of the head"
    if matched.how:
        message += f", {matched.how}"
    if missing:
        message += f"; zero weights for {_first(missing)}"
    return replace(weights, tensors=tensors), [message]
