"""Weights of other code bases give the logits of timm's loader; bad files are refused."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.layers import GELUTanh
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import _load_weights as load_as_timm_does

from finetune.settings import ModelRun
from vitscale.config.errors import UserError
from vitscale.evaluation.trained_model import open_model
from vitscale.models.weights.inferred import inferred_model
from vitscale.models.weights.reading import read_weights

WIDTH, HEADS, DEPTH, MLP, CLASSES = 24, 2, 2, 40, 5
Arrays = dict[str, np.ndarray]


def arrays(*, is_big_vision: bool = False, pool: str = "token", rows: int | None = None) -> Arrays:
    """Random weights under Google's names, without a class token unless the pool reads it."""
    attention, mlp, second_norm = (0, 0, 1) if is_big_vision else (1, 3, 2)
    shapes: dict[str, tuple[int, ...]] = {}

    def module(where: str, kernel: tuple[int, ...], *bias: int, weight: str = "kernel") -> None:
        shapes.update({f"{where}/{weight}": kernel, f"{where}/bias": bias or kernel[-1:]})

    def block(where: str, *, attention: int, mlp: int) -> None:
        for name in ("query", "key", "value"):
            place = f"{where}MultiHeadDotProductAttention_{attention}/{name}"
            module(place, (WIDTH, HEADS, WIDTH // HEADS), HEADS, WIDTH // HEADS)
        place = f"{where}MultiHeadDotProductAttention_{attention}/out"
        module(place, (HEADS, WIDTH // HEADS, WIDTH), WIDTH)
        module(f"{where}MlpBlock_{mlp}/Dense_0", (WIDTH, MLP))
        module(f"{where}MlpBlock_{mlp}/Dense_1", (MLP, WIDTH))

    module("embedding", (4, 4, 3, WIDTH))
    module("Transformer/encoder_norm", (WIDTH,), weight="scale")
    module("head", (WIDTH, CLASSES))
    num_rows = rows or 16 + (pool == "token")
    where = "" if is_big_vision else "Transformer/posembed_input/"
    shapes[f"{where}pos_embedding"] = (1, num_rows, WIDTH)
    if pool == "token":
        shapes["cls"] = (1, 1, WIDTH)
    for number in range(DEPTH):
        b = f"Transformer/encoderblock_{number}/"
        module(f"{b}LayerNorm_0", (WIDTH,), weight="scale")
        module(f"{b}LayerNorm_{second_norm}", (WIDTH,), weight="scale")
        block(b, attention=attention, mlp=mlp)
    if pool == "map":
        shapes["MAPHead_0/probe"] = (1, 1, WIDTH)
        module("MAPHead_0/LayerNorm_0", (WIDTH,), weight="scale")
        block("MAPHead_0/", attention=0, mlp=0)
    random = np.random.default_rng(0)
    return {n: random.normal(scale=0.2, size=s).astype(np.float32) for n, s in shapes.items()}


def npz(path: Path, content: Arrays, *, prefix: str = "") -> Path:
    np.savez(path, **{f"{prefix}{name}": value for name, value in content.items()})
    return path


def theirs(**options: Any) -> Any:
    """timm's model with random weights."""
    torch.manual_seed(0)
    options = {"mlp_ratio": MLP / WIDTH, "num_classes": CLASSES, **options}
    model = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, **options
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)))


def opened(path: Path, **values: Any) -> torch.Tensor:
    return logits(
        open_model(**ModelRun.model_validate({"init": str(path), **values}).source()).network
    )


# ---- Google -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_big_vision", "pool"), [(False, "token"), (True, "token"), (True, "avg"), (True, "map")]
)
def test_logits_of_an_npz_equal_those_of_timms_loader(
    tmp_path: Path, is_big_vision: bool, pool: str
) -> None:
    content = arrays(is_big_vision=is_big_vision, pool=pool)
    prefix = "params/" if is_big_vision else ""
    path = npz(tmp_path / "weights.npz", content, prefix=prefix)
    options = {"class_token": pool == "token", "global_pool": pool, "fc_norm": False}
    expected = theirs(act_layer=GELUTanh, final_norm=True, **options)
    load_as_timm_does(expected, str(path), prefix=prefix)
    assert logits(expected).std() > 0.1
    assert torch.allclose(opened(path), logits(expected), atol=1e-5)


def test_layouts_of_older_and_larger_files_are_read(tmp_path: Path) -> None:
    """Blocks stacked by `scan=True`, a text tower, optimiser states, bf16 as NumPy has it."""
    content = arrays(is_big_vision=True)
    expected = opened(npz(tmp_path / "plain.npz", content, prefix="params/"))
    block = "Transformer/encoderblock_0/"
    stacked = {n: v for n, v in content.items() if "encoderblock_" not in n}
    for name in (n for n in content if n.startswith(block)):
        each = [content[name.replace("_0/", f"_{number}/", 1)] for number in range(DEPTH)]
        stacked[name.replace("_0/", "/", 1)] = np.stack(each)
    text = {f"params/img/{name}": value for name, value in stacked.items()}
    text["params/txt/head/kernel"] = np.ones((2, 2), np.float32)
    assert torch.equal(opened(npz(tmp_path / "stacked.npz", text)), expected)
    old = npz(tmp_path / "old.npz", content, prefix="opt/target/")
    with zipfile.ZipFile(old, "a") as archive:  # never read
        archive.writestr("opt/state/step.npy", b"whatever")
    assert torch.equal(opened(old), expected)
    rounded = {k: torch.from_numpy(v).bfloat16() for k, v in content.items()}
    raw = {k: v.view(torch.int16).numpy().view("V2") for k, v in rounded.items()}
    exact = {k: v.float().numpy() for k, v in rounded.items()}
    found = opened(npz(tmp_path / "bf16.npz", raw))
    assert torch.equal(found, opened(npz(tmp_path / "fp32.npz", exact)))


def test_positions_form_a_square(tmp_path: Path) -> None:
    path = npz(tmp_path / "wide.npz", arrays(rows=19))
    with pytest.raises(UserError, match=r"form no square(?s:.*)config.json"):
        read_weights(path)


# ---- PyTorch ------------------------------------------------------------------------------------


def test_weights_of_timm_and_deit_give_their_logits(tmp_path: Path) -> None:
    model = theirs(init_values=0.3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    deit = {n.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v
            for n, v in state.items()}  # fmt: skip
    for content in (state, deit):
        save_file(content, tmp_path / "model.safetensors")
        found = opened(tmp_path / "model.safetensors", model={"name": "vit", "num_heads": HEADS})
        assert torch.allclose(found, logits(model), atol=1e-6)


STATE = {
    "cls_token": torch.full((1, 1, 8), 2.0),
    "pos_embed": torch.arange(80.0).view(1, 10, 8),
    "patch_embed.proj.weight": torch.ones(8, 3, 4, 4, dtype=torch.float16),
    "blocks.0.norm1.weight": torch.ones(8),
}
ARGS = argparse.Namespace(lr=0.1, output_dir=Path("/somewhere"))
HEADS_OF_DINO = {
    "backbone.mask_token": torch.ones(1, 8),
    "dino_head.mlp.0.weight": torch.ones(2, 2),
}


def under(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in STATE.items()}


CHUNKED = {n.replace("blocks.0.", "blocks.0.0."): v for n, v in STATE.items()}


@pytest.mark.parametrize(
    "content",
    [
        {"model": STATE, "optimizer": {"state": {0: {"step": 1}}}, "epoch": 3, "args": ARGS},
        {"state_dict": under("module.")},
        {"student": {}, "teacher": under("module.backbone."), "epoch": 1},
        {"teacher": under("backbone.") | HEADS_OF_DINO},
        {"model": {name: torch.nn.Parameter(value) for name, value in STATE.items()}},
        CHUNKED,
    ],
    ids=["mae", "timm", "dino", "dinov2", "parameters", "chunks"],
)
@pytest.mark.parametrize("kind", ["zip", "old"])
def test_files_of_trainers_load_as_their_weights(tmp_path: Path, content: Any, kind: str) -> None:
    path = tmp_path / "model.pth"
    torch.save(content, path, _use_new_zipfile_serialization=kind != "old")
    found = read_weights(path)
    assert found.grid == (3, 3)
    assert found.tensors.keys() - {"mask_token"} == STATE.keys()
    assert all(torch.equal(found.tensors[name], STATE[name].float()) for name in STATE)
    assert all(value.dtype == torch.float32 for value in found.tensors.values())


# DeiT's Ti, SigLIP's So400m, H and DINOv2's g; any other has heads of 64 channels.
@pytest.mark.parametrize(
    ("width", "heads"), [(192, 3), (1152, 16), (1280, 16), (1536, 24), (640, 10)]
)
def test_heads_are_those_of_the_known_model(tmp_path: Path, width: int, heads: int) -> None:
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 2, width),
        "patch_embed.proj.weight": (width, 3, 2, 2),
        "blocks.0.norm1.weight": (width,),
        "blocks.0.mlp.fc1.weight": (8, width),
        "blocks.0.mlp.fc2.weight": (width, 8),
    }
    path = tmp_path / "bare.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    settings, classes = inferred_model(read_weights(path), chosen=None, path=path)
    assert (settings.num_heads, settings.width, classes) == (heads, width, 0)  # type: ignore[attr-defined]  # a ViT's


# ---- bad files ----------------------------------------------------------------------------------


class Trap:
    """Unpickled, it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["zip", "old", "npz"])
def test_pickles_that_run_code_are_refused_unread(tmp_path: Path, kind: str) -> None:
    sprung, path = tmp_path / "sprung", tmp_path / "trap.pth"
    if kind == "npz":
        path = npz(
            tmp_path / "trap.npz", arrays() | {"cls": np.array([Trap(sprung)], dtype=object)}
        )
    else:
        content = {"model": STATE, "extra": Trap(sprung)}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    message = (
        "Object arrays cannot be" if kind == "npz" else "may run code; nothing of it was loaded"
    )
    with pytest.raises(UserError, match=message):
        read_weights(path)
    assert not sprung.exists()
    if kind != "npz":
        torch.load(path, weights_only=False)  # the trap is a real one
        assert sprung.exists()


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    whole = npz(tmp_path / "whole.npz", arrays()).read_bytes()
    torch.save(STATE, tmp_path / "whole.pth")
    middle = len(whole) // 2
    bad: dict[str, Any] = {
        "cut.npz": whole[:middle],
        # zip's own checksum detects a byte that changed.
        "changed.npz": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "cut.pth": (tmp_path / "whole.pth").read_bytes()[:-300],
        **{f"text{suffix}": b"<html>" * 9 for suffix in (".npz", ".safetensors", ".pth")},
        **{f"empty{suffix}": b"" for suffix in (".npz", ".safetensors", ".pth")},
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="is damaged or no file of weights") as caught:
            read_weights(tmp_path / name)
        assert name in str(caught.value) and len(str(caught.value).splitlines()) <= 3
    for content, message in (
        ({"model": {"x": 1}}, "'x' is no tensor"),
        ([torch.ones(1)], "holds no tensors by name"),
    ):
        torch.save(content, tmp_path / "odd.pth")
        with pytest.raises(UserError, match=message):
            read_weights(tmp_path / "odd.pth")
    with pytest.raises(UserError, match="cannot be read .No such file"):
        read_weights(tmp_path / "missing.npz")
    npz(tmp_path / "other.npz", {"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(UserError, match="its first names: a, b"):
        read_weights(tmp_path / "other.npz")
