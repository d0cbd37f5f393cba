"""Chains: their runs, sweeps on the command line, what is done, and what is submitted."""

import json
import os
from pathlib import Path

import pytest
import timm
import torch
import yaml
from blake3 import blake3

from launch.chains.executors import chain_states, check_unchanged, describe_chain
from launch.chains.load import Chain, ChainStep, _sweeps, launch_command, load_chain
from launch.chains.settings import ChainRun
from launch.jobs.preparation import prepare_job
from tests.contract.tree import ROOT
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.light_checkpoints import light_save
from tests.support.tables import refused, rows
from vitscale.config.loader import load_run, run_to_yaml
from vitscale.distributed.events import record_start
from vitscale.models.settings import TimmSettings

PRETRAIN = """\
stage: pretrain
name: base
data: {path: shards, global_batch: 10, planned_num_samples: 1000}
model: {image_size: 8, patch_size: 4, width: 16, depth: 1, num_heads: 2, mlp_width: 32,
  num_classes: 5}
optim: {lr: 0.001}
schedule: {steps: 20}
"""
FINETUNE = PRETRAIN.replace("stage: pretrain", "stage: finetune").replace("20", "12")
DATA = """\
stage: data_prep
output: shards
source: {path: images}
"""
EVALUATE = """\
stage: evaluate
name: evaluation
init: none
data: {path: none}
evaluate: [{name: classification}]
"""
CHAIN = """\
stage: chain
name: small
stages:
  - {name: pretrain, config: pretrain.yaml, inputs: {data.path: shards}}
  - {name: shards, config: data.yaml, overrides: [launch.num_tasks=2]}
  - name: finetune
    config: finetune.yaml
    inputs: {data.path: shards, init: pretrain}
    sweep: {optim.lr: [0.01, 0.001], seed: [3, 4]}
  - {name: evaluate, config: evaluate.yaml, inputs: {data.path: shards, init: finetune}}
"""
SWEEP = "    sweep: {optim.lr: [0.01, 0.001], seed: [3, 4]}\n"


def write_chain(folder, text=CHAIN):
    """The chain's file beside its run files. Run files are found from the current folder."""
    files = {
        "data": DATA,
        "pretrain": PRETRAIN,
        "finetune": FINETUNE,
        "evaluate": EVALUATE,
    }
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(content)
    path = folder / "chain.yaml"
    path.write_text(text)
    return path


def chain_of(path, *overrides, cluster="local") -> Chain:
    run = load_run(ChainRun, path, overrides=overrides).run
    return load_chain(run, cluster=cluster)


def steps_of(chain: Chain, stage) -> list[ChainStep]:
    return [step for step in chain.steps if step.stage == stage]


def write_training(step: ChainStep, *, at):
    """A run folder with a checkpoint."""
    step.folder.mkdir(parents=True, exist_ok=True)
    (step.folder / "config.yaml").write_text(run_to_yaml(step.run))
    record_start(step.folder, first_step=0, total_steps=20)
    light_save(step.folder / "checkpoints", step=at)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_chain(tmp_path)
    return tmp_path


# ---- runs -------------------------------------------------------------------------------------


def test_a_stage_has_a_run_for_each_combination_and_each_input(folder):
    chain = chain_of(write_chain(folder))

    # The order of the steps is one in which they can run.
    before = set()
    for step in chain.steps:
        assert set(step.needs) <= before
        before.add(step.name)
    assert len(before) == 10

    tuned = steps_of(chain, "finetune")
    evaluations = steps_of(chain, "evaluate")
    names = [f"lr-{lr}_seed-{seed}" for lr in (0.01, 0.001) for seed in (3, 4)]
    assert [str(step.folder) for step in tuned] == [
        f"runs/small/finetune/{name}" for name in names
    ]
    # An evaluation of a swept run has that run's name, and needs it alone.
    assert [str(step.folder) for step in evaluations] == [
        f"runs/small/evaluate/{name}" for name in names
    ]
    assert [step.needs for step in evaluations] == [
        ("shards", step.name) for step in tuned
    ]

    last = tuned[-1].run
    assert last.optim.lr == 0.001
    assert last.seed == 4
    assert last.init == "runs/small/pretrain"
    assert last.data.path == "shards"

    # In MLflow, tables are grouped by what the chain has varied.
    assert last.tracking.tags == {
        "chain": "small",
        "chain.stage": "finetune",
        "chain.finetune.optim.lr": "0.001",
        "chain.finetune.seed": "4",
    }


def test_a_transfer_has_the_seed_and_the_tags_of_its_pretraining(folder):
    text = CHAIN.replace(
        "inputs: {data.path: shards}}",
        "inputs: {data.path: shards}, sweep: {data.first_percent: [1, 10], seed: [7]}}",
    ).replace(SWEEP, "")
    steps = steps_of(chain_of(write_chain(folder, text)), "finetune")
    names = [f"finetune/first-percent-{share}_seed-7" for share in (1, 10)]
    assert [step.name for step in steps] == names
    for step, share in zip(steps, ("1", "10"), strict=True):
        assert step.run.seed == 7
        # The share is of the pre-training's images: the transfer has all of its own.
        assert step.run.data.first_percent == 100
        assert step.run.tracking.tags["chain.pretrain.data.first_percent"] == share


def test_a_trunk_serves_two_cooldowns(folder):
    cooldowns = "".join(
        f"  - {{name: c{step}, config: pretrain.yaml, inputs: {{init: pretrain@{step}}}}}\n"
        for step in (10, 15)
    )
    chain = chain_of(write_chain(folder, CHAIN + cooldowns))
    for step in (10, 15):
        (branch,) = steps_of(chain, f"c{step}")
        assert branch.needs == ("pretrain",)
        assert branch.run.init == f"runs/small/pretrain@{step}"


def test_variants_change_several_settings_and_meet_those_of_the_same_name(folder):
    variants = "variants: {plain: [], wide: [model.width=32, model.mlp_width=64]}"
    text = CHAIN.replace(SWEEP, f"    {variants}\n    sweep: {{seed: [3, 4]}}\n")
    # The second chain has the variants in both stages: wide transfers start from wide runs.
    both = text.replace("{data.path: shards}}", f"{{data.path: shards}}, {variants}}}")
    for content in (text, both):
        steps = steps_of(chain_of(write_chain(folder, content)), "finetune")
        widths = {step.name: step.run.model.width for step in steps}
        assert widths == {
            "finetune/plain_seed-3": 16,
            "finetune/plain_seed-4": 16,
            "finetune/wide_seed-3": 32,
            "finetune/wide_seed-4": 32,
        }


def test_overrides_of_the_chain_reach_runs_that_have_the_key():
    # A preparation has no `tracking`, and the chain is loaded all the same.
    path = Path("chain.yaml")
    chain = chain_of(path, "overrides=[launch.partition=fast,tracking.uri=null]")
    assert {step.run.launch.partition for step in chain.steps} == {"fast"}

    # What no stage has is a typing error.
    with refused("trakcing.uri=null: no stage has this key"):
        chain_of(path, "overrides=[launch.partition=fast,trakcing.uri=null]")


# One change of the chain's file each: its stages, a value of one of its runs, two runs that would
# write the same folder, and keys that the chain itself decides.
@rows(r"""
- [old, new, message]
- ["data.path: shards}}\n  - {name", "init: evaluate}}\n  - {name", "circle: .*evaluate"]
- ["init: finetune}", "init: finetuning}", "no stage 'finetuning'; did you mean"]
- ["name: evaluate,", "name: finetune,", "two stages have the name 'finetune'"]
- ["config: data.yaml", "config: date.yaml", "(?s)no file date.yaml.*did you mean.*shards"]
- ["[0.01, 0.001]", "[0.01, fast]", "(?s)optim.lr.*fast.*in: .*lr-fast.* and 1 more"]
- ["[0.01, 0.001]", "[0.01, 0.01]", "(?s)another run both write.*rename one value"]
- ["seed: [3, 4]}", "name: [a]}", "name: the chain sets it itself"]
- ["overrides: [launch", "overrides: [name=x, launch", "name: the chain sets it itself"]
- ["data.path: shards, init: finetune", "init: shards", "init: stage shards is data_prep"]
- ["{optim.lr: [0.01, 0.001]", "{init: [a]", "init is given twice"]
- ["[launch.num_tasks=2]", "[], sweep: {seed: [1]}", "data_prep has no sweep"]
""")
def test_wrong_chains_are_refused(folder, old, new, message):
    # A replacement that changes nothing would test the right chain.
    assert CHAIN.count(old) == 1
    path = write_chain(folder, CHAIN.replace(old, new))
    with refused(message):
        chain_of(path)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/chains").glob("*.yaml")), ids=lambda path: path.stem
)
def test_chains_of_the_repository_load(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    steps = chain_of(path, cluster="slurm").steps
    assert len(steps) > 4

    # A model that timm has renamed would fail in a job; on "meta" it takes no memory.
    for arch in {getattr(step.run, "model", None) for step in steps}:
        if isinstance(arch, TimmSettings):
            with torch.device("meta"):
                timm.create_model(arch.model, **arch.arguments)


# ---- sweeps on the command line ---------------------------------------------------------------


def sweep_of(stage, *words):
    """Name -> run."""
    command = launch_command(
        ["--config", f"{stage}.yaml", *words],
        program="vitscale launch --local",
        switches={},
        description="",
    )
    chain = load_chain(command.run, cluster="local")
    return {step.name: step.run for step in chain.steps}


def test_a_list_that_is_no_value_of_its_key_is_a_sweep():
    # A crop area is a list itself: two numbers are one value, and no sweep. What is no value of
    # its key in any way, or no list, is left to the usual errors.
    sweeps = yaml.safe_load("""
    optim.lr=[1e-3,0.01]: [0.001, 0.01]
    optim.name=[adamw, sgd]: [adamw, sgd]
    data.val_split=[test,null]: [test, null]
    data.crop_area=[[0.2,1],[0.5,1]]: [[0.2, 1], [0.5, 1]]
    objective.mask_ratio=[0.5,0.75]: [0.5, 0.75]
    launch.sbatch.nice=[1,2]: [1, 2]
    # Values.
    data.crop_area=[0.2,1]: null
    "evaluate=[{name: knn}]": null
    optim.rate=[1,2]: null
    optim=[1,2]: null
    "optim.lr=[1,": null
    optim.lr=0.1: null
    """)
    for text, expected in sweeps.items():
        key = text.partition("=")[0]
        sweep = _sweeps(["--config", "pretrain.yaml", text])
        assert sweep == ({} if expected is None else {key: expected}), text


def test_runs_of_a_sweep_are_named_by_what_differs():
    # What all runs share, width and name, is no part of a run's name.
    varied = ("optim.lr=[1e-3,0.01]", "seed=[2,3]")
    runs = sweep_of("pretrain", *varied, "model.width=32", "name=x")
    assert list(runs) == [
        f"pretrain/lr-{lr}_seed-{seed}" for lr in (0.001, 0.01) for seed in (2, 3)
    ]
    run = runs["pretrain/lr-0.01_seed-3"]
    assert run.optim.lr == 0.01
    assert run.seed == 3
    assert run.model.width == 32
    assert run.folder == "runs/x/pretrain/lr-0.01_seed-3"

    # Paths have no place in a folder's name, and without a name there is the file's.
    runs = sweep_of("finetune", "init=[runs/a,runs/b]")
    assert [run.init for run in runs.values()] == ["runs/a", "runs/b"]
    for run in runs.values():
        assert run.folder.startswith("runs/base-sweep/finetune/")

    # One wrong value is named with its run.
    with refused("(?s)optim.lr.*in: pretrain/lr-fast"):
        sweep_of("pretrain", "optim.lr=[0.1,fast]")

    # A preparation has no sweep, and a missing file has an error of its own.
    for file in ("data.yaml", "lost.yaml"):
        assert _sweeps(["--config", file, "seed=[0,1]"]) == {}


# ---- what is done -----------------------------------------------------------------------------


@pytest.fixture
def chain(folder) -> Chain:
    make_shard_folder(folder / "shards", classes=("a", "b", "c", "d", "e"))
    return chain_of(folder / "chain.yaml")


def train(chain: Chain, *stages):
    for stage in stages:
        for step in steps_of(chain, stage):
            write_training(step, at=20)


def write_evaluation(step: ChainStep):
    prepare_job(step.run, cluster="local")
    results = step.folder / "results.json"
    results.write_text("{}")
    return results


def check_states(chain: Chain, **expected):
    """Check the states of the runs of each named stage, sorted, with commas between."""
    states = chain_states(chain)
    for stage, text in expected.items():
        of_stage = {states[step.name].text for step in steps_of(chain, stage)}
        assert ", ".join(sorted(of_stage)) == text, stage


def test_a_run_is_done_when_its_folder_says_so(chain):
    (pretrain,) = steps_of(chain, "pretrain")
    check_states(chain, shards="done", pretrain="missing")

    # A training of 20 steps.
    write_training(pretrain, at=7)
    check_states(chain, pretrain="resumable (step 7)")
    train(chain, "pretrain", "finetune")
    check_states(chain, pretrain="done", finetune="done", evaluate="missing")
    for step in steps_of(chain, "evaluate"):
        write_evaluation(step)
    check_states(chain, evaluate="done")

    # Results that are older than the weights are of other weights.
    os.utime(steps_of(chain, "evaluate")[0].folder / "results.json", (1, 1))
    check_states(chain, evaluate="done, old")

    # A damaged last checkpoint does not count, and the one before it does.
    last = pretrain.folder / "checkpoints/step-00000020"
    (weights,) = last.glob("*.safetensors")
    weights.write_bytes(b"cut")
    check_states(chain, pretrain="resumable (step 7)")


def test_a_run_with_other_settings_is_repeated_or_refused(chain, folder):
    path = folder / "chain.yaml"
    train(chain, "pretrain", "finetune")
    for step in steps_of(chain, "evaluate"):
        write_evaluation(step)

    # An evaluation is cheap: it is repeated where a setting of it has changed.
    evaluate = folder / "evaluate.yaml"
    evaluate.write_text(
        evaluate.read_text() + "init_weights: model\nlaunch: {nodes: 2}\n"
    )
    check_states(chain_of(path), evaluate="old")

    # Settings that decide no weight may change.
    changes = "launch.timeout_min=7, checkpoint.every_steps=9, data.num_workers=0"
    changed = chain_of(path, f"overrides=[{changes}]")
    check_states(changed, pretrain="done")

    # A training is never thrown away by a chain.
    pretrain = folder / "pretrain.yaml"
    pretrain.write_text(pretrain.read_text().replace("0.001", "0.002"))
    expected = r"(?s)trained to step 20.*lr: made with 0.001, now 0.002"
    with refused(expected):
        check_unchanged(chain_states(chain_of(path)))


def test_shards_with_other_settings_or_no_input_are_refused(chain, folder):
    # A pre-training that is repeated may end with other weights.
    train(chain, "finetune")
    with refused("starts from is missing or incomplete: shards, pretrain"):
        check_unchanged(chain_states(chain))

    manifest = folder / "shards/manifest.json"
    content = json.loads(manifest.read_text())

    def note(**changes):
        manifest.write_text(json.dumps(content | changes))

    # A hash of a file that the settings no longer name says nothing.
    run = steps_of(chain, "shards")[0].run
    config = run.model_dump(mode="json", include={"labels"})
    config["labels"]["map_blake3"] = "0"
    note(config=config)
    check_states(chain, shards="done")

    for name, state in (("images", "done"), ("elsewhere", "changed"), ("", "done")):
        # An earlier version did not note it.
        source = str(folder / name) if name else ""
        note(config=config, source_path=source)
        check_states(chain, shards=state)

    # Where a preparation ran changes no shard; its seed does.
    note(config={"seed": 9, "launch": {"nodes": 7}})
    with refused("(?s)shards: exists already.*seed: made with 9, now 0"):
        check_unchanged(chain_states(chain))


def test_a_file_that_a_setting_names_counts_as_the_setting(folder, chain):
    """For every such setting: test_preparations."""
    labels = folder / "list.csv"
    labels.write_bytes(b"a,b\n")
    (folder / "data.yaml").write_text(f"{DATA}labels: {{map: list.csv}}\n")
    chain = chain_of(folder / "chain.yaml")

    # The manifest has the hash of the file as it was.
    (step,) = steps_of(chain, "shards")
    config = step.run.model_dump(mode="json", include={"labels"})
    config["labels"]["map_blake3"] = blake3(b"a,b\n").hexdigest()
    manifest = folder / "shards/manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"config": config}))
    check_states(chain, shards="done")

    labels.write_bytes(b"a,c\n")
    with refused("labels.map_blake3: made with "):
        check_unchanged(chain_states(chain))
    labels.unlink()  # only the nodes see it
    check_states(chain, shards="done")


def test_a_dry_run_writes_nothing(chain, folder):
    text = describe_chain(chain_of(folder / "chain.yaml", cluster="slurm"))
    assert "finetune/lr-0.001_seed-4  finetune   shards, pretrain  missing" in text

    # One script for each stage that has runs to start: those of a sweep differ in names alone.
    assert text.count("#!/bin/bash") == 3
    assert "# Batch script of evaluate/lr-0.01_seed-3" in text

    # With shards their images are no longer needed; without them they are missed.
    assert " samples in " in text
    assert "images does not exist" not in text
    (folder / "shards/manifest.json").unlink()
    text = describe_chain(chain_of(folder / "chain.yaml", cluster="slurm"))
    assert "images         warning  images does not exist here" in text
    assert not (folder / "runs").exists()
