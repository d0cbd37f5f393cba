"""Write an exported model as one folder: whole, checked, with a model card, or not at all."""

from __future__ import annotations

import importlib.util
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import build_hf_headers

from finetune.exporting.card import model_card
from finetune.exporting.format import Format
from finetune.exporting.to_huggingface import HuggingFaceFormat
from finetune.exporting.to_onnx import OnnxFormat
from finetune.exporting.to_timm import TimmFormat
from finetune.exporting.to_vitscale import NpzFormat, SafetensorsFormat
from finetune.settings import ExportRun
from vitscale.config.errors import UserError, not_written
from vitscale.distributed.atomic_files import commit_folder, make_folders, write_text
from vitscale.evaluation.trained_model import TrainedModel
from vitscale.models.weights.hub import DESCRIPTIONS, HUB, hub_errors

# Largest difference of logits that two libraries may have by rounding, in units of the largest
# logit where that is above 1.
TOLERANCE = 1e-4
CHECKED_IMAGES = 3

# A new format is one file and one entry; see also `ExportRun.to`.
EXPORTS: dict[str, type[Format]] = {
    "timm": TimmFormat,
    "huggingface": HuggingFaceFormat,
    "npz": NpzFormat,
    "onnx": OnnxFormat,
    "safetensors": SafetensorsFormat,
}


def check_export(run: ExportRun) -> None:
    """Raise UserError, before any work, for what cannot be written or pushed."""
    check_folder(run.output)
    check_packages(run.to)
    if run.push is not None:
        # This raises without a token. The upload comes last, after minutes of work.
        with hub_errors(run.push, where=f"push={run.push}"):
            build_hf_headers(token=True)


def check_folder(output: str) -> None:
    """Raise UserError unless the folder is new or empty."""
    folder = Path(output)
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        problem = "is not empty" if folder.is_dir() else "is a file"
        raise UserError(problem, where=output, allowed="a new or an empty folder")


def check_packages(to: str) -> None:
    """Raise UserError if a package needed to write the format is missing."""
    # Found without an import, which takes seconds for some of them.
    missing = [
        name for name in EXPORTS[to].needs if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UserError(
            f"needs {' and '.join(missing)}",
            where=f"to={to}",
            next_step=f"pip install 'vitscale[{to}]'; in a checkout: pip install -e '.[{to}]'",
        )


def format_for(run: ExportRun, model: TrainedModel) -> Format:
    """The format that `run` asks for. Raises UserError if it cannot express the model."""
    # The message offers only formats that would work, as most models have one that does.
    form = EXPORTS[run.to]()
    problems = _problems(form, model)
    if problems:
        fitting = [
            f"--to {name}"
            for name, other in EXPORTS.items()
            if not _problems(other(), model)
        ]
        raise UserError(
            f"{run.to} cannot express this model: it has {'; '.join(problems)}",
            where=model.source,
            allowed=", ".join(fitting) or "no format",
            next_step=f"use {fitting[0]}" if fitting else None,
        )
    return form


def write_folder(run: ExportRun, model: TrainedModel) -> Iterator[str]:
    """Export, and yield lines to print. If it raises, nothing is left behind."""
    form = format_for(run, model)

    # Written beside its place and moved there in one step, so that a folder that exists is whole.
    final = Path(run.output).absolute()
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        make_folders(final.parent)
        temporary.mkdir()
        form.write(model, temporary)
        checked = _check(form, model, temporary)
        card = model_card(form, model, checked=checked, repository=run.push)
        write_text(temporary / "README.md", card)

        # Libraries write some of the files, and do not flush them to the disk.
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())

        # Someone may have filled the folder in the meantime.
        check_folder(run.output)
        commit_folder(temporary, final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise not_written(error, f"output={run.output}") from None
        raise

    yield f"exported {model.source}"
    yield checked
    for path in sorted(final.iterdir()):
        yield f"  {run.output}/{path.name}  {path.stat().st_size:,} bytes"
    yield "load it:"
    for line in form.usage(model).replace("FOLDER", run.output).split("\n"):
        yield f"  {line}"
    if run.push is not None:
        yield _push(run.output, run.push)


def _problems(form: Format, model: TrainedModel) -> list[str]:
    """Features of the model that the format cannot express."""
    return [feature for feature, has_it in form.unlike(model).items() if has_it]


def _push(folder: str, name: str) -> str:
    """Upload an exported folder in place of an earlier one; returns a line to print.

    A new repository is private. Raises UserError, or StorageError without a connection.
    """
    with hub_errors(
        name, where=f"push={name}", then=f"; then run hf upload {name} {folder}"
    ):
        hub = HfApi()
        hub.create_repo(name, private=True, exist_ok=True)
        # Files of another format would stay beside the new ones, and describe another model.
        commit = hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Export by vitscale",
            delete_patterns=[*DESCRIPTIONS, "model.*"],
        )
    return f"pushed {HUB}{name}@{commit.oid}"


@torch.no_grad()
def _check(form: Format, model: TrainedModel, folder: Path) -> str:
    """Compare logits of the written folder with the model's, on noise. Raises UserError."""
    # Noise reaches every weight, and needs no images here.
    random = torch.Generator().manual_seed(0)
    size = model.preprocessing.image_size
    images_B3SS = torch.randn(CHECKED_IMAGES, 3, size, size, generator=random)
    expected = model.network(images_B3SS)
    if not expected.isfinite().all():
        raise UserError(
            "the logits of this model are not finite",
            where=model.source,
            next_step="export an earlier checkpoint",
        )

    # The reader is the other library, so that no code is shared with the writer.
    if importlib.util.find_spec(form.library) is None:
        return (
            f"not checked: {form.library} is not installed (pip install {form.library})"
        )
    logits = form.logits(model, folder, images_B3SS)
    difference = float((logits - expected).abs().max())
    largest = float(expected.abs().max())
    allowed = TOLERANCE * max(1.0, largest)

    # A difference of NaN is not within the tolerance either.
    if not difference <= allowed:
        raise UserError(
            f"{form.library} gives other logits: difference {difference:.1e}, largest logit "
            f"{largest:.1e}",
            where=model.source,
            allowed=f"{allowed:.1e}",
            next_step="export to another format (--to safetensors), and report this",
        )
    outputs = "logits" if model.num_classes else "features"
    return f"checked: the same {outputs} in {form.library}, largest difference {difference:.1e}"
