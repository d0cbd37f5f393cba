"""Turn a raw corpus into shuffled WebDataset tars with an index and a ledger.

    python data_prep/make_shards.py --config configs/data/image_folder.yaml \
        source.path=IMAGES output=SHARDS

The same command again goes on where a killed one was. Several at a time, on machines that share
the output's folder, divide the work. Formats: docs/data_format.md.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from contextlib import suppress

# Read when pyarrow is imported. Its own allocators keep what is freed, a quarter of a worker.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

try:
    from pathlib import Path
    from typing import Any

    from data_prep.pipeline.listing import listing_fingerprint
    from data_prep.pipeline.runner import LISTING_PHASES, prepare, storage_error
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
    from data_prep.shards.ledger import describe_rejected
    from data_prep.sources.outages import Interrupted
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, run_script
    from vitscale.data.index import INDEX_NAME, Manifest, read_manifest
    from vitscale.distributed.atomic_files import write_json
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"vitscale is not installed ({error}). Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    command = load_command(
        DataPrepRun,
        script="data_prep/make_shards.py",
        description="Turn a raw corpus into shuffled WebDataset tars with index and ledger.",
    )
    run = at_real_output(command.run)
    start = time.monotonic()
    output = Path(run.output).expanduser()
    if output.resolve().is_relative_to(Path(run.source.path).expanduser().resolve()):
        raise UserError(
            "lies inside source.path", where="output", next_step="choose another folder"
        )
    existing = find_existing(output, run)
    if existing is not None:
        # Tasks of one job that come late have nothing to compare: the others have just read it.
        if run.launch.num_tasks == 1:
            check_same_source(existing, run)
        remove_folder(preparation_folder(output))  # of one killed after it had named the output
        print(f"{output}: already there, made from the same inputs with the same settings")
        return
    raise_verdict(run)
    begin(run)
    work_until_done(run)
    # A task that came when another was just finishing has made the folder anew.
    remove_folder(preparation_folder(output))
    # Again with its settings: another command may have finished it while this one began.
    made = find_existing(output, run)
    assert made is not None
    print_summary(output, made, seconds=time.monotonic() - start)


def find_existing(output: Path, run: DataPrepRun) -> Manifest | None:
    """The manifest of a folder made with the same settings; None when there is nothing."""
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return None
    advice = "choose another output, or remove this folder first"
    try:
        manifest = read_manifest(output)
    except UserError as error:
        raise UserError(
            f"exists already and is no shard folder of ours\n{error.text()}",
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
    """Compare names and sizes of the inputs; content is left to verify_shards.py."""
    # Of this process alone: commands that compare at the same time would remove each other's.
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


def begin(run: DataPrepRun) -> None:
    """Make the folder for the work, or refuse to go on with work begun with other settings."""
    folder = preparation_folder(Path(run.output).expanduser())
    settings = content_config(run) | {
        "path": run.source.path,
        "tool_version": tool_version(),
        "work_format": WORK_FORMAT,
    }
    try:
        if is_left_over(run):
            remove_folder(folder)
        if not (folder / SETTINGS_NAME).exists():
            make_work_folder(folder, settings)
        begun = json.loads((folder / SETTINGS_NAME).read_text())
    except FileNotFoundError:
        if is_finished(Path(run.output).expanduser()):
            return  # another task has just finished, and named the folder
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
    """Create it with its settings in it by one rename; of several processes one succeeds."""
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
                f"holds files, but no {SETTINGS_NAME} that says what they are of",
                where=str(folder),
                next_step="remove this folder",
            ) from None


def is_left_over(run: DataPrepRun) -> bool:
    """Whether the index is written and gone: with an output that was finished and then removed."""
    work = WorkFolder(preparation_folder(Path(run.output).expanduser()))
    p = Preparation(run, work, lambda num: None)
    return p.has_result("index") and not (p.path("final") / INDEX_NAME).exists()


def work_until_done(run: DataPrepRun) -> None:
    """Work; leave nothing behind after a verdict on the corpus, and everything otherwise."""
    folder = preparation_folder(Path(run.output).expanduser())
    task = os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("RANK") or "0"
    try:
        prepare(run, task=int(task))
    except Interrupted:
        raise
    except UserError as error:
        leave_verdict(run, error)
        remove_folder(folder)
        raise
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", flush=True)
        raise SystemExit(EXIT_STOPPED_RESUMABLE) from None


def verdict_path(run: DataPrepRun) -> Path:
    output = Path(run.output).expanduser()
    return output.with_name(f".{output.name}.verdict.json")


def leave_verdict(run: DataPrepRun, error: UserError) -> None:
    """For tasks of the same array that come when all is over: the work would end the same."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    with suppress(FileExistsError, FileNotFoundError):
        if job is not None and not verdict_path(run).exists():
            write_json(verdict_path(run), {"job": job, "text": error.text()})


def raise_verdict(run: DataPrepRun) -> None:
    """What another task of this array found; a verdict of another job is forgotten."""
    try:
        verdict = json.loads(verdict_path(run).read_text())
    except FileNotFoundError:
        return
    if verdict["job"] == os.environ.get("SLURM_ARRAY_JOB_ID"):
        raise UserError(verdict["text"])
    verdict_path(run).unlink(missing_ok=True)


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
    print(f"  {len(manifest.classes):,} classes, {seconds:.1f} s, ledger.parquet names every input")
    print(
        "next: deepspeed pretrain/main.py --config configs/vit_b16.yaml "
        f"data.path={output} model.num_classes={len(manifest.classes)}"
    )


if __name__ == "__main__":
    run_script(main)
