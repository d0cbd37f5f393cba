"""A Vision Transformer in NumPy, written from the papers: the reference for exported models."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]


def vit_logits(
    weights: Weights,
    images_B3HW: np.ndarray,
    *,
    num_heads: int,
    gelu: str,
    pool: str = "cls",
    eps: float = 1e-6,
) -> np.ndarray:
    """Logits [B, classes] in float64 of timm's names: Dosovitskiy et al. 2021, eq. 1 to 4.

    pool: `cls`, `gap`, `cls_mean` or `map`. A distillation token (Touvron et al. 2021)
    averages two heads.
    """
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    tokens_BLD = _patches(w, images_B3HW.astype(np.float64))
    prefix = [w[name] for name in ("cls_token", "dist_token") if name in w]
    num_images, num_patches = len(tokens_BLD), tokens_BLD.shape[1]

    def repeated(token_1ND: np.ndarray) -> np.ndarray:
        return np.repeat(token_1ND, num_images, axis=0)

    if w["pos_embed"].shape[1] == num_patches:
        tokens_BLD = tokens_BLD + w["pos_embed"]
        tokens_BLD = np.concatenate([*map(repeated, prefix), tokens_BLD], axis=1)
    else:
        tokens_BLD = np.concatenate([*map(repeated, prefix), tokens_BLD], axis=1) + w["pos_embed"]
    if "reg_token" in w:
        first, rest = tokens_BLD[:, : len(prefix)], tokens_BLD[:, len(prefix) :]
        tokens_BLD = np.concatenate([first, repeated(w["reg_token"]), rest], axis=1)
    depth = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    for block in range(depth):
        of = {n.removeprefix(f"blocks.{block}."): v for n, v in w.items()}
        normed = _norm(tokens_BLD, of["norm1.weight"], of["norm1.bias"], eps)
        tokens_BLD = tokens_BLD + _attention(of, normed, num_heads) * of.get("ls1.gamma", 1.0)
        normed = _norm(tokens_BLD, of["norm2.weight"], of["norm2.bias"], eps)
        tokens_BLD = tokens_BLD + _mlp(of, normed, gelu) * of.get("ls2.gamma", 1.0)
    if "norm.weight" in w:
        tokens_BLD = _norm(tokens_BLD, w["norm.weight"], w["norm.bias"], eps)
    patches_BLD = tokens_BLD[:, -num_patches:]
    features_BD = tokens_BLD[:, 0]
    if pool == "gap":
        features_BD = patches_BLD.mean(axis=1)
    elif pool == "cls_mean":
        features_BD = np.concatenate([features_BD, patches_BLD.mean(axis=1)], axis=-1)
    elif pool == "map":
        features_BD = _map_head(w, patches_BLD, num_heads=num_heads, gelu=gelu, eps=eps)
    if "fc_norm.weight" in w:
        features_BD = _norm(features_BD, w["fc_norm.weight"], w["fc_norm.bias"], eps)
    if "head.0.weight" in w:
        features_BD = np.tanh(_dense(w, "head.0", features_BD))
        return _dense(w, "head.2", features_BD)
    if "dist_token" in w:
        return (_dense(w, "head", features_BD) + _dense(w, "head_dist", tokens_BLD[:, 1])) / 2
    return _dense(w, "head", features_BD)


def _dense(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _patches(w: Weights, images_B3HW: np.ndarray) -> np.ndarray:
    kernel_D3PP = w["patch_embed.proj.weight"]
    patch = kernel_D3PP.shape[-1]
    rows, columns = (side // patch for side in images_B3HW.shape[2:])
    found = [
        np.einsum(
            "bchw,dchw->bd",
            images_B3HW[:, :, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch],
            kernel_D3PP,
        )
        for r in range(rows)
        for c in range(columns)
    ]
    return np.stack(found, axis=1) + w["patch_embed.proj.bias"]


def _norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * scale + bias


def _attention(of: Weights, x_BLD: np.ndarray, num_heads: int) -> np.ndarray:
    queries, keys, values = np.split(_dense(of, "attn.qkv", x_BLD), 3, axis=-1)
    return _dense(of, "attn.proj", _attended(queries, keys, values, num_heads))


def _map_head(
    w: Weights, x_BLD: np.ndarray, *, num_heads: int, gelu: str, eps: float
) -> np.ndarray:
    """One learned query attends to the patches, then an MLP: Zhai et al. 2022, sec. 3.3."""
    of = {n.removeprefix("attn_pool."): v for n, v in w.items()}
    query_B1D = np.repeat(_dense(of, "q", of["latent"]), len(x_BLD), axis=0)
    keys, values = np.split(_dense(of, "kv", x_BLD), 2, axis=-1)
    x_B1D = _dense(of, "proj", _attended(query_B1D, keys, values, num_heads))
    normed = _norm(x_B1D, of["norm.weight"], of["norm.bias"], eps)
    return (x_B1D + _mlp(of, normed, gelu))[:, 0]


def _attended(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, num_heads: int
) -> np.ndarray:
    width = queries.shape[-1] // num_heads
    heads = []
    for head in range(num_heads):
        part = slice(head * width, (head + 1) * width)
        scores = queries[..., part] @ keys[..., part].swapaxes(1, 2) / math.sqrt(width)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        heads.append(shares / shares.sum(axis=-1, keepdims=True) @ values[..., part])
    return np.concatenate(heads, axis=-1)


def _mlp(of: Weights, x_BLD: np.ndarray, gelu: str) -> np.ndarray:
    x = _dense(of, "mlp.fc1", x_BLD)
    if x.shape[-1] > of["mlp.fc2.weight"].shape[-1]:  # SwiGLU: Shazeer 2020
        gates, x = np.split(x, 2, axis=-1)
        return _dense(of, "mlp.fc2", gates / (1 + np.exp(-gates)) * x)
    if gelu == "tanh":
        inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        inner = np.vectorize(math.erf)(x / math.sqrt(2))
    return _dense(of, "mlp.fc2", 0.5 * x * (1 + inner))
