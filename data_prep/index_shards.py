"""Index external WebDataset tars without rewriting them.

    python data_prep/index_shards.py --config configs/data/index_shards.yaml \\
        source.path=TARS output=INDEX

INDEX is used for training like a shard folder; the tars stay where they are. After a kill, the same
command resumes. Formats: docs/data_format.md.

Owns: the order of the steps, and the output on the console.
"""

from __future__ import annotations

import sys
import time

try:
    import fcntl
    import json
    import os
    import shutil
    from collections.abc import Iterator, Mapping
    from contextlib import contextmanager
    from pathlib import Path
    from typing import Any

    from data_prep.indexing.folder import IndexedTars, root_of_tars, tar_listing, write_index_folder
    from data_prep.indexing.tars import TarUnit, index_tar
    from data_prep.pipeline.workspace import (
        content_config,
        preparation_folder,
        unchanged_config,
    )
    from data_prep.shards.index import training_command
    from data_prep.sources.registry import open_source
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import UserError, UserErrors, run_script
    from vitscale.data.index import Manifest, read_manifest
    from vitscale.distributed.atomic_files import commit_folder, write_json
    from vitscale.distributed.processes import ordered_results, workers_for
    from vitscale.runs.data_prep import DataPrepRun
    from vitscale.tracking.console import item_progress
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    command = load_command(
        DataPrepRun,
        script="data_prep/index_shards.py",
        description="Index external WebDataset tars without rewriting them.",
    )
    run = command.run
    start = time.monotonic()
    refuse_rewriting(run)
    source = open_source(run.source, run.labels)
    containers = source.containers()
    output = Path(run.output).expanduser()
    config = content_config(run)
    listing = tar_listing(source.root, containers)
    done_message = f"{output}: already there, made from the same tars with the same settings"
    if is_already_indexed(output, config=config, listing=listing):
        print(done_message)
        return
    work = preparation_folder(output)
    with locked(work, run, config=config, output=output):
        # Another process may have finished and released the lock.
        if is_already_indexed(output, config=config, listing=listing):
            shutil.rmtree(work, ignore_errors=True)
            print(done_message)
            return
        units = [
            TarUnit(run=run, folder=work, root=source.root, number=number, container=container)
            for number, container in enumerate(containers)
        ]
        num_bytes = sum(unit.tar_path.stat().st_size for unit in units)
        num_workers = workers_for(num_bytes, num_workers=run.num_workers)
        indexed = IndexedTars()
        with item_progress("index tars", total=len(units), unit="tars") as advance:
            for unit, result in ordered_results(index_tar, units, num_workers=num_workers):
                indexed.add(unit, result)
                advance(1)
        folder = work / "final"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        root = root_of_tars(source.root, output=output)
        manifest = write_index_folder(
            folder, run=run, config=config, indexed=indexed, root=source.root, shards_root=root
        )
        unchanged_config(config, run)
        commit_folder(folder, output)
        shutil.rmtree(work, ignore_errors=True)
    print_summary(output, manifest, seconds=time.monotonic() - start)


def refuse_rewriting(run: DataPrepRun) -> None:
    """Raise UserErrors for settings that would require rewriting the tars."""
    wanted = {
        "source.holdout_fraction": run.source.holdout_fraction,
        "source.val_per_class": run.source.val_per_class,
        "images.short_side": run.images.short_side,
        "selection": run.selection != type(run.selection)(),
    }
    errors = [
        UserError(
            "requires rewriting the tars, which indexing does not do",
            where=key,
            next_step="remove this key, or make new shards with data_prep/make_shards.py",
        )
        for key, value in wanted.items()
        if value
    ]
    if run.source.kind != "webdataset":
        errors.append(UserError("must be webdataset", where="source.kind"))
    if errors:
        raise UserErrors(errors)


def is_already_indexed(output: Path, *, config: Mapping[str, Any], listing: str) -> bool:
    """Whether this command has made the output from these tars. Raises UserError for others."""
    if not os.path.lexists(output):
        return False
    try:
        manifest = read_manifest(output)
        same = manifest.config == config and manifest.source_listing == listing
    except UserError:
        same = False
    if not same:
        raise UserError(
            f"{str(output)!r} exists already, made from other tars or with other settings",
            where="output",
            next_step="choose another output, or remove this folder first",
        )
    return True


@contextmanager
def locked(
    work: Path, run: DataPrepRun, *, config: Mapping[str, Any], output: Path
) -> Iterator[None]:
    """Lock the folder `.OUTPUT.preparing`; keeps rows of an earlier run with equal settings."""
    settings = {"source": str(Path(run.source.path).resolve()), **config}
    note = work / "settings.json"
    try:
        work.mkdir(parents=True, exist_ok=True)
        with open(work / ".lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    "another process is writing this folder",
                    where=str(output),
                    next_step="wait for it, or choose another output",
                ) from None
            if not note.exists() or json.loads(note.read_text()) != settings:
                for path in work.glob("*.json"):
                    path.unlink()
                write_json(note, settings)
            yield
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror or error}); the tars indexed so far are kept in "
            f"{work.name}",
            where=str(output),
            next_step="fix this and run the same command again; it resumes",
        ) from None


def print_summary(output: Path, manifest: Manifest, *, seconds: float) -> None:
    inputs = manifest.inputs
    rejected = inputs["num_rows"] - inputs["num_kept"]
    print(
        f"\n{output}: {inputs['num_rows']:,} inputs = {inputs['num_kept']:,} kept + "
        f"{rejected:,} rejected"
    )
    for reason, num in sorted(inputs["reasons"].items(), key=lambda item: -item[1]):
        print(f"  {num:,} {reason}")
    for split, entry in manifest.splits.items():
        print(
            f"  {split}: {entry.num_samples:,} images in {len(entry.shards):,} tars, "
            f"{entry.num_bytes / 2**20:,.1f} MiB"
        )
    classes = f"{len(manifest.classes):,} classes" if manifest.classes else "no labels"
    print(f"  {classes}, tars in {manifest.shards_root}, {seconds:.1f} s")
    print(f"next: {training_command(output, manifest)}")


if __name__ == "__main__":
    run_script(main)
