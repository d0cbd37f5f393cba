"""Index external WebDataset tars without rewriting them.

    python data_prep/index_shards.py --config configs/data/index_shards.yaml \\
        source.path=TARS output=INDEX

INDEX is used for training like a shard folder; the tars stay where they are. TARS may be a URL
(http, https, s3, gs). After a kill or an outage the same command resumes. On several machines, as
an array, it shares the tars among them. Formats: docs/data_format.md.

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
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import contextmanager
    from pathlib import Path
    from typing import IO, Any

    from data_prep.indexing.folder import IndexedTars, root_of_tars, write_index_folder
    from data_prep.indexing.remote import remote_containers
    from data_prep.indexing.tars import TarUnit, index_if_free, index_when_free, stored_result
    from data_prep.pipeline.workspace import (
        content_config,
        preparation_folder,
        unchanged_config,
    )
    from data_prep.shards.index import training_command
    from data_prep.shards.ledger import LEDGER_NAME
    from data_prep.sources.protocol import Container
    from data_prep.sources.registry import open_source
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import UserError, UserErrors, run_script
    from vitscale.data.index import Manifest, read_manifest
    from vitscale.data.urls import Location, Url, location_of
    from vitscale.distributed.atomic_files import commit_folder, write_json
    from vitscale.distributed.processes import num_gpus, ordered_results, workers_for
    from vitscale.runs.data_prep import DataPrepRun
    from vitscale.tracking.console import item_progress
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


MAX_NAMED = 10


def main() -> None:
    command = load_command(
        DataPrepRun,
        script="data_prep/index_shards.py",
        description="Index external WebDataset tars without rewriting them.",
    )
    run = command.run
    start = time.monotonic()
    refuse_rewriting(run)
    root, containers = tars_to_index(run)
    output = Path(run.output).expanduser()
    config = content_config(run)
    shards_root = root_of_tars(root, output=output)
    done_message = f"{output}: already there, made from the same folder with the same settings"
    if is_already_indexed(output, config=config, shards_root=shards_root):
        print(done_message)
        return
    work = preparation_folder(output)
    with locked(work, run, config=config, output=output) as lock:
        # Another process may have finished and released the lock.
        if is_already_indexed(output, config=config, shards_root=shards_root):
            shutil.rmtree(work, ignore_errors=True)
            print(done_message)
            return
        units = [
            TarUnit(run=run, folder=work, root=root, number=number, container=container)
            for number, container in enumerate(containers)
        ]
        index_all(units, run=run)
        # Waits for the other processes of an array; one of them finishes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_already_indexed(output, config=config, shards_root=shards_root):
            print(done_message)
            return
        manifest = write_index(
            units, run=run, config=config, shards_root=shards_root, output=output
        )
    print_summary(output, manifest, seconds=time.monotonic() - start)


def index_all(units: Sequence[TarUnit], *, run: DataPrepRun) -> None:
    """Index all tars together with the other processes that do so, each beginning elsewhere."""
    num_workers, local = run.num_workers, [unit.tar_path for unit in units]
    if all(isinstance(path, Path) for path in local):
        num_bytes = sum(path.stat().st_size for path in local if isinstance(path, Path))
        num_workers = workers_for(num_bytes, num_workers=num_workers)
    start = int(os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("SLURM_PROCID") or 0)
    num = int(os.environ.get("SLURM_ARRAY_TASK_COUNT") or os.environ.get("SLURM_NTASKS") or 1)
    first = start % num * len(units) // num
    waiting = []
    with item_progress("index tars", total=len(units), unit="tars") as advance:
        order = [*units[first:], *units[:first]]
        for unit, done in ordered_results(index_if_free, order, num_workers=num_workers):
            waiting += [] if done else [unit]
            advance(done)
        for _ in ordered_results(index_when_free, waiting, num_workers=num_workers):
            advance(1)


def write_index(
    units: Sequence[TarUnit],
    *,
    run: DataPrepRun,
    config: dict[str, Any],
    shards_root: str,
    output: Path,
) -> Manifest:
    """Write and commit the output from the rows of all tars, and remove the rows."""
    work = units[0].folder
    indexed = IndexedTars()
    for unit in units:
        indexed.add(unit, stored_result(unit))
    folder = work / "final"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    manifest = write_index_folder(
        folder,
        run=run,
        config=config,
        indexed=indexed,
        shards_root=shards_root,
    )
    unchanged_config(config, run)
    commit_folder(folder, output)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def tars_to_index(run: DataPrepRun) -> tuple[Location, list[Container]]:
    """The folder or URL of the tars, and the tars in it."""
    place = location_of(run.source.path, where="source.path")
    if isinstance(place, Url):
        return place, remote_containers(run.source, place)
    source = open_source(run.source, run.labels)
    return source.root, source.containers()


def refuse_rewriting(run: DataPrepRun) -> None:
    """Raise UserErrors for settings that would require rewriting the tars."""
    wanted = {
        "source.holdout_fraction": run.source.holdout_fraction,
        "source.val_per_class": run.source.val_per_class,
        "source.min_images_per_class": run.source.min_images_per_class,
        "source.leave_out": run.source.leave_out,
        "images.short_side": run.images.short_side,
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


def is_already_indexed(output: Path, *, config: Mapping[str, Any], shards_root: str) -> bool:
    """Whether this command has made the output from this folder. Raises UserError for another."""
    if not os.path.lexists(output):
        return False
    try:
        manifest = read_manifest(output)
        same = manifest.config == config and manifest.shards_root == shards_root
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
) -> Iterator[IO[bytes]]:
    """Share the folder `.OUTPUT.preparing` with processes of equal settings; yields its lock.

    Keeps rows of an earlier run with equal settings. Raises UserError if a process with others
    works there.
    """
    place = location_of(run.source.path, where="source.path")
    source = str(place.resolve() if isinstance(place, Path) else place)
    try:
        work.mkdir(parents=True, exist_ok=True)
        with open(work / ".lock", "wb") as lock:
            with open(work / ".settings.lock", "wb") as checking:
                fcntl.flock(checking, fcntl.LOCK_EX)
                _share(lock, work, settings={"source": source, **config}, output=output)
            yield lock
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror or error}); the tars indexed so far are kept in "
            f"{work.name}",
            where=str(output),
            next_step="fix this and run the same command again; it resumes",
        ) from None


def _share(lock: IO[bytes], work: Path, *, settings: dict[str, Any], output: Path) -> None:
    note = work / "settings.json"
    same = note.exists() and json.loads(note.read_text()) == settings
    # A task of an array that starts late waits for the one that finishes.
    wait = 0 if "SLURM_ARRAY_TASK_ID" in os.environ else fcntl.LOCK_NB
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | wait if same else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            "another process is writing this folder",
            where=str(output),
            next_step="wait for it, or choose another output",
        ) from None
    if not same:
        for path in work.glob("*.json"):
            path.unlink()
        write_json(note, settings)
        fcntl.flock(lock, fcntl.LOCK_SH)


def print_summary(output: Path, manifest: Manifest, *, seconds: float) -> None:
    inputs = manifest.inputs
    rejected = inputs["num_rows"] - inputs["num_kept"]
    print(
        f"\n{output}: {inputs['num_rows']:,} inputs = {inputs['num_kept']:,} kept + "
        f"{rejected:,} rejected"
    )
    for reason, num in sorted(inputs["reasons"].items(), key=lambda item: -item[1]):
        names = _named(output) if reason == "truncated_tar" else ""
        print(f"  {num:,} {reason}{names}")
    for split, entry in manifest.splits.items():
        print(
            f"  {split}: {entry.num_samples:,} images in {len(entry.shards):,} tars, "
            f"{entry.num_bytes / 2**20:,.1f} MiB"
        )
    classes = f"{len(manifest.classes):,} classes" if manifest.classes else "no labels"
    print(f"  {classes}, tars in {manifest.shards_root}, {seconds:.1f} s")
    print(f"next: {training_command(output, manifest, gpus=num_gpus())}")


def _named(output: Path) -> str:
    """The first tars that end early or are damaged."""
    import pyarrow.parquet as pq

    rows = pq.read_table(
        output / LEDGER_NAME, columns=["path"], filters=[("reason", "==", "truncated_tar")]
    )
    names = rows.column("path").to_pylist()
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f": {', '.join(names[:MAX_NAMED])}{more}; the samples before that are used"


if __name__ == "__main__":
    run_script(main)
