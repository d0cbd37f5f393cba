"""Read a shard folder completely and compare it with its manifest.

    python data_prep/verify_shards.py SHARDS [--entry-points]

Exit code 0: valid. 2: errors, all of which are printed.

Owns: the command line and the output.
Leaves out: the checks (`verification.checks`).
"""

from __future__ import annotations

import argparse
import sys
import time

try:
    from pathlib import Path

    from data_prep.verification.checks import check_folder
    from data_prep.verification.tar_checks import Finding
    from vitscale.config.errors import EXIT_BAD_INPUT, UserError, run_script
    from vitscale.data.index import Manifest, read_manifest
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
        "--num-workers", type=int, help=f"processes (default: one per core, here {num_cores()})"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.num_workers is not None and arguments.num_workers < 1:
        raise UserError(
            f"{arguments.num_workers} is too small", where="--num-workers", allowed="at least 1"
        )
    if arguments.entry_points:
        require_entry_points(where="--entry-points")
    folder = Path(arguments.shards)
    manifest = read_manifest(folder)
    start = time.monotonic()
    with item_progress("verify", total=num_samples(manifest)) as advance:
        findings = check_folder(
            folder,
            manifest=manifest,
            num_workers=arguments.num_workers,
            advance=advance,
            write_entry_points=arguments.entry_points,
        )
    seconds = time.monotonic() - start
    for finding in findings:
        print(finding)
    print_summary(folder, manifest, findings, seconds=seconds)
    if findings:
        raise SystemExit(EXIT_BAD_INPUT)


def num_samples(manifest: Manifest) -> int:
    return sum(entry.num_samples for entry in manifest.splits.values())


def print_summary(
    folder: Path, manifest: Manifest, findings: list[Finding], *, seconds: float
) -> None:
    num_bytes = sum(entry.num_bytes for entry in manifest.splits.values())
    num_tars = sum(len(entry.shards) for entry in manifest.splits.values())
    result = f"{len(findings):,} findings" if findings else "valid"
    print(
        f"{folder}: {result}; {num_samples(manifest):,} samples in {num_tars:,} tars, "
        f"{num_bytes / 2**20:,.1f} MiB in {seconds:.1f} s "
        f"({num_bytes / 2**20 / max(seconds, 1e-9):,.0f} MiB/s)"
    )


if __name__ == "__main__":
    run_script(main)
