"""What a session opens and chooses, and the random numbers of a step."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.corpora.shard_folders import write_shard_folder
from vitscale.config.errors import UserError
from vitscale.data.settings import DataSettings
from vitscale.distributed.node_files import private_folder
from vitscale.engine.settings import EngineSettings
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import ViT, build_model
from vitscale.training import session
from vitscale.training.session import seed_step
from vitscale.training.start import choose_kernels


def test_a_dev_cut_or_the_validation_split_is_evaluated(tmp_path: Path) -> None:
    shards = write_shard_folder(tmp_path / "a", num_per_class=10, num_shards=2)
    whole = {"path": str(shards), "global_batch": 8, "val_split": None}

    def counts(**data: Any) -> tuple[int, int | None]:
        run: Any = SimpleNamespace(data=DataSettings.model_validate(whole | data), seed=0)
        training_set, evaluated = session._read_index(run, check_files=True)
        return training_set.num_samples, evaluated and evaluated.num_samples

    assert counts() == (20, None) and counts(val_split="train") == (20, 20)
    assert counts(dev_percent=10.0) == (18, 2)


def chosen(device: str = "cpu", **engine: object) -> tuple[ViT, bool]:
    model = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 1, "num_heads": 2}
    settings = ViTSettings.model_validate(model | {"mlp_width": 16})
    built = build_model(settings.resolved(num_classes=3), seed=0)
    run: Any = SimpleNamespace(model=settings, engine=EngineSettings.model_validate(engine))
    return built, choose_kernels(run, built, torch.device(device))


def test_blocks_are_compiled_on_a_gpu_and_in_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, compiled = chosen()
    assert model.blocks[0]._compiled_call_impl is None and not compiled
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)  # which imports the compiler
    model, compiled = chosen(compile=True)
    assert model.blocks[0]._compiled_call_impl is not None and compiled
    assert chosen("cuda")[1] and not chosen("cuda", zero_stage=3)[1]
    assert not chosen("cuda", compile=False)[1]
    folder = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR")).parent
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(UserError, match="not a folder that only you can use"):
        private_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="not a folder that only you can use"):
        private_folder()


def test_random_numbers_follow_the_position_in_training() -> None:
    def drawn(**changes: int) -> float:
        seed_step(**{"seed": 0, "step": 0, "micro_step": 0, "rank": 0} | changes)
        return torch.rand(()).item()

    other = [drawn(**{name: 1}) for name in ("seed", "step", "micro_step", "rank")]
    assert len({drawn(), *other}) == 5
    assert drawn() == drawn()
