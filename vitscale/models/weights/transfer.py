"""Load the trunk of one model into another, of another grid or patch size too."""

from __future__ import annotations

import math

import torch
from timm.layers.patch_embed import resample_patch_embed
from torch import nn

from vitscale.config.errors import UserError
from vitscale.models.interface import refuse_misfits
from vitscale.models.positions import resize_position_embedding
from vitscale.models.timm_model import TimmModel
from vitscale.models.weights.files import Weights

# What transfer leaves out: modules that only an objective trains and, unless kept, classifiers.
# The last two: names of MAE's published files.
OBJECTIVE = ("objective.", "decoder_", "mask_token")
HEADS = ("head.", "head_dist.")
MAX_PREFIX_ROWS = 2
POSITIONS, PATCH, CLASS = "pos_embed", "patch_embed.proj.weight", "cls_token"


def transfer_weights(
    model: nn.Module,
    found: Weights,
    *,
    grid: tuple[int, int],
    convention: str,
    keep_head: bool = False,
    resize_patches: bool = False,
) -> list[str]:
    """Load a trunk; the head (with a representation layer, if any) keeps its fresh values.

    grid: of the model. keep_head: load the head too.
    resize_patches: resize the patch embedding to the model's patch size.
    A norm after the mean keeps its fresh values if the weights have one before it only (MAE).
    Returns the names of tensors that are left out: what only an objective trained, and that norm.
    Raises UserError with a table of every missing, unknown or misshapen tensor; then nothing was
    loaded.
    """
    weights, where = found.tensors, found.where
    if isinstance(model, TimmModel):
        model.load_weights(weights, where=where, keep_head=keep_head)
        return []
    left_out = OBJECTIVE if keep_head else (*OBJECTIVE, *HEADS)
    own, given = (
        {name: value for name, value in tensors.items() if not name.startswith(left_out)}
        for tensors in (model.state_dict(), weights)
    )
    replaced = _replaced_norm(own, given)
    given |= {name: value for name, value in found.computed.items() if name in own}
    if POSITIONS in given:
        # Class and distillation token may have a position, and registers never have one.
        num_others = given[POSITIONS].shape[1] - math.prod(found.grid)
        num_prefix_rows = min(max(0, num_others), MAX_PREFIX_ROWS)
        try:
            resized_LD = resize_position_embedding(
                given[POSITIONS][0],
                source_grid=found.grid,
                target_grid=grid,
                num_prefix_tokens=num_prefix_rows,
                convention=convention,
            )
        except ValueError as error:
            raise UserError(str(error), where=where) from None
        given[POSITIONS] = resized_LD[None]
        if POSITIONS in own and CLASS in given:
            # Add or remove the class token's position; their sum stays the same.
            num_wanted = own[POSITIONS].shape[1] - math.prod(grid)
            pos_1LD = given[POSITIONS]
            if (num_prefix_rows, num_wanted) == (1, 0):
                given[CLASS] = given[CLASS].float() + pos_1LD[:, :1]
                given[POSITIONS] = pos_1LD[:, 1:]
            elif (num_prefix_rows, num_wanted) == (0, 1):
                given[POSITIONS] = torch.cat([torch.zeros_like(pos_1LD[:, :1]), pos_1LD], dim=1)
    next_step = "set the keys of `model` to those of the checkpoint's run"
    next_step += ", or keep_head=false" if keep_head else ""
    next_step += ", or model.name=timm for weights of another family"
    ours, theirs = (tuple(each[PATCH].shape) if PATCH in each else () for each in (own, given))
    if ours != theirs and ours[:2] == theirs[:2] and len(theirs) == 4:
        # Alike but for the rows and columns of a patch.
        next_step += "; or set init_patch=resize"
        if resize_patches:
            # (B^T)^+ w, where B resizes a patch bilinearly: upwards, tokens of resized patches are
            # those of the patches themselves. PI-resize of FlexiViT, Beyer et al. 2023.
            given[PATCH] = resample_patch_embed(
                given[PATCH].float(), list(ours[2:]), interpolation="bilinear", antialias=False
            )
    refuse_misfits(own, given, where=where, next_step=next_step)
    model.load_state_dict(given, strict=False)
    return sorted([*(name for name in weights if name.startswith(OBJECTIVE)), *replaced])


def _replaced_norm(own: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> list[str]:
    """Take the norm before the mean out of `given`, and the one after it out of `own`.

    As MAE's fine-tuning does: the former normalised single tokens.
    """
    before = [name for name in given if name.startswith("norm.")]
    after = [name for name in own if name.startswith("fc_norm.")]
    if not before or not after or any(name in given for name in after):
        return []
    for name in before:
        del given[name]
    for name in after:
        del own[name]
    return before
