"""Losses against slow formulas and numbers computed by hand; teachers from files and runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.support.engine.subjects import WORLD
from tests.support.reference_losses import supervised
from tests.support.reference_training import Sample
from vitscale.config.errors import UserError
from vitscale.data.loader import Batch
from vitscale.engine.settings import EngineSettings
from vitscale.objectives.losses import hard_loss, label_loss
from vitscale.objectives.objective import (
    Distillation,
    DistillationSettings,
    TeacherSettings,
)
from vitscale.objectives.teacher import Teacher, open_teacher

NAME, CLASSES = "test_efficientnet", 5


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "bce"])
@pytest.mark.parametrize("shares", [None, (0.7, 0.6, 1.0, 0.0)])
def test_losses_equal_the_papers_formulas(
    kind: str, shares: tuple[float, ...] | None
) -> None:
    """Of bf16 logits in fp32; with mixed labels too, of which some are equal or have no share."""
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, 7, generator=random) - 6.9).bfloat16()
    labels = torch.tensor([0, 1, 3, 3, 1, 6, 2, 5])
    options: dict[str, Any] = {"kind": kind}
    if kind != "bce":
        options["smoothing"] = 1e-2
    right = supervised(**options, share_of=shares and (lambda pair: shares[pair]))
    sample = Sample(torch.empty(0), labels, np.arange(8))
    expected = right(lambda pixels: logits, torch.zeros(8, 3, 4, 4), sample)

    if shares is not None:
        options["mixed_labels_B"] = labels.view(4, 2).flip(1).flatten()
        options["mix_lambda_B"] = torch.tensor(shares).repeat_interleave(2)
    found = label_loss(logits, labels, **options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


CLS = torch.tensor([[1.0, 0.0, -1.0]])
DIST = torch.tensor([[0.0, 2.0, 0.0]])
TEACHER = torch.tensor([[3.0, 1.0, 0.0]])


def distilled(
    batch: Batch, *, has_token: bool = True, **settings: Any
) -> tuple[float, float]:
    """The loss of a batch, whose logits are the hand-computed ones, and the agreement."""
    teacher: Any = {"weights": "runs/teacher"}
    values = DistillationSettings.model_validate({"teacher": teacher, **settings})
    made: Any = Distillation(values, seed=0)
    made.teacher = SimpleNamespace(logits=lambda images: TEACHER.expand(len(images), 3))
    engine: Any = SimpleNamespace(
        known_outputs=("heads",) if has_token else (),
        forward=lambda images, output: (
            CLS.expand(len(images), 3),
            DIST.expand(len(images), 3),
        ),
        logits=lambda images: DIST.expand(len(images), 3),
    )
    return made.loss(engine, batch).item(), made.recorded[
        "train/teacher_agreement"
    ].item()


def test_each_head_learns_from_its_own_target() -> None:
    """Labels are mixed and smoothed, the teacher's are not. Numbers are computed by hand."""
    batch = Batch(torch.zeros(2, 3, 4, 4), torch.tensor([1, 1]), torch.ones(2))
    loss, agreement = distilled(batch)
    assert (
        loss == pytest.approx(0.5 * 1.407606 + 0.5 * 2.239545, abs=1e-6)
        and agreement == 0
    )
    soft, _ = distilled(batch, kind="soft", alpha=0.1, tau=3.0)
    assert soft == pytest.approx(0.9 * 1.407606 + 0.1 * 3 * 0.545280, abs=1e-6)
    one_head = 0.5 * label_loss(DIST, torch.tensor([1])) + 0.5 * hard_loss(
        DIST, TEACHER
    )
    assert distilled(batch, has_token=False)[0] == pytest.approx(one_head.item())
    mixing = {
        "mixed_labels": torch.tensor([2, 1]),
        "mix_lambda": torch.tensor([0.7, 0.7]),
    }
    mixed = Batch(
        torch.zeros(2, 3, 4, 4), torch.tensor([1, 2]), torch.ones(2), **mixing
    )
    options: Any = {
        "mixed_labels_B": mixed.mixed_labels,
        "mix_lambda_B": mixed.mix_lambda,
    }
    labelled = label_loss(
        CLS.expand(2, 3), mixed.labels, smoothing=0.1, **options
    ).item()
    found, _ = distilled(mixed, label_smoothing=0.1)
    assert found == pytest.approx(0.5 * labelled + 0.5 * 2.239545, abs=1e-6)


# ---- the teacher ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network() -> Any:
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=CLASSES)
    model.train()(
        torch.randn(8, 3, 64, 64)
    )  # statistics that differ from the first ones
    return model.eval()


def opened(
    path: Path,
    *,
    num_classes: int = CLASSES,
    classes: tuple[str, ...] | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> Teacher:
    chosen = TeacherSettings.model_validate(
        {"model": NAME, "weights": str(path), **settings}
    )
    return open_teacher(
        **chosen.model_dump(),
        classes=classes or tuple(map(str, range(num_classes))),
        world=WORLD,
        engine=EngineSettings.model_validate(engine or {}),
    )


@pytest.fixture
def safetensors(network: Any, tmp_path: Path) -> Path:
    save_file(network.state_dict(), tmp_path / "teacher.safetensors")
    return tmp_path / "teacher.safetensors"


def images(size: int) -> torch.Tensor:
    return torch.randint(
        0,
        256,
        (2, 3, size, size),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )


def test_logits_are_timms_on_the_teachers_own_pixels(
    network: Any, safetensors: Path
) -> None:
    pixels = images(160)
    config = network.pretrained_cfg
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    expected = network((pixels / 255 - mean) / std)
    found = opened(safetensors).logits(pixels)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_teachers_classes_are_matched_by_name(
    network: Any, safetensors: Path
) -> None:
    names = ("ant", "bee", "cod", "dog", "eel")
    (safetensors.parent / "classes.json").write_text(json.dumps(names))
    pixels, order = images(160), (3, 1, 0, 4, 2)
    same, other = (
        opened(safetensors, classes=tuple(names[label] for label in labels))
        for labels in (range(5), order)
    )
    assert torch.equal(other.logits(pixels), same.logits(pixels)[:, list(order)])
    assert (same.messages, other.messages) == (
        (),
        ("the teacher's classes are matched by name",),
    )
    for classes, message in (
        (
            ("ant", "bee", "cod", "dog", "owl"),
            "does not predict 1 of 5 classes, such as 'owl'",
        ),
        (tuple("01234"), "does not predict 5 of 5 classes"),
        (names[:4], "predicts 5 classes, but the label map has 4"),
    ):
        with pytest.raises(UserError, match=message):
            opened(safetensors, classes=classes)
    (safetensors.parent / "classes.json").unlink()
    assert (
        opened(safetensors)
        .messages[0]
        .endswith("by position, since neither side has names")
    )
    with pytest.raises(UserError, match="outputs are unknown"):
        opened(safetensors, classes=names)


def test_images_are_resized_to_the_teachers_size(safetensors: Path) -> None:
    teacher = opened(safetensors, image_size=64)
    seen = []
    teacher.model.network.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
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
    before = {
        name: value.clone()
        for name, value in teacher.model.network.state_dict().items()
    }
    logits = teacher.logits(images(64).float())
    assert logits.dtype == torch.float32 and not logits.requires_grad
    assert teacher.model.dtype == torch.bfloat16  # the run's
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
        assert (
            all(block._compiled_call_impl is not None for block in network.blocks)
            == is_compiled
        )
    with pytest.raises(UserError, match="predicts 5 classes, but the label map has 7"):
        opened(path, model="test_vit", num_classes=7)
    with pytest.raises(UserError, match="timm cannot run test_vit on images of 65 px"):
        opened(path, model="test_vit", image_size=65)
