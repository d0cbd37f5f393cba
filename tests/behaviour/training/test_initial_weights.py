"""Fine-tuning says what its weights expect, refuses misfits, and keeps a head's rows by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import save as saved_bytes
from safetensors.torch import save_file
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.engine.small_models import export, small_model
from tests.support.tables import refused, rows, words
from vitscale.checkpoint.folders import Save, commit_save, only_this_rank
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml
from vitscale.data.label_spaces import known_space
from vitscale.distributed.events import record_start
from vitscale.evaluation.trained_model import open_model
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.models.weights.files import Weights
from vitscale.training import session
from vitscale.training.start import load_initial_weights, with_head

CLASSES = ("cat", "dog")
COWS = (*CLASSES, "cow")
TEDDY_BEAR = "n04399382"
SMALL = yaml.safe_load(
    "{image_size: 8, patch_size: 4, width: 192, depth: 1, num_heads: 3, mlp_width: 16}"
)


def network(num_classes, *, seed=0, **changes):
    settings = ViTSettings.model_validate({**SMALL, **changes})
    return build_model(settings.resolved(num_classes=num_classes), seed=seed)


def load(run):
    """The lines that a start prints, and its network of two classes with the weights of `init`."""
    arch = run.model.resolved(num_classes=2)
    model = build_model(arch, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        _, lines = load_initial_weights(model, arch, run)
    except UserError:
        # A refusal half way would leave a model that nobody has trained.
        after = model.state_dict()
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        raise
    return lines, model


def test_training_says_what_the_weights_expect(tmp_path):
    weights = tmp_path / "model.safetensors"
    tensors = network(4).state_dict()
    save_file(tensors, weights)
    lines, model = started(Path("none"), weights, keep_head=False)
    assert lines[0] == f"starting from {weights}, timm's names"

    # A bare file tells neither: timm's models have exact GELU and ImageNet's colours.
    assert lines[1:] == [
        "warning: this run has gelu=tanh mean=[0.5, 0.5, 0.5] std=[0.5, 0.5, 0.5]; its weights "
        "probably expect other values; next: model.gelu=erf "
        "'data.mean=[0.485, 0.456, 0.406]' 'data.std=[0.229, 0.224, 0.225]'"
    ]
    assert torch.equal(model.cls_token, tensors["cls_token"])


# Linear with corners on corners, as Google's code; timm's; and what the names say, here timm's.
@words(convention="google timm auto")
def test_positions_are_resampled_by_the_convention_that_is_set(tmp_path, convention):
    weights = tmp_path / "model.safetensors"
    tensors = network(4).state_dict()
    save_file(tensors, weights)
    values = values_of(Path("none"), model={"image_size": 16})
    values |= {"init": str(weights), "keep_head": False}
    values |= {"position_embedding": convention}
    _, model = load(FinetuneRun.model_validate(values))

    # 2 x 2 positions become 4 x 4; that of the class token stays.
    before = tensors["pos_embed"]
    expected = resample_abs_pos_embed(before, new_size=[4, 4], num_prefix_tokens=1)
    if convention == "google":
        grid = before[0, 1:].unflatten(0, (2, 2)).double().numpy()
        zoomed = torch.from_numpy(zoom(grid, (2, 2, 1), order=1)).float()
        expected = torch.cat([before[:, :1], zoomed.flatten(0, 1)[None]], dim=1)
    torch.testing.assert_close(model.pos_embed.detach(), expected, atol=1e-5, rtol=0)


def test_patches_are_resized_where_that_is_set(tmp_path):
    """Larger patches have the same tokens, if their pixels are those of the smaller ones."""
    weights = tmp_path / "model.safetensors"
    tensors = network(4).state_dict()
    save_file(tensors, weights)
    larger = values_of(Path("none"), model={"image_size": 16, "patch_size": 8})
    values = larger | {"init": str(weights), "keep_head": False}
    values |= {"init_patch": "resize"}
    _, model = load(FinetuneRun.model_validate(values))
    patches = torch.randn(5, 3, 4, 4)
    same = F.interpolate(patches, size=(8, 8), mode="bilinear")
    kernel = tensors["patch_embed.proj.weight"].flatten(1)
    found = same.flatten(1) @ model.patch_embed.proj.weight.detach().flatten(1).T
    torch.testing.assert_close(found, patches.flatten(1) @ kernel.T, atol=1e-4, rtol=0)


# ---- a run of ours ------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    make_shard_folder(tmp_path / "shards", classes=CLASSES)
    return tmp_path / "shards"


def new_model(run, *, num_classes=2):
    """The model of a run, with what its objective adds."""
    objective = run.make_objective()
    arch = run.model.resolved(num_classes=num_classes * objective.trains_classifier)
    return session.build_model(run, objective, arch), arch


def values_of(shards, **changes):
    """A configuration; changes: of `model` and `data`."""
    values = {
        "name": "x",
        "model": dict(SMALL),
        "data": {"path": str(shards), "global_batch": 64},
        "optim": {"lr": 0.1},
        "schedule": {"steps": 1},
    }
    for section, keys in changes.items():
        values[section] = values.get(section, {}) | keys
    return values


def write_run(folder, shards, *, classes=CLASSES, kind=FinetuneRun, **changes):
    """The run folder of a training that has committed a checkpoint; returns its network."""
    run = kind.model_validate(values_of(shards, **changes) | {"seed": 3})
    model, arch = new_model(run, num_classes=len(classes))

    # A new head is zero, and rows of zeros could not be told apart.
    if arch.num_classes:
        torch.nn.init.normal_(model.head.weight)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    save = Save(
        checkpoints=folder / "checkpoints",
        step=1,
        attempt="a",
        rank=0,
        keep=1,
        progress={},
        description={
            "architecture": arch.description(),
            "grid": arch.grid,
            "ema": None,
        },
    )
    save.checkpoints.mkdir(parents=True)
    commit_save(save, [saved_bytes(tensors)], gather=only_this_rank)
    (folder / "config.yaml").write_text(run_to_yaml(run))
    (folder / "classes.json").write_text(json.dumps(classes))
    return model


def started(shards, init, *, keep_head=True, **changes):
    values = values_of(shards, **changes) | {"init": str(init), "keep_head": keep_head}
    return load(FinetuneRun.model_validate(values))


# Objectives with a head of the model, a decoder, prototypes and a teacher, and a projector.
PRETRAINED = """
supervised: {objective: {name: supervised}}
mae: {objective: {name: mae, decoder_width: 8, decoder_depth: 1, decoder_heads: 2}}
dino:
  objective: {name: dino, num_prototypes: 9, hidden_width: 8, bottleneck_width: 4}
  data: &views {views: [{name: global, count: 2}]}
lejepa: {objective: {name: lejepa, hidden_width: 8, projection_width: 4}, data: *views}
"""


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name, changes", yaml.safe_load(PRETRAINED).items())
def test_every_pre_training_starts_from_a_file_and_from_a_run(
    shards, tmp_path, name, changes
):
    file = tmp_path / "timm.safetensors"
    tensors = network(4).state_dict()
    save_file(tensors, file)
    own = write_run(tmp_path / "run", shards, kind=PretrainRun, **changes).state_dict()
    for init, source in ((file, tensors), (tmp_path / "run", own)):
        values = values_of(shards, **changes) | {"init": str(init)}
        run = PretrainRun.model_validate(values)
        model, arch = new_model(run)
        _, lines = load_initial_weights(model, arch, run)

        # All of our own run, whose classes are the same; of a file all but its head.
        for key, value in model.state_dict().items():
            is_head = key.startswith(("head.", "objective."))
            if not is_head or init != file:
                assert torch.equal(value, source[key]), key
        origin = "of init" if init != file else "new: init has none like it"
        assert (f"what {name} trains beside the model is {origin}" in lines) == (
            name != "supervised"
        )
        assert not any("left out" in line for line in lines)

    # Another size of what lies beside the model: it is new, and what is left out is named.
    if name == "dino":
        changes["objective"]["num_prototypes"] = 11
        values = values_of(shards, **changes) | {"init": str(tmp_path / "run")}
        run = PretrainRun.model_validate(values)
        _, lines = load_initial_weights(*new_model(run), run)
        assert any("is new: init has none like it" in line for line in lines)
        assert any("left out" in line and "objective." in line for line in lines)


def test_all_ranks_get_what_the_first_has_loaded(shards, tmp_path, world, monkeypatch):
    """Buffers, too: centres that differ between ranks would never meet."""
    changes = yaml.safe_load(PRETRAINED)["dino"]
    write_run(tmp_path / "run", shards, kind=PretrainRun, **changes)
    values = values_of(shards, **changes) | {"init": str(tmp_path / "run")}
    run = PretrainRun.model_validate(values)
    model, arch = new_model(run)
    sent = []
    monkeypatch.setattr(
        session, "broadcast_tensor", lambda tensor, source: sent.append(tensor)
    )
    session.start_from(model, arch, run, world)
    expected = [*model.parameters(), *model.buffers()]
    assert sorted(tensor.data_ptr() for tensor in sent) == sorted(
        tensor.data_ptr() for tensor in expected
    )


# What differs from the run that is loaded, and what the warning says of it: what this run has, and
# the words that would undo it. Regularisation may differ: it is no property of weights.
@rows("""
- [changes, words]
- [{}, null]
- [{model: {gelu: erf}}, [gelu=erf, model.gelu=tanh]]
- [{model: {layer_norm_eps: 0.1}}, [layer_norm_eps=0.1, model.layer_norm_eps=1e-06]]
- [{model: {pool: gap, class_token: true}}, [pool=gap, model.pool=cls]]
- [{data: {mean: [0.2, 0.2, 0.2], std: [0.9, 0.9, 0.9]}}, ['mean=[0.2, 0.2, 0.2] std=[0.9, 0.9,
  0.9]', "'data.mean=[0.5, 0.5, 0.5]' 'data.std=[0.5, 0.5, 0.5]'"]]
- [{model: {dropout: 0.1, drop_path: 0.2}}, null]
""")
def test_our_own_runs_are_compared_as_other_weights_are(
    shards, tmp_path, changes, words
):
    write_run(tmp_path / "run", shards)
    lines, _ = started(shards, tmp_path / "run", **changes)
    expected = []
    if words:
        has, wants = words
        expected = [
            f"warning: this run has {has}; its weights expect other values; next: {wants}"
        ]
    assert lines[2:] == expected


@words(kind="run safetensors huggingface")
def test_another_number_of_heads_is_refused_where_it_is_known(shards, tmp_path, kind):
    """The tensors fit, whatever the heads."""
    init = tmp_path / "init"
    if kind == "run":
        write_run(init, shards)
    else:
        export(small_model(num_classes=2, classes=CLASSES, **SMALL), kind, init)
    started(shards, init)
    with refused(r"have 3 attention heads, and this run 6(?s:.*)num_heads=3"):
        started(shards, init, model={"num_heads": 6})

    # Where tensors do not fit either, that is the first thing to say.
    with refused("tensors do not fit"):
        started(shards, init, model={"num_heads": 6, "width": 384})


def test_an_unfinished_run_is_called_so(shards, tmp_path):
    run = tmp_path / "run"
    pixels = {"interpolation": "bicubic", "eval_interpolation": "bilinear"}
    write_run(run, shards, data=pixels, objective={"loss": "bce"})

    # It is opened as it is: with its evaluation's resizing, not its training's, and its loss.
    opened = open_model(str(run))
    assert opened.preprocessing.eval_interpolation == "bilinear"
    assert opened.independent

    # Weights of a run that was interrupted are easily taken for its result.
    for total, ending in ((1, "step 1"), (40, "step 1 of 40, not finished")):
        record_start(run, first_step=0, total_steps=total)
        lines, _ = started(shards, run)
        assert lines[0].endswith(ending)


# The same classes in any order; others; and models whose head reads other features than the run's.
@rows("""
- [classes, changes, is_kept]
- [[cat, dog], {}, true]
- [[dog, cat], {}, true]
- [[cat, owl], {}, false]
- [[cat, dog, owl], {}, false]
- [[cat, dog], {pool: gap}, false]
- [[cat, dog], {representation_layer: true}, false]
""")
def test_by_default_a_head_is_kept_for_the_same_classes(
    shards,
    tmp_path,
    classes,
    changes,
    is_kept,
):
    source = write_run(tmp_path / "run", shards, classes=tuple(classes))
    # Without a class token the tensors would not fit, and the head would not matter.
    if "pool" in changes:
        changes["class_token"] = True
    lines, model = started(shards, tmp_path / "run", keep_head="auto", model=changes)
    if is_kept:
        order = [classes.index(name) for name in CLASSES]
        assert torch.equal(model.head.weight, source.head.weight[order])
    else:
        assert "the head is new: init has none for these classes" in lines
        # With a representation layer the head is the last of three modules.
        last = model.head if hasattr(model.head, "weight") else model.head[2]
        assert not last.weight.any()


def test_misfits_name_the_keys_that_would_fit(tmp_path):
    path = tmp_path / "model.npz"
    changes = {
        "pool": "gap",
        "pool_norm": True,
        "layer_scale": 0.1,
        "mlp_width": 24,
    }
    tensors = network(4, **changes).state_dict()
    arrays = {name: value.numpy() for name, value in tensors.items()}
    np.savez(path, **arrays)
    with refused("tensors do not fit") as caught:
        started(Path("none"), path, keep_head=False)

    # One refusal has all keys, or the user would find them one by one.
    advice = caught.value.next_step
    assert advice.startswith("these weights need ")
    keys = {"model.mlp_width=24", "model.pool=gap", "model.pool_norm=true"}
    assert keys <= set(advice.split())


# ---- rows of a head -----------------------------------------------------------------------------


def head(num_classes, *, names=("head",)):
    """Row i has weights i and bias -i."""
    rows = torch.arange(float(num_classes))
    # Other tensors, one of them of a layer before the head, which has no rows of classes.
    tensors = {
        "cls_token": torch.ones(1, 1, 2),
        "head.0.weight": torch.ones(2, 2),
    }
    for name in names:
        tensors[f"{name}.weight"] = rows[:, None].repeat(1, 2)
        tensors[f"{name}.bias"] = -rows
    return tensors


def test_999_of_imagenets_classes_are_in_the_21k_head():
    target = known_space("imagenet_1k")
    tensors, line = kept(head(21_843), None, target)
    assert line.startswith("kept 999 of 1,000 classes of the head, matched by")
    assert line.endswith(f"zero weights for {TEDDY_BEAR}")
    assert target.index(TEDDY_BEAR) == 850

    # The class without weights has the smallest bias, so that it is never the guess.
    weight = tensors["head.weight"]
    assert weight.shape == (1000, 2)
    lacking = weight.abs().sum(1) == 0
    assert lacking.nonzero().flatten().tolist() == [850]
    assert tensors["head.bias"][850] == tensors["head.bias"].min()

    # A row's value is its number in the source, by timm's list of that release.
    source = known_space("imagenet_21k_goog")
    kept_names = [source[int(row)] for row in weight[:3, 0]]
    assert kept_names == list(target[:3])
    assert torch.equal(tensors["cls_token"], torch.ones(1, 1, 2))


def kept(
    weights,
    source,
    target,
    keep="slice",
):
    given = Weights(
        tensors=weights,
        classes=source,
        where="there",
    )
    changed, (line,) = with_head(given, target, keep=keep)
    return changed.tensors, line


# The two heads of a distilled model, and a head behind a representation layer.
@pytest.mark.parametrize("names", [("head", "head_dist"), ("head.2",)])
def test_own_names_choose_and_order_the_rows(names):
    source = ("cat", "dog", "cow", "owl")
    tensors, line = kept(head(4, names=names), source, ("owl", "cat"))
    assert line == "kept 2 of 2 classes of the head, matched by name"
    for name in names:
        assert tensors[f"{name}.weight"].tolist() == [[3, 3], [0, 0]]
        assert tensors[f"{name}.bias"].tolist() == [-3, 0]


# Names that have no class in common, no names, too few names, no head at all.
@rows(r"""
- [num_rows, source, message]
- [4, [a, b, c, d], '\(a, b, ...\) include 0 of the 3']
- [4, null, outputs are unknown]
- [5, [cat, dog, cow, d], 4 names of classes .* 5 outputs]
- [null, null, contains no classifier]
""")
def test_too_few_matches_are_one_error(num_rows, source, message):
    weights = {"cls_token": torch.ones(1)}
    if num_rows:
        weights = head(num_rows)
    with refused(message):
        kept(weights, source, COWS)


def test_a_whole_head_is_kept_for_the_same_classes_in_any_order():
    """DeiT at 384 px; rows are matched by name where both sides have names."""
    weight = head(3)["head.weight"]
    same, line = kept(head(3), COWS, COWS, True)
    assert line == "kept 3 of 3 classes of the head"
    assert torch.equal(same["head.weight"], weight)

    other, line = kept(head(3), COWS, ("cow", "cat", "dog"), True)
    assert line.endswith("matched by name")
    assert other["head.bias"].tolist() == [-2, 0, -1]

    # Nothing tells the order of unnamed outputs, so the assumption is said.
    unnamed, line = kept(head(3), None, COWS, True)
    assert "have no names: taken in the shards' order" in line
    assert torch.equal(unnamed["head.weight"], weight)

    # Another class, a part of them, and numbers.
    for names, target in (
        ("cat dog cow", "cat dog owl"),
        ("cat dog cow", "cat dog"),
        ("0 1 2", "cat dog owl"),
    ):
        with refused("set keep_head=slice or false"):
            kept(head(3), tuple(names.split()), tuple(target.split()), True)
