"""kNN during pre-training, sharded over ranks, equals brute force on the checkpoint's weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pretrain.run import PretrainRun
from tests.support.ranks.fault_runs import FaultRuns
from tests.support.ranks.run_states import journal_rows
from vitscale.checkpoint.folders import newest_checkpoint
from vitscale.config.loader import load_run_file
from vitscale.data.index import SplitIndex, read_split
from vitscale.data.samples import EvaluationSamples
from vitscale.models.registry import MODELS

pytestmark = pytest.mark.distributed

K, TEMPERATURE, BANK, STEPS = 7, 0.07, 500, 3


def features_of(
    model: torch.nn.Module, run: PretrainRun, index: SplitIndex, chosen: list[int]
) -> torch.Tensor:
    samples = EvaluationSamples(index, settings=run.data, image_size=run.model.image_size)
    images = torch.empty(len(chosen), 3, run.model.image_size, run.model.image_size).byte()
    for row, sample in zip(images, chosen, strict=True):
        samples.fill(sample, row)
    tokens = model.forward_features((images.float() / 255 - 0.5) / 0.5)  # type: ignore[operator]  # timm's
    features = model.forward_head(tokens, pre_logits=True)  # type: ignore[operator]  # timm's
    return torch.nn.functional.normalize(features, dim=1)


def brute_force(folder: Path, shards: Path) -> float:
    """Top-1 by one loop over all pairs."""
    run = load_run_file(PretrainRun, folder / "config.yaml")
    train, val = (read_split(str(shards), split=name) for name in ("train", "test"))
    checkpoint, _ = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None and checkpoint.step == STEPS
    arch = run.model.architecture(num_classes=len(val.classes))
    model = MODELS["vit"].load().build_model(run.model, arch, seed=0).eval()
    weights = checkpoint.tensors(prefix="model.")
    model.load_state_dict({name.removeprefix("model."): each for name, each in weights.items()})
    chosen = [number * train.num_samples // BANK for number in range(BANK)]
    with torch.no_grad():
        bank = features_of(model, run, train, chosen)
        queries = features_of(model, run, val, list(range(val.num_samples)))
    labels = [int(train.label[sample]) for sample in chosen]
    correct = 0
    for number, row in enumerate((queries @ bank.T).tolist()):
        votes = [0.0] * len(val.classes)
        for similarity, label in sorted(zip(row, labels, strict=True))[::-1][:K]:
            votes[label] += math.exp(similarity / TEMPERATURE)
        correct += votes.index(max(votes)) == val.label[number]
    return correct / val.num_samples


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_knn_of_a_run_equals_brute_force(
    fault_runs: FaultRuns, digits_shards: Path, tmp_path: Path, num_ranks: int
) -> None:
    knn = f"{{name: knn, k: {K}, temperature: {TEMPERATURE}, max_bank_images: {BANK}}}"
    settings = [f"schedule.steps={STEPS}", "schedule.warmup_steps=0", "optim.ema=null"]
    codes = fault_runs.run(tmp_path, *settings, f"evaluate=[{knn}]", num_ranks=num_ranks)
    assert set(codes) == {0}
    (found,) = (row for row in journal_rows(tmp_path / "run") if "val/knn_top1" in row)
    expected = brute_force(tmp_path / "run", digits_shards)
    assert found["val/knn_top1"] == pytest.approx(expected, abs=1e-9)
