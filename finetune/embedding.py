"""Compute the features of each image of a split, for search and for classifiers elsewhere.

Shapes: B images of a batch, N of a part, D width.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from blake3 import blake3

from finetune.images import Images
from finetune.settings import EmbedRun
from finetune.tables import DESCRIPTION, Table, parts_folder, write_table
from vitscale.config.errors import UserError
from vitscale.distributed.world import World
from vitscale.evaluation.trained_model import InferenceModel, TrainedModel
from vitscale.models.registry import costs_of

# `tokens` -> output of a model.
OUTPUTS = {"pooled": "features", "class": "class_token"}
GB = 10**9


def embed_images(
    run: EmbedRun,
    model: TrainedModel,
    images: Images,
    world: World,
    *,
    is_dry_run: bool,
) -> Iterator[str]:
    """Write the features, or say what would be written; yields lines to print. Collective.

    Raises UserError, before any work, for an output with other features and for a full disk; later
    what `write_table` does.
    """
    table = feature_table(run, model, images)
    if Path(run.output).exists():
        check_output(run.output, table)
        yield f"{run.output}: has these features already"
        return

    # Until they are joined, the parts are there, too, of which a killed command has left some.
    features = table.fields[0].type
    num_bytes = images.total * features.list_size * np.dtype(run.dtype).itemsize
    folder = parts_folder(run.output, table)
    needed = 2 * num_bytes - sum(part.stat().st_size for part in folder.glob("*"))
    parent = next(path for path in folder.parents if path.exists())
    free = shutil.disk_usage(parent).free
    room = (
        f"{needed / GB:,.3f} GB needed, for the table and the parts that it is joined from; "
        f"{free / GB:,.3f} GB free in {parent}"
    )

    # An hour of forward passes must not end with a full disk.
    if free < needed:
        raise UserError(
            room,
            where=f"output={run.output}",
            next_step="choose another output, or set dtype=float16",
        )
    if not is_dry_run:
        yield from write_table(table, world, run.output)
        return

    flops = costs_of(model.arch).train_flops_per_image(model.arch) // 3
    yield (
        f"dry run: would write {images.total:,} rows with {features.list_size:,} features of "
        f"{run.dtype}, {num_bytes / GB:,.3f} GB, to {run.output}"
    )
    yield f"a forward pass for each: {images.total * flops:.3g} FLOPs"
    yield room


def check_output(output: str, table: Table) -> None:
    """Raise UserError for a file with other features than those of the table, or with none."""

    # The file says of which model, pixels and images its features are.
    now = json.loads(table.description or "")
    try:
        before = json.loads(pq.read_schema(output).metadata[DESCRIPTION])
    except (OSError, KeyError, TypeError, ValueError):
        before = {}
    others = [key for key, value in now.items() if before.get(key) != value]
    if others:
        raise UserError(
            f"exists, with features of other {', '.join(others)}",
            where=f"output={output}",
            next_step="choose another output, or remove the file",
        )


def feature_table(run: EmbedRun, model: TrainedModel, images: Images) -> Table:
    """Raises UserError for a class token that the model does not have."""
    if run.tokens == "class" and getattr(model.network, "cls_token", None) is None:
        raise UserError(
            "this model has no class token",
            where="tokens",
            allowed="pooled",
            next_step="remove tokens=class",
        )
    output = OUTPUTS[run.tokens]
    dtype = getattr(torch, run.dtype)
    # Only the model knows the width, as a head may see more than one token.
    side = model.preprocessing.image_size
    with torch.no_grad():
        features_1D = model.network(torch.zeros(1, 3, side, side), output=output)

    def compute(
        network: InferenceModel, images_B3SS: torch.Tensor
    ) -> list[torch.Tensor]:
        # Half precision holds numbers up to 65,504: a larger feature would become infinite.
        features_BD = network.forward(images_B3SS, output).to(dtype)
        if not features_BD.isfinite().all():
            raise UserError(
                f"features are not finite in {run.dtype} (NaN or infinity)",
                where=model.source,
                next_step="set dtype=float32, or give an earlier checkpoint or other weights",
            )
        return [features_BD]

    def columns(features_ND: torch.Tensor, is_unread_N: np.ndarray) -> list[pa.Array]:
        # No null: Arrow cannot read a list of a fixed size back from Parquet where there is one.
        features_ND[torch.from_numpy(is_unread_N)] = 0
        values = pa.array(features_ND.flatten().numpy())
        return [pa.FixedSizeListArray.from_arrays(values, features_ND.shape[1])]

    # A list of a fixed size is what search libraries read without a copy.
    item = pa.from_numpy_dtype(np.dtype(run.dtype))
    return Table(
        model=model,
        images=images,
        data=model.preprocessing.settings(
            batch=run.compute.batch,
            num_workers=run.data.num_workers,
            remote=run.data.remote,
        ),
        precision=run.compute.precision,
        fields=[pa.field("features", pa.list_(item, features_1D.shape[1]))],
        compute=compute,
        columns=columns,
        name="key",
        description=json.dumps(describe(run, model, images), sort_keys=True),
    )


def describe(run: EmbedRun, model: TrainedModel, images: Images) -> dict[str, Any]:
    """All that the features depend on, as JSON values, wherever model and shards are."""
    assert images.index is not None
    weights = blake3()
    for tensor in model.network.state_dict().values():
        weights.update(tensor.contiguous().numpy().tobytes())
    return {
        "weights": weights.hexdigest(),
        "model": model.arch.description(),
        "preprocessing": model.preprocessing.data_values(),
        "images": images.index.fingerprint,
        "tokens": run.tokens,
        "dtype": run.dtype,
        "compute": run.compute.model_dump(include={"device", "precision", "batch"}),
    }
