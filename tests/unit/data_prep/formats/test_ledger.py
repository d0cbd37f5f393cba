"""The ledger's counts and its limit on bad inputs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from data_prep.formats.ledger import LedgerSums, write_ledger
from vitscale.config.errors import UserError


def sums_of(folder: Path, reasons: list[str | None]) -> LedgerSums:
    columns: dict[str, list[str | None]] = {
        "path": [f"{i}" for i in range(len(reasons))],
        "reason": reasons,
        **dict.fromkeys(("split", "class", "changes", "detail", "key"), [None] * len(reasons)),
    }
    arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    return write_ledger(
        folder, [pa.table(arrays | {"blake3": pa.nulls(len(reasons), pa.binary(32))})]
    )


def test_files_of_other_names_do_not_dilute_the_limit(tmp_path: Path) -> None:
    others = ["other_name", "hidden"] * 500
    ledger = sums_of(tmp_path, ["bad_pixels"] * 2 + [None] * 8 + others)
    ledger.check_bad_fraction(0.2)
    with pytest.raises(UserError, match="2 of 10 images are bad, more than the fraction 0.19"):
        ledger.check_bad_fraction(0.19)


def test_images_left_out_by_the_settings_are_not_bad(tmp_path: Path) -> None:
    ledger = sums_of(tmp_path, ["small_class", "left_out", None])
    ledger.check_bad_fraction(0.0)
