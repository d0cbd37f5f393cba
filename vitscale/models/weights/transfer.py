"""Load the trunk of one model into another.

Owns: which tensors carry over, another grid or patch size, and the report of misfits.
Leaves out: reading files (`checkpoint`, `reading`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from vitscale.config.errors import UserError
from vitscale.models.interface import refuse_misfits
from vitscale.models.positions import resize_patch_embedding, resize_position_embedding
from vitscale.models.timm_model import TimmModel

# What transfer leaves out: modules that only an objective trains and, unless kept, classifiers.
# The last two: names of MAE's published files.
OBJECTIVE = ("objective.", "decoder_", "mask_token")
HEADS = ("head.", "head_dist.")
POSITION_NAME = "pos_embed"
PATCH_NAME = "patch_embed.proj.weight"
CLASS_NAME = "cls_token"


def transfer_weights(
    model: nn.Module,
    *,
    weights: Mapping[str, torch.Tensor],
    source_grid: tuple[int, int],
    target_grid: tuple[int, int],
    num_prefix_tokens: int,
    convention: str,
    where: str,
    keep_head: bool = False,
    resize_patches: bool = False,
) -> list[str]:
    """Load a trunk; the head (with a representation layer, if any) keeps its fresh values.

    keep_head: load the head too.
    resize_patches: resize the patch embedding to the model's patch size.
    A norm after the mean keeps its fresh values if the weights have one before it only (MAE).
    Returns the names of tensors that are left out: what only an objective trained, and that norm.
    Raises UserError with a table of every missing, unknown or misshapen tensor; then nothing was
    loaded.
    """
    if isinstance(model, TimmModel):
        model.load_weights(weights, where=where, keep_head=keep_head)
        return []
    left_out = OBJECTIVE if keep_head else (*OBJECTIVE, *HEADS)
    own, given = (
        {name: value for name, value in tensors.items() if not name.startswith(left_out)}
        for tensors in (model.state_dict(), weights)
    )
    replaced = _replaced_norm(own, given)
    if POSITION_NAME in given:
        num_rows = given[POSITION_NAME].shape[1]
        num_prefix_rows = num_rows - source_grid[0] * source_grid[1]
        # The class token may have no position of its own, and registers never have one.
        if num_prefix_rows not in (0, min(1, num_prefix_tokens)):
            num_prefix_rows = num_prefix_tokens  # refused below, with the shapes
        try:
            resized_LD = resize_position_embedding(
                given[POSITION_NAME][0],
                source_grid=source_grid,
                target_grid=target_grid,
                num_prefix_tokens=num_prefix_rows,
                convention=convention,
            )
        except ValueError as error:
            raise UserError(str(error), where=where) from None
        given[POSITION_NAME] = resized_LD[None]
        if POSITION_NAME in own:
            num_wanted = own[POSITION_NAME].shape[1] - target_grid[0] * target_grid[1]
            _match_class_position(given, num_prefix_rows=num_prefix_rows, num_wanted=num_wanted)
    other_patch = _has_other_patch(own, given)
    if other_patch and resize_patches:
        size = own[PATCH_NAME].shape[-1]
        given[PATCH_NAME] = resize_patch_embedding(given[PATCH_NAME], patch_size=size)
    next_step = _advice(keep_head=keep_head, other_patch=other_patch)
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


def _advice(*, keep_head: bool, other_patch: bool) -> str:
    next_step = (
        "set model.name, preset, patch_size, pool, class_token, num_registers, positions and "
        "layer_scale "
    )
    next_step += "to those of the checkpoint's run" + (", or keep_head=false" if keep_head else "")
    if other_patch:
        next_step += "; or set init_patch=resize"
    return next_step


def _has_other_patch(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have kernels of patches, alike but for the rows and columns of a patch."""
    if PATCH_NAME not in own or PATCH_NAME not in given:
        return False
    ours, theirs = own[PATCH_NAME].shape, given[PATCH_NAME].shape
    return len(theirs) == 4 and ours[:2] == theirs[:2] and ours[2:] != theirs[2:]


def _match_class_position(
    given: dict[str, torch.Tensor], *, num_prefix_rows: int, num_wanted: int
) -> None:
    """Add or remove the class token's position; the sum of token and position stays the same."""
    if CLASS_NAME not in given or (num_prefix_rows, num_wanted) not in ((1, 0), (0, 1)):
        return
    pos_1LD = given[POSITION_NAME]
    if num_wanted == 0:
        given[CLASS_NAME] = given[CLASS_NAME].float() + pos_1LD[:, :1]
        given[POSITION_NAME] = pos_1LD[:, 1:]
    else:
        given[POSITION_NAME] = torch.cat([torch.zeros_like(pos_1LD[:, :1]), pos_1LD], dim=1)
