"""Begin or join the work of a run, and recognise an output that is there already.

Owns: the settings that decide the bytes of the output, `settings.json` and `failed.json` in the
work folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blake3 import blake3

from data_prep.formats.index_files import training_command
from data_prep.formats.ledger import describe_inputs
from data_prep.sources.protocol import Outage, read_named
from data_prep.steps.labels import load_labels
from data_prep.steps.work import (
    FAILED_NAME,
    STOP_SIGNALS,
    Step,
    WorkFolder,
    run_steps,
    stop,
    storage_error,
    this_process,
)
from vitscale.config.errors import UserError
from vitscale.data.index import Manifest, read_manifest
from vitscale.data.label_spaces import LABEL_SPACES
from vitscale.distributed.atomic_files import write_json
from vitscale.distributed.processes import num_cores, num_gpus
from vitscale.runs.data_prep import DataPrepRun

SETTINGS_NAME = "settings.json"
# Settings that do not change the bytes of the result.
EXECUTION_KEYS = ("output", "launch", "num_workers", "script")


def make_output(run: DataPrepRun, steps: Sequence[Step]) -> None:
    """Make the output together with other tasks, or find it made already; print what it holds.

    After an interruption the work is kept; an error of the corpus is noted in it for other tasks,
    and the next command starts over. Raises SystemExit(75) after a stop signal.
    """
    start = time.monotonic()
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    work = WorkFolder(run)
    made = find_existing(work)
    if made is None:
        open_work_folder(work)
        try:
            run_steps(work, steps, num_workers=run.num_workers or num_cores())
        except Outage:
            raise
        except UserError as error:
            with suppress(OSError):
                _store_failure(work, error)
            raise
    # Left by a process that was killed after its commit, or made again by a task that began late.
    shutil.rmtree(work.path, ignore_errors=True)
    if made is not None:
        print(f"{work.output}: already there, made with the same settings")
        return
    # Compare settings again: another command may have finished it in the meantime.
    manifest = find_existing(work)
    assert manifest is not None
    print(f"\n{work.output}: {describe_inputs(manifest.inputs)}")
    for split, entry in manifest.splits.items():
        mib = f"{entry.num_bytes / 2**20:,.1f} MiB"
        print(f"  {split}: {entry.num_samples:,} images in {len(entry.shards):,} tars, {mib}")
    classes = f"{len(manifest.classes):,} classes" if manifest.classes else "no labels"
    print(f"  {classes}, {time.monotonic() - start:.1f} s, ledger.parquet names every input")
    print(f"next: {training_command(work.output, manifest, gpus=num_gpus())}")


def find_existing(work: WorkFolder) -> Manifest | None:
    """Return the manifest of an output made with the same settings; None if there is no output.

    Raises UserError for another output, and for a mount point.
    """
    output = work.output
    if os.path.ismount(output):
        what = f"{str(output)!r} is a mount point: the work folder beside it would be on another"
        advice = f"choose a folder in it, such as {output / 'shards'}"
        raise UserError(f"{what} disk", where="output", next_step=advice)
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return None
    advice = "choose another output, or remove this folder first"
    try:
        manifest = read_manifest(output)
    except UserError as error:
        what = f"exists already and was not made by this script\n{error.text()}"
        raise UserError(what, where="output", next_step=advice) from None
    if changed := changed_settings(manifest.config, content_config(work.run)):
        what = f"{str(output)!r} exists already, made with other settings: {', '.join(changed)}"
        raise UserError(what, where="output", next_step=advice)
    return manifest


def content_config(run: DataPrepRun) -> dict[str, Any]:
    """The settings that determine the bytes written, and hashes of the files that settings name.

    Paths of source and output and settings of the execution are left out. Raises UserError for a
    file that cannot be read.
    """
    config = run.model_dump(mode="json")
    for key in EXECUTION_KEYS:
        del config[key]
    del config["source"]["path"]
    load_labels(run.labels)  # its errors say more than one of a missing file
    for section, key in (
        ("labels", "map"),
        ("labels", "space"),
        ("source", "leave_out"),
        ("source", "val_labels"),
    ):
        file = config[section][key]
        if file is not None and file not in LABEL_SPACES:
            content = read_named(file, where=f"{section}.{key}")
            config[section][f"{key}_blake3"] = blake3(content).hexdigest()
    return config


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys with different values, such as seed and labels.map_blake3."""
    before, after = dict(_flat(old)), dict(_flat(new))
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def unchanged_config(work: WorkFolder) -> dict[str, Any]:
    """The present `content_config`. Raises UserError if it differs from that at the start."""
    config = content_config(work.run)
    begun = json.loads((work.path / SETTINGS_NAME).read_text())
    if changed := changed_settings({key: begun.get(key) for key in config}, config):
        what, advice = "changed while the shards were made", "run the command again"
        raise UserError(what, where=", ".join(changed), next_step=advice)
    return config


def tool_version() -> str:
    try:
        return f"vitscale {version('vitscale')}"
    except PackageNotFoundError:
        return "vitscale (not installed)"


def open_work_folder(work: WorkFolder) -> None:
    """Create the work folder, or join those who work in it.

    Raises UserError if another task of this array has failed, or the settings are others.
    """
    settings = content_config(work.run) | {
        "path": work.run.source.path,
        "tool_version": tool_version(),
    }
    aside = work.path.with_name(f"{work.path.name}-{this_process()}")
    try:
        if (failure := work.failure()) is not None:
            if failure["job"] is not None and failure["job"] == _array_job():
                raise UserError(failure["text"])
            # Start over. Renamed, since another process may do so at the same moment.
            with suppress(FileNotFoundError):
                work.path.rename(aside)
                if not (aside / FAILED_NAME).exists():  # it has just begun anew
                    aside.rename(work.path)
            shutil.rmtree(aside, ignore_errors=True)
        if not work.path.exists():
            aside.mkdir(parents=True, exist_ok=True)
            write_json(aside / SETTINGS_NAME, settings)
            with suppress(OSError):
                aside.rename(work.path)  # one of several processes succeeds
            shutil.rmtree(aside, ignore_errors=True)
        begun = json.loads((work.path / SETTINGS_NAME).read_text())
    except OSError as error:
        if work.is_finished:
            return  # another task has just finished it
        raise storage_error(error, work) from None
    if changed := changed_settings(begun, settings):
        raise UserError(
            f"was begun with other settings: {', '.join(changed)}",
            where=str(work.path),
            next_step="use the same settings again, or remove this folder",
        )


def _store_failure(work: WorkFolder, error: UserError) -> None:
    """Tell all tasks the error: their work would end the same. The next command starts over."""
    if work.failure() is None:
        write_json(work.path / FAILED_NAME, {"job": _array_job(), "text": error.text()})
        for name in ("spool", "tars"):
            shutil.rmtree(work.path / name, ignore_errors=True)


def _array_job() -> str | None:
    return os.environ.get("SLURM_ARRAY_JOB_ID")
