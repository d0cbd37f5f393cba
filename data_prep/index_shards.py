"""Index external WebDataset tars without rewriting them.

    python data_prep/index_shards.py --config configs/data/index_shards.yaml \\
        source.path=TARS output=INDEX

INDEX is used for training like a shard folder; the tars stay where they are. TARS may be a URL
(http, https, s3, gs). After a kill or an outage the same command resumes. On several machines, as
an array, it shares the tars among them. Formats: docs/data_format.md.
"""

from __future__ import annotations

import sys
import time

try:
    from pathlib import Path

    from data_prep.formats.index_files import training_command
    from data_prep.formats.ledger import describe_inputs
    from data_prep.steps import finish, index_tar
    from data_prep.steps.settings import make_output
    from data_prep.steps.work import Step
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import UserError, UserErrors, run_script
    from vitscale.data.index import Manifest
    from vitscale.distributed.processes import num_gpus
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

STEPS = (
    Step(
        title="list tars",
        units=index_tar.containers_units,
        do=index_tar.list_tars,
    ),
    Step(
        title="index tars",
        units=index_tar.tar_units,
        do=index_tar.index_tar,
        counted="tars",
    ),
    Step(
        title="finish",
        units=finish.finish_units,
        do=finish.finish_index,
    ),
)


def main() -> None:
    command = load_command(
        DataPrepRun,
        script="data_prep/index_shards.py",
        description="Index external WebDataset tars without rewriting them.",
    )
    start = time.monotonic()
    refuse_rewriting(command.run)
    output, manifest, was_there = make_output(command.run, STEPS)
    if was_there:
        print(f"{output}: already there, made with the same settings")
    else:
        print_summary(output, manifest, seconds=time.monotonic() - start)


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


def print_summary(output: Path, manifest: Manifest, *, seconds: float) -> None:
    print(f"\n{output}: {describe_inputs(manifest.inputs)}")
    for split, entry in manifest.splits.items():
        print(
            f"  {split}: {entry.num_samples:,} images in {len(entry.shards):,} tars, "
            f"{entry.num_bytes / 2**20:,.1f} MiB"
        )
    classes = f"{len(manifest.classes):,} classes" if manifest.classes else "no labels"
    print(f"  {classes}, tars in {manifest.shards_root}, {seconds:.1f} s")
    print(f"next: {training_command(output, manifest, gpus=num_gpus())}")


if __name__ == "__main__":
    run_script(main)
