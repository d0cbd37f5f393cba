"""Settings of the engine reach the model; nothing is compiled before it is used."""

from __future__ import annotations

import pytest
import torch
from torch.backends import cuda

from pretrain.run import PretrainRun
from vitscale.engine.attention import use_attention
from vitscale.models.vit.model import ViT, build_model
from vitscale.models.vit.patch_embedding import PatchProduct
from vitscale.models.vit.settings import ViTSettings
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
    model = build_model(run.model, run.model.architecture(num_classes=3), seed=0)
    return model, choose_kernels(run, model, torch.device("cpu"))


def compiled_parts(model: ViT) -> tuple[bool, bool]:
    """Whether the forward pass, and whether a block, will be compiled."""
    return "forward" in vars(model), model.blocks[0]._compiled_call_impl is not None


def test_nothing_is_chosen_on_a_cpu_by_default() -> None:
    model, compiled = chosen()
    assert compiled_parts(model) == (False, False) and not compiled
    assert not isinstance(model.patch_embed.proj, PatchProduct)


def test_patches_and_attention_are_those_of_the_settings() -> None:
    try:
        model, _ = chosen(patch_embedding="matmul", attention="math")
        assert isinstance(model.patch_embed.proj, PatchProduct)
        assert cuda.math_sdp_enabled() and not cuda.flash_sdp_enabled()
    finally:
        use_attention("auto")


@pytest.mark.parametrize("setting, expected", [(True, (False, True)), ("model", (True, False))])
def test_blocks_or_the_model_are_compiled(
    setting: object, expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "anywhere")
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)  # which imports the compiler
    model, compiled = chosen(compile=setting)
    assert compiled_parts(model) == expected and compiled
