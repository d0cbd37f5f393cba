"""Turn a raw corpus into shuffled WebDataset tars with an index and a ledger.

    python data_prep/make_shards.py --config configs/data/image_folder.yaml \
        source.path=IMAGES output=SHARDS

Run again after an interruption, the command resumes. Several commands at a time, on machines that
share the output's folder, divide the work. Formats: docs/data_format.md.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from contextlib import suppress

try:
    from pathlib import Path
    from typing import Any

    from data_prep.pipeline.listing import listing_fingerprint
    from data_prep.pipeline.phases import LISTING_PHASES
    from data_prep.pipeline.runner import prepare, storage_error
    from data_prep.pipeline.work_units import WorkFolder, aborted_error, remove_folder, sibling_path
    from data_prep.pipeline.workspace import (
        SETTINGS_NAME,
        WORK_FORMAT,
        Preparation,
        at_real_output,
        changed_settings,
        content_config,
        is_finished,
        preparation_folder,
        tool_version,
    )
    from data_prep.shards.index import training_command
    from data_prep.shards.ledger import describe_rejected
    from data_prep.sources.outages import Interrupted
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, run_script
    from vitscale.data.index import INDEX_NAME, Manifest, read_manifest
    from vitscale.distributed.atomic_files import write_json
    from vitscale.images.jpeg.entry_points import require_entry_points
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    command = load_command(
        DataPrepRun,
        script="data_prep/make_shards.py",
        description="Turn a raw corpus into shuffled WebDataset tars with index and ledger.",
    )
    run = at_real_output(command.run)
    if run.shards.entry_points:
        require_entry_points(where="shards.entry_points")
    start = time.monotonic()
    output = Path(run.output).expanduser()
    if output.resolve().is_relative_to(Path(run.source.path).expanduser().resolve()):
        raise UserError("is inside source.path", where="output", next_step="choose another folder")
    existing = find_existing(output, run)
    if existing is not None:
        # Late tasks of a job need no comparison: the others have just read the source.
        if run.launch.num_tasks == 1:
            check_same_source(existing, run)
        remove_folder(
            preparation_folder(output)
        )  # of a process killed after it committed the output
        print(f"{output}: already there, made from the same inputs with the same settings")
        return
    raise_corpus_error(run)
    open_work_folder(run)
    work_until_done(run)
    # A task that starts while another finishes creates the folder again.
    remove_folder(preparation_folder(output))
    # Compare settings again: another command may have finished it in the meantime.
    made = find_existing(output, run)
    assert made is not None
    print_summary(output, made, seconds=time.monotonic() - start)


def find_existing(output: Path, run: DataPrepRun) -> Manifest | None:
    """The manifest of an output made with the same settings; None if there is no output."""
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return None
    advice = "choose another output, or remove this folder first"
    try:
        manifest = read_manifest(output)
    except UserError as error:
        raise UserError(
            f"exists already and was not made by make_shards\n{error.text()}",
            where="output",
            next_step=advice,
        ) from None
    if changed := changed_settings(manifest.config, content_config(run)):
        raise UserError(
            f"{str(output)!r} exists already, made with other settings: {', '.join(changed)}",
            where="output",
            next_step=advice,
        )
    return manifest


def check_same_source(existing: Manifest, run: DataPrepRun) -> None:
    """Compare names and sizes of the inputs; verify_shards.py checks their content."""
    # A folder per process: concurrent commands would remove each other's.
    folder = sibling_path(preparation_folder(Path(run.output).expanduser()))
    listing = run.model_copy(update={"output": str(folder / "listing")})
    work = WorkFolder(preparation_folder(folder / "listing"))
    try:
        work.path.mkdir(parents=True)
        prepare(listing, phases=LISTING_PHASES)
        now = listing_fingerprint(Preparation(listing, work, lambda num: None))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if now != existing.source_listing:
        raise UserError(
            f"{run.output!r} exists already, made from other images",
            where="output",
            next_step="choose another output, or remove this folder first",
        )


def open_work_folder(run: DataPrepRun) -> None:
    """Create the work folder. Raises UserError if it exists with other settings."""
    folder = preparation_folder(Path(run.output).expanduser())
    settings = content_config(run) | {
        "path": run.source.path,
        "tool_version": tool_version(),
        "work_format": WORK_FORMAT,
    }
    try:
        if is_stale(run):
            remove_folder(folder)
        if not (folder / SETTINGS_NAME).exists():
            make_work_folder(folder, settings)
        begun = json.loads((folder / SETTINGS_NAME).read_text())
    except FileNotFoundError:
        if is_finished(Path(run.output).expanduser()):
            return  # another task has just finished the output
        raise aborted_error(folder) from None
    except OSError as error:
        raise storage_error(error, Path(run.output)) from None
    if changed := changed_settings(begun, settings):
        raise UserError(
            f"was begun with other settings: {', '.join(changed)}",
            where=str(folder),
            next_step="use the same settings again, or remove this folder",
        )


def make_work_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Create the folder and its settings by one rename; one of several processes succeeds."""
    new = sibling_path(folder)
    new.mkdir(parents=True)
    write_json(new / SETTINGS_NAME, settings)
    try:
        new.rename(folder)
    except OSError as error:
        shutil.rmtree(new)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not (folder / SETTINGS_NAME).exists() and folder.exists():
            raise UserError(
                f"holds files, but no {SETTINGS_NAME}",
                where=str(folder),
                next_step="remove this folder",
            ) from None


def is_stale(run: DataPrepRun) -> bool:
    """Whether the work folder belongs to an output that was finished and removed since."""
    work = WorkFolder(preparation_folder(Path(run.output).expanduser()))
    p = Preparation(run, work, lambda num: None)
    return p.has_result("index") and not (p.path("final") / INDEX_NAME).exists()


def work_until_done(run: DataPrepRun) -> None:
    """Run the phases. An unusable corpus discards the work; after an interruption it is kept."""
    folder = preparation_folder(Path(run.output).expanduser())
    task = os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("RANK") or "0"
    try:
        prepare(run, task=int(task))
    except Interrupted:
        raise
    except UserError as error:
        store_corpus_error(run, error)
        remove_folder(folder)
        raise
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to resume", flush=True)
        raise SystemExit(EXIT_STOPPED_RESUMABLE) from None


def corpus_error_path(run: DataPrepRun) -> Path:
    output = Path(run.output).expanduser()
    return output.with_name(f".{output.name}.error.json")


def store_corpus_error(run: DataPrepRun, error: UserError) -> None:
    """Store the error for later tasks of the same array: their work would end the same."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    with suppress(FileExistsError, FileNotFoundError):
        if job is not None and not corpus_error_path(run).exists():
            write_json(corpus_error_path(run), {"job": job, "text": error.text()})


def raise_corpus_error(run: DataPrepRun) -> None:
    """Raise the error of another task of this array; remove that of another job."""
    try:
        stored = json.loads(corpus_error_path(run).read_text())
    except FileNotFoundError:
        return
    if stored["job"] == os.environ.get("SLURM_ARRAY_JOB_ID"):
        raise UserError(stored["text"])
    corpus_error_path(run).unlink(missing_ok=True)


def print_summary(output: Path, manifest: Manifest, *, seconds: float) -> None:
    inputs = manifest.inputs
    num, kept = inputs["num_rows"], inputs["num_kept"]
    repaired = f" ({inputs['num_repaired']:,} repaired)" if inputs["num_repaired"] else ""
    print(f"\n{output}: {num:,} inputs = {kept:,} kept{repaired} + {num - kept:,} rejected")
    if kept < num:
        print(describe_rejected(inputs["reasons"], inputs["examples"]))
    for split, entry in manifest.splits.items():
        print(
            f"  {split}: {entry.num_samples:,} images in {len(entry.shards):,} shards, "
            f"{entry.num_bytes / 2**20:,.1f} MiB"
        )
    classes = f"{len(manifest.classes):,} classes" if manifest.classes else "no labels"
    print(f"  {classes}, {seconds:.1f} s, ledger.parquet names every input")
    print(f"next: {training_command(output, manifest)}")


if __name__ == "__main__":
    run_script(main)
