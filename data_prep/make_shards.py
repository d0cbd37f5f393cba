"""Turn a raw corpus into shuffled WebDataset tars with an index and a ledger.

    python data_prep/make_shards.py --config configs/data/image_folder.yaml \
        source.path=IMAGES output=SHARDS

Run again after an interruption, the command resumes. Several commands at a time, on machines that
share the output's folder, divide the work. Formats: docs/data_format.md.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress

try:
    from pathlib import Path
    from typing import Any

    from data_prep.pipeline.runner import prepare, storage_error
    from data_prep.pipeline.work_units import this_process
    from data_prep.pipeline.workspace import (
        FAILED_NAME,
        SETTINGS_NAME,
        WORK_FORMAT,
        at_real_output,
        changed_settings,
        content_config,
        is_finished,
        preparation_folder,
        read_failure,
        tool_version,
    )
    from data_prep.shards.index import training_command
    from data_prep.shards.ledger import describe_rejected
    from data_prep.sources.outages import Interrupted
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, run_script
    from vitscale.data.index import Manifest, read_manifest
    from vitscale.distributed.atomic_files import write_json
    from vitscale.distributed.processes import num_gpus
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

SETTINGS_WAIT_S = 5.0


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
        raise UserError("is inside source.path", where="output", next_step="choose another folder")
    work = preparation_folder(output)
    if find_existing(output, run) is not None:
        # Left by a process that was killed after it had committed the output.
        shutil.rmtree(work, ignore_errors=True)
        print(f"{output}: already there, made with the same settings")
        return
    open_work_folder(run)
    work_until_done(run)
    # A task that starts while another finishes creates the folder again.
    shutil.rmtree(work, ignore_errors=True)
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


def open_work_folder(run: DataPrepRun) -> None:
    """Create the work folder, or join those who work in it.

    Raises UserError if another task of this array has failed, or the settings are others.
    """
    output = Path(run.output).expanduser()
    folder = preparation_folder(output)
    settings = content_config(run) | {
        "path": run.source.path,
        "tool_version": tool_version(),
        "work_format": WORK_FORMAT,
    }
    try:
        failure = read_failure(folder)
        if failure is not None:
            if failure["job"] is not None and failure["job"] == array_job():
                raise UserError(failure["text"])
            start_over(folder)
        begun = begin_or_join(folder, settings)
    except OSError as error:
        if is_finished(output):
            return  # another task has just finished it
        raise storage_error(error, output) from None
    if changed := changed_settings(begun, settings):
        raise UserError(
            f"was begun with other settings: {', '.join(changed)}",
            where=str(folder),
            next_step="use the same settings again, or remove this folder",
        )


def begin_or_join(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Create the folder with these settings, or return the settings that another process wrote."""
    with suppress(FileExistsError):
        folder.mkdir(parents=True)  # one of several processes succeeds
        write_json(folder / SETTINGS_NAME, settings)
    deadline = time.monotonic() + SETTINGS_WAIT_S
    while not (folder / SETTINGS_NAME).exists() and time.monotonic() < deadline:
        time.sleep(SETTINGS_WAIT_S / 100)
    if folder.exists() and not (folder / SETTINGS_NAME).exists():
        raise UserError(
            f"has no {SETTINGS_NAME}", where=str(folder), next_step="remove this folder"
        )
    found: dict[str, Any] = json.loads((folder / SETTINGS_NAME).read_text())
    return found


def start_over(folder: Path) -> None:
    """Remove the folder of a preparation that failed, unless another process does."""
    removed = folder.with_name(f"{folder.name}-{this_process()}")
    with suppress(FileNotFoundError):
        folder.rename(removed)
        if not (removed / FAILED_NAME).exists():  # another process has just begun anew
            removed.rename(folder)
            return
    shutil.rmtree(removed, ignore_errors=True)


def work_until_done(run: DataPrepRun) -> None:
    """Run the phases. After an interruption the work is kept; an unusable corpus is noted in it."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("RANK") or "0"
    try:
        prepare(run, task=int(task))
    except Interrupted:
        raise
    except UserError as error:
        with suppress(OSError):
            store_failure(preparation_folder(Path(run.output).expanduser()), error)
        raise
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to resume", flush=True)
        raise SystemExit(EXIT_STOPPED_RESUMABLE) from None


def store_failure(folder: Path, error: UserError) -> None:
    """Tell all tasks the error: their work would end the same. The next command starts over."""
    if read_failure(folder) is None:
        write_json(folder / FAILED_NAME, {"job": array_job(), "text": error.text()})
        for name in ("spool", "tars"):
            shutil.rmtree(folder / name, ignore_errors=True)


def array_job() -> str | None:
    return os.environ.get("SLURM_ARRAY_JOB_ID")


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
    print(f"next: {training_command(output, manifest, gpus=num_gpus())}")


if __name__ == "__main__":
    run_script(main)
