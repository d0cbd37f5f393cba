"""The ledger's counts and its limit on bad inputs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from data_prep.formats.ledger import LedgerWriter
from vitscale.config.errors import UserError


def write_ledger(folder: Path, reasons: list[str | None]) -> LedgerWriter:
    num = len(reasons)
    columns = {
        "path": [f"{i}" for i in range(num)],
        "split": ["train"] * num,
        "class": ["cat"] * num,
        "reason": reasons,
        "changes": [None] * num,
        "detail": [None] * num,
        "key": [None if reason else f"train-{i}" for i, reason in enumerate(reasons)],
        "blake3": [None if reason else bytes(32) for reason in reasons],
    }
    with LedgerWriter(folder) as ledger:
        types = {"blake3": pa.binary(32)}
        ledger.add(
            pa.table({k: pa.array(v, types.get(k, pa.string())) for k, v in columns.items()})
        )
    return ledger


def test_files_of_other_names_do_not_dilute_the_limit(tmp_path: Path) -> None:
    others = ["other_name", "hidden"] * 500
    ledger = write_ledger(tmp_path, ["bad_pixels"] * 2 + [None] * 8 + others)
    ledger.check_bad_fraction(0.2)
    with pytest.raises(UserError, match="2 of 10 images are bad, more than the fraction 0.19"):
        ledger.check_bad_fraction(0.19)


def test_images_left_out_by_the_settings_are_not_bad(tmp_path: Path) -> None:
    ledger = write_ledger(tmp_path, ["small_class", "left_out", None])
    ledger.check_bad_fraction(0.0)
