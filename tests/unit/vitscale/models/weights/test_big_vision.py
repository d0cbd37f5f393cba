"""big_vision's .npz: a NumPy forward pass over its own names gives the loaded model's logits."""

from __future__ import annotations

from collections.abc import Iterator
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.settings import ModelRun
from vitscale.evaluation.trained_model import open_model
from vitscale.models.costs import num_parameters

WIDTH, HEADS, DEPTH, MLP, CLASSES, PATCH, SIDE = 24, 2, 3, 40, 5, 4, 4
IMAGES = np.random.default_rng(1).normal(size=(2, PATCH * SIDE, PATCH * SIDE, 3))
Arrays = dict[str, np.ndarray]


def names(*, pool: str, cls: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of big_vision, models/vit.py."""
    yield "embedding/kernel", (PATCH, PATCH, 3, WIDTH)
    yield "embedding/bias", (WIDTH,)
    yield "pos_embedding", (1, SIDE * SIDE, WIDTH)
    yield "head/kernel", (WIDTH, CLASSES)
    yield "head/bias", (CLASSES,)
    if cls:
        yield "cls", (1, 1, WIDTH)
    for where in (f"Transformer/encoderblock_{block}/" for block in range(DEPTH)):
        yield from norm(f"{where}LayerNorm_0/")
        yield from norm(f"{where}LayerNorm_1/")
        yield from attention(f"{where}MultiHeadDotProductAttention_0/")
        yield from dense(f"{where}MlpBlock_0/")
    yield from norm("Transformer/encoder_norm/")
    if pool == "map":
        yield "MAPHead_0/probe", (1, 1, WIDTH)
        yield from attention("MAPHead_0/MultiHeadDotProductAttention_0/")
        yield from norm("MAPHead_0/LayerNorm_0/")
        yield from dense("MAPHead_0/MlpBlock_0/")


def norm(where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{where}scale", (WIDTH,)
    yield f"{where}bias", (WIDTH,)


def attention(where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("query", "key", "value"):
        yield f"{where}{part}/kernel", (WIDTH, HEADS, WIDTH // HEADS)
        yield f"{where}{part}/bias", (HEADS, WIDTH // HEADS)
    yield f"{where}out/kernel", (HEADS, WIDTH // HEADS, WIDTH)
    yield f"{where}out/bias", (WIDTH,)


def dense(where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{where}Dense_0/kernel", (WIDTH, MLP)
    yield f"{where}Dense_0/bias", (MLP,)
    yield f"{where}Dense_1/kernel", (MLP, WIDTH)
    yield f"{where}Dense_1/bias", (WIDTH,)


def random_arrays(**options: Any) -> Arrays:
    random = np.random.default_rng(0)
    return {
        name: random.normal(scale=0.3, size=shape).astype(np.float32)
        for name, shape in names(**options)
    }


def normed(x: np.ndarray, w: Arrays, where: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * w[f"{where}scale"] + w[f"{where}bias"]


def gelu(x: np.ndarray, form: str) -> np.ndarray:
    if form == "erf":
        return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mlp(x: np.ndarray, w: Arrays, where: str, form: str) -> np.ndarray:
    hidden = gelu(x @ w[f"{where}Dense_0/kernel"] + w[f"{where}Dense_0/bias"], form)
    return hidden @ w[f"{where}Dense_1/kernel"] + w[f"{where}Dense_1/bias"]


def attended(q_in: np.ndarray, kv_in: np.ndarray, w: Arrays, where: str) -> np.ndarray:
    q, k, v = (
        np.einsum("btd,dhe->bhte", x, w[f"{where}{part}/kernel"])
        + w[f"{where}{part}/bias"][None, :, None]
        for part, x in (("query", q_in), ("key", kv_in), ("value", kv_in))
    )
    scores = np.einsum("bhqe,bhke->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("bhqk,bhke->bqhe", weights, v)
    return np.einsum("bqhe,hed->bqd", mixed, w[f"{where}out/kernel"]) + w[f"{where}out/bias"]


def forward(w: Arrays, *, pool: str, form: str = "tanh") -> np.ndarray:
    """IMAGES -> logits, after big_vision, models/vit.py."""
    patches = IMAGES.reshape(2, SIDE, PATCH, SIDE, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    x = np.einsum("bijhwc,hwcd->bijd", patches, w["embedding/kernel"]) + w["embedding/bias"]
    x = x.reshape(2, SIDE * SIDE, WIDTH) + w["pos_embedding"]
    if "cls" in w:
        x = np.concatenate([np.tile(w["cls"], (2, 1, 1)), x], axis=1)
    for where in (f"Transformer/encoderblock_{block}/" for block in range(DEPTH)):
        y = normed(x, w, f"{where}LayerNorm_0/")
        x = x + attended(y, y, w, f"{where}MultiHeadDotProductAttention_0/")
        x = x + mlp(normed(x, w, f"{where}LayerNorm_1/"), w, f"{where}MlpBlock_0/", form)
    x = normed(x, w, "Transformer/encoder_norm/")
    if pool == "map":
        probe = np.tile(w["MAPHead_0/probe"], (2, 1, 1))
        x = attended(probe, x, w, "MAPHead_0/MultiHeadDotProductAttention_0/")
        y = normed(x, w, "MAPHead_0/LayerNorm_0/")
        x = x + mlp(y, w, "MAPHead_0/MlpBlock_0/", form)
    pooled = x.mean(1) if pool == "gap" else x[:, 0]
    return np.asarray(pooled @ w["head/kernel"] + w["head/bias"])


def scanned(w: Arrays) -> Arrays:
    """Blocks stacked along a leading axis, as big_vision's `scan=True` stores them."""
    stacked: dict[str, list[np.ndarray]] = {}
    rest = {}
    for name, value in w.items():
        first, _, part = name.removeprefix("Transformer/encoderblock_").partition("/")
        if first.isdigit():
            stacked.setdefault(f"Transformer/encoderblock/{part}", []).append(value)
        else:
            rest[name] = value
    return rest | {name: np.stack(values) for name, values in stacked.items()}


@pytest.mark.parametrize("prefix", ["params/", "params/img/"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("pool, cls", [("map", False), ("gap", False), ("cls", True)])
def test_numpy_forward_equals_the_loaded_model(
    tmp_path: Path, pool: str, cls: bool, stacked: bool, prefix: str
) -> None:
    arrays = random_arrays(pool=pool, cls=cls)
    stored = scanned(arrays) if stacked else arrays
    # Another tower's, never read.
    text = {"params/txt/head/kernel": np.ones((2, 2))} if prefix.endswith("img/") else {}
    named = {f"{prefix}{name}": value for name, value in stored.items()}
    np.savez(tmp_path / "model.npz", **named, **text)
    loaded = open_model(**ModelRun(init=str(tmp_path / "model.npz")).source())
    with torch.no_grad():
        found = loaded.network(torch.from_numpy(IMAGES).float().permute(0, 3, 1, 2)).numpy()
    expected = forward(arrays, pool=pool)
    assert expected.std() > 0.1
    assert np.abs(found - expected).max() < 1e-4
    assert loaded.arch.pool == pool and loaded.preprocessing.mean == (0.5, 0.5, 0.5)
    counted = num_parameters(loaded.arch)
    assert counted == sum(value.size for value in arrays.values())


def test_settings_that_are_given_win_over_the_formats(tmp_path: Path) -> None:
    arrays = random_arrays(pool="gap", cls=False)
    np.savez(tmp_path / "model.npz", **{f"params/{k}": v for k, v in arrays.items()})
    run = ModelRun(init=str(tmp_path / "model.npz"), model={"name": "vit", "gelu": "erf"})
    with torch.no_grad():
        images = torch.from_numpy(IMAGES).float().permute(0, 3, 1, 2)
        found = open_model(**run.source()).network(images).numpy()
    erf_logits, tanh_logits = (forward(arrays, pool="gap", form=form) for form in ("erf", "tanh"))
    assert np.abs(found - erf_logits).max() < np.abs(found - tanh_logits).max() / 10
