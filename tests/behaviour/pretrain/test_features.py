"""Feature distillation: teachers against their own libraries, losses against slow formulas."""

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.support.engine.subjects import WORLD
from tests.support.tables import every, rows
from vitscale.engine.settings import EngineSettings
from vitscale.objectives.teacher import open_feature_teacher, pooled_patches


def opened(path, *, model=None, image_size=None):
    return open_feature_teacher(
        str(path),
        model=model,
        image_size=image_size,
        key="objective.teachers[0]",
        world=WORLD,
        engine=EngineSettings(),
    )


def network_of(name, **arguments):
    """A model of timm with random weights, all of them: biases and scales, too."""
    torch.manual_seed(0)
    network = timm.create_model(name, **arguments).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return network


def levels(size, number=3):
    random = torch.Generator().manual_seed(1)
    shape = (number, 3, size, size)
    return torch.randint(256, shape, dtype=torch.uint8, generator=random)


def normalized(images, mean, std):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return (images / 255 - mean) / std


# ---- teachers ------------------------------------------------------------------------------------


@rows("""
- [name, size, grid]
- [vit_tiny_patch16_224, 32, [2, 2]]
- [vit_small_patch14_reg4_dinov2, 42, [3, 3]]
- [vit_small_patch16_dinov3, 48, [3, 3]]
- [vit_small_patch16_lingbot, 32, [2, 2]]
- [test_efficientnet, 64, null]
""")
def test_features_are_timms(name, size, grid, tmp_path):
    """With a head or without; models without patches give features alone."""
    network = network_of(name)
    path = tmp_path / "teacher.safetensors"
    save_file(network.state_dict(), path)
    teacher = opened(path, model=name, image_size=size)
    assert teacher.grid == (grid and tuple(grid))
    assert teacher.width == network.num_features

    # timm resamples the positions itself.
    if network.pretrained_cfg["fixed_input_size"]:
        network.set_input_size(size)
    images = levels(size)
    config = network.pretrained_cfg
    with torch.no_grad():
        tokens = network.forward_features(
            normalized(images, config["mean"], config["std"])
        )
        pooled = network.forward_head(tokens, pre_logits=True)
    features, patches = teacher.features(images, patch_grid=teacher.grid)
    torch.testing.assert_close(features, pooled, atol=1e-5, rtol=1e-5)
    if grid is None:
        assert patches is None
        return
    expected = tokens[:, network.num_prefix_tokens :]
    torch.testing.assert_close(patches, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "teacher.safetensors"
    network = network_of("vit_tiny_patch16_224", img_size=64, num_classes=0)
    save_file(network.state_dict(), path)
    return path


@every(size="1, 3, 8, 17", threads="1, 2")
def test_an_image_has_the_same_bits_in_any_batch(size, threads, tiny):
    """Also at another place in it, and with another number of threads."""
    teacher = opened(tiny, model="vit_tiny_patch16_224", image_size=64)
    images = levels(64, number=17)
    alone = teacher.features(images[5:6], patch_grid=(3, 3))

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        last = images.roll(-6, 0)[-size:]
        together = teacher.features(last, patch_grid=(3, 3))
    finally:
        torch.set_num_threads(before)
    for one, many in zip(alone, together, strict=True):
        assert torch.equal(one[0], many[-1])


# ---- other grids ---------------------------------------------------------------------------------


@rows("""
- [grid, target]
- [[4, 4], [2, 2]]
- [[4, 6], [2, 3]]
- [[5, 4], [3, 3]]
- [[2, 2], [4, 3]]
- [[3, 3], [3, 3]]
""")
def test_patches_are_pooled_by_area(grid, target):
    """Means over every point of a fine raster that both grids divide."""
    random = torch.Generator().manual_seed(0)
    patches = torch.randn(2, grid[0] * grid[1], 5, generator=random).double()
    fine = patches.unflatten(1, grid).numpy()
    for axis in (1, 2):
        fine = np.repeat(fine, target[axis - 1], axis=axis)
    expected = np.empty((2, *target, 5))
    for row in range(target[0]):
        for column in range(target[1]):
            block = fine[
                :,
                row * grid[0] : (row + 1) * grid[0],
                column * grid[1] : (column + 1) * grid[1],
            ]
            expected[:, row, column] = block.mean(axis=(1, 2))
    pooled = pooled_patches(patches, tuple(grid), tuple(target))
    np.testing.assert_allclose(pooled.unflatten(1, target), expected, atol=1e-12)
