"""Exported models give their logits and pixels in the libraries that load them; whole or absent."""

import io
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image, ImageOps

from finetune.exporting.folder import EXPORTS, check_packages
from finetune.exporting.format import PHOTO as OPEN_PHOTO
from finetune.settings import ExportRun
from tests.support.corpora.image_samples import encoded, photograph, rotated
from tests.support.engine.small_models import export, images_of, off_by, small_model
from tests.support.tables import every, refused, rows
from vitscale.data.settings import DataSettings
from vitscale.evaluation.samples import EvaluationResize
from vitscale.evaluation.trained_model import SourceRun, open_model
from vitscale.images.plain import rgb_pixels
from vitscale.models.weights.reading import read_weights
from vitscale.tracking.journal import Journal

# What timm's folders hold beside the plain model.
KINDS = yaml.safe_load("""
plain: {}
gap: {pool: gap, gelu: erf}
mae: {pool: gap, class_token: true, pool_norm: true}
registers: {num_registers: 2}
no_class_position: {class_position: false, layer_scale: 0.1, gelu: erf}
fixed_positions: {positions: sincos2d}
distilled: {distillation_token: true}
map: {pool: map}
map_beside_class_token: {pool: map, class_token: true, num_registers: 1}
swiglu: {mlp: swiglu, layer_scale: 0.1}
""")


@every(kind=KINDS)
def test_timm_gives_equal_logits(tmp_path, kind):
    loaded = small_model(**KINDS[kind])
    folder = f"local-dir:{export(loaded, 'timm', tmp_path / 'out')}"
    assert off_by(timm.create_model(folder, pretrained=True), loaded) < 1e-4

    # The comparison is sensitive: the same model without the weights is far off.
    assert off_by(timm.create_model(folder), loaded) > 0.1


# Options of timm for the same model: a file of big_vision's form says nothing of its architecture.
@rows("""
- [settings, options]
- [{}, {}]
- [{class_position: false}, {no_embed_class: true}]
- [{pool: gap}, {global_pool: avg, class_token: false, fc_norm: false}]
- [{pool: map}, {global_pool: map, class_token: false, fc_norm: false}]
""")
def test_npz_is_read_by_timm_and_here(tmp_path, settings, options):
    loaded = small_model(**settings)
    path = str(export(loaded, "npz", tmp_path / "out") / "model.npz")
    sizes = yaml.safe_load("""
    {img_size: 16, patch_size: 4, embed_dim: 24, depth: 2, num_heads: 3, num_classes: 5,
     act_layer: gelu_tanh, final_norm: true}
    """)
    sizes |= {"mlp_ratio": 40 / 24, **options}
    model = timm.create_model("vit_base_patch16_224", **sizes)

    # What only big_vision has, has its names, which timm finds below a prefix.
    is_big_vision = settings in ({"class_position": False}, {"pool": "map"})
    model.load_pretrained(path, "params/" if is_big_vision else "")
    assert off_by(model, loaded) < 1e-4
    assert off_by(open_model(path).network, loaded) < 1e-4


EVERYTHING = {
    "gelu": "erf",
    "layer_norm_eps": 1e-5,
    "class_position": False,
}


@every(settings=[EVERYTHING, {"representation_layer": True}, {"num_classes": 0}])
@every(to="npz, safetensors")
def test_exported_folders_are_read_back_as_they_are(tmp_path, settings, to):
    """With everything that weights do not show: GELU, epsilon, heads, preprocessing, names."""
    how = {"mean": (0.1, 0.2, 0.3), "eval_resize": "center_crop"}
    classes = None if "num_classes" in settings else tuple("vwxyz")
    loaded = small_model(
        classes=classes,
        preprocessing=how,
        **settings,
    )

    # Files of a temporary folder are for the owner alone; a group should read an export.
    umask = os.umask(0o027)
    try:
        folder = export(loaded, to, tmp_path / "out")
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}

    path = folder / f"model.{to}"
    weights = loaded.network.state_dict()
    tensors = read_weights(path).tensors
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)

    # The same model gives the same bytes, so that hashes of two exports can be compared.
    again = export(loaded, to, tmp_path / "again") / path.name
    assert again.read_bytes() == path.read_bytes()

    opened = open_model(str(folder))
    assert opened.arch == loaded.arch
    assert opened.preprocessing == loaded.preprocessing
    assert opened.classes == classes

    # Positions of other image sizes are resampled as in our runs, corners to corners.
    smaller = open_model(str(folder), image_size=8)
    positions = weights["pos_embed"][0, -16:]
    resampled_4D = smaller.network.state_dict()["pos_embed"][0, -4:]
    torch.testing.assert_close(resampled_4D, positions[[0, 3, 12, 15]])

    images = images_of(loaded)
    with torch.no_grad():
        assert torch.equal(opened.network(images), loaded.network(images))

    # A download that lacks its large file is a common state of such a folder.
    path.unlink()
    with refused("but no weights"):
        open_model(str(folder))


def test_a_card_has_the_metrics_of_the_exported_weights(tmp_path):
    """The last ones up to the checkpoint's step."""
    loaded = small_model()
    checkpoint = SimpleNamespace(step=20, description={})
    journal = Journal(tmp_path / "run/journal.jsonl", resume_step=0)

    # The run went on after the checkpoint: step 21 is of other weights.
    for step, top1 in ((10, 0.25), (20, 0.5), (21, 0.75)):
        journal.append({"val/top1": top1, "train/loss": top1}, step=step)
    journal.close()
    run = SourceRun(
        folder=journal.path.parent,
        checkpoint=checkpoint,  # a stand-in
        averaged=False,
        config={"name": "base", "data": {"path": "http://me:hunter2@host/x"}},
        arch=loaded.arch,
        warnings=[],
    )
    folder = export(replace(loaded, run=run), "safetensors", tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert re.findall(r"^\| (\S+/.*) \|$", card, re.M) == ["val/top1 | 0.5000"]
    assert "\n# base\n" in card
    assert "- steps: 20\n" in card

    # Cards are published, so a password in a URL must not be in them.
    assert "hunter2" not in card


# Parts of our models that a format has no place for: an export without them would be another model.
@rows("""
- [to, settings, problem]
- [timm, {representation_layer: true}, a representation layer]
- [timm, {layer_norm_eps: 1.0e-05}, layer_norm_eps 1e-05]
- [timm, {head_width: 6}, heads of a width of their own]
- [timm, {pool: cls_mean}, pool=cls_mean]
- [timm, {mlp: swiglu, distillation_token: true}, token beside mlp=swiglu]
- [huggingface, {pool: map}, pool=map]
- [huggingface, {layer_scale: 0.1}, pool=cls beside layer scale]
- [huggingface, {pool: cls_mean}, without layer scale]
- [huggingface, {layer_scale: 0.1, pool: cls_mean}, an MLP of 40 hidden channels]
- [huggingface, {distillation_token: true, layer_scale: 1.0}, SwiGLU in a deit]
- [huggingface, {family: timm}, a model of the family timm]
- [npz, {layer_scale: 0.1}, blocks.0.ls1.gamma]
- [npz, {pool: gap, class_token: true}, a class token that no head reads]
- [npz, {family: timm}, a model of the family timm]
""")
def test_what_does_not_fit_is_refused(tmp_path, to, settings, problem):
    with refused(f"{to} cannot express this model") as caught:
        export(small_model(**settings), to, tmp_path / "out")
    assert problem in caught.value.what
    assert "--to safetensors" in str(caught.value.allowed)
    assert not list(tmp_path.iterdir())


@every(to="timm, huggingface, npz, safetensors", shift=[0.01, math.nan])
def test_other_logits_leave_nothing(to, shift, tmp_path, monkeypatch):
    loaded = small_model()
    original = EXPORTS[to].write
    bias = loaded.network.get_parameter("head.bias").data

    # A writer with a bug: other weights than the model's are in the folder.
    def write(self, model, folder):
        right = bias.clone()
        bias.add_(shift)
        original(self, model, folder)
        bias.copy_(right)

    monkeypatch.setattr(EXPORTS[to], "write", write)
    with refused(f"gives other logits: difference {shift:.1e}"):
        export(loaded, to, tmp_path / "out")

    # Of a model whose own logits are no numbers nothing can be checked.
    bias[0] = math.nan
    with refused("not finite"):
        export(loaded, to, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_formats_are_the_choices_and_name_missing_packages(monkeypatch):
    assert tuple(EXPORTS) == get_args(ExportRun.model_fields["to"].annotation)

    # onnx alone is no dependency of vitscale; None makes its import fail as if it were missing.
    monkeypatch.setitem(sys.modules, "onnx", None)
    for to in "timm huggingface npz safetensors".split():
        check_packages(to)
    with refused("to=onnx: needs onnx") as caught:
        check_packages("onnx")
    assert "pip install 'vitscale[onnx]'" in str(caught.value)


# ---- transformers and onnxruntime ----------------------------------------------------------------

# Each form of a ViT that transformers has a class for.
OF_TRANSFORMERS = yaml.safe_load("""
plain: [ViT, {}]
no_class_position: [ViT, {class_position: false}]
distilled: [DeiT, {distillation_token: true}]
dinov2: [Dinov2, {pool: cls_mean, layer_scale: 0.1, gelu: erf, mlp_width: 48}]
swiglu: [Dinov2, {pool: cls_mean, layer_scale: 0.1, mlp: swiglu, mlp_width: 64}]
registers: [Dinov2WithRegisters, {num_registers: 3, pool: cls_mean, layer_scale: 0.1,
  mlp_width: 48}]
""")


@pytest.mark.slow
@every(kind=OF_TRANSFORMERS)
def test_transformers_gives_equal_logits(tmp_path, kind):
    """The export itself compares them, of features too; here what its Auto class makes of it."""
    from transformers import AutoModelForImageClassification

    name, settings = OF_TRANSFORMERS[kind]
    loaded = small_model(**settings, layer_norm_eps=1e-5)
    folder = export(loaded, "huggingface", tmp_path / "out")
    model, info = AutoModelForImageClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(model).__name__.startswith(f"{name}ForImageClassification")

    # transformers starts a weight that it misses at random, with no more than a warning.
    assert not any(info.values()), info
    assert off_by(open_model(str(folder)).network, loaded) < 1e-4

    # Without a head the class is another one, and the card's code with it.
    trunk = small_model(num_classes=0, **settings)
    headless = export(trunk, "huggingface", tmp_path / "trunk")
    card = (headless / "README.md").read_text()
    assert "checked: the same features in transformers" in card
    assert "pipeline_tag: image-feature-extra" in card
    assert "The model has no head." in card
    assert f"{name}Model.from_pretrained" in card

    # These two would add a layer that the model does not have.
    assert ("add_pooling_layer=False" in card) == (name in ("ViT", "DeiT"))


# A model with names of its outputs, one with a quote and a colon, and one without a head.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "classes"), [("timm", ("a", "é: 'b'", "c", "d", "e")), ("vit", ())]
)
def test_a_graph_gives_the_logits_and_says_what_it_needs(tmp_path, family, classes):
    import onnxruntime

    loaded = small_model(family, num_classes=len(classes), classes=classes or None)
    path = export(loaded, "onnx", tmp_path / "o") / "model.onnx"
    session = onnxruntime.InferenceSession(path)

    # The size of a batch is free, though a trace knows only one.
    for batch in (1, 5):
        pixels = images_of(loaded, batch)
        (outputs,) = session.run(None, {"images": pixels.numpy()})
        with torch.no_grad():
            expected = loaded.network(pixels)
        assert (expected - torch.from_numpy(outputs)).abs().max() < 1e-4

    # All that a program needs is in the file itself.
    known = session.get_modelmeta().custom_metadata_map
    (output,) = session.get_outputs()
    assert output.name == ("logits" if classes else "features")
    assert json.loads(known["preprocessing"])["image_size"] == loaded.arch.image_size
    assert tuple(json.loads(known.get("classes", "[]"))) == classes


# ---- pixels --------------------------------------------------------------------------------------

SIDE = 64
MEAN = (0.4, 0.5, 0.6)
STD = (0.2, 0.25, 0.3)
PHOTO = photograph(250, 187)


def own_pixels(how, data):
    """Levels [3, S, S] as evaluations see them."""
    settings = DataSettings(
        path="x",
        global_batch=1,
        **how,
    )
    out = torch.empty(3, SIDE, SIDE, dtype=torch.uint8)
    EvaluationResize(settings, image_size=SIDE)(data, out)
    return out.float()


def exported(folder, to, how):
    model = small_model(
        image_size=SIDE,
        patch_size=16,
        preprocessing=how,
        classes=tuple("vwxyz"),
    )
    return export(model, to, folder)


def levels(normalised_3SS):
    """The pixels from 0 to 255 of which these were normalised."""
    mean = torch.tensor(MEAN).view(3, 1, 1)
    std = torch.tensor(STD).view(3, 1, 1)
    return ((normalised_3SS * std + mean) * 255).round()


def timm_pixels(folder, image):
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return levels(transform(image))


@every(interpolation="bilinear, bicubic")
@rows("""
- [resize]
- [{}]
- [{eval_resize: center_crop, eval_crop_fraction: 0.8}]
- [{eval_resize: center_crop, eval_crop_fraction: 1.0}]
- [{eval_resize: squash_crop, eval_crop_fraction: 0.8}]
""")
def test_timm_makes_the_same_pixels(tmp_path, resize, interpolation):
    """A crop on noise, where half a pixel of shift changes every value; else a photo squashed."""
    how = {
        "mean": MEAN,
        "std": STD,
        "eval_interpolation": interpolation,
    } | resize
    folder = exported(tmp_path / "out", "timm", how)
    kind = resize.get("eval_resize", "squash")
    stored = open_model(str(folder)).preprocessing
    assert stored.eval_resize.removesuffix("_down") == kind

    # Nearly square, wide and high: rounding of sizes and of corners differs.
    for width, height in ((101, 100), (250, 187), (187, 251)):
        image = PHOTO
        if kind == "center_crop":
            random = np.random.default_rng(0)
            noise = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            image = Image.fromarray(noise)
        data = encoded(image, "JPEG", quality=95)
        pixels = timm_pixels(folder, Image.open(io.BytesIO(data)))
        difference = (pixels - own_pixels(how, data)).abs().max()
        assert difference <= 1, (width, height)


def test_cards_open_photographs_as_predict_does(tmp_path, monkeypatch):
    """Transparent pixels have hidden colours, and the picture lies on its side."""
    monkeypatch.chdir(tmp_path)
    shape = (20, 30, 4)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(noise).save("PHOTO.jpg", "PNG", exif=rotated(6))
    names = {"Image": Image, "ImageOps": ImageOps}
    exec(OPEN_PHOTO, names)
    seen = np.asarray(names["image"], np.int16)
    assert seen.shape == (30, 20, 3)
    assert abs(seen - rgb_pixels(Image.open("PHOTO.jpg"))).max() <= 1


@every(resize="squash, center_crop, squash_crop", to="timm, huggingface")
def test_transformers_sees_the_pixels_of_timm(tmp_path, to, resize):
    from transformers import AutoConfig, AutoImageProcessor

    how = {
        "mean": MEAN,
        "std": STD,
        "eval_resize": resize,
        "eval_interpolation": "bicubic",
    }
    reference = timm_pixels(exported(tmp_path / "timm", "timm", how), PHOTO)
    folder = exported(tmp_path / "out", to, how)

    # transformers' default backend differs from Pillow by one level; timm's wrapper has none.
    options = {"backend": "pil"} if to == "huggingface" else {}
    processor = AutoImageProcessor.from_pretrained(folder, **options)
    pixels = levels(processor(PHOTO, return_tensors="pt")["pixel_values"][0])
    assert (pixels - reference).abs().max() <= 1
    if to == "huggingface":
        (_, side), *_ = processor.size
        shown = {"squash": "", "center_crop": "short side", "squash_crop": "square of"}
        card = (folder / "README.md").read_text()
        assert re.search(f"{shown[resize]}.* {side} (x {side} )?px .bicubic.", card)

        # timm's wrapper takes RGB only.
        grey = processor(PHOTO.convert("L"), return_tensors="pt")["pixel_values"]
        assert grey.shape == (1, 3, SIDE, SIDE)
    labels = AutoConfig.from_pretrained(folder)
    assert [labels.id2label[label] for label in range(5)] == list("vwxyz")


@every(to="timm, huggingface, safetensors, npz")
def test_the_card_has_the_whole_code_for_one_photograph(
    to, tmp_path, monkeypatch, capsys
):
    folder = exported(tmp_path / "out", to, {})
    monkeypatch.chdir(tmp_path)
    PHOTO.save("PHOTO.jpg")

    # Run as a person would who copies it, each library's part on its own.
    card = (folder / "README.md").read_text()
    (code,) = re.findall("```python\n(.*?)```", card, re.S)
    for part in code.replace("FOLDER", str(folder)).split("# or\n"):
        exec(part, {})

    # vitscale's code is the last one, and the others name the same class.
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert set(names) == {names[-1]} < set("vwxyz")


@pytest.mark.slow
@rows("""
- [resize, interpolation]
- [squash, bicubic]
- [center_crop, bilinear]
- [center_crop_down, bicubic]
- [squash_crop, bilinear]
- [squash_crop_down, bicubic]
""")
def test_the_card_of_a_graph_makes_its_pixels_with_pillow(
    tmp_path,
    monkeypatch,
    capsys,
    resize,
    interpolation,
):
    """As the model's own preprocessing does, whose logits are then the same."""
    how = {
        "mean": MEAN,
        "std": STD,
        "eval_resize": resize,
        "eval_antialias": True,
        "eval_interpolation": interpolation,
    }
    if resize != "squash":
        how["eval_crop_fraction"] = 0.81
    folder = exported(tmp_path / "out", "onnx", how)

    # The code opens PHOTO.jpg; without the losses of JPEG both see the same levels.
    monkeypatch.chdir(tmp_path)
    PHOTO.save("PHOTO.png")
    Path("PHOTO.png").rename("PHOTO.jpg")

    card = (folder / "README.md").read_text()
    (code,) = re.findall("```python\n(.*?)```", card, re.S)
    variables = {}
    exec(code.replace("FOLDER", str(folder)), variables)
    pixels = levels(torch.from_numpy(variables["images"])[0])
    expected = own_pixels(how, Path("PHOTO.jpg").read_bytes())
    assert (pixels - expected).abs().max() <= 1
    name = "vwxyz"[variables["logits"].argmax()]
    assert capsys.readouterr().out.splitlines()[-1] == name
