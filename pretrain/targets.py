"""Compute once what the teachers of a configuration say of its training images, view by view.

Each rank takes files, of one view of one tar. Batches end with their tar, so that the bytes do not
depend on the number of ranks or on how often the work was stopped. B: batch.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch

from pretrain.objectives.features import Features, FeaturesSettings
from pretrain.run import TargetsRun
from vitscale.checkpoint.store import run_folder_lock
from vitscale.config.errors import UserError, not_written
from vitscale.data.loader import open_batches
from vitscale.data.order import Draw
from vitscale.data.remote import HASH_BYTES, prefix_of_hash
from vitscale.data.samples import Augmentation, TrainingSamples
from vitscale.data.target_rows import encoded
from vitscale.data.targets import (
    HEADER_NAME,
    Header,
    TeacherTargets,
    check_same,
    file_name,
    images_of,
    read_header,
)
from vitscale.data.training_set import TrainingSet, open_training_set
from vitscale.distributed.atomic_files import (
    atomic_file,
    blake3_of_file,
    make_folders,
    write_json,
)
from vitscale.distributed.node_files import once_per_node
from vitscale.distributed.world import World, errors_on_all_ranks, gather_objects
from vitscale.objectives.teacher import FeatureTeacher
from vitscale.tracking.journal import item_progress


class Piece(NamedTuple):
    """One view of the samples of one tar: a file."""

    part: int
    view: int
    shard: int
    samples: range

    @property
    def name(self) -> str:
        return file_name(self.part, self.view, self.shard)


class PieceSamples(TrainingSamples):
    """The samples of a piece, by their numbers."""

    piece: Piece

    def draw_at(self, position: int) -> Draw:
        return Draw(self.piece.part, self.piece.view, position, 0)

    def prefetch(self, positions: Sequence[int]) -> None:
        """Tars come in their own order."""


def own_pieces(data: TrainingSet, views: int, world: World) -> list[Piece]:
    """The share of this rank of all files."""
    pieces = []
    for view in range(views):
        for part, index in enumerate(data.parts):
            first = 0
            for shard, length in enumerate(index.shard_lengths.tolist()):
                samples = range(first, first + length)
                pieces.append(Piece(part, view, shard, samples))
                first += length
    return pieces[world.rank :: world.world_size]


def header_of(
    run: TargetsRun, data: TrainingSet, teachers: Sequence[FeatureTeacher]
) -> Header:
    """The header without its files."""
    assert isinstance(run.objective, FeaturesSettings)
    grid = run.objective.target_grid

    # Where the teachers came from may change; their hash and what they give may not.
    entries = [
        TeacherTargets(fingerprint=each.fingerprint, width=each.width, grid=grid)
        for each in teachers
    ]
    size = run.model.image_size
    return Header(
        teachers=tuple(entries),
        precision=run.precision,
        views=run.views,
        images=images_of(data.parts, run.data, image_size=size, seed=run.seed),
        files={},
    )


def prepare_targets(
    run: TargetsRun, world: World, *, is_dry_run: bool
) -> Iterator[str]:
    """Write what is missing of the targets; yields lines to print. Collective.

    Raises UserError for a folder of other targets and a disk that is too small.
    """
    data = once_per_node(
        lambda: open_training_set(run.data, seed=run.seed, needs_labels=False),
        is_maker=world.local_rank == 0,
        gather=gather_objects,
    )
    objective = run.make_objective()
    assert isinstance(objective, Features)
    teachers = objective.open_teachers(world=world, engine=run.engine)
    header = header_of(run, data, teachers)
    folder = Path(run.output)

    # A command that was killed has left whole files, which stay.
    pieces = own_pieces(data, run.views, world)
    missing = []
    for piece in pieces:
        path = folder / piece.name
        # A file gets its name by a rename, so that a short one was damaged.
        num_bytes = len(piece.samples) * header.row_bytes
        if not path.is_file() or path.stat().st_size != num_bytes:
            missing.append(piece)
    num_missing = sum(gather_objects(num_samples(missing)))
    num_bytes = num_missing * header.row_bytes

    # Said before any forward pass: other targets in the folder, or too small a disk.
    with errors_on_all_ranks("cannot be read", folder, tried=world.is_first):
        if world.is_first:
            check_folder(folder, header)
            check_disk(folder, num_bytes)
    flops = num_missing * sum(each.flops_per_image for each in teachers)
    yield (
        f"targets: {header.views} views of {data.num_samples:,} images, {header.precision}, "
        f"{header.row_bytes:,} bytes each"
    )
    yield (
        f"missing: {num_missing:,} crops, {num_bytes:,} bytes; forward passes of {len(teachers)} "
        f"teacher(s): {flops:.3g} FLOPs"
    )
    if is_dry_run:
        return

    # A second command of the same folder would write the same files.
    with run_folder_lock(folder, world=world):
        with errors_on_all_ranks("cannot be written", folder, tried=world.is_first):
            if world.is_first:
                start_folder(folder, header)
        num_unread = write_pieces(run, data, header, teachers, missing, world)
        with errors_on_all_ranks("cannot be read", folder):
            hashes = {each.name: blake3_of_file(folder / each.name) for each in pieces}

        # The header with all hashes comes last: without it the targets are not complete.
        files: dict[str, str] = {}
        for found in gather_objects(hashes):
            files |= found
        num_unread = sum(gather_objects(num_unread))
        with errors_on_all_ranks("cannot be written", folder, tried=world.is_first):
            if world.is_first:
                write_json(folder / HEADER_NAME, asdict(replace(header, files=files)))
    if num_unread:
        yield f"{num_unread:,} crops are of substitutes for unreadable images, as in training"
    yield (
        f"{folder}: complete\n"
        f"next: vitscale pretrain CONFIG objective.targets={quote(run.output)} "
        "'objective.teachers=[]'"
    )


def num_samples(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.samples) for piece in pieces)


def check_folder(folder: Path, header: Header) -> None:
    """Raise UserError for a folder of other targets."""

    def facts(header: Header) -> dict[str, Any]:
        return asdict(header) | header.images | {"images": None, "files": None}

    if (folder / HEADER_NAME).exists():
        check_same(facts(read_header(folder)), facts(header), where=folder)


def check_disk(folder: Path, num_bytes: int) -> None:
    """Raise UserError where the disk has less space than the targets need."""
    folder = folder.absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise UserError(
            f"the targets need {num_bytes:,} bytes, and {free:,} are free in {parent}",
            where="output",
            next_step="free some space, or choose another output, precision=int8, fewer views or "
            "a smaller objective.patch_grid",
        )


def start_folder(folder: Path, header: Header) -> None:
    """Make the folders, and say in a header without files what will be there."""
    for view in range(header.views):
        make_folders(folder / f"view-{view}")
    # What a killed command was writing.
    for path in folder.glob("view-*/.*.tmp"):
        path.unlink()
    if not (folder / HEADER_NAME).exists():
        write_json(folder / HEADER_NAME, asdict(header))


def write_pieces(
    run: TargetsRun,
    data: TrainingSet,
    header: Header,
    teachers: Sequence[FeatureTeacher],
    pieces: Sequence[Piece],
    world: World,
) -> int:
    """Write these files. Returns the number of images that could not be read.

    Raises UserError for features that are not finite, and a disk that takes no more.
    """
    size = run.engine.max_micro_batch
    augmentation = Augmentation(
        run.data, image_size=run.model.image_size, seed=run.seed
    )
    samples = PieceSamples(data, augmentation)
    num_unread = 0

    # One line of all files, since a tar may take seconds or hours.
    progress = item_progress(
        "targets",
        total=num_samples(pieces),
        is_shown=world.is_first,
        file=sys.stderr,
    )
    with progress as advance:
        for piece in pieces:
            samples.piece = piece
            path = Path(run.output, piece.name)
            num = len(piece.samples)
            loader = open_batches(
                samples,
                [piece.samples[start : start + size] for start in range(0, num, size)],
                batch=size,
                settings=run.data,
                pin_memory=world.device.type == "cuda",
            )
            try:
                with loader as batches, atomic_file(path) as file:
                    for batch in batches:
                        images = batch.images.to(world.device, non_blocking=True)
                        file.write(rows_of(images, teachers, header))
                        num_unread += len(batch.unreadable)
                        advance(len(images))
            except OSError as error:
                raise not_written(error, path) from None
    return num_unread


def rows_of(
    images_B3SS: torch.Tensor, teachers: Sequence[FeatureTeacher], header: Header
) -> bytes:
    """The rows of images: what all teachers say of each, and its hash.

    Raises UserError for what is not finite.
    """
    parts = []
    for teacher, stored in zip(teachers, header.teachers, strict=True):
        class_BD, patches = teacher.features(images_B3SS, patch_grid=stored.grid)
        vectors_BVD = class_BD.unsqueeze(1)
        if patches is not None:
            vectors_BVD = torch.cat([vectors_BVD, patches], dim=1)
        if not vectors_BVD.isfinite().all():
            raise UserError(
                "its features are not finite (NaN or infinity)",
                where=f"teacher {teacher.fingerprint[:12]}",
                next_step="take other weights, or engine.precision=fp32",
            )
        parts.append(encoded(vectors_BVD, header.precision))

    # Each row has its own hash, as a loader reads single rows.
    rows = b""
    for content in map(bytes, torch.cat(parts, dim=1).cpu().numpy()):
        rows += content + prefix_of_hash(content).to_bytes(HASH_BYTES, "little")
    return rows
