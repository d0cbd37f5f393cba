"""The five kinds of source: their inputs, the reasons of rejected ones, and refused sources."""

import csv
import errno
import gzip
import io
import json
import os
import random
import tarfile
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.formats.ledger import REASONS
from data_prep.sources.protocol import Container, Input, Source, with_damage
from data_prep.sources.tars import split_member_name
from tests.support.corpora.external_tars import tar_bytes, write_tars
from tests.support.corpora.sources import listed, opened, touch, written
from tests.support.tables import every, refused, rows, words
from vitscale.config.errors import StorageError

UNLABELLED = {"values": "none"}


def inputs(kind, path, *args, **options) -> list[Input]:
    """List the inputs; every reason must be one that the ledger knows."""
    rows = listed(opened(kind, path, *args, **options))
    assert {row.reason for row in rows} <= {None, *REASONS}
    return rows


def fates(kind, path, *args, **options):
    """Map each path to its reason; a path is there once."""
    rows = inputs(kind, path, *args, **options)
    assert len({row.path for row in rows}) == len(rows)
    return {row.path: row.reason for row in rows}


def facts(rows: list[Input], names):
    """Of each input the attributes with these names."""
    return [[getattr(row, name) for name in names.split()] for row in rows]


def content(source: Source, row: Input):
    """The bytes of an image, by file, offset and length, as `check_input` reads them."""
    file = source.root / (row.file or row.path)
    end = row.offset + row.num_bytes
    return file.read_bytes()[row.offset : end]


def table(columns, **options):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, **options)
    return file.getvalue()


IMAGE = tar_bytes({"1.jpg": b""})
PACKED = gzip.compress(IMAGE)
COLUMNS = {"image": pa.array([b"x"]), "label": ["a"], "other": [1]}
ROW = table(COLUMNS)

# By the names of files, else by their suffixes. Tars and tables that can be read; packed tars
# by the first bytes of each format; a text; tars of tars; and tables with an open quote.
CONTENTS = {
    "jpg": b"",
    "txt": b"",
    "csv": b"",
    "tar": IMAGE,
    "parquet": ROW,
    "gz": PACKED,
    "gzip.tar": PACKED,
    "bzip.tar": b"BZh" + IMAGE,
    "xz.tar": b"\xfd7zXZ" + IMAGE,
    "zstd.tar": b"\x28\xb5\x2f\xfd" + IMAGE,
    "lz4.tar": b"\x04\x22\x4d\x18" + IMAGE,
    "text.tar": b"text" * 300,
    "outer.tar": tar_bytes({"train/c.tar": IMAGE, "test/d.tar": IMAGE}),
    "quote.tsv": b'image\tx\tlabel\n1\ty\ta\n2\t"y\tb\n3\ty" z\tc\n',
    "quote.csv": b'image,label,x\n1,a,y\n2,"b,y\n3,c,y\n4,d",y\n',
}


# Files below the source, its settings, and the message: of folders, of tars, of columns, of tables.
@rows(r"""
- [kind, files, path, options, message]
- [image_folder, a/c/1.jpg, "", {splits: {test: b}}, "test.*no such folder"]
- [image_folder, a/c/1.jpg, a, {splits: {test: ../a}}, "test.*is outside"]
- [image_folder, a/c/1.jpg, "", {splits: {x: a, y: a/c}}, share files]
- [image_folder, 1.jpg, "", {}, "no class folders, and 1 image.*source.val_labels"]
- - image_folder
  - a/train/1.jpg a/test/2.jpg b/1.jpg
  - ""
  - {}
  - "'a' has sub-folders.*source.splits={train: .}"
- - image_folder
  - a/x/Training/c/1.jpg a/x/Valid/c/2.jpg b/1.jpg
  - ""
  - {}
  - "'a/x' has sub-folders that are named like splits"
- [class_tars, d.tar.gz a.tar, "", {}, "d.tar.gz' is compressed"]
- [class_tars, gzip.tar, "", {}, "gzip.tar' is compressed"]
- [class_tars, gzip.tar, gzip.tar, {}, "gzip.tar' is compressed"]
- [webdataset, bzip.tar, "", {}, "bzip.tar' is compressed"]
- [webdataset, xz.tar, "", {}, "xz.tar' is compressed"]
- [webdataset, zstd.tar, "", {}, "zstd.tar' is compressed"]
- [webdataset, lz4.tar, "", {}, "lz4.tar' is compressed"]
- [class_tars, text.tar, text.tar, {}, cannot be read as a tar file]
- [class_tars, a.tar, a.tar, {}, contains no tar files]
- [class_tars, outer.tar, outer.tar, {}, tars in several folders]
- [class_tars, a/b.txt, "", {}, ": no tar files"]
- [class_tars, a/c.tar, "", {}, "in sub-folders, such as 'a/c.tar'"]
- [webdataset, 1.tar a/b/2.tar, "", {}, "such as 'a/b/2.tar'"]
- [webdataset, x/1.tar x/a/2.tar, "", {splits: {val: x}}, splits.val]
- [parquet, a.parquet a/b.parquet, "", {}, "such as 'a/b.parquet'"]
- [webdataset, a.tar, "", {label: "json:"}, "source.label.*json:FIELD"]
- [webdataset, a.tar, "", {label: txt}, "source.label.*json:FIELD"]
- [parquet, a.parquet, "", {image_column: gone}, "image_column.*no column 'gone'"]
- [parquet, a.parquet, "", {label: gone}, "source.label.*no column 'gone'"]
- [parquet, a.parquet, "", {image_column: other}, contains no bytes]
- [parquet, a.parquet, "", {label: image}, source.label.*has type binary]
- [path_table, quote.tsv, quote.tsv, {}, "quote.tsv.*line 3: a quote"]
- [path_table, quote.csv, quote.csv, {}, "quote.csv.*line 3: a quote"]
- [path_table, t.csv, t.csv, {}, "cannot be read: Empty CSV file"]
- [path_table, t.csv, "", {}, is not a table]
- [path_table, a.txt, a.txt, {}, ": no tables"]
- [path_table, t.csv, gone, {}, "source.path: .*no such"]
""")
def test_unusable_sources_are_refused_in_one_message(
    kind, files, path, options, message, tmp_path
):
    for name in files.split():
        suffix = name.rpartition(".")[2]
        content_of_suffix = CONTENTS.get(suffix, b"")
        written(tmp_path / name, CONTENTS.get(name, content_of_suffix))
    with refused(f"(?s){message}"):
        inputs(kind, tmp_path / path, **options)


def test_splits_may_share_a_folder_by_patterns(tmp_path):
    names = [f"d/x-train-{number:04}.tar" for number in range(3)]
    names.append("d/x-val-0000.tar")
    write_tars(tmp_path, {name: {} for name in names})

    def files(**splits):
        boxes = opened("webdataset", tmp_path, splits=splits).containers()
        return [(box.split, box.path) for box in boxes]

    found = files(train="d/x-train-{0000..0002}.tar", test="d/x-val-*.tar")
    splits_of_names = ("train", "train", "train", "test")
    assert found == list(zip(splits_of_names, names, strict=True))

    # A missing number, files of two splits, no files, no pattern, no folder, a whole folder.
    for splits, message in yaml.safe_load("""
    - [{train: "d/x-train-{0000..0003}.tar"}, "has no 'x-train-0003.tar'"]
    - [{train: d/x-train-*.tar, test: d/x-*.tar}, two splits share files]
    - [{train: d/x-train-*.tar, test: d/y-*.tar}, "splits.test.*y-.*: no .tar files"]
    - [{train: "d/{a}{.tar"}, source.splits.train.*not a pattern]
    - [{train: e/x-*.tar}, source.splits.train.*no such]
    - [{train: d, test: d/x-val-0000.tar}, two splits share files]
    """):
        with refused(message):
            files(**splits)


def test_class_folders_are_sorted_by_bytes(tmp_path):
    classes = ["dog", "cat", "Eel", "é", "cat-2"]
    touch(tmp_path, *(f"{name}/1.jpg" for name in classes), "cat/sub/2.jpg")
    source = opened("image_folder", tmp_path)
    boxes = source.containers()

    # By bytes: capitals first and accents last, whatever the locale says. None: loose images.
    expected = [None, "Eel", "cat", "cat-2", "dog", "é"]
    assert [box.class_name for box in boxes] == expected
    names = {(row.class_name, row.name) for row in source.inputs(boxes[2])}
    assert names == {("cat", "1"), ("cat", "sub/2")}

    # Removed since the folders were listed.
    gone = Container("gone", "train", "gone")
    with refused("'gone': changed while"):
        list(source.inputs(gone))


def test_links_to_files_and_linked_classes_are_followed(tmp_path):
    root = tmp_path / "source"
    touch(root, "cat/1.jpg", "cat/sub/2.jpg")
    touch(tmp_path, "beside/3.jpg")

    # To a file beside, to nothing, to folders above and below, outside, and to itself.
    links = yaml.safe_load("""
    cat/same.jpg: 1.jpg
    cat/gone.jpg: nothing.jpg
    cat/up: ..
    cat/sub/self: .
    cat/out.jpg: ../../beside/3.jpg
    cat/ring: ring
    kitten: cat/sub
    dog/cats: ../cat
    loose: loose
    """)
    for link, target in links.items():
        path = root / link
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(target)

    # A folder inside a class is not followed: its images could come twice, or without end.
    expected = yaml.safe_load("""
    cat/1.jpg: null
    cat/sub/2.jpg: null
    cat/same.jpg: null
    cat/gone.jpg: link_broken
    cat/up: linked_folder
    cat/sub/self: linked_folder
    cat/out.jpg: null
    cat/ring: link_broken
    kitten/2.jpg: null
    kitten/self: linked_folder
    dog/cats: linked_folder
    loose: link_broken
    """)
    assert fates("image_folder", root) == expected


def test_without_classes_every_image_below_is_listed(tmp_path):
    # Hidden folders, thumbnails of a file server, and deleted files.
    touch(tmp_path, "1.jpg", "a/1.jpg", "a/b/2.png", "a/notes.txt", ".h/3.jpg")
    touch(tmp_path, "a/@eaDir/1.jpg/x.jpg", "$RECYCLE.BIN/4.jpg")
    rows = inputs("image_folder", tmp_path, UNLABELLED)
    assert sorted(facts(rows, "path class_name name reason")) == yaml.safe_load("""
    - [$RECYCLE.BIN/4.jpg, "", $RECYCLE.BIN/4, hidden]
    - [.h/3.jpg, "", .h/3, hidden]
    - [1.jpg, "", "1", null]
    - [a/1.jpg, "", a/1, null]
    - [a/@eaDir/1.jpg/x.jpg, "", a/@eaDir/1.jpg/x, hidden]
    - [a/b/2.png, "", a/b/2, null]
    - [a/notes.txt, "", a/notes, other_name]
    """)


# As the list of ImageNet on Kaggle: the class, then a box; several boxes are of one class.
KAGGLE = "ImageId,PredictionString\nv_2,dog 85 1 499 272\nv_1,cat 1 1 4 4 dog 1 2 3 4\n"


@every(text=[KAGGLE, "v_1.JPEG cat\nval/v_2.JPEG dog\n", "cat\ndog\n"])
def test_a_list_names_the_classes_of_loose_images(text, tmp_path):
    root = tmp_path / "in"
    touch(root, "train/cat/1.jpg", "train/dog/1.jpg", "train/loose.jpg")
    touch(root / "val", "v_2.JPEG", "v_1.JPEG", ".v_0.JPEG", "note.txt")
    listing = tmp_path / "list"
    listing.write_text(text)
    rows = inputs("image_folder", root, val_labels=str(listing))
    assert sorted(facts(rows, "path class_name reason")) == yaml.safe_load("""
    - [train/cat/1.jpg, cat, null]
    - [train/dog/1.jpg, dog, null]
    - [train/loose.jpg, null, no_class]
    - [val/.v_0.JPEG, null, hidden]
    - [val/note.txt, null, other_name]
    - [val/v_1.JPEG, cat, null]
    - [val/v_2.JPEG, dog, null]
    """)


def test_the_name_of_a_tar_is_the_class_of_its_members(tmp_path):
    tars = {
        "n02.tar": {"n02_1.JPEG": b"two one"},
        "n01.tar": {"./n01/n01_1.JPEG": b"one one", "n01/n01_2.x.jpg": b""},
    }
    write_tars(tmp_path, tars)
    source = opened("class_tars", tmp_path)
    rows = listed(source)
    assert facts(rows, "path class_name name split reason") == yaml.safe_load("""
    - [n01.tar/./n01/n01_1.JPEG, n01, n01/n01_1, train, null]
    - [n01.tar/n01/n01_2.x.jpg, n01, n01/n01_2.x, train, null]
    - [n02.tar/n02_1.JPEG, n02, n02_1, train, null]
    """)
    images = [content(source, row) for row in rows]
    assert images == [b"one one", b"", b"two one"]

    # A member has no time of its own: a changed tar changes all of them.
    status = (tmp_path / "n02.tar").stat()
    assert rows[2].modified_ns == status.st_mtime_ns

    # Removed since the tars were listed.
    box = Container("gone.tar", "train")
    with refused("'gone.tar': changed while"):
        list(with_damage(box, source.inputs(box)))

    # Without classes the tar is part of the name, so that names stay unique.
    names = [row.name for row in inputs("class_tars", tmp_path, UNLABELLED)]
    assert names == ["n01/n01/n01_1", "n01/n01/n01_2.x", "n02/n02_1"]


def test_a_tar_of_tars_is_read_in_place(tmp_path):
    inner = tar_bytes({"1.jpg": b"first", "2.jpg": b"second"})
    members = {
        "whole/n01.tar": inner,
        "whole/README": b"?",
        "whole/n02.tar": tar_bytes({"1.jpg": b"other"}),
        ".hidden.tar": inner,
    }
    path = tmp_path / "all.tar"
    write_tars(tmp_path, {path.name: members})
    source = opened("class_tars", path)

    # What is no tar is left out, and so is a hidden one.
    rows = {row.path: row for row in listed(source)}
    assert sorted(rows) == [
        "all.tar/whole/n01.tar/1.jpg",
        "all.tar/whole/n01.tar/2.jpg",
        "all.tar/whole/n02.tar/1.jpg",
    ]
    assert {row.reason for row in rows.values()} == {None}

    # Bytes are found by their place in the outer tar; nothing is unpacked.
    second = rows["all.tar/whole/n01.tar/2.jpg"]
    assert second.class_name == "n01"
    assert second.file == "all.tar"
    assert content(source, second) == b"second"
    assert content(source, rows["all.tar/whole/n02.tar/1.jpg"]) == b"other"

    # A copy that was not finished.
    os.truncate(path, second.offset)
    with refused("'all.tar' cannot be read as a tar file to its end"):
        source.containers()

    # The same name, written in another way.
    write_tars(tmp_path, {path.name: [*members.items(), ("./whole/n02.tar", inner)]})
    with refused("'whole/n02.tar' twice"):
        source.containers()


def special_tar():
    """Members of every type, and names that lead elsewhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        kinds = {
            "fol": tarfile.DIRTYPE,
            "sym.jpg": tarfile.SYMTYPE,
            "hard.jpg": tarfile.LNKTYPE,
            "dev.jpg": tarfile.CHRTYPE,
            "pipe.jpg": tarfile.FIFOTYPE,
        }
        for name, kind in kinds.items():
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "/etc/passwd"
            tar.addfile(info)

        # Empty files with these names.
        names = "/abs.jpg ../../up.jpg notes.txt .h/1.jpg @eaDir/2.jpg ok.webp"
        for name in names.split():
            tar.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


@words(kind="class_tars webdataset")
def test_types_and_names_of_members_determine_the_reason(kind, tmp_path):
    (tmp_path / "cat.tar").write_bytes(special_tar())
    found = {}
    for path, reason in fates(kind, tmp_path, UNLABELLED).items():
        name, _, _ = path.removeprefix("cat.tar/").partition(" ")
        found[name] = reason

    # Nothing is unpacked, so a name leads nowhere; only what is no file is refused.
    expected = yaml.safe_load("""
    sym.jpg: not_a_file
    hard.jpg: not_a_file
    dev.jpg: not_a_file
    pipe.jpg: not_a_file
    /abs.jpg: null
    ../../up.jpg: null
    notes.txt: other_name
    .h/1.jpg: null
    "@eaDir/2.jpg": hidden
    ok.webp: null
    """)
    if kind == "webdataset":
        # A text alone is a sample that lacks its image.
        expected["notes.txt"] = "no_image"
    assert found == expected


@words(kind="class_tars webdataset")
def test_cut_tars_have_a_row_and_keep_what_is_whole(kind, tmp_path):
    whole = tar_bytes(
        {
            "1.jpg": b"a",
            "1.cls": b"1",
            "2.jpg": b"b",
            "2.cls": b"2",
        }
    )

    # Header and content of a member take 512 bytes each; the image alone, or its label as well.
    ends = (1537, 3585)
    if kind == "class_tars":
        ends = (513, 2561)
    for cut in [*range(0, 4096 + 1024, 37), 1024, 2048, 3072, 4096]:
        (tmp_path / "a.tar").write_bytes(whole[:cut])
        rows = inputs(kind, tmp_path)
        kept = [row.path[-5:] for row in rows if row.reason is None]
        num_whole = sum(cut >= end for end in ends)
        assert kept == ["1.jpg", "2.jpg"][:num_whole], cut

        # Also where the cut is between two members: the end mark is missing.
        reasons = [row.reason for row in rows if row.path == "a.tar"]
        assert reasons == ["truncated_tar"]


def test_any_member_names_give_one_row_each_of_unique_path(tmp_path):
    # Three of one name, then a dot, a line end, letters and bytes beyond ASCII, and empty parts.
    names = ["..", "./dup", "dup", "dup", "a.b", "\n", "ü", "\udcff"]
    names += ["x" * 300, "a//b", "", " "]
    members = [(f"{name}.jpg", b"%d" % number) for number, name in enumerate(names)]
    write_tars(tmp_path, {"cat.tar": members})
    source = opened("class_tars", tmp_path)
    rows = listed(source)

    # The offsets are right for each of them.
    assert [content(source, row) for row in rows] == [data for _, data in members]
    assert len({row.path for row in rows}) == len(rows)
    for row in rows:
        assert os.fsencode(row.path)
    kept = [row.name for row in rows if row.reason is None]
    assert len(set(kept)) == len(kept)
    reasons = [row.reason for row in rows[1:4]]
    assert reasons == [None, "duplicate_name", "duplicate_name"]


def samples(root, members, **options):
    """Path inside the tar -> class or, in brackets, reason."""
    write_tars(root, {"a.tar": members})
    rows = inputs("webdataset", root / "a.tar", **options)
    assert len({row.path for row in rows}) == len(rows)
    classes = {}
    for row in rows:
        name = row.path.removeprefix("a.tar/")
        classes[name] = f"<{row.reason}>" if row.reason else row.class_name
    return classes


def test_a_sample_is_one_input_with_its_label(tmp_path):
    members = {
        "d/1.jpg": b"one",
        "d/1.cls": b" 7\n",
        "d/1.json": b"{}",
        # The label comes first, and the suffix is in capitals.
        "2.cls": b"cat",
        "2.PNG": b"two",
        "2.txt": b"caption",
    }
    write_tars(tmp_path, {"t/1.tar": members})
    source = opened("webdataset", tmp_path, splits={"train": "t"})
    rows = listed(source)
    assert facts(rows, "path name class_name reason") == yaml.safe_load("""
    - [t/1.tar/d/1.jpg, d/1, "7", null]
    - [t/1.tar/2.PNG, "2", cat, null]
    """)
    images = [content(source, row) for row in rows]
    assert images == [b"one", b"two"]
    assert {row.file for row in rows} == {"t/1.tar"}
    assert rows[0].modified_ns > 0


def test_negative_numbers_mean_no_label_without_a_space(tmp_path):
    members = {
        "1.jpg": b"one",
        "1.cls": b"-1\n",
        "2.jpg": b"two",
        "2.cls": b"2",
    }
    assert samples(tmp_path, members) == {"1.jpg": "<no_label>", "2.jpg": "2"}

    # In a list of classes -1 is a position like another, which the list will not have.
    labels = {"space": "imagenet_12k", "values": "index"}
    rows = inputs("webdataset", tmp_path, labels)
    assert facts(rows, "class_name reason") == [["-1", None], ["2", None]]


# What is too long to be written out: JSON that is nested too deeply, a long name, many spaces.
FILLERS = {"DEEP": "[" * 100_000, "LONG": "x" * 5000, "SPACES": " " * (2 << 20)}


# The last is larger than any label.
@rows(r"""
- [label, text, class_name]
- [json:x, '{"x": 5}', "5"]
- [json:x, '{"x": -1}', null]
- [json:x, '{"x": true}', null]
- [json:x, '{"x": "n01440764"}', n01440764]
- [json:x, '{"x": 1.5}', null]
- [json:x, '{"x": "\ud800"}', null]
- [json:x, '{"x": "LONG"}', null]
- [json:x, "[5]", null]
- [cls, DEEP, null]
- [cls, "\xff", null]
- [json:x, DEEP, null]
- [json:x, "\xff", null]
- [json:x, '{"x": 1}SPACES', null]
""")
def test_labels_of_samples_are_text_or_integers(label, text, class_name, tmp_path):
    for word, filler in FILLERS.items():
        text = text.replace(word, filler)
    suffix, _, _ = label.partition(":")
    members = {"1.jpg": b"", f"1.{suffix}": text.encode("latin1")}
    found = samples(tmp_path, members, label=label)
    assert found == {"1.jpg": class_name or "<no_label>"}


def test_incomplete_and_repeated_samples_have_rows(tmp_path):
    # Without an image, without a label, and images that are no image of the key itself.
    names = "1.cls 1.txt 2.jpg 2.txt 3.seg.png 3.cls 4.1.jpg 4.1.cls 4.2.jpg".split()
    expected = yaml.safe_load("""
    1.cls: <no_image>
    2.jpg: <no_label>
    3.seg.png: <no_image>
    4.1.jpg: <no_image>
    4.2.jpg (byte 8704): <duplicate_key>
    """)
    assert samples(tmp_path, dict.fromkeys(names, b"1")) == expected
    rows = inputs("webdataset", tmp_path, UNLABELLED)
    reasons = ["no_image", None, "no_image", "no_image", "duplicate_key"]
    assert [row.reason for row in rows] == reasons

    # A key comes again in the same sample, in a later one, and after its sample was complete.
    stored = """
    1.jpg 1.cls=1 2.jpg=2 1.jpg 1.cls=2
    3.cls=3 2.cls=1 4.jpg 4.jpg 4.cls=4
    4.png README README
    5.jpg 5.cls=5 5.cls=6
    """
    members = []
    for member in stored.split():
        name, _, data = member.partition("=")
        members.append((name, data.encode()))
    expected = yaml.safe_load("""
    1.jpg: "1"
    2.jpg: <no_label>
    1.jpg (byte 3072): <duplicate_key>
    3.cls: <no_image>
    2.cls (byte 5632): <duplicate_key>
    4.jpg: "4"
    4.jpg (byte 7168): <duplicate_key>
    4.png (byte 8704): <duplicate_key>
    README (byte 9216): <other_name>
    README (byte 9728): <other_name>
    5.jpg: "5"
    5.cls (byte 11776): <duplicate_key>
    """)
    assert samples(tmp_path, members) == expected


# Parts of names that the package and this reader might split at different dots.
KEY_PARTS = st.sampled_from(["a", "b", ".", "..", "ü", "x.y", "", "__", "\udcff", " "])


@settings(max_examples=200, deadline=None)
@given(name=st.lists(KEY_PARTS, min_size=1, max_size=4).map("/".join), suffix=KEY_PARTS)
def test_keys_equal_those_of_webdataset(name, suffix):
    # Imported here, since it takes long and one test needs it.
    from webdataset.tariterators import base_plus_ext

    text = f"{name}.{suffix}"
    prefix, ending = base_plus_ext(text)
    expected = None
    if prefix is not None:
        expected = (prefix, ending.lower())
    if text.startswith("__") and text.endswith("__") and "/" not in text:
        expected = None  # metadata of the package
    if text.rpartition("/")[2].startswith("."):
        expected = None  # hidden here; the package may differ
    assert split_member_name(text) == expected


def write_parquet(path, images, labels, **options):
    """One row per image; `names`: of the classes, as the `datasets` package stores them."""
    names = options.pop("names", None)
    data = pa.table({"image": pa.array(images), "label": pa.array(labels)})
    if names is not None:
        feature = {"names": names, "_type": "ClassLabel"}
        info = json.dumps({"info": {"features": {"label": feature}}})
        data = data.replace_schema_metadata({"huggingface": info})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(data, path, **options)


def test_rows_of_parquet_files_are_inputs_with_bytes(tmp_path):
    # Names as the files had them, no name, and a name with folders.
    images = [
        {"bytes": b"one", "path": "n01_1.JPEG"},
        {"bytes": b"three", "path": None},
        {"bytes": b"", "path": "sub/./x.y.png"},
    ]
    folder = tmp_path / "data"
    names = ["cat", "dog"]
    write_parquet(folder / "train-0.parquet", images, [1, 0, 1], names=names)
    write_parquet(folder / "test-0.parquet", images[:1], [0], names=names)
    splits = {"train": "data/train-*.parquet", "test": "data/test-*.parquet"}
    rows = inputs("parquet", tmp_path, splits=splits)
    assert facts(rows, "path split name class_name num_bytes") == yaml.safe_load("""
    - [data/train-0.parquet/0, train, n01_1, dog, 3]
    - [data/train-0.parquet/1, train, train-0-1, cat, 5]
    - [data/train-0.parquet/2, train, sub/x.y, dog, 0]
    - [data/test-0.parquet/0, test, n01_1, cat, 3]
    """)
    assert [row.data for row in rows] == [b"one", b"three", b"", b"one"]


# Text, numbers, a dictionary, a text that is no name, and names beside the numbers. type: of Arrow.
@rows("""
- [labels, type, names, values, classes]
- [[a, " b ", "", null], string, null, name, [a, b, null, null]]
- [[7, -1, null, 0], int16, null, name, ["7", null, null, "0"]]
- [[a, b, null], dictionary, null, name, [a, b, null]]
- [[a, LONG], large_string, null, name, [a, null]]
- [[1, 2, -1, 0], int64, [cat, dog], name, [dog, null, null, cat]]
- [[1, 2, -1, 0], int64, [cat, dog], index, ["1", "2", null, "0"]]
""")
def test_labels_of_parquet_rows_are_numbers_or_text(
    labels, type, names, values, classes, tmp_path
):
    texts = [FILLERS.get(label, label) for label in labels]
    array = pa.array(texts)
    if type == "dictionary":
        array = array.dictionary_encode()
    else:
        array = array.cast(type)
    images = [{"bytes": b"x", "path": None}] * len(classes)
    file = tmp_path / "a.parquet"
    write_parquet(file, images, array, names=names)
    rows = inputs("parquet", file, {"values": values})
    assert [row.class_name for row in rows] == classes
    for row in rows:
        assert row.reason == ("no_label" if row.class_name is None else None)


def test_cells_without_bytes_and_damaged_files_have_rows(tmp_path):
    file = tmp_path / "a.parquet"
    # A path alone leads to a file of the machine that wrote the table.
    cells = [None, {"path": "/etc/passwd"}, {"bytes": b"x"}]
    write_parquet(file, cells, [0, 0, 0])
    reasons = [row.reason for row in inputs("parquet", file)]
    assert reasons == ["no_image", "no_image", None]

    # Cut anywhere: the footer is at the end, so nothing is left.
    rng = random.Random(0)
    images = [{"bytes": rng.randbytes(5000)} for _ in range(8)]
    write_parquet(
        file,
        images,
        [0] * 8,
        row_group_size=2,
        compression="zstd",
        use_dictionary=False,
    )
    whole = file.read_bytes()
    for cut in (0, 3, 1000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert fates("parquet", tmp_path) == {"a.parquet": "damaged_table"}

    # Damage in the second group of rows: the others may be sound.
    metadata = pq.ParquetFile(pa.BufferReader(whole)).metadata
    start = metadata.row_group(1).column(0).data_page_offset
    end = start + 60
    file.write_bytes(whole[:start] + b"\xff" * 60 + whole[end:])
    rows = inputs("parquet", tmp_path)
    damaged = [(row.path, row.reason) for row in rows if row.reason]
    assert damaged == [("a.parquet", "damaged_table")]

    # Text that is no UTF-8, which Arrow itself does not check.
    buffers = pa.array([b"\xff\xfe"]).buffers()
    bad_text = pa.Array.from_buffers(pa.string(), 1, buffers)
    write_parquet(file, images[:1], bad_text)
    assert fates("parquet", tmp_path) == {"a.parquet": "damaged_table"}
    file.write_bytes(b"PAR1 cut")
    assert fates("path_table", file) == {"a.parquet": "damaged_table"}


def write_table(path, columns):
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=2)
        return path
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


@words(suffix="tsv parquet CSV")
def test_rows_of_a_table_are_inputs_with_their_files(suffix, tmp_path):
    # A name with a comma, and one without a suffix.
    touch(tmp_path, "b,c.png", "3")
    image = written(tmp_path / "a/1.jpg", b"1234")
    columns = yaml.safe_load("""
    x: [1, 2, 3]
    label: [cat, "7", dog]
    image: [./a//1.jpg, "b,c.png", "3"]
    split: [train, val, val]
    """)
    file = write_table(tmp_path / f"t.{suffix}", columns)
    rows = inputs("path_table", file)
    assert facts(rows, "path split class_name name reason") == yaml.safe_load("""
    - [a/1.jpg, train, cat, a/1, null]
    - ["b,c.png", val, "7", "b,c", null]
    - ["3", val, dog, "3", null]
    """)
    assert [row.num_bytes for row in rows] == [4, 0, 0]
    assert rows[0].modified_ns == image.stat().st_mtime_ns

    # Empty, a path, a name that contains "tar", which timm takes for a list of tars, and too long.
    for wrong in ("", "a/b", "start", 25 * "a"):
        write_table(file, columns | {"split": ["train", wrong, "val"]})
        with refused("cannot name a split"):
            inputs("path_table", file)


@words(suffix="csv parquet")
def test_what_a_path_leads_to_determines_the_reason(suffix, tmp_path):
    touch(tmp_path, "out.jpg", "out/1.jpg", "in/1.jpg", "in/deep/2.jpg")
    links = {"up": "..", "x.jpg": "../out.jpg", "z.jpg": "z.jpg"}
    for link, target in links.items():
        (tmp_path / "in" / link).symlink_to(target)
    os.mkfifo(tmp_path / "in/pipe.jpg")

    # Files anywhere; then nothing, what is no folder, a circle, and paths that cannot be.
    expected = yaml.safe_load("""
    1.jpg: null
    deep/2.jpg: null
    ../out.jpg: null
    ..: not_a_file
    up/out.jpg: null
    x.jpg: null
    gone.jpg: unreadable
    1.jpg/2.jpg: unreadable
    z.jpg: unreadable
    "nul\\0.jpg": unreadable
    "": unreadable
    .: not_a_file
    deep: not_a_file
    pipe.jpg: not_a_file
    """)
    expected |= {
        str(tmp_path / "in/1.jpg"): None,
        "n" * 300: "unreadable",
    }
    columns = {"image": list(expected), "label": ["a"] * len(expected)}
    file = write_table(tmp_path / f"in/t.{suffix}", columns)
    rows = inputs("path_table", file)
    assert [row.reason for row in rows] == list(expected.values())

    # A lost mount must not reject the images one by one.
    error = OSError(errno.EREMOTEIO, "lost")
    lost = mock.Mock(wraps=os, stat=mock.Mock(side_effect=error))
    with (
        mock.patch("data_prep.sources.tables.os", lost),
        pytest.raises(StorageError, match="lost"),
    ):
        inputs("path_table", file)


@pytest.mark.parametrize(
    "columns", [{}, {"label": [1.5, 2.5]}], ids=["missing", "unusable"]
)
def test_ignored_classes_need_no_label_column(columns, tmp_path):
    touch(tmp_path, "1.jpg", "2.jpg")
    paths = {"image": ["1.jpg", "2.jpg"], **columns}
    for suffix in ("csv", "parquet"):
        file = write_table(tmp_path / f"t.{suffix}", paths)
        assert fates("path_table", file, UNLABELLED) == {"1.jpg": None, "2.jpg": None}

    # Bytes in the cells, and a column that names the splits.
    file = tmp_path / "p.parquet"
    images = pa.array([b"1", b"2"])
    file.write_bytes(table({"image": images, "split": ["train", "Dev"], **columns}))
    rows = inputs("parquet", file, UNLABELLED)
    assert facts(rows, "reason data") == [[None, b"1"], [None, b"2"]]
    assert [row.split for row in rows] == ["train", "val"]

    # The settings go before the column.
    first, _ = inputs("parquet", tmp_path, UNLABELLED, splits={"x": "p.parquet"})
    assert first.split == "x"

    # Where classes count, a truth value is no class.
    file = write_table(tmp_path / "b.parquet", {"image": ["1.jpg"], "label": [True]})
    assert fates("path_table", file) == {"1.jpg": "no_label"}
