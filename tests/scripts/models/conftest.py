"""Start the scripts on tiny shards, once for many tests."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.corpora.shard_folders import image_bytes, make_shard_folder
from tests.support.golden import FOLDER
from tests.support.ranks.fault_runs import wait_all
from tests.support.ranks.warm_ranks import ROOT, WarmStarter

WEIGHTS = FOLDER / "weights"
NPZ = WEIGHTS / "google/model.npz"
SAFETENSORS = WEIGHTS / "timm/model.safetensors"
# Weights in a file do not tell their heads where Google's do.
NUM_HEADS = "model={name: vit, num_heads: 2}"
FINETUNE = """\
stage: finetune
name: tiny
data: {global_batch: 8, num_workers: 0, crop_area: [0.5, 1.0]}
model: {image_size: 12, patch_size: 4, width: 16, depth: 2, num_heads: 2, mlp_width: 32,
  drop_path: 0.0}
optim: {name: sgd, lr: 0.05, momentum: 0.9, clip_norm: 1.0}
schedule: {steps: 2, warmup_steps: 0}
engine: {device: cpu, num_threads: 1, zero_stage: 1, max_micro_batch: 8}
checkpoint: {every_steps: 2}
evaluate: [{name: classification}]
tracking: {uri: null, log_every_steps: 1}
"""


@dataclass(frozen=True)
class Scripts:
    """Runs the scripts of `finetune/` in processes that have all imports."""

    starter: WarmStarter
    folder: Path
    shards: Path
    images: Path

    def run(
        self,
        script: str,
        *words: str | Path,
        num_ranks: int = 1,
        code: int = 0,
    ) -> str:
        # A folder for each start: logs are named by rank.
        start = self.folder / f"start-{len([*self.folder.iterdir()])}"
        start.mkdir()
        command = [ROOT / f"finetune/{script}.py", *words]
        ranks = self.starter.start(command, num_ranks=num_ranks, folder=start)
        assert set(wait_all(ranks)) == {code}, ranks[0].output()
        return ranks[0].output()

    def finetune(
        self, name: str, *words: str | Path, num_ranks: int = 1
    ) -> tuple[Path, dict[str, list[float]]]:
        """Train for two steps; the run folder, and the values of each metric."""
        config = self.folder / f"{name}.yaml"
        run = self.folder / name
        config.write_text(FINETUNE)
        given = (f"data.path={self.shards}", f"output={run}")
        self.run("main", "--config", config, *given, *words, num_ranks=num_ranks)
        metrics = {}
        for line in (run / "journal.jsonl").read_text().splitlines():
            for key, value in json.loads(line).items():
                # Times and the state of the machine differ in every run.
                if key in ("train/loss", "train/grad_norm") or key.startswith("val/"):
                    metrics.setdefault(key, []).append(value)
        return run, metrics


@pytest.fixture(scope="session")
def scripts(warm_starter, tmp_path_factory) -> Scripts:
    folder = tmp_path_factory.mktemp("scripts")
    shards = folder / "shards"
    # 12 test images: no multiple of 8, so the last batch is padded.
    make_shard_folder(shards, lengths={"train": (20, 16), "test": (7, 5)})
    images = folder / "images"
    images.mkdir()
    for number, extension in enumerate(("png", "jpg", "webp")):
        content = image_bytes(extension, seed=40 + number)
        (images / f"{number}.{extension}").write_bytes(content)
    return Scripts(warm_starter, folder, shards, images)


@pytest.fixture(scope="session")
def from_npz(scripts) -> tuple[Path, dict[str, list[float]]]:
    """A run that starts from Google's weights with their head, its grid 3 x 3 instead of 2 x 2."""
    return scripts.finetune("from-npz", f"init={NPZ}", "keep_head=true")
