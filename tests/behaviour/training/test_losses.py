"""Losses against slow formulas and numbers computed by hand; teachers from files and runs."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.support.engine.subjects import WORLD
from tests.support.reference_losses import supervised
from tests.support.reference_training import Sample
from tests.support.tables import every, refused
from vitscale.data.loader import Batch
from vitscale.engine.settings import EngineSettings
from vitscale.objectives.losses import hard_loss, label_loss
from vitscale.objectives.objective import (
    Distillation,
    DistillationSettings,
)
from vitscale.objectives.settings import TeacherSettings
from vitscale.objectives.teacher import open_teacher

NAME = "test_efficientnet"
CLASSES = 5


@every(shares=[None, (0.7, 0.6, 1.0, 0.0)], kind="softmax, sigmoid, bce")
def test_losses_equal_the_papers_formulas(kind, shares):
    """Of bf16 logits in fp32; with mixed labels too, of which some are equal or have no share."""
    # Near the bias of -10 or so that heads of a sigmoid start from.
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, 7, generator=random) - 6.9).bfloat16()
    labels = torch.tensor([0, 1, 3, 3, 1, 6, 2, 5])
    options = {"kind": kind}
    if kind != "bce":
        options["smoothing"] = 1e-2
    slow = supervised(**options, share_of=shares and (lambda pair: shares[pair]))
    sample = Sample(torch.empty(0), labels, np.arange(8))
    expected = slow(lambda pixels: logits, torch.zeros(8, 3, 4, 4), sample)

    # Images are mixed in pairs, each with the label of the other one.
    if shares is not None:
        options["mixed_labels_B"] = labels.view(4, 2).flip(1).flatten()
        options["mix_lambda_B"] = torch.tensor(shares).repeat_interleave(2)
    loss = label_loss(logits, labels, **options)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


# The logits of one image: of the two heads of the student, and of the teacher, which says class 0.
CLS = torch.tensor([[1.0, 0.0, -1.0]])
DIST = torch.tensor([[0.0, 2.0, 0.0]])
TEACHER = torch.tensor([[3.0, 1.0, 0.0]])


def distilled(
    labels=(1, 1),
    *,
    has_token=True,
    mixing=None,
    **settings,
):
    """The loss of two images, whose logits are the hand-computed ones, and the agreement."""
    teacher = {"weights": "runs/teacher"}
    values = DistillationSettings.model_validate({"teacher": teacher, **settings})

    # The student has both heads' logits, or those of its one head.
    objective = Distillation(values, seed=0)
    objective.teacher = SimpleNamespace(logits=lambda images: TEACHER.expand(2, 3))
    engine = SimpleNamespace(
        known_outputs=("heads",) if has_token else (),
        forward=lambda images, output: (CLS.expand(2, 3), DIST.expand(2, 3)),
        logits=lambda images: DIST.expand(2, 3),
    )
    images = torch.zeros(2, 3, 4, 4)
    batch = Batch(images, torch.tensor(labels), torch.ones(2), **mixing or {})
    loss = objective.loss(engine, batch)
    return loss.item(), objective.recorded["train/teacher_agreement"].item()


def test_each_head_learns_from_its_own_target():
    """Labels are mixed and smoothed, the teacher's are not. Numbers are computed by hand."""
    # Cross-entropy of CLS with label 1 is 1.407606, of DIST with the teacher's class 2.239545.
    loss, agreement = distilled()
    assert loss == pytest.approx(0.5 * 1.407606 + 0.5 * 2.239545, abs=1e-6)
    assert agreement == 0

    # The divergence at temperature 3 is 0.545280 / 3, and DeiT multiplies it by 3 ** 2.
    soft, _ = distilled(
        kind="soft",
        alpha=0.1,
        tau=3.0,
    )
    assert soft == pytest.approx(0.9 * 1.407606 + 0.1 * 3 * 0.545280, abs=1e-6)

    # Without a distillation token one head learns both.
    both = label_loss(DIST, torch.tensor([1])) + hard_loss(DIST, TEACHER)
    single, _ = distilled(has_token=False)
    assert single == pytest.approx(0.5 * both.item())

    others = torch.tensor([2, 1])
    shares = torch.tensor([0.7, 0.7])
    labelled = label_loss(
        CLS.expand(2, 3),
        torch.tensor([1, 2]),
        smoothing=0.1,
        mixed_labels_B=others,
        mix_lambda_B=shares,
    )
    mixed, _ = distilled(
        (1, 2),
        mixing={"mixed_labels": others, "mix_lambda": shares},
        label_smoothing=0.1,
    )
    assert mixed == pytest.approx(0.5 * labelled.item() + 0.5 * 2.239545, abs=1e-6)


# ---- the teacher ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=CLASSES)

    # A forward pass in training, so that statistics differ from the first ones.
    model.train()(torch.randn(8, 3, 64, 64))
    return model.eval()


def opened(
    path,
    *,
    classes="01234",
    engine=None,
    **settings,
):
    chosen = TeacherSettings.model_validate(
        {"model": NAME, "weights": str(path), **settings}
    )
    return open_teacher(
        chosen,
        classes=classes,
        world=WORLD,
        engine=EngineSettings.model_validate(engine or {}),
    )


@pytest.fixture
def safetensors(network, tmp_path):
    path = tmp_path / "teacher.safetensors"
    save_file(network.state_dict(), path)
    return path


def test_the_same_weights_under_another_name_are_another_teacher(tmp_path):
    """Its pixels differ, so a resumed run must refuse it."""
    path = tmp_path / "teacher.safetensors"
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5)
    save_file(network.state_dict(), path)
    first, second = (
        opened(path, model=name, image_size=32).frozen.fingerprint
        for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
    )
    assert first.split()[0] == second.split()[0]
    assert first != second


def images(size):
    random = torch.Generator().manual_seed(1)
    shape = (2, 3, size, size)
    return torch.randint(256, shape, dtype=torch.uint8, generator=random)


def test_logits_are_timms_on_the_teachers_own_pixels(network, safetensors):
    pixels = images(160)
    mean = torch.tensor(network.pretrained_cfg["mean"]).view(3, 1, 1)
    std = torch.tensor(network.pretrained_cfg["std"]).view(3, 1, 1)

    # The student's pixels are normalised in its own way, so a teacher gets levels.
    expected = network((pixels / 255 - mean) / std)
    logits = opened(safetensors).logits(pixels)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_teachers_classes_are_matched_by_name(network, safetensors):
    names = ("ant", "bee", "cod", "dog", "eel")
    listed = safetensors.with_name("classes.json")
    listed.write_text(json.dumps(names))
    same = opened(safetensors, classes=names)
    assert same.messages == ()

    # The shards' order of classes decides that of the logits.
    order = [3, 1, 0, 4, 2]
    other = opened(safetensors, classes=[names[label] for label in order])
    assert other.messages == ("the teacher's classes are matched by name",)
    pixels = images(160)
    assert torch.equal(other.logits(pixels), same.logits(pixels)[:, order])

    # A class that the teacher does not know, names on one side alone, and a teacher of more.
    for classes, message in (
        ((*names[:4], "owl"), "does not predict 1 of 5 classes, such as 'owl'"),
        ("01234", "does not predict 5 of 5 classes"),
        (names[:4], "predicts 5 classes, but the label map has 4"),
    ):
        with refused(message):
            opened(safetensors, classes=classes)

    # Without names on either side the order has to be the same.
    listed.unlink()
    (message,) = opened(safetensors).messages
    assert message.endswith("by position, since neither side has names")
    with refused("outputs are unknown"):
        opened(safetensors, classes=names)


def test_images_are_resized_to_the_teachers_size(safetensors):
    teacher = opened(safetensors, image_size=64)
    inputs = []
    teacher.frozen.model.network.register_forward_pre_hook(
        lambda _, arguments: inputs.append(arguments[0])
    )

    # Of one colour: borders that were filled up would show.
    flat = torch.full((2, 3, 32, 32), 200.0)
    teacher.logits(flat)
    assert inputs[0].shape == (2, 3, 64, 64)
    assert inputs[0].std(dim=(0, 2, 3)).max() < 1e-5
    assert (
        opened(safetensors).frozen.opened.arch.image_size == 160
    )  # timm's of this network


@every(size="48, 96")
def test_images_are_resized_as_pillow_does(safetensors, size):
    """Larger and smaller: bicubic over all pixels below it, and no level beyond 0 and 255."""
    teacher = opened(safetensors, image_size=64)
    inputs = []
    teacher.frozen.model.network.register_forward_pre_hook(
        lambda _, arguments: inputs.append(arguments[0])
    )
    # Black and white alone: bicubic would overshoot both.
    pixels = (images(size) > 127).to(torch.uint8) * 255
    teacher.logits(pixels)

    levels = []
    for channel in pixels.flatten(0, 1).numpy():
        image = Image.fromarray(channel.astype(np.float32))
        resized = image.resize((64, 64), Image.Resampling.BICUBIC)
        levels.append(np.asarray(resized).clip(0, 255))
    expected = torch.tensor(np.stack(levels)).view(2, 3, 64, 64)
    config = teacher.frozen.opened.preprocessing
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (config.mean, config.std)
    )
    torch.testing.assert_close(
        inputs[0], (expected / 255 - mean) / std, atol=1e-4, rtol=0
    )


def test_the_teacher_learns_nothing(safetensors):
    """No gradients, eval mode: BatchNorm's statistics stay; no draws from the run's state."""
    torch.manual_seed(3)
    random_state = torch.get_rng_state()
    teacher = opened(safetensors, image_size=64, engine={"precision": "bf16"})
    network = teacher.frozen.model.network
    weights = copy.deepcopy(network.state_dict())

    # A forward pass in training would move them.
    logits = teacher.logits(images(64).float())
    assert logits.dtype == torch.float32
    assert not logits.requires_grad
    assert teacher.frozen.model.dtype == torch.bfloat16  # the run's
    assert not any(parameter.requires_grad for parameter in network.parameters())
    for name, value in network.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_transformer_gets_positions_of_the_teachers_size(tmp_path):
    vit = timm.create_model("test_vit", num_classes=CLASSES)

    # Teachers are often published as files of torch.
    path = tmp_path / "vit.pth"
    torch.save(vit.state_dict(), path)
    teacher = opened(path, model="test_vit", image_size=64)
    assert teacher.logits(images(64)).shape == (2, CLASSES)

    # A teacher is compiled where the student is: it runs as often.
    compiled = opened(path, model="test_vit", engine={"compile": True})
    for each, is_compiled in ((teacher, False), (compiled, True)):
        for block in each.frozen.model.network.blocks:
            assert (block._compiled_call_impl is not None) == is_compiled

    # Neither needs a batch to be found.
    with refused("predicts 5 classes, but the label map has 7"):
        opened(path, model="test_vit", classes="0123456")
    with refused("timm cannot run test_vit on images of 65 px"):
        opened(path, model="test_vit", image_size=65)
