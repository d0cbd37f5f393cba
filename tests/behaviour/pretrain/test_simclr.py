"""SimCLR: what it costs and what it refuses. Its loss and gradients: test_reference."""

import yaml

from pretrain.run import PretrainRun
from tests.support.tables import rows
from vitscale.objectives.objective import Supervised, SupervisedSettings
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

    options = {"precision": "bf16", "activation_checkpointing": False}
    kept = plain.activation_bytes_per_image(arch, **options)
    assert objective.activation_bytes_per_image(arch, **options) == 2 * kept


# Two single views are two views; what only one objective reads is refused for the others.
@rows("""
- [section, changed, problem]
- [data, {views: [{name: a}, {name: b}]}, null]
- [data, {views: [{name: a, image_size: 16}, {name: b}]}, null]
- [data, {views: []}, data.views]
- [data, {views: [{name: a}]}, data.views]
- [data, {views: [{name: a, count: 3}]}, data.views]
- [data, {views: [{name: a}, {name: b, image_size: 8}]}, data.views]
- [data, {mixing: {mixup_alpha: 0.8}}, data.mixing]
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


def test_an_unknown_model_is_refused():
    run = PretrainRun.model_validate(
        RUN | {"model": {"name": "timm", "model": "test_vit", "image_size": 16}}
    )
    keys = [key for key, _ in run.problems()]
    assert "model.name" in keys
