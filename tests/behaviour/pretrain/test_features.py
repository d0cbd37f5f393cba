"""Feature distillation: teachers against their own libraries, losses against slow formulas."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
import yaml
from blake3 import blake3
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.objectives.adapters import Adapters, class_loss, patch_loss
from pretrain.run import PretrainRun
from tests.support.engine.reference_cases import feature_teachers
from tests.support.engine.subjects import WORLD
from tests.support.levels import by_level
from tests.support.tables import every, refused, rows
from vitscale.engine.settings import EngineSettings
from vitscale.objectives.settings import TeacherSettings
from vitscale.objectives.teacher import open_feature_teacher, pooled_patches
from vitscale.training.session import build_model


def opened(path, *, model=None, image_size=None):
    settings = TeacherSettings(weights=str(path), model=model, image_size=image_size)
    return open_feature_teacher(
        settings,
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


# Size of images and grid of patches; the last one has none.
NETWORKS = yaml.safe_load("""
vit_tiny_patch16_224: [32, [2, 2]]
vit_tiny_patch16_dinov3_qkvb: [48, [3, 3]]
vit_small_patch14_reg4_dinov2: [42, [3, 3]]
vit_small_patch16_lingbot: [32, [2, 2]]
vit_base_patch14_reg1_tipsv2: [42, [3, 3]]
xcit_nano_12_p16_224: [32, [2, 2]]
test_efficientnet: [64, null]
""")
# Of 20 million parameters and more.
LARGE = {name for name in NETWORKS if "small" in name or "base" in name}


@every(name=by_level(NETWORKS, fast=NETWORKS.keys() - LARGE, slow=LARGE))
def test_features_are_timms(name, tmp_path):
    """With a head or without; models without patches give features alone."""
    size, grid = NETWORKS[name]
    arguments = {"global_pool": "token"} if "dinov3" in name else {}
    network = network_of(name, **arguments)
    path = tmp_path / "teacher.safetensors"
    save_file(network.state_dict(), path)
    teacher = opened(path, model=name, image_size=size)
    assert teacher.grid == (grid and tuple(grid))
    assert teacher.width == network.num_features

    # timm resamples the positions itself.
    if hasattr(network, "set_input_size"):
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


def test_features_are_transformers(tmp_path):
    """A folder of DINOv2 as it is published: no head, its own pixels, positions resampled."""
    config = transformers.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=7,
    )
    network = transformers.Dinov2Model(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    network.save_pretrained(tmp_path)
    teacher = opened(tmp_path, image_size=42)
    images = levels(42)
    pixels = normalized(images, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with torch.no_grad():
        tokens = network(pixels).last_hidden_state
    features, patches = teacher.features(images, patch_grid=(6, 6))
    torch.testing.assert_close(features, tokens[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(patches, tokens[:, 1:], atol=1e-5, rtol=1e-5)

    # Other weights in the same folder are another teacher.
    with torch.no_grad():
        next(network.parameters()).mul_(2)
    network.save_pretrained(tmp_path)
    other = opened(tmp_path, image_size=42).fingerprint
    assert other != teacher.fingerprint

    # So are the same weights with another configuration.
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"layer_norm_eps": 0.1}
    path.write_text(json.dumps(values))
    assert opened(tmp_path, image_size=42).fingerprint != other


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "teacher.safetensors"
    network = network_of("vit_tiny_patch16_224", img_size=64, num_classes=0)
    save_file(network.state_dict(), path)
    return path


@every(name="vit_tiny_patch16_224, test_efficientnet")
def test_an_image_has_the_same_bits_in_any_batch(name, tmp_path):
    """Also at another place in it."""
    path = tmp_path / "teacher.safetensors"
    save_file(network_of(name, num_classes=0).state_dict(), path)
    teacher = opened(path, model=name, image_size=64)
    grid = (3, 3) if teacher.grid else None
    images = levels(64, number=17)
    alone = teacher.features(images[5:6], patch_grid=grid)
    for size in (1, 3, 8, 17):
        last = images.roll(-6, 0)[-size:]
        together = teacher.features(last, patch_grid=grid)
        for one, many in zip(alone, together, strict=True):
            assert one is None or torch.equal(one[0], many[-1])


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


@every(grid=[(4, 2), (2, 4), (1, 1), None])
def test_a_students_patches_are_pooled_to_the_grid(grid):
    """Rows stay rows; without a grid all patches are compared."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 16, 3, generator=random)
    adapters = Adapters([5, 7], class_width=3, patch_width=3)
    predicted = adapters(
        lambda images, output: (tokens[:, 0], tokens), tokens, patch_grid=grid
    )
    rows, columns = grid or (4, 4)
    maps = tokens.unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    pooled = F.avg_pool2d(maps, (4 // rows, 4 // columns)).flatten(2).mT
    for number, (found, width) in enumerate(zip(predicted, (5, 7), strict=True)):
        # Each teacher has layers of its own.
        for layers, given, answer in (
            (adapters.classes, tokens[:, 0], found.class_BD),
            (adapters.patches, pooled, found.patches_BLD),
        ):
            right = given @ layers[number].weight.T + layers[number].bias
            assert right.shape[-1] == width
            torch.testing.assert_close(answer, right)


# ---- losses --------------------------------------------------------------------------------------


def test_losses_by_hand():
    """Lengths do not matter to the cosine; smooth L1 is a square below 1 and a line above."""
    student = torch.tensor([[[3.0, 0.0], [0.0, 0.5]]])
    teacher = torch.tensor([[[1.0, 0.0], [0.0, -1.0]]])
    assert class_loss(student, teacher).item() == pytest.approx((0 + 2) / 2)
    assert class_loss(student, 7 * student).item() == pytest.approx(0, abs=1e-6)
    distance = ((2 - 0.5) + (1.5 - 0.5)) / 4
    loss = patch_loss(student.bfloat16(), teacher)
    assert loss.item() == pytest.approx(0.9 * 1 + 0.1 * distance)


RUN = yaml.safe_load("""
name: x
data: {path: s, global_batch: 8}
model: {width: 48, depth: 2, num_heads: 2, mlp_width: 96, patch_size: 2, image_size: 8}
objective: {name: features, teachers: [{weights: a}, {weights: b}], patch_grid: [2, 1]}
optim: {lr: 0.001}
schedule: {steps: 10}
""")
TIMM = yaml.safe_load("""
name: timm
model: vit_tiny_patch16_224
image_size: 8
arguments: {patch_size: 2, embed_dim: 48, depth: 2, num_heads: 2}
""")


def built(objective=None, **changed):
    """An objective with two teachers of other widths and grids, and its model."""
    values = RUN | {"objective": RUN["objective"] | (objective or {})} | changed
    run = PretrainRun.model_validate(values)
    assert not list(run.problems())
    made = run.make_objective()
    made.teachers = feature_teachers(torch.device("cpu"))
    arch = run.model.resolved(num_classes=0)
    return made, arch, build_model(run, made, arch)


def engine_of(model):
    """An engine that computes in fp32 and normalises nothing."""
    forward = lambda pixels, output, **inputs: model(  # noqa: E731
        pixels.float(), output=output, **inputs
    )
    return SimpleNamespace(forward=forward)


@every(
    objective=[{}, {"patch_weight": 0, "patch_grid": None}, {"class_weight": 0}],
    family="vit, timm",
)
def test_costs_are_those_counted(objective, family):
    """Forward and backward passes of the student, forward ones of the teachers, by torch."""
    changed = {"model": TIMM} if family == "timm" else {}
    made, arch, model = built(objective, **changed)
    counts = [parameter.numel() for parameter in model.parameters()]
    assert made.num_parameters(arch) == sum(counts)
    networks = [teacher.frozen.model.network for teacher in made.teachers]
    frozen = [p.numel() for network in networks for p in network.parameters()]
    assert made.teacher_parameters(arch) == sum(frozen)

    # Eight images at a time are what a CPU takes anyway.
    batch = SimpleNamespace(images=levels(8, number=8), targets=())
    plain = sdpa_kernel(SDPBackend.MATH)
    with plain, FlopCounterMode(display=False) as counter:
        made.loss(engine_of(model), batch).backward()
    counted = counter.get_total_flops() / 8
    assert made.train_flops_per_image(arch) == pytest.approx(counted, rel=0.03)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


@every(
    objective=[
        {"class_weight": 0.3, "patch_weight": 2.0, "shares": [1, 3]},
        {"class_weight": 0.3, "patch_weight": 0, "patch_grid": None},
        {"class_weight": 0, "patch_weight": 2.0},
    ]
)
def test_metrics_are_means_over_teachers_and_the_loss_their_weighted_sum(objective):
    made, _, model = built(objective)
    images = levels(8, number=4)
    loss = made.loss(engine_of(model), SimpleNamespace(images=images, targets=()))
    shares = [share / sum(made.settings.shares) for share in made.settings.shares]
    students = engine_of(model).forward(images, "objective", patch_grid=(2, 1))
    expected = {"train/class_loss": 0.0, "train/patch_loss": 0.0}
    for teacher, student, share in zip(
        made.teachers, students, shares or (0.5, 0.5), strict=True
    ):
        class_BD, patches_BLD = teacher.features(images, patch_grid=(2, 1))
        if student.class_BD is not None:
            part = 1 - F.cosine_similarity(student.class_BD, class_BD).mean()
            expected["train/class_loss"] += share * part.item()
        if student.patches_BLD is not None:
            part = patch_loss(student.patches_BLD, patches_BLD)
            expected["train/patch_loss"] += share * part.item()

    expected = {name: value for name, value in expected.items() if value}
    found = {name: value.item() for name, value in made.recorded.items()}
    assert found == pytest.approx(expected, rel=1e-4)
    settings = made.settings
    total = settings.class_weight * expected.get("train/class_loss", 0)
    total += settings.patch_weight * expected.get("train/patch_loss", 0)
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_a_teacher_that_is_a_run_is_counted_before_it_is_opened(tmp_path):
    """Its config.yaml says all; without one a line says that the costs are missing."""
    made, arch, _ = built()
    for teacher, name in zip(made.teachers, "ab", strict=True):
        model = teacher.frozen.opened.arch.model_dump(exclude={"num_classes"})
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    runs = {"teachers": [{"weights": str(tmp_path / name)} for name in "ab"]}
    values = RUN | {"objective": RUN["objective"] | runs}
    planned = PretrainRun.model_validate(values).make_objective()
    for count in ("num_parameters", "teacher_parameters", "train_flops_per_image"):
        assert getattr(planned, count)(arch) == getattr(made, count)(arch)
    assert "costs" not in "".join(planned.notes())

    unknown = PretrainRun.model_validate(RUN).make_objective()
    assert [*unknown.notes()][1] == "from b, without the costs of teachers[1]"
    assert unknown.teacher_parameters(arch) == 0


# ---- what is refused -----------------------------------------------------------------------------


@rows("""
- [section, changed, problem]
- [objective, {}, null]
- [objective, {patch_grid: null}, null]
- [objective, {shares: [1, 3]}, null]
- [objective, {shares: [1]}, objective.shares]
- [objective, {class_weight: 0, patch_weight: 0, patch_grid: null}, objective.class_weight]
- [objective, {patch_weight: 0}, objective.patch_grid]
- [data, {views: [{name: global}]}, data.views]
- [model, {num_classes: 5}, model.num_classes]
""")
def test_one_error_before_the_start(section, changed, problem):
    values = RUN | {section: RUN[section] | changed}
    run = PretrainRun.model_validate(values)
    keys = [key for key, _ in run.problems()]
    assert keys == ([] if problem is None else [problem])


@rows("""
- [name, image_size, message]
- [null, null, "teacher.safetensors: cannot be read .No such file"]
- [test_efficientnet, 64, "has no square of patches"]
- [vit_tiny_patch16_224, 50, "teachers.0..image_size: 50 px is no multiple of the 16 px patch"]
""")
def test_a_teacher_that_does_not_fit_is_refused(name, image_size, message, tmp_path):
    path = tmp_path / "teacher.safetensors"
    teacher = {"weights": str(path), "model": name, "image_size": image_size}
    if name is not None:
        save_file(network_of(name, num_classes=0).state_dict(), path)
    values = RUN | {"objective": {"name": "features", "teachers": [teacher]}}
    made = PretrainRun.model_validate(values).make_objective()
    with refused(message):
        made.prepare(classes=(), world=WORLD, engine=EngineSettings())


def test_a_student_without_patches_is_refused():
    with refused("no patches that could be like a teacher's"):
        built(model={"name": "timm", "model": "test_convnext", "image_size": 32})
    # Its features are learned all the same.
    _, _, model = built(
        {"patch_weight": 0, "patch_grid": None},
        model={"name": "timm", "model": "test_convnext", "image_size": 32},
    )
    assert model.objective.classes[0].in_features == model.num_features


def test_a_resumed_run_needs_the_same_teacher(tiny):
    """What a checkpoint is compared by; the log says what the teacher costs."""
    teacher = {"weights": str(tiny), "model": "vit_tiny_patch16_224", "image_size": 64}
    values = RUN | {"objective": {"name": "features", "teachers": [teacher]}}
    made = PretrainRun.model_validate(values).make_objective()
    agreed = made.prepare(classes=(), world=WORLD, engine=EngineSettings())
    digest = blake3(tiny.read_bytes()).hexdigest()
    says = "as timm vit_tiny_patch16_224 at 64 px, mean (0.5, 0.5, 0.5), std (0.5, 0.5, 0.5)"
    assert agreed == {"teachers": [f"{digest} {says}"]}
    network = network_of("vit_tiny_patch16_224", img_size=64, num_classes=0)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert f"{count:,} parameters" in made.messages[0]


# ---- what one teacher is -------------------------------------------------------------------------


def test_the_same_weights_under_another_name_are_another_teacher(tiny):
    """Its pixels differ, so a resumed run and stored targets must refuse it."""
    teachers = [
        opened(tiny, model=name, image_size=64)
        for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
    ]
    first, second = (each.features(levels(64), patch_grid=None)[0] for each in teachers)
    assert not torch.allclose(first, second, atol=0.1)
    assert teachers[0].fingerprint != teachers[1].fingerprint


@every(name="vit_tiny_patch16_dinov3_qkvb, vit_tiny_patch16_224")
def test_published_dinov3_gives_its_class_token(name, tmp_path):
    """timm would give the mean of its patches, and does for other models that have no head."""
    network = network_of(name, num_classes=0)
    path = tmp_path / "teacher.safetensors"
    save_file(network.state_dict(), path)
    size = 48 if "dinov3" in name else 224
    teacher = opened(path, model=name, image_size=size)
    images = levels(size, number=1)
    config = network.pretrained_cfg
    with torch.no_grad():
        tokens = network.forward_features(
            normalized(images, config["mean"], config["std"])
        )
    features, _ = teacher.features(images, patch_grid=None)
    torch.testing.assert_close(features, tokens[:, 0], atol=1e-5, rtol=1e-5)


def test_shares_are_counted_with_stored_targets(tmp_path):
    stored = {"fingerprint": "a", "width": 4, "grid": [2, 1]}
    header = {"teachers": [stored], "precision": "fp32", "views": 1}
    header |= {"format_version": 1, "images": {}, "files": {"x": "y"}}
    (tmp_path / "targets.json").write_text(json.dumps(header))
    changed = {"teachers": [], "targets": str(tmp_path), "shares": [1, 3]}
    values = RUN | {"objective": RUN["objective"] | changed}
    made = PretrainRun.model_validate(values).make_objective()
    with refused("objective.shares.*2 of 1 teachers"):
        made.prepare(classes=(), world=WORLD, engine=EngineSettings())
