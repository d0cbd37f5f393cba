"""Images become the pixels that each library's own processor makes for its weights."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
import yaml
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from timm.models import get_pretrained_cfg

import vitscale
from tests.support.engine.small_models import export, small_model
from tests.support.tables import every, refused, rows
from vitscale.evaluation.api import Preprocess
from vitscale.evaluation.trained_model import Preprocessing, open_model
from vitscale.models.settings import TimmSettings, ViTSettings
from vitscale.models.weights.pixels import timm_preprocessing

SIDE = 32
TINY = "vit_tiny_patch16_224"
SMALL = yaml.safe_load(
    "{img_size: 32, embed_dim: 32, depth: 1, num_heads: 2, num_classes: 3}"
)


def tiny_weights():
    return timm.create_model(TINY, **SMALL).state_dict()


def photographs():
    """Smooth images of many shapes, wide, high and small ones."""
    random = np.random.default_rng(0)
    images = []
    for number in range(20):
        pixels = random.integers(0, 256, (6, 5, 3), dtype=np.uint8)
        sides = (48, 28 + 9 * number)
        if number % 3:
            sides = (40 + 5 * number, 41)
        coarse = Image.fromarray(pixels)
        images.append(coarse.resize(sides, Image.Resampling.BICUBIC))
    return images


PHOTOGRAPHS = photographs()
Transform = Callable[[Image.Image], torch.Tensor]


def largest_difference(ours, theirs):
    """The largest mean difference of an image's pixels, of their deviation."""
    differences = []
    for image in PHOTOGRAPHS:
        pixels = ours(image)
        expected = theirs(image)
        assert pixels.shape == expected.shape
        difference = (pixels - expected).abs().mean() / expected.std()
        differences.append(float(difference))
    return max(differences)


# ---- transformers --------------------------------------------------------------------------------

# Each key of a processor that changes pixels, with the classes that read it in their own way.
PROCESSORS = yaml.safe_load("""
square: &square {height: 32, width: 32}
larger: &larger {height: 36, width: 36}
vit: &vit {image_processor_type: ViTImageProcessor, size: *square}
deit: &deit {image_processor_type: DeiTImageProcessor, size: *larger, crop_size: *square}
bit: &bit
  image_processor_type: BitImageProcessor
  crop_size: *square
  size: {shortest_edge: 36}

# Kind of model, and its processor.
known:
  - [vit, *vit]
  - [vit, {<<: *vit, resample: 3, image_mean: [0.1, 0.2, 0.3], image_std: [0.4, 0.4, 0.4]}]
  - [vit, {<<: *vit, rescale_factor: 0.00784313725490196, image_mean: [1.0, 1.0, 1.0]}]
  - - vit
    - <<: *vit
      do_rescale: false
      image_mean: [127.5, 127.5, 127.5]
      image_std: [99.0, 99.0, 99.0]
  - [vit, {<<: *vit, do_normalize: false}]
  - [vit, {<<: *vit, do_normalize: false, do_rescale: false}]
  - [vit, {<<: *vit, image_mean: 0.25, image_std: [0.5]}]
  - [vit, {<<: *vit, size: 32, feature_extractor_type: ViTFeatureExtractor}]
  - [vit, {<<: *vit, size: [32, 32], crop_size: 8}]
  - [vit, {<<: *vit, image_processor_type: ViTImageProcessorFast}]
  - [vit, {<<: *vit, size: *larger, crop_size: *square, do_center_crop: true}]
  - [vit, {<<: *bit, image_processor_type: CLIPImageProcessor}]
  - [deit, *deit]
  - [deit, {<<: *deit, resample: 2, do_center_crop: true}]
  - [deit, {<<: *deit, do_center_crop: false, size: *square}]
  - [deit, {feature_extractor_type: DeiTFeatureExtractor, size: 36, crop_size: 32}]
  - [deit, {crop_size: 28}]
  - [dinov2, *bit]
  - [dinov2, {<<: *bit, size: 36, image_std: [0.2, 0.3, 0.4]}]
  - [dinov2, {<<: *bit, size: {shortest_edge: 32}}]
  - [dinov2, {<<: *vit, resample: 3}]
  # The images are smaller than those of the positions: 28 of 32 px.
  - [dinov2, {<<: *bit, size: {shortest_edge: 32}, crop_size: 28}]

refused:
  - [{<<: *vit, do_resize: false}, "do_resize: false"]
  - [{<<: *vit, resample: 0}, resample 0]
  - [{<<: *vit, do_pad: true}, "do_pad: true"]
  - [{<<: *vit, size: {height: 32, width: 24}}, "size .*24"]
  - [{<<: *vit, size: {shortest_edge: 32, longest_edge: 64}}, "size .*longest_edge"]
  - [{<<: *vit, size: {shortest_edge: 32}}, "size: shortest_edge without a crop"]
  - [{<<: *bit, size: {shortest_edge: 28}}, crops 32 px of 28 px]
  - [{<<: *vit, image_processor_type: SamImageProcessor}, "image_processor_type 'Sam"]
""")
VIT = PROCESSORS["vit"]
BIT = PROCESSORS["bit"]


def hugging_face(folder, kind, processor, **config):
    """A folder of transformers with random weights and this processor."""
    name = {"deit": "DeiT", "dinov2": "Dinov2", "vit": "ViT"}[kind]
    sizes = yaml.safe_load("""
    {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, image_size: 32, patch_size: 4}
    """)
    sizes |= config
    built = getattr(transformers, f"{name}Config")(**sizes, num_labels=3)
    model = getattr(transformers, f"{name}ForImageClassification")(built)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.parametrize(("kind", "processor"), PROCESSORS["known"])
def test_pixels_are_those_of_transformers(tmp_path, kind, processor):
    folder = hugging_face(tmp_path, kind, processor)
    theirs = transformers.AutoImageProcessor.from_pretrained(folder)
    ours = vitscale.load_model(folder).preprocess

    def processed(image):
        batch = theirs(images=image, return_tensors="pt")
        # Levels that are neither scaled nor normalised are integers.
        return batch["pixel_values"][0].float()

    assert largest_difference(ours, processed) < 0.01


@pytest.mark.parametrize(("processor", "message"), PROCESSORS["refused"])
# Other pixels without a word would cost accuracy that nobody could explain.
def test_steps_that_no_setting_expresses_are_refused(tmp_path, processor, message):
    folder = hugging_face(tmp_path, "vit", processor)
    with refused(f"(?s)preprocessor_config.json: {message}.*not supported"):
        open_model(str(folder))


def test_a_folder_that_crops_below_its_positions_gives_transformers_logits(tmp_path):
    """As DINOv2's, 518 px of positions and 224 px of images."""
    # Of weights as random as any, but the same ones each time.
    torch.manual_seed(0)
    folder = hugging_face(
        tmp_path,
        "dinov2",
        BIT | {"size": {"shortest_edge": 28}, "crop_size": 24},
        image_size=48,
    )
    theirs = transformers.Dinov2ForImageClassification.from_pretrained(folder).eval()
    ours = open_model(str(folder))
    assert "at 24 px as its preprocessor_config.json says" in ours.source
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = theirs(pixel_values=images).logits
        torch.testing.assert_close(ours.network(images), expected, atol=1e-5, rtol=1e-4)

    # What a person asks for counts more than the folder.
    assert open_model(str(folder), image_size=48).preprocessing.image_size == 48


def test_dinov2s_epsilon_is_its_own_where_the_folder_has_none(tmp_path):
    for kind, expected in (("dinov2", 1e-6), ("vit", 1e-12), ("deit", 1e-12)):
        processor = BIT if kind == "dinov2" else VIT
        folder = hugging_face(tmp_path / kind, kind, processor)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        del config["layer_norm_eps"]
        path.write_text(json.dumps(config))

        # transformers' own default is the second opinion.
        built = transformers.AutoConfig.from_pretrained(folder)
        assert built.layer_norm_eps == expected
        assert open_model(str(folder)).arch.layer_norm_eps == expected


# ---- timm ----------------------------------------------------------------------------------------

# Crops and squashes with whole and cut sides; without mean or std timm takes ImageNet's.
CONFIGS = yaml.safe_load("""
- &whole {input_size: [3, 32, 32], mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25],
    interpolation: bilinear, crop_pct: 0.9, crop_mode: center}
- {<<: *whole, crop_mode: squash, interpolation: bicubic}
- {<<: *whole, crop_mode: squash, crop_pct: 1.0}
- {<<: *whole, crop_pct: 1.0}
- {input_size: [3, 32, 32]}
- {input_size: [3, 32, 32], mean: [0.1, 0.2, 0.3]}
- {input_size: [3, 32, 32], std: [0.1, 0.2, 0.3]}
""")


def timm_folder(folder, config, *, is_old):
    """is_old: as timm 0.6 wrote it, without the group pretrained_cfg."""
    content = {"pretrained_cfg": config}
    if is_old:
        content = {**config, "labels": ["cat", "dog", "eel"]}
    content |= {
        "architecture": TINY,
        "num_classes": 3,
        "model_args": SMALL,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tiny_weights(), folder / "model.safetensors")
    return folder


SMALL_ARGUMENTS = {key: SMALL[key] for key in ("embed_dim", "depth", "num_heads")}
# The same model as one of timm's, where it would be read as our own ViT.
AS_TIMM = TimmSettings(
    model=TINY,
    image_size=SIDE,
    arguments=SMALL_ARGUMENTS,
)


@every(config=CONFIGS, is_old="false, true")
def test_pixels_are_those_of_timm(tmp_path, config, is_old):
    folder = timm_folder(tmp_path, config, is_old=is_old)
    theirs = create_transform(**resolve_data_config({}, pretrained_cfg=config))
    for model in (None, AS_TIMM):
        opened = open_model(str(folder), model=model)
        assert largest_difference(Preprocess(opened.preprocessing), theirs) < 0.01
        is_stated = {"mean", "std"} <= config.keys()
        assert ("assumed mean" in opened.source) == (not is_stated)
        assert opened.classes == (("cat", "dog", "eel") if is_old else None)


# Of CLIP, of a model that is no ViT, and of three papers: each has its own crop and colours.
@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_clip_384.openai_ft_in12k_in1k",  # squash, crop_pct 0.95
        "dm_nfnet_f0.dm_in1k",
        "vit_base_patch16_224.augreg_in21k_ft_in1k",
        "deit3_base_patch16_224.fb_in1k",
        "vit_small_patch14_dinov2.lvd142m",
    ],
)
def test_published_configurations_give_timms_pixels(name):
    config = get_pretrained_cfg(name)
    values = resolve_data_config({}, pretrained_cfg=config.to_dict())
    settings = timm_preprocessing(asdict(config), where=name)
    ours = Preprocess(Preprocessing(image_size=config.input_size[-1], **settings))
    assert largest_difference(ours, create_transform(**values)) < 0.01


@rows("""
- [change, message]
- [{crop_mode: border}, crop_mode 'border']
- [{interpolation: lanczos}, interpolation 'lanczos']
- [{input_size: [3, 32, 24]}, 32 x 24 px]
- [{crop_pct: 1.1}, a share 1.1]
""")
def test_what_timm_does_otherwise_is_refused(change, message):
    with refused(message):
        timm_preprocessing(CONFIGS[0] | change, where="here")


TRAINED = yaml.safe_load("""
{model: vit_tiny_patch16_224, mean: [0.3, 0.4, 0.5], std: [0.2], interpolation: bilinear,
 crop_pct: 0.8, img_size: 32, input_size: null, crop_mode: null, gp: null,
 model_kwargs: {embed_dim: 32, depth: 1, num_heads: 2, img_size: 32}}
""")


def trained_by_timm(path, arguments, **more):
    """A checkpoint of timm's train.py; returns the model."""
    torch.manual_seed(0)
    model = timm.create_model(
        TINY,
        num_classes=3,
        global_pool=arguments["gp"] or "token",
        **arguments["model_kwargs"],
    )
    content = {
        "arch": TINY,
        "args": argparse.Namespace(**arguments),
        "epoch": 3,
        "state_dict": model.state_dict(),
        **more,
    }
    torch.save(content, path)
    return model.eval()


# The fourth is of DeiT.
@rows("""
- [change]
- [{}]
- [{input_size: [3, 32, 32], crop_pct: null}]
- [{mean: null, interpolation: ''}]
- [{crop_pct: null, eval_crop_ratio: 0.7}]
- [{gp: avg}]
- [{model_kwargs: {embed_dim: 32, depth: 1, img_size: 32, num_heads: 4, act_layer: gelu_tanh}}]
""")
@every(as_timm="false, true")
def test_a_checkpoint_of_timms_trainer_says_how_it_was_trained(
    tmp_path, change, as_timm
):
    arguments = TRAINED | change
    path = tmp_path / "last.pth.tar"
    theirs = trained_by_timm(path, arguments)
    chosen = None
    if as_timm:
        built = dict(arguments["model_kwargs"])
        del built["img_size"]
        if arguments["gp"]:
            built["global_pool"] = arguments["gp"]
        chosen = TimmSettings(
            model=TINY,
            image_size=SIDE,
            arguments=built,
        )

    ours = open_model(str(path), model=chosen)
    assert "assumed" not in ours.source
    images = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        expected = theirs(images)
        torch.testing.assert_close(ours.network(images), expected, atol=1e-5, rtol=1e-4)

    # timm's train.py resolves its arguments so, and DeiT's has another name for the crop.
    arguments["crop_pct"] = arguments["crop_pct"] or arguments.get("eval_crop_ratio")
    published = get_pretrained_cfg(TINY).to_dict()
    values = resolve_data_config(dict(arguments), pretrained_cfg=published)
    transform = create_transform(**values)
    assert largest_difference(Preprocess(ours.preprocessing), transform) < 0.01


@every(key="state_dict_ema, model_ema")
def test_the_average_is_taken_as_for_runs(tmp_path, key):
    """`auto` takes it where there is one, as timm's create_model does."""
    path = tmp_path / "last.pth.tar"
    # Other weights than those of trained_by_timm.
    torch.manual_seed(1)
    average = tiny_weights()
    wrapped = {f"module.{name}": value for name, value in average.items()}
    raw = trained_by_timm(path, TRAINED, **{key: wrapped}).state_dict()
    for weights, expected in (("auto", average), ("ema", average), ("model", raw)):
        opened = open_model(str(path), weights=weights)
        token = opened.network.state_dict()["cls_token"]
        assert torch.equal(token, expected["cls_token"])
        is_average = weights != "model"
        assert (f"average of the weights ({key})" in opened.source) == is_average

    # Whoever asks for the average gets no other weights, of a checkpoint or of a plain file.
    trained_by_timm(path, TRAINED)
    plain = tmp_path / "raw.safetensors"
    save_file(raw, plain)
    for file in (path, plain):
        with refused("contains no averaged weights"):
            open_model(str(file), weights="ema")


@every(prefix="_orig_mod., module._orig_mod., _orig_mod.module., model._orig_mod.")
@every(suffix=".pth, .safetensors")
def test_names_of_compiled_models_are_read(tmp_path, prefix, suffix):
    plain = tiny_weights()
    # Blocks that are compiled one by one have the prefix inside.
    named = {}
    for name, value in plain.items():
        name = name.replace("blocks.0.", "blocks.0._orig_mod.")
        named[f"{prefix}{name}"] = value

    path = tmp_path / f"model{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": named}, path)
    else:
        save_file(named, path)
    for chosen in (ViTSettings(num_heads=2), AS_TIMM):
        weights = open_model(str(path), model=chosen).network.state_dict()
        assert torch.equal(weights["pos_embed"], plain["pos_embed"])


def test_a_list_beside_a_file_names_its_classes(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tiny_weights(), path)
    chosen = ViTSettings(num_heads=2)
    classes = tmp_path / "classes.json"
    classes.write_text('["cat", "dog", "eel"]')
    assert open_model(str(path), model=chosen).classes == ("cat", "dog", "eel")

    # The names of another model would be wrong for every image.
    classes.write_text('["cat", "dog"]')
    with refused("2 names of classes for the model's 3 outputs"):
        open_model(str(path), model=chosen)


# ---- Google and our own --------------------------------------------------------------------------


def test_googles_pixels_are_resized_without_antialiasing(tmp_path):
    """tf.image.resize: half-pixel centres, bilinear, whole images, no smoothing; [-1, 1]."""
    # Without our own description it is a file as Google's.
    folder = export(small_model(), "npz", tmp_path / "exported")
    (folder / "vitscale.json").unlink()
    ours = open_model(str(folder / "model.npz"))
    assert "eval_antialias=False" in ours.source
    side = ours.preprocessing.image_size

    def tensorflows(image):
        pixels_HW3 = torch.from_numpy(np.array(image)).float()
        pixels_13HW = pixels_HW3.permute(2, 0, 1)[None]
        resized = F.interpolate(
            pixels_13HW,
            size=(side, side),
            mode="bilinear",
            align_corners=False,
        )
        return resized[0] / 127.5 - 1

    assert largest_difference(Preprocess(ours.preprocessing), tensorflows) < 0.01
