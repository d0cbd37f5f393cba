"""SimCLR: its costs, refusals and loss. Trainings with it: test_reference."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml

from pretrain.objectives import contrast
from pretrain.objectives.simclr import Simclr, SimclrSettings
from pretrain.run import PretrainRun
from tests.support.tables import every, refused, rows
from vitscale.objectives.objective import Supervised, SupervisedSettings
from vitscale.runs.training import training_plan
from vitscale.training.session import build_model

RUN = yaml.safe_load("""
name: x
data: {path: s, global_batch: 8, views: [{name: global, count: 2}]}
model: {width: 16, depth: 1, num_heads: 2, mlp_width: 24, patch_size: 4, image_size: 16}
optim: {lr: 0.001}
schedule: {steps: 10}
objective: {name: simclr, projection_width: 10}
""")


def test_costs_are_those_of_both_views():
    run = PretrainRun.model_validate(RUN)
    objective = run.make_objective()
    arch = run.model.resolved(num_classes=0)
    model = build_model(run, objective, arch)
    counts = [parameter.numel() for parameter in model.parameters()]
    assert objective.num_parameters(arch) == sum(counts)

    # Dense layers of 16 x 16 and 16 x 10, forward once and backward twice, two operations each.
    plain = Supervised(SupervisedSettings(), seed=0)
    head = 3 * 2 * (16 * 16 + 16 * 10)
    encoder = plain.train_flops_per_image(arch)
    assert objective.train_flops_per_image(arch) == 2 * (encoder + head)


# Two single views are two views; what only one objective reads is refused for the others.
@rows("""
- [section, changed, problem]
- [data, {views: [{name: a}, {name: b}]}, null]
- [data, {views: [{name: a, image_size: 16}, {name: b}]}, null]
- [data, {views: []}, data.views]
- [data, {views: [{name: a}]}, data.views]
- [data, {views: [{name: a, count: 3}]}, data.views]
- [data, {views: [{name: a}, {name: a}]}, data.views]
- [data, {views: [{name: a}, {name: b, image_size: 8}]}, data.views]
- [data, {mixing: {mixup_alpha: 0.8}}, data.mixing]
- [data, {repeats: 2}, data.repeats]
- [data, {views: [{name: a, count: 2, crop_area: [0.9, 0.1]}]}, data.views.0.crop_area]
- [objective, {name: mae}, data.views]
- [objective, {name: supervised}, data.views]
""")
def test_views_that_do_not_fit_are_refused(section, changed, problem):
    values = changed if section == "objective" else RUN[section] | changed
    run = PretrainRun.model_validate(RUN | {section: values})
    expected = [] if problem is None else [problem]
    # MAE has conflicts of its own with this model.
    keys = [key for key, _ in run.problems() if not key.startswith("model.")]
    assert keys == expected


# ---- loss ----------------------------------------------------------------------------------------


def test_loss_and_accuracy_are_those_of_the_paper(world):
    """Of bf16 projections, too: at a low temperature rounding a cosine is a tenth of the loss."""
    projected_NE = torch.randn(12, 3, generator=torch.Generator().manual_seed(5))
    # Partners are alike, so that some are nearest, and some are not.
    projected_NE[1::2] = projected_NE[::2] + projected_NE[1::2] / 2
    rounded_NE = projected_NE.bfloat16()
    loss, accuracy = contrast.contrastive_loss(rounded_NE, temperature=0.05)

    # Equation 1 in fp64, neighbours being partners.
    unit_NE = F.normalize(rounded_NE.double(), dim=1)
    losses = []
    num_right = 0
    for own in range(12):
        others = [other for other in range(12) if other != own]
        cosines = {other: (unit_NE[own] @ unit_NE[other]).item() for other in others}
        total = sum(math.exp(cosine / 0.05) for cosine in cosines.values())
        losses.append(math.log(total) - cosines[own ^ 1] / 0.05)
        num_right += max(others, key=cosines.get) == own ^ 1
    assert loss.item() == pytest.approx(sum(losses) / 12, rel=1e-5)
    assert accuracy.item() == pytest.approx(num_right / 12)
    # At 0 or 1 another count might be right by chance.
    assert 0 < num_right < 12


@every(names="a, ab")
def test_partners_are_of_one_image_whether_in_one_view_or_in_two(world, names):
    """Two views of count 1 are joined image by image, not one behind the other."""
    # Both views of an image are alike, and at right angles to those of the others.
    images_B13SS = torch.eye(4, 12).view(4, 1, 3, 2, 2)
    view = images_B13SS.expand(-1, 2 // len(names), -1, -1, -1)
    batch = SimpleNamespace(views=dict.fromkeys(names, view))
    engine = SimpleNamespace(forward=lambda images, _: images.flatten(1))
    objective = Simclr(SimclrSettings(temperature=0.5), seed=0)
    loss = objective.loss(engine, batch)

    # Seven others: a cosine of 1 with the partner, and of 0 with six.
    assert objective.recorded["train/view_accuracy"].item() == 1.0
    assert loss.item() == pytest.approx(math.log(math.exp(2) + 6) - 2, rel=1e-5)


# ---- which images are compared -------------------------------------------------------------------


# Of each case the ranks, images of a global batch, of a micro-batch and of an epoch.
@rows("""
- [ranks, batch, micro_batch, num_samples, key]
- [1, 8, 8, 8, null]
- [2, 8, 4, 100, null]
- [1, 8, 4, 100, engine.max_micro_batch]
- [2, 8, 3, 100, engine.max_micro_batch]
- [1, 1, 8, 100, data.global_batch]
- [1, 8, 8, 7, data.global_batch]
""")
def test_the_images_of_a_global_batch_come_together(
    ranks, batch, micro_batch, num_samples, key
):
    """One image has no negatives, and a batch beyond the epoch has an image twice."""
    values = dict(RUN) | {"engine": {"max_micro_batch": micro_batch}}
    values["data"] = RUN["data"] | {"global_batch": batch}
    run = PretrainRun.model_validate(values)
    if key is None:
        training_plan(run, world_size=ranks, num_samples=num_samples)
        return
    with refused("compares") as caught:
        training_plan(run, world_size=ranks, num_samples=num_samples)
    assert caught.value.where == key
