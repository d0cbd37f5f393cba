"""A tiny training, its shards, and one function that runs a script.

Everything is drawn from fixed seeds and computed by one thread, so a run gives the same numbers
each time.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from tests.support.corpora.image_samples import encoded
from tests.support.golden import FOLDER
from tests.support.ranks.fault_runs import wait_all, wait_and_end_others
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.tables import Values
from tests.support.waiting import ROOT

SHARDS = FOLDER / "training/shards"
OTHER_SHARDS = FOLDER / "training/other_shards"
CLASSES = ("ant", "bee", "cod")

# Without dropout, whose draws depend on the processor. Two ranks accumulate two micro-batches.
TINY = yaml.safe_load(
    f"""
    name: tiny
    data: {{path: {SHARDS}, global_batch: 8, num_workers: 0, crop_area: [0.5, 1.0],
      mean: [0.4, 0.5, 0.6]}}
    model: {{image_size: 8, patch_size: 2, width: 16, depth: 2, num_heads: 2, mlp_width: 32}}
    optim: {{lr: 0.001, weight_decay: 0.1, clip_norm: 1.0}}
    schedule: {{steps: 20, warmup_steps: 5}}
    engine: {{device: cpu, num_threads: 1, timeout_min: 1.0, max_micro_batch: 2}}
    checkpoint: {{every_steps: 100}}
    evaluate: []
    tracking: {{uri: null, log_every_steps: 1}}
    """
)
# Fine-tuning in the papers uses SGD; so both optimisers are in some run.
SGD = {"optim": {"name": "sgd", "lr": 1e-3, "clip_norm": 1.0}}
TRAININGS = {
    "pretrain/main.py": TINY | {"stage": "pretrain"},
    "finetune/main.py": TINY | SGD | {"stage": "finetune"},
}
MIXED = (
    "data.mixing.mixup_alpha=0.8",
    "data.mixing.cutmix_alpha=1.0",
    "data.mixing.mode=pair",
)
CURVES = ("train/loss", "train/lr", "train/grad_norm")
# Processors add in another order. After 20 steps SSE and AVX-512 differ by 1.1e-6.
REL = 1e-5


def run(
    starter: WarmStarter,
    script: str,
    folder: Path,
    *arguments: str,
    num_ranks: int = 1,
    faults: Mapping[int, list[Values]] | None = None,
) -> str:
    """Run a script, a training on the tiny configuration in FOLDER/run; returns rank 0's output.

    faults: by rank. They end the script; the ranks left 10 s later are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [ROOT / script]
    if faults:
        command.insert(0, ROOT / "tests/support/ranks/patched_rank.py")
    if script in TRAININGS:
        (folder / "tiny.yaml").write_text(yaml.safe_dump(TRAININGS[script]))
        command += ["--config", folder / "tiny.yaml", f"output={folder / 'run'}"]
    own_environment = []
    for rank in range(num_ranks):
        faults_of_rank = (faults or {}).get(rank, [])
        variables = {
            "VITSCALE_FAULTS": json.dumps(faults_of_rank),
            "VITSCALE_MUTANT": "",
        }
        own_environment.append(variables)
    ranks = starter.start(
        [*command, *arguments],
        num_ranks=num_ranks,
        folder=folder,
        own_environment=own_environment,
    )
    # A rank that waits for a lost one must notice it by itself, in these 10 s.
    if faults:
        codes = wait_and_end_others(ranks, grace_s=10)
    else:
        codes = wait_all(ranks)
    # A fault that was never reached would let a test of it pass.
    assert any(codes) == bool(faults), (codes, ranks[0].output())
    return ranks[0].output()


def journal(folder: Path, *names: str) -> dict[str, list[float]]:
    """The values of each step in the journal of a run folder, by metric; null: without them."""
    # A step that was trained twice counts once, by its last row, as for every reader.
    rows = {}
    for line in (folder / "journal.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    in_order = [rows[step] for step in sorted(rows)]
    return {name: [row[name] for row in in_order if name in row] for name in names}


def make_shards(folder: Path, *, images: Path, per_class: int, seed: int):
    """Write small photographs of different shapes as JPEG, and shards of them.

    images: an empty folder for the photographs.
    """
    for number in range(per_class * len(CLASSES)):
        label = number % len(CLASSES)
        path = images / CLASSES[label] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_photograph(seed + number, colour=label))
    command = [
        sys.executable,
        "data_prep/make_shards.py",
        "--config",
        "configs/data/image_folder.yaml",
        f"source.path={images}",
        f"output={folder}",
        # A val split, and more than one tar for the order to go through.
        "source.holdout_fraction=0.2",
        "shards.min_shards=2",
    ]
    subprocess.run(command, check=True, cwd=ROOT)


def _photograph(seed: int, *, colour: int) -> bytes:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 180, (4, 5, 3), dtype=np.uint8)
    # Each class is brighter in a channel of its own, so 20 steps can learn something.
    pixels[..., colour] += 60
    # Sizes and shapes in turn: a crop of them depends on all of its arguments.
    width = 14 + seed % 7
    height = 12 + seed % 4
    small = Image.fromarray(pixels)
    image = small.resize((width, height), Image.Resampling.BICUBIC)
    return encoded(image, "JPEG", quality=85)
