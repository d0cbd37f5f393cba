"""The objectives against slow versions: draws by position, exact costs, and what they refuse."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

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
from pretrain.run import PretrainRun
from tests.support.reference_losses import masked_autoencoder
from tests.support.reference_training import Sample
from vitscale.models import vit
from vitscale.models.patches import random_orders, to_images, to_patches
from vitscale.models.positions import mae_position_embedding
from vitscale.models.settings import ViTSettings
from vitscale.objectives.objective import Objective, Supervised, SupervisedSettings
from vitscale.training.session import build_model

MAE = {"name": "mae", "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}
MASKED = {"name": "masked_patch_prediction"}
RUN: dict[str, Any] = yaml.safe_load("""
name: x
data: {path: s, global_batch: 8}
model: {width: 16, depth: 1, num_heads: 2, mlp_width: 24, patch_size: 4, image_size: 16}
optim: {lr: 0.001}
schedule: {steps: 10}
""")
MODEL = RUN["model"]
MASKING = pytest.mark.parametrize(
    "section", [MAE, MASKED], ids=["mae", "masked patches"]
)


# Settings that an objective needs on the model of the tests of resuming.
NEEDED: dict[str, tuple[str, ...]] = {
    "distillation": ("model.distillation_token=true",),
    "mae": (
        *(
            "objective.decoder_width=16",
            "objective.decoder_depth=1",
            "objective.decoder_heads=2",
        ),
        "model.positions=sincos2d_mae",
    ),
}


class PlainEngine:
    """The forward pass of an engine, without DeepSpeed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() / 255 - 0.5) / 0.5

    def forward(self, images: torch.Tensor, output: str, **inputs: Any) -> Any:
        return self.model(self.normalized(images), output=output, **inputs)


def opened(section: dict[str, Any], *, seed: int = 0) -> tuple[Any, Any]:
    run = PretrainRun.model_validate(RUN | {"objective": section, "seed": seed})
    objective = run.make_objective()
    model = build_model(run, objective, run.model.resolved(num_classes=0))
    for (
        parameter
    ) in model.objective.parameters():  # a head of zeros gives the trunk no gradients
        torch.nn.init.normal_(
            parameter, std=0.2, generator=torch.Generator().manual_seed(0)
        )
    return objective, PlainEngine(model)


def test_what_is_corrupted_depends_on_the_seed() -> None:
    """And on the position of each image, as what MAE removes: test_reference."""
    found = []
    for seed in (0, 1):
        objective, _ = opened(MASKED, seed=seed)
        found.append(
            objective.corruption(np.arange(8), torch.device("cpu"))["predicted_BK"]
        )
    assert not torch.equal(*found)


@MASKING
def test_costs_are_those_of_the_module(section: dict[str, Any]) -> None:
    objective, engine = opened(section)
    arch: Any = ViTSettings(**MODEL).resolved(num_classes=0)
    trained = [p for p in engine.model.parameters() if p.requires_grad]
    assert objective.num_parameters(arch) == sum(p.numel() for p in trained)
    plain = Supervised(SupervisedSettings(), seed=0)
    kept, model = (
        each.activation_bytes_per_image(
            arch, precision="bf16", activation_checkpointing=False
        )
        for each in (objective, plain)
    )
    flops = objective.train_flops_per_image(arch) - plain.train_flops_per_image(arch)
    if section is MASKED:  # a head on 8 of the 16 patches
        assert flops == 6 * 8 * 16 * 512
        assert kept - model == 8 * (2 * (16 + 512) + 8 * 512)
    else:
        assert kept == 5 * (18 * 16 + 4 * 24) + 17 * (18 * 8 + 4 * 32)


@pytest.mark.parametrize(
    "preset, encoder, decoder, ratio",
    [
        ("B/16", 85_647_360, 26_008_320, 0.557),
        ("L/16", 303_099_904, 26_139_392, 0.337),
        ("H/14", 630_435_840, 26_178_124, 0.290),
    ],
)
def test_costs_are_those_of_the_published_models(
    preset: str, encoder: int, decoder: int, ratio: float
) -> None:
    run = PretrainRun.model_validate(
        RUN
        | {
            "model": {"preset": preset, "positions": "sincos2d_mae"},
            "objective": {"name": "mae"},
        }
    )
    mae, plain = run.make_objective(), Supervised(SupervisedSettings(), seed=0)
    arch = run.model.resolved(num_classes=0)
    assert plain.num_parameters(arch) == encoder
    assert mae.num_parameters(arch) == encoder + decoder
    found = mae.train_flops_per_image(arch) / plain.train_flops_per_image(arch)
    assert found == pytest.approx(ratio, abs=6e-4)
    # Rounded down: 1 - 0.8 is below 0.2.
    fifth = MaeSettings(mask_ratio=0.8)
    assert (mae.settings.num_kept(196), fifth.num_kept(100)) == (49, 19)
    masked = PretrainRun.model_validate(RUN | {"objective": MASKED}).make_objective()
    arch = ViTSettings(preset="B/16").resolved(num_classes=0)
    # Without its head, the mask embedding and 768 x 512 + 512.
    assert masked.num_parameters(arch) == 86_567_656 - 769_000 + 768 + 393_728


# ---- the interface ----------------------------------------------------------------------------


class WithLayer(Objective):
    Settings = SupervisedSettings

    def extend_model(self, model: Any, arch: Any) -> None:
        model.objective = torch.nn.Linear(arch.width, 3)


def test_what_an_objective_adds_depends_on_the_seed_alone() -> None:
    weights = []
    for seed, draws in ((0, 0), (0, 5), (1, 0)):
        run = PretrainRun.model_validate(RUN | {"seed": seed})
        torch.rand(draws)
        objective = WithLayer(run.objective, seed=seed)
        model: Any = build_model(run, objective, run.model.resolved(num_classes=2))
        weights.append(model.objective.weight.tolist())
    assert weights[0] == weights[1] != weights[2]


# ---- masked patches ------------------------------------------------------------------------------

NUM_PATCHES, NUM_CORRUPTED, NUM_IMAGES = 196, 98, 1100
Corruption = dict[str, np.ndarray]
SIZES: dict[str, Any] = {"image_size": 24, "patch_size": 8, "width": 24, "depth": 2}
SIZES |= {"num_heads": 2, "mlp_width": 40}


def drawn(positions: np.ndarray, *, key: int = 5, **changes: Any) -> Corruption:
    num_patches = changes.pop("num_patches", NUM_PATCHES)
    settings = MaskedPatchPredictionSettings(**changes)
    return draw_corruption(
        positions, settings=settings, num_patches=num_patches, key=key
    )


@pytest.fixture(scope="module")
def many() -> Corruption:
    return drawn(np.arange(NUM_IMAGES))


def test_exactly_half_of_each_image_is_corrupted(many: Corruption) -> None:
    assert many["predicted_BK"].shape == (NUM_IMAGES, NUM_CORRUPTED)
    assert (np.diff(many["predicted_BK"], axis=1) > 0).all()
    corrupted = np.zeros((NUM_IMAGES, NUM_PATCHES), dtype=bool)
    np.put_along_axis(corrupted, many["predicted_BK"], True, axis=1)
    own = many["sources_BN"] == np.arange(NUM_PATCHES)
    assert not (many["masked_BN"] & ~corrupted).any() and not (~own & ~corrupted).any()
    # They are masked, swapped or kept; 5 sigma at 107,800 patches: 0.61 points for 80 %.
    assert not (~own & many["masked_BN"]).any()
    total = NUM_IMAGES * NUM_CORRUPTED
    for share, found in ((0.8, many["masked_BN"].sum()), (0.1, (~own).sum())):
        assert abs(found / total - share) < 5 * math.sqrt(share * (1 - share) / total)


def test_every_other_patch_is_equally_likely_to_replace_one(many: Corruption) -> None:
    images, patches = np.nonzero(many["sources_BN"] != np.arange(NUM_PATCHES))
    donors = many["sources_BN"][images, patches]
    distances = (donors - patches) % NUM_PATCHES
    counts = np.bincount(distances, minlength=NUM_PATCHES)[1:]
    expected = len(images) / (NUM_PATCHES - 1)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Mean 194 and deviation sqrt(2 * 194) with 195 equally likely distances.
    assert abs(chi_square - 194) < 5 * math.sqrt(2 * 194)
    # No patch replaces two.
    assert len(set(zip(images.tolist(), donors.tolist(), strict=True))) == len(images)


def test_colors_equal_a_slow_reference() -> None:
    random = np.random.default_rng(0)
    patches = random.integers(0, 256, (2, 3, 8, 8, 3), dtype=np.uint8)
    # A channel's mean is exactly at the border of two levels, or at its ends.
    patches[0, 0] = [255, 0, 51]
    patches[0, 1, :, :, 0] = 255 * (np.arange(64).reshape(8, 8) % 8 < 3)
    found = colors(torch.from_numpy(patches).flatten(2))
    for b, k in np.ndindex(2, 3):
        means = patches[b, k].reshape(-1, 3).astype(np.float64).mean(axis=0) / 255
        r, g, blue = np.minimum(np.floor(8 * means), 7).astype(int)
        assert found[b, k] == 64 * r + 8 * g + blue


def test_patches_are_rows_with_channels_last_and_chance_loses_ln_512() -> None:
    images = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    patches = to_patches(images, patch_size=4)
    pixels = patches.unflatten(2, (4, 4, 3))
    for number in range(9):
        top, left = 4 * (number // 3), 4 * (number % 3)
        expected = images[:, :, top : top + 4, left : left + 4].permute(0, 2, 3, 1)
        assert torch.equal(pixels[:, number], expected)
    assert torch.equal(to_images(patches, grid=(3, 3)), images)
    loss, accuracy = color_loss(
        torch.zeros(2, 3, 512), torch.tensor([[0, 1, 2], [3, 4, 5]])
    )
    assert (loss.item(), accuracy.item()) == pytest.approx((math.log(512), 1 / 6))


@pytest.mark.parametrize(
    "options",
    [{}, {"pool": "gap", "positions": "sincos2d"}, {"num_registers": 2}],
)
def test_predictions_equal_an_independent_forward_pass(options: dict[str, Any]) -> None:
    """Corrupted image by image, before positions; read from each patch's own token."""
    torch.manual_seed(0)
    options = SIZES | options
    settings = ViTSettings(**options)
    arch = settings.resolved(num_classes=0)
    model: Any = vit.build_model(arch, seed=0).eval()
    model.objective = MaskedPatches(arch.width)
    torch.nn.init.normal_(model.objective.head.weight)
    if model.cls_token is not None:
        torch.nn.init.normal_(model.cls_token)
    corruption = drawn(
        np.arange(3),
        num_patches=9,
        corrupted_share=0.667,
        mask_share=0.4,
        swap_share=0.4,
    )
    images = torch.randn(3, 3, arch.image_size, arch.image_size)
    inputs = {n: torch.from_numpy(v) for n, v in corruption.items()}
    found = model(images, output="objective", **inputs)
    assert found.shape == (3, 6, 512)
    prefix = arch.num_prefix_tokens
    for b in range(3):
        clean = model.patch_embed(images[b : b + 1])[0]
        rows = []
        for patch in range(9):
            if corruption["masked_BN"][b, patch]:
                rows.append(model.objective.mask_token[0, 0])
            else:
                rows.append(clean[corruption["sources_BN"][b, patch]])
        tokens = model.norm(model.blocks(model._pos_embed(torch.stack(rows)[None])))[
            0, prefix:
        ]
        for k, patch in enumerate(corruption["predicted_BK"][b]):
            expected = tokens[patch] @ model.objective.head.weight.T
            assert torch.allclose(found[b, k], expected, atol=1e-5)


# ---- MAE -----------------------------------------------------------------------------------------

SMALL_DECODER = {"width": 8, "depth": 2, "num_heads": 2}
SMALL = ViTSettings(
    image_size=12, patch_size=4, width=16, depth=2, num_heads=2, mlp_width=24,
    positions="sincos2d_mae", weight_init="mae", gelu="erf",
)  # fmt: skip


def small_model(settings: ViTSettings = SMALL) -> Any:
    arch = settings.resolved(num_classes=0)
    torch.manual_seed(1)
    model: Any = vit.build_model(arch, seed=0)
    model.objective = MaskedAutoencoder(arch, **SMALL_DECODER)
    for parameter in model.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def slow_predictions(
    model: Any, images: torch.Tensor, *, kept_BK: torch.Tensor, **_: Any
) -> torch.Tensor:
    """MAE's forward pass of image after image, patch after patch, for SMALL and SMALL_DECODER.

    Blocks, norms and dense layers are the model's own.
    """
    side, p, mae = 3, 4, model.objective
    of_encoder, of_decoder = (
        mae_position_embedding((3, 3), width=w).double() for w in (16, 8)
    )
    embedding, predicted = model.patch_embed.proj, []
    for image, kept in zip(images, kept_BK.tolist(), strict=True):
        encoded = [model.cls_token[0, 0]]
        for place in kept:
            row, column = divmod(place, side)
            patch = image[:, row * p : (row + 1) * p, column * p : (column + 1) * p]
            token = (embedding.weight * patch).sum(dim=(1, 2, 3)) + embedding.bias
            encoded.append(token + of_encoder[place])
        x = mae.embed(model.norm(model.blocks(torch.stack(encoded)[None])))[0]
        tokens = [x[0]]
        for place in range(9):
            token = x[1 + kept.index(place)] if place in kept else mae.mask_token[0, 0]
            tokens.append(token + of_decoder[place])
        decoded = mae.predict(mae.norm(mae.blocks(torch.stack(tokens)[None])))
        predicted.append(decoded[0, 1:])
    return torch.stack(predicted)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("normalized", [True, False])
def test_loss_and_gradients_equal_the_slow_version(
    normalized: bool, recompute: bool
) -> None:
    model = small_model()
    random = torch.Generator().manual_seed(2)
    images = torch.randn(3, 3, 12, 12, generator=random, dtype=torch.float64)
    noise = torch.rand(3, 9, generator=random, dtype=torch.float64).numpy()
    if recompute:
        vit.checkpoint_activations(model)
    order = torch.from_numpy(random_orders(noise))
    places = order.argsort(dim=1)
    predicted = model(
        images, output="objective", kept_BK=order[:, :2], restore_BL=places
    )
    loss = reconstruction_loss(
        predicted,
        to_patches(images, patch_size=4),
        removed_BR=order[:, 2:],
        normalized=normalized,
    )
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    right = masked_autoencoder(lambda _: order.numpy(), kept=2, normalized=normalized)
    sample = Sample(images, torch.empty(0), np.arange(3))
    expected = right(partial(slow_predictions, model), images, sample)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    slow = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(found, list(slow), rtol=1e-4, atol=1e-6)


def test_positions_are_added_before_patches_are_removed() -> None:
    """All patches kept in another order: the features of a plain forward pass, in that order."""
    model = small_model(SMALL.model_copy(update={"positions": "learned"}))
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    order = torch.stack([torch.randperm(9), torch.randperm(9)])
    encoded = encode_kept(model, images, kept_BK=order)
    plain = model.forward_features(images)
    torch.testing.assert_close(encoded[:, 0], plain[:, 0])
    expected = torch.stack([plain[i, 1 + order[i]] for i in range(2)])
    torch.testing.assert_close(encoded[:, 1:], expected)


def test_ties_keep_their_order() -> None:
    assert random_orders(np.array([[0.3, 0.1, 0.9, 0.1]])).tolist() == [[1, 3, 0, 2]]


def test_start_is_that_of_mae() -> None:
    settings = SMALL.model_copy(update={"width": 64, "mlp_width": 256})
    arch = settings.resolved(num_classes=0)
    model: Any = vit.build_model(arch, seed=0)
    torch.manual_seed(0)
    model.objective = MaskedAutoencoder(arch, width=64, depth=1, num_heads=2)
    patch = model.patch_embed.proj.weight
    fused = math.sqrt(6 / (64 + 3 * 64))
    for kernel, bound in (
        (patch, math.sqrt(6 / (64 + 48))),
        (model.blocks[0].attn.qkv.weight, fused),
        (model.objective.blocks[0].attn.qkv.weight, fused),
        (model.objective.predict.weight, math.sqrt(6 / (64 + 48))),
    ):
        assert 0.97 * bound < kernel.abs().max().item() <= bound
    for token in (model.cls_token, model.objective.mask_token):
        assert token.std().item() == pytest.approx(0.02, rel=0.3)
        assert not vit.decayed("objective.mask_token", token)
    assert not any(model.objective.blocks[0].mlp.fc1.bias)
