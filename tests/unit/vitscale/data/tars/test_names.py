"""Names, patterns and listings of tars; nothing of them is executed."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from vitscale.config.errors import UserError
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.urls import Location, Url
from vitscale.data.tars.names import MAX_TARS, expanded, tars_of_split

NAMES = ["train-00.tar", "train-01.tar", "train-02.tar", "val-00.tar"]


def found(folder: Location, split: str) -> list[str]:
    tars = tars_of_split(folder, split, where="data.train_split", remote_settings=RemoteSettings())
    return [str(tar).rpartition("/")[2] for tar in tars]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in [*NAMES, "train-00.txt"]:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", NAMES[:3]),
        ("train-{00..01}.tar", NAMES[:2]),
        ("{train,val}-00.tar", [NAMES[0], NAMES[3]]),
        ("train-0?.tar", NAMES[:3]),
        ("val-00.tar", NAMES[3:]),
    ],
)
def test_a_split_is_a_name_or_a_pattern(folder: Path, split: str, names: list[str]) -> None:
    assert found(folder, split) == names


def test_a_bucket_is_listed_and_a_web_server_is_not() -> None:
    bucket = fsspec.filesystem("memory")
    bucket.makedirs("/tars", exist_ok=True)
    for name in NAMES:
        bucket.pipe(f"/tars/{name}", b"")
    assert found(Url("memory://tars"), "train") == NAMES[:3]
    with pytest.raises(UserError, match="cannot list"):
        found(Url("http://127.0.0.1:9/tars"), "train")
    assert found(Url("http://127.0.0.1:9/tars"), "t-{8..10}.tar") == [
        "t-10.tar",
        "t-8.tar",
        "t-9.tar",
    ]


def test_wrong_patterns_are_one_error(folder: Path) -> None:
    for split in ("{0..{1..2}}.tar", "a{.tar", "a}.tar", "{0..999999999}.tar"):
        with pytest.raises(UserError, match=f"not a pattern of at most {MAX_TARS:,} names"):
            expanded(split, where="data.train_split")
    with pytest.raises(UserError, match="2 of 5 tars are missing, such as .*train-03.tar"):
        found(folder, "train-{00..04}.tar")
    with pytest.raises(UserError, match="no tars 'dev'"):
        found(folder, "dev")
    with pytest.raises(UserError, match="no such folder"):
        found(folder / "missing", "train")


def test_names_never_run_a_command(folder: Path) -> None:
    canary = folder / "canary"
    for split in (f"pipe:touch {canary};.tar", f"x.tar | touch {canary}", f"$(touch {canary}).tar"):
        for place in (folder, Url("http://127.0.0.1:9/a")):
            try:
                found(place, split)
            except UserError:
                continue
    assert not canary.exists()
