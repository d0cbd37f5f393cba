"""Every recipe in configs/ plans at full size, and takes two steps when its model is shrunk.

All options of a recipe stay as they are but sizes, lengths and the machine. One recipe of each
shape takes its steps in bf16, as on a GPU; without one bf16 is slow, so the others take them in
fp32. Fine-tuning starts from the shrunk run that the recipe's card names; a teacher is a shrunk run
of ours.
"""

import math
import re
from functools import cache

import pytest

from finetune.run import FinetuneRun
from launch.planning.dry_run import plan_rows
from pretrain.run import PretrainRun
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.ranks.fault_runs import wait_all
from tests.support.ranks.run_states import journal_rows
from tests.support.ranks.warm_ranks import ROOT
from vitscale.config.loader import load_run_file

CONFIGS = ROOT / "configs"
RUN_TYPES = {"pretrain": PretrainRun, "finetune": FinetuneRun}
# The last one has the model of its weights (tests/behaviour/finetune/test_own_images.py).
NOT_TRAINING = ("chains", "data", "eval", "studies", "own.yaml")
# A small model of timm that takes the arguments of the recipe's.
SMALL_IN_TIMM = {
    "vit_base_r50_s16_224": "vit_tiny_r_s16_p8_224",
    "resnetv2_50x1_bit": "test_convnext",
    "vit_large_patch16_dinov3": "vit_small_patch16_dinov3",
}
# The card's command names the run folder of another recipe.
INIT = re.compile(r"\binit=runs/(\S+)")
AT_ONCE = 2
# Distillations and fine-tuning need a run that came before.
TURNS = ("pretrain", "distillation", "finetune")
TEACHER = "deit/s16"
# Their length depends on shards that are made first.
UNPLANNED = {"digits/pretrain", "distil"}

SHORT = """
    schedule.epochs=null schedule.steps=2 schedule.warmup_epochs=0 schedule.warmup_steps=1
    checkpoint.every_steps=2 checkpoint.keep=1 data.global_batch=8 data.num_workers=0
    data.val_split=test model.num_classes=null engine.device=auto engine.num_threads=1
    engine.max_micro_batch=4 tracking.uri=null tracking.log_every_steps=1
""".split()


Run = PretrainRun | FinetuneRun


@cache
def recipes() -> dict[str, Run]:
    """Every run of configs/ that trains, by its path without the suffix."""
    runs = {}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        name = path.relative_to(CONFIGS)
        if name.parts[0] not in NOT_TRAINING:
            runs[str(name.with_suffix(""))] = load_run_file(RUN_TYPES, path)
    return runs


def shrunk(run: Run) -> list[str]:
    """Overrides that make the model tiny, at twice or thrice its patch a side."""
    arch = run.model.resolved(num_classes=10)
    # Fine-tuning has another grid than what it starts from, as in the papers.
    side = {"pretrain": 2, "finetune": 3}[run.stage]
    others = []
    if run.data.views:
        # Images that are compared come at once, and local views have a patch.
        patch_size = getattr(arch, "patch_size", 16)
        local = f"{{name: local, count: 2, image_size: {patch_size}}}"
        others = [
            f"data.views=[{{name: global, count: 2}}, {local}]",
            "engine.max_micro_batch=8",
            "objective.hidden_width=16",
        ]
    if run.objective.name == "dino":
        others.append("objective.num_prototypes=32")
    # In place of published weights, which a test must not fetch, random ones.
    if run.stage == "pretrain":
        others.append("init=null")
    if run.model.name == "timm":
        small = SMALL_IN_TIMM[run.model.model]
        return [*others, f"model.model={small}", "model.image_size=32"]
    return [
        *others,
        "model.width=32",
        "model.depth=2",
        "model.num_heads=2",
        "model.mlp_width=32",
        f"model.image_size={side * arch.patch_size}",
    ]


@cache
def in_bf16() -> set[str]:
    """The first recipe of each combination of what computes in the precision of the run."""
    first = {}
    for name, run in recipes().items():
        shape = (
            run.stage,
            run.objective.name,
            run.engine.zero_stage,
            run.optim.name,
            run.optim.momentum_dtype,
            run.model.name,
            # Of a ViT; a model of timm has neither.
            getattr(run.model, "positions", None),
            getattr(run.model, "pool", None),
        )
        first.setdefault(shape, name)
    return {*first.values()}


def turn_of(run: Run) -> str:
    if run.stage == "pretrain" and run.objective.name in ("distillation", "features"):
        return "distillation"
    return run.stage


def start_of(name: str) -> str | None:
    """The recipe that a fine-tuning starts from."""
    if recipes()[name].stage == "pretrain":
        return None
    header = (CONFIGS / f"{name}.yaml").read_text().partition("\nbase:")[0]
    match = INIT.search(header)
    assert match, f"{name}: the card's command has no init=runs/NAME"
    # Exactly one: the command of a card must work for whoever types it.
    (start,) = [other for other, run in recipes().items() if run.name == match[1]]
    return start


def test_every_recipe_plans_at_full_size():
    planned = set()
    for name, run in recipes().items():
        if "steps" in dict(plan_rows(run)):
            planned.add(name)
    assert planned == recipes().keys() - UNPLANNED


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_every_recipe_takes_two_steps(warm_starter, tmp_path):
    shards = tmp_path / "shards"
    make_shard_folder(shards, lengths={"train": (16,), "test": (8,)})

    def command(name):
        run = recipes()[name]
        words = [
            ROOT / run.stage / "main.py",
            "--config",
            CONFIGS / f"{name}.yaml",
            *SHORT,
            *shrunk(run),
            f"data.path={shards}",
            f"output={tmp_path / name}",
        ]
        precision = "bf16" if name in in_bf16() else "fp32"
        words.append(f"engine.precision={precision}")
        start = start_of(name)
        if start is not None:
            words.append(f"init={tmp_path / start}")
        # In place of published weights, which a test must not fetch.
        if run.objective.name == "distillation":
            words += [
                "objective.teacher.model=null",
                "objective.teacher.image_size=null",
                f"objective.teacher.weights={tmp_path / TEACHER}",
            ]
        if run.objective.name == "features":
            words.append(f"objective.teachers=[{{weights: {tmp_path / TEACHER}}}]")
        return words

    def fault_of(name, rank, code):
        """What is wrong with a training, or None."""
        rows = journal_rows(tmp_path / name)
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        if code == 0 and len(losses) == 2 and all(map(math.isfinite, losses)):
            return None
        return f"{name}: {code}, {losses}, {rank.output()[-2000:]}"

    # All that fail, since a change of a setting often breaks more than one recipe.
    faults = []
    for turn in TURNS:
        names = [name for name, run in recipes().items() if turn_of(run) == turn]
        for first in range(0, len(names), AT_ONCE):
            group = names[first : first + AT_ONCE]
            ranks = []
            for name in group:
                folder = tmp_path / name
                folder.mkdir(parents=True)
                ranks += warm_starter.start(command(name), num_ranks=1, folder=folder)
            for ended in zip(group, ranks, wait_all(ranks), strict=True):
                faults.append(fault_of(*ended))
    faults = [*filter(None, faults)]
    assert not faults, "\n\n".join(faults)
