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

# A ViT, and three models whose outputs are maps: with LayerNorm, with GroupNorm, without attention.
NAMES = ("test_vit", "test_convnext", "test_efficientnet_gn", "test_mambaout")
SIZE = 64


def built(name, *, seed=0, num_classes=5, **values):
    values = {
        "image_size": SIZE,
        "head_std": 0.1,
        **values,
    }
    settings = TimmSettings(model=name, **values)
    return build_model(settings.resolved(num_classes=num_classes), seed=seed)


def load(target, source, **options):
    options = {"keep_head": True, **options}
    target.load_weights(source.state_dict(), where="x", **options)


def plain(name):
    """The model as timm makes it."""
    # Models that take any size know no such argument.
    sized = {}
    if timm.get_pretrained_cfg_value(name, "fixed_input_size"):
        sized = {"img_size": SIZE}
    return timm.create_model(name, num_classes=5, **sized).eval()


def images(size=SIZE):
    random = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, size, size, generator=random)


@every(name=NAMES)
@torch.no_grad()
def test_outputs_and_costs_are_those_of_timm(name):
    model = built(name).eval()
    theirs = plain(name)
    theirs.load_state_dict(model.state_dict())
    assert torch.equal(model(images()), theirs(images()))

    # The features are what timm's own head multiplies.
    maps = theirs.forward_features(images())
    features = theirs.forward_head(maps, pre_logits=True)
    assert torch.equal(model(images(), output="features"), features)

    arch = TimmSettings(model=name, image_size=SIZE).resolved(num_classes=5)
    counted = sum(parameter.numel() for parameter in theirs.parameters())
    assert num_parameters(arch) == counted


def test_flops_of_a_transformer_are_those_of_the_formula():
    # One is counted while a model runs, the other one follows from its sizes.
    theirs = TimmSettings(model="vit_base_patch16_224").resolved(num_classes=1000)
    ours = ViTSettings(preset="B/16").resolved(num_classes=1000)
    expected = costs.train_flops_per_image(ours)
    assert train_flops_per_image(theirs) == pytest.approx(expected, rel=1e-6)


@every(name=NAMES)
def test_the_seed_gives_the_weights(name):
    first = built(name, seed=1).state_dict()
    same = built(name, seed=1).state_dict()
    other = built(name, seed=2).state_dict()
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)

    # The head starts at its bias, whatever timm's own start is.
    new = built(name, head_std=0.0, head_bias=-10.0).eval()
    expected = torch.full((2, 5), -10.0)
    assert torch.equal(new(images()), expected)


@every(name=NAMES)
def test_rates_and_decay_by_layer_are_those_of_timm(name):
    model = built(name)
    arch = TimmSettings(model=name, image_size=SIZE).resolved(num_classes=5)

    # A function of some models, absent from others.
    kept = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_layer_decay(
        model,
        weight_decay=0.05,
        no_weight_decay_list=kept,
        layer_decay=0.7,
    )
    ours = optimizer_groups(
        model.named_parameters(),
        settings=OptimSettings(lr=1.0, weight_decay=0.05, layer_decay=0.7),
        decayed=decayed,
        layers_above=lambda parameter: layers_above(parameter, arch),
    )

    # By parameter, since the two make groups in other ways.
    def chosen(groups):
        values = {}
        for group in groups:
            for parameter in group["params"]:
                values[id(parameter)] = (group["lr_scale"], group["weight_decay"])
        return values

    our_values = chosen(ours)
    their_values = chosen(theirs)
    assert our_values.keys() == their_values.keys()
    for key, values in their_values.items():
        assert our_values[key] == pytest.approx(values)


@every(name="test_convnext, test_efficientnet_gn")
@torch.no_grad()
def test_images_have_channels_last_on_a_gpu_and_stay_so(name, monkeypatch):
    """One layer that made planes of them would undo it for all after it."""
    model = built(name).eval()
    layouts = []

    def note(module, inputs, output):
        layouts.append(output.is_contiguous(memory_format=torch.channels_last))

    # Convolutions of 1 x 1 also run on pooled features, which have no layout to lose.
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1):
            module.register_forward_hook(note)
    expected = model(images())
    layouts.clear()

    # As if on a GPU: nothing else of the model asks where it is.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    logits = model(images())
    monkeypatch.undo()
    torch.testing.assert_close(logits, expected)
    assert len(layouts) > 3
    assert all(layouts)


@every(family="vit, timm")
def test_weights_are_rounded_once_for_bf16(family):
    """A batch converts pixels, to fp32 and to bf16, and no weight."""
    loaded = small_model(family)
    pixels = images(loaded.arch.image_size).mul(40).add(128).byte()
    in_fp32 = loaded.for_inference(WORLD, precision="auto", num_images=0)
    expected = in_fp32.logits(pixels)

    model = loaded.for_inference(WORLD, precision="bf16", num_images=0)
    with torch.profiler.profile(record_shapes=True) as profile:
        logits = model.logits(pixels)
    converted = [
        event.input_shapes[0]
        for event in profile.events()
        if event.name == "aten::_to_copy"
    ]

    # It did run in bf16: other logits, but near.
    assert logits.dtype == torch.float32
    assert 0 < (logits - expected).norm() < 0.1 * expected.norm()
    weights = [
        list(parameter.shape)
        for parameter in model.network.parameters()
        if parameter.ndim > 1
    ]
    assert converted[:2] == [list(pixels.shape)] * 2
    assert not [shape for shape in converted if shape in weights]


def test_batch_norms_stay_in_fp32():
    """bf16 would round a variance by 0.4 %."""
    model = built("test_resnet")
    # The classifier, too: see InFp32.
    kept = {"fc"}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.uniform_(1, 2)  # it has one
            kept.add(name)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    round_weights(model, torch.bfloat16)
    for name, value in model.state_dict().items():
        wanted = before[name]
        if name.rpartition(".")[0] not in kept:
            wanted = wanted.bfloat16()
        assert value.dtype == wanted.dtype, name
        assert torch.equal(value, wanted), name


@torch.no_grad()
def test_what_timm_saved_is_read(tmp_path):
    """The folder's arguments hold the number of classes, too; a file needs the model's name."""
    theirs = plain("test_convnext")
    save_for_hf(theirs, tmp_path)
    folder = open_model(str(tmp_path))
    asked = TimmSettings(
        name="timm",
        model="test_convnext",
        image_size=SIZE,
    )
    file = open_model(str(tmp_path / "pytorch_model.bin"), model=asked)

    # The folder says for which size it was trained.
    for opened, size in ((folder, 160), (file, SIZE)):
        assert opened.arch.name == "timm"
        assert opened.num_classes == 5
        assert opened.arch.image_size == size
        assert torch.equal(opened.network(images()), theirs(images()))
    assert "assumed mean=(0.5, 0.5, 0.5)" in file.source


SMALL = {"depth": 1, "embed_dim": 48, "num_heads": 2}
# timm resizes FlexiViT bilinearly, and RADIO too, by version with its corners aligned.
READ_BY_TIMM = yaml.safe_load(f"""
test_convnext: {{}}
test_vit: {{}}
test_vit_relpos: {{}}
flexivit_small: {SMALL}
vit_base_patch16_radio_v3: {SMALL}
vit_so400m_patch16_radio_v4: {SMALL}
""")


@every(name=READ_BY_TIMM)
@torch.no_grad()
def test_folders_are_read_by_timm_and_here(tmp_path, name):
    """Also at another image size, resampled as timm does for this model."""
    arguments = READ_BY_TIMM[name]
    mean = (0.1, 0.2, 0.3)
    loaded = small_model(
        "timm",
        model=name,
        arguments=arguments,
        image_size=SIZE,
        classes=tuple("vwxyz"),
        preprocessing={"mean": mean},
    )

    # Without the name timm's ViT is read into our own.
    asked = TimmSettings(model=name, arguments=arguments)
    for to in ("timm", "safetensors"):
        folder = export(loaded, to, tmp_path / to)
        opened = open_model(str(folder), model=asked)
        assert opened.arch == loaded.arch
        assert opened.classes == loaded.classes
        assert opened.preprocessing.mean == mean
        assert torch.equal(opened.network(images()), loaded.network(images()))

    # A ConvNeXt takes any size as it is.
    options = {} if name == "test_convnext" else {"img_size": 96}
    folder = tmp_path / "timm"
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True, **options)
    expected = theirs.eval()(images(96))
    for model in (asked, None):
        larger = open_model(str(folder), model=model, image_size=96)
        torch.testing.assert_close(larger.network(images(96)), expected)

    # No other convention has an effect, so none is accepted.
    with refused("position_embedding: .*not as google(?s:.*)auto, timm"):
        open_model(str(folder), model=asked, position_embedding="google")


@every(asked="vit_tiny_patch16_224.augreg_in21k, deit_tiny_patch16_224, null")
def test_a_name_that_the_folder_does_not_state_is_said(tmp_path, asked):
    """The same tensors under another name may be another model. Our own family has no names."""
    loaded = small_model("timm", model="vit_tiny_patch16_224", arguments=SMALL)
    folder = export(loaded, "timm", tmp_path / "model")
    model = asked and TimmSettings(model=asked)
    opened = open_model(str(folder), model=model)
    assert opened.arch.name == ("vit" if model is None else "timm")
    warned = opened.source.endswith("; warning: computed as timm deit_tiny_patch16_224")
    assert warned == (asked == "deit_tiny_patch16_224")
    assert opened.source.count("warning") == warned


def test_transfer_keeps_all_but_the_classifier(tmp_path):
    source = built("test_convnext", seed=1)
    target = built("test_convnext", seed=2, num_classes=3)
    fresh = {name: value.clone() for name, value in target.state_dict().items()}
    load(target, source, keep_head=False)
    given = source.state_dict()
    for name, value in target.state_dict().items():
        expected = fresh if name.startswith("head.fc.") else given
        assert torch.equal(value, expected[name]), name

    # Other classes, and another model.
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
    source = timm.create_model(
        name,
        img_size=SIZE,
        num_classes=5,
        patch_size=16,
    )
    path = tmp_path / "model.safetensors"
    save_file(source.state_dict(), path)
    smaller = {"patch_size": 8}
    target = built(name, arguments=smaller)

    # A resized patch embedding is an approximation, so nothing resizes it unasked.
    with refused(r"8, 8\), checkpoint .*16, 16\)(?s:.*)init_patch=resize"):
        load(target, source)
    chosen = TimmSettings(
        model=name,
        image_size=SIZE,
        arguments=smaller,
    )
    with refused("tensors do not fit"):
        open_model(str(path), model=chosen)

    load(target, source, resize_patches=True)
    theirs = timm.create_model(name, img_size=SIZE, num_classes=5, **smaller).eval()
    load_checkpoint(theirs, path, filter_fn=checkpoint_filter_fn)
    torch.testing.assert_close(target.eval()(images()), theirs(images()))

    # Another image size alone is resampled as before.
    larger = built(name, image_size=2 * SIZE, arguments={"patch_size": 16})
    load(larger, source)


# Names that timm does not know or would download, a size that its layers cannot divide, an argument
# that its function does not have.
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
    # None must not become a layer of that name.
    assert classifiers(PretrainedCfg(classifier=None)) == ()


def build_for_training(name, **arguments):
    values = yaml.safe_load("""
    {name: x, data: {path: x, global_batch: 1}, schedule: {steps: 1}, optim: {lr: 1.0},
     model: {name: timm, num_classes: 5, image_size: 64}}
    """)
    values["model"] |= {"model": name, "arguments": arguments}
    run = PretrainRun.model_validate(values)
    arch = run.model.resolved(num_classes=5)
    return session.build_model(run, run.make_objective(), arch)


def test_statistics_of_batches_are_not_trained():
    # Statistics of a rank's own micro-batch would differ between ranks.
    with refused("timm test_resnet has BatchNorm"):
        build_for_training("test_resnet")

    # It may still be evaluated.
    assert built("test_resnet")(images()).shape == (2, 5)


def test_parameters_that_no_engine_or_checkpoint_holds_are_refused():
    """CoaT shares layers, which ended a training at its first save; NFNets scale by one number."""
    with refused(r"coat_lite_tiny uses \d+ parameters under two names"):
        build_for_training("coat_lite_tiny")
    with refused("has 12 parameters without a dimension .stages.0.0.skip"):
        build_for_training("dm_nfnet_f0")
    # Neither refusal is of timm's models as such.
    build_for_training("test_vit")
