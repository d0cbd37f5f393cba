"""Transfer to other grids, patches, tokens, heads; what does not fit is one table.

Positions of other grids against independent implementations.
"""

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from tests.support.tables import every, refused, rows
from vitscale.models.positions import (
    fixed_positions,
    mae_position_embedding,
    resize_position_embedding,
    sincos_position_embedding,
)
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.models.weights.files import Weights
from vitscale.models.weights.transfer import transfer_weights

SMALL = ViTSettings(
    image_size=16,
    patch_size=4,
    width=24,
    depth=1,
    num_heads=2,
    mlp_width=40,
)
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))


def shaken(*, num_classes=5, **changes):
    """A model in evaluation mode whose weights, the head's too, are all random."""
    settings = SMALL.model_copy(update=changes)
    model = build_model(settings.resolved(num_classes=num_classes), seed=0)
    random = torch.Generator().manual_seed(len(changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=random)
    return model.eval()


def transfer(
    target,
    source,
    *,
    computed=None,
    more=None,
    source_grid=None,
    **options,
):
    """more: further tensors of the source. Returns the names that were left out."""
    weights = Weights(
        tensors=source.state_dict() | (more or {}),
        grid=source_grid or source.patch_embed.grid_size,
        computed=computed or {},
        where="there",
    )
    grid = target.patch_embed.grid_size
    return transfer_weights(
        target,
        weights,
        grid=grid,
        convention="google",
        **options,
    )


# The rows before those of patches: registers have none, and other tokens one each.
@rows("""
- [options, prefix]
- [{num_registers: 2}, 0]
- [{num_registers: 2, pool: gap}, 0]
- [{}, 1]
- [{distillation_token: true}, 2]
""")
def test_tokens_carry_over_to_another_grid(options, prefix):
    source = shaken(**options)
    target = shaken(**options, image_size=24)
    assert transfer(target, source) == []
    before = source.state_dict()
    after = target.state_dict()
    for name in "cls_token reg_token dist_token norm.weight".split():
        if name in before:
            assert torch.equal(after[name], before[name])
    assert target.pos_embed.shape == (1, prefix + 36, 24)
    kept = target.pos_embed[:, :prefix]
    assert torch.equal(kept, source.pos_embed[:, :prefix])

    # Align-corners resampling keeps the corners: no other token was taken for a patch.
    ours = target.pos_embed[0, prefix:]
    theirs = source.pos_embed[0, prefix:]
    corners = ours[[0, 5, 30, 35]]
    assert torch.allclose(corners, theirs[[0, 3, 12, 15]])


def test_heads_stay_fresh_unless_kept():
    source = shaken()
    target = shaken(depth=1)
    fresh = target.head.weight.clone()

    # A new task usually has other classes, so its head is its own.
    transfer(target, source)
    assert torch.equal(target.head.weight, fresh)
    assert torch.equal(target.cls_token, source.cls_token)

    transfer(target, source, keep_head=True)
    assert torch.equal(target(IMAGES), source(IMAGES))
    with refused(r"head.weight: model \(3, 24\), checkpoint \(5, 24\)"):
        transfer(shaken(num_classes=3), source, keep_head=True)


def test_what_only_training_or_another_pool_needs_is_left_out_and_named():
    pooled = {
        "pool": "gap",
        "class_token": True,
        "pool_norm": True,
    }
    source = shaken()
    target = shaken(**pooled)
    fresh = target.fc_norm.weight.clone()

    # A decoder of MAE, and what an objective of ours has trained beside the model.
    decoder = {
        "mask_token": torch.ones(8),
        "decoder_blocks.0.norm1.weight": torch.ones(8),
    }
    source.objective = torch.nn.Linear(2, 2)
    left_out = transfer(target, source, more=decoder)
    objective = ["objective.bias", "objective.weight"]
    assert left_out == sorted([*decoder, "norm.bias", "norm.weight", *objective])

    # The norm of means is another layer than that of tokens, though its shape is the same.
    assert torch.equal(target.fc_norm.weight, fresh)

    # With the same pooling nothing is left out.
    again = shaken(**pooled, num_classes=3)
    assert transfer(again, target) == []
    assert torch.equal(again.fc_norm.weight, fresh)


def test_fixed_positions_are_computed_for_the_new_grid():
    source = shaken(positions="sincos2d")
    target = shaken(positions="sincos2d", image_size=24)
    transfer(target, source)
    expected = sincos_position_embedding((6, 6), width=24)
    assert torch.equal(target.pos_embed[0], expected)

    def computed(settings):
        description = settings.resolved(num_classes=5).description()
        return fixed_positions(description, grid=(4, 4))

    assert computed(SMALL) == {}  # learned ones

    # They become learned ones, whose class token has had no position so far.
    source = shaken(positions="sincos2d_mae")
    positions = computed(SMALL.model_copy(update={"positions": "sincos2d_mae"}))
    for size in (24, 16):
        target = shaken(image_size=size)
        transfer(target, source, computed=positions)
        assert not target.pos_embed[:, 0].any()

    # On the same grid nothing has changed.
    tokens = target.forward_features(IMAGES)
    torch.testing.assert_close(tokens, source.forward_features(IMAGES))


@every(with_position="true, false")
def test_adding_or_removing_the_class_position_keeps_features(with_position):
    source = shaken(class_position=with_position)
    target = shaken(class_position=not with_position)
    before = target.forward_features(IMAGES)
    transfer(target, source)
    features = target.forward_features(IMAGES)
    assert torch.allclose(features, source.forward_features(IMAGES), atol=1e-5)

    # The two models were different before, so that the transfer has done something.
    assert not torch.allclose(features, before, atol=1e-2)


def test_a_model_sees_upsized_patches_as_their_originals():
    source = shaken()
    target = shaken(patch_size=8, image_size=32)
    transfer(target, source, keep_head=True, resize_patches=True)

    # Each patch of 4 x 4 pixels becomes one of 8 x 8, alone: no pixel of its neighbours.
    patches = IMAGES.unfold(2, 4, 4).unfold(3, 4, 4)
    patches = patches.reshape(2, 48, 4, 4)
    upsized = F.interpolate(patches, size=(8, 8), mode="bilinear")
    upsized = upsized.reshape(2, 3, 4, 4, 8, 8)
    upsized = upsized.permute(0, 1, 2, 4, 3, 5)
    images = upsized.reshape(2, 3, 32, 32)
    assert torch.allclose(target(images), source(IMAGES), atol=1e-4)


def test_patches_are_resized_as_flexivit_does():
    """The least-squares solution for all patches, which are resized without smoothing."""

    def kernels(model):
        """[pixels, channels * width]: what a patch embedding does to each pixel of a patch."""
        kernel_DCP = model.patch_embed.proj.weight.flatten(2)
        return kernel_DCP.permute(2, 0, 1).flatten(1)

    for old, new in ((4, 8), (8, 4), (4, 6)):
        source = shaken(patch_size=old, image_size=48)
        target = shaken(patch_size=new, image_size=48)
        transfer(target, source, resize_patches=True)

        # Row i is the resized patch whose pixel i alone is 1.
        units = torch.eye(old**2).view(-1, 1, old, old)
        resized = F.interpolate(units, size=(new, new), mode="bilinear")
        resize = resized.flatten(1)
        wanted = torch.linalg.lstsq(resize, kernels(source), driver="gelsd").solution
        torch.testing.assert_close(kernels(target), wanted, atol=1e-5, rtol=1e-4)


# What only the weights have, what only the model has, and what both have in other shapes.
@rows(r"""
- [source, target, row]
- [{num_registers: 2}, {class_position: false}, 'reg_token: model lacks it']
- [{positions: sincos2d}, {}, 'pos_embed: model']
- [{layer_scale: 0.1}, {}, 'blocks.0.ls1.gamma: model lacks it']
- [{mlp_width: 44}, {}, 'mlp.fc1.weight: model \(40, 24\), checkpoint \(44, 24\)']
- [{}, {depth: 2}, 'blocks.1.attn.proj.bias: model .24,., checkpoint lacks it']
- [{}, {patch_size: 8}, 'model \(24, 3, 8, 8\)(?s:.*)init_patch=resize']
""")
def test_another_kind_of_model_is_refused_by_name(source, target, row):
    """Nothing is loaded then."""
    model = shaken(**target)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with refused(f"checkpoint of another model(?s:.*){row}") as caught:
        transfer(model, shaken(**source))
    text = str(caught.value)
    assert "keys of `model`" in text
    # Advice that would not help is not given.
    assert ("init_patch" in text) == ("patch_size" in target)
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value)


def test_a_wrong_grid_is_refused():
    for options in ({}, {"num_registers": 2}):
        model = shaken(**options)
        # 12 patches: neither 16 rows nor 17 are theirs.
        with refused("does not hold"):
            transfer(model, model, source_grid=(3, 4))


# ---- positions -----------------------------------------------------------------------------------


def embedding(rows, columns, *, prefix):
    random = torch.Generator().manual_seed(0)
    return torch.randn(prefix + rows * columns, 6, generator=random)


def scipy_zoom(grid_RCD, size):
    """As Google's code: linear, corners on corners."""
    rows, columns, _ = grid_RCD.shape
    factors = (size[0] / rows, size[1] / columns, 1)
    zoomed = zoom(grid_RCD.double().numpy(), factors, order=1)
    return torch.from_numpy(zoomed).float()


def timm_resample(grid_RCD, size):
    rows, columns, _ = grid_RCD.shape
    resampled = resample_abs_pos_embed(
        grid_RCD.flatten(0, 1)[None],
        new_size=list(size),
        old_size=[rows, columns],
        num_prefix_tokens=0,
    )
    return resampled.reshape(*size, -1)


def cubic(grid_RCD, size, *, offset):
    """Cubic convolution (a = -0.75) along each side in float64, borders repeated.

    The side of an output pixel is M / (n + offset) input pixels.
    """

    def weights(num_in, num_out):
        matrix = np.zeros((num_out, num_in))
        for out in range(num_out):
            centre = (out + 0.5) * num_in / (num_out + offset) - 0.5
            first = math.floor(centre)
            # Four neighbours, by Keys 1981; beyond the border its last pixel stands for them.
            for pixel in range(first - 1, first + 3):
                far = abs(centre - pixel)
                if far <= 1:
                    weight = 1.25 * far**3 - 2.25 * far**2 + 1
                else:
                    weight = -0.75 * (far**3 - 5 * far**2 + 8 * far - 4)
                matrix[out, min(max(pixel, 0), num_in - 1)] += weight
        return matrix

    rows, columns, _ = grid_RCD.shape
    along_rows = weights(rows, size[0])
    along_columns = weights(columns, size[1])
    grid = grid_RCD.double().numpy()
    resampled = np.einsum("ir,jc,rcd->ijd", along_rows, along_columns, grid)
    return torch.from_numpy(resampled).float()


REFERENCES = {
    "google": scipy_zoom,
    "timm": timm_resample,
    "deit": partial(cubic, offset=0.0),
    "dinov2": partial(cubic, offset=0.1),
}


@every(convention=REFERENCES, prefix="0, 2")
def test_conventions_equal_independent_references(convention, prefix):
    """14 x 14 to the grids of 112 x 448 (as many tokens) and 384 x 512 px, a smaller one, and from
    no square."""
    for grids in ("14x14 7x28", "14x14 24x32", "14x14 9x9", "4x5 3x9"):
        source, target = (tuple(map(int, text.split("x"))) for text in grids.split())
        pos_LD = embedding(*source, prefix=prefix)
        resized_LD = resize_position_embedding(
            pos_LD,
            source_grid=source,
            target_grid=target,
            num_prefix_tokens=prefix,
            convention=convention,
        )

        # Tokens without a place on the grid stay, bit by bit.
        assert torch.equal(resized_LD[:prefix], pos_LD[:prefix])
        assert resized_LD.dtype == torch.float32
        expected = REFERENCES[convention](pos_LD[prefix:].reshape(*source, -1), target)
        resized = resized_LD[prefix:].reshape(*target, -1)
        assert torch.allclose(resized, expected, atol=1e-5), (source, target)


# Square, with more columns than rows, and as large as DINOv2's.
@rows("""
- [grid]
- [[4, 4]]
- [[3, 7]]
- [[37, 37]]
""")
def test_fixed_positions_equal_a_slow_table(grid):
    """Columns first; big_vision's frequencies include 1 / 10,000, MAE's stop short of it."""
    for function, steps in (
        (sincos_position_embedding, 5),
        (mae_position_embedding, 6),
    ):
        omega = [10_000.0 ** -(band / steps) for band in range(6)]

        def waves(place, omega=omega):
            angles = [place * o for o in omega]
            return [*map(math.sin, angles), *map(math.cos, angles)]

        slow = [waves(x) + waves(y) for y in range(grid[0]) for x in range(grid[1])]
        table = function(grid, width=24)
        assert table.dtype == torch.float32
        assert np.allclose(table.numpy(), np.array(slow), atol=1e-6)
