"""Files and their bases are found and read, or refused with one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.run import PretrainRun
from tests.support.run_files import VALID, errors_of
from vitscale.config.loader import load_run_file


def test_missing_base_is_placed_at_its_line(here: Path) -> None:
    (here / "b.yaml").write_text("# card\nbase: A.yml\n")
    assert errors_of("b.yaml")[0].startswith("b.yaml:2: base: there is no file A.yml")


def test_a_file_has_at_most_16_bases_in_a_row(here: Path) -> None:
    (here / "0.yaml").write_text(VALID)
    for number in range(1, 18):
        (here / f"{number}.yaml").write_text(f"base: {number - 1}.yaml\n")
    assert load_run_file(PretrainRun, "16.yaml").seed == 0
    assert "more than 16 base files in a chain" in errors_of("17.yaml")[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: \xff\n", "b.yaml:1: x is not UTF-8 text".replace("x ", "")),
        (b"#" * ((1 << 20) + 1), "b.yaml: is larger than 1 MiB"),
        (b"- 1\n", "b.yaml:1: contains a list instead of keys and values"),
        (b"text", "b.yaml:1: contains text instead of keys and values"),
        (b"base: [a.yaml]\n", "b.yaml:1: base: ['a.yaml'] is a list"),
    ],
)
def test_unreadable_file_is_one_error(here: Path, data: bytes, message: str) -> None:
    (here / "b.yaml").write_bytes(data)
    assert errors_of("b.yaml")[0].startswith(message)


@pytest.mark.parametrize("data", [b"", b"# nothing\n", b"---\n"])
def test_empty_file_lacks_all_required_keys(here: Path, data: bytes) -> None:
    (here / "b.yaml").write_bytes(data)
    missing = [text.splitlines()[0].split(": ")[1] for text in errors_of("b.yaml")]
    assert missing == ["name", "data", "model", "optim", "schedule"]


def test_file_from_windows_is_read(here: Path) -> None:
    (here / "b.yaml").write_bytes(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode())
    assert load_run_file(PretrainRun, "b.yaml") == load_run_file(PretrainRun, "a.yaml")
