"""Settings of the engine reach the model; nothing is compiled before it is used."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.distributed.node_files import private_folder
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import ViT, build_model
from vitscale.training.build import choose_kernels


def chosen(**engine: object) -> tuple[ViT, bool]:
    sizes = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 1, "num_heads": 2}
    run = PretrainRun.model_validate(
        {
            "name": "x",
            "data": {"path": "shards", "global_batch": 8},
            "model": sizes | {"mlp_width": 16},
            "optim": {"lr": 1e-3},
            "schedule": {"steps": 100, "warmup_steps": 10},
            "engine": engine,
        }
    )
    assert isinstance(run.model, ViTSettings)
    model = build_model(run.model.resolved(num_classes=3), seed=0)
    return model, choose_kernels(run, model, torch.device("cpu"))


def test_nothing_is_chosen_on_a_cpu_by_default() -> None:
    model, compiled = chosen()
    assert model.blocks[0]._compiled_call_impl is None and not compiled


def test_blocks_are_compiled_in_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)  # which imports the compiler
    model, compiled = chosen(compile=True)
    assert model.blocks[0]._compiled_call_impl is not None and compiled
    folder = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR")).parent
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(UserError, match="not a folder that only you can use"):
        private_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="not a folder that only you can use"):
        private_folder()
