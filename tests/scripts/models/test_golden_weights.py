"""Stored weights of other libraries, and our own, still give the logits of those libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from timm.models import save_for_hf
from torch import nn

from finetune.exporting.folder import write_folder
from finetune.settings import ExportRun, ModelRun
from tests.support.engine.numpy_vit import vit_logits
from tests.support.golden import Golden
from vitscale.evaluation.trained_model import open_model

WIDTH, HEADS, MLP, SIZE, PATCH = 16, 2, 32, 8, 4
CLASSES = ["cat", "dog", "eel"]
HALF, IMAGENET = [0.5, 0.5, 0.5], [0.485, 0.456, 0.406]
IN_TIMM: dict[str, Any] = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": 2}
IN_TIMM |= {"num_heads": HEADS, "mlp_ratio": 2, "num_classes": 3}
IN_HUGGING_FACE: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 2}
IN_HUGGING_FACE |= {"num_attention_heads": HEADS, "intermediate_size": MLP, "image_size": SIZE}
IN_HUGGING_FACE |= {"patch_size": PATCH, "id2label": dict(enumerate(CLASSES)), "mlp_ratio": 2}


def fixed_images() -> torch.Tensor:
    numbers = torch.arange(2 * 3 * SIZE * SIZE, dtype=torch.int64)
    return ((numbers * numbers * 37 + numbers * 11) % 255 / 127 - 1).reshape(2, 3, SIZE, SIZE)


def coarse(values: torch.Tensor) -> torch.Tensor:
    """Round to multiples of 1/256, which float16 holds too."""
    return (values * 256).round() / 256


@torch.no_grad()
def shaken(model: nn.Module) -> Any:
    """No parameter is at its usual start, where a lost one could go unnoticed."""
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random) * 0.2
        parameter.copy_(coarse(parameter + noise))
    return model.eval()


def store(folder: Path, logits: Any, *, classes: list[str] | None, mean: list[float]) -> None:
    rounded = np.asarray(logits, np.float64).round(7).tolist()
    values = {"logits": rounded, "classes": classes, "mean": mean}
    (folder / "expected.json").write_text(json.dumps(values, indent=1) + "\n")


@torch.no_grad()
def write_timm(folder: Path) -> None:
    """DeiT III: layer scale, no position of the class token, exact GELU."""
    theirs = shaken(timm.create_model("deit3_small_patch16_224", **IN_TIMM))
    config = {"label_names": CLASSES}
    save_for_hf(theirs, folder, model_config=config, model_args=IN_TIMM, safe_serialization=True)
    store(folder, theirs(fixed_images()), classes=CLASSES, mean=IMAGENET)


@torch.no_grad()
def write_hugging_face(folder: Path, *, kind: str, **more: Any) -> None:
    config = getattr(transformers, f"{kind}Config")(**IN_HUGGING_FACE, **more)
    theirs = shaken(getattr(transformers, f"{kind}ForImageClassification")(config))
    theirs.save_pretrained(folder)
    mean = HALF if kind == "ViT" else IMAGENET
    store(folder, theirs(fixed_images()).logits, classes=CLASSES, mean=mean)


@torch.no_grad()
def write_google(folder: Path) -> None:
    """vision_transformer's names; the logits are of timm's own reader."""
    random = torch.Generator().manual_seed(2)
    b, head_width = "Transformer/encoderblock_", WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "cls": (1, 1, WIDTH),
        "Transformer/posembed_input/pos_embedding": (1, 1 + (SIZE // PATCH) ** 2, WIDTH),
    }
    dense = {"embedding": (PATCH, PATCH, 3, WIDTH), "head": (WIDTH, 3)}
    norms = ["Transformer/encoder_norm"]
    for block in (f"{b}0", f"{b}1"):
        attention, mlp = f"{block}/MultiHeadDotProductAttention_1", f"{block}/MlpBlock_3"
        norms += [f"{block}/LayerNorm_0", f"{block}/LayerNorm_2"]
        for name in ("query", "key", "value"):
            shapes[f"{attention}/{name}/kernel"] = (WIDTH, HEADS, head_width)
            shapes[f"{attention}/{name}/bias"] = (HEADS, head_width)
        shapes[f"{attention}/out/kernel"] = (HEADS, head_width, WIDTH)
        shapes[f"{attention}/out/bias"] = (WIDTH,)
        dense |= {f"{mlp}/Dense_0": (WIDTH, MLP), f"{mlp}/Dense_1": (MLP, WIDTH)}
    shapes |= {f"{name}/{part}": (WIDTH,) for name in norms for part in ("scale", "bias")}
    for name, shape in dense.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[-1:]}
    arrays = {n: coarse(torch.randn(shape, generator=random) * 0.3) for n, shape in shapes.items()}
    np.savez(folder / "model.npz", **{name: value.numpy() for name, value in arrays.items()})
    theirs: Any = timm.create_model("vit_base_patch16_224", **IN_TIMM, act_layer="gelu_tanh")
    theirs.eval().load_pretrained(str(folder / "model.npz"))
    store(folder, theirs(fixed_images()), classes=None, mean=HALF)


def write_own(folder: Path) -> None:
    """Our export of the weights in `timm`; the logits are NumPy's."""
    run = ExportRun(init=str(folder.with_name("timm")), to="safetensors", output=str(folder))
    loaded = open_model(**run.source())
    list(write_folder(run, loaded))
    (folder / "README.md").unlink()  # the card
    weights = {name: value.numpy() for name, value in loaded.network.state_dict().items()}
    logits = vit_logits(weights, fixed_images().numpy(), num_heads=HEADS, gelu="erf")
    store(folder, logits, classes=CLASSES, mean=IMAGENET)


KINDS: dict[str, Callable[[Path], None]] = {
    "google": write_google,
    "timm": write_timm,
    "vit": partial(write_hugging_face, kind="ViT"),
    "deit": partial(write_hugging_face, kind="DeiT"),
    "dinov2": partial(write_hugging_face, kind="Dinov2WithRegisters", use_swiglu_ffn=True),
    "own": write_own,
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_stored_weights(golden: Golden, kind: str) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        torch.manual_seed(0)
        KINDS[kind](folder)

    folder = golden.folder(f"weights/{kind}", make)
    expected = json.loads((folder / "expected.json").read_text())
    path = folder / "model.npz"
    loaded = open_model(**ModelRun(init=str(path if path.exists() else folder)).source())
    with torch.no_grad():
        logits = loaded.network(fixed_images()).numpy()
    assert np.abs(logits - np.array(expected["logits"])).max() < 1e-5
    assert np.std(expected["logits"]) > 0.1
    assert loaded.classes == (expected["classes"] and tuple(expected["classes"]))
    assert list(loaded.preprocessing.mean) == expected["mean"]
