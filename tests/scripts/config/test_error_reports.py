"""Reports of wrong configurations, word for word: tests/golden/config_errors.txt."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from tests.support.waiting import ROOT
from vitscale.config.errors import UserErrors
from vitscale.config.loader import load_run
from vitscale.runs.data_prep import DataPrepRun

STAGES = {
    "data_prep": DataPrepRun,
    "pretrain": PretrainRun,
    "finetune": FinetuneRun,
}
# The least that can run: every fault below is the only one of its file, or meant to meet others.
VALID = """\
stage: pretrain
name: demo
data:
  path: shards
  global_batch: 64
model: {preset: B/16}
optim: {lr: 1e-3}
schedule:
  epochs: 3
"""
FILES = {
    "a.yaml": VALID,
    "dotted.yaml": VALID + "checkpoint.keep: 1\n",
    "conflict.yaml": VALID + "  steps: 10\n",
    # The stage decides which keys there are; without it no other key can be judged.
    "stage.yaml": VALID.replace("pretrain", "pretraining"),
    "no_stage.yaml": VALID.replace("stage: pretrain\n", "") + "unknown: 1\n",
    "tune.yaml": VALID.replace("pretrain", "finetune"),
    "choice/parent.yaml": VALID
    + "objective:\n  label_smoothing: 0.1\n  smoothing: 0.1\n",
    "timm.yaml": VALID.replace("{preset: B/16}", "{name: timm, model: test_vit}"),
}
FILES |= yaml.safe_load(r"""
# Wrong values, a name with a typing error, an emptied base value: all in one report.
many.yaml: "base: a.yaml\noptim:\n  lr: fast\nmodel:\n  num_classes: x\nseeed: 1\n\
  data: {path: null}\nschedule: {final_lr: .inf}\n"
# Faults of the keys themselves: given twice, missing.
twice.yaml: "base: a.yaml\noptim:\n  lr: fast\n  lr: 3\n"
missing.yaml: "stage: pretrain\ndata:\n  global_batch: 64\nmodel: {preset: B/16}\n\
  optim: {lr: 1e-3}\nschedule: {epochs: 1}\n"
# What is no YAML, and bases that lead nowhere.
broken.yaml: "stage: pretrain\ndata: {path: [1\nname: x\n"
tab.yaml: "stage: pretrain\n\tname: x\n"
lost.yaml: "base: nowhere.yaml\nname: x\n"
circle.yaml: "base: circle.yaml\nname: x\n"
# A section whose `name` decides its keys, over one of another name; and another stage.
choice/child.yaml: "base: parent.yaml\nobjective: {name: mae, label_smoothing: 0.2}\n"
data.yaml: "stage: data_prep\noutput: out\nsource:\n  path: images\n"
""")
# A file, and the overrides of one command, as they are typed: first types and spelling of single
# values, then the files above, then combinations by section (data, optim, schedule, model,
# objective, launch), where each value alone is allowed.
COMMANDS = r"""
a.yaml optim.lr=fast
a.yaml optim.lr=-1 engine.zero_stage=4 seed=-1
a.yaml data.horizontal_flip=on data.val_split=1
a.yaml data.global_batch=1e3 "checkpoint.keep='2'" checkpoint.every_steps=1_000
a.yaml name=16 data.path=true
a.yaml optim.betas=[0.9] 'data.mean=[0.5, 0.5, x]'
a.yaml tracking=3 launch.sbatch.x=[1]
a.yaml tracking.log_every_step=3 tracking._target_=os.system
a.yaml lr =3 a..b=3 optim.lr= optim.betas=[1, base=a.yaml
a.yaml schedule.final_lr=.nan schedule.warmup_steps=-1
a.yaml model.image_size=225
a.yaml model.num_classes=0 objective.label_smoothing=1
a.yaml schedule.steps=10 schedule.epochs=2
a.yaml evaluate=3 model.heads=4
a.yaml evaluate=knn,knnn
tab.yaml
a.yaml objective.name=mea
a.yaml launch.tasks_per_node=2 launch.gpus_per_node=4 launch.num_tasks=3
a.yaml launch.sbatch.nodes=3 launch.sbatch.output=x launch.sbatch.N=1
a.yaml 'launch.partition="a b"' 'launch.setup=["a\nb"]' launch.srun_args=[x]
a.yaml launch.timeout_min=5 launch.signal_delay_s=300
many.yaml oops engine.precision=fp8
twice.yaml optim.lr=3 'optim={lr: 3, lr: 4}' lr
missing.yaml
dotted.yaml
conflict.yaml
stage.yaml
no_stage.yaml engine.zero_stage=7
tune.yaml tracking.url=x init=[1]
broken.yaml
lost.yaml
circle.yaml
nothing.yaml
data.yaml 'source.splits={train: a, tar: b}' source.holdout_fraction=0.5
data.yaml source.holdout_split=train source.val_per_class=5 labels.values=index
data.yaml labels.values=none labels.space=imagenet_1k launch.nodes=2
a.yaml objective.mask_ratio=0.5 objective.label_smooting=1
a.yaml 'objective={name: mae, maskratio: 1, mask_ratio: 0}'
a.yaml objective.name=3
a.yaml 'objective={name: distillation, teacher: {wieghts: x}}'
a.yaml 'objective={name: features, teachers: [{wieghts: x}], shares: [0], patch_grid: [7]}'
a.yaml 'objective={name: features, teachers: [{weights: x}], shares: [1, 2], patch_weight: 0}' \
  objective.class_weight=0 'objective.patch_grid=[7, 7]' 'data.views=[{name: a}]'
a.yaml objective=3 schedule=3 'evaluate={name: knn}'
a.yaml 'evaluate=[{k: 1}, {name: knnn}, {name: knn, kk: 1, k: 0}, {name: few_shot, l2: x}]'
a.yaml 'optim.betas=[0.9, x]' data.horizontal_flip=1 engine.zero_stage=true
a.yaml "data.global_batch='64'" optim.warmup=3
choice/child.yaml 'evaluate=[{name: knn, every_steps: x}]'
a.yaml data.globalbatch=1 model.img_size=1 schedul.epochs=1 zero_stage=1
a.yaml 'data={crop: plain, crop_area: [0.5, 1], crop_share: 0.5, mixing: {}}' name=a/b
a.yaml 'data={std: [1, 1, 0], eval_interpolation: area, eval_antialias: false}'
a.yaml 'data={crop: squash, crop_area: [0.5, 0.1], crop_aspect: [2, 1], crop_share: 0.5}'
a.yaml 'data.augment={randaugment: {policy: timm, magnitude: 15}, three_augment: true}'
a.yaml 'data.augment={three_augment: true, erasing: {probability: 0.2}, blur: {probability: 1}}' \
  'data.augment.jitter={probability: 1, brightness: 1, contrast: 0, saturation: 0, hue: 0.5}' \
  'data.augment.blur.sigma=[2, 0.1]'
a.yaml 'data.augment={grayscale: {probability: 0}, solarize: 0.2, erasing: {probability: 2}}' \
  'data.crop_area=[0.5, 1.1]' \
  'data.augment.jitter={probability: 1.5, brightness: 2, contrast: -1, hue: 0.6}'
a.yaml 'data={crop: plain, augment: {randaugment: {fill: mean}}}' \
  'data.views=[{name: a}, {name: b, crop_area: [0.1, 0.5]}, {name: c, crop_area: [0.5, 0.1]}]'
a.yaml 'data.views=[{name: a, augment: {randaugment: {magnitude: 15, policy: timm}}}, {name: b}]'
a.yaml 'data.views=[{name: a, augment: {three_augment: true, solarize: {probability: 1}}}]' \
  'data.augment.blur={probability: 1, sigma: [0, 1]}'
a.yaml "data={path: 's3://bucket/shards', webdataset: {num_samples: 9}}" \
  "data.mixture=[{path: 's3://key:word@bucket/shards', share: 0.5}, {path: x, share: 0.5}]" \
  'data.augment.randaugment={magnitude_std: 0.5, fill: mean, interpolation: bicubic}'
a.yaml 'data={reader: webdataset, only_keys: a, remote: {cache_path: b}}'
a.yaml "data={reader: webdataset, webdataset: {num_classes: 2}, path: 's3://bucket/tars'}"
a.yaml 'optim={name: lamb, momentum: 0.5, betas: [1.5, -1], momentum_dtype: bf16}' \
  optim.weight_decay_mode=independent engine.zero_stage=1
a.yaml 'optim={name: sgd, betas: [0.9, 0.95], eps: 1e-6}' engine.zero_stage=0
a.yaml 'optim={momentum: 0.5, betas: [0.9, 1]}' 'engine={zero_stage: 3, compile: true}'
a.yaml 'engine={zero_stage: 0, precision: fp16}' schedule.final_lr=1
a.yaml 'schedule={decay: cosine, cooldown_share: 0.2, drops_at: [0.6]}' schedule.warmup_steps=5 \
  schedule.warmup_epochs=0.1
a.yaml 'schedule={decay: constant, final_lr: 1e-5, decay_from: start}'
a.yaml 'schedule={decay: drops, drops_at: [0.6, 0.3], final_lr: 1e-5, decay_from: start}'
a.yaml 'schedule={decay: drops, drops_at: [0.6, 1]}'
a.yaml schedule.decay=drops
a.yaml model.preset=Q/3
a.yaml 'model={preset: null, width: 6}'
a.yaml 'model={width: 6, num_heads: 5, positions: sincos2d, class_position: true}' \
  model.image_size=3 model.pool_norm=true model.class_token=false
a.yaml 'model={distillation_token: true, pool: gap, num_registers: 2}' \
  model.representation_layer=true model.class_position=false
a.yaml 'model={pool: cls_mean, representation_layer: true, num_registers: 1}' \
  model.class_position=true
a.yaml 'model={pool: gap, class_position: true}'
timm.yaml objective.name=mae \
  'model.arguments={pretrained: true, checkpoint_path: x, img_size: 64}'
timm.yaml objective.name=masked_patch_prediction
a.yaml 'deepspeed={train_batch_size: 64, fp61: {}, compile: {deepcompile: true}}' \
  'deepspeed.zero_optimization={stage: 7, compute_grad_norm: false}'
a.yaml deepspeed.zero_optimization=3
a.yaml 'objective={name: distillation, teacher: {weights: x}, tau: 3, loss: bce}' \
  objective.label_smoothing=0.1
a.yaml 'objective={name: mae, decoder_heads: 3, mask_ratio: 0.999}' \
  'model={pool: gap, pool_norm: true, num_registers: 2, num_classes: 3}' \
  model.representation_layer=true data.mixing.mixup_alpha=0.2 \
  'evaluate=[{name: classification}, {name: knn}, {name: knn}]'
a.yaml 'objective={name: mae, decoder_width: 6, decoder_heads: 6}' model.distillation_token=true
a.yaml 'objective={name: masked_patch_prediction, mask_share: 0.95}' \
  objective.corrupted_share=0.0001 data.mixing.mixup_alpha=0.2
a.yaml objective.name=masked_patch_prediction model.image_size=16
a.yaml "launch.python='apptainer exec --env wandb_api_key=abc x.sif python'" \
  'launch.setup=["cd x", "export HF_TOKEN=hf_abc", "A=1 AWS_SECRET_ACCESS_KEY='"'"'a b'"'"' x"]' \
  "launch.sbatch.export='ALL,HF_TOKEN=abc'" 'launch.srun_args=["--x=\n"]' launch.nodes=8-2 \
  launch.timeout_min=3 launch.signal_delay_s=120
a.yaml 'launch={python: "a\ntouch x", partition: "a\nb"}' \
  'launch.sbatch={signal: TERM@5, ntasks_per_node: 2, array: 0-9}' \
  'launch.sbatch={mail-user: "a\nb", "mail-type=END\nx": 1}'
data.yaml script=index_shards source.kind=path_table source.val_labels=x source.val_per_class=5 \
  source.holdout_fraction=0.5 'launch={nodes: 2, tasks_per_node: 8, gpus_per_node: 8}'
"""
# Combinations that are near those refused.
ACCEPTED = r"""
'schedule={decay: drops, drops_at: [0.3, 0.6]}'
'schedule={decay: linear, final_lr: 1e-5}'
'schedule={decay: cosine, decay_from: start}'
'schedule={decay: constant, cooldown_share: 0.2, final_lr: 1e-5}'
optim.name=lamb engine.zero_stage=0
'data.augment.randaugment={policy: timm, magnitude_std: 0.5, fill: mean}'
'data.augment={randaugment: {}, blur: {probability: 1, sigma: [1, 1]}, erasing: {probability: 1}}'
'data={reader: webdataset, val_split: null, webdataset: {num_samples: 9}}'
'model={width: 24, num_heads: 5, head_width: 3}'
'model={class_position: false, num_registers: 1, positions: sincos2d}'
model.distillation_token=true
engine.zero_stage=2 \
  'deepspeed={zero_optimization: {contiguous_gradients: false}, wall_clock_breakdown: true}'
'launch={nodes: 2, tasks_per_node: 8, gpus_per_node: 8, gpu_type: h200, timeout_min: 5}'
'launch.setup=["export A=$(hostname)\t# a tab", "HF_TOKEN_PATH=/x z"]'
'launch.setup=['"'"'export HF_TOKEN=$(cat ~/.hf)'"'"', '"'"'HF_TOKEN="$X" y'"'"']'
"launch.setup=['export TOKENIZERS_PARALLELISM=false HF_TOKEN=']"
"launch.sbatch={constraint: '[rack1*2&ib]|h200', exclude: 'node[3,5-7],other'}"
'launch.sbatch={mail-type: END, exclusive: true, wckey: vit}'
"""


def words_of(commands: str) -> list[list[str]]:
    """The words of each line, as a shell gives them to a command."""
    lines = commands.replace("\\\n", "").strip().splitlines()
    return [shlex.split(line) for line in lines]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    # Reports name files as they were given: with relative paths they are the same everywhere.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "choice").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def report(path: str, *overrides: str) -> str:
    with pytest.raises(UserErrors) as caught:
        load_run(STAGES, path, overrides=overrides)
    return "\n".join(error.text() for error in caught.value.errors)


def test_every_report_reads_as_it_did(here, golden):
    blocks = []
    for command in words_of(COMMANDS):
        blocks.append(f"$ {' '.join(command)}\n{report(*command)}\n")
    golden.text("config_errors.txt", "\n".join(blocks))


@pytest.mark.parametrize("overrides", words_of(ACCEPTED), ids=str)
def test_near_combinations_are_accepted(here, overrides):
    load_run(STAGES, "a.yaml", overrides=overrides)


def test_a_script_prints_the_whole_report(here):
    # All faults of file and command line, not only the first one.
    command = ("many.yaml", "oops", "engine.precision=fp8")
    done = script("pretrain/main.py", "--config", *command)
    assert done.returncode == 2
    assert report(*command) in done.stderr, done.stderr

    # An option that argparse would refuse in words of its own.
    done = script("launch/local.py", "--config", "a.yaml", "--num-procs", "two")
    expected = "error:\n--num-procs: 'two' is not allowed\n  allowed: 1, 2, ...\n"
    assert done.stderr == expected


def test_a_printed_configuration_is_the_run(here):
    show = ("pretrain/main.py", "--print-config", "--config")
    first = script(*show, "a.yaml", "optim.lr=2e-3").stdout
    (here / "again.yaml").write_text(first)
    second = script(*show, "again.yaml").stdout
    assert values_of(first) == values_of(second)

    # Its comments say where each value comes from; that differs, of course, the second time.
    sources = {}
    for line in first.splitlines():
        key = line.strip().partition(":")[0]
        sources[key] = line.partition("# ")[2]
    assert sources["lr"] == "command line"
    assert sources["global_batch"] == "a.yaml:5"
    assert sources["every_steps"] == "default"


def values_of(printed: str) -> list[str]:
    return [line.partition("#")[0].rstrip() for line in printed.splitlines()]


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which a script of a rank ends."""
    command = [sys.executable, str(ROOT / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True)
