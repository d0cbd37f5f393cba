"""Read a shard folder completely and compare it with its manifest.

    python data_prep/verify_shards.py SHARDS [--entry-points] [--sheet FILE.png]

Exit code 0: valid. 2: errors, all of which are printed.
"""

from __future__ import annotations

import argparse
import sys

try:
    from pathlib import Path

    from data_prep.formats.index_files import local_folder
    from data_prep.verification import check_folder, draw_sheet
    from vitscale.config.errors import EXIT_BAD_INPUT, run_script
    from vitscale.data.index import read_manifest
    from vitscale.distributed.processes import num_cores
    from vitscale.images.jpeg.entry_points import require_entry_points
    from vitscale.images.sheet import writing
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vitscale prepare verify",
        description="Read a shard folder completely and compare it with its manifest.",
    )

    parser.add_argument("shards", metavar="SHARDS", help="folder with a manifest.json")
    parser.add_argument(
        "--entry-points",
        action="store_true",
        help="write entry points, to read less in training",
    )
    parser.add_argument(
        "--sheet",
        metavar="FILE.png",
        type=Path,
        help="draw samples of each class into this file",
    )
    parser.add_argument(
        "--num-workers",
        type=int,
        default=num_cores(),
        help="processes (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.entry_points:
        require_entry_points(where="--entry-points")
    if arguments.sheet:
        with writing(arguments.sheet.parent, where="--sheet"):
            pass  # before the work

    folder = local_folder(arguments.shards, where="SHARDS")
    manifest = read_manifest(folder)
    num_samples = sum(split.num_samples for split in manifest.splits.values())
    num_tars = sum(split.num_tars for split in manifest.splits.values())
    findings = check_folder(
        folder,
        manifest=manifest,
        num_workers=arguments.num_workers,
        write_entry_points=arguments.entry_points,
    )

    for finding in findings:
        print(finding)
    outcome = f"{len(findings):,} findings" if findings else "valid"
    print(f"{folder}: {outcome}; {num_samples:,} samples in {num_tars:,} tars")
    if arguments.sheet:
        with writing(arguments.sheet.parent, where="--sheet"):
            draw_sheet(arguments.sheet, folder, manifest)
        print(f"written: {arguments.sheet}")
    if findings:
        raise SystemExit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    run_script(main)
