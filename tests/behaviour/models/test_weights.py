"""Weights of other code bases give the logits of their own libraries; bad files are refused."""

import argparse
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

from tests.support.engine.small_models import export, small_model
from tests.support.golden import FOLDER
from tests.support.tables import every, refused, rows
from vitscale.evaluation.trained_model import open_model
from vitscale.models.costs import num_parameters
from vitscale.models.settings import ViTSettings
from vitscale.models.weights.reading import read_weights

# ---- timm and Hugging Face -----------------------------------------------------------------------

SIZE = 28
IMAGES = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
# The same sizes in transformers' and timm's words.
SMALL, TIMM = yaml.safe_load("""
- {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, image_size: 28, patch_size: 7}
- {embed_dim: 32, depth: 2, num_heads: 4, img_size: 28, patch_size: 7, num_classes: 5}
""")
NAMES = {label: f"animal {label}" for label in range(5)}
TINY = "vit_tiny_patch16_224"


@pytest.fixture(autouse=True)
def same_start():
    """Models of timm begin with the same weights whichever test ran before."""
    torch.manual_seed(0)


@torch.no_grad()
def shaken(model):
    """No parameter is at its usual start, where a lost one could go unnoticed."""
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model.eval()


def check(ours, expected, output="logits"):
    with torch.no_grad():
        given = ours.network(IMAGES, output=output)
    # Outputs that are nearly zero would be close to anything small.
    assert expected.std() > 0.1
    assert torch.allclose(given, expected, atol=1e-5)
    counted = sum(parameter.numel() for parameter in ours.network.parameters())
    assert num_parameters(ours.arch) == counted


# Each kind, and the names of GELU that mean one of two functions.
@rows("""
- [kind, more]
- [ViT, {hidden_act: gelu, intermediate_size: 48}]
- [ViT, {hidden_act: gelu_pytorch_tanh, layer_norm_eps: 1.0e-06}]
- [ViT, {hidden_act: gelu_new}]
- [ViT, {hidden_act: gelu_fast}]
- [DeiT, {}]
- [Dinov2, {}]
- [Dinov2, {use_swiglu_ffn: true}]
- [Dinov2WithRegisters, {}]
""")
def test_hugging_face_classifiers_give_their_logits(tmp_path, kind, more):
    config = getattr(transformers, f"{kind}Config")(
        **SMALL,
        id2label=NAMES,
        **more,
    )
    theirs = shaken(getattr(transformers, f"{kind}ForImageClassification")(config))
    theirs.save_pretrained(tmp_path)
    ours = open_model(str(tmp_path))
    smaller = open_model(str(tmp_path), image_size=14)

    # DINOv2 resamples its positions unasked.
    asked = {} if "Dinov2" in kind else {"interpolate_pos_encoding": True}
    images = IMAGES[:, :, ::2, ::2]
    with torch.no_grad():
        check(ours, theirs(IMAGES).logits)
        expected = theirs(images, **asked).logits
        torch.testing.assert_close(smaller.network(images), expected)

    assert ours.classes == tuple(NAMES.values())
    assert ours.arch.image_size == SIZE
    assert ours.num_classes == 5

    # The folder has no preprocessor_config.json, so pixels are assumed, and that is said.
    if kind == "ViT":
        assert "assumed mean=(0.5, 0.5, 0.5), std=" in ours.source


TRUNKS = ("ViT", "ViTMAE", "DeiT", "Dinov2", "Dinov2WithRegisters")


@every(kind=TRUNKS)
def test_hugging_face_trunks_give_their_features(tmp_path, kind):
    """The class token; with a distillation token the mean of both, as timm and our exports."""
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    theirs = shaken(getattr(transformers, f"{kind}Model")(config))
    whole = tmp_path / "whole"
    sharded = tmp_path / "sharded"
    theirs.save_pretrained(whole)
    theirs.save_pretrained(sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2

    # MAE shuffles the patches that it keeps, which the class token ignores.
    if kind == "ViTMAE":
        theirs.config.mask_ratio = 0.0
    num_tokens = 2 if kind == "DeiT" else 1
    with torch.no_grad():
        tokens = theirs(IMAGES).last_hidden_state[:, :num_tokens]
        expected = tokens.mean(dim=1)
    for folder in (whole, sharded):
        check(open_model(str(folder)), expected, "features")

    # An index may name files of its own folder only.
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../whole/model.safetensors"}}))
    with refused("cannot be read|damaged"):
        read_weights(sharded)


# Pooling, heads, tokens, layer scale, registers, SwiGLU and attention pooling, as timm's models of
# the papers have them.
@rows("""
- [name, more]
- [vit_tiny_patch16_224, {}]
- [vit_tiny_patch16_224, {act_layer: gelu_tanh}]
- [vit_base_patch16_224, {global_pool: avg}]
- [vit_base_patch16_224, {global_pool: avg, fc_norm: false, class_token: false}]
- [deit_tiny_distilled_patch16_224, {}]
- [deit3_small_patch16_224, {}]
- [vit_small_patch14_dinov2, {}]
- [vit_small_patch14_reg4_dinov2, {}]
- [vit_giant_patch14_dinov2, {}]
- [vit_base_patch16_siglip_224, {}]
""")
def test_timms_folders_give_its_logits(tmp_path, name, more):
    theirs = shaken(timm.create_model(name, **TIMM, **more))

    # Not the default, which would be right without being read.
    theirs.pretrained_cfg["crop_pct"] = 0.93
    synsets = ["cat", *(f"n0144076{label}" for label in range(1, 5))]
    config = {
        "label_names": synsets,
        "label_descriptions": {"n01440764": "tench, Tinca tinca"},
    }
    save_for_hf(theirs, tmp_path, model_config=config, model_args=TIMM | more)
    ours = open_model(str(tmp_path))
    with torch.no_grad():
        check(ours, theirs(IMAGES))

    # Descriptions are read instead of synsets.
    assert ours.classes == (*synsets[:4], "tench, Tinca tinca")
    assert ours.preprocessing.mean == theirs.pretrained_cfg["mean"]
    assert ours.preprocessing.eval_crop_fraction == 0.93


# Models of timm, and arguments, that the family vit would compute otherwise or has no tensors for.


@rows("""
- [name, more]
- [vit_tiny_patch16_224, {global_pool: avg, pool_include_prefix: true}]
- [vit_tiny_patch16_224, {global_pool: map, pool_include_prefix: true}]
- [vit_tiny_patch16_224, {fc_norm: true}]
- [vit_tiny_patch16_224, {pos_embed: none}]
- [vit_tiny_patch16_224, {act_layer: silu}]
- [vit_base_patch32_clip_224, {}]  # a norm before the blocks
- [vit_medium_patch16_gap_256, {}]  # no bias of q, k and v
- [vit_intern300m_patch14_448, {}]  # no last norm
- [beit3_base_patch16_224, {}]  # norms within the blocks
- [vit_so150m_patch16_reg4_map_256, {}]  # positions of registers
""")
@torch.no_grad()
def test_other_vits_of_timm_are_of_its_family(tmp_path, name, more):
    theirs = shaken(timm.create_model(name, **TIMM, **more))
    save_for_hf(theirs, tmp_path, model_args=TIMM | more)
    opened = open_model(str(tmp_path))
    assert opened.arch.name == "timm"
    assert torch.allclose(opened.network(IMAGES), theirs(IMAGES), atol=1e-5)


@every(name="deit3_small_patch16_224, vit_small_patch14_reg4_dinov2")
def test_a_bare_file_needs_only_its_heads(tmp_path, name):
    """Its width of 32 is of no known model. Positions are resampled to another image size."""
    theirs = shaken(timm.create_model(name, **TIMM))
    path = str(tmp_path / "bare.safetensors")
    weights = theirs.state_dict()

    # DeiT-III's authors name layer scale in another way than timm.
    if name.startswith("deit3"):
        scales = [name for name in weights if ".ls" in name]
        for scale in scales:
            name = scale.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")
            weights[name] = weights.pop(scale)
    save_file(weights, path)

    # Shapes tell all sizes but the number of heads.
    with refused("set model.num_heads"):
        open_model(path)
    chosen = ViTSettings(num_heads=4)
    ours = open_model(path, model=chosen)
    with torch.no_grad():
        check(ours, theirs(IMAGES))
    assert "assumed gelu=erf, layer_norm_eps=1e-06, mean=(0.485" in ours.source

    # What is given is not assumed, and is not said to be.
    larger = open_model(
        path,
        model=ViTSettings(num_heads=4, gelu="tanh"),
        preprocessing={"mean": (0.5,) * 3},
        image_size=2 * SIZE,
        position_embedding="dinov2",
    )
    assert "assumed layer_norm_eps=1e-06, std=" in larger.source
    assert larger.preprocessing.mean == (0.5,) * 3
    assert larger.preprocessing.image_size == 2 * SIZE
    assert larger.arch.grid == (8, 8)
    images = torch.zeros(2, 3, 2 * SIZE, 2 * SIZE)
    assert larger.network(images).shape == (2, 5)
    with refused("30 px is not a multiple of the 7 px patch"):
        open_model(path, model=chosen, image_size=30)


# ---- Google -------------------------------------------------------------------------------------

Arrays = dict[str, np.ndarray]


def big_vision(folder):
    """Random weights under big_vision's names, which timm reads as well (`test_exporting`)."""
    exported = export(small_model(class_position=False), "npz", folder / "exported")
    with np.load(exported / "model.npz") as arrays:
        return {name.removeprefix("params/"): arrays[name] for name in arrays.files}


def npz(path, content, *, prefix=""):
    np.savez(path, **{f"{prefix}{name}": value for name, value in content.items()})
    return path


@torch.no_grad()
def logits_of(path):
    random = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, 16, 16, generator=random)
    return open_model(str(path)).network(images)


def test_layouts_of_older_and_larger_files_are_read(tmp_path):
    """Blocks stacked by `scan=True`, a text tower, optimiser states, bf16 as NumPy has it."""
    content = big_vision(tmp_path)
    expected = logits_of(npz(tmp_path / "plain.npz", content, prefix="params/"))

    # One array with all blocks for each of a block's, and the encoder of images below `img`.
    block = "Transformer/encoderblock_0/"
    stacked = {
        name: array for name, array in content.items() if "encoderblock_" not in name
    }
    for name in content:
        if name.startswith(block):
            second = content[name.replace("_0/", "_1/", 1)]
            both = np.stack([content[name], second])
            stacked[name.replace("_0/", "/", 1)] = both
    both = {f"params/img/{name}": array for name, array in stacked.items()}
    both["params/txt/head/kernel"] = np.ones((2, 2), np.float32)
    assert torch.equal(logits_of(npz(tmp_path / "stacked.npz", both)), expected)

    # States of an optimiser take most of such a file, and may be of any type: never read.
    old = npz(tmp_path / "old.npz", content, prefix="opt/target/")
    with zipfile.ZipFile(old, "a") as archive:
        archive.writestr("opt/state/step.npy", b"whatever")
    assert torch.equal(logits_of(old), expected)

    # NumPy has no bf16: it stores two bytes of no type.
    raw = {}
    exact = {}
    for name, array in content.items():
        rounded = torch.from_numpy(array).bfloat16()
        raw[name] = rounded.view(torch.int16).numpy().view("V2")
        exact[name] = rounded.float().numpy()
    given = logits_of(npz(tmp_path / "bf16.npz", raw))
    assert torch.equal(given, logits_of(npz(tmp_path / "fp32.npz", exact)))


def test_positions_form_a_square(tmp_path):
    content = big_vision(tmp_path)
    # 19 rows: neither a square nor one more.
    content["pos_embedding"] = np.zeros((1, 19, 24), np.float32)
    path = npz(tmp_path / "wide.npz", content)
    with refused(r"form no square(?s:.*)config.json"):
        read_weights(path)

    del content["pos_embedding"]  # fixed ones are not stored
    assert open_model(str(npz(path, content))).arch.positions == "sincos2d"


# Made once, all parameters random: `google` has the logits of timm's reader, `own` is our export.
@every(kind="google, timm, vit, deit, dinov2, own")
def test_stored_weights_still_give_the_logits_of_their_libraries(kind):
    folder = FOLDER / "weights" / kind
    expected = json.loads((folder / "expected.json").read_text())
    path = folder / "model.npz"
    loaded = open_model(str(path if path.exists() else folder))

    # Pixels by a formula, which no version of a library can change.
    numbers = torch.arange(2 * 3 * 8 * 8)
    images = (numbers * numbers * 37 + numbers * 11) % 255 / 127 - 1
    with torch.no_grad():
        logits = loaded.network(images.reshape(2, 3, 8, 8)).numpy()
    assert np.abs(logits - np.array(expected["logits"])).max() < 1e-5
    assert np.std(expected["logits"]) > 0.1
    assert loaded.classes == (expected["classes"] and tuple(expected["classes"]))
    assert list(loaded.preprocessing.mean) == expected["mean"]


# ---- trainers ------------------------------------------------------------------------------------

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


def under(prefix):
    return {f"{prefix}{name}": value for name, value in STATE.items()}


PARAMETERS = {name: torch.nn.Parameter(value) for name, value in STATE.items()}
# Weights beside what a trainer needs to go on: `ARGS` has classes that only pickle can hold.
CONTENTS = {
    "mae": {
        "model": STATE,
        "optimizer": {"state": {0: {"step": 1}}},
        "epoch": 3,
        "args": ARGS,
    },
    "timm": {"state_dict": under("module.")},
    "dino": {"student": {}, "teacher": under("module.backbone."), "epoch": 1},
    "dinov2": {"teacher": under("backbone.") | HEADS_OF_DINO},
    "parameters": {"model": PARAMETERS},
    "chunks": {n.replace("blocks.0.", "blocks.0.0."): v for n, v in STATE.items()},
}


@every(kind="zip, old", trainer=CONTENTS)
def test_files_of_trainers_load_as_their_weights(tmp_path, trainer, kind):
    path = tmp_path / "model.pth"
    torch.save(CONTENTS[trainer], path, _use_new_zipfile_serialization=kind == "zip")
    weights = read_weights(path)
    assert weights.grid == (3, 3)
    tensors = weights.tensors
    assert tensors.keys() - {"mask_token"} == STATE.keys()
    for name, value in STATE.items():
        assert torch.equal(tensors[name], value.float())

    # Weights that a trainer keeps in fp16 are trained on in fp32.
    assert all(value.dtype == torch.float32 for value in tensors.values())


# DeiT's Ti, SigLIP's So400m, H and DINOv2's g; any other has heads of 64 channels.
@rows("""
- [width, heads]
- [192, 3]
- [1152, 16]
- [1280, 16]
- [1536, 24]
- [1664, 16]
- [640, 10]
""")
def test_heads_are_those_of_the_known_model(tmp_path, width, heads):
    path = tmp_path / "bare.safetensors"
    model = small_model(
        width=width,
        num_heads=heads,
        depth=1,
        mlp_width=8,
    )
    save_file(model.network.state_dict(), path)
    assert f"assumed num_heads={heads}, gelu=" in open_model(str(path)).source


# ---- bad files ----------------------------------------------------------------------------------


class Trap:
    """Unpickled, it would create a file."""

    def __init__(self, path, make=Path.touch):
        self.path = path
        self.make = make

    def __reduce__(self):
        return (self.make, (self.path,))


# torch words it otherwise for modules that it always refuses, such as os.
@every(kind="zip, old, os, npz")
def test_pickles_that_run_code_are_refused_unread(tmp_path, kind):
    sprung = tmp_path / "sprung"
    path = tmp_path / "trap.pth"
    if kind == "npz":
        message = "Object arrays cannot be"
        trap = np.array([Trap(sprung)], dtype=object)
        path = npz(tmp_path / "trap.npz", big_vision(tmp_path) | {"cls": trap})
    else:
        message = "could run code, so nothing was loaded"
        trap = Trap(sprung, os.mkdir if kind == "os" else Path.touch)
        content = {"model": STATE, "extra": trap}
        torch.save(content, path, _use_new_zipfile_serialization=kind != "old")

    with refused(message):
        read_weights(path)
    assert not sprung.exists()

    # The trap is a real one: otherwise nothing would have been refused.
    if kind != "npz":
        torch.load(path, weights_only=False)
        assert sprung.exists()


def test_bad_files_are_refused_in_one_sentence(tmp_path):
    whole = npz(tmp_path / "whole.npz", big_vision(tmp_path)).read_bytes()
    torch.save(STATE, tmp_path / "whole.pth")
    cut = (tmp_path / "whole.pth").read_bytes()[:-300]
    middle = len(whole) // 2
    # zip's own checksum detects a byte that changed.
    changed = bytearray(whole)
    changed[middle] ^= 1
    bad = {
        "cut.npz": whole[:middle],
        "changed.npz": changed,
        "cut.pth": cut,
    }
    # A page of a server that asks for a password, and a download that did not begin.
    for suffix in (".npz", ".safetensors", ".pth"):
        bad[f"text{suffix}"] = b"<html>" * 9
        bad[f"empty{suffix}"] = b""

    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with refused("is damaged or not a weights file") as caught:
            read_weights(tmp_path / name)
        assert name in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 3

    # Whole files with something else in them.
    for content, message in (
        ({"model": {"x": 1}}, "'x' is not a tensor"),
        ([torch.ones(1)], "contains no named tensors"),
    ):
        torch.save(content, tmp_path / "odd.pth")
        with refused(message):
            read_weights(tmp_path / "odd.pth")

    with refused("cannot be read .No such file"):
        read_weights(tmp_path / "missing.npz")
    other = {"a": np.ones(2), "b": np.ones(2)}
    npz(tmp_path / "other.npz", other)
    with refused("its first names: a, b"):
        read_weights(tmp_path / "other.npz")


@pytest.fixture
def weights(tmp_path):
    model = timm.create_model(TINY, **TIMM | {"embed_dim": 192, "depth": 1})
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    return path


@every(names="[cat], {cat: 0}")
def test_names_that_are_not_those_of_the_outputs_are_refused(weights, names):
    (weights.parent / "classes.json").write_text(json.dumps(names))
    with refused("1 names of classes for the model's 5 outputs|is no list"):
        open_model(str(weights))


def test_what_is_no_model_is_one_error(tmp_path, weights):
    with refused(r"contains no model") as caught:
        open_model(str(tmp_path))

    # There are weights in it: without a description only their file can be meant.
    text = str(caught.value)
    assert "set init to the file model.safetensors" in text
    assert "config.json" in text
    assert "checkpoints/" in text

    # A folder, whatever its name.
    folder = tmp_path / "run.npz"
    (folder / "checkpoints").mkdir(parents=True)
    with refused("run.npz: "):
        open_model(str(folder))

    path = tmp_path / "model.ckpt"
    path.write_text("")
    with refused(r"'?.ckpt'? is not a type of weights file"):
        open_model(str(path))


# Models of other kinds, a description that would load a file of its own choice, and broken ones.
@rows("""
- [config, message]
- [{model_type: swin}, describes a model of type 'swin']
- [{model_type: vit, num_attention_heads: 3, hidden_act: quick_gelu}, quick_gelu]
- [{architecture: resnet50}, tensors do not fit]
- [{architecture: vit_tiny_patch16_224, model_args: {checkpoint_path: /x}}, loads weights]
- [{architecture: vit_tiny_patch16_224, model_args: [1]}, description is incomplete or invalid]
- [{architecture: vit_tiny_patch16_224, pretrained_cfg: x}, description is incomplete or invalid]
- [{model_type: vit}, "incomplete or invalid .KeyError: 'num_attention_heads'"]
""")
def test_other_models_are_refused(weights, config, message):
    folder = weights.parent
    (folder / "config.json").write_text(json.dumps(config))
    with refused(message):
        open_model(str(folder))

    # A tensor that no ViT of ours has: the weights are of another model, whatever the shapes.
    name = "blocks.0.attn.q_norm.weight"
    save_file({**load_file(weights), name: torch.ones(9)}, weights)
    with refused(f"{name}: model lacks it(?s:.*)or model.name=timm"):
        open_model(str(weights))
