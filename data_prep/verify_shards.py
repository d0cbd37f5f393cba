"""Read a shard folder completely and compare it with its manifest.

    python data_prep/verify_shards.py SHARDS [--entry-points] [--sheet FILE.png]

Exit code 0: valid. 2: errors, all of which are printed.
"""

from __future__ import annotations

import argparse
import sys
import time

try:
    from pathlib import Path

    from data_prep.verification import check_folder, draw_sheet
    from vitscale.config.errors import EXIT_BAD_INPUT, UserError, run_script
    from vitscale.data.index import read_manifest
    from vitscale.distributed.processes import num_cores
    from vitscale.images.jpeg.entry_points import require_entry_points
    from vitscale.tracking.console import item_progress
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Read a shard folder completely and compare it with its manifest."
    )
    parser.add_argument("shards", metavar="SHARDS", help="folder with a manifest.json")
    parser.add_argument(
        "--entry-points",
        action="store_true",
        help="write where decoding of each JPEG can start, so that training reads less of it",
    )
    parser.add_argument(
        "--sheet", metavar="FILE.png", type=Path, help="draw samples of each class into this file"
    )
    parser.add_argument(
        "--num-workers", type=int, help=f"processes (default: one per core, here {num_cores()})"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.num_workers is not None and arguments.num_workers < 1:
        what = f"{arguments.num_workers} is too small"
        raise UserError(what, where="--num-workers", allowed="at least 1")
    if arguments.entry_points:
        require_entry_points(where="--entry-points")
    folder, start = Path(arguments.shards), time.monotonic()
    manifest = read_manifest(folder)
    splits = manifest.splits.values()
    num_samples = sum(split.num_samples for split in splits)
    num_bytes = sum(split.num_bytes for split in splits)
    with item_progress("verify", total=num_samples) as advance:
        findings = check_folder(
            folder,
            manifest=manifest,
            num_workers=arguments.num_workers,
            advance=advance,
            write_entry_points=arguments.entry_points,
        )
    print("".join(f"{finding}\n" for finding in findings), end="")
    seconds = max(time.monotonic() - start, 1e-9)
    print(
        f"{folder}: {f'{len(findings):,} findings' if findings else 'valid'}; "
        f"{num_samples:,} samples in {sum(len(split.shards) for split in splits):,} tars, "
        f"{num_bytes / 2**20:,.1f} MiB in {seconds:.1f} s "
        f"({num_bytes / 2**20 / seconds:,.0f} MiB/s)"
    )
    if arguments.sheet:
        draw_sheet(arguments.sheet, folder, manifest)
        print(f"written: {arguments.sheet}")
    if findings:
        raise SystemExit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    run_script(main)
