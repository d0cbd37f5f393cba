"""Which layer of a Vision Transformer a parameter belongs to. Needs no torch.

Leaves out: what is done by layer (`optim`: layer decay).
"""

from __future__ import annotations


def layers_above(name: str, *, depth: int) -> int:
    """Layers from the one that holds this parameter up to the head, for layer decay.

    0: head and final norm; 1 to depth: the blocks from the last to the first; depth + 1: patches,
    positions and tokens. Source: BEiT and MAE, `get_layer_id_for_vit`.
    """
    if name.startswith("blocks."):
        return depth - int(name.split(".")[1])
    embedding = ("patch_embed.", "pos_embed", "cls_token", "reg_token")
    return depth + 1 if name.startswith(embedding) else 0
