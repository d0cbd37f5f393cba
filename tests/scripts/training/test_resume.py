"""Trainings that are killed, stopped, hung or poisoned end with the bits of undisturbed ones.

Each case injects one fault at one known place into a real training, then runs the same command
again. The final state (weights, moments, average, counters, journal) must equal an uninterrupted
training's bit by bit. Left out: faults of files and folders (test_storage_faults), of every system
call of a save (test_checkpoint_faults), at random moments (test_kill_storm).
"""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from pretrain.run import OBJECTIVES as REGISTERED
from tests.behaviour.pretrain.test_objectives import NEEDED
from tests.support.corpora.image_corpus import encoded, prepare_here, run_of
from tests.support.levels import by_level
from tests.support.ranks.fault_runs import (
    INTERVAL,
    LOGGED,
    STEPS,
    VIT,
    FaultRuns,
    fault,
    micro_step,
    newest_step,
    output,
    wait_all,
    wait_and_end_others,
)
from tests.support.ranks.run_states import differences, journal_rows, read_state
from tests.support.tables import Values, every
from tests.support.waiting import PATIENCE_S
from vitscale.distributed.processes import free_port
from vitscale.objectives.objective import Objective

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow
HERE = socket.gethostname()

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


# Dropout is drawn per rank; augmented, mixed and masked images are not.
STILL = ("model.dropout=0",)
AUGMENTED = (
    "data.augment.erasing.probability=0.25",
    "data.mixing.cutmix_alpha=1",
    "data.mixing.mode=pair",
)
# What two ranks at ZeRO 1 began, and who goes on: ranks, ZeRO stage.
LAYOUTS = yaml.safe_load("""
- [supervised, 1, 0]
- [supervised, 4, 3]
- [supervised, 4, 2]
- [timm, 1, 3]
""")
LAYOUTS += [[name, 1, 0] for name in REGISTERED if name != "supervised"]


@slow
@pytest.mark.parametrize("name, num_ranks, stage", LAYOUTS)
def test_another_layout_goes_on_with_the_same_losses(
    fault_runs, tmp_path, name, num_ranks, stage
):
    settings, how = way(fault_runs, name)
    # The model of timm has no such settings.
    if name != "timm":
        settings += STILL
    if "data.mixing=null" not in settings:
        settings += AUGMENTED
    # In step 13; a batch whose images are compared is not accumulated.
    couples = name in REGISTERED and REGISTERED[name].couples
    nth = 13 if couples else micro_step(13)
    planted = {1: [fault("backward", nth, "kill")]}
    world = fault_runs.start(tmp_path, *settings, faults=planted, **how)
    assert wait_and_end_others(world)[1] == -signal.SIGKILL
    assert newest_step(tmp_path) >= INTERVAL
    there = (*settings, f"engine.zero_stage={stage}")
    ours = fault_runs.finish(tmp_path, *there, num_ranks=num_ranks, **how).journal
    expected = fault_runs.uninterrupted(*settings, **how).journal
    for row, right in zip(ours, expected, strict=True):
        assert row.keys() == right.keys()
        # Looser at the last step, whose row has the losses of an evaluation, too.
        rel = 1e-5
        if row["step"] == STEPS:
            rel = 1e-4
        for key, value in row.items():
            # Rounding may move one of 360 images across a border of classes.
            if key.endswith(("loss", "lr", "step", "grad_norm")):
                assert value == pytest.approx(right[key], rel=rel), (key, row)


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


@slow
@every(stage="finetune, pretrain")
def test_a_run_resumes_without_its_start(fault_runs, killed_copy, stage):
    source = killed_copy / "run"
    folder = killed_copy / "tuned"
    # The newest one is damaged, so the one before it is what is started from.
    newest = source / "checkpoints/step-00000015/rank-00000.safetensors"
    with open(newest, "ab") as file:
        file.write(b"x")
    settings = (f"init={source}", "schedule.steps=7")
    planted = {1: [fault("backward", micro_step(7), "lag and kill")]}
    ranks = fault_runs.start(folder, *settings, faults=planted, stage=stage)
    wait_and_end_others(ranks)
    text = output(folder)
    assert "skipping damaged checkpoint" in text
    start = source / "checkpoints/step-00000012"
    assert f"starting from {start}, step 12 of " in text

    # Its own checkpoint has all that it needs.
    source.rename(killed_copy / "moved")
    fault_runs.finish(folder, *settings, stage=stage)
    text = output(folder)
    assert f"resuming {folder / 'run'} at step 5\n" in text
    assert f": from {source}, resumed at step 5; " in text
    assert text.count("starting from") == 1


@slow
@every(name="supervised, dino")
def test_a_branch_is_the_run_that_never_branched(fault_runs, tmp_path, name):
    settings, how = way(fault_runs, name)
    settings += ("schedule.decay=constant", "schedule.final_lr=0", "checkpoint.keep=9")
    trunk = tmp_path / "trunk"
    fault_runs.finish(trunk, *settings, **how)
    short = (*settings, "schedule.steps=18", "schedule.cooldown_share=0.4")

    # The last step before the cool-down; the branch is killed in it, and its trunk is gone then.
    folder = tmp_path / "branch"
    branch = (*short, f"init={trunk / 'run'}@10")
    nth = 6 if REGISTERED[name].couples else micro_step(6)
    planted = {1: [fault("step", nth, "lag and kill")]}
    wait_and_end_others(fault_runs.start(folder, *branch, faults=planted, **how))
    assert newest_step(folder) >= 15
    trunk.rename(tmp_path / "moved")
    ours = fault_runs.finish(folder, *branch, **how)
    right = fault_runs.uninterrupted(*short, **how)
    first = ours.journal[0]["step"]
    assert first == 12
    later = [row for row in right.journal if row["step"] >= first]
    assert differences(ours, replace(right, journal=later)) == []

    text = output(folder)
    assert "settings other than those of the trunk:\n" in text
    assert f"a branch of {trunk / 'run'} at step 10\n" in text
    assert "no lines of steps" not in text
    # Another batch, and a step that is not kept.
    refused = {
        "data.global_batch=32": "global_batch: checkpoint 16, now 32",
        f"init={tmp_path / 'moved/run'}@11": "kept: 5, 10, ",
    }
    for change, message in refused.items():
        moved = (*short, f"init={tmp_path / 'moved/run'}@10", change)
        assert set(fault_runs.run(tmp_path / message[:4], *moved, **how)) == {2}
        assert message in output(tmp_path / message[:4])


# Objective -> exit code, and what is said. MAE needs none either, but the k-NN that evaluates it.
WITHOUT_LABELS = {
    "masked_patch_prediction": (0, "36 images of {shards}, no classes"),
    "supervised": (2, "supervised needs labels, but the shards of"),
    "mae": (2, "knn needs labels, but the shards of"),
}


@slow
def test_shards_without_labels(fault_runs, tmp_path):
    """They train where no label is needed, and are refused elsewhere."""
    images = tmp_path / "images"
    shards = tmp_path / "shards"
    images.mkdir()
    for number in range(40):
        content = encoded("PNG", seed=number, side=8)
        (images / f"{number}.png").write_bytes(content)
    source = {"holdout_fraction": 0.1}
    labels = {"values": "none"}
    prepare_here(run_of(images, shards, source=source, labels=labels))
    for name, (code, message) in WITHOUT_LABELS.items():
        folder = tmp_path / name
        settings = [*OBJECTIVES[name], "schedule.steps=5"]
        if code == 0:
            settings.append("evaluate=[]")
        ended = fault_runs.run(folder, *settings, shards=shards, num_ranks=1)
        text = output(folder)
        assert ended == [code], text
        assert message.format(shards=shards) in text
        assert "Traceback" not in text


# A save after a signal ends a log interval, which an uninterrupted training may not end there.
EVERY_STEP = "tracking.log_every_steps=1"
# Place, number of the call and signal by rank; exit codes; the committed step: the one after the
# signal's, since ranks agree in the background.
SIGNALS = yaml.safe_load("""
bursts on both ranks: [{0: &burst [batch, 13, burst], 1: *burst}, [75, 75], 8]
on one rank only: [{1: [backward, 15, SIGTERM]}, [75, 75], 9]
in a save: [{0: [write, 3, SIGUSR2]}, [75, 75], 11]
# Too late to stop anything: the run is finished.
in the last step: [{1: [backward, 47, burst]}, [0, 0], 24]
# Before a handler is installed, SIGTERM ends the process.
before training: [{1: [start, 1, SIGTERM]}, [-9, -15], 0]
""")


@every(
    case=by_level(
        SIGNALS,
        fast=["bursts on both ranks"],
        slow=SIGNALS.keys() - {"bursts on both ranks"},
    )
)
def test_stop_signals(fault_runs, tmp_path, case):
    faults, codes, step = SIGNALS[case]
    planted = {rank: [fault(*where)] for rank, where in faults.items()}
    # Ranks stop together; before they have met, the launcher must end the other one.
    grace_s = 30
    if case == "before training":
        grace_s = 0
    settings = ()
    if step % LOGGED:
        settings = (EVERY_STEP,)
    world = fault_runs.start(tmp_path, *settings, faults=planted)
    assert wait_and_end_others(world, grace_s=grace_s) == codes, output(tmp_path)

    # A signal during a save takes effect one or two steps later.
    latest = step
    if case == "in a save":
        latest += 2
    assert step <= newest_step(tmp_path) <= latest
    fault_runs.assert_resumes_exactly(tmp_path, *settings)


@slow
def test_loader_workers(fault_runs, tmp_path):
    """A killed one is named; all ignore the signals of a launcher."""
    planted = {1: [fault("batch", micro_step(7), "kill worker")]}
    world = fault_runs.start(tmp_path, faults=planted)
    assert wait_and_end_others(world, grace_s=10)[1] > 0
    assert "a loader worker died" in world[1].output()
    fault_runs.assert_resumes_exactly(tmp_path)

    # SLURM sends a stop to all processes: the rank decides when its workers are to end.
    signalled = [fault("batch", micro_step(7), "SIGTERM worker")]
    planted = {0: signalled, 1: signalled}
    assert fault_runs.run(tmp_path / "signals", faults=planted) == [0, 0]


# rank, fault, its exit code if it is certain. No launcher ends the other one.
LOST = yaml.safe_load("""
rank 1 stopped: [1, stop, -9]
rank 0 stopped: [0, stop, -9]
rank 1 hangs: [1, hang, null]
rank 1 killed: [1, kill, -9]
rank 0 crashes: [0, crash, -11]
# An exit code of 0 in the middle of training.
rank 0 leaves: [0, leave, 0]
""")


@every(
    case=by_level(LOST, fast=["rank 1 stopped"], slow=LOST.keys() - {"rank 1 stopped"})
)
def test_surviving_rank_ends_and_names_the_other(fault_runs, tmp_path, case):
    rank, do, code = LOST[case]
    place = "forward"
    reason = "sent no heartbeat"
    # Its heartbeats go on, so only the wait of the others shows it.
    if do == "hang":
        place = "batch"
        reason = "kept the others waiting"
    planted = {rank: [fault(place, micro_step(8), do)]}
    world = fault_runs.start(tmp_path, "engine.timeout_min=0.15", faults=planted)
    survivor = world[1 - rank]
    assert survivor.wait(timeout_s=PATIENCE_S) > 0
    assert f"rank {rank} on {HERE} has {reason}" in survivor.output()
    world[rank].send_signal(signal.SIGKILL)
    ended_with = wait_all(world)[rank]
    assert code is None or ended_with == code
    fault_runs.assert_resumes_exactly(tmp_path)


@slow
def test_updates_with_nan_are_skipped_and_named(fault_runs, tmp_path):
    planted = {1: [fault("forward", micro_step(8, number=1), "NaN")]}
    assert fault_runs.run(tmp_path, faults=planted) == [0, 0], output(tmp_path)
    text = output(tmp_path)
    assert "1 updates skipped" in text
    # With the samples somebody can look for the image that causes it.
    assert "on rank 1; samples '" in text
    state = read_state(tmp_path / "run")
    trained = [row for row in state.journal if "train/loss" in row]

    # At steps 4, 5, 8, 10, 12, 15, 16, 20 and 24.
    skipped = [row["train/skipped_steps"] for row in trained]
    assert skipped == [0] * 2 + [1] * 7
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())

    # A training that never recovers ends, instead of skipping updates for days.
    planted = {1: [fault("forward", "every", "NaN")]}
    assert fault_runs.run(tmp_path / "all", faults=planted) == [76, 76]
    text = output(tmp_path / "all")
    assert "10 updates in a row were skipped, the last at step 10" in text
    assert "samples of that step: '" in text


# Rank 0 of two joins, and waits for a second instead of minutes.
JOIN = """
from vitscale.distributed import processes, world
world.INIT_TIMEOUT_MIN = 0.02
def join():
    world.process_group(device='cpu', timeout_min=1, num_threads=1).__enter__()
processes.run_rank_script(join)
"""


def test_a_rank_that_never_starts_is_named(tmp_path):
    variables = yaml.safe_load("""
    RANK: "0"
    LOCAL_RANK: "0"
    WORLD_SIZE: "2"
    LOCAL_WORLD_SIZE: "2"
    MASTER_ADDR: 127.0.0.1
    """)
    variables["MASTER_PORT"] = str(free_port())
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "not all of 2 ranks started within 0.02 min; missing: 1" in done.stderr


ALL = "tensors: ema, exp_avg, exp_avg_sq, model"
# Parts of the state that a resume drops, or keys that ignore the position: what must differ.
# Without this the comparison of all tests here could be one that sees nothing.
DROPPED = {
    "weights": ALL,
    "second moments": ALL,
    "average of the weights": "tensors: ema",
    "step count of the optimiser": "progress optimizer_steps",
    "data position": ALL,
    "dropout and drop path key": ALL,
}


@slow
@every(mutant=DROPPED)
def test_dropped_state_is_noticed(fault_runs, killed_copy, mutant):
    ranks = fault_runs.start(killed_copy, mutant=mutant)
    assert wait_all(ranks) == [0, 0], ranks[0].output()
    ours = read_state(killed_copy / "run")
    lines = differences(ours, fault_runs.uninterrupted())
    assert any(DROPPED[mutant] in line for line in lines), lines
