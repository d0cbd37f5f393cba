"""Teachers from timm's files and from our runs; bad ones are refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.support.engine.subjects import WORLD
from vitscale.config.errors import UserError
from vitscale.engine.settings import EngineSettings
from vitscale.training.losses import Teacher, open_teacher
from vitscale.training.objective import TeacherSettings

NAME, CLASSES = "test_efficientnet", 5


@pytest.fixture(scope="module")
def network() -> Any:
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=CLASSES)
    model.train()(torch.randn(8, 3, 64, 64))  # statistics that differ from the first ones
    return model.eval()


def opened(
    path: Path, *, num_classes: int = CLASSES, engine: dict[str, Any] | None = None, **settings: Any
) -> Teacher:
    chosen = TeacherSettings.model_validate({"model": NAME, "weights": str(path), **settings})
    return open_teacher(
        **chosen.model_dump(),
        num_classes=num_classes,
        world=WORLD,
        engine=EngineSettings.model_validate(engine or {}),
    )


@pytest.fixture
def safetensors(network: Any, tmp_path: Path) -> Path:
    save_file(network.state_dict(), tmp_path / "teacher.safetensors")
    return tmp_path / "teacher.safetensors"


def images(size: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def test_logits_are_timms_on_the_teachers_own_pixels(network: Any, safetensors: Path) -> None:
    pixels = images(160)
    config = network.pretrained_cfg
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    expected = network((pixels / 255 - mean) / std)
    found = opened(safetensors).logits(pixels)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_images_are_resized_to_the_teachers_size(safetensors: Path) -> None:
    teacher = opened(safetensors, image_size=64)
    seen = []
    teacher.model.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    flat = torch.full((2, 3, 32, 32), 200.0)
    teacher.logits(flat)
    assert seen[0].shape == (2, 3, 64, 64)
    assert seen[0].std(dim=(0, 2, 3)).max() < 1e-5
    assert opened(safetensors).image_size == 160  # timm's of this network


def test_the_teacher_learns_nothing(safetensors: Path) -> None:
    """No gradients, eval mode: BatchNorm's statistics stay; no draws from the run's state."""
    torch.manual_seed(3)
    before_state = torch.get_rng_state()
    teacher = opened(safetensors, image_size=64, engine={"precision": "bf16"})
    before = {name: value.clone() for name, value in teacher.model.network.state_dict().items()}
    logits = teacher.logits(images(64).float())
    assert logits.dtype == torch.float32 and not logits.requires_grad
    assert not any(p.requires_grad for p in teacher.model.network.parameters())
    for name, value in teacher.model.network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.get_rng_state(), before_state)


def test_a_transformer_gets_positions_of_the_teachers_size(tmp_path: Path) -> None:
    vit = timm.create_model("test_vit", num_classes=CLASSES)
    path = tmp_path / "vit.pth"
    torch.save(vit.state_dict(), path)
    teacher = opened(path, model="test_vit", image_size=64)
    assert teacher.logits(images(64)).shape == (2, CLASSES)
    compiled = opened(path, model="test_vit", engine={"compile": True})
    for each, is_compiled in ((teacher, False), (compiled, True)):
        network: Any = each.model.network
        assert all(block._compiled_call_impl is not None for block in network.blocks) == is_compiled
    with pytest.raises(UserError, match="predicts 5 classes, but the label map has 7"):
        opened(path, model="test_vit", num_classes=7)
    with pytest.raises(UserError, match="timm does not run test_vit on images of 65 px"):
        opened(path, model="test_vit", image_size=65)
