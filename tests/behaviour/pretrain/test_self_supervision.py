"""DINO, iBOT, DINOv2 and LeJEPA: parts against values by hand and slow versions, masks, costs.

Trainings with them: test_reference.
"""

import decimal
import math
import weakref
from decimal import Decimal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pretrain.objectives.block_masks import draw_masks
from pretrain.objectives.isotropy import GlobalNorm, Projector, sigreg, spread
from pretrain.objectives.self_distillation import (
    Head,
    Scores,
    entropies,
    koleo,
    patch_loss,
    sinkhorn,
    view_loss,
)
from pretrain.run import PretrainRun
from tests.support.engine.small_models import randomized
from tests.support.tables import every, refused, rows
from vitscale.models.costs import memory_estimate
from vitscale.models.registry import MODELS
from vitscale.optim.optimizers import optimizer_groups
from vitscale.optim.settings import EmaSettings, OptimSettings
from vitscale.training.session import build_model

# One rank; what several add: test_reference.
pytestmark = pytest.mark.usefixtures("world")

RUN = yaml.safe_load("""
name: x
data:
  path: s
  global_batch: 8
  views: [{name: global, count: 2}, {name: local, count: 3, image_size: 16}]
model:
  {width: 48, depth: 2, num_heads: 2, mlp_width: 96, patch_size: 4, image_size: 32,
   num_registers: 2}
optim: {lr: 0.001, ema: {decay: 0.9}}
schedule: {steps: 10}
""")
DINO = yaml.safe_load("""
{name: dino, num_prototypes: 96, hidden_width: 40, bottleneck_width: 24}
""")
PARTS = {"patch_weight": 1, "koleo_weight": 0.1, "has_patch_head": True}
LEJEPA = yaml.safe_load("{name: lejepa, hidden_width: 40, projection_width: 12}")
TIMM = yaml.safe_load("""
name: timm
model: vit_tiny_patch16_224
image_size: 32
arguments: {patch_size: 4, embed_dim: 48, depth: 2, num_heads: 2, dynamic_img_size: true}
""")


def on_circle(*degrees):
    angles = torch.tensor(degrees) * math.pi / 180
    # Lengths do not matter.
    lengths = torch.arange(1, len(degrees) + 1)[:, None]
    return lengths * torch.stack([angles.cos(), angles.sin()], dim=1)


# ---- values by hand ------------------------------------------------------------------------------


def test_sinkhorn_gives_each_prototype_the_same_weight():
    scores = torch.tensor(
        [[0.2, 0.0, 0.0], [0.1, 0.1, 0.0], [0.2, 0.0, 0.1], [0.3, 0.1, 0.0]]
    )
    answers = sinkhorn(scores, temperature=0.1)
    # Computed in fp64 with the numbers of rows and prototypes that the paper divides by.
    assert answers[0].tolist() == pytest.approx(
        [0.414605, 0.256029, 0.329366], abs=1e-6
    )
    assert answers.sum(dim=1).tolist() == pytest.approx([1] * 4)


@every(temperature="1, 0.04, 0.01, 0.001", scale="1, 20")
def test_sinkhorn_is_exact_at_any_temperature(temperature, scale):
    """fp32 holds exp() up to 88; at .001 some answers are beyond what fp64 holds, too."""
    random = torch.Generator().manual_seed(1)
    scores = F.normalize(torch.randn(6, 9, generator=random), dim=1) * scale
    # A prototype that is the nearest of none, and two images that are the same.
    scores[:, 4] = -scale
    scores[3] = scores[2]

    # In turn rows and columns of numbers of 400 digits.
    with decimal.localcontext(prec=400, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN):
        shares = [
            [(Decimal(score) / Decimal(temperature)).exp() for score in row]
            for row in scores.tolist()
        ]
        for _ in range(3):
            columns = [sum(column) for column in zip(*shares, strict=True)]
            shares = [
                [share / column for share, column in zip(row, columns, strict=True)]
                for row in shares
            ]
            shares = [[share / sum(row) for share in row] for row in shares]
        right = torch.tensor([[float(share) for share in row] for row in shares])

    answers = sinkhorn(scores, temperature=temperature)
    # What fp32 rounds of a score grows as the temperature falls.
    rounded = 1e-6 * scale / temperature
    torch.testing.assert_close(answers, right, rtol=rounded, atol=1e-6 + rounded / 100)


def test_the_loss_of_views_leaves_out_the_view_itself():
    """Pairs one by one, in fp64; of one pair the value is known."""
    teacher = (torch.tensor([0.1, 0.2, 0.0]) / 0.05).softmax(dim=0)
    students = torch.tensor([[5.0, -3, 1], [0.2, 0.1, 0.0]]).expand(1, 2, 3)
    answers = torch.stack([teacher, torch.zeros(3)])[None]
    # The second answer is empty: only the first one counts, against the second view.
    loss = 2 * view_loss(students, answers, temperature=0.1)
    assert loss.item() == pytest.approx(1.306172, abs=1e-5)

    random = torch.Generator().manual_seed(0)
    students = torch.randn(4, 5, 7, generator=random)
    # With two global views, and with three.
    for num_global in (2, 3):
        answers = torch.randn(4, num_global, 7, generator=random).softmax(dim=2)
        terms = [
            -(
                answers[image, one].double()
                * students[image, other].double().log_softmax(0)
            )
            for image in range(4)
            for one in range(num_global)
            for other in range(5)
            if one != other
        ]
        right = torch.stack(terms).sum(dim=1).mean().item()
        loss = view_loss(students, answers, temperature=1).item()
        assert loss == pytest.approx(right)


def test_the_loss_of_patches_is_a_mean_of_views():
    masked = torch.tensor(
        [[True, True, True, False], [False] * 4, [True] + [False] * 3]
    )
    students = torch.zeros(4, 8)
    # Three patches of the first view are answered by one prototype each; ln 8 are lost of each.
    answers = F.one_hot(torch.tensor([0, 1, 2, 3]), 8).float()
    loss = patch_loss(students, answers, masked, temperature=0.1)
    assert loss.item() == pytest.approx(2 / 3 * math.log(8))


def test_koleo_is_the_distance_to_the_nearest():
    assert koleo(on_circle(0, 60, 180)).item() == pytest.approx(-0.183102, abs=1e-6)


def test_sigreg_is_the_integral_of_the_paper():
    ends = torch.tensor([[[1.0], [-1.0]]])
    assert sigreg(ends, torch.ones(1, 1)).item() == pytest.approx(0.218714, abs=1e-6)
    # In the limit of N the statistic of N collapsed values is N times a constant.
    nothing = sigreg(torch.zeros(2, 50, 3), torch.eye(3)).item()
    assert nothing == pytest.approx(
        50 * sigreg(torch.zeros(1, 1, 3), torch.eye(3)).item()
    )


def test_meters_at_their_ends():
    alike = torch.full((6, 4), 0.25)
    chosen = torch.eye(4)
    collapsed = chosen[[1] * 6]
    # Answers that say nothing, that use all prototypes, and that are all one.
    for answers, of_each, of_mean in ((alike, 1, 1), (chosen, 0, 1), (collapsed, 0, 0)):
        values = entropies(answers)
        assert values["train/teacher_entropy"].item() == pytest.approx(
            of_each, abs=1e-6
        )
        assert values["train/mean_entropy"].item() == pytest.approx(of_mean, abs=1e-6)
    assert spread(on_circle(30, 30, 30)).item() == pytest.approx(0, abs=1e-6)
    assert spread(on_circle(0, 120, 240)).item() == pytest.approx(1, abs=1e-6)
    # Between them: the mean of two directions is as long as the cosine of half their angle.
    assert spread(on_circle(0, 60)).item() == pytest.approx(1 - 3 / 4)


@rows("""
- [spread, of_each, of_mean, sigreg, warns]
- [0.5, 0.9, 0.99, 0, false]
- [0.06, 0.71, 0.71, 0, true]
- [0.001, 0.5, 0.9, 0, true]
- [0.5, 1.0, 1.0, 0, true]
- [0.5, null, null, 0.6, false]
- [0.5, null, null, 0.95, true]
""")
def test_a_collapse_is_named(spread, of_each, of_mean, sigreg, warns):
    """Answers that are all one, features that are, and answers that say nothing."""
    means = {"train/spread": spread, "train/sigreg_share": sigreg}
    if of_each is not None:
        means |= {"train/teacher_entropy": of_each, "train/mean_entropy": of_mean}
    _, objective, _, _ = opened(DINO)
    warning = objective.warning(means) or ""
    assert warning.startswith("collapsing") == warns


def test_a_head_is_that_of_dinos_code():
    """Layers of torch, the last one with its weight norm, whose lengths are 1."""
    settings = SimpleNamespace(hidden_width=40, bottleneck_width=24, num_prototypes=96)
    torch.manual_seed(0)
    head = Head(48, settings)
    linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 4
    # Its start: normal with a deviation of 0.02, biases of zero.
    for layer in linear:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert layer.bias is None or not layer.bias.any()

    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    first, second, third, prototypes = linear
    last = nn.utils.parametrizations.weight_norm(nn.Linear(24, 96, bias=False))
    with torch.no_grad():
        last.parametrizations.weight.original0.fill_(1)
        last.parametrizations.weight.original1.copy_(prototypes.weight)
    mlp = nn.Sequential(first, nn.GELU(), second, nn.GELU(), third)
    features = torch.randn(5, 48)
    right = last(F.normalize(mlp(features), p=2, dim=-1))
    torch.testing.assert_close(head(features), right)


def test_a_projector_is_that_of_lejepas_code():
    """Two layers with torch's batch norm and ReLU, then a layer alone."""
    torch.manual_seed(0)
    projector = Projector([48, 40, 40, 12])
    with torch.no_grad():
        for parameter in projector.parameters():
            parameter.copy_(torch.randn_like(parameter))
    layers = []
    for width in (48, 40):
        layers.append(nn.Linear(width, 40, bias=False))
        layers += [nn.BatchNorm1d(40), nn.ReLU()]
    right = nn.Sequential(*layers, nn.Linear(40, 12))
    with torch.no_grad():
        pairs = zip(right.parameters(), projector.parameters(), strict=True)
        for theirs, ours in pairs:
            theirs.copy_(ours)

    features = torch.randn(9, 48)
    found = projector(lambda images, output: images, features)
    torch.testing.assert_close(found, right(features), atol=1e-4, rtol=1e-4)


def test_the_norm_of_the_projector_is_batch_norm():
    norm = GlobalNorm(5)
    other = torch.nn.BatchNorm1d(5)
    with torch.no_grad():
        for parameter in (*norm.parameters(), *other.parameters()):
            parameter.copy_(torch.linspace(-1, 2, 5))
    rows_NX = torch.randn(9, 5) * 3 + 2
    torch.testing.assert_close(norm(rows_NX), other(rows_NX))


def test_curves_are_half_a_cosine():
    ema = EmaSettings(decay=0.8, final_decay=1, warmup=False)
    kept = [ema.decay_at(step, 10) for step in (1, 6, 11)]
    assert kept == pytest.approx([0.8, 0.9, 1])
    optim = OptimSettings(lr=1, weight_decay=0.04, final_weight_decay=0.4)
    factors = [optim.decay_factor(step, 10) for step in (0, 5, 10)]
    assert factors == pytest.approx([1, 5.5, 10])


# ---- masks ---------------------------------------------------------------------------------------


def masks_of(positions, **changes):
    options = {"masked_views": 0.5, "shares": (0.1, 0.5), "seed": 3} | changes
    masked_NL = draw_masks(positions, num_views=2, grid=(14, 14), **options)
    return masked_NL.reshape(len(positions), 2, 14, 14)


def test_half_of_the_views_are_masked_by_a_tenth_to_a_half():
    masked = masks_of(np.arange(400)).sum(axis=(2, 3))
    # Exactly one view of each image, and not always the same.
    assert ((masked > 0).sum(axis=1) == 1).all()
    assert 150 < (masked[:, 0] > 0).sum() < 250

    shares = masked.max(axis=1) / 196
    assert shares.max() <= 0.5 + 0.5 / 196
    # Of a uniform share the mean is 0.3, and blocks fill nearly all of it.
    assert 0.27 < shares.mean() < 0.31
    assert shares.min() < 0.12
    assert shares.max() > 0.48


def test_masks_are_blocks():
    """A masked patch has far more masked neighbours than by chance."""
    masked = masks_of(np.arange(100), shares=(0.3, 0.3))
    rows_RC = masked[masked.any(axis=(2, 3))]
    beside = (rows_RC[:, :, 1:] & rows_RC[:, :, :-1]).sum() / rows_RC[:, :, 1:].sum()
    assert beside > 0.6


def test_a_mask_depends_on_its_position_alone():
    together = masks_of(np.arange(40, 60), masked_views=0.3)
    # Of 40 views 12: exact over a batch.
    assert together.any(axis=(2, 3)).sum() == 12
    for number in range(20):
        alone = masks_of(np.array([40 + number]), masked_views=0.3)
        assert np.array_equal(together[number], alone[0])
    together = masks_of(np.arange(40, 48))
    assert not np.array_equal(together, masks_of(np.arange(40, 48), seed=4))


def test_an_image_of_few_patches_has_one_masked():
    masked_NL = draw_masks(
        np.arange(9),
        num_views=1,
        grid=(1, 2),
        masked_views=1,
        shares=(0.1, 0.1),
        seed=0,
    )
    assert (masked_NL.sum(axis=1) == 1).all()


# ---- costs ---------------------------------------------------------------------------------------


def opened(objective, **changed):
    run = PretrainRun.model_validate(RUN | {"objective": objective} | changed)
    assert not list(run.problems())
    arch = run.model.resolved(num_classes=0)
    built = run.make_objective()
    return run, built, arch, build_model(run, built, arch)


def engine_of(model):
    """An engine without an average: the teacher is the student."""

    def answer(pixels, output, **inputs):
        return model(pixels.float(), output=output, **inputs)

    return SimpleNamespace(forward=answer, teacher=torch.no_grad()(answer))


def test_views_stay_with_their_image():
    """The loss of a batch is the mean of those of its images, of two global and three local views,
    which are named together or one by one."""
    _, objective, _, model = opened(DINO)
    randomized(model)
    random = torch.Generator().manual_seed(0)
    global_BVCSS = torch.randn(4, 2, 3, 32, 32, generator=random)
    local_BVCSS = torch.randn(4, 3, 3, 16, 16, generator=random)

    def loss_of(**views):
        model.objective.view_center.zero_()
        batch = SimpleNamespace(views=views, positions=np.arange(4))
        return objective.loss(engine_of(model), batch).item()

    of_each = [
        loss_of(
            **{"global": global_BVCSS[number, None]}, local=local_BVCSS[number, None]
        )
        for number in range(4)
    ]
    right = pytest.approx(sum(of_each) / 4, rel=1e-5)
    assert max(of_each) > 1.01 * min(of_each)
    assert loss_of(**{"global": global_BVCSS}, local=local_BVCSS) == right
    named = {
        "one": global_BVCSS[:, :1],
        "local_a": local_BVCSS[:, :2],
        "other": global_BVCSS[:, 1:],
        "local_b": local_BVCSS[:, 2:],
    }
    assert loss_of(**named) == right


OBJECTIVES = {"dino": DINO, "all parts": DINO | PARTS, "lejepa": LEJEPA}


@every(name=OBJECTIVES, family="vit, timm")
def test_costs_are_those_counted(name, family):
    """Forward and backward passes of the student, and the teacher's, by torch's counter."""
    changed = {"model": TIMM} if family == "timm" else {}
    _, objective, arch, model = opened(OBJECTIVES[name], **changed)
    counts = [parameter.numel() for parameter in model.parameters()]
    assert objective.num_parameters(arch) == sum(counts)

    global_BVCSS = torch.randint(0, 256, (8, 2, 3, 32, 32), dtype=torch.uint8)
    batch = SimpleNamespace(
        images=global_BVCSS[:, 0],
        views={"global": global_BVCSS, "local": torch.randn(8, 3, 3, 16, 16)},
        positions=np.arange(8),
    )
    # torch does not count attention in its fused kernel for CPUs.
    plain = sdpa_kernel(SDPBackend.MATH)
    with plain, FlopCounterMode(display=False) as counter:
        objective.loss(engine_of(model), batch).backward()
    counted = counter.get_total_flops() / 8
    assert objective.train_flops_per_image(arch) == pytest.approx(counted, rel=0.03)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as they live."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        outputs = operation(*args, **(kwargs or {}))
        given = {storage_of(tensor) for tensor in tensors_in([args, kwargs])}
        for tensor in tensors_in(outputs):
            key = storage_of(tensor)
            # A view, or a result that was written into an input, is nothing new.
            if key in given or key in self.alive:
                continue
            storage = tensor.untyped_storage()
            num_bytes = storage.nbytes()
            self.now += num_bytes
            self.alive[key] = weakref.ref(storage, partial(self.free, key, num_bytes))
        self.peak = max(self.peak, self.now)
        return outputs

    def free(self, key, num_bytes, _):
        del self.alive[key]
        self.now -= num_bytes


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


def tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


MASKS = {"masked_views": 1, "masked_patches": [0.3, 0.3]}
PEAKS = {
    "supervised": {"name": "supervised"},
    "lejepa": {"name": "lejepa", "hidden_width": 512, "num_directions": 300},
    "scores": DINO | {"num_prototypes": 1000},
    "prototypes": DINO | {"num_prototypes": 3000, "bottleneck_width": 256},
    "all parts": DINO | PARTS | MASKS | {"num_prototypes": 700},
}


@every(name=PEAKS)
def test_the_peak_of_memory_is_that_counted(name):
    """What a step in bf16 needs beside weights and gradients, counted operation by operation."""
    model = {"width": 96, "depth": 8, "num_heads": 3, "mlp_width": 384}
    changed = {"model": RUN["model"] | model}
    classes = 0
    if name == "supervised":
        changed["data"] = {"path": "s", "global_batch": 8}
        classes = 7
    run = PretrainRun.model_validate(RUN | {"objective": PEAKS[name]} | changed)
    arch = run.model.resolved(num_classes=classes)
    objective = run.make_objective()
    model = build_model(run, objective, arch)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
        parameter.grad = torch.zeros_like(parameter)

    def answer(pixels, output, **inputs):
        return model((pixels / 255).bfloat16(), output=output, **inputs)

    engine = SimpleNamespace(forward=answer, teacher=torch.no_grad()(answer))
    views = {
        "global": torch.randint(0, 256, (8, 2, 3, 32, 32), dtype=torch.uint8),
        "local": torch.randint(0, 256, (8, 3, 3, 16, 16), dtype=torch.uint8),
    }
    images = views["global"][:, 0]
    batch = SimpleNamespace(images=images, views=views, positions=np.arange(8))
    with LiveBytes() as live:
        if name == "supervised":
            logits = model((images / 255).bfloat16())
            F.cross_entropy(logits.float(), torch.arange(8) % 7).backward()
        else:
            objective.loss(engine, batch).backward()

    options = {"precision": "bf16", "activation_checkpointing": False}
    estimate = 8 * objective.activation_bytes_per_image(arch, **options)
    estimate += objective.loss_bytes(arch, precision="bf16", micro_batch=8)
    assert estimate == pytest.approx(live.peak, rel=0.03)


def test_the_memory_of_a_teacher_is_counted():
    """A copy in the precision of the forward pass, whole on each rank."""
    _, objective, arch, model = opened(DINO)
    options = {
        "zero_stage": 3,
        "world_size": 4,
        "precision": "bf16",
        "micro_batch": 2,
        "activation_checkpointing": False,
        "optimizer_bytes": 12,
    }
    with_teacher = memory_estimate(arch, costs=objective, **options).parameters
    objective.has_teacher = False
    without = memory_estimate(arch, costs=objective, **options).parameters
    count = sum(parameter.numel() for parameter in model.parameters())
    assert with_teacher - without == 2 * count


# ---- what is refused -----------------------------------------------------------------------------


@rows("""
- [section, changed, problem]
- [data, {}, null]
- [data, {views: [{name: global}, {name: other}]}, null]
- [data, {views: [{name: global}]}, data.views]
- [data, {views: [{name: global, count: 2}, {name: local, image_size: 64}]}, data.views]
- [data, {views: [{name: global, count: 2}, {name: local, image_size: 18}]}, data.views]
- [data, {views: [{name: g, count: 2}, {name: local}, {name: local_b, image_size: 8}]}, data.views]
- [data, {views: [{name: global, count: 2, image_size: 16}]}, data.views]
- [optim, {ema: null}, optim.ema]
- [optim, {final_weight_decay: 0.4}, optim.final_weight_decay]
- [objective, {view_weight: 0}, objective.view_weight]
- [objective, {has_patch_head: true}, objective.has_patch_head]
- [objective, {masked_views: 0.3}, objective.masked_views]
- [objective, {first_temperature: 0.05}, objective.first_temperature]
- [objective, {first_temperature: 0.05, temperature_steps: 3}, null]
- [objective, {masked_patches: [0.5, 0.1], patch_weight: 1}, objective.masked_patches]
- [model, {num_classes: 5}, model.num_classes]
""")
def test_one_error_before_the_first_step(section, changed, problem):
    values = RUN | {"objective": DINO}
    values = values | {section: values[section] | changed}
    run = PretrainRun.model_validate(values)
    keys = [key for key, _ in run.problems()]
    assert keys == ([] if problem is None else [problem])


def test_models_of_timm_have_rates_by_layers():
    """What an objective adds is decayed as own layers are, and has the rate of the head."""
    run, objective, arch, model = opened(DINO | PARTS, model=TIMM)
    family = MODELS["timm"].load()
    groups = optimizer_groups(
        model.named_parameters(),
        settings=run.optim.model_copy(update={"layer_decay": 0.5, "weight_decay": 0.1}),
        decayed=family.decayed,
        layers_above=lambda name: family.layers_above(name, arch),
        part_of=objective.part_of,
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for group in groups:
        for parameter in group["params"]:
            rates = (group["lr_scale"], group["weight_decay"], group["part"])
            found[names[parameter]] = rates
    assert found["objective.head.prototypes.weight"] == (1, 0.1, "prototypes")
    assert found["objective.mask_token"] == (1, 0, "")
    scale, _, part = found["patch_embed.proj.weight"]
    assert scale <= 0.25
    assert part == "patch embedding"


def test_the_centre_stays_where_an_update_is_skipped():
    _, _, _, model = opened(DINO)
    module = model.objective
    good = torch.randn(4, 96)
    none = good[:0]
    module.answers(Scores(none, good, none), temperature=0.1)
    center_K = module.view_center.clone()
    torch.testing.assert_close(center_K, 0.1 * good.mean(dim=0))
    bad = good.clone()
    bad[2, 5] = math.inf
    module.answers(Scores(none, bad, none), temperature=0.1)
    assert torch.equal(module.view_center, center_K)


def test_views_and_patches_have_centres_of_their_own():
    """iBOT, equation 2; each is used before it moves, by a tenth of the way to the mean."""
    _, _, _, model = opened(DINO | PARTS)
    module = model.objective
    random = torch.Generator().manual_seed(0)
    centers = {"view_center": torch.zeros(96), "patch_center": torch.zeros(96)}
    for _ in range(3):
        views = torch.randn(4, 96, generator=random) + 1
        patches = 2 * torch.randn(7, 96, generator=random)
        found = module.answers(Scores(views[:0], views, patches), temperature=0.1)
        for name, scores, answers in (
            ("view_center", views, found.views_NK),
            ("patch_center", patches, found.patches_MK),
        ):
            right = ((scores - centers[name]) / 0.1).softmax(dim=1)
            torch.testing.assert_close(answers, right)
            centers[name] = 0.9 * centers[name] + 0.1 * scores.mean(dim=0)
            torch.testing.assert_close(module.get_buffer(name), centers[name])


@rows("""
- [model, side, message]
- [test_vit, 32, null]
- [test_convnext, 32, null]
- [test_convnext, 16, "Kernel size can't be greater"]
- [vit_tiny_patch16_224, 32, "Input height"]
- [swin_tiny_patch4_window7_224, 32, "Input height"]
""")
def test_models_of_timm_say_which_sizes_they_take(model, side, message):
    """Some have an argument for it, some need none, and some have none."""
    views = [{"name": "global", "count": 2}, {"name": "local", "image_size": side}]
    changed = {
        "model": {"name": "timm", "model": model, "image_size": 64},
        "data": RUN["data"] | {"views": views},
    }
    if message is None:
        opened(LEJEPA, **changed)
        return
    with refused(f"(?s)no views of {side} px.*{message}.*dynamic_img_size"):
        opened(LEJEPA, **changed)


def test_prototypes_and_patches_have_rates_of_their_own():
    steps = {"frozen_prototype_steps": 3, "patch_embed_rate": 0.2}
    _, objective, _, model = opened(DINO | PARTS | steps)
    for step, frozen in ((0, True), (2, True), (3, False)):
        objective.step = step
        for name, _ in model.named_parameters():
            factor = objective.rate_factor(objective.part_of(name))
            right = 1.0
            if "prototypes" in name and frozen:
                right = 0.0
            if "patch_embed" in name:
                right = 0.2
            assert factor == right, name
