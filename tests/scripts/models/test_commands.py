"""The commands of `finetune/`, started as users start them, on stored weights and on a run."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader

from finetune.settings import PICTURES
from tests.scripts.models.conftest import NPZ, NUM_HEADS, SAFETENSORS
from tests.support.corpora.image_samples import rotated
from tests.support.corpora.shard_folders import image_bytes
from tests.support.tables import Values
from vitscale import ShardDataset, load_model
from vitscale.data.index import read_manifest

pytestmark = pytest.mark.distributed

# Processors add in another order.
REL = 1e-5
EVALUATIONS = (
    "[{name: classification}, {name: confusion}, "
    "{name: knn, k: 5}, {name: few_shot, shots: [2], num_draws: 2}]"
)
# Not what the files' own libraries do; the golden files are of these.
SMOOTHED = "preprocessing.eval_antialias=true"
RESAMPLED = ("image_size=12", "position_embedding=google")
# What each library, or a script without ours, expects to find in a folder.
FORMATS = yaml.safe_load("""
timm: [config.json, model.safetensors]
huggingface: [config.json, model.safetensors, preprocessor_config.json]
npz: [model.npz, vitscale.json]
safetensors: [model.safetensors, vitscale.json]
onnx: [model.onnx, vitscale.json]
""")
Run = tuple[Path, dict[str, list[float]]]


def predictions(path: Path) -> list[Values]:
    """Rows of a table, with names instead of paths and numbers instead of text."""
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    else:
        rows = [*csv.DictReader(path.open())]
    for row in rows:
        row["image"] = Path(row["image"]).name
        for name, value in row.items():
            if name.startswith("p_"):
                row[name] = float(value)
            else:
                # CSV has no null: what is empty there is null in the other.
                row[name] = value or None
    return rows


def shares(path: Path) -> np.ndarray:
    """Probability of each class, by name, of each image."""
    shares_of_images = []
    for row in predictions(path):
        # The table has them by rank, the most likely class first.
        pairs = sorted((row[f"class_{rank}"], row[f"p_{rank}"]) for rank in (1, 2, 3))
        shares_of_images.append([share for _, share in pairs])
    return np.array(shares_of_images)


def results(folder: Path) -> dict[str, float]:
    """Values by metric, the same in all files."""
    stored = json.loads((folder / "results.json").read_text())["results"]
    with open(folder / "results.csv") as file:
        table = [*csv.DictReader(file)]
    # The first two lines of a Markdown table are its head; notes follow after its rows.
    _, _, *lines = (folder / "results.md").read_text().splitlines()
    assert len(table) == len(stored) <= len(lines)
    for row, cells, line in zip(stored, table, lines, strict=False):
        texts = {key: "" if row[key] is None else str(row[key]) for key in row}
        assert cells == texts
        assert f"| {row['metric']} " in line
        assert f"| {row['value']:.4f} " in line
    return {row["metric"]: row["value"] for row in stored}


def test_finetuning_starts_from_weight_files(golden, scripts, from_npz):
    """Positions are resampled; the first keeps its head, the second gets a head of zeros."""
    _, headless = scripts.finetune(
        "from-safetensors",
        f"init={SAFETENSORS}",
        "position_embedding=timm",
        # As DeiT-III has them, which these weights are in the form of.
        "model.layer_scale=1e-4",
        "model.class_position=false",
        "model.gelu=erf",
        num_ranks=2,
    )
    # A head of zeros takes all three classes for equally likely.
    assert headless["train/loss"][0] == pytest.approx(np.log(3), rel=1e-6)
    metrics = {"npz": from_npz[1], "safetensors": headless}
    golden.json("scripts/finetune.json", metrics, rel=REL)


def test_evaluations_of_files_and_of_a_run(golden, scripts, from_npz):
    data = (f"data.path={scripts.shards}", "data.num_workers=0", "tracking.uri=null")
    printed = scripts.run("evaluate_model", f"init={NPZ}", *data, code=2)
    assert "the classes of the model's 3 outputs are unknown" in printed
    # A list of the classes beside the weights is what a file of outputs needs.
    npz = shutil.copy(NPZ, scripts.folder / "model.npz")
    safetensors = shutil.copy(SAFETENSORS, scripts.folder / "model.safetensors")
    classes = json.dumps(read_manifest(scripts.shards).classes)
    (scripts.folder / "classes.json").write_text(classes)

    # The last one is the same evaluation again, by the configuration that the first one stored.
    metrics = {}
    for name, words in (
        ("npz", (f"init={npz}", SMOOTHED, *data)),
        ("safetensors", (f"init={safetensors}", NUM_HEADS, *RESAMPLED, *data)),
        ("run", (f"init={from_npz[0]}", "data.num_workers=0")),
        ("run", (f"--config={scripts.folder}/evaluated-run/config.yaml",)),
    ):
        output = scripts.folder / f"evaluated-{name}"
        more = (f"output={output}", "compute.device=cpu", f"evaluate={EVALUATIONS}")
        printed = scripts.run("evaluate_model", *words, *more)
        assert "| 95 % interval    | images |" in printed
        # Wilson's interval is of a share of images; these two are no such shares.
        of_classes = "\nclass_mean_top1 has no interval: it is a mean over classes\n"
        assert of_classes in printed
        assert "\nfew_shotK_top1 has no interval: it is a mean over draws" in printed
        assert metrics.setdefault(name, results(output)) == results(output)
    golden.json("scripts/evaluate.json", metrics, rel=REL)
    # The run's own last evaluation gave the same.
    assert metrics["run"]["top1"] == from_npz[1]["val/top1"][-1]

    # Its files would be taken for those of the training.
    output = f"output={from_npz[0]}"
    printed = scripts.run("evaluate_model", f"init={NPZ}", *data, output, code=2)
    assert "is the run folder of a training" in printed
    assert "Traceback" not in printed


def test_predictions_as_csv_and_parquet(golden, scripts):
    # Both formats of weights, both kinds of input, both kinds of table.
    npz = (f"init={NPZ}", SMOOTHED)
    safetensors = (f"init={SAFETENSORS}", NUM_HEADS, *RESAMPLED)
    tables = {}
    for name, words, inputs in (
        ("npz.csv", npz, scripts.shards),
        ("npz.parquet", npz, scripts.images),
        ("safetensors.csv", safetensors, scripts.images),
    ):
        output = scripts.folder / f"predicted-{name}"
        more = (f"output={output}", "compute.device=cpu", "num_workers=0", "top=3")
        scripts.run("predict", *words, *more, inputs)
        tables[name] = predictions(output)
    golden.json("scripts/predict.json", tables, rel=REL)


def test_features_are_the_same_on_two_ranks(scripts, from_npz, tmp_path):
    run, _ = from_npz
    words = (f"init={run}", f"data.path={scripts.shards}", "compute.device=cpu")
    files = []
    for num_ranks in (1, 2):
        files.append(tmp_path / f"{num_ranks}.parquet")
        more = ("compute.batch=5", f"output={files[-1]}")
        printed = scripts.run("embed", *words, *more, num_ranks=num_ranks)
        assert "36 images, 0 of them unreadable" in printed
    assert files[0].read_bytes() == files[1].read_bytes()

    # As own code computes them.
    model = load_model(run)
    dataset = ShardDataset(scripts.shards, split="train", transform=model.preprocess)
    with torch.no_grad():
        images = torch.stack([image for image, _ in dataset])
        expected = model(images, output="features").numpy()
    features = np.array(pq.read_table(files[0])["features"].to_pylist())
    assert np.abs(features - expected).max() < 1e-5
    assert sorted(tmp_path.iterdir()) == files


# Each image below in/, in the order of the table, and what is wrong with it (the reason of a
# decoder is its own; None: nothing). A pipe would be read for ever.
IMAGES_AND_REASONS = yaml.safe_load("""
a.jpg: null
below/b.JPG: null
below/c.jpg: ""
below/d.jpg: null
below/e.jpg: ""
below/f.jpg: is not a file
below/g.jpg: No such file
below/h.GIF: cannot identify image
""")


def test_unreadable_images_do_not_end_the_command(scripts, from_npz, tmp_path):
    """Images of folders are read in order; hidden and other files are left out."""
    folder = tmp_path / "in"
    below = folder / "below"
    (below / ".hidden").mkdir(parents=True)
    for name in "../a.jpg b.JPG d.jpg .hidden/x.jpg .y.jpg notes.txt".split():
        (below / name).write_bytes(image_bytes("jpg", seed=1))
    (below / "c.jpg").write_bytes(b"\xff\xd8\xff no image")
    (below / "e.jpg").touch()
    os.mkfifo(below / "f.jpg")
    (below / "g.jpg").symlink_to("nowhere")
    (below / "h.GIF").touch()

    output = tmp_path / "out/table.parquet"
    words = (f"init={from_npz[0]}", "compute.device=cpu", folder)
    table = (f"output={output}", "top=2")
    printed = scripts.run("predict", *words, *table, num_ranks=2, code=2)
    assert "8 images, 5 of them unreadable" in printed
    assert "left out 1 files" in printed
    rows = pq.read_table(output).to_pylist()
    paths = [str(folder / name) for name in IMAGES_AND_REASONS]
    assert [row["image"] for row in rows] == paths
    for row, reason in zip(rows, IMAGES_AND_REASONS.values(), strict=True):
        assert (row["error"] is None) == (reason is None)
        assert (row["class_1"] is None) == (reason is not None)
        if reason is not None:
            assert reason in row["error"]
            # An address of memory would make two equal tables differ.
            assert " at 0x" not in row["error"]
    assert rows[0]["class_1"] == rows[1]["class_1"]
    # The parts that ranks write are gone.
    assert [path.name for path in output.parent.iterdir()] == ["table.parquet"]

    # On the screen: three classes of each of the three readable images.
    printed = scripts.run("predict", *words, code=2)
    assert "c.jpg: cannot be read" in printed
    assert printed.count("%") == 9
    bad = f"output={folder}/a.jpg/table.csv"
    printed = scripts.run("predict", *words, bad, code=2)
    assert f"{bad}: cannot be written" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_every_format_is_exported_with_a_card(scripts, from_npz):
    for to, files in FORMATS.items():
        folder = scripts.folder / f"exported-{to}"
        printed = scripts.run("export", f"init={from_npz[0]}", "--to", to, folder)
        assert "checked: the same logits" in printed
        assert {path.name for path in folder.iterdir()} == {"README.md", *files}
        card = (folder / "README.md").read_text()
        # Results, the checkpoint, settings, and what the owner has to add.
        assert "| val/top1 |" in card
        assert "step-00000002" in card
        assert "warmup_steps: 0" in card
        assert "## Licence\nNot stated" in card

    # A folder of other files, and a place in MLflow for a model that none of its runs trained.
    new = scripts.folder / "new"
    wrong = {
        (folder,): "is not empty",
        (new, "mlflow=true"): "no MLflow run trained this model",
    }
    for more, message in wrong.items():
        printed = scripts.run("export", f"init={NPZ}", "--to", "npz", *more, code=2)
        assert message in printed
        assert "Traceback" not in printed
    assert not new.exists()


def test_own_code_predicts_as_the_command(scripts, from_npz, tmp_path):
    """Of a run and its export: files, one turned by its EXIF, and shards by a worker of torch."""
    # Wide, and shown upright: who ignores the EXIF sees another crop.
    turned = tmp_path / "turned.jpg"
    with Image.open(scripts.images / "1.jpg") as image:
        image.resize((40, 30)).save(turned, exif=rotated(6))
    paths = [*sorted(scripts.images.iterdir()), turned]
    run, _ = from_npz
    exported = tmp_path / "exported"
    scripts.run("export", f"init={run}", "--to", "timm", exported)

    # Faults of own code: an error of Python with the report of a configuration.
    for wrong, message in yaml.safe_load(r"""
    - [{model: {width: 3, dept: 2}}, 'model.dept: unknown .*\n.*\n.*model.depth']
    - [{weights: best, image_size: 0}, 'auto, model, ema\n.*image_size: 0 is not allowed']
    """):
        with pytest.raises(ValueError, match=message):
            load_model(run, **wrong)
    # The file does not say which GELU its weights were trained with.
    with pytest.warns(UserWarning, match="; assumed gelu=tanh"):
        load_model(NPZ)
    model = load_model(run)
    same = load_model(str(exported))
    with pytest.raises(ValueError, match="allowed: logits, features"):
        model(torch.zeros(1, 3, 12, 12), output="logit")
    with pytest.raises(ValueError, match=r"allowed: \[batch, 3, 12, 12\]"):
        model(torch.zeros(1, 3, 16, 16))

    files = torch.stack([same.preprocess(Image.open(path)) for path in paths])
    dataset = ShardDataset(scripts.shards, split="test", transform=model.preprocess)
    loader = DataLoader(
        dataset,
        batch_size=5,
        num_workers=1,
        # Pickles the data set, which an open file or a closure in it would prevent.
        multiprocessing_context="spawn",
    )
    stored, labels = map(torch.cat, zip(*loader, strict=True))
    for used, inputs, pixels in (
        (same, paths, files),
        (model, [scripts.shards], stored),
    ):
        table = tmp_path / f"{len(inputs)}.parquet"
        scripts.run("predict", f"init={run}", *inputs, f"output={table}", "top=3")
        probabilities = used(pixels).softmax(dim=1).detach().numpy()
        assert used.classes == dataset.classes
        assert np.abs(probabilities - shares(table)).max() < 1e-5
    # The last table is that of the shards, whose order the data set has too.
    names = [dataset.classes[label] for label in labels.tolist()]
    assert names == [row["label"] for row in predictions(table)]
    assert model(stored, output="features").shape == (len(dataset), 16)

    # Own code gets an error that names the sample, not a black image.
    damaged = shutil.copytree(scripts.shards, tmp_path / "shards")
    for tar in damaged.glob("test*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))
    with pytest.raises(ValueError, match="sample 'test-c1-1' cannot be read"):
        ShardDataset(damaged, split="test")[1]


def test_pictures_are_drawn(scripts, from_npz):
    run, _ = from_npz
    more = ("num_images=4", "compute.device=cpu", "mlflow=false")
    # All pictures of a run, into its folder and from its data.
    scripts.run("visualize", f"init={run}", *more)
    assert {path.stem for path in (run / "pictures").iterdir()} >= {*PICTURES}

    # One picture of a file of weights, which has no data of its own.
    output = scripts.folder / "pictures"
    words = (f"init={NPZ}", f"output={output}", "pictures=[attention_rollout]")
    scripts.run("visualize", *words, *more, scripts.images)
    assert [path.name for path in output.iterdir()] == ["attention_rollout.png"]


# Each command with its words and exit code, and what it would do, or what it cannot.
DRY_RUNS = yaml.safe_load("""
- [predict, "{images} output={tmp}/table.csv", 0, [3 images, 0.png]]
- [predict, "{shards}", 0, [12 images, on the screen]]
- [predict, "{tmp}", 2, [no images in]]
- [predict, "{images} output={run}/config.yaml/a.csv", 2, []]
- [embed, "data.path={shards} output={tmp}/a.parquet", 0, [36 rows, FLOPs, GB free]]
- [embed, "data.path={tmp} output={tmp}/a.parquet", 2, [is not a shard folder]]
- [export, "--to timm {tmp}/exported", 0, ["to {tmp}/exported for timm"]]
- [export, "--to npz image_size=12 {run}", 2, [is not empty]]
- [visualize, "output={tmp}/exported", 0, ["{tmp}/exported/patch_components.png"]]
- [visualize, "output={run}/config.yaml/a", 2, [no writable folder]]
""")


def test_a_dry_run_writes_nothing_and_refuses_what_the_command_would(
    scripts, from_npz, tmp_path
):
    """Also what only the opened model shows, such as a format that cannot express it."""
    run, _ = from_npz
    before = sorted(run.rglob("*"))
    paths = {
        "images": scripts.images,
        "shards": scripts.shards,
        "run": run,
        "tmp": tmp_path,
    }
    for script, text, code, expected in DRY_RUNS:
        words = text.format(**paths).split()
        printed = scripts.run(script, f"init={run}", *words, "--dry-run", code=code)
        assert ("dry run: " in printed) == (code == 0)
        assert "Traceback" not in printed
        for part in expected:
            assert part.format(**paths) in printed
    assert sorted(run.rglob("*")) == before
    assert not any(tmp_path.iterdir())
    folder = tmp_path / "exported"
    words = ("--to", "huggingface", folder, "model.num_heads=2", "--dry-run")
    printed = scripts.run("export", f"init={SAFETENSORS}", *words, code=2)
    assert "huggingface cannot express this model" in printed
