"""The run types of the commands that apply a trained model. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_serializer,
    field_validator,
)

from vitscale.checkpoint.folders import resolve_weights
from vitscale.config.errors import UserError
from vitscale.config.loader import full_name, read_yaml
from vitscale.config.section import Items, Problems, Run, Section, Triple
from vitscale.data.index import held_out_split, only_held_out
from vitscale.data.remote import is_url
from vitscale.data.settings import MixedInShards, RemoteSettings
from vitscale.evaluation.registry import (
    EvaluationSettings,
    groups_of_names,
    listed_twice,
)
from vitscale.models.registry import ModelSettings
from vitscale.runs.launching import LaunchSettings, launch_problems
from vitscale.tracking.settings import TrackingSettings, tracking_problems

TABLES = (".csv", ".parquet")
# Keys of `data` that choose samples.
CHOOSING = ("first_percent", "only_classes", "only_keys", "mixture", "dev_percent")
PICTURES = (
    "patch_components",
    "patch_similarity",
    "last_attention",
    "attention_rollout",
)
# What the commands that write something new add to their switches.
DRY_RUN = {
    "--dry-run": "open model and inputs, and show what would be written; write nothing"
}
# mypy cannot follow a type that is built from a dict.
if TYPE_CHECKING:
    PictureName = str
else:
    PictureName = Literal[PICTURES]


class DeviceSettings(Section):
    """Device, precision and batch size."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPU where torch finds one, else CPU."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on GPU, fp32 on CPU. bf16 also rounds the weights, as ZeRO does."""
    batch: PositiveInt = 64
    """Images that one process takes through one forward pass."""
    num_threads: PositiveInt | None = None
    """CPU threads of each process; null: its share of the cores."""
    timeout_min: PositiveFloat = 10.0
    """A collective that takes longer ends the command."""


class PreprocessingSettings(Section):
    """How images become the model's input; null: as the model was trained or published."""

    mean: Triple | None = None
    """Subtracted from red, green and blue, each in [0, 1]."""
    std: Triple | None = None
    """Red, green and blue are divided by it."""
    eval_resize: (
        Literal[
            "squash",
            "center_crop",
            "squash_crop",
            "center_crop_down",
            "squash_crop_down",
        ]
        | None
    ) = None
    """Same as `data.eval_resize` of a training."""
    eval_crop_fraction: float | None = Field(default=None, gt=0, le=1)
    """Not of squash: image size / resized side."""
    eval_interpolation: Literal["bilinear", "bicubic", "area"] | None = None
    """Filter of the resize."""
    eval_antialias: bool | None = None
    """Smooth images that are made smaller."""


class ModelRun(Run):
    """A command that applies a trained model."""

    init: str
    """The model: a run folder (its best checkpoint, without evaluations the newest), a checkpoint
    folder, a file of weights (.npz, .safetensors, .pth), a folder of Hugging Face or timm,
    timm/NAME or hf://OWNER/NAME; see docs/weights.md."""
    init_weights: Literal["auto", "model", "ema"] = "auto"
    """The weights themselves (model) or their average (ema). auto: the average, unless
    there is none or more than 1 % of it is the random start."""
    model: ModelSettings | None = None
    """Keys of the model that win over what is inferred from external weights, one by one, such as
    num_heads; a run folder has its own."""
    preprocessing: PreprocessingSettings = PreprocessingSettings()
    """Keys that win over the preprocessing that comes with the model, one by one."""
    image_size: PositiveInt | None = None
    """Apply the model at another image size, in pixels a side, its position embeddings resized;
    null: its own."""
    position_embedding: Literal["auto", "google", "timm", "deit", "dinov2"] = "auto"
    """How learned position embeddings are resampled to the new grid; see docs/recipes.md. auto: as
    the library does that the weights come from."""
    compute: DeviceSettings = DeviceSettings()
    """Device, precision and batch."""

    @field_serializer("model")
    def _chosen(self, model: ModelSettings | None) -> dict[str, Any] | None:
        # A key in the file of a job wins, so those that nobody set are left out.
        if model is None:
            return None
        values = {key: value for key, value in model if key in model.model_fields_set}
        return values or None

    def source(self) -> dict[str, Any]:
        """Arguments of `open_model`."""
        return {
            "init": self.init,
            "weights": self.init_weights,
            "model": self.model,
            "image_size": self.image_size,
            "position_embedding": self.position_embedding,
            "preprocessing": self.preprocessing.model_dump(exclude_none=True),
        }


# ---- evaluation ----------------------------------------------------------------------------------


class EvaluationData(Section):
    """data.path=SHARDS: the shards that a model is evaluated on. Its preprocessing comes with the
    model."""

    path: str
    """Shard folder or its URL, as `data.path` of a training."""
    train_split: str = "train"
    """Split that kNN, few-shot and linear probes learn from; not read without them."""
    first_percent: float = Field(default=100.0, gt=0, le=100)
    """Probes learn from the first stored samples only, as `data.first_percent` of a training."""
    only_classes: Items[str] = ()
    """Evaluate and learn from only samples of these classes. Empty: all."""
    only_keys: str | None = None
    """Probes learn only from the samples whose keys this text file lists. null: all."""
    mixture: Items[MixedInShards] = ()
    """Further sets of shards that probes learn from."""
    dev_percent: float = Field(default=0.0, ge=0, lt=100)
    """Probes do not learn from the last part of the training samples, as of a training."""
    val_split: str | None = "test"
    """Split that the metrics are of; null: the part of `dev_percent`."""
    num_workers: NonNegativeInt = 2
    """Loader processes per rank."""
    remote: RemoteSettings = RemoteSettings()

    @property
    def evaluated(self) -> str:
        """Name of the evaluated samples for people."""
        if self.val_split is None:
            return f"the last {self.dev_percent:g} % of {self.train_split!r}"
        return repr(self.val_split)


class EvaluateRun(ModelRun):
    """trained model -> one table of results."""

    stage: Literal["evaluate"] = "evaluate"
    """`vitscale evaluate` runs files of this stage."""
    name: str
    """Name in MLflow and of the folder of results."""
    output: str | None = None
    """Folder of results, replaced if it exists. null: runs/NAME, where those of another evaluation
    are refused."""
    data: EvaluationData
    evaluate: Items[EvaluationSettings] = Field(min_length=1)
    """The evaluations, in the order of the table, or their names, as in evaluate=knn,few_shot."""
    tracking: TrackingSettings = TrackingSettings()
    launch: LaunchSettings = LaunchSettings()
    _names = field_validator("evaluate", mode="before")(groups_of_names)

    @property
    def folder(self) -> str:
        return self.output or f"runs/{self.name}"

    def implied(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from held_out_split(self.data)

    def problems(self) -> Problems:
        yield from super().problems()
        if self.data.val_split is None and not self.data.dev_percent:
            yield (
                "data.val_split",
                "null evaluates the part of dev_percent; set one of the two",
            )

        yield from listed_twice(self.evaluate)
        # One evaluation is one point in time.
        for settings in self.evaluate:
            if settings.every_steps is not None:
                yield (
                    "evaluate",
                    f"{settings.name}: every_steps is for trainings; remove it",
                )
        yield from tracking_problems(self.tracking)
        yield from launch_problems(self.launch)


def check_paths(
    init: str, images: Sequence[str] = (), *, output: str | None = None
) -> None:
    """Raise UserError for a model and images that are not there, and for an output that cannot be
    written: before torch is imported."""
    if output is not None:
        _check_place(output)
    if not init.startswith("hf://") and not Path(init).exists():
        # It raises, and names what is there instead.
        resolve_weights(init)

    # All of them in one message, as a list of files often has several wrong names.
    paths = [path for path in images if not is_url(path)]
    missing = [path for path in paths if not Path(path).exists()]
    if missing:
        what = f"no such file or folder: {', '.join(map(repr, missing))}"
        raise UserError(what, where="images", next_step="correct the path")


def _check_place(output: str) -> None:
    """Raise UserError where an output cannot be written."""
    above = Path(output).absolute().parent
    while not above.exists():
        above = above.parent
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UserError(
            f"cannot be written ({above} is no writable folder)",
            where=f"output={output}",
            next_step="choose another place",
        )


def settings_of_run(argv: Sequence[str]) -> list[str]:
    """Overrides that evaluate the run of `init=` on its own data, as it evaluates itself.

    Other shards are evaluated whole. Of weights outside a run folder: a name, and classification.
    None where a configuration is given. Raises UserError if nothing is there.
    """
    if any(word.partition("=")[0] == "--config" for word in argv):
        return []
    given = [word for word in argv if word.startswith("init=")]
    if not given or "stage=embed" in argv:
        return []
    init = full_name(given[-1].removeprefix("init="))
    check_paths(init)

    # `init` is a run folder, or a checkpoint below the `checkpoints` of one.
    config: dict[str, Any] = {}
    for folder in (Path(init), Path(init).absolute().parent.parent):
        path = folder / "config.yaml"
        if path.is_file():
            config = read_yaml(path.read_text(), name=str(path)).values or {}
            break

    # The run's own evaluations have a schedule, which means nothing here.
    evaluations = [
        {key: value for key, value in settings.items() if key != "every_steps"}
        for settings in config.get("evaluate") or [{"name": "classification"}]
    ]
    values = {
        "name": f"{config.get('name', Path(init).stem)}-evaluation",
        "evaluate": evaluations,
        **_samples_of_run(config, argv),
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _samples_of_run(config: Mapping[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """The settings of the run's own images, and its precision."""
    # The file is the user's and not yet validated: any section may be missing.
    data: dict[str, Any] = config.get("data") or {}
    values = {
        f"data.{key}": data[key]
        for key in ("path", "train_split", "val_split")
        if data.get(key) is not None
    }

    # Keys and classes that choose samples of the run's shards mean nothing in others.
    if not any(word.startswith("data.path=") for word in argv):
        for key in CHOOSING:
            if data.get(key):
                values[f"data.{key}"] = data[key]
        # The dev part was evaluated instead of the split.
        if data.get("dev_percent"):
            values["data.val_split"] = None

    cache = (data.get("remote") or {}).get("cache_path")
    if cache is not None:
        values["data.remote.cache_path"] = cache

    # fp16 is for training alone: it needs a loss scale.
    precision = (config.get("engine") or {}).get("precision")
    if precision in ("bf16", "fp32"):
        values["compute.precision"] = precision
    return values


# ---- predictions, exports, pictures --------------------------------------------------------------


class PredictRun(ModelRun):
    """trained model and images -> the most probable classes of each image."""

    stage: Literal["predict"] = "predict"
    """`vitscale predict` runs files of this stage."""
    images: Items[str] = Field(min_length=1)
    """Image files and folders of images; or one shard folder, or its URL."""
    top: PositiveInt = 5
    """Classes of each image, the most probable first."""
    output: str | None = None
    """Table to write, .csv or .parquet; replaced if it exists. null: print, for few images."""
    split: str = "test"
    """Split of the shard folder."""
    num_workers: NonNegativeInt = 2
    """Processes per rank that decode images."""
    remote: RemoteSettings = RemoteSettings()

    def implied(self) -> Iterator[tuple[str, dict[str, Any]]]:
        path = self.images[0]
        split = only_held_out(path, default=self.split)
        if split is not None and "split" not in self.model_fields_set:
            yield f"{path} has one split beside 'train'", {"split": split}

    def problems(self) -> Problems:
        yield from super().problems()
        # The ending chooses the format, so an unknown one cannot be written.
        if self.output is not None and not self.output.endswith(TABLES):
            yield ("output", f"{self.output!r} does not end in {' or '.join(TABLES)}")


class EmbedData(Section):
    """data.path=SHARDS: the images, read as the model expects them."""

    path: str
    """Shard folder or its URL."""
    split: str = "train"
    """Split whose images have a row each."""
    num_workers: NonNegativeInt = 2
    """Processes per rank that decode images."""
    remote: RemoteSettings = RemoteSettings()


class EmbedRun(ModelRun):
    """trained model and shards -> a table of the features of each image."""

    stage: Literal["embed"] = "embed"
    """`vitscale embed` runs files of this stage."""
    data: EmbedData
    output: str
    """Table to write, .parquet: columns key, label and features. The same command resumes one that
    was killed."""
    tokens: Literal["pooled", "class"] = "pooled"
    """pooled: what a head sees. class: the class token after the last norm."""
    dtype: Literal["float32", "float16"] = "float32"
    """Of the stored features. float16 halves the file."""
    launch: LaunchSettings = LaunchSettings()

    @property
    def name(self) -> str:
        return f"embed-{Path(self.output).stem}"

    @property
    def folder(self) -> str:
        return f"runs/{self.name}"

    def problems(self) -> Problems:
        yield from super().problems()
        if not self.output.endswith(".parquet"):
            yield ("output", f"{self.output!r} does not end in .parquet")
        yield from launch_problems(self.launch)


class ExportRun(ModelRun):
    """trained model -> a folder that another library loads."""

    stage: Literal["export"] = "export"
    """`vitscale export` runs files of this stage."""
    to: Literal["timm", "huggingface", "npz", "onnx", "safetensors"]
    """timm: timm.create_model and transformers' Auto classes. huggingface: transformers' own ViT.
    npz: Google's names. onnx: a graph with any batch size. safetensors: vitscale's names."""
    output: str
    """Folder to write: a new one, or an empty one."""
    push: str | None = None
    """Upload the folder to OWNER/NAME on the Hugging Face Hub; a new repository is private."""
    mlflow: bool = False
    """Upload the folder to the MLflow run that trained the model, below exported/."""


class VisualizeRun(ModelRun):
    """trained model -> pictures of what it has learned."""

    stage: Literal["visualize"] = "visualize"
    """`vitscale visualize` runs files of this stage."""
    output: str | None = None
    """Folder of the pictures; null: pictures/ in the run folder that `init` is in, else
    runs/visualize/pictures."""
    pictures: Items[PictureName] = ()
    """The pictures to draw; empty: all that the model has."""
    images: Items[str] = ()
    """Image files and folders of images, or one shard folder or its URL. Empty: the shards that the
    run was trained on."""
    split: str | None = None
    """Split of the shards that `images` are taken from; null: the run's validation split."""
    num_images: int = Field(default=8, gt=0, le=32)
    """Images in a sheet, evenly spaced over `images`."""
    remote: RemoteSettings = RemoteSettings()
    mlflow: bool = True
    """Upload the pictures to the MLflow run of the run folder that `init` is in."""
