"""What no single image shows: classes, files, numbers, splits and keys of a corpus as a whole."""

import io
import json
import os
import re
import shutil
import tarfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.duplicates.reading import check_keys, list_samples
from data_prep.make_shards import STEPS
from data_prep.steps.work import WorkFolder, find_existing, run_steps
from data_prep.verification import check_folder
from tests.support.corpora.external_tars import write_tars
from tests.support.corpora.image_corpus import ledger, prepare_here, run_of
from tests.support.corpora.indexing import index, run_index
from tests.support.tables import Values, every, lines, refused, rows
from vitscale.config.errors import UserError
from vitscale.data.index import choose_by_key, read_manifest, read_split, sample_keys
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet, open_training_set

CAFE = "caf\u00e9"
# The same letters to the eye: an e, and an accent of its own.
DECOMPOSED = "cafe\u0301"
ANY_BAD = {"max_bad_fraction": 1}


def picture(seed: int) -> bytes:
    """A PNG whose pixels tell the seed."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (seed % 256, seed // 256, 7)).save(file, "PNG")
    return file.getvalue()


def write_folder(root: Path, images: Mapping[str, int]) -> Path:
    """Write `images` in each folder: images of all folders differ."""
    seeds = iter(range(10_000))
    for folder, num in images.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(num):
            (root / folder / f"{number}.png").write_bytes(picture(next(seeds)))
    return root


def stored(folder: Path) -> dict[str, set[tuple[str, str]]]:
    """Split -> (class, pixels as bytes) of the tars, read by tarfile and Pillow."""
    classes = json.loads((folder / "manifest.json").read_text())["classes"]
    found = defaultdict[str, set[tuple[str, str]]](set)
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
        for name, data in members.items():
            if name.endswith(".png"):
                label = int(members[name.removesuffix("png") + "cls"])
                pixel = Image.open(io.BytesIO(data)).getpixel((0, 0))
                found[path.name.partition("-")[0]].add((classes[label], str(pixel)))
    return found


def refusal(tmp_path: Path, path: Path, **sections) -> str:
    """The error of a preparation, which leaves no output."""
    with pytest.raises(UserError) as caught:
        prepare_here(run_of(path, tmp_path / "refused", **sections))
    assert not (tmp_path / "refused").exists()
    shutil.rmtree(tmp_path / ".refused.preparing")
    return caught.value.text()


# ---- classes -------------------------------------------------------------------------------------

# A class of train, one of val that train lacks, and what the error says.
UNSEEN = r"""
- [name, other, message]
- [dog, dogs, train has 'dog']
- [dog, Dog, train has 'dog']
- [sea lion, sea_lion, train has 'sea lion']
- [dog, '1', "'1' has 2, such as 'val/1/"]
- [dog, walrus, "'walrus' has 2, such as 'val/"]
- [dog, 'dog ', "'dog'.* look like 'dog '"]
- [sea lion, sea  lion, look like 'sea  lion']
# A no-break space, an accent of its own, a mark of direction, marks of the byte order.
- [sea lion, "sea\u00a0lion", look like 'sea\\xa0lion']
- ["caf\u00e9", "cafe\u0301", caf\\xe9'.* look like 'cafe\\u0301']
- [dog, "dog\u200f", look like]
- [dog, "\ufeffcow", cannot be seen]
- [dog, "\ufeffdog", look like '\\ufeffdog']
"""


@rows(UNSEEN)
def test_a_class_that_training_never_sees_is_refused(name, other, message, tmp_path):
    images = {"train/ant": 2, f"train/{name}": 2, "val/ant": 1, f"val/{other}": 2}
    text = refusal(tmp_path, write_folder(tmp_path / "in", images))
    assert re.search(message, text), text
    assert "val/" in text and ".png" in text, "an image of the class is named"


@pytest.mark.parametrize(
    "name, other",
    [
        (b"train/caf\xe9", b"train/caf\\xe9"),
        (b"train/caf\xe9", b"val/caf\\xe9"),
        (b"train/a\x01", b"train/a\\x01"),
    ],
)
def test_names_that_become_one_class_are_refused(name, other, tmp_path):
    images = {os.fsdecode(folder): 1 for folder in (b"train/ant", name, other)}
    text = refusal(tmp_path, write_folder(tmp_path / "in", images))
    assert f"{other!r} and {name.partition(b'/')[2]!r} would be one class" in text


def test_a_space_may_have_classes_without_training_images(tmp_path):
    source = write_folder(
        tmp_path / "in", {"train/ant": 2, "val/ant": 1, "val/walrus": 2}
    )
    (source / "train/empty").mkdir()
    (tmp_path / "space.txt").write_text("walrus\nant\n10\n2\n")
    run = run_of(source, tmp_path / "s", labels={"space": str(tmp_path / "space.txt")})
    prepare_here(run)
    assert read_manifest(tmp_path / "s").notes == ()
    kept = stored(tmp_path / "s")
    assert {name for name, _ in kept["train"]} == {"ant"}
    assert {name for name, _ in kept["val"]} == {"ant", "walrus"}

    # Without a space, a class that has too few images is left out, here and in val.
    (source / "train/empty").rmdir()
    prepare_here(run_of(source, tmp_path / "t", source={"min_images_per_class": 3}))
    assert read_manifest(tmp_path / "t").classes == ("ant",)
    shutil.rmtree(tmp_path / "s")

    # The list of classes changes between two steps of one preparation.
    work = prepare_here(run, until="finish")
    (tmp_path / "space.txt").write_text("ant\nwalrus\n")
    with refused("begun with other settings"):
        run_steps(work, STEPS[-1:], num_workers=1)


def test_a_class_whose_training_images_are_all_damaged_is_refused(tmp_path):
    source = write_folder(
        tmp_path / "in", {"train/ant": 2, "train/dog": 1, "val/dog": 2}
    )
    (source / "train/dog/0.png").write_bytes(picture(3)[:60])
    text = refusal(tmp_path, source, images=ANY_BAD)
    assert "no usable image is left of 1 classes: dog (in train)" in text
    assert "dog/0.png" in text

    # A folder without any image is another mistake, with a count of its own.
    (source / "train/eel").mkdir()
    (source / "train/eel/notes.txt").touch()
    text = refusal(tmp_path, source, images=ANY_BAD)
    assert "1 of 3 classes hold no images: 'eel'" in text
    assert "'train/eel/notes.txt'" in text


def test_names_that_look_alike_are_refused_within_train(tmp_path):
    both = {CAFE: 1, DECOMPOSED: 1, "tea": 1}
    assert "look like" in refusal(tmp_path, write_folder(tmp_path / "in", both))

    # Letters of both cases are classes of their own.
    prepare_here(
        run_of(write_folder(tmp_path / "letters", {"A": 1, "a": 1}), tmp_path / "s")
    )
    assert read_manifest(tmp_path / "s").classes == ("A", "a")


def test_a_rejected_class_that_looks_like_one_of_the_space_is_refused(tmp_path):
    source = write_folder(tmp_path / "in", {DECOMPOSED: 2, "tea": 2, "x": 1})
    (tmp_path / "space.txt").write_text(f"{CAFE}\ntea\n")
    labels = {"space": str(tmp_path / "space.txt"), "unknown": "reject"}
    assert r"the list has 'caf\xe9', the source 'cafe\u0301'" in refusal(
        tmp_path, source, labels=labels
    )


# ---- numbers -------------------------------------------------------------------------------------


def write_labels(kind: str, root: Path, labels: list[str]) -> tuple[Path, Values]:
    """A source with these labels; returns its path, and its settings."""
    root.mkdir()
    if kind == "path_table":
        lines = ["image,label"]
        for number, text in enumerate(labels):
            (root / f"{number}.png").write_bytes(picture(number))
            lines.append(f"{number}.png,{text}")
        (root / "t.csv").write_text("\n".join(lines))
        return root / "t.csv", {"kind": kind}
    if kind == "parquet":
        columns = {"image": list(map(picture, range(len(labels)))), "label": labels}
        pq.write_table(pa.table(columns), root / "a.parquet")
        return root, {"kind": kind}
    members = {}
    for number, text in enumerate(labels):
        members[f"{number:03}.png"] = picture(number)
        content = json.dumps({"class": text}) if kind == "json" else text
        members[f"{number:03}.{kind}"] = content.encode()
    write_tars(root, {"a.tar": members})
    how = {"label": "json:class"} if kind == "json" else {}
    return root, {"kind": "webdataset", **how}


@every(
    odd='"3.0", "03", "3 5", "3\\0", "+3", 1e3, "[3]", none',
    kind="path_table, parquet, cls, json",
)
def test_a_label_that_is_no_plain_number_among_numbers_is_refused(kind, odd, tmp_path):
    labels = [str(number % 12) for number in range(24)]

    # One of 24 is enough: it would be sorted among the numbers, as text.
    labels[13] = odd
    source, settings = write_labels(kind, tmp_path / "in", labels)
    text = refusal(tmp_path, source, source=settings)
    places = {"path_table": "13.png", "parquet": "a.parquet/13"}
    assert f"such as {odd!a} of {places.get(kind, 'a.tar/013.png')!r}" in text


# The labels of the images, and the classes that they become.
@lines("""
labels|classes
0 1 2 3 4 5 6 7 8 9 10 11|0 1 2 3 4 5 6 7 8 9 10 11
# Labels may lack numbers of their classes, up to a million.
2 10|0 1 2 3 4 5 6 7 8 9 10
7 1000000|1000000 7
000 001 002 003 004 005 006 007 008 009 010 011|000 001 002 003 004 005 006 007 008 009 010 011
1 a b|1 a b
0-2 3-9 10-19|0-2 10-19 3-9
""")
def test_numbers_in_one_form_are_taken(tmp_path, labels, classes):
    source, settings = write_labels("path_table", tmp_path / "in", labels.split())
    prepare_here(run_of(source, tmp_path / "s", source=settings))
    assert list(read_manifest(tmp_path / "s").classes) == classes.split()


def test_floats_are_refused_and_a_mark_of_windows_is_no_part_of_a_number(tmp_path):
    floats = [f"{n}.0" for n in range(12)]
    source, settings = write_labels("path_table", tmp_path / "in", floats)
    assert "such as '0.0' of '0.png'" in refusal(tmp_path, source, source=settings)

    # Notepad writes a byte order mark before the number.
    source, settings = write_labels("cls", tmp_path / "tars", ["0", "\ufeff1", "2"])
    prepare_here(run_of(source, tmp_path / "s", source=settings))
    assert read_manifest(tmp_path / "s").classes == ("0", "1", "2")


def test_folders_named_by_numbers_are_sorted_as_text_and_it_is_said(tmp_path):
    source = write_folder(tmp_path / "in", {str(number): 1 for number in range(11)})
    prepare_here(run_of(source, tmp_path / "s"))
    (note,) = read_manifest(tmp_path / "s").notes
    assert "'10' has label 2, and '2' 3" in note

    # 0 to 9 and a name are in the order of the numbers.
    named = write_folder(tmp_path / "b", dict.fromkeys([*"0123456789", "none"], 1))
    prepare_here(run_of(named, tmp_path / "s2"))
    assert read_manifest(tmp_path / "s2").notes == ()

    # 3 and 03 would be two classes.
    assert "such as '03'" in refusal(tmp_path, write_folder(source, {"03": 1}))


def test_parquet_files_must_name_their_classes_alike(tmp_path):
    feature = {"_type": "ClassLabel", "names": ["cat", "dog"]}
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature}}})}
    columns = {"image": [picture(1), picture(2)], "label": pa.array([0, 1])}
    (tmp_path / "in").mkdir()

    # One of two files has names: the numbers of the other may mean anything.
    named = pa.table(columns).replace_schema_metadata(metadata)
    pq.write_table(named, tmp_path / "in/a.parquet")
    pq.write_table(pa.table(columns), tmp_path / "in/b.parquet")
    text = refusal(tmp_path, tmp_path / "in", source={"kind": "parquet"})
    assert "'a.parquet' and 'b.parquet' have different lists of class names" in text


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_is_one_image_by_whatever_path(tmp_path):
    root = write_folder(tmp_path / "in", {".": 8})
    (root / "link.png").symlink_to("3.png")
    os.link(root / "4.png", root / "hard.png")
    (root / "away").symlink_to(".")

    # 0 twice; 1 in two classes: neither is right; 2 in two splits: val keeps it; 3 by a link; 4
    # has a hard link, which is another file; 5 in two classes by a folder that is a link.
    table = f"""\
image,label,split
0.png,a,train
0.png,a,train
1.png,a,train
1.png,b,train
2.png,a,train
{root}/2.png,a,val
link.png,b,train
3.png,b,train
4.png,a,train
hard.png,a,train
away/5.png,b,val
./5.png,a,train
6.png,a,train
7.png,b,train
"""
    (root / "t.csv").write_text(table)
    kind = {"kind": "path_table"}
    prepare_here(run_of(root / "t.csv", tmp_path / "s", source=kind, images=ANY_BAD))
    entries = pq.read_table(tmp_path / "s/ledger.parquet").to_pylist()
    reasons = Counter(entry["reason"] for entry in entries)
    assert reasons == {None: 7, "duplicate_path": 7}

    def pixel(place):
        picture = Image.open(root / f"{place[1]}.png")
        return place[0], str(picture.getpixel((0, 0)))

    kept = {"train": set(map(pixel, "a0 b3 a4 a6 b7".split())), "val": {pixel("a2")}}
    assert stored(tmp_path / "s") == kept


def test_one_tar_or_table_under_two_names_is_refused(tmp_path):
    write_tars(tmp_path / "in", {"a.tar": {"0.png": picture(0), "0.cls": b"0"}})
    (tmp_path / "in/b.tar").symlink_to("a.tar")
    text = refusal(tmp_path, tmp_path / "in", source={"kind": "webdataset"})
    assert "one file has two names: 'a.tar' and 'b.tar'" in text

    splits = {"kind": "webdataset", "splits": {"train": "a.tar", "val": "b.tar"}}
    assert "two splits share files" in refusal(tmp_path, tmp_path / "in", source=splits)


def test_equal_bytes_in_two_splits_are_counted_for_every_source(tmp_path):
    root = write_folder(tmp_path / "in", {"train/a": 3, "val/a": 2, "test/a": 2})
    (root / "val/a/copy.png").write_bytes((root / "train/a/1.png").read_bytes())
    (root / "test/a/copy.png").write_bytes((root / "train/a/1.png").read_bytes())
    prepare_here(run_of(root, tmp_path / "s"))
    notes = [note for note in read_manifest(tmp_path / "s").notes if "bytes" in note]
    assert notes == [
        "1 images of test have the bytes of images of val",
        "1 images of test have the bytes of images of train",
        "1 images of val have the bytes of images of train",
    ]

    # An index of tars that others made says the same.
    members = {"0.png": picture(1), "0.cls": b"0", "1.png": picture(2), "1.cls": b"0"}
    write_tars(tmp_path / "tars", {"train-0.tar": members, "val-0.tar": members})
    text = index(tmp_path / "tars", tmp_path / "index")
    assert "note: 2 images of val have the bytes of images of train" in text


# ---- keys, cuts ----------------------------------------------------------------------------------


def sorted_tars(root: Path) -> Path:
    """Six tars of one class each, in which the same keys begin anew."""
    for label in range(6):
        members = {}
        for number in range(20):
            members[f"{number:03}.png"] = picture(100 * label + number)
            members[f"{number:03}.cls"] = str(label).encode()
        write_tars(root, {f"{label}.tar": members})
    return root


@pytest.fixture(scope="module")
def indexed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sorted")
    index(sorted_tars(folder / "tars"), folder / "index")
    return folder / "index"


def opened(path: Path, **settings) -> TrainingSet:
    return open_training_set(
        DataSettings(path=str(path), global_batch=2, **settings), seed=0
    )


def test_keys_that_tars_share_get_the_name_of_their_tar(indexed, tmp_path):
    split = read_split(indexed, split="train")
    keys = sample_keys(split, range(split.num_samples))
    assert len(set(keys)) == 120
    assert keys[25] == "1/005"
    rows = pq.read_table(indexed / "ledger.parquet").to_pylist()
    paths = list_samples(indexed)["path"].to_pylist()
    assert paths == [f"{key.replace('/', '.tar/')}.png" for key in keys]
    assert {row["key"] for row in rows} == set(keys)

    # A list takes the samples that it names, by the bytes in the tars.
    (tmp_path / "keys.txt").write_text("2/003\n5/019\n")
    chosen = opened(indexed, only_keys=str(tmp_path / "keys.txt")).parts[0]
    assert [chosen.read(i) for i in range(2)] == [picture(203), picture(519)]


def test_unique_keys_stay_as_they_are(tmp_path):
    tars = {f"{n}.tar": {f"k{n}.png": picture(n), f"k{n}.cls": b"0"} for n in range(2)}
    tars["0.tar"] |= {"same.png": picture(8), "same.cls": b"0"}
    tars["1.tar"] |= {"same.png": picture(9), "same.cls": b"0"}
    write_tars(tmp_path / "tars", tars)
    index(tmp_path / "tars", tmp_path / "index")
    split = read_split(tmp_path / "index", split="train")
    assert sample_keys(split, range(4)) == "k0 0/same k1 1/same".split()


def test_keys_of_two_splits_are_refused_where_copies_are_left_out(tmp_path):
    for split, first in (("train", 5), ("val", 0)):
        members = {"0.png": picture(first), "0.cls": b"0"}
        write_tars(tmp_path / "tars", {f"{first}-{split}.tar": members})
    index(tmp_path / "tars", tmp_path / "index")

    # Training may have both; looking for copies may not: it names samples by their keys.
    manifest = read_manifest(tmp_path / "index")
    assert check_folder(tmp_path / "index", manifest=manifest, num_workers=1) == []
    for split in ("train", "val"):
        assert sample_keys(read_split(tmp_path / "index", split=split), [0]) == ["0"]
    with refused("samples of several splits have the same keys"):
        check_keys(tmp_path / "index", list_samples(tmp_path / "index"))


def test_a_list_refuses_an_index_whose_keys_repeat(indexed, tmp_path):
    """As earlier versions made them."""
    (tmp_path / "old").mkdir()
    table = pq.read_table(indexed / "index.parquet")
    short = pa.array([key.partition("/")[2] for key in table["key"].to_pylist()])
    pq.write_table(table.set_column(0, "key", short), tmp_path / "old/index.parquet")
    manifest = json.loads((indexed / "manifest.json").read_text())

    # All else of the folder fits, so that only the keys are wrong.
    manifest["index_bytes"] = (tmp_path / "old/index.parquet").stat().st_size
    manifest["shards_root"] = str(indexed.parent / "tars")
    (tmp_path / "old/manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "keys.txt").write_text("003\n")
    with refused("share keys, such as '003'.*(.|\n)*index again"):
        choose_by_key(
            read_split(tmp_path / "old", split="train"), str(tmp_path / "keys.txt")
        )


def test_parts_of_sorted_tars_are_drawn_from_all_of_them(indexed):
    for settings in ({"first_percent": 30.0}, {"dev_percent": 30.0}):
        found = opened(indexed, **settings)
        (part,) = found.parts
        assert set(part.label.tolist()) == set(range(6))
        assert found.fingerprint == opened(indexed, **settings).fingerprint
        assert np.all(np.diff(part.shard_of) >= 0)
    assert set(found.dev.label.tolist()) == set(range(6))
    kept, held = (
        sample_keys(each, range(each.num_samples)) for each in (part, found.dev)
    )
    assert len(kept) == 84
    assert len(held) == 36
    assert len({*kept, *held}) == 120

    # Half of what the cut leaves for training.
    both = opened(indexed, first_percent=50.0, dev_percent=50.0)
    assert both.parts[0].num_samples == 30
    assert both.dev is not None


def test_an_index_is_checked_as_a_whole_too(tmp_path):
    train = {"0.png": picture(0), "0.cls": b"cat"}
    tars = {"train-0.tar": train, "val-0.tar": {"0.png": picture(1), "0.cls": b"Cat"}}
    write_tars(tmp_path / "tars", tars)
    done = run_index(tmp_path / "tars", tmp_path / "index")
    assert done.returncode == 2
    assert "'Cat' has 1, such as 'val-0.tar/0.png'" in done.stderr
    assert not (tmp_path / "index").exists()


# ---- another source ------------------------------------------------------------------------------


def test_an_output_of_another_source_is_refused(tmp_path, monkeypatch):
    for name, num in (("one", 2), ("two", 3)):
        write_folder(tmp_path / name, {"a": num, "b": num})
    (tmp_path / "link").symlink_to("one")
    prepare_here(run_of(tmp_path / "one", tmp_path / "s"))
    monkeypatch.chdir(tmp_path)
    for same in ("one", "./two/../one/", str(tmp_path / "one"), "link"):
        assert find_existing(WorkFolder(run_of(Path(same), tmp_path / "s"))) is not None

    # A link that leads elsewhere now is another source.
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("two")
    prepare_here(run_of(tmp_path / "one", tmp_path / "t"), until="finish")
    with refused("begun with other settings: path"):
        prepare_here(run_of(tmp_path / "two", tmp_path / "t"))
    for other in ("two", "link", "gone"):
        with refused(f"made from {tmp_path}/one; source.path is {tmp_path}/"):
            find_existing(WorkFolder(run_of(Path(other), tmp_path / "s")))


# ---- folders without labels ----------------------------------------------------------------------


def test_unlabelled_folders_are_listed_in_parts_with_the_same_result(tmp_path):
    names = [f"{a}/{b}" for a in range(9) for b in range(9)]
    root = write_folder(tmp_path / "in", dict.fromkeys([".", *names, "0/0/deep"], 1))
    (root / ".hidden").mkdir()
    (root / ".hidden/x.png").write_bytes(picture(1))
    (root / "3/link").symlink_to("../4")
    run = run_of(root, tmp_path / "s", labels={"values": "none"}, images=ANY_BAD)
    work = prepare_here(run, until="list inputs")

    # About one part a folder, each of them once.
    boxes = json.loads((work.path / "containers.json").read_text())
    assert len(boxes) > 81
    assert len({json.dumps(box) for box in boxes}) == len(boxes)
    prepare_here(run)
    rows = ledger(tmp_path / "s")
    expected = {
        os.path.relpath(os.path.join(path, name), root)
        for path, _, names in os.walk(root)
        for name in names
    }
    assert rows.keys() == expected | {"3/link"}
    assert rows["3/link"]["reason"] == "linked_folder"
    assert rows[".hidden/x.png"]["reason"] == "hidden"
    with tarfile.open(tmp_path / "s/train-000000.tar") as tar:
        keys = {name.removesuffix(".png") for name in tar.getnames()}
    assert "train-0" in keys
    assert len(keys) == 83
