"""Load the weights that fine-tuning starts from (`init`), from a checkpoint or external weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from finetune.loading.head_slicing import sliced_head
from finetune.loading.source import names_external_weights
from finetune.run import FinetuneRun
from vitscale.checkpoint.folders import resolve_weights
from vitscale.config.errors import UserError
from vitscale.data.training_set import class_names
from vitscale.evaluation.models.trained_model import read_trained_model, starting_weights
from vitscale.models.interface.architecture import Architecture
from vitscale.models.vit.position_embedding import fixed_positions
from vitscale.models.weights.external import ExternalWeights
from vitscale.models.weights.inferred import inferred_model
from vitscale.models.weights.reading import read_external_weights
from vitscale.models.weights.transfer import transfer_weights


def load_initial_weights(model: nn.Module, arch: Architecture, run: FinetuneRun) -> list[str]:
    """Put the weights of `init` into the model; returns messages about them.

    Raises UserError when they do not fit or cannot be read; then nothing was loaded.
    """
    if run.init is None:
        return []
    if names_external_weights(run.init):
        return _from_external(model, arch, run, Path(run.init))
    source, warnings = resolve_weights(run.init)
    rows, columns = source.description["grid"]
    weights = starting_weights(source, run.init_weights)
    classes = read_trained_model(source).classes if run.keep_head == "slice" else None
    weights, said = _with_own_head(weights, run, classes=classes, where=str(source.folder))
    if "pos_embed" in model.state_dict():
        weights |= fixed_positions(source.description["architecture"], grid=(rows, columns))
    left_out = transfer_weights(
        model,
        weights=weights,
        source_grid=(rows, columns),
        target_grid=arch.grid,
        num_prefix_tokens=source.description["num_prefix_tokens"],
        convention=run.position_embedding,
        where=str(source.folder),
        keep_head=bool(run.keep_head),
        resize_patches=run.init_patch == "resize",
    )
    start = f"starting from {source.folder}, step {source.step}"
    return [*warnings, start, *said, *_left_out(left_out)]


def _from_external(model: nn.Module, arch: Architecture, run: FinetuneRun, path: Path) -> list[str]:
    external = read_external_weights(path, grid=run.init_grid, model=run.model)
    weights, said = _with_own_head(external.weights, run, classes=external.classes, where=str(path))
    try:
        left_out = transfer_weights(
            model,
            weights=weights,
            source_grid=external.grid,
            target_grid=arch.grid,
            num_prefix_tokens=arch.num_prefix_tokens,
            convention=run.position_embedding,
            where=str(path),
            keep_head=bool(run.keep_head),
            resize_patches=run.init_patch == "resize",
        )
    except UserError as error:
        raise UserError(
            error.what,
            where=error.where,
            allowed=error.allowed,
            next_step=_suggestion(external, run, path) or error.next_step,
        ) from None
    start = f"starting from {path}, {external.format}"
    left_out += external.left_out
    return [start, *said, *_left_out(left_out), *_differences(external, run)]


def _with_own_head(
    weights: dict[str, torch.Tensor],
    run: FinetuneRun,
    *,
    classes: Sequence[str] | None,
    where: str,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """With `keep_head=slice`: the head's rows of the classes that the run trains on."""
    if run.keep_head != "slice":
        return weights, []
    wanted = class_names(run.data)
    found, missing = sliced_head(weights, source=classes, target=wanted, where=where)
    return found, [_sliced_text(len(wanted), missing)]


def _sliced_text(num_wanted: int, missing: Sequence[str]) -> str:
    """Say in a sentence what was kept of a head."""
    kept = f"kept {num_wanted - len(missing):,} of {num_wanted:,} classes of the head, by name"
    if not missing:
        return kept
    shown = f"{', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
    return f"{kept}; zero weights for {shown}"


def _suggestion(external: ExternalWeights, run: FinetuneRun, path: Path) -> str | None:
    """The keys of `model` that these weights need, where they can be inferred."""
    try:
        wanted, _ = inferred_model(external, chosen=None, path=path)
    except UserError:
        return None
    mine = run.model
    if wanted.name != mine.name:
        return f"set model.name={wanted.name} and its sizes to those of the weights"
    numbers = mine.numbers() if hasattr(mine, "numbers") else {}
    free = ("image_size", "num_classes", "layer_norm_eps", "gelu")
    changes = [
        f"model.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in wanted.model_dump(exclude_unset=True).items()
        if key not in free and value != numbers.get(key, getattr(mine, key))
        if not (key == "layer_scale" and value and mine.model_dump()[key])
    ]
    return f"these weights need {' '.join(changes)}" if changes else None


def _differences(external: ExternalWeights, run: FinetuneRun) -> Iterator[str]:
    """What the weights expect and the run does otherwise; shapes do not show it."""
    said = "probably expect" if external.assumed else "expect"
    is_timm = external.known.get("name") == "timm"
    known = {} if is_timm else external.known
    expected = {f"model.{key}": value for key, value in known.items() if key != "pool"}
    expected |= {f"data.{key}": external.preprocessing[key] for key in ("mean", "std")}
    for key, value in expected.items():
        section, _, name = key.partition(".")
        mine = getattr(getattr(run, section), name, value)
        if mine is None and name in ("num_heads",):
            mine = run.model.numbers()[name]  # type: ignore[attr-defined]  # of a transformer
        if mine != value:
            yield f"these weights {said} {key}={_shown(value)}; this run has {_shown(mine)}"


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _left_out(names: list[str]) -> list[str]:
    if not names:
        return []
    shown = f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"
    return [f"left out {len(names)} tensors that this model does not have: {shown}"]
