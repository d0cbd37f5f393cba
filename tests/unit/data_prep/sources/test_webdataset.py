from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sources.webdataset import WebDataset, split_member_name
from tests.support.corpora.listing import list_source
from tests.support.corpora.tars import Members, tar_bytes, write_tars
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceSettings


def source(root: Path, *, label: str = "label", **splits: str) -> WebDataset:
    return WebDataset(SourceSettings(kind="webdataset", path=str(root), label=label, splits=splits))


def fates(root: Path, members: Members, *, label: str = "cls") -> dict[str, str | None]:
    """Path inside the tar -> class or, in brackets, reason."""
    write_tars(root, {"a.tar": members})
    rows = list_source(source(root / "a.tar", label=label))
    assert len({row.path for row in rows}) == len(rows)
    return {
        row.path.removeprefix("a.tar/"): f"<{row.reason}>" if row.reason else row.class_name
        for row in rows
    }


def test_a_sample_is_one_input_with_its_label(tmp_path: Path) -> None:
    members = {"d/1.jpg": b"one", "d/1.cls": b" 7\n", "d/1.json": b"{}", "2.cls": b"cat"}
    members |= {"2.PNG": b"two", "2.txt": b"caption"}
    write_tars(tmp_path, {"t/1.tar": members})
    listed = source(tmp_path, train="t")
    rows = list_source(listed)
    assert [(row.path, row.name, row.class_name, row.reason) for row in rows] == [
        ("t/1.tar/d/1.jpg", "d/1", "7", None),
        ("t/1.tar/2.PNG", "2", "cat", None),
    ]
    data = (tmp_path / "t/1.tar").read_bytes()
    assert [data[row.offset :][: row.num_bytes] for row in rows] == [b"one", b"two"]
    assert {row.file for row in rows} == {"t/1.tar"} and rows[0].modified_ns > 0


def test_negative_numbers_mean_no_label_without_a_space(tmp_path: Path) -> None:
    members = {"1.jpg": b"one", "1.cls": b"-1\n", "2.jpg": b"two", "2.cls": b"2"}
    assert fates(tmp_path, members) == {"1.jpg": "<no_label>", "2.jpg": "2"}
    labels = LabelSettings(space="imagenet_12k", values="index")
    rows = list_source(WebDataset(source(tmp_path).settings, labels))
    assert [(row.class_name, row.reason) for row in rows] == [("-1", None), ("2", None)]


@pytest.mark.parametrize(
    "content, class_name",
    [
        ({"label": 5}, "5"),
        ({"label": -1}, "<no_label>"),
        ({"label": "n01440764"}, "n01440764"),
        ({"label": 1.5}, "<no_label>"),
        ({"label": "\ud800"}, "<no_label>"),
        ({"label": "x" * 5000}, "<no_label>"),
        ([5], "<no_label>"),
    ],
)
def test_json_labels_are_strings_or_integers(
    content: object, class_name: str, tmp_path: Path
) -> None:
    members = {"1.json": json.dumps(content).encode(), "1.jpg": b""}
    assert fates(tmp_path, members, label="json:label") == {"1.jpg": class_name}


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"\xff", b'{"label": 1}' + b" " * (2 << 20)])
@pytest.mark.parametrize("label", ["cls", "json:label"])
def test_unreadable_labels_are_missing_labels(raw: bytes, label: str, tmp_path: Path) -> None:
    members = {"1.jpg": b"", f"1.{label[:4].rstrip(':')}": raw}
    assert fates(tmp_path, members, label=label) == {"1.jpg": "<no_label>"}


def test_incomplete_samples_have_rows(tmp_path: Path) -> None:
    members = {
        "1.cls": b"1",
        "1.txt": b"",
        "2.jpg": b"",
        "2.txt": b"",
        "3.seg.png": b"",
        "3.cls": b"1",
    }
    assert fates(tmp_path, members) == {
        "1.cls": "<no_image>",
        "2.jpg": "<no_label>",
        "3.seg.png": "<no_image>",
    }


def test_repeated_keys_have_rows_with_their_offset(tmp_path: Path) -> None:
    members = [("1.jpg", b""), ("1.cls", b"1"), ("2.jpg", b"2"), ("1.jpg", b""), ("1.cls", b"2")]
    members += [("3.cls", b"3"), ("2.cls", b"1"), ("4.jpg", b""), ("4.jpg", b""), ("4.cls", b"4")]
    assert fates(tmp_path, members + [("4.png", b"")]) == {
        "1.jpg": "1",
        "2.jpg": "<no_label>",
        "1.jpg (byte 3072)": "<duplicate_key>",
        "3.cls": "<no_image>",
        "2.cls (byte 5632)": "<duplicate_key>",
        "4.jpg": "4",
        "4.jpg (byte 7168)": "<duplicate_key>",
        "4.png (byte 8704)": "<duplicate_key>",
    }


def test_members_outside_samples_have_rows(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        link = tarfile.TarInfo("1.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for name in ("1.jpg", "README", "README", ".git/x.jpg", "__info__", "1.cls"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))
    (tmp_path / "a.tar").write_bytes(buffer.getvalue())
    rows = list_source(source(tmp_path))
    assert {row.path: row.reason for row in rows} == {
        "a.tar/1.jpg (byte 512)": "not_a_file",
        "a.tar/1.jpg": None,
        "a.tar/README (byte 2048)": "other_name",
        "a.tar/README (byte 3072)": "other_name",
        "a.tar/.git/x.jpg (byte 4096)": "hidden",
        "a.tar/__info__ (byte 5120)": "other_name",
    }


def test_truncated_tars_have_a_row_and_keep_whole_samples(tmp_path: Path) -> None:
    members = {"1.jpg": b"a", "1.cls": b"1", "2.jpg": b"b", "2.cls": b"2"}
    whole = tar_bytes(members)
    for cut in [*range(0, 4096 + 1024, 37), 1024, 2048, 3072, 4096]:
        (tmp_path / "a.tar").write_bytes(whole[:cut])
        rows = list_source(source(tmp_path / "a.tar"))
        kept = [row.class_name for row in rows if row.reason is None]
        assert kept == ["1", "2"][: (cut >= 1537) + (cut >= 3585)]
        assert [row.reason for row in rows if row.path == "a.tar"] == ["truncated_tar"]


@pytest.mark.parametrize("label", ["json:", "txt"])
def test_invalid_label_settings_are_refused(label: str, tmp_path: Path) -> None:
    write_tars(tmp_path, {"a.tar": {}})
    with pytest.raises(UserError, match="source.label"):
        source(tmp_path, label=label).containers()


PARTS = st.sampled_from(["a", "b", ".", "..", "ü", "x.y", "", "__", "\udcff", " "])


@settings(max_examples=200, deadline=None)
@given(name=st.lists(PARTS, min_size=1, max_size=4).map("/".join), suffix=PARTS)
def test_keys_equal_those_of_webdataset(name: str, suffix: str) -> None:
    from webdataset.tariterators import base_plus_ext

    text = f"{name}.{suffix}"
    prefix, ending = base_plus_ext(text)
    expected = None if prefix is None else (prefix, ending.lower())
    if text.startswith("__") and text.endswith("__") and "/" not in text:
        expected = None
    if text.rpartition("/")[2].startswith("."):
        expected = None  # hidden here; the package may differ
    assert split_member_name(text) == expected


def test_ignored_classes_need_no_label(tmp_path: Path) -> None:
    write_tars(tmp_path, {"a.tar": {"1.jpg": b"one", "2.jpg": b"two", "2.cls": b"-1"}})
    rows = list_source(WebDataset(source(tmp_path).settings, LabelSettings(values="none")))
    assert {row.name: row.reason for row in rows} == {"1": None, "2": None}
