"""Google's .npz and timm's .safetensors give the logits of timm's loader; bad files are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import _load_weights as load_as_timm_does

from vitscale.config.errors import UserError
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.models.weights.reading import read_weights
from vitscale.models.weights.transfer import transfer_weights

WIDTH, HEADS, DEPTH, MLP, CLASSES = 24, 2, 2, 40, 5
SMALL = ViTSettings(
    image_size=16, patch_size=4, width=WIDTH, depth=DEPTH, num_heads=HEADS, mlp_width=MLP
)
# Names of the modules of a block: attention, MLP, second norm.
VIT_JAX, BIG_VISION = (1, 3, 2), (0, 0, 1)


def arrays(
    *, layout: tuple[int, int, int] = VIT_JAX, rows: int = 17, cls: bool = True
) -> dict[str, np.ndarray]:
    """Random weights under Google's names."""
    random = np.random.default_rng(0)
    attention, mlp, norm = layout
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (4, 4, 3, WIDTH),
        "embedding/bias": (WIDTH,),
        "Transformer/encoder_norm/scale": (WIDTH,),
        "Transformer/encoder_norm/bias": (WIDTH,),
        "head/kernel": (WIDTH, CLASSES),
        "head/bias": (CLASSES,),
    }
    where = "Transformer/posembed_input/" if layout == VIT_JAX else ""
    shapes[f"{where}pos_embedding"] = (1, rows, WIDTH)
    if cls:
        shapes["cls"] = (1, 1, WIDTH)
    for block in range(DEPTH):
        b = f"Transformer/encoderblock_{block}/"
        for name in (f"{b}LayerNorm_0/", f"{b}LayerNorm_{norm}/"):
            shapes |= {f"{name}scale": (WIDTH,), f"{name}bias": (WIDTH,)}
        a = f"{b}MultiHeadDotProductAttention_{attention}/"
        for name in ("query", "key", "value"):
            shapes[f"{a}{name}/kernel"] = (WIDTH, HEADS, WIDTH // HEADS)
            shapes[f"{a}{name}/bias"] = (HEADS, WIDTH // HEADS)
        shapes[f"{a}out/kernel"] = (HEADS, WIDTH // HEADS, WIDTH)
        shapes[f"{a}out/bias"] = (WIDTH,)
        m = f"{b}MlpBlock_{mlp}/"
        shapes |= {f"{m}Dense_0/kernel": (WIDTH, MLP), f"{m}Dense_0/bias": (MLP,)}
        shapes |= {f"{m}Dense_1/kernel": (MLP, WIDTH), f"{m}Dense_1/bias": (WIDTH,)}
    return {
        name: random.normal(scale=0.2, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def npz(path: Path, content: dict[str, np.ndarray], *, prefix: str = "") -> Path:
    np.savez(path, **{f"{prefix}{name}": value for name, value in content.items()})
    return path


def built(**changes: Any) -> VisionTransformer:
    settings = SMALL.model_copy(update=changes)
    return build_model(settings.resolved(num_classes=CLASSES), seed=3).eval()


def loaded(path: Path, *, grid: tuple[int, int] | None = None, **changes: Any) -> VisionTransformer:
    """Our model with the file's trunk and, for the comparison, its head."""
    model = built(**changes)
    external = read_weights(path, grid=grid)
    transfer_weights(
        model,
        weights=external.tensors,
        source_grid=external.grid,
        target_grid=(model.patch_embed.grid_size[0], model.patch_embed.grid_size[1]),
        num_prefix_tokens=model.num_prefix_tokens,
        convention="google",
        where=str(path),
    )
    assert model.head.weight.abs().max() == 0
    model.head.load_state_dict(
        {name: external.tensors[f"head.{name}"] for name in ("weight", "bias")}
    )
    return model


def logits(model: torch.nn.Module, size: int = 16) -> torch.Tensor:
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("layout, prefix", [(VIT_JAX, ""), (BIG_VISION, "params/")])
def test_logits_of_an_npz_equal_those_of_timms_loader(
    tmp_path: Path, layout: tuple[int, int, int], prefix: str
) -> None:
    path = npz(tmp_path / "weights.npz", arrays(layout=layout), prefix=prefix)
    theirs = built()
    load_as_timm_does(theirs, str(path))
    assert logits(theirs).std() > 0.1
    assert torch.allclose(logits(loaded(path)), logits(theirs), atol=1e-6)


def test_older_prefix_and_both_head_layers_are_read(tmp_path: Path) -> None:
    content = arrays()
    extra = {"pre_logits/kernel": np.ones((WIDTH, WIDTH)), "pre_logits/bias": np.ones(WIDTH)}
    path = npz(tmp_path / "old.npz", content | extra, prefix="opt/target/")
    with zipfile.ZipFile(path, "a") as archive:  # beside the weights, and never read
        archive.writestr("opt/state/step.npy", b"whatever")
    found = read_weights(path, grid=None).tensors
    plain = read_weights(npz(tmp_path / "plain.npz", content), grid=None).tensors
    heads = {name: tuple(found.pop(name).shape) for name in list(found) if name[:4] == "head"}
    assert heads == {
        "head.0.weight": (WIDTH, WIDTH),
        "head.0.bias": (WIDTH,),
        "head.2.weight": (CLASSES, WIDTH),
        "head.2.bias": (CLASSES,),
    }
    assert all(torch.equal(found[name], plain[name]) for name in found)


def test_class_position_can_be_folded_into_the_token(tmp_path: Path) -> None:
    """big_vision adds positions to patches only; its own conversion folds the first row."""
    content = arrays()
    folded = dict(content)
    rows = folded.pop("Transformer/posembed_input/pos_embedding")
    folded["pos_embedding"], folded["cls"] = rows[:, 1:], content["cls"] + rows[:, :1]
    expected = logits(loaded(npz(tmp_path / "a.npz", content)))
    path = npz(tmp_path / "b.npz", folded)
    for class_position in (None, False):
        found = logits(loaded(path, class_position=class_position))
        assert torch.allclose(found, expected, atol=1e-6)


def test_bfloat16_is_read_as_numpy_stores_it(tmp_path: Path) -> None:
    content = arrays()
    rounded = {k: torch.from_numpy(v).bfloat16() for k, v in content.items()}
    raw = {k: v.view(torch.int16).numpy().view("V2") for k, v in rounded.items()}
    exact = {k: v.float().numpy() for k, v in rounded.items()}
    found = logits(loaded(npz(tmp_path / "bf16.npz", raw)))
    assert torch.equal(found, logits(loaded(npz(tmp_path / "fp32.npz", exact))))


def test_nonsquare_grid_must_be_given(tmp_path: Path) -> None:
    path = npz(tmp_path / "wide.npz", arrays(rows=19))
    with pytest.raises(UserError, match="form no square") as caught:
        read_weights(path, grid=None)
    assert "init_grid" in str(caught.value)
    assert loaded(path, grid=(3, 6)).pos_embed.shape == (1, 17, WIDTH)
    with pytest.raises(UserError, match="does not hold"):
        loaded(path, grid=(4, 5))


def timms(path: Path, **changes: Any) -> VisionTransformer:
    """timm's model and its weights in a file."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS,
        mlp_ratio=MLP / WIDTH, num_classes=CLASSES, init_values=0.3, **changes,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_file(model.state_dict(), path)
    return model


def test_logits_of_timms_safetensors_equal_timms(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    theirs = timms(path)
    ours = loaded(path, gelu="erf", layer_scale=0.1)
    assert logits(theirs).std() > 0.01
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-6)


def test_a_norm_after_the_mean_is_another_model(tmp_path: Path) -> None:
    """timm also has the papers' form: `fc_norm=False`."""
    path = tmp_path / "model.safetensors"
    options: dict[str, Any] = {"global_pool": "avg", "class_token": False}
    same = timms(path, **options, fc_norm=False, final_norm=True)
    ours = loaded(path, pool="gap", gelu="erf", layer_scale=0.1)
    assert torch.allclose(logits(ours), logits(same), atol=1e-6)
    timms(path, **options)
    with pytest.raises(UserError, match="fc_norm.weight: model not in this model"):
        loaded(path, pool="gap", gelu="erf", layer_scale=0.1)


def test_deits_own_names_of_layer_scale(tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in built(layer_scale=0.1).state_dict().items()}
    state["blocks.1.ls2.gamma"].fill_(0.7)
    deit = {k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v
            for k, v in state.items()}  # fmt: skip
    save_file(deit, tmp_path / "deit.safetensors")
    model = loaded(tmp_path / "deit.safetensors", layer_scale=1e-4)
    assert model.blocks[1].ls2.gamma.tolist() == pytest.approx([0.7] * WIDTH)


def test_other_architectures_are_refused_with_a_table(tmp_path: Path) -> None:
    content = arrays()
    content["Transformer/encoderblock_2/LayerNorm_0/scale"] = np.zeros(WIDTH, np.float32)
    path = npz(tmp_path / "other.npz", content)
    with pytest.raises(UserError) as caught:
        loaded(path, mlp_width=48)
    text = str(caught.value)
    assert "blocks.2.norm1.weight: model not in this model, checkpoint (24,)" in text
    assert "blocks.0.mlp.fc1.weight: model (48, 24), checkpoint (40, 24)" in text


class Trap:
    """Unpickled, it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickled_objects_are_refused_unread(tmp_path: Path) -> None:
    content = arrays() | {"cls": np.array([Trap(tmp_path / "sprung")], dtype=object)}
    path = npz(tmp_path / "trap.npz", content)
    with pytest.raises(UserError, match="Object arrays cannot be loaded"):
        read_weights(path, grid=None)
    assert not (tmp_path / "sprung").exists()


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    whole = npz(tmp_path / "whole.npz", arrays()).read_bytes()
    # A byte of an array changed: zip's own checksum detects it.
    middle = len(whole) // 2
    for name, content in {
        "cut.npz": whole[:middle],
        "changed.npz": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "text.npz": b"hello",
        "text.safetensors": b"hello" * 10,
        "empty.npz": b"",
        "empty.safetensors": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            read_weights(tmp_path / name, grid=None)
    with pytest.raises(UserError, match="cannot be read .No such file"):
        read_weights(tmp_path / "missing.npz", grid=None)
    npz(tmp_path / "other.npz", {"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(UserError, match="its first names: a, b"):
        read_weights(tmp_path / "other.npz", grid=None)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_weights_of_mae_load_without_their_decoder(tmp_path: Path, suffix: str) -> None:
    """Names below `model.`, as in mae_pretrain_*; those of the decoder as in *_full."""
    source = built(num_classes=None)
    state = {name: value for name, value in source.state_dict().items() if "head" not in name}
    decoder = {
        "mask_token": torch.ones(1, 1, 8),
        "decoder_pos_embed": torch.ones(1, 17, 8),
        "decoder_blocks.0.norm1.weight": torch.ones(8),
    }
    path = tmp_path / f"mae{suffix}"
    both = {f"model.{name}": value.clone() for name, value in (state | decoder).items()}
    if suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in both.items()})
    else:
        save_file(both, path)
    found = read_weights(path, grid=None)
    assert found.grid == (4, 4)
    target = built(pool="gap", class_token=True, pool_norm=True)
    left_out = transfer_weights(
        target,
        weights=found.tensors,
        source_grid=found.grid,
        target_grid=(4, 4),
        num_prefix_tokens=1,
        convention="deit",
        where=str(path),
    )
    assert left_out == sorted([*decoder, "norm.bias", "norm.weight"])
    assert torch.equal(target.blocks[1].mlp.fc2.weight, source.blocks[1].mlp.fc2.weight)
