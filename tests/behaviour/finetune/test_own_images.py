"""A fine-tuning without `model` takes model and pixels of its weights; the only other split is
evaluated; a run's card is of that run."""

import re
import shlex

import pytest

from finetune.run import FinetuneRun
from finetune.settings import EvaluateRun, PredictRun, settings_of_run
from tests.behaviour.training.test_initial_weights import write_run
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.engine.small_models import export, small_model
from tests.support.tables import refused, rows, words
from vitscale.config.errors import UserErrors
from vitscale.config.loader import full_name, load_run, load_run_file, run_to_yaml
from vitscale.data.index import read_split
from vitscale.evaluation.trained_model import open_model

COLOURS = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
SET = "model.image_size=16 model.drop_path=0.2 data.mean=[0,0,0]"
PIXELS = COLOURS | {"eval_interpolation": "bicubic", "eval_resize": "center_crop"}


def own(*overrides):
    """The configuration for images of one's own, which has no `model`."""
    words = ("data.path=nowhere", *overrides)
    return load_run(FinetuneRun, "own", overrides=words).run


def weights(kind, folder):
    """Of a run of ours, or published in another format each."""
    if kind == "run":
        make_shard_folder(folder / "shards", classes=("cat", "dog"))
        write_run(folder / "run", folder / "shards", data=COLOURS)
        return str(folder / "run")
    family = "timm" if kind == "hybrid" else "vit"
    model = small_model(family, preprocessing=PIXELS)
    return str(export(model, kind.replace("hybrid", "timm"), folder / "out"))


@words(kind="run timm huggingface hybrid npz")
def test_model_and_pixels_are_those_of_the_weights(kind, tmp_path):
    """As `evaluate init=` reads them, but for the head."""
    init = weights(kind, tmp_path)
    run = own(f"init={init}")
    opened = open_model(init)

    # The head is of the shards that come.
    described = run.model.resolved(num_classes=opened.num_classes).description()
    assert described == opened.arch.description()
    assert run.model.num_classes is None

    # Training resizes as the weights' evaluation does.
    values = opened.preprocessing.data_values()
    assert {key: getattr(run.data, key) for key in values} == values
    assert run.data.interpolation == values["eval_interpolation"]

    # A rank reads the resolved file, and no weights again.
    resolved = tmp_path / "config.yaml"
    resolved.write_text(run_to_yaml(run).replace(init, "gone"))
    assert load_run_file(FinetuneRun, resolved).model == run.model


def test_settings_of_the_user_win(tmp_path, capsys):
    init = f"init={weights('run', tmp_path)}"
    run = own(init, *SET.split())
    assert run.model.image_size == 16
    assert run.model.drop_path == 0.2
    assert run.data.mean == (0, 0, 0)

    # What was not set is still of the weights.
    assert run.model.width == 192
    assert run.data.std == COLOURS["std"]

    # The line says what was taken, and not what was set.
    line = capsys.readouterr().err
    assert line.startswith(f"{init}: model.")
    assert " data.std=[0.4, 0.5, 0.6]" in line
    assert "image_size" not in line
    assert "data.mean" not in line

    # Values of both sides meet in one check.
    with refused("model.image_size: 9 px is not a multiple of the 4 px patch"):
        own(init, "model.image_size=9")

    # A whole model reads no weights, which may be of a later run.
    run = own("init=runs/later", "model.preset=S/16")
    assert run.data.mean == (0.5, 0.5, 0.5)


def test_without_weights_or_model_the_next_step_is_named():
    with pytest.raises(UserErrors, match="set init=timm/vit_small.* or model.preset"):
        own()
    with refused("init=runs/nowhere: no such run"):
        own("init=runs/nowhere")
    # What was given is checked before weights are read.
    with refused("unknown key data.pth"):
        own("init=runs/nowhere", "data.pth=x")


def test_the_name_in_timm_is_its_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert full_name("timm/vit") == "hf://timm/vit"
    assert own("init=timm/vit", "model.preset=S/16").init == "hf://timm/vit"
    assert settings_of_run(["init=timm/vit"])[0] == 'name="vit-evaluation"'

    # A folder of that name is nearer than the hub.
    (tmp_path / "timm/vit").mkdir(parents=True)
    assert full_name("timm/vit") == "timm/vit"


# ---- the split that is evaluated -----------------------------------------------------------------


# One other split is taken, whatever its name; of several `test`, where there is one; else nothing
# is guessed. What was given is never replaced.
@rows("""
- [splits, given, expected]
- [train val, null, val]
- [train unseen, null, unseen]
- [train test, null, test]
- [train val test, null, test]
- [train val dev, null, null]
- [train, null, null]
- [train val, test, null]
- [train val, val, val]
""")
def test_the_only_other_split_is_evaluated(
    splits,
    given,
    expected,
    tmp_path,
    capsys,
):
    names = splits.split()
    shards = tmp_path / "shards"
    make_shard_folder(shards, lengths={name: (4,) for name in names})

    # All three commands that read a split, in one case each.
    chosen = [f"data.path={shards}"] + [f"data.val_split={given}"] * bool(given)
    training = load_run(FinetuneRun, "demo/finetune", overrides=chosen)
    overrides = [*chosen, "init=x", "name=x", "evaluate=[{name: knn}]"]
    evaluation = load_run(EvaluateRun, None, overrides=overrides)
    overrides = ["init=x", f"images=[{shards}]"] + [f"split={given}"] * bool(given)
    prediction = load_run(PredictRun, None, overrides=overrides)
    split = expected or "test"
    assert training.run.data.val_split == split
    assert evaluation.run.data.val_split == split
    assert prediction.run.split == split

    # A choice other than the default is said, by training and evaluation with the same key.
    is_chosen = given is None and expected not in (None, "test")
    line = f"{shards} has one split beside 'train': data.val_split={expected}\n"
    assert capsys.readouterr().err.count(line) == 2 * is_chosen
    if expected is None:
        splits_there = ", ".join(sorted(names))
        with refused(rf"allowed: {splits_there}\n  next: set data.val_split to"):
            read_split(shards, split="test", key="data.val_split")


# ---- the card ------------------------------------------------------------------------------------


def test_a_card_is_of_the_run_and_not_of_another_ones_data(tmp_path):
    # As it is in the file, the card describes the run: all its lines are kept.
    whole = load_run(FinetuneRun, "digits/finetune").run
    headings = re.findall(r"^(\w+):", whole.card, re.MULTILINE)
    assert headings == ["What", "Command", "Hardware", "Expect", "Source"]

    # With other data the expected result would be wrong; the command and the source are right.
    given = ["data.path=Meine Fotos", "schedule.steps=50"]
    card = load_run(FinetuneRun, "digits/finetune", overrides=given).run.card
    command, source, *more = card.splitlines()
    expected = ["Command:", "vitscale", "finetune", "digits/finetune"]
    assert shlex.split(command) == [*expected, *given]
    assert source.startswith("Source: patches as in FlexiViT")
    assert all(line.startswith("  ") for line in more)

    # Of a user's own card a line without such a heading stays: it promises no result.
    text = run_to_yaml(whole.model_copy(update={"card": "Beetles\nWhat: 8 px"}))
    (tmp_path / "mine.yaml").write_text(text)
    mine = load_run(FinetuneRun, tmp_path / "mine.yaml", overrides=["optim.lr=2"])
    assert mine.run.card.splitlines()[1:] == ["Beetles"]
