from __future__ import annotations

import re
import tarfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageFile

from data_prep.sources.registry import open_source
from data_prep.verification.report import gather_statistics, histogram, write_report
from data_prep.verification.tar_checks import Finding
from data_prep.verification.thumbnails import rejected_thumbnail, stored_thumbnail
from tests.support.corpora.listing import list_source
from tests.support.corpora.small_shards import image_bytes, make_shard_folder
from vitscale.data.index import Manifest
from vitscale.runs.data_prep import LabelSettings, SourceSettings

EVIL = '<script>alert("1")</script>'
CLASSES = (EVIL, '"><img src=x onerror=alert(2)>', "{{ 7 * 7 }}")


class Page(HTMLParser):
    """Tags with their attributes, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def images(self) -> list[str]:
        return [attrs["src"] or "" for tag, attrs in self.tags if tag == "img"]


def page_of(
    folder: Path, manifest: Manifest, *, source: Path | None = None, num_samples: int = 60
) -> Page:
    path = folder.parent / "pages" / "report.html"
    findings = [Finding(EVIL, EVIL)] if manifest.classes == CLASSES else []
    write_report(
        path,
        folder=folder,
        manifest=manifest,
        findings=findings,
        source=source,
        num_samples=num_samples,
        seed=0,
    )
    return Page(path.read_text())


def test_page_shows_counts_classes_and_a_picture_of_every_sample(tmp_path: Path) -> None:
    manifest = make_shard_folder(tmp_path / "shards")
    page = page_of(tmp_path / "shards", manifest)
    assert "samples 7 classes 3 inputs 8 kept 7 repaired 0 rejected 1" in page.text
    assert "Valid: every byte was read" in page.text
    assert "bad_pixels · 1 · truncated, damaged" in page.text and "cat/broken.jpg" in page.text
    assert len(page.images()) == 7
    assert len(page_of(tmp_path / "shards", manifest, num_samples=3).images()) == 3


def test_page_without_labels_counts_and_shows_every_sample(tmp_path: Path) -> None:
    page = page_of(tmp_path / "shards", make_shard_folder(tmp_path / "shards", classes=()))
    assert "samples 7 classes 0 inputs 8" in page.text
    assert len(page.images()) == 7 and page.text.count("no label") == 7
    assert "label -1" not in page.text and "Images of each class" not in page.text


def test_page_loads_and_runs_nothing_whatever_names_say(tmp_path: Path) -> None:
    rejected = [(f"{EVIL}/x.jpg", EVIL, "bad_pixels"), ("a.jpg", "a", "no_such_reason")]
    manifest = make_shard_folder(tmp_path / "shards", classes=CLASSES, rejected=rejected)
    page = page_of(tmp_path / "shards", manifest)
    assert EVIL in page.text and CLASSES[2] in page.text, "shown as text"
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object"})
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert attributes.get("href") is None
        src = attributes.get("src")
        assert src is None or src.startswith("data:image/jpeg;base64,")
    assert ("meta", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in [
        (tag, attributes.get("content")) for tag, attributes in page.tags
    ]
    assert not re.search(r"url\(|@import", (tmp_path / "pages/report.html").read_text())


def test_rejected_inputs_are_shown_from_a_readable_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "cat").mkdir(parents=True)
    (source / "cat/cut.jpg").write_bytes(image_bytes("jpg", seed=1, side=(64, 64))[:-300])
    (source / "cat/bomb.png").write_bytes(image_bytes("png", seed=1))
    (source / "cat/text.jpg").write_bytes(b"<html>")
    rejected = [
        ("cat/cut.jpg", "cat", "bad_pixels"),
        ("cat/bomb.png", "cat", "too_many_pixels"),
        ("cat/text.jpg", "cat", "not_an_image"),
        ("cat/gone.jpg", "cat", "unreadable"),
        ("../outside.jpg", "cat", "unreadable"),
    ]
    (tmp_path / "outside.jpg").write_bytes(image_bytes("jpg", seed=2))
    manifest = make_shard_folder(tmp_path / "shards", rejected=rejected)
    page = page_of(tmp_path / "shards", manifest, source=source, num_samples=0)
    assert len(page.images()) == 1
    assert page.text.count("no picture") == 4
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "set for these pictures only"


def test_thumbnails_come_out_of_tars_in_tars(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(image_bytes("jpg", seed=1))
    with tarfile.open(tmp_path / "n01.tar", "w") as tar:
        tar.add(tmp_path / "a.jpg", "a.jpg")
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(tmp_path / "n01.tar", "n01.tar")
    direct = rejected_thumbnail(tmp_path, "a.jpg", reason="bad_pixels")
    assert direct is not None
    assert rejected_thumbnail(tmp_path, "n01.tar/a.jpg", reason="bad_pixels") == direct
    assert rejected_thumbnail(tmp_path, "all.tar/n01.tar/a.jpg", reason="bad_pixels") == direct
    assert rejected_thumbnail(tmp_path, "all.tar/n02.tar/a.jpg", reason="x") is None


@pytest.mark.parametrize("kind", ["class_tars", "webdataset", "path_table"])
def test_thumbnails_are_found_when_the_source_is_one_file(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(image_bytes("jpg", seed=1))
    (tmp_path / "t.csv").write_text("image,label\na.jpg,cat\n")
    for name, member in (("n01.tar", "a.jpg"), ("all.tar", "n01.tar")):
        with tarfile.open(tmp_path / name, "w") as tar:
            tar.add(tmp_path / member, member)
    name = {"class_tars": "all.tar", "webdataset": "n01.tar", "path_table": "t.csv"}[kind]
    settings = {"kind": kind, "path": str(tmp_path / name), "label": "label"}
    listed = open_source(SourceSettings.model_validate(settings), LabelSettings())
    images = [row.path for row in list_source(listed) if row.path.endswith("a.jpg")]
    direct = rejected_thumbnail(tmp_path, "a.jpg", reason="bad_pixels")
    assert [rejected_thumbnail(tmp_path / name, path, reason="x") for path in images] == [direct]
    # A ledger from elsewhere shows no files beside a tar.
    beside = rejected_thumbnail(tmp_path / "all.tar", "a.jpg", reason="x")
    assert direct is not None and beside is None


def test_thumbnails_of_samples_stay_inside_their_bounds(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(image_bytes("png", seed=1))
    assert stored_thumbnail(tmp_path / "x.tar", offset=0, num_bytes=1 << 20) is not None
    assert stored_thumbnail(tmp_path / "x.tar", offset=0, num_bytes=1 << 40) is None
    assert stored_thumbnail(tmp_path / "x.tar", offset=-1, num_bytes=10) is None
    assert stored_thumbnail(tmp_path / "y.tar", offset=0, num_bytes=10) is None


def test_a_report_of_a_broken_folder_shows_what_can_be_read(tmp_path: Path) -> None:
    manifest = make_shard_folder(tmp_path / "shards")
    for name in ("ledger.parquet", "train-000000.tar", "index.parquet"):
        (tmp_path / "shards" / name).unlink()
        page = page_of(tmp_path / "shards", manifest)
        assert "samples" in page.text
    assert page.images() == []


def test_statistics_count_every_sample_once(tmp_path: Path) -> None:
    manifest = make_shard_folder(tmp_path / "shards", lengths={"train": (40, 30), "val": (11,)})
    found = gather_statistics(tmp_path / "shards", manifest, num_samples=20, seed=3)
    # Each split starts again with class 0: 24 + 4, 23 + 4, 23 + 3.
    assert found.per_class.tolist() == [28, 27, 26]
    assert found.short_side.sum() == found.file_kib.sum() == found.formats.total() == 81
    assert len({(row["split"], row["key"]) for row in found.chosen}) == 20


@pytest.mark.parametrize("places", [[3], [3, 4, 9], range(1, 30), [0, 65535], [1, 50, 4000]])
def test_histograms_lose_nothing(places: list[int]) -> None:
    counts = np.zeros(1 << 16, np.int64)
    counts[list(places)] = 5
    shown = histogram(counts)
    assert sum(bar.value for bar in shown) == 5 * len(places)
    assert max(bar.share for bar in shown) == 1 and len(shown) <= 24
    assert histogram(np.zeros(10, np.int64)) == []
