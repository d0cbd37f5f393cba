"""The command that benchmarks make shards with. Needs nothing beyond data preparation."""

from __future__ import annotations

import sys
from pathlib import Path

SHARD_MIB = 256


def make_shards_command(
    source: Path, output: Path, *options: str, shard_mib: int = SHARD_MIB
) -> list[str]:
    return [
        sys.executable,
        "data_prep/make_shards.py",
        "--config",
        "configs/data/image_folder.yaml",
        "source.holdout_fraction=0",
        f"shards.shard_mib={shard_mib}",
        f"source.path={source}",
        f"output={output}",
        *options,
    ]
