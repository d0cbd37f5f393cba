"""Turn a raw corpus into shuffled WebDataset tars with an index and a ledger.

    python data_prep/make_shards.py --config configs/data/image_folder.yaml \
        source.path=IMAGES output=SHARDS

Run again after an interruption, the command resumes. Several commands at a time, on machines that
share the output's folder, divide the work. Formats: docs/data_format.md.
"""

from __future__ import annotations

import sys
import time

try:
    from pathlib import Path

    from data_prep.formats.index_files import training_command
    from data_prep.formats.ledger import describe_inputs
    from data_prep.steps import finish, list_inputs, plan_shards, write_shard
    from data_prep.steps.settings import make_output
    from data_prep.steps.work import Step
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import UserError, run_script
    from vitscale.data.index import Manifest
    from vitscale.distributed.processes import num_gpus
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

STEPS = (
    Step(
        title="open source",
        units=list_inputs.containers_units,
        do=list_inputs.list_containers,
    ),
    Step(
        title="list inputs",
        units=list_inputs.list_units,
        do=list_inputs.list_inputs,
        sizes=list_inputs.list_sizes,
        counted="folders or files",
    ),
    Step(
        title="plan shards",
        units=plan_shards.plan_units,
        do=plan_shards.plan_shards,
    ),
    Step(
        title="write shards",
        units=write_shard.shard_units,
        do=write_shard.write_shard,
        sizes=write_shard.shard_sizes,
        counted="images",
        num_bad=write_shard.num_bad,
        check_bad=write_shard.check_bad,
    ),
    Step(
        title="finish",
        units=finish.finish_units,
        do=finish.finish_shards,
    ),
)


def main() -> None:
    command = load_command(
        DataPrepRun,
        script="data_prep/make_shards.py",
        description="Turn a raw corpus into shuffled WebDataset tars with index and ledger.",
    )
    run, start = command.run, time.monotonic()
    output = Path(run.output).expanduser()
    if output.resolve().is_relative_to(Path(run.source.path).expanduser().resolve()):
        raise UserError("is inside source.path", where="output", next_step="choose another folder")
    output, manifest, was_there = make_output(run, STEPS)
    if was_there:
        print(f"{output}: already there, made with the same settings")
    else:
        print_summary(output, manifest, seconds=time.monotonic() - start)


def print_summary(output: Path, manifest: Manifest, *, seconds: float) -> None:
    print(f"\n{output}: {describe_inputs(manifest.inputs)}")
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
