"""Load the weights that fine-tuning starts from (`init`), from a checkpoint or a weight file."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from finetune.run import FinetuneRun
from vitscale.checkpoint.folders import resolve_weights
from vitscale.evaluation.models.trained_model import starting_weights
from vitscale.models.interface.architecture import Architecture
from vitscale.models.vit.position_embedding import fixed_positions
from vitscale.models.weights.reading import is_external, read_external_weights
from vitscale.models.weights.transfer import transfer_weights


def load_initial_weights(model: nn.Module, arch: Architecture, run: FinetuneRun) -> list[str]:
    """Put the weights of `init` into the model; returns messages about them.

    Raises UserError when they do not fit or cannot be read.
    """
    if run.init is None:
        return []
    if is_external(run.init):
        external = read_external_weights(Path(run.init), grid=run.init_grid)
        left_out = transfer_weights(
            model,
            weights=external.weights,
            source_grid=external.grid,
            target_grid=arch.grid,
            num_prefix_tokens=arch.num_prefix_tokens,
            convention=run.position_embedding,
            where=run.init,
            keep_head=run.keep_head,
            resize_patches=run.init_patch == "resize",
        )
        return [f"starting from {run.init}", *_said(left_out)]
    source, warnings = resolve_weights(run.init)
    rows, columns = source.description["grid"]
    weights = starting_weights(source, run.init_weights)
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
        keep_head=run.keep_head,
        resize_patches=run.init_patch == "resize",
    )
    return [*warnings, f"starting from {source.folder}, step {source.step}", *_said(left_out)]


def _said(left_out: list[str]) -> list[str]:
    if not left_out:
        return []
    shown = f"{', '.join(left_out[:3])}{', ...' if left_out[3:] else ''}"
    return [f"left out {len(left_out)} tensors that this model does not have: {shown}"]
