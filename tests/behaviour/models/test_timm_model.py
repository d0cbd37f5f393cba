"""Models of timm: its outputs, its layers, its folders, and what is refused."""

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file
from timm.models import PretrainedCfg, load_checkpoint, save_for_hf
from timm.models.vision_transformer import checkpoint_filter_fn
from timm.optim import param_groups_layer_decay

from pretrain.run import PretrainRun
from tests.support.engine.small_models import export, small_model
from tests.support.engine.subjects import WORLD
from tests.support.tables import every, refused, rows
from vitscale.evaluation.trained_model import open_model
from vitscale.models import costs
from vitscale.models.interface import round_weights
from vitscale.models.settings import TimmSettings, ViTSettings
from vitscale.models.timm_model import (
    TimmModel,
    build_model,
    classifiers,
    decayed,
    layers_above,
    num_parameters,
    train_flops_per_image,
)
from vitscale.optim.optimizers import optimizer_groups
from vitscale.optim.settings import OptimSettings
from vitscale.training import session

NAMES = ("test_vit", "test_convnext", "test_efficientnet_gn", "test_mambaout")
SIZE = 64


def built(name: str, *, seed: int = 0, num_classes: int = 5, **values) -> TimmModel:
    settings = TimmSettings(
        model=name, **{"image_size": SIZE, "head_std": 0.1, **values}
    )
    return build_model(settings.resolved(num_classes=num_classes), seed=seed)


def load(target: TimmModel, source: torch.nn.Module, **how: bool) -> None:
    target.load_weights(source.state_dict(), where="x", **{"keep_head": True} | how)


def plain(name: str, **options):
    sized = (
        {"img_size": SIZE}
        if timm.get_pretrained_cfg_value(name, "fixed_input_size")
        else {}
    )
    return timm.create_model(name, num_classes=5, **sized, **options)


def images(size: int = SIZE) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@every(name=NAMES)
@torch.no_grad()
def test_outputs_and_costs_are_those_of_timm(name):
    model = built(name).eval()
    own = plain(name).eval()
    own.load_state_dict(model.state_dict())
    assert torch.equal(model(images()), own(images()))
    features = own.forward_head(own.forward_features(images()), pre_logits=True)
    assert torch.equal(model(images(), output="features"), features)
    arch = TimmSettings(model=name, image_size=SIZE).resolved(num_classes=5)
    assert num_parameters(arch) == sum(each.numel() for each in own.parameters())


def test_flops_of_a_transformer_are_those_of_the_formula():
    theirs = TimmSettings(model="vit_base_patch16_224").resolved(num_classes=1000)
    ours = ViTSettings(preset="B/16").resolved(num_classes=1000)
    assert train_flops_per_image(theirs) == pytest.approx(
        costs.train_flops_per_image(ours), rel=1e-6
    )


@every(name=NAMES)
def test_the_seed_gives_the_weights(name):
    first, same, other = (built(name, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    new = built(name, head_std=0.0, head_bias=-10.0).eval()
    assert torch.equal(new(images()), torch.full((2, 5), -10.0))


@every(name=NAMES)
def test_rates_and_decay_by_layer_are_those_of_timm(name):
    model = built(name)
    arch = TimmSettings(model=name, image_size=SIZE).resolved(num_classes=5)

    # A function of some models, absent from others.
    kept = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_layer_decay(
        model, weight_decay=0.05, no_weight_decay_list=kept, layer_decay=0.7
    )
    ours = optimizer_groups(
        model.named_parameters(),
        settings=OptimSettings(lr=1.0, weight_decay=0.05, layer_decay=0.7),
        decayed=decayed,
        layers_above=lambda parameter: layers_above(parameter, arch),
    )

    def chosen(groups):
        return {
            id(parameter): (group["lr_scale"], group["weight_decay"])
            for group in groups
            for parameter in group["params"]
        }

    assert chosen(ours).keys() == chosen(theirs).keys()
    for key, values in chosen(theirs).items():
        assert chosen(ours)[key] == pytest.approx(values)


@every(name="test_convnext, test_efficientnet_gn")
@torch.no_grad()
def test_images_have_channels_last_on_a_gpu_and_stay_so(name, monkeypatch):
    """One layer that made planes of them would undo it for all after it."""
    model = built(name).eval()
    layouts = []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1):
            module.register_forward_hook(
                lambda _, given, made: layouts.append(
                    made.is_contiguous(memory_format=torch.channels_last)
                )
            )
    expected = model(images())
    layouts.clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = model(images())
    monkeypatch.undo()
    torch.testing.assert_close(found, expected)
    assert len(layouts) > 3
    assert all(layouts)


@every(family="vit, timm")
def test_weights_are_rounded_once_for_bf16(family):
    """A batch converts pixels, to fp32 and to bf16, and no weight."""
    loaded = small_model(family)
    pixels = images(loaded.arch.image_size).mul(40).add(128).byte()

    expected = loaded.for_inference(WORLD, precision="auto", num_images=0).logits(
        pixels
    )
    model = loaded.for_inference(WORLD, precision="bf16", num_images=0)
    with torch.profiler.profile(record_shapes=True) as profile:
        found = model.logits(pixels)
    converted = [
        each.input_shapes[0]
        for each in profile.events()
        if each.name == "aten::_to_copy"
    ]
    assert found.dtype == torch.float32
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()
    weights = [list(each.shape) for each in model.network.parameters() if each.ndim > 1]
    assert converted[:2] == [list(pixels.shape)] * 2
    assert not [shape for shape in converted if shape in weights]


def test_batch_norms_stay_in_fp32():
    """bf16 would round a variance by 0.4 %."""
    model = built("test_resnet")
    kept = {"fc"}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.uniform_(1, 2)  # it has one
            kept.add(name)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    round_weights(model, torch.bfloat16)
    for name, value in model.state_dict().items():
        is_kept = name.rpartition(".")[0] in kept
        wanted = before[name] if is_kept else before[name].bfloat16()
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name


@torch.no_grad()
def test_what_timm_saved_is_read(tmp_path):
    """The folder's arguments hold the number of classes, too; a file needs the model's name."""
    theirs = plain("test_convnext").eval()
    save_for_hf(theirs, tmp_path)
    asked = TimmSettings(name="timm", model="test_convnext", image_size=SIZE)
    file = open_model(str(tmp_path / "pytorch_model.bin"), model=asked)
    for found, size in ((open_model(str(tmp_path)), 160), (file, SIZE)):
        assert found.arch.name == "timm"
        assert found.num_classes == 5
        assert found.arch.image_size == size
        assert torch.equal(found.network(images()), theirs(images()))
    assert "assumed mean=(0.5, 0.5, 0.5)" in file.source


@every(name="test_convnext, test_vit, test_vit_relpos")
@torch.no_grad()
def test_folders_are_read_by_timm_and_here(tmp_path, name):
    """Also at another image size, resampled as timm does."""
    how = {"mean": (0.1, 0.2, 0.3)}
    loaded = small_model(
        "timm", model=name, image_size=SIZE, classes=tuple("vwxyz"), preprocessing=how
    )
    for to in ("timm", "safetensors"):
        folder = export(loaded, to, tmp_path / to)

        # Without the name timm's ViT is read into our own.
        found = open_model(str(folder), model=TimmSettings(model=name))
        assert found.arch == loaded.arch
        assert found.classes == loaded.classes
        assert found.preprocessing.mean == how["mean"]
        assert torch.equal(found.network(images()), loaded.network(images()))
    options = {} if name == "test_convnext" else {"img_size": 96}
    theirs = timm.create_model(
        f"local-dir:{tmp_path / 'timm'}", pretrained=True, **options
    ).eval()
    larger = open_model(
        str(tmp_path / "timm"), model=TimmSettings(model=name), image_size=96
    )
    torch.testing.assert_close(larger.network(images(96)), theirs(images(96)))


def test_transfer_keeps_all_but_the_classifier(tmp_path):
    source = built("test_convnext", seed=1)
    target = built("test_convnext", seed=2, num_classes=3)
    fresh = {name: value.clone() for name, value in target.state_dict().items()}
    load(target, source, keep_head=False)
    for name, value in target.state_dict().items():
        expected = fresh if name.startswith("head.fc.") else source.state_dict()
        assert torch.equal(value, expected[name]), name
    with refused(r"model \(3, 64\), checkpoint \(5, 64\)(?s:.*)keep_head=false"):
        load(target, source)
    with refused("tensors do not fit"):
        load(target, built("test_vit"), keep_head=False)

    # Positions with rows and columns are no patches.
    positions = built("pit_ti_224", image_size=96).state_dict()
    with refused(r"pos_embed: model \(1, 64, 7, 7\)") as caught:
        built("pit_ti_224").load_weights(positions, where="x", keep_head=True)
    assert "init_patch" not in str(caught.value)


@every(name="test_vit, test_vit2, vit_tiny_patch16_224")
def test_patches_of_another_size_are_resized_only_if_asked(tmp_path, name):
    """As of the family vit. timm's own reader resizes them unasked."""
    source = timm.create_model(name, img_size=SIZE, num_classes=5, patch_size=16)
    path = tmp_path / "model.safetensors"
    save_file(source.state_dict(), path)
    target = built(name, arguments={"patch_size": 8})
    with refused(r"8, 8\), checkpoint .*16, 16\)(?s:.*)init_patch=resize"):
        load(target, source)
    chosen = TimmSettings(model=name, image_size=SIZE, arguments={"patch_size": 8})
    with refused("tensors do not fit"):
        open_model(str(path), model=chosen)
    load(target, source, resize_patches=True)
    theirs = timm.create_model(name, img_size=SIZE, num_classes=5, patch_size=8).eval()
    load_checkpoint(theirs, path, filter_fn=checkpoint_filter_fn)
    torch.testing.assert_close(target.eval()(images()), theirs(images()))

    # Another image size alone is resampled as before.
    larger = built(name, image_size=2 * SIZE, arguments={"patch_size": 16})
    load(larger, source)


@rows("""
- [values, message]
- [{model: vit_bse_patch16_224}, 'no model ''vit_bse_patch16_224''(?s:.*)vit_base_patch16']
- [{model: test_vit.none}, no model 'test_vit.none']
- [{model: 'hf-hub:a/b'}, 'no model ''hf-hub:a/b''']
- [{model: test_vit, image_size: 65}, cannot run test_vit on images of 65 px]
- [{model: test_vit, arguments: {deep: 1}}, unexpected keyword argument 'deep']
""")
def test_what_timm_does_not_have_is_refused(values, message):
    settings = TimmSettings.model_validate(values)
    with refused(message):
        build_model(settings.resolved(num_classes=5), seed=0)


def test_a_published_encoder_may_name_no_classifier():
    assert classifiers(PretrainedCfg(classifier=None)) == ()


def build_for_training(name: str, **arguments) -> torch.nn.Module:
    values = yaml.safe_load("""
    {name: x, data: {path: x, global_batch: 1}, schedule: {steps: 1}, optim: {lr: 1.0},
     model: {name: timm, num_classes: 5, image_size: 64}}
    """)
    values["model"] |= {"model": name, "arguments": arguments}
    run = PretrainRun.model_validate(values)
    return session.build_model(
        run, run.make_objective(), run.model.resolved(num_classes=5)
    )


def test_statistics_of_batches_are_not_trained():
    with refused("timm test_resnet has BatchNorm"):
        build_for_training("test_resnet")
    assert built("test_resnet")(images()).shape == (2, 5)


def test_parameters_that_no_engine_or_checkpoint_holds_are_refused():
    """CoaT shares layers, which ended a training at its first save; NFNets scale by one number."""
    with refused(r"coat_lite_tiny uses \d+ parameters under two names"):
        build_for_training("coat_lite_tiny")
    with refused("has 12 parameters without a dimension .stages.0.0.skip"):
        build_for_training("dm_nfnet_f0")
    build_for_training("test_vit")
