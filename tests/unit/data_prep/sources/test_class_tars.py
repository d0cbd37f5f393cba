from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sources.class_tars import ClassTars
from data_prep.sources.protocol import Input
from tests.support.corpora.listing import list_source
from tests.support.corpora.tars import tar_bytes, write_tars
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceSettings


def source(root: Path, **splits: str) -> ClassTars:
    return ClassTars(SourceSettings(kind="class_tars", path=str(root), splits=splits))


def fates(root: Path) -> dict[str, str | None]:
    rows = list_source(source(root))
    assert len({row.path for row in rows}) == len(rows)
    return {row.path: row.reason for row in rows}


def content(listed: ClassTars, row: Input) -> bytes:
    return (listed.root / row.file).read_bytes()[row.offset :][: row.num_bytes]


def test_the_name_of_a_tar_is_the_class_of_its_members(tmp_path: Path) -> None:
    write_tars(
        tmp_path,
        {
            "n02.tar": {"n02_1.JPEG": b"two one"},
            "n01.tar": {"./n01/n01_1.JPEG": b"one one", "n01/n01_2.x.jpg": b""},
        },
    )
    listed = source(tmp_path)
    assert [box.class_name for box in listed.containers()] == ["n01", "n02"]
    rows = list_source(listed)
    assert [(row.path, row.class_name, row.name, content(listed, row)) for row in rows] == [
        ("n01.tar/./n01/n01_1.JPEG", "n01", "n01/n01_1", b"one one"),
        ("n01.tar/n01/n01_2.x.jpg", "n01", "n01/n01_2.x", b""),
        ("n02.tar/n02_1.JPEG", "n02", "n02_1", b"two one"),
    ]
    assert all(row.reason is None and row.split == "train" for row in rows)
    assert rows[2].modified_ns == (tmp_path / "n02.tar").stat().st_mtime_ns


def test_a_tar_of_tars_is_read_in_place(tmp_path: Path) -> None:
    inner = tar_bytes({"1.jpg": b"first", "2.jpg": b"second"})
    write_tars(
        tmp_path,
        {
            "all.tar": {
                "whole/n01.tar": inner,
                "whole/README": b"?",
                "whole/loose.jpg": b"!",
                "whole/n02.tar": tar_bytes({"1.jpg": b"other"}),
                "./whole/n02.tar": b"again",
                ".hidden.tar": inner,
            }
        },
    )
    listed = source(tmp_path / "all.tar")
    assert listed.root == tmp_path
    rows = {row.path: row for row in list_source(listed)}
    assert {path: row.reason for path, row in rows.items() if "(" not in path} == {
        "all.tar/whole/README": "other_name",
        "all.tar/whole/loose.jpg": "no_class",
        "all.tar/.hidden.tar": "hidden",
        "all.tar/whole/n01.tar/1.jpg": None,
        "all.tar/whole/n01.tar/2.jpg": None,
        "all.tar/whole/n02.tar/1.jpg": None,
    }
    assert [row.reason for path, row in rows.items() if "(" in path] == ["duplicate_name"]
    second = rows["all.tar/whole/n01.tar/2.jpg"]
    assert (second.class_name, second.file, content(listed, second)) == (
        "n01",
        "all.tar",
        b"second",
    )
    assert content(listed, rows["all.tar/whole/n02.tar/1.jpg"]) == b"other"


def test_names_and_types_determine_the_reason(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        kinds = {"fol": tarfile.DIRTYPE, "sym.jpg": tarfile.SYMTYPE, "hard.jpg": tarfile.LNKTYPE}
        for name, kind in {
            **kinds,
            "dev.jpg": tarfile.CHRTYPE,
            "pipe.jpg": tarfile.FIFOTYPE,
        }.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("/abs.jpg", "../../up.jpg", "notes.txt", ".h/1.jpg", "ok.webp"):
            tar.addfile(tarfile.TarInfo(name))
    (tmp_path / "cat.tar").write_bytes(buffer.getvalue())
    assert fates(tmp_path) == {
        "cat.tar/sym.jpg": "not_a_file",
        "cat.tar/hard.jpg": "not_a_file",
        "cat.tar/dev.jpg": "not_a_file",
        "cat.tar/pipe.jpg": "not_a_file",
        "cat.tar//abs.jpg": None,
        "cat.tar/../../up.jpg": None,
        "cat.tar/notes.txt": "other_name",
        "cat.tar/.h/1.jpg": "hidden",
        "cat.tar/ok.webp": None,
    }


@pytest.mark.parametrize("cut", [0, 100, 1024, 1600, 2048])
def test_damaged_tars_have_a_row_and_keep_whole_members(cut: int, tmp_path: Path) -> None:
    whole = tar_bytes({"1.jpg": b"a" * 400, "2.jpg": b"b" * 400})
    (tmp_path / "cat.tar").write_bytes(whole[:cut])
    (row,) = [row for row in list_source(source(tmp_path)) if row.reason == "truncated_tar"]
    assert (row.path, row.class_name) == ("cat.tar", "cat")
    assert len(fates(tmp_path)) == 1 + (cut >= 912) + (cut >= 1936)


def test_compressed_tars_are_refused(tmp_path: Path) -> None:
    write_tars(tmp_path, {"a/cat.tar": {"1.jpg": b""}})
    packed = gzip.compress(tar_bytes({"1.jpg": b""}))
    (tmp_path / "a/dog.tar.gz").write_bytes(packed)
    with pytest.raises(UserError, match="'dog.tar.gz' is compressed with gz"):
        source(tmp_path / "a").containers()
    (tmp_path / "a/dog.tar.gz").rename(tmp_path / "a/dog.tar")
    with pytest.raises(UserError, match="'dog.tar' is compressed with gzip"):
        list_source(source(tmp_path / "a"))
    (tmp_path / "all.tar").write_bytes(packed)
    with pytest.raises(UserError, match="'all.tar' is compressed with gzip"):
        source(tmp_path / "all.tar").containers()


@pytest.mark.parametrize(
    "splits, message",
    [
        ({"train": "a", "test": "gone.tar"}, "source.splits.test.*no such file or folder"),
        ({"train": "a", "test": "text"}, "source.splits.test.*cannot be read as a tar file"),
        ({"train": "a", "test": "cat2.tar"}, "source.splits.test.*contains no tar files"),
        ({}, "'a' does: name it in source.splits"),
    ],
)
def test_sources_without_class_tars_are_refused(
    splits: dict[str, str], message: str, tmp_path: Path
) -> None:
    write_tars(tmp_path, {"a/cat.tar": {"1.jpg": b""}})
    if splits:
        write_tars(tmp_path, {"cat2.tar": {"1.jpg": b""}})
    (tmp_path / "text").write_text("text" * 300)
    with pytest.raises(UserError, match=f"(?s){message}"):
        source(tmp_path, **splits).containers()


NAMES = st.lists(
    st.sampled_from(["..", ".", "", "a.b", "\n", "ü", "\udcff", "x" * 300, "dup", " "]),
    min_size=1,
    max_size=4,
).map(lambda parts: "/".join(parts))


@settings(max_examples=80, deadline=None)
@given(names=st.lists(NAMES, max_size=6))
def test_any_member_names_give_one_row_each_of_unique_path(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    root = tmp_path_factory.mktemp("tars")
    write_tars(root, {"cat.tar": [(f"{name}.jpg", b"%d" % i) for i, name in enumerate(names)]})
    rows = list_source(source(root))
    assert [content(source(root), row) for row in rows] == [b"%d" % i for i in range(len(names))]
    assert len({row.path for row in rows}) == len(rows)
    kept = [row.name for row in rows if row.reason is None]
    assert len(set(kept)) == len(kept)
    assert all(os.fsencode(row.path) for row in rows)


def test_ignored_classes_still_tell_images_apart(tmp_path: Path) -> None:
    write_tars(tmp_path, {"a.tar": {"1.jpg": b"one"}, "b.tar": {"1.jpg": b"two"}})
    rows = list_source(ClassTars(source(tmp_path).settings, LabelSettings(values="none")))
    assert [row.name for row in rows] == ["a/1", "b/1"]
