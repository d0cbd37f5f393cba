"""Turn a folder of images into shuffled WebDataset tars with an index and a ledger.

    python data_prep/make_shards.py --config configs/data/image_folder.yaml \
        source.path=IMAGES output=SHARDS

Owns: the order of the steps and what is printed. Formats: docs/data_format.md.
"""

from __future__ import annotations

import os
import sys
import time

try:
    from pathlib import Path

    from data_prep.image_check import check_images
    from data_prep.image_folder import class_names, scan_image_folder
    from data_prep.input_ledger import (
        LedgerRow,
        check_bad_fraction,
        describe_rejected,
        make_ledger,
        source_fingerprint,
    )
    from data_prep.packing import arrange, content_config, write_shard_folder
    from data_prep.progress_line import progress
    from vitscale.config.command_line import load_command
    from vitscale.data.index import Manifest, read_manifest
    from vitscale.errors import UserError, run_script
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"vitscale is not installed ({error}). Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    command = load_command(
        DataPrepRun,
        script="data_prep/make_shards.py",
        description="Turn a folder of images into shuffled WebDataset tars with index and ledger.",
    )
    run = command.run
    start = time.monotonic()
    output = Path(run.output).expanduser()
    root = Path(run.source.path).expanduser()
    existing = find_existing(output, run)
    if output.resolve().is_relative_to(root.resolve()):
        raise UserError(
            "lies inside source.path", where="output", next_step="choose another folder"
        )

    files = scan_image_folder(run.source)
    print(
        f"{run.source.path}: {len(files):,} files, {len(class_names(files)):,} classes", flush=True
    )

    candidates = [file for file in files if file.reason is None]
    with progress("check images", total=len(candidates)) as advance:
        facts = check_images(
            [os.path.join(root, file.path) for file in candidates],
            max_pixels=run.images.max_pixels,
            advance=advance,
        )
    facts_of = {file.path: fact for file, fact in zip(candidates, facts, strict=True)}
    rows = make_ledger(files, facts_of=facts_of)
    check_bad_fraction(rows, max_bad_fraction=run.images.max_bad_fraction)

    if existing is not None:
        check_same_source(existing, output, source_fingerprint(rows))
        print(f"{output}: already there, made from the same images with the same settings")
        return

    splits = arrange(rows, run=run)
    with progress("write shards", total=sum(map(len, splits.values()))) as advance:
        manifest = write_shard_folder(output, run=run, rows=rows, splits=splits, advance=advance)
    print_summary(output, manifest, rows, seconds=time.monotonic() - start)


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
    old, new = manifest.config, content_config(run)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if changed:
        raise UserError(
            f"{str(output)!r} exists already, made with other settings: {', '.join(changed)}",
            where="output",
            next_step=advice,
        )
    return manifest


def check_same_source(existing: Manifest, output: Path, fingerprint: str) -> None:
    if existing.source_fingerprint != fingerprint:
        raise UserError(
            f"{str(output)!r} exists already, made from other images",
            where="output",
            next_step="choose another output, or remove this folder first",
        )


def print_summary(
    output: Path, manifest: Manifest, rows: tuple[LedgerRow, ...], *, seconds: float
) -> None:
    kept = sum(entry.num_samples for entry in manifest.splits.values())
    print(f"\n{output}: {len(rows):,} inputs = {kept:,} kept + {len(rows) - kept:,} rejected")
    if kept < len(rows):
        print(describe_rejected(rows))
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
