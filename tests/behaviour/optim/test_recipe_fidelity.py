"""Recipes equal the published numbers: published_recipes.yaml, beside this file."""

import json
from pathlib import Path

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from tests.support.tables import every, rows
from vitscale.config.loader import load_run_file, read_yaml
from vitscale.runs.training import training_plan

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RUN_TYPES = {"pretrain": PretrainRun, "finetune": FinetuneRun}


def recipe(name):
    """name: a file below configs/."""
    return load_run_file(RUN_TYPES, CONFIGS / f"{name}.yaml")


# Terms of the papers' tables that are one setting each.
PLAIN = dict(
    word.split("=")
    for word in """
    optimizer=optim.name moment=optim.momentum_dtype layer_decay=optim.layer_decay
    batch=data.global_batch lr=optim.lr decay=schedule.decay decay_from=schedule.decay_from
    final_lr=schedule.final_lr decay_mode=optim.weight_decay_mode dropout=model.dropout
    flip=data.horizontal_flip views=data.repeats clip=optim.clip_norm head_bias=model.head_bias
    head_std=model.head_std classes=model.num_classes px=model.image_size
    tanh_layer=model.representation_layer gelu=model.gelu eps=model.layer_norm_eps
    layer_scale=model.layer_scale init=model.weight_init
    """.split()
)


def resolved(run):
    """A recipe's values in the terms of the papers' tables."""
    data = run.data
    model = run.model
    optim = run.optim
    schedule = run.schedule
    plan = training_plan(run, world_size=1, num_samples=data.planned_num_samples or 0)

    # A term that is one setting is read as it is.
    values = {}
    for key, path in PLAIN.items():
        section, name = path.split(".")
        values[key] = getattr(getattr(run, section), name, None)

    def of(key):
        """None for what a model of timm has no key for."""
        return getattr(model, key, None)

    # AdamW scale: an independent decay is the coupled one times the peak.
    weight_decay = optim.weight_decay
    if optim.weight_decay_mode == "independent":
        weight_decay /= optim.lr
    values |= {
        "betas": optim.betas,
        "adam_eps": optim.eps,
        "drops_at": [round(share, 5) for share in schedule.drops_at],
        "length": schedule.epochs or schedule.steps,
        "warmup": schedule.warmup_epochs or schedule.warmup_steps,
        "weight_decay": round(weight_decay, 9),
        "drop_path": of("drop_path") and (model.drop_path, model.drop_path_by_depth),
        "crop": data.crop_area,
        "crop_law": (data.crop, *(round(ratio, 3) for ratio in data.crop_aspect)),
        "resampling": (data.interpolation, data.antialias),
        "pixels": (data.mean, data.std),
        "loss": getattr(run.objective, "loss", run.objective.name),
        "smoothing": getattr(run.objective, "label_smoothing", 0.0),
        "distilled": False,
        "mae": False,
        "preset": of("preset") or of("model"),
        "pool": (of("pool"), of("class_token"), of("pool_norm")),
        "positions": (of("positions"), of("position_init"), of("class_position")),
        "resized_by": run.position_embedding if run.stage == "finetune" else None,
        "evaluation": (data.eval_resize, data.eval_crop_fraction),
        "eval_filter": (
            data.eval_interpolation or data.interpolation,
            data.eval_antialias,
        ),
        "ema": optim.ema and not optim.ema.warmup and optim.ema.decay,
        "thousand_steps": round(plan.total_steps / 1000),
    }

    # Numbers without an effect are not of the recipe.
    if optim.name == "sgd":
        values |= {"betas": optim.momentum, "adam_eps": None}
    if data.crop == "plain":
        values["crop"] = "plain"
    if data.eval_resize == "squash":
        values["evaluation"] = "squash"

    objective = run.objective
    if objective.name == "distillation":
        teacher = objective.teacher
        values["distilled"] = (
            objective.kind,
            objective.alpha,
            teacher.model,
            teacher.image_size,
            model.distillation_token,
        )
    if objective.name == "mae":
        values["mae"] = list(objective.model_dump().values())[1:]
    return values | augmentation(data.augment, data.mixing)


def augmentation(augment, mixing):
    randaugment = augment.randaugment
    erasing = augment.erasing
    values = {
        "augment": "three" if augment.three_augment else "",
        "augment_filling": None,
        "erasing": erasing and (erasing.probability, erasing.mode),
        "mixing": mixing and (mixing.mixup_alpha, mixing.cutmix_alpha, mixing.mode),
    }
    if randaugment:
        values["augment"] = (
            randaugment.policy,
            randaugment.num_ops,
            randaugment.magnitude,
        )
        if randaugment.policy == "timm":
            values["augment_filling"] = (randaugment.fill, randaugment.interpolation)
    return values


def published(entry):
    """All keys of an entry of published_recipes.yaml."""
    keys = {}
    for base in entry.get("base", ()):
        keys |= published(TABLE["papers"][base])
    return keys | {key: value for key, value in entry.items() if key != "base"}


TABLE = read_yaml(
    Path(__file__).with_name("published_recipes.yaml").read_text(), name=""
).values
# No paper trains these.
NO_RECIPE = {
    *"cifar10/vit_tiny demo/pretrain demo/finetune digits/pretrain digits/finetune".split(),
    *"own distil".split(),
}


@every(name=TABLE["recipes"])
def test_recipe_resolves_to_the_published_numbers(name):
    # YAML has lists and no tuples.
    values = json.loads(json.dumps(resolved(recipe(name))))
    assert values == published(TABLE["recipes"][name])


def test_every_training_config_is_in_the_table():
    # A recipe that nobody compared with its paper would be as good as its author's memory.
    listed = {f"{name}.yaml" for name in TABLE["recipes"].keys() | NO_RECIPE}
    paths = {str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")}
    others = ("chains/", "data/", "eval/", "studies/", "self_supervised/")
    assert {path for path in paths if not path.startswith(others)} == listed


# Batch and views, prototypes, length and warm-up, peak rate, average, decay, drop path, and the
# global crops. By the papers and the authors' configurations; LeJEPA has no teacher, and features
# are those of the one named.
@rows("""
- [name, batch, views, head, length, peak, average, decay, drop_path, area]
- [dino_s16, 512, [1, 1, 8], 65536, [100, 10], 0.001, [0.996, 1], [0.04, 0.4], 0.1, 0.4]
- [ibot_b16, 1024, [1, 1, 10], 8192, [400, 10], 0.002, [0.996, 1], [0.04, 0.4], 0.1, 0.25]
- [dinov2_l16_in1k, 2048, [1, 1, 8], 65536, [125000, 12500], 0.00566, [0.992, 1], [0.04, 0.4],
   0.3, 0.32]
- [dinov2_l14_in22k, 3072, [1, 1, 8], 131072, [625000, 100000], 0.000346, [0.994, 1], [0.04, 0.2],
   0.4, 0.32]
# The branch FINO of dinov3: constant rate and decay; timm takes drop path as an argument.
- [continue_dinov2_l14, 768, [1, 1, 8], 65536, [25000, 3000], 0.00005, [0.994, 1], [0.04, null],
   0.1, 0.4]
- [continue_dinov3_l16, 768, [1, 1, 8], 65536, [25000, 3000], 0.00005, [0.994, 1], [0.04, null],
   0.1, 0.4]
- [lejepa_b16, 512, [1, 1, 6], 64, [300, 10], 0.0005, null, [0.05, null], 0, 0.3]
- [features_s16, 512, [1], vit_base_patch14_dinov2, [300, 5], 0.0005, null, [0.05, null], 0.1, 0.08]
""")
def test_recipes_without_labels_are_the_authors(
    name, batch, views, head, length, peak, average, decay, drop_path, area
):
    run = recipe(f"self_supervised/{name}")
    assert run.data.global_batch == batch
    all_views = run.data.all_views
    assert [view.count for view in all_views] == views
    assert {run.data.of_view(view).crop_area[0] for view in all_views[:2]} == {area}
    schedule = run.schedule
    warmup = schedule.warmup_epochs or schedule.warmup_steps
    assert [schedule.epochs or schedule.steps, warmup] == length
    optim = run.optim
    assert optim.lr == peak
    assert [optim.weight_decay, optim.final_weight_decay] == decay
    arguments = getattr(run.model, "arguments", {})
    assert (
        arguments.get("drop_path_rate", getattr(run.model, "drop_path", 0)) == drop_path
    )
    if name.startswith("continue"):
        stages = [schedule.freeze_backbone_steps, schedule.backbone_ramp_steps]
        assert [*stages, schedule.decay] == [10000, 1000, "constant"]
    objective = run.objective
    if objective.name == "features":
        assert [teacher.model for teacher in objective.teachers] == [head]
        assert (objective.class_weight, objective.patch_weight) == (1, 1)
        return
    if average is None:
        assert objective.projection_width == head
        return
    assert objective.num_prototypes == head
    assert [optim.ema.decay, optim.ema.final_decay] == average
    assert not optim.ema.warmup
