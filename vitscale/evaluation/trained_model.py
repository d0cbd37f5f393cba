"""Open a trained model: of a run, a checkpoint, or weights of another library."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import disable_progress_bars
from torch import distributed as dist
from torch import nn

from vitscale.checkpoint.folders import (
    ALLOWED_MODELS,
    MANIFEST,
    Checkpoint,
    best_of,
    resolve_weights,
    step_folders,
)
from vitscale.checkpoint.store import read_tensors
from vitscale.config.errors import UserError
from vitscale.config.loader import full_name, read_yaml
from vitscale.config.section import Section
from vitscale.data.settings import DataSettings
from vitscale.distributed.events import read_start
from vitscale.distributed.node_files import once_per_node
from vitscale.distributed.world import World, gather_objects
from vitscale.engine.device_batches import Normalization
from vitscale.models.interface import round_weights
from vitscale.models.positions import fixed_positions
from vitscale.models.registry import MODELS, ModelSettings
from vitscale.models.settings import Architecture, TimmSettings
from vitscale.models.weights.files import CLASSES_NAME, CONFIG, SUFFIXES, Weights
from vitscale.models.weights.hub import HUB, fetch
from vitscale.models.weights.reading import PREPROCESSING, is_external, read_weights
from vitscale.models.weights.transfer import inferred_model, transfer_weights

# Images of a GPU. Estimated for L/16 on an H200: 30 s of compilation save 0.08 of 0.33 ms an image.
COMPILED_FROM = 400_000
# These keys of `data` say what weights expect of images.
PIXELS = ("mean", "std", *PREPROCESSING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """The evaluation's resize, crop and normalisation; fields are named as in `DataSettings`."""

    image_size: int
    """Pixels a side of the model's input."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    eval_resize: str = "squash"
    eval_crop_fraction: float = 0.875
    """Not of squash: image size / resized side."""
    eval_interpolation: str = "bilinear"
    eval_antialias: bool = True

    def data_values(self) -> dict[str, Any]:
        """The same as values of `DataSettings`, which leaves the image size to the model."""
        values = asdict(self)
        del values["image_size"]
        return values

    def settings(self, *, batch: int = 1, **more: Any) -> DataSettings:
        """Settings that read images as the model expects them, wherever they are."""
        values = self.data_values()
        return DataSettings(path="", global_batch=batch, **values, **more)


class InferenceModel:
    """A model in eval mode, with the outputs that evaluations read.

    Ranks share images, not weights: no method is collective.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        pixels: Preprocessing,
        world: World,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """dtype: of the weights, which are rounded in place, and of the forward pass."""
        # A model that is only applied needs no gradients, which would take memory.
        self.network = network.eval().requires_grad_(False).to(world.device)
        self.world = world
        self.dtype = dtype
        round_weights(self.network, dtype)
        self._normalize = Normalization(
            mean=pixels.mean, std=pixels.std, device=world.device
        )

    @property
    def known_outputs(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.network.known_outputs  # type: ignore[assignment]  # any module
        return names

    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, S, S], uint8 or float 0..255 -> fp32 [B, classes]."""
        logits_BC: torch.Tensor = self.forward(images_B3SS, "logits").float()
        return logits_BC

    @torch.no_grad()
    def forward(self, images_B3SS: torch.Tensor, output: str) -> Any:
        """Return an output of the model, in its precision."""
        images_B3SS = images_B3SS.to(self.world.device)
        pixels_B3SS = self._normalize(images_B3SS, dtype=self.dtype)
        return self.network(pixels_B3SS, output=output)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRun:
    """The run that trained a model, and the checkpoint that is taken."""

    folder: Path
    checkpoint: Checkpoint
    averaged: bool
    """True if the weights are the average over training."""
    config: Mapping[str, Any]
    """config.yaml as plain values."""
    arch: Architecture
    """The section `model`, at the image size of the checkpoint."""
    warnings: list[str]
    """A sentence for each newer checkpoint that is damaged."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with its weights, and how it is used."""

    network: nn.Module
    """On the CPU in fp32, in eval mode."""
    arch: Architecture
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    """Name of each class by label; None where they are unknown or the model has no head."""
    source: str
    """Origin of the weights, in one line."""
    independent: bool = False
    """True if each output is a probability of its own, as a sigmoid loss trains them."""
    run: SourceRun | None = None
    """None for weights of another library."""

    @property
    def num_classes(self) -> int:
        """0: without a head."""
        return self.arch.num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names by label, or `class 0`, ... if unknown."""
        # Tables have a text for each class.
        unnamed = (f"class {label}" for label in range(self.num_classes))
        return self.classes or tuple(unnamed)

    def for_inference(
        self, world: World, *, precision: str, num_images: int
    ) -> InferenceModel:
        """The model on the device of this rank, compiled there for many images."""
        is_gpu = world.device.type == "cuda"
        if is_gpu and num_images >= COMPILED_FROM * world.world_size:
            MODELS[self.arch.name].load().compile_blocks(self.network)

        # CPUs compute bf16 slower than fp32, most of them many times.
        dtype = torch.float32
        if precision == "bf16" or (precision == "auto" and is_gpu):
            dtype = torch.bfloat16
        return InferenceModel(
            self.network, pixels=self.preprocessing, world=world, dtype=dtype
        )


def open_model(
    init: str,
    *,
    weights: str = "auto",
    model: ModelSettings | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    image_size: int | None = None,
    position_embedding: str = "auto",
    key: str = "init",
    world: World | None = None,
) -> TrainedModel:
    """Open the model that `init` names, heads included.

    weights: see `takes_average`. model, preprocessing: keys that win over those that come with the
    weights. image_size: to apply the model at, positions resampled by the convention
    `position_embedding`; None: the size of the images that come with the weights. key: the setting
    that has `init`, for errors. world: of ranks that open the same together, and fetch it once per
    node; None: this process alone opens it.
    Raises UserError when it cannot be read, or does not fit.
    """
    init = full_name(init)
    if world is not None and init.startswith(HUB):
        pinned = once_per_node(
            lambda: fetch(init, key=key)[1],
            is_maker=world.local_rank == 0,
            gather=gather_objects,
        )
        # A branch may move in between, so all nodes take the first one's commit.
        init = gather_objects(pinned)[0]
        # The next fetch finds all in the cache.
        disable_progress_bars()

    source, run, arch = read_model(
        init, weights=weights, model=model, key=key, takes_best=True, world=world
    )
    if run is not None and model is not None:
        raise UserError(
            "the run folder describes its model itself",
            where="model",
            next_step="remove `model`",
        )
    if image_size is not None:
        # The positions are resized by the transfer below.
        arch = arch.model_copy(update={"image_size": image_size})
    problem = dict(arch.problems()).get("model.image_size")
    if problem:
        # Beside the key of the weights: each teacher has a section.
        where = ".".join([*key.split(".")[:-1], "image_size"])
        raise UserError(problem, where=where)

    # The seed has no effect: every tensor is replaced, or the transfer raises.
    network: nn.Module = MODELS[arch.name].load().build_model(arch, seed=0)
    transfer_weights(
        network, source, grid=arch.grid, convention=position_embedding, keep_head=True
    )

    # A key of the user's is no assumption.
    given = {*(preprocessing or ())}
    if model is not None:
        given |= model.model_fields_set
    values = {**source.preprocessing, **(preprocessing or {})}
    origin = f"{source.format}{_assumed(source, arch, given=given)}"
    # The same tensors under another name may have another activation or pool.
    if isinstance(arch, TimmSettings):
        stated = str(source.known.get("model", arch.model))
        # A tag after the dot names weights, not a model.
        if stated.partition(".")[0] != arch.model.partition(".")[0]:
            origin += f"; warning: computed as {arch.title}"
    return TrainedModel(
        network=network.eval(),
        arch=arch,
        preprocessing=Preprocessing(**{**values, "image_size": arch.image_size}),
        classes=source.names_of(arch.num_classes),
        source=origin,
        independent=source.independent,
        run=run,
    )


def read_model(
    init: str, *, model: ModelSettings | None = None, **how: Any
) -> tuple[Weights, SourceRun | None, Architecture]:
    """Read weights, and say which model they are of and, with them, which pixels they expect.

    model: keys that win over inferred ones; a run of ours has its own. how: as for `read_source`.
    Raises UserError.
    """
    source, run = read_source(init, model=model, **how)
    if run is not None:
        return source, run, run.arch
    settings, num_classes = inferred_model(source, chosen=model)
    arch = settings.resolved(num_classes=num_classes)

    # DINOv2's folders make smaller images than their positions are for.
    image_size = source.preprocessing.get("image_size", arch.image_size)
    return source, None, arch.model_copy(update={"image_size": image_size})


def read_source(
    init: str,
    *,
    weights: str = "auto",
    model: ModelSettings | None = None,
    key: str = "init",
    takes_best: bool = False,
    world: World | None = None,
) -> tuple[Weights, SourceRun | None]:
    """Read the weights that `init` names, and our run that trained them. Arguments: `open_model`.

    takes_best: of a run folder the best checkpoint, not the newest. Raises UserError.
    """
    path = Path(init)
    if init.startswith(HUB):
        path, init = fetch(init, key=key)
    if is_external(path):
        external = read_weights(path, model=model, weights=weights)
        origin = f"{init}, {external.format}"
        return replace(external, where=init, format=origin), None
    _refuse_other_paths(path, where=f"{key}={init}", key=key)

    # A checkpoint has more than the model, and all of it is verified: the ranks share that.
    ranks: dict[str, Any] = {}
    if world is not None and world.world_size > 1:
        ranks = {
            "rank": world.rank,
            "world_size": world.world_size,
            "gather": gather_objects,
        }
    best = None
    if takes_best:
        best = best_of(step_folders(path / "checkpoints"))
        if world is not None:
            best = gather_objects(best)[0]
    if best is not None:
        init = str(best[0])
    checkpoint, warnings = resolve_weights(init, key=key, **ranks)
    folder = checkpoint.folder.parent.parent
    config, sections, arch = _read_config(checkpoint, folder / "config.yaml")

    # People tell checkpoints of one run apart by the step, the end of the run and the metric.
    origin = f"{checkpoint.folder}, step {checkpoint.step}"
    start = read_start(folder)
    if start is not None and checkpoint.step < start.total_steps:
        origin += f" of {start.total_steps}"
        if best is None:
            origin += ", not finished"
    if best is not None:
        origin += f", the best by {best[1]['metric']} ({best[1]['value']:.4f})"
    averaged = takes_average(checkpoint, weights)
    prefix = "model."
    if averaged:
        origin += ", the average of the weights (val/ema_...)"
        prefix = "ema."

    classes = None
    if (folder / CLASSES_NAME).is_file():
        classes = tuple(json.loads((folder / CLASSES_NAME).read_text()))

    # The run evaluates with the filter of its training unless another one is set.
    data = sections.data
    pixels = {name: getattr(data, name) for name in PIXELS}
    pixels["eval_interpolation"] = data.eval_interpolation or data.interpolation
    # Sigmoid losses train a probability for each class, which need not sum to 1.
    loss = (config.get("objective") or {}).get("loss")
    rows, columns = checkpoint.description["grid"]
    source = Weights(
        tensors=read_tensors(checkpoint.files, prefix=prefix),
        grid=(rows, columns),
        format=origin,
        known=_known(arch),
        preprocessing=pixels,
        assumed=(),
        independent=loss in ("sigmoid", "bce"),
        classes=classes,
        computed=fixed_positions(arch.description(), grid=(rows, columns)),
        where=str(checkpoint.folder),
    )
    return source, SourceRun(
        folder=folder,
        checkpoint=checkpoint,
        averaged=averaged,
        config=config,
        arch=arch,
        warnings=warnings,
    )


def _refuse_other_paths(path: Path, *, where: str, key: str) -> None:
    """Raise UserError for a path that is there, but neither of a run nor of a checkpoint."""
    is_run = (path / "checkpoints").is_dir() or (path / MANIFEST).is_file()
    if is_run or not path.exists():
        return
    problem = "contains no model"
    next_step = "correct the path"
    if path.is_file():
        problem = (
            f"{path.suffix or 'a name without suffix'} is not a type of weights file"
        )
    else:
        # The weights of a library alone, without the file that describes them.
        files = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
        if files:
            next_step = (
                f"add the folder's {CONFIG}, or set {key} to the file {files[0]}"
            )
    raise UserError(problem, where=where, allowed=ALLOWED_MODELS, next_step=next_step)


def _known(arch: Architecture) -> dict[str, Any]:
    """Values of `model` that the shapes of a run's tensors do not show."""

    # Other settings are in the shapes, or act in training alone.
    names = {
        "vit": ("num_heads", "gelu", "layer_norm_eps", "pool"),
        "timm": ("model", "arguments"),
    }
    return {name: getattr(arch, name) for name in names[arch.name]}


class _Sections(Section):
    model: ModelSettings
    data: DataSettings


def _read_config(
    checkpoint: Checkpoint, path: Path
) -> tuple[Mapping[str, Any], _Sections, Architecture]:
    """A run's config.yaml, and the model at the image size of the checkpoint.

    Raises UserError where the file is missing or describes another model.
    """

    # The checkpoint says what its tensors are; config.yaml says how the run was set up.
    described = checkpoint.description["architecture"]
    try:
        values: Any = read_yaml(path.read_text(), name=str(path)).values
        # Other sections are of the training, and may have keys that no longer exist.
        sections = _Sections.model_validate(
            {key: values[key] for key in ("model", "data")}
        )
        arch = sections.model.resolved(num_classes=described["num_classes"])
        arch = arch.model_copy(update={"image_size": described["image_size"]})
        if arch.description() == described:
            return values, sections, arch
        # A file that was edited after the training would give other outputs.
        reason = "another model"
    except OSError as error:
        reason = str(error.strerror)
    except (KeyError, TypeError, ValueError) as error:
        reason = type(error).__name__

    raise UserError(
        f"does not describe the model of {checkpoint.folder} ({reason})",
        where=path,
        next_step="keep the checkpoint in its run folder, with the run's config.yaml",
    )


def takes_average(checkpoint: Checkpoint, choice: str) -> bool:
    """Decide between the averaged weights (True) and the raw ones. choice: model, ema or auto.

    auto takes an average that was saved, unless more than 1 % of it is the random start; then the
    first rank says so. Raises UserError if `ema` is chosen and no average was saved.
    """
    has_average = checkpoint.description.get("ema") is not None
    if choice == "ema" and not has_average:
        raise UserError(
            "this checkpoint contains no averaged weights",
            where=checkpoint.folder,
            allowed="init_weights: auto, model",
            next_step="set init_weights=auto, or train with optim.ema",
        )
    if choice != "auto" or not has_average:
        return choice == "ema"

    # Share of the average that is still the weights before the first step.
    share = checkpoint.progress["engine"].get("start_share", 0.0)
    if share <= 0.01:
        return True

    # Predictions may go to stdout.
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"{checkpoint.folder}: taking the raw weights, since {share:.0%} of their average "
            "is the random start (optim.ema)",
            file=sys.stderr,
        )
    return False


def _assumed(source: Weights, arch: Architecture, *, given: set[str]) -> str:
    """List the settings that no file states, beside those `given` by the user."""
    values = {**source.known, **source.preprocessing}
    # Heads that a file states were read; else they are a guess from the width.
    if "num_heads" in values:
        given |= {"num_heads"}
    elif heads := getattr(arch, "num_heads", None):
        values = {"num_heads": heads, **values}

    assumed = [key for key in values if key not in given and source.assumes(key)]
    if not assumed:
        return ""
    return f"; assumed {', '.join(f'{key}={values[key]}' for key in assumed)}"
