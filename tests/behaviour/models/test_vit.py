"""The Vision Transformer: options against plain functions, start against the papers, outputs."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from timm.layers import Format
from timm.models.vision_transformer import VisionTransformer

from tests.support.tables import every, rows
from vitscale.distributed.random_numbers import stream_key
from vitscale.models import costs
from vitscale.models.costs import num_parameters
from vitscale.models.interface import DropPathByPosition, InFp32
from vitscale.models.positions import sincos_position_embedding
from vitscale.models.registry import MODELS
from vitscale.models.settings import TimmSettings, ViTSettings
from vitscale.models.vit import build_model, compile_blocks, decayed, layers_above
from vitscale.objectives.draws import uniform_rows

SMALL = ViTSettings(
    image_size=16,
    patch_size=4,
    width=24,
    depth=2,
    num_heads=2,
    mlp_width=40,
)
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def arch_of(*, num_classes=5, **changes):
    return SMALL.model_copy(update=changes).resolved(num_classes=num_classes)


def small(*, seed=3, **changes):
    return build_model(arch_of(**changes), seed=seed)


def shaken(**changes):
    """A model in double precision in which no weight is zero and the eps of the norms matters."""
    model = small(**changes).double().eval()
    random = torch.Generator().manual_seed(0)
    first = "patch_embed cls_token pos_embed reg_token".split()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random).double()
            parameter.add_(noise * 0.05)
            # Small inputs of the first norm, beside which its eps is not small.
            if name.split(".")[0] in first:
                parameter.mul_(0.02)
    return model


# Layer scale, SwiGLU, attention pooling and two heads as transformers and timm compute them:
# test_weights, test_exporting.
OPTIONS = yaml.safe_load("""
- {}
- {gelu: erf, representation_layer: true}
- {pool: gap, layer_norm_eps: 1.0e-05}
- {class_position: false}
- {pool: gap, class_token: true}
- {pool: gap, class_token: true, pool_norm: true, positions: sincos2d_mae}
- {head_width: 7, positions: sincos2d}
- {positions: sincos2d, pool: gap, num_registers: 1, representation_layer: true}
- {pool: cls_mean}
""")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_forward_and_count_equal_independent_references(options):
    model = shaken(**options)
    arch = arch_of(**options)
    images = PIXELS.double()
    weights = {**dict(model.named_parameters()), "pos_embed": model.pos_embed}
    facts = {
        "gelu": arch.gelu,
        "eps": arch.layer_norm_eps,
        "pool": arch.pool,
    }
    logits = model(images)
    expected = vit_logits(weights, images, **facts)
    assert torch.allclose(logits, expected, atol=1e-10)

    # The patch embedding as a product is the convolution.
    embedding = model.patch_embed.proj
    part = images[:, :, :12]
    assert torch.allclose(embedding.product(part), embedding(part), atol=1e-12)

    # The comparison is sensitive: another GELU or another eps fails.
    other_gelu = "erf" if arch.gelu == "tanh" else "tanh"
    for wrong in ({"gelu": other_gelu}, {"eps": 3e-6}):
        other = vit_logits(weights, images, **(facts | wrong))
        assert not torch.allclose(logits, other, atol=1e-7)

    # Plans and estimates count without a model.
    assert sum(p.numel() for p in model.parameters()) == num_parameters(arch)
    assert model.patch_embed.num_patches + model.num_prefix_tokens == arch.num_tokens

    # Norms, biases and tokens are not decayed.
    kept = [name for name, p in model.named_parameters() if decayed(name, p)]
    assert {"patch_embed.proj.weight"} < set(kept)
    assert all(name.endswith("weight") for name in kept)
    assert not any("norm" in name or "token" in name for name in kept)


# Products that the ratio cannot hold exactly, and one that it can.
@rows("""
- [width, mlp_width]
- [88, 120]
- [104, 240]
- [24, 96]
""")
def test_mlps_have_the_width_that_is_asked_for(width, mlp_width):
    """timm rounds the product of width and ratio down."""
    for mlp in ("gelu", "swiglu"):
        model = small(
            width=width,
            mlp_width=mlp_width,
            mlp=mlp,
        )
        assert model.blocks[0].mlp.fc2.in_features == mlp_width


# ---- initial weights --------------------------------------------------------------------------


@rows("""
- [options]
- [{num_registers: 2, class_position: false}]
- [{layer_scale: 0.1}]
- [{drop_path: 0.1}]
- [{attention_dropout: 0.1}]
- [{head_std: 0.1}]
""")
def test_options_do_not_change_the_other_weights_of_a_seed(options):
    # Both have it: it changes the shape of the position embedding.
    alike = {key: options[key] for key in options if key == "class_position"}
    plain = small(**alike).state_dict()
    changed = small(**options).state_dict()
    different = [name for name in plain if not torch.equal(plain[name], changed[name])]

    # Runs that compare an option start from the same weights, but for what the option is of.
    expected = ["head.weight"] if "head_std" in options else []
    assert different == expected


def test_fixed_positions_are_neither_trained_nor_saved():
    model = small(positions="sincos2d", dropout=0.5)
    assert "pos_embed" not in model.state_dict() | dict(model.named_parameters())
    expected = sincos_position_embedding((4, 4), width=24)
    assert torch.equal(model.pos_embed[0], expected)
    with_positions = model._pos_embed(torch.ones(1, 16, 24))
    zeros = (with_positions == 0).float().mean()
    assert zeros > 0.3  # dropout follows fixed positions too


def test_flax_initialisation():
    """models_vit.py; the layer that names no initialisation there has Flax's default."""
    model = small(
        width=96,
        num_heads=4,
        representation_layer=True,
        num_registers=3,
    )

    # Xavier uniform of each of q, k and v, not of the three as one matrix.
    bound = math.sqrt(6 / (96 + 96))
    for part in model.blocks[0].attn.qkv.weight.chunk(3):
        assert 0.98 * bound < part.abs().max().item() <= bound

    # LeCun normal, cut at two deviations, which makes the deviation 0.8796 of the normal's.
    std = 1 / math.sqrt(96)
    layer = model.head[0].weight
    assert layer.std().item() == pytest.approx(std, rel=0.03)
    cut = 2 * std / 0.8796
    assert layer.abs().max().item() == pytest.approx(cut, rel=0.01)

    # Registers start near zero, and not alike: equal ones would stay equal.
    registers = model.reg_token[0]
    assert 0 < registers.abs().max() < 1e-5
    assert not torch.equal(registers[0], registers[1])

    # Enough positions for their spread to be known to 2 %.
    large = {
        "image_size": 128,
        "width": 96,
        "num_heads": 4,
    }
    for name, std in (("vit", 0.02), ("big_vision", 1 / math.sqrt(96))):
        spread = small(**large, position_init=name).pos_embed.std().item()
        assert spread == pytest.approx(std, rel=0.02)


def test_deit_initialisation():
    """DeiT-III's models_v2.py: N(0, 0.02) everywhere; patches U(+-1 / sqrt(fan-in)), PyTorch's."""
    model = small(
        weight_init="deit",
        head_std=0.02,
        width=192,
        num_heads=4,
        distillation_token=True,
    )
    weights = dict(model.named_parameters())
    names = """
    cls_token dist_token pos_embed blocks.1.attn.qkv.weight blocks.0.mlp.fc1.weight
    head.weight head_dist.weight
    """
    for name in names.split():
        std = weights[name].std().item()
        assert std == pytest.approx(0.02, rel=0.2), name

    # Two heads that start alike and see the same labels would stay alike.
    assert not torch.equal(weights["head.weight"], weights["head_dist.weight"])

    # The fan-in of a patch of 4 x 4 pixels and 3 channels.
    bound = 1 / math.sqrt(48)
    patches = weights["patch_embed.proj.weight"]
    assert 0.98 * bound < patches.abs().max().item() <= bound
    assert 0 < weights["patch_embed.proj.bias"].abs().max().item() <= bound
    biases = [
        bias
        for name, bias in weights.items()
        if name.endswith(("fc1.bias", "qkv.bias"))
    ]
    assert biases
    assert not any(bias.any() for bias in biases)


def test_the_head_starts_at_its_bias():
    # As for a sigmoid loss over many classes: all are improbable at first, and weights are 0.
    logits = small(head_bias=-10.0)(PIXELS)
    assert torch.equal(logits, torch.full((2, 5), -10.0))

    # With a layer before the head, the bias is the last one's.
    last = small(head_bias=-10.0, head_std=2e-2, representation_layer=True).head[-1]
    assert last.bias.tolist() == [-10.0] * 5
    assert last.weight.std().item() == pytest.approx(2e-2, rel=0.2)


# ---- regularisation -----------------------------------------------------------------------------


def test_dropout_is_after_dense_layers_but_qkv_and_drop_path_grows_or_is_constant():
    model = small(dropout=0.3)
    block = model.blocks[0]
    for dropout in (
        block.attn.proj_drop,
        block.mlp.drop1,
        block.mlp.drop2,
        model.pos_drop,
    ):
        assert dropout.p == 0.3
    assert block.attn.attn_drop.p == 0.0

    # A block without drop path has an identity there.
    def rates(**options):
        blocks = small(
            drop_path=0.3,
            depth=4,
            **options,
        ).blocks
        return [getattr(block.drop_path2, "drop_prob", 0.0) for block in blocks]

    assert rates() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert rates(drop_path_by_depth="constant") == [0.3] * 4


@pytest.mark.slow
def test_blocks_of_different_rates_are_compiled_once():
    # Counts of earlier tests would be added to these.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    model = small(depth=4, drop_path=0.3)
    names = set(model.state_dict())
    compile_blocks(model, backend="aot_eager")
    assert set(model.state_dict()) == names
    rates = {
        m.rate.item() for m in model.modules() if isinstance(m, DropPathByPosition)
    }
    assert len(rates) == 3  # the first block has none
    model(PIXELS).sum().backward()

    # Without drop path in the first block, with it in the others.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_drop_path_draws_from_positions_alone():
    """By hand: the numbers of a host, of each position and view, against the rate."""
    model = small(depth=3, drop_path=0.3)
    drop = model.blocks[2].drop_path1
    positions = np.array([5, 0, 1 << 40])
    drop.positions = torch.from_numpy(positions)
    key = stream_key("drop path", 3, "blocks.2.drop_path1")
    # Of two tokens, whose number is added.
    uniform_BV = uniform_rows(positions, num=2, key=key + 2)
    kept = torch.from_numpy(uniform_BV >= 0.3).flatten() / 0.7

    ones = torch.ones(6, 2, 1)
    torch.testing.assert_close(drop(ones)[:, 1, 0], kept.float())
    assert torch.equal(drop.eval()(ones), ones)

    # Often enough, and apart from another layer's and another seed's.
    drop.train()
    drop.positions = torch.arange(20_000)
    dropped = drop(torch.ones(20_000, 1)) == 0
    assert abs(dropped.float().mean().item() - 0.3) < 0.02
    others = [small(depth=3, drop_path=0.3).blocks[2].drop_path2]
    others.append(small(depth=3, drop_path=0.3, seed=1).blocks[2].drop_path1)
    for other in others:
        other.positions = drop.positions
        both = (other(torch.ones(20_000, 1)) == 0) & dropped
        assert abs(both.float().mean().item() - 0.09) < 0.02


# ---- outputs ------------------------------------------------------------------------------------


@torch.no_grad()
@rows("""
- [options]
- [{}]
- [{num_registers: 2, class_token: true, pool: gap}]
- [{positions: sincos2d}]
""")
def test_tokens_at_another_size_are_those_of_timm(options):
    """Views are smaller than the model; positions are resampled as timm does it."""
    model = small(image_size=16, patch_size=4, **options).eval()
    twin = copy.deepcopy(model)
    twin.__class__ = VisionTransformer
    # timm's own way needs patches in rows and columns.
    twin.patch_embed.flatten = False
    twin.patch_embed.output_fmt = Format.NHWC
    for side in (8, 16, 24):
        images = torch.randn(2, 3, side, side)
        features, patches = model(images, output="tokens")
        expected = twin.forward_features(images)
        assert patches.shape[1] == (side // 4) ** 2
        torch.testing.assert_close(patches, expected[:, model.num_prefix_tokens :])
        pooled = twin.forward_head(expected, pre_logits=True)
        torch.testing.assert_close(features, pooled)


@torch.no_grad()
@every(family="vit, timm")
def test_masked_patches_are_seen_nowhere(family):
    """A mask token has its position, and nothing of its pixels."""
    if family == "vit":
        model = small(image_size=16, patch_size=4).eval()
    else:
        arguments = {"patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 2}
        arch = TimmSettings(
            model="vit_tiny_patch16_224",
            image_size=16,
            arguments=arguments | {"dynamic_img_size": True},
        ).resolved(num_classes=0)
        model = MODELS["timm"].load().build_model(arch, seed=0).eval()
    token = torch.randn(model.num_features)
    images = torch.randn(2, 3, 16, 16)
    masked = torch.zeros(2, 16, dtype=torch.bool)
    masked[0, [0, 5]] = True

    def patches_of(images):
        inputs = {"masked_BL": masked, "mask_token_D": token}
        return model(images, output="tokens", **inputs)[1]

    # Patch 5 is in the second row and column.
    changed = images.clone()
    changed[0, :, 4:8, 4:8] = 9
    assert torch.equal(patches_of(images), patches_of(changed))
    changed[1, :, 4:8, 4:8] = 9
    assert not torch.equal(patches_of(images), patches_of(changed))
    # Without masks the hook is gone.
    plain = model(images, output="tokens")[1]
    assert not torch.allclose(plain[0], patches_of(images)[0])
    assert torch.allclose(plain[1], patches_of(images)[1], atol=1e-5)


@torch.no_grad()
def test_outputs_are_what_their_names_say():
    model = small(
        depth=5,
        num_registers=1,
        representation_layer=True,
        head_std=0.1,
    ).eval()
    logits = model(PIXELS)
    features = model(PIXELS, output="features")
    assert torch.equal(features, model.forward_features(PIXELS)[:, 0])
    assert torch.equal(model.head(features), logits)
    representation = model(PIXELS, output="representation")
    assert torch.equal(model.head[2](representation), logits)

    # A model lists what it has: two heads, or four blocks with a class token, are not in all.
    assert "heads" not in model.known_outputs
    assert "blocks" not in small(depth=3).known_outputs
    mean = small(pool="gap", depth=4).eval()
    assert mean.known_outputs == ("logits", "features")
    tokens = mean.forward_features(PIXELS)
    assert torch.equal(mean(PIXELS, output="features"), tokens.mean(dim=1))

    def tokens_after(num_blocks):
        """The tokens as if the model had no more blocks, with the last norm."""
        cls = model.cls_token.expand(2, 1, 24)
        register = model.reg_token.expand(2, 1, 24)
        patches = model.patch_embed(PIXELS) + model.pos_embed
        tokens = torch.cat([cls, register, patches], dim=1)
        return model.norm(model.blocks[:num_blocks](tokens))

    # DINOv2's linear evaluation: four class tokens and the mean patch; a register is no patch.
    expected = [tokens_after(number)[:, 0] for number in (5, 4, 3, 2)]
    expected.append(tokens_after(5)[:, 2:].mean(dim=1))
    blocks = model(PIXELS, output="blocks")
    assert torch.allclose(blocks, torch.cat(expected, dim=1), atol=1e-6)


def test_a_distilled_model_has_a_head_for_each_token():
    model = small(distillation_token=True, head_std=0.1)
    heads = model(PIXELS, output="heads")
    tokens = model.forward_features(PIXELS)
    assert torch.equal(heads[0], model.head(tokens[:, 0]))
    assert torch.equal(heads[1], model.head_dist(tokens[:, 1]))
    features = model(PIXELS, output="features")
    assert torch.equal(features, tokens[:, :2].mean(dim=1))

    # Training without a teacher trains both heads, through the mean that is used at test.
    mean = torch.stack(heads).mean(dim=0)
    torch.testing.assert_close(model(PIXELS), mean)
    model(PIXELS).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    arch = arch_of(distillation_token=True)
    assert layers_above("dist_token", arch) == 3
    assert layers_above("head_dist.weight", arch) == 0


# ---- settings -----------------------------------------------------------------------------------


def test_resolved_settings_stay_as_they_are():
    settings = ViTSettings(preset="B/16", depth=2)
    arch = settings.resolved(num_classes=7)
    assert arch.width == 768
    assert arch.depth == 2
    assert arch.patch_size == 16
    assert arch.num_classes == 7

    # A checkpoint's architecture is resolved again when it is read, and the user's is not changed.
    assert arch.resolved(num_classes=9) == arch
    assert settings.width is None


# ---- every family --------------------------------------------------------------------------------

# Where the defaults at 32 px are not enough.
FAMILIES = {
    "vit": SMALL.model_copy(update={"image_size": 32, "distillation_token": True}),
    "timm": TimmSettings(image_size=32, model="test_convnext"),
}


@pytest.fixture(params=MODELS)
def model(request):
    family = MODELS[request.param]
    settings = FAMILIES.get(request.param) or family.Settings(image_size=32)
    arch = settings.resolved(num_classes=5)
    return family.load().build_model(arch, seed=0)


def test_the_objective_takes_further_inputs(model):
    images = torch.zeros(1, 3, 32, 32)
    # A typing error must not give the logits.
    with pytest.raises(AssertionError, match="feature"):
        model(images, output="feature")

    # DeepSpeed wraps the model, so all that an objective computes goes through its forward.
    model.objective = Scaled()
    assert torch.equal(model(images + 1, output="objective", factor=2), images + 2)


def test_logits_are_in_fp32_in_a_model_in_bf16(model):
    """Near -10, where bf16 has steps of 0.06; also under autocast, as at ZeRO stage 0."""
    heads = [module for module in model.modules() if isinstance(module, InFp32)]
    assert len(heads) == (2 if "heads" in model.known_outputs else 1)
    originals = {}
    for head in heads:
        torch.nn.init.normal_(head.weight, std=0.1)
        torch.nn.init.normal_(head.bias, mean=-10)
        for name, parameter in head.named_parameters():
            originals[name] = parameter.detach().clone()

    images = torch.zeros(1, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(images).dtype == torch.float32
    rounded = model.bfloat16()(images.bfloat16())
    assert rounded.dtype == torch.float32

    # The last head again, whose parameters `originals` now has. What rounding took from them:
    last = heads[-1]
    last.remainders = {
        name: (originals[name] - parameter).detach()
        for name, parameter in last.named_parameters()
    }
    features = torch.randn(4, *last.weight.shape[1:]).bfloat16()
    kernel = originals["weight"].flatten(1)
    wanted = features.float().flatten(1) @ kernel.T + originals["bias"]
    assert (last(features).flatten(1) - wanted).abs().max() < 1e-5

    # Without it the logits are off by far more.
    last.remainders = {}
    assert (last(features).flatten(1) - wanted).abs().max() > 1e-3


class Scaled(torch.nn.Module):
    def forward(self, model, images, factor):
        return images * factor


# ---- costs ---------------------------------------------------------------------------------------


def published(preset, num_classes=1000, **settings):
    model = ViTSettings.model_validate({"preset": preset, **settings})
    return model.resolved(num_classes=num_classes)


# timm's counts of these models, of ImageNet-1k.
@rows("""
- [preset, options, expected]
- [B/16, {}, 86567656]
- [L/16, {}, 304326632]
- [H/14, {}, 632045800]
- [Ti/16, {distillation_token: true}, 5910800]
- [S/16, {distillation_token: true}, 22436432]
- [B/16, {distillation_token: true, image_size: 384}, 87630032]
""")
def test_sizes_have_the_published_number_of_parameters(preset, options, expected):
    assert costs.num_parameters(published(preset, **options)) == expected


# Forward GMACs as timm's benchmark tables list them.
@rows("""
- [preset, gmacs]
- [B/16, 17.58]
- [L/16, 61.6]
- [L/14, 81.08]
- [H/14, 167.4]
""")
def test_flops_match_published_multiply_adds(preset, gmacs):
    # A training step has three times the forward pass, and a multiply-add is two operations.
    flops = costs.train_flops_per_image(published(preset))
    assert flops / 6e9 == pytest.approx(gmacs, rel=2e-3)


def test_activations_match_32_bytes_per_token_channel_and_block():
    # Korthikanti et al. 2022, table 2, without a stored attention matrix and masks of dropout.
    arch = published("L/16")
    kept = costs.activation_bytes_per_image(
        arch, precision="bf16", activation_checkpointing=False
    )
    # Pixels, the last norm's input, and the gradients of one MLP, which is four times as wide.
    outside = 2 * 3 * 224**2 + (2 + 4 * 2 + 2) * 197 * 1024
    assert kept == 32 * 197 * 1024 * 24 + outside

    less = costs.activation_bytes_per_image(
        arch, precision="bf16", activation_checkpointing=True
    )
    assert less < kept / 5


# fp32, stage 0: 4 + 4 + 8; 1: 4 + 4 + 8 / 8, since the slices of weights are updated in place.
# bf16, stage 0: 4 + 2 + 4 + 8, autocast: fp32 weights and gradients, a copy of weights;
# 1: 2 + 2 + 4 + 12 / 8, the gradients of a micro-batch, and sums in fp32; 2: 2 + 16 / 8; 3: 18 / 8.
@rows("""
- [precision, stage, bytes_per_parameter]
- [fp32, 0, 16]
- [fp32, 1, 9]
- [bf16, 0, 18]
- [bf16, 1, 9.5]
- [bf16, 2, 4]
- [bf16, 3, 2.25]
""")
def test_zero_stages_shard_what_the_paper_says(precision, stage, bytes_per_parameter):
    arch = published("L/16")
    memory = costs.memory_estimate(
        arch,
        costs=costs,
        zero_stage=stage,
        world_size=8,
        precision=precision,
        micro_batch=64,
        activation_checkpointing=False,
        optimizer_bytes=8,
        bucket_elements=25_000_000,
    )
    states = memory.total - memory.activations

    # What does not grow with the model is not what the paper counts.
    bucket_bytes = 4 if stage == 0 or precision == "fp32" else 2
    states -= 25_000_000 * bucket_bytes
    if stage == 3:
        states -= 2 * 50_000_000  # what is gathered ahead
    expected = bytes_per_parameter * costs.num_parameters(arch)
    assert states == pytest.approx(expected, rel=4e-3)


# ---- the papers' equations -----------------------------------------------------------------------


def vit_logits(
    w,
    images,
    *,
    gelu,
    pool,
    eps,
):
    """Logits from weights of timm's names: Dosovitskiy et al. 2021, eq. 1 to 4, of two heads."""

    def dense(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(
            x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps
        )

    # Equation 1: patches, and tokens and positions before or after them.
    kernel = w["patch_embed.proj.weight"]
    bias = w["patch_embed.proj.bias"]
    x = F.conv2d(images, kernel, bias, stride=kernel.shape[-1])
    x = x.flatten(2).mT
    num = x.shape[1]
    shape = (len(x), -1, -1)
    prefix = [w["cls_token"].expand(shape)] if "cls_token" in w else []
    if w["pos_embed"].shape[1] == num:
        x = torch.cat([*prefix, x + w["pos_embed"]], dim=1)
    else:
        x = torch.cat([*prefix, x], dim=1) + w["pos_embed"]

    # Registers have no position: they come in between.
    if "reg_token" in w:
        first = x[:, : len(prefix)]
        rest = x[:, len(prefix) :]
        registers = w["reg_token"].expand(shape)
        x = torch.cat([first, registers, rest], dim=1)

    # Equations 2 and 3: attention and the MLP, each behind a norm and beside a shortcut.
    for block in ("blocks.0", "blocks.1"):
        qkv = dense(f"{block}.attn.qkv", norm(f"{block}.norm1", x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in qkv)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        shares = scores.softmax(dim=-1)
        mixed = (shares @ v).transpose(1, 2).flatten(2)
        x = x + dense(f"{block}.attn.proj", mixed)
        hidden = dense(f"{block}.mlp.fc1", norm(f"{block}.norm2", x))
        active = F.gelu(hidden, approximate="tanh" if gelu == "tanh" else "none")
        x = x + dense(f"{block}.mlp.fc2", active)

    # Equation 4, and the heads of means, whose norm comes after the mean.
    if "norm.weight" in w:
        x = norm("norm", x)
    features = x[:, 0]
    mean = x[:, -num:].mean(dim=1)
    if pool == "gap":
        features = mean
    elif pool == "cls_mean":
        features = torch.cat([features, mean], dim=1)
    if "fc_norm.weight" in w:
        features = norm("fc_norm", features)
    if "head.0.weight" in w:
        return dense("head.2", dense("head.0", features).tanh())
    return dense("head", features)
