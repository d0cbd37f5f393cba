"""The objectives against slow versions: draws by position, exact costs, and what they refuse."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import yaml

from pretrain.objectives.mae import MaeSettings
from pretrain.objectives.masked_autoencoder import (
    MaskedAutoencoder,
    encode_kept,
    reconstruction_loss,
)
from pretrain.objectives.masked_patch_prediction import MaskedPatchPredictionSettings
from pretrain.objectives.masked_patches import (
    MaskedPatches,
    color_loss,
    colors,
    draw_corruption,
)
from pretrain.objectives.patches import random_orders, to_images, to_patches
from pretrain.run import PretrainRun
from tests.support.reference_losses import masked_autoencoder
from tests.support.reference_training import Sample
from tests.support.tables import every, rows
from vitscale.models import vit
from vitscale.models.positions import mae_position_embedding
from vitscale.models.settings import ViTSettings
from vitscale.objectives.objective import Objective, Supervised, SupervisedSettings
from vitscale.training.session import build_model

MAE = {
    "name": "mae",
    "decoder_width": 8,
    "decoder_depth": 1,
    "decoder_heads": 2,
}
MASKED = {"name": "masked_patch_prediction"}
RUN = yaml.safe_load("""
name: x
data: {path: s, global_batch: 8}
model: {width: 16, depth: 1, num_heads: 2, mlp_width: 24, patch_size: 4, image_size: 16}
optim: {lr: 0.001}
schedule: {steps: 10}
""")
PLAIN = Supervised(SupervisedSettings(), seed=0)
MASKING = pytest.mark.parametrize(
    "section", [MAE, MASKED], ids=["mae", "masked patches"]
)
# Settings that an objective needs on the model of the tests of resuming.
NEEDED = {
    "simclr": (
        "data.views=[{name: global, count: 2}]",
        "engine.max_micro_batch=64",
    ),
    "lejepa": (
        "data.views=[{name: global, count: 2}, {name: local, image_size: 8}]",
        "engine.max_micro_batch=64",
        "objective.hidden_width=32",
        "objective.num_directions=16",
    ),
    "dino": (
        "data.views=[{name: global, count: 2}, {name: local, image_size: 8}]",
        "engine.max_micro_batch=64",
        "objective.hidden_width=32",
        "objective.num_prototypes=64",
        "objective.patch_weight=1",
        "objective.koleo_weight=0.1",
        "optim.ema={decay: 0.9, final_decay: 1}",
    ),
    "features": ("objective.patch_grid=[1, 2]", "objective.shares=[2]"),
    "distillation": ("model.distillation_token=true",),
    "mae": (
        "objective.decoder_width=16",
        "objective.decoder_depth=1",
        "objective.decoder_heads=2",
        "model.positions=sincos2d_mae",
    ),
}


def opened(section, **changes):
    """A run, its objective and its architecture."""
    run = PretrainRun.model_validate(RUN | {"objective": section, **changes})
    return run, run.make_objective(), run.model.resolved(num_classes=0)


def test_what_is_corrupted_depends_on_the_seed():
    """And on the position of each image, as what MAE removes: test_reference."""
    predicted = []
    for seed in (0, 1):
        run, objective, arch = opened(MASKED, seed=seed)
        build_model(run, objective, arch)

        # The seed is the run's, and the position is that of an image in training.
        inputs = objective.corruption(np.arange(8), torch.device("cpu"))
        predicted.append(inputs["predicted_BK"])
    assert not torch.equal(*predicted)


@MASKING
# Plans count without building a model.
def test_parameters_are_those_of_the_module(section):
    run, objective, arch = opened(section)
    model = build_model(run, objective, arch)
    counts = [p.numel() for p in model.parameters() if p.requires_grad]
    assert objective.num_parameters(arch) == sum(counts)


def test_costs_are_those_of_the_parts():
    """The encoder of MAE sees 5 tokens, its decoder 17; the head of masked patches 8 of 16."""
    options = {"precision": "bf16", "activation_checkpointing": False}
    _, mae, arch = opened(MAE)

    # Bytes of a block for each token: 16 per channel, 4 per hidden channel of the MLP; once more 4
    # and 2 for the last norm and what its backward pass begins with.
    encoder = 5 * (16 * 16 + 4 * 24 + 4 * 16 + 2 * 24)
    decoder = 17 * (16 * 8 + 4 * 32 + 4 * 8 + 2 * 32)
    # Pixels in bf16, those of the image and those that are predicted.
    pixels = 2 * 2 * 3 * 16 * 16
    expected = encoder + decoder + pixels
    assert mae.activation_bytes_per_image(arch, **options) == expected

    # What the head adds: 16 channels to 512 classes of colours, forwards and twice backwards.
    _, masked, _ = opened(MASKED)
    flops = masked.train_flops_per_image(arch) - PLAIN.train_flops_per_image(arch)
    assert flops == 6 * 8 * 16 * 512

    # Inputs and logits in bf16, and the loss's in fp32, twice.
    added = masked.activation_bytes_per_image(arch, **options)
    added -= PLAIN.activation_bytes_per_image(arch, **options)
    assert added == 8 * (2 * (16 + 512) + 8 * 512)


# Parameters of the published checkpoints, and what a step costs beside one of the encoder alone.
@rows("""
- [preset, encoder, decoder, ratio]
- [B/16, 85647360, 26008320, 0.557]
- [L/16, 303099904, 26139392, 0.337]
- [H/14, 630435840, 26178124, 0.29]
""")
def test_costs_are_those_of_the_published_models(preset, encoder, decoder, ratio):
    model = {"preset": preset, "positions": "sincos2d_mae"}
    _, mae, arch = opened({"name": "mae"}, model=model)
    assert PLAIN.num_parameters(arch) == encoder
    assert mae.num_parameters(arch) == encoder + decoder
    flops = mae.train_flops_per_image(arch) / PLAIN.train_flops_per_image(arch)
    assert flops == pytest.approx(ratio, abs=6e-4)

    # Rounded down: 1 - 0.8 is below 0.2.
    assert mae.settings.num_kept(196) == 49
    assert MaeSettings(mask_ratio=0.8).num_kept(100) == 19

    # Without its head, the mask embedding and 768 x 512 + 512.
    _, masked, arch = opened(MASKED, model={"preset": "B/16"})
    assert masked.num_parameters(arch) == 86_567_656 - 769_000 + 768 + 393_728


# ---- the interface ----------------------------------------------------------------------------


class WithLayer(Objective):
    Settings = SupervisedSettings

    def extend_model(self, model, arch):
        model.objective = torch.nn.Linear(arch.width, 3)


def test_what_an_objective_adds_depends_on_the_seed_alone():
    weights = []
    for seed, draws in ((0, 0), (0, 5), (1, 0)):
        run = PretrainRun.model_validate(RUN | {"seed": seed})

        # Draws that come before must not matter.
        torch.rand(draws)
        objective = WithLayer(run.objective, seed=seed)
        model = build_model(run, objective, run.model.resolved(num_classes=2))
        weights.append(model.objective.weight.tolist())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


# ---- masked patches ------------------------------------------------------------------------------

NUM_PATCHES = 196
NUM_CORRUPTED = 98
NUM_IMAGES = 1100
Corruption = dict[str, np.ndarray]


def drawn(num_images, *, num_patches=NUM_PATCHES, **changes):
    settings = MaskedPatchPredictionSettings(**changes)
    positions = np.arange(num_images)
    return draw_corruption(
        positions,
        settings=settings,
        num_patches=num_patches,
        key=5,
    )


@pytest.fixture(scope="module")
def many():
    return drawn(NUM_IMAGES)


def test_exactly_half_of_each_image_is_corrupted(many):
    assert many["predicted_BK"].shape == (NUM_IMAGES, NUM_CORRUPTED)
    assert (np.diff(many["predicted_BK"], axis=1) > 0).all()
    corrupted = np.zeros((NUM_IMAGES, NUM_PATCHES), dtype=bool)
    np.put_along_axis(corrupted, many["predicted_BK"], True, axis=1)

    # No other patch changes, and no masked one is swapped too.
    masked = many["masked_BN"]
    swapped = many["sources_BN"] != np.arange(NUM_PATCHES)
    is_other = ~corrupted
    assert not (masked & is_other).any()
    assert not (swapped & (masked | is_other)).any()

    # 5 sigma at 107,800 patches: 0.61 points for 80 %.
    total = NUM_IMAGES * NUM_CORRUPTED
    for share, count in ((0.8, masked.sum()), (0.1, swapped.sum())):
        sigma = math.sqrt(share * (1 - share) / total)
        assert abs(count / total - share) < 5 * sigma


def test_every_other_patch_is_equally_likely_to_replace_one(many):
    images, patches = np.nonzero(many["sources_BN"] != np.arange(NUM_PATCHES))
    donors = many["sources_BN"][images, patches]
    distances = (donors - patches) % NUM_PATCHES
    counts = np.bincount(distances, minlength=NUM_PATCHES)[1:]
    expected = len(images) / (NUM_PATCHES - 1)
    chi_square = ((counts - expected) ** 2 / expected).sum()

    # Mean 194 and deviation sqrt(2 * 194) with 195 equally likely distances.
    assert abs(chi_square - 194) < 5 * math.sqrt(2 * 194)

    # No patch replaces two.
    assert len(np.unique(images * NUM_PATCHES + donors)) == len(images)


def test_colors_equal_a_slow_reference():
    random = np.random.default_rng(0)
    patches = random.integers(0, 256, (2, 3, 8, 8, 3), dtype=np.uint8)

    # A channel's mean is exactly at the border of two levels, or at its ends.
    patches[0, 0] = [255, 0, 51]
    is_red = np.arange(64).reshape(8, 8) % 8 < 3
    patches[0, 1, :, :, 0] = 255 * is_red
    classes = colors(torch.from_numpy(patches).flatten(2))

    # Three bits a channel, of the mean: 512 classes, as in the ViT paper's appendix B.1.2.
    for image, patch in np.ndindex(2, 3):
        pixels = patches[image, patch].astype(np.float64) / 255
        means = pixels.mean(axis=(0, 1))
        red, green, blue = np.minimum(np.floor(8 * means), 7)
        assert classes[image, patch] == 64 * red + 8 * green + blue


def test_patches_are_rows_with_channels_last():
    images = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    patches = to_patches(images, patch_size=4)
    pixels = patches.unflatten(2, (4, 4, 3))

    # Patches are numbered row by row.
    for number in range(9):
        top = 4 * (number // 3)
        left = 4 * (number % 3)
        patch = images[:, :, top : top + 4, left : left + 4]
        assert torch.equal(pixels[:, number], patch.permute(0, 2, 3, 1))
    assert torch.equal(to_images(patches, grid=(3, 3)), images)


def test_chance_loses_ln_512():
    labels = torch.arange(6).view(2, 3)
    # Equal logits for all 512 classes; the first of them, label 0, counts as the guess.
    loss, accuracy = color_loss(torch.zeros(2, 3, 512), labels)
    assert loss.item() == pytest.approx(math.log(512))
    assert accuracy.item() == pytest.approx(1 / 6)


@every(options="{}, {pool: gap, positions: sincos2d}, {num_registers: 2}")
def test_predictions_equal_an_independent_forward_pass(options):
    """Corrupted image by image, before positions; read from each patch's own token."""
    model = small_model({"image_size": 24, "patch_size": 8, **options}).eval()
    model.objective = MaskedPatches(16).double()
    for parameter in model.objective.parameters():
        torch.nn.init.normal_(parameter)

    # Two of six are masked, two swapped, two stay as they are and are predicted all the same.
    corruption = drawn(
        3,
        num_patches=9,
        corrupted_share=0.667,
        mask_share=0.4,
        swap_share=0.4,
    )
    images = torch.randn(3, 3, 24, 24, dtype=torch.float64)
    inputs = {name: torch.from_numpy(rows) for name, rows in corruption.items()}
    logits = model(images, output="objective", **inputs)
    assert logits.shape == (3, 6, 512)

    for image in range(3):
        # One image at a time, and whole rows instead of gathers.
        clean = model.patch_embed(images[image : image + 1])[0]
        patches = clean[inputs["sources_BN"][image]]
        patches[inputs["masked_BN"][image]] = model.objective.mask_token[0, 0]
        tokens = model.norm(model.blocks(model._pos_embed(patches[None])))[0]
        tokens = tokens[model.num_prefix_tokens :][inputs["predicted_BK"][image]]
        torch.testing.assert_close(logits[image], model.objective.head(tokens))


# ---- MAE -----------------------------------------------------------------------------------------

DECODER = {
    "width": 8,
    "depth": 2,
    "num_heads": 2,
}
SMALL = yaml.safe_load("""
{image_size: 12, patch_size: 4, width: 16, depth: 2, num_heads: 2, mlp_width: 24, gelu: erf}
""")
FIXED = {"positions": "sincos2d_mae", "weight_init": "mae"}


def small_model(changes):
    """With a decoder and random values everywhere: in biases and norms too."""
    arch = ViTSettings(**SMALL | changes).resolved(num_classes=0)
    torch.manual_seed(1)
    model = vit.build_model(arch, seed=0)
    model.objective = MaskedAutoencoder(arch, **DECODER)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def slow_predictions(model, images, *, kept_BK, **_):
    """MAE's forward pass of image after image, patch after patch, for SMALL and DECODER.

    Blocks, norms and dense layers are the model's own.
    """
    mae = model.objective
    embedding = model.patch_embed.proj
    encoder_positions = mae_position_embedding((3, 3), width=16).double()
    decoder_positions = mae_position_embedding((3, 3), width=8).double()
    predicted = []
    for image, kept in zip(images, kept_BK.tolist(), strict=True):
        # The encoder sees the kept patches alone.
        encoded = [model.cls_token[0, 0]]
        for number in kept:
            top = 4 * (number // 3)
            left = 4 * (number % 3)
            patch = image[:, top : top + 4, left : left + 4]
            token = (embedding.weight * patch).sum(dim=(1, 2, 3)) + embedding.bias
            encoded.append(token + encoder_positions[number])
        features = model.norm(model.blocks(torch.stack(encoded)[None]))
        embedded = mae.embed(features)[0]

        # Every patch has a token again: its own, or the mask token.
        tokens = [embedded[0]]
        for number in range(9):
            token = mae.mask_token[0, 0]
            if number in kept:
                token = embedded[1 + kept.index(number)]
            tokens.append(token + decoder_positions[number])
        decoded = mae.norm(mae.blocks(torch.stack(tokens)[None]))
        predicted.append(mae.predict(decoded)[0, 1:])
    return torch.stack(predicted)


@every(normalized="true, false", recompute="false, true")
def test_loss_and_gradients_equal_the_slow_version(normalized, recompute):
    model = small_model(FIXED)
    if recompute:
        vit.checkpoint_activations(model)

    # Two of nine patches are kept.
    images = torch.randn(3, 3, 12, 12, dtype=torch.float64)
    order = random_orders(torch.rand(3, 9).numpy())
    order_BL = torch.from_numpy(order)
    predicted = model(
        images,
        output="objective",
        kept_BK=order_BL[:, :2],
        restore_BL=order_BL.argsort(dim=1),
    )
    loss = reconstruction_loss(
        predicted,
        to_patches(images, patch_size=4),
        removed_BR=order_BL[:, 2:],
        normalized=normalized,
    )
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)

    slow_loss = masked_autoencoder(lambda _: order, kept=2, normalized=normalized)
    sample = Sample(images, torch.empty(0), np.arange(3))
    expected = slow_loss(partial(slow_predictions, model), images, sample)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    slow = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(gradients, slow, rtol=1e-4, atol=1e-6)


def test_positions_are_added_before_patches_are_removed():
    """All patches kept in another order: the features of a plain forward pass, in that order."""
    model = small_model({})
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    order = torch.stack([torch.randperm(9), torch.randperm(9)])
    encoded = encode_kept(model, images, kept_BK=order)
    plain = model.forward_features(images)
    torch.testing.assert_close(encoded[:, 0], plain[:, 0])
    for image in range(2):
        expected = plain[image, 1 + order[image]]
        torch.testing.assert_close(encoded[image, 1:], expected)


def test_ties_keep_their_order():
    # Else the draw would depend on the sorting algorithm of a machine.
    orders = random_orders(np.array([[0.3, 0.1, 0.9, 0.1]]))
    assert orders.tolist() == [[1, 3, 0, 2]]


def test_start_is_that_of_mae():
    sizes = SMALL | FIXED | {"width": 64, "mlp_width": 256}
    arch = ViTSettings(**sizes).resolved(num_classes=0)
    model = vit.build_model(arch, seed=0)
    torch.manual_seed(0)
    mae = MaskedAutoencoder(
        arch,
        width=64,
        depth=1,
        num_heads=2,
    )

    # Xavier's bound, of Q, K and V as one matrix.
    fused = math.sqrt(6 / (64 + 3 * 64))
    pixels = math.sqrt(6 / (64 + 48))
    for kernel, bound in (
        (model.patch_embed.proj.weight, pixels),
        (model.blocks[0].attn.qkv.weight, fused),
        (mae.blocks[0].attn.qkv.weight, fused),
        (mae.predict.weight, pixels),
    ):
        assert 0.97 * bound < kernel.abs().max().item() <= bound
    for token in (model.cls_token, mae.mask_token):
        assert token.std().item() == pytest.approx(0.02, rel=0.3)
        assert not vit.decayed("objective.mask_token", token)
    assert not mae.blocks[0].mlp.fc1.bias.any()
