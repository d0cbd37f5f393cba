"""Trainings that are killed, stopped, hung or poisoned end with the bits of undisturbed ones.

Each case injects one fault at one known place into a real training, then runs the same command
again. The final state (weights, moments, average, counters, journal) must equal an uninterrupted
training's bit by bit. Left out: faults of files and folders (test_storage_faults), of every system
call of a save (test_checkpoint_faults), at random moments (test_kill_storm).
"""

import signal

import pytest
import yaml

from pretrain.run import OBJECTIVES as REGISTERED
from tests.behaviour.pretrain.test_objectives import NEEDED
from tests.support.levels import by_level
from tests.support.ranks.fault_runs import (
    INTERVAL,
    STEPS,
    VIT,
    FaultRuns,
    fault,
    newest_step,
    output,
    wait_and_end_others,
)
from tests.support.ranks.run_states import journal_rows
from tests.support.tables import Values, every
from vitscale.objectives.objective import Objective

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow

# Of objectives without labels.
WITHOUT = ("evaluate=[{name: knn, max_bank_images: 100}]", "data.mixing=null")
TIMM = ("model.name=timm", "model.model=test_convnext", "model.image_size=32")
# Settings of each that is registered, so that a new one is tried, too.
OBJECTIVES: dict[str, tuple[str, ...]] = {}
for registered, objective in REGISTERED.items():
    OBJECTIVES[registered] = (f"objective.name={registered}",)
    OBJECTIVES[registered] += (*NEEDED.get(registered, ()),)
    if not objective.trains_classifier:
        OBJECTIVES[registered] += WITHOUT
# What all other tests train, and a model of timm.
OBJECTIVES["supervised"] = ()
OBJECTIVES["timm"] = ("optim.layer_decay=0.9",)


def way(
    runs: FaultRuns, name: str, *, zero_stage: int = 1
) -> tuple[tuple[str, ...], Values]:
    """Settings of an objective, or of fine-tuning, and how `FaultRuns` starts it."""
    if name == "fine-tuning":
        return (f"init={runs.undisturbed()}",), {"stage": "finetune"}
    settings = OBJECTIVES[name]
    # ZeRO 1 is the default: named, it would be another undisturbed training.
    if zero_stage != 1:
        settings += (f"engine.zero_stage={zero_stage}",)
    if name == "distillation":
        settings += (f"objective.teacher.weights={runs.undisturbed()}",)
    if name == "features":
        settings += (f"objective.teachers=[{{weights: {runs.undisturbed()}}}]",)
    model = VIT
    if name == "timm":
        model = TIMM
    return settings, {"model": model}


# What is trained, at which ZeRO stage; the rank, the place and number of the call that kills it,
# and its step. There are two micro-batches a step, each with a forward, backward, step and batch.
KILLS = yaml.safe_load("""
in the backward pass: [supervised, 1, 1, backward, 15, 8]
in the forward pass: [supervised, 3, 0, forward, 15, 8]
before an update: [mae, 0, 1, step, 18, 9]
waiting for data: [distillation, 3, 1, batch, 24, 12]
# Whose images are compared is not accumulated.
while others wait for its images: [simclr, 2, 1, backward, 9, 9]
while others wait for its sums: [lejepa, 1, 1, backward, 8, 8]
before the teacher moves: [dino, 3, 0, step, 9, 9]
after a teacher has answered: [features, 2, 0, backward, 15, 8]
at a log line: [masked_patch_prediction, 2, 0, log, 3, 8]
# The place counts the 24 batches of the training, too.
in an evaluation: [timm, 1, 1, evaluated batch, 28, 12]
# Around a save: the state is taken, files are written, the commit, the old ones are removed.
at start: [supervised, 1, 0, start, 1, 1]
before a save: [fine-tuning, 1, 0, export, 2, 10]
before its tensor file: [supervised, 1, 1, write, 2, 10]
before a commit: [supervised, 3, 0, rename, 2, 10]
before the best one is saved: [supervised, 1, 0, export, 3, 12]
before retention: [supervised, 2, 0, prune, 4, 15]
in the last save: [supervised, 0, 0, rename, 6, 24]
""")
# Of one undisturbed training of each, which other tests then need not repeat.
ZERO_STAGES = {name: stage for name, stage, *_ in KILLS.values()}


@every(
    case=by_level(
        KILLS,
        fast={"in the backward pass"},
        slow=KILLS.keys() - {"in the backward pass", "at start", "before retention"},
    )
)
def test_killed_rank(fault_runs, tmp_path, case):
    name, stage, rank, place, nth, step = KILLS[case]
    settings, how = way(fault_runs, name, zero_stage=stage)
    planted = {rank: [fault(place, nth, "kill")]}
    world = fault_runs.start(tmp_path, *settings, faults=planted, **how)
    # By the fault, and not as one of the others.
    assert wait_and_end_others(world)[rank] == -signal.SIGKILL, output(tmp_path)

    # The save before the last one begun was certainly committed.
    least = max(0, (step - 1) // INTERVAL * INTERVAL - INTERVAL)
    assert least <= newest_step(tmp_path) <= step
    fault_runs.assert_resumes_exactly(tmp_path, *settings, **how)


@slow
def test_killed_again_while_resuming(fault_runs, killed_copy):
    for rank, place in enumerate(("start", "restore")):
        world = fault_runs.start(killed_copy, faults={rank: [fault(place, 1, "kill")]})
        assert wait_and_end_others(world)[rank] == -signal.SIGKILL
    fault_runs.assert_resumes_exactly(killed_copy)


@slow
@every(name=OBJECTIVES)
def test_finetuning_starts_from_the_trunk_of_each_objective(fault_runs, tmp_path, name):
    settings, how = way(fault_runs, name, zero_stage=ZERO_STAGES[name])
    source = fault_runs.undisturbed(*settings, **how)
    if name == "distillation":
        # Each head alone and both together, and the parts of the loss.
        logged = {key for row in journal_rows(source) for key in row}
        heads = {f"val/{head}_top1" for head in "cls dist softmax ema_cls".split()}
        losses = {"train/label_loss", "train/teacher_loss", "train/teacher_agreement"}
        assert heads | losses <= logged

    # The model must be the one of the weights, with a distillation token for example.
    model = [word for word in settings if word.startswith("model.")]
    short = ("schedule.steps=2", "schedule.warmup_steps=1", f"init={source}", *model)
    how["stage"] = "finetune"
    assert fault_runs.run(tmp_path, *short, **how) == [0, 0]
    text = output(tmp_path)
    start = f"starting from {source}/checkpoints/step-{STEPS:08d}, step {STEPS}"
    assert start in text
    # What only the objective trained is left out, and said to be: a decoder, for example.
    extends = REGISTERED.get(name, Objective).extend_model is not Objective.extend_model
    assert ("left out" in text) == extends
    assert (" objective." in text) == extends
