"""Attention and its rollout, components and similarities equal slow computation; what is missing is
said, and refused by name."""

import os
import re

import numpy as np
import pytest
import torch
import yaml
from matplotlib import colormaps
from PIL import Image
from scipy.spatial.distance import cosine
from sklearn.decomposition import PCA
from timm.utils import AttentionExtract

from data_prep.images.check import check_image
from finetune.exporting.to_timm import TimmFormat
from finetune.images import Images, converted_pixels
from finetune.inspection.attention import (
    attention_rollout,
    draw_rollout,
    last_attention,
    patch_weights,
    read_attention,
    rolled_out,
)
from finetune.inspection.patches import (
    draw_components,
    draw_similarity,
    principal_components,
    similarities,
)
from finetune.inspection.run import draw_pictures
from finetune.inspection.visualized import Visualized
from finetune.predicting import find_inputs
from finetune.settings import PICTURES, PredictRun, VisualizeRun
from tests.contract.tree import ROOT
from tests.support.corpora.image_samples import decoded, encoded, photograph, rotated
from tests.support.corpora.shard_folders import image_bytes, make_shard_folder
from tests.support.engine.small_models import export, small_model
from tests.support.engine.subjects import WORLD
from tests.support.tables import lines, refused
from vitscale.data.index import read_split
from vitscale.data.settings import DataSettings
from vitscale.evaluation.samples import EvaluationSamples
from vitscale.evaluation.sheet import caption
from vitscale.models.interface import attention_modules
from vitscale.runs.data_prep import ImageSettings


def inference_model(**settings):
    return small_model(num_classes=0, **settings).for_inference(
        WORLD, precision="auto", num_images=0
    )


def random_images(count):
    """uint8 [count, 3, 16, 16]"""
    random = torch.Generator().manual_seed(0)
    return torch.randint(
        0,
        256,
        (count, 3, 16, 16),
        generator=random,
        dtype=torch.uint8,
    )


def maps_of(model, images):
    """By layer and head."""
    maps = {}

    def keep(layer, heads):
        for head, p_BTT in enumerate(heads):
            maps[layer, head] = p_BTT

    read_attention(model, images, keep)
    return maps


def test_attention_is_timms_although_fused():
    """timm's own extraction, in its graph mode, on the same fused modules."""
    model = inference_model()
    images = random_images(2)
    modules = attention_modules(model.network)
    assert all(module.fused_attn for module in modules)
    maps = maps_of(model, images)

    # timm's hook sees weights only where they are not fused.
    for module in modules:
        module.fused_attn = False
    extract = AttentionExtract(model.network, method="hook")
    with torch.no_grad():
        expected = extract(images / 127.5 - 1)

    # Two layers of three heads.
    assert len(maps) == 2 * 3
    for (layer, head), p_BTT in maps.items():
        of_timm = expected[f"blocks.{layer}.attn.attn_drop"][:, head]
        torch.testing.assert_close(p_BTT, of_timm, atol=1e-6, rtol=1e-5)


def test_rollout_is_the_product_of_all_layers():
    """Later layers on the left, of the mean of heads, half of it the identity."""
    model = inference_model(depth=3)
    images = random_images(2)
    maps = maps_of(model, images)

    # Abnar & Zuidema 2020: half of each layer is its residual connection.
    identity = torch.eye(17, dtype=torch.float64)
    expected = identity.expand(2, -1, -1)
    for layer in range(3):
        of_layer = [maps[layer, head] for head in range(3)]
        heads = torch.stack(of_layer).double()
        mixed = 0.5 * heads.mean(dim=0) + 0.5 * torch.eye(17)
        expected = (mixed / mixed.sum(dim=-1, keepdim=True)) @ expected

    # DINO's figure: the last layer alone, here the mean of its heads.
    of_last = torch.stack([maps[2, head] for head in range(3)]).mean(dim=0)
    torch.testing.assert_close(last_attention(model, images), of_last)

    rollout = attention_rollout(model, images)
    torch.testing.assert_close(rollout, expected.float(), atol=1e-6, rtol=1e-5)

    # Tokens that attend to themselves stay what they are, exactly.
    identity = torch.eye(5).repeat(2, 1, 1)
    assert torch.equal(rolled_out(identity.clone(), identity.clone()), identity)


def test_weights_are_the_class_tokens_row_or_the_mean_of_patches():
    # Both the class token's row and the mean of the patches' rows are 1 to 2.
    rollout = torch.tensor([[[0.4, 0.2, 0.4], [0.2, 0.5, 0.3], [0.0, 0.1, 0.9]]])
    for pooled in (False, True):
        weights = patch_weights(
            rollout,
            pooled=pooled,
            num_prefix_tokens=1,
            grid=(1, 2),
        )
        torch.testing.assert_close(weights, torch.tensor([[[0.5, 1.0]]]))


# ---- patches -------------------------------------------------------------------------------------


def test_components_are_those_of_scikit_learn():
    random = torch.Generator().manual_seed(0)
    points = torch.randn(40, 7, generator=random) * torch.arange(1, 8) + 3
    values = principal_components(points, count=3)
    rows = points.double().numpy()
    expected = PCA(n_components=3, svd_solver="full").fit_transform(rows)
    for column, other in zip(values.T.numpy(), expected.T, strict=True):
        # PCA leaves the sign open; here the largest value is positive.
        sign = np.sign(other[np.abs(other).argmax()])
        assert column == pytest.approx(sign * other, abs=1e-5)


def test_similarity_is_the_cosine_of_scipy():
    tokens = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    found = similarities(tokens, patch=3)
    for image, row in zip(tokens.numpy(), found.tolist(), strict=True):
        assert row == pytest.approx([1 - cosine(image[3], each) for each in image])


# A class token and registers; of timm, also with positions by rotation and another size.
PATCHES = """
family | settings
vit | {num_registers: 2}
timm | {model: test_vit, image_size: 160}
timm | {model: vit_tiny_patch16_dinov3_qkvb, image_size: 64}
"""


@lines(PATCHES)
def test_patches_are_drawn_where_they_are(tmp_path, family, settings):
    model = small_model(family, num_classes=0, **yaml.safe_load(settings))
    side = model.arch.image_size
    photos = [photograph(side, side), photograph(side, side).rotate(90)]
    for number, photo in enumerate(photos):
        photo.save(tmp_path / f"{number}.png")
    run = VisualizeRun(init="x", images=(str(tmp_path),))
    subject = Visualized(run, model, WORLD)

    # What timm's own pass has of the same pixels, without the tokens before the patches.
    pixels = np.stack([np.asarray(photo) for photo in photos]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        network = model.network
        tokens = network.forward_features(torch.tensor(pixels) / 127.5 - 1)
    rows = side // network.patch_embed.patch_size[0]
    patches = tokens[:, tokens.shape[1] - rows**2 :].numpy()

    # Colours are scaled over both images, so that one component has the same order in both.
    points = PCA(n_components=1).fit_transform(patches.reshape(2 * rows**2, -1))
    grids = points.reshape(2, rows, rows)
    axes = draw_components(subject).axes
    shown = np.stack([axes[2 + i].images[0].get_array()[..., 0] for i in range(2)])
    correlation = np.corrcoef(shown.ravel(), grids.ravel())[0, 1]
    assert abs(correlation) > 0.99

    # The marked patch is in the middle.
    at = rows // 2
    axes = draw_similarity(subject).axes
    (frame,) = axes[2].patches
    assert frame.get_xy() == (at * frame.get_width(), at * frame.get_height())


# ---- pictures ------------------------------------------------------------------------------------

SIZE = 16


def drawn(init, output, *images, **values):
    """Names of the pictures; all of them show something."""
    run = VisualizeRun(
        init=str(init),
        output=str(output),
        mlflow=False,
        images=tuple(map(str, images)),
        **values,
    )
    written = draw_pictures(run, WORLD)
    assert set(written) == set(output.iterdir())
    for path in written:
        with Image.open(path) as image:
            # Lines and curves on white, or tiles.
            assert np.asarray(image.convert("RGB"), np.float64).std() > 10
    return {path.stem for path in written}


def test_what_a_model_lacks_is_left_out(tmp_path, capsys):
    # Names that matplotlib would read as mathematics, and fail: of a model, and below of a class.
    vit = export(small_model(num_classes=0), "safetensors", tmp_path / "$v_{$")
    none = tmp_path / "none"
    with refused(
        "images: a weight file does not say which images.*\n.*set images=PATH"
    ):
        drawn(vit, none)

    # With images a ViT has all pictures.
    shards = tmp_path / "shards"
    make_shard_folder(shards, lengths={"test": (3,)}, classes=("$a_{", "b"))
    assert drawn(vit, tmp_path / "b", shards, num_images=2) == set(PICTURES)

    # Another family has no patches to show. What was asked for by name is an error, too.
    convnext = export(small_model("timm"), "timm", tmp_path / "convnext")
    for pictures in ((), ("patch_similarity",)):
        with refused("this model has no token for each patch"):
            drawn(convnext, none, shards, pictures=pictures)
    assert not none.exists()


def test_attention_that_cannot_be_read_is_left_out(tmp_path, capsys):
    make_shard_folder(tmp_path / "shards", lengths={"test": (3,)})
    model = small_model("timm", model="vit_tiny_patch16_dinov3_qkvb", image_size=32)
    folder = tmp_path / "model"
    folder.mkdir()
    TimmFormat().write(model, folder)
    of_attention = {"init": str(folder), "images": (str(tmp_path / "shards"),)}
    draw_pictures(VisualizeRun(**of_attention), WORLD, is_dry_run=True)
    printed = capsys.readouterr().out
    assert "left out last_attention: only plain attention" in printed
    for name in ("patch_components", "patch_similarity"):
        assert f"dry run: would write runs/visualize/pictures/{name}.png" in printed
    with refused("pictures: last_attention: only plain attention"):
        draw_pictures(VisualizeRun(**of_attention, pictures=("last_attention",)), WORLD)


def test_the_documentation_lists_the_pictures():
    page = (ROOT / "docs/evaluation.md").read_text().partition("\n## Look inside")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(PICTURES)


# ---- images -------------------------------------------------------------------------------------


def visualized(*images, **values):
    run = VisualizeRun(
        init="x",
        images=tuple(map(str, images)),
        **values,
    )
    return Visualized(run, small_model(), WORLD)


def test_a_folder_gives_evenly_spaced_images_of_its_classes(tmp_path):
    for number in range(12):
        path = tmp_path / "abc"[number % 3] / f"{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image_bytes("png", seed=number))
    bad = tmp_path / "a/000.png"

    # The first files by name would all be of the first class.
    titles, pixels = visualized(tmp_path).sheet(3)
    assert titles == ["a", "b", "c"]
    assert pixels.shape == (3, 3, SIZE, SIZE)

    # A single file is titled by its name: its folder need not be a class.
    titles, pixels = visualized(tmp_path / "b/001.png").sheet(8)
    assert titles == ["001"]
    assert len(pixels) == 1

    # A damaged file leaves the others, and its reason has no address of an object.
    bad.write_bytes(b"no image")
    subject = visualized(tmp_path)
    assert subject.sheet(3)[0] == ["b", "c"]
    (skipped,) = subject.skipped
    assert "000.png: cannot identify image file" in skipped
    assert " at 0x" not in skipped

    for path, split, message in (
        (bad, None, "no image can be read"),
        (tmp_path / "no", None, "No such file"),
        (tmp_path, "test", "only shards have splits"),
    ):
        with refused(message):
            visualized(path, split=split).sheet(3)


def test_rollout_is_drawn_on_the_photograph_with_prediction_and_truth(
    tmp_path,
):
    shards = tmp_path / "shards"
    make_shard_folder(shards, lengths={"test": (3,)}, classes=("käfer_ä", "b"))
    subject = visualized(shards, num_images=2)
    axes = draw_rollout(subject).axes
    titles, pixels = subject.sheet(2)
    expected = subject.model.logits(pixels).softmax(dim=1).max(dim=1)

    # Of the two panels of an image the photograph has the title.
    photographs = [panel for panel in axes if panel.get_title()]
    for panel, title, share, column in zip(photographs, titles, *expected, strict=True):
        name = subject.loaded.class_names[int(column)]
        lines = panel.get_title().split("\n")
        assert lines[0] == f"{float(share):.0%} {name}"
        # Of another model's classes nothing is true or wrong.
        assert lines[1].removeprefix("is: ") == title.replace("_", " ")
        assert panel.images[0].get_array().shape == (320, 320, 3)

    # Below them the heat lies on the same crop in grey, and the bar says what its colours mean.
    (image,) = axes[2].images
    heat = image.get_array()
    assert heat.shape == (320, 320, 3)
    grey = photographs[0].images[0].get_array().mean(axis=2, keepdims=True) / 255
    colors = (heat - 0.45 * grey) / 0.55
    # The largest weight is near the end of inferno, whose green alone grows with the weight.
    assert colors[..., 1].max() == pytest.approx(colormaps["inferno"](1.0)[1], abs=0.1)
    assert colors.min() > -1e-6
    assert "weight" in axes[-1].get_ylabel()


def test_shards_give_the_evaluations_pixels_and_classes(tmp_path):
    """A damaged sample is named with its place."""
    shards = tmp_path / "shards"
    make_shard_folder(shards, lengths={"test": (4, 3)})
    index = read_split(str(shards), split="test")
    place = index.locate(2)
    with open(place.tar, "r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))

    # Of seven samples 0, 2 and 4 are drawn, and 2 is damaged.
    subject = visualized(shards)
    titles, pixels = subject.sheet(3)
    expected = torch.empty(3, SIZE, SIZE, dtype=torch.uint8)
    settings = DataSettings(path="", global_batch=1)
    samples = EvaluationSamples(index, settings=settings, image_size=SIZE)
    for title, image, number in zip(titles, pixels, (0, 4), strict=True):
        label, _ = samples.fill(number, expected)
        assert torch.equal(image, expected)
        assert title == index.classes[label]
    (skipped,) = subject.skipped
    assert f" in {place.tar}: " in skipped


def test_unprepared_images_are_converted_as_shards_are():
    """Prepared ones are left to the decoders, and so is broken EXIF."""
    photo = photograph(40, 30)
    for exif in (b"", b"Exif\0\0" + b"II*\0\xff\xff\xff\xff"):
        assert converted_pixels(encoded(photo, "JPEG", quality=95, exif=exif)) is None

    # A rotation in EXIF, and transparency: data_prep stores them turned and on white.
    turned = encoded(photo, "JPEG", quality=95, exif=rotated(6))
    clear = photo.copy()
    clear.putalpha(0)
    for content in (turned, encoded(clear, "PNG")):
        stored = check_image(content, settings=ImageSettings(), convert=True).content
        pixels = converted_pixels(content)
        # What is stored is a JPEG, which moves levels a little.
        assert np.abs(pixels.int() - decoded(stored)).max() <= 10

    # Nothing, no image, half of one, and a format that shards never hold.
    for bad in (b"", b"no image", turned[:200], encoded(photo, "PPM")):
        with pytest.raises((OSError, ValueError)):
            converted_pixels(bad)


def test_names_that_are_no_utf8_are_escaped():
    # Python decodes such a name with surrogates, which no file of results can be written with.
    files = Images(paths=[os.fsdecode(b"\xff.jpg"), "b.jpg"])
    assert files.names([1, 0]) == ["b.jpg", "\\xff.jpg"]


def test_shards_come_alone(tmp_path):
    make_shard_folder(tmp_path / "shards")
    shards = str(tmp_path / "shards")
    images = find_inputs(PredictRun(init="x", images=(shards,)))
    assert images.total == 2
    assert images.label_name(1) == "dog"

    # -1 stands for an image without a label.
    assert images.label_name(-1) is None
    assert len(set(images.names([0, 1]))) == 2

    # Labels of two folders may mean different classes.
    with refused("is a shard folder, and 2 inputs are given"):
        find_inputs(PredictRun(init="x", images=(shards, shards)))


def test_a_long_name_is_broken_between_words_and_never_shortened_in_the_middle():
    assert caption("7", width=3) == "7"

    # Underscores of folder names are places to break, too.
    name = "capital_letter_a_with_acute"
    assert caption(name, width=16, num_lines=2) == "capital letter a\nwith acute"

    # What does not fit is left out with a mark.
    assert caption("tench, Tinca tinca, a fish", width=14) == "tench, Tinca …"
    assert caption("neu_mono_ä0005", width=46) == "neu mono ä0005"
