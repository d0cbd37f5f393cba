"""Models of timm: its outputs, its layers, its folders, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.optim import param_groups_layer_decay
from torch.utils.flop_counter import FlopCounterMode

from finetune.exporting.folder import write_folder
from finetune.settings import ExportRun, ModelRun
from pretrain.run import PretrainRun
from tests.support.engine.small_models import small_model
from vitscale.config.errors import UserError
from vitscale.evaluation.trained_model import open_model
from vitscale.models.settings import TimmSettings
from vitscale.models.timm_model import (
    TimmModel,
    build_model,
    decayed,
    layers_above,
    num_parameters,
    train_flops_per_image,
)
from vitscale.optim.optimizers import optimizer_groups
from vitscale.optim.settings import OptimSettings
from vitscale.training import build

NAMES = ("test_vit", "test_convnext", "test_efficientnet_gn", "test_mambaout")
SIZE = 64


def built(name: str, *, seed: int = 0, num_classes: int = 5, **values: Any) -> TimmModel:
    settings = TimmSettings(model=name, **{"image_size": SIZE, "head_std": 0.1, **values})
    return build_model(settings.resolved(num_classes=num_classes), seed=seed)


def plain(name: str, **options: Any) -> Any:
    sized = {"img_size": SIZE} if timm.get_pretrained_cfg_value(name, "fixed_input_size") else {}
    return timm.create_model(name, num_classes=5, **sized, **options)


def images(size: int = SIZE) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_outputs_and_costs_are_those_of_timm(name: str) -> None:
    model, own = built(name).eval(), plain(name).eval()
    own.load_state_dict(model.state_dict())
    assert torch.equal(model(images()), own(images()))
    features = own.forward_head(own.forward_features(images()), pre_logits=True)
    assert torch.equal(model(images(), output="features"), features)
    arch = TimmSettings(model=name, image_size=SIZE).resolved(num_classes=5)
    assert num_parameters(arch) == sum(each.numel() for each in own.parameters())
    with torch.device("meta"):
        counted = plain(name).eval()
        with FlopCounterMode(display=False) as counter:
            counted(torch.empty(1, 3, SIZE, SIZE))
    assert train_flops_per_image(arch) == 3 * counter.get_total_flops()


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_gives_the_weights(name: str) -> None:
    first, same, other = (built(name, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    new = built(name, head_std=0.0, head_bias=-10.0).eval()
    assert torch.equal(new(images()), torch.full((2, 5), -10.0))


@pytest.mark.parametrize("name", NAMES)
def test_rates_and_decay_by_layer_are_those_of_timm(name: str) -> None:
    model = built(name)
    arch = TimmSettings(model=name, image_size=SIZE).resolved(num_classes=5)
    kept = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()  # type: ignore[operator]  # a function
    theirs = param_groups_layer_decay(
        model, weight_decay=0.05, no_weight_decay_list=kept, layer_decay=0.7
    )
    ours = optimizer_groups(
        model.named_parameters(),
        settings=OptimSettings(lr=1.0, weight_decay=0.05, layer_decay=0.7),
        decayed=decayed,
        layers_above=lambda parameter: layers_above(parameter, arch),
    )

    def chosen(groups: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
        return {
            id(parameter): (group["lr_scale"], group["weight_decay"])
            for group in groups
            for parameter in group["params"]
        }

    assert chosen(ours).keys() == chosen(theirs).keys()
    for key, values in chosen(theirs).items():
        assert chosen(ours)[key] == pytest.approx(values)


@pytest.mark.parametrize("to", ["timm", "safetensors"])
@torch.no_grad()
def test_folders_are_read_by_timm_and_here(tmp_path: Path, to: Any) -> None:
    loaded = small_model("timm", classes=tuple("vwxyz"), preprocessing={"mean": (0.1, 0.2, 0.3)})
    list(write_folder(ExportRun(init="x", to=to, output=str(tmp_path / "out")), loaded))
    expected = loaded.network(images(32))
    found = open_model(**ModelRun(init=str(tmp_path / "out")).source())
    assert (found.arch, found.classes) == (loaded.arch, loaded.classes)
    assert found.preprocessing.mean == loaded.preprocessing.mean
    assert torch.equal(found.network(images(32)), expected)
    if to == "timm":
        theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
        torch.testing.assert_close(theirs(images(32)), expected)


@torch.no_grad()
def test_a_folder_that_timm_saved_is_read(tmp_path: Path) -> None:
    """Its arguments hold the number of classes, too."""
    theirs = plain("test_convnext").eval()
    save_for_hf(theirs, tmp_path)
    found = open_model(str(tmp_path))
    assert (found.arch.name, found.num_classes, found.arch.image_size) == ("timm", 5, 160)
    assert torch.equal(found.network(images()), theirs(images()))


@pytest.mark.parametrize("name", ["test_vit", "test_vit_relpos"])
@torch.no_grad()
def test_another_image_size_is_resampled_as_timm_does(tmp_path: Path, name: str) -> None:
    loaded = small_model("timm", model=name, image_size=64)
    list(write_folder(ExportRun(init="x", to="timm", output=str(tmp_path / "out")), loaded))
    asked = {"init": str(tmp_path / "out"), "model": {"name": "timm", "model": name}}
    found = open_model(**ModelRun.model_validate({**asked, "image_size": 96}).source()).network
    folder = f"local-dir:{tmp_path / 'out'}"
    theirs = timm.create_model(folder, pretrained=True, img_size=96).eval()
    torch.testing.assert_close(found(images(96)), theirs(images(96)))


def test_transfer_keeps_all_but_the_classifier(tmp_path: Path) -> None:
    source, target = built("test_convnext", seed=1), built("test_convnext", seed=2, num_classes=3)
    fresh = {name: value.clone() for name, value in target.state_dict().items()}
    target.load_weights(source.state_dict(), where="x", keep_head=False)
    for name, value in target.state_dict().items():
        expected = fresh if name.startswith("head.fc.") else source.state_dict()
        assert torch.equal(value, expected[name]), name
    with pytest.raises(
        UserError, match=r"model \(3, 64\), checkpoint \(5, 64\)(?s:.*)keep_head=false"
    ):
        target.load_weights(source.state_dict(), where="x", keep_head=True)
    with pytest.raises(UserError, match="tensors do not fit"):
        target.load_weights(built("test_vit").state_dict(), where="x", keep_head=False)


def test_a_weight_file_is_of_the_model_that_is_named(tmp_path: Path) -> None:
    model = built("test_convnext").eval()
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    asked = {"name": "timm", "model": "test_convnext", "image_size": SIZE}
    run = ModelRun.model_validate({"init": str(tmp_path / "x.safetensors"), "model": asked})
    loaded = open_model(**run.source())
    assert torch.equal(loaded.network(images()), model(images()))
    assert "assumed mean=(0.5, 0.5, 0.5)" in loaded.source


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "vit_bse_patch16_224"}, "no model 'vit_bse_patch16_224'(?s:.*)vit_base_patch16"),
        ({"model": "test_vit.none"}, "no model 'test_vit.none'"),
        ({"model": "hf-hub:a/b"}, "no model 'hf-hub:a/b'"),
        ({"model": "test_vit", "image_size": 65}, "does not run test_vit on images of 65 px"),
        ({"model": "test_vit", "arguments": {"deep": 1}}, "unexpected keyword argument 'deep'"),
    ],
)
def test_what_timm_does_not_have_is_refused(values: dict[str, Any], message: str) -> None:
    settings = TimmSettings.model_validate(values)
    with pytest.raises(UserError, match=message):
        build_model(settings.resolved(num_classes=5), seed=0)


def test_arguments_load_no_weights() -> None:
    arguments = {"pretrained": True, "checkpoint_path": "x", "img_size": 64}
    found = list(TimmSettings(model="test_vit", arguments=arguments).problems())
    assert [text.split()[0] for _, text in found] == list(arguments)


def test_statistics_of_batches_are_not_trained() -> None:
    values = {"name": "x", "data": {"path": "x", "global_batch": 1}, "schedule": {"steps": 1}}
    model = {"name": "timm", "model": "test_resnet", "num_classes": 5, "image_size": SIZE}
    run = PretrainRun.model_validate({**values, "optim": {"lr": 1.0}, "model": model})
    arch = run.model.resolved(num_classes=5)
    with pytest.raises(UserError, match="timm test_resnet has BatchNorm"):
        build.build_model(run, run.make_objective(), arch)
    assert built("test_resnet")(images()).shape == (2, 5)
