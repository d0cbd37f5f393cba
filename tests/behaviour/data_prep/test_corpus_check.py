"""What no single image shows: classes, files, numbers, splits and keys of a corpus as a whole."""

import io
import json
import os
import re
import shutil
import tarfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.duplicates.reading import check_keys, list_samples, store
from data_prep.make_shards import STEPS
from data_prep.steps.list_inputs import read_containers
from data_prep.steps.work import WorkFolder, find_existing, run_steps
from data_prep.verification import check_folder
from tests.support.corpora.external_tars import write_tars
from tests.support.corpora.image_corpus import ledger, prepare_here, prepared, run_of
from tests.support.corpora.image_samples import encoded
from tests.support.corpora.indexing import index, run_index
from tests.support.corpora.sources import touch, written
from tests.support.tables import every, lines, refused, rows
from vitscale.config.errors import UserError
from vitscale.data.index import choose_by_key, read_manifest, read_split, sample_keys
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet, open_training_set

CAFE = "caf\u00e9"
# The same letters to the eye: an e, and an accent of its own.
DECOMPOSED = "cafe\u0301"

# The refusals below are of classes, not of too many damaged images.
ANY_BAD = {"max_bad_fraction": 1}


def picture(seed):
    """A PNG whose pixels tell the seed."""
    return encoded(np.full((8, 8, 3), (seed % 256, seed // 256, 7), np.uint8), "PNG")


def write_folder(root, images):
    """Write `images` in each folder: images of all folders differ."""
    seeds = iter(range(10_000))
    for folder, num in images.items():
        for number in range(num):
            written(root / folder / f"{number}.png", picture(next(seeds)))
    return root


def stored(folder):
    """Split -> (class, pixels as bytes) of the tars, read by tarfile and Pillow."""
    manifest = json.loads((folder / "manifest.json").read_text())
    pictures = defaultdict(set)
    for path in folder.glob("*.tar"):
        split = path.name.partition("-")[0]
        with tarfile.open(path) as tar:
            members = {
                member.name: tar.extractfile(member).read()
                for member in tar.getmembers()
            }
        for name, data in members.items():
            stem, _, kind = name.rpartition(".")
            if kind == "png":
                label = int(members[f"{stem}.cls"])
                pixel = Image.open(io.BytesIO(data)).getpixel((0, 0))
                pictures[split].add((manifest["classes"][label], str(pixel)))
    return pictures


def refusal(tmp_path, path, **sections):
    """The error of a preparation, which leaves no output."""
    output = tmp_path / "refused"
    with pytest.raises(UserError) as caught:
        prepare_here(run_of(path, output, **sections))
    assert not output.exists()

    # So that the same test may be refused again, with other settings.
    shutil.rmtree(tmp_path / ".refused.preparing")
    return caught.value.text()


# ---- classes -------------------------------------------------------------------------------------


# A class of train, one of val that train lacks, and what the error says.
@rows(r"""
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
""")
def test_a_class_that_training_never_sees_is_refused(name, other, message, tmp_path):
    images = {
        "train/ant": 2,
        f"train/{name}": 2,
        "val/ant": 1,
        f"val/{other}": 2,
    }
    source = write_folder(tmp_path / "in", images)
    text = refusal(tmp_path, source)
    assert re.search(message, text), text

    # An image of the class is named: the folder alone may have thousands.
    assert "val/" in text
    assert ".png" in text


# A byte that is no UTF-8, and a control character: both are written as in Python's texts.
@rows(r"""
- [name, other]
- ["train/caf\xe9", 'train/caf\xe9']
- ["train/caf\xe9", 'val/caf\xe9']
- ["train/a\x01", 'train/a\x01']
""")
def test_names_that_become_one_class_are_refused(name, other, tmp_path):
    name = name.encode("latin1")
    other = other.encode()
    folders = (b"train/ant", name, other)
    images = {os.fsdecode(folder): 1 for folder in folders}
    source = write_folder(tmp_path / "in", images)
    text = refusal(tmp_path, source)
    class_name = name.partition(b"/")[2]
    assert f"{other!r} and {class_name!r} would be one class" in text


def test_a_space_may_have_classes_without_training_images(tmp_path):
    images = {"train/ant": 2, "val/ant": 1, "val/walrus": 2}
    source = write_folder(tmp_path / "in", images)
    (source / "train/empty").mkdir()
    output = tmp_path / "s"
    space = tmp_path / "space.txt"
    space.write_text("walrus\nant\n10\n2\n")
    listed = {"space": str(space)}
    assert prepared(source, output, labels=listed).notes == ()
    kept = stored(output)
    assert {name for name, _ in kept["train"]} == {"ant"}
    assert {name for name, _ in kept["val"]} == {"ant", "walrus"}

    # Without a space, a class that has too few images is left out, here and in val.
    (source / "train/empty").rmdir()
    few = {"min_images_per_class": 3}
    assert prepared(source, tmp_path / "t", source=few).classes == ("ant",)
    shutil.rmtree(output)

    # The list of classes changes between two steps of one preparation.
    work = prepare_here(run_of(source, output, labels=listed), until="finish")
    space.write_text("ant\nwalrus\n")
    with refused("begun with other settings"):
        run_steps(work, STEPS[-1:], num_workers=1)


def test_a_class_whose_training_images_are_all_damaged_is_refused(tmp_path):
    images = {"train/ant": 2, "train/dog": 1, "val/dog": 2}
    source = write_folder(tmp_path / "in", images)
    (source / "train/dog/0.png").write_bytes(picture(3)[:60])

    # A cut PNG: the only image of its class in train.
    text = refusal(tmp_path, source, images=ANY_BAD)

    assert "no usable image is left of 1 classes: dog (in train)" in text
    assert "dog/0.png" in text

    # A folder without any image is another mistake, with a count of its own.
    touch(source, "train/eel/notes.txt")
    text = refusal(tmp_path, source, images=ANY_BAD)
    assert "1 of 3 classes hold no images: 'eel'" in text
    assert "'train/eel/notes.txt'" in text


def test_names_that_look_alike_are_refused_within_train(tmp_path):
    """An accented letter, and a letter with an accent of its own: two names, one look."""
    both = write_folder(tmp_path / "in", {CAFE: 1, DECOMPOSED: 1, "tea": 1})
    assert "look like" in refusal(tmp_path, both)

    # Letters of both cases are classes of their own.
    letters = write_folder(tmp_path / "letters", {"A": 1, "a": 1})
    assert prepared(letters, tmp_path / "s").classes == ("A", "a")


def test_a_rejected_class_that_looks_like_one_of_the_space_is_refused(tmp_path):
    source = write_folder(tmp_path / "in", {DECOMPOSED: 2, "tea": 2, "x": 1})
    space = tmp_path / "space.txt"
    space.write_text(f"{CAFE}\ntea\n")

    # x may be rejected; nobody means to reject what shows like a class of the list.
    labels = {"space": str(space), "unknown": "reject"}
    text = refusal(tmp_path, source, labels=labels)
    assert r"the list has 'caf\xe9', the source 'cafe\u0301'" in text


# ---- numbers -------------------------------------------------------------------------------------


def write_labels(kind, root, labels):
    """A source with these labels; returns its path, and its settings."""
    root.mkdir()
    images = [picture(number) for number in range(len(labels))]
    if kind == "path_table":
        lines = ["image,label"]
        for number, text in enumerate(labels):
            (root / f"{number}.png").write_bytes(images[number])
            lines.append(f"{number}.png,{text}")
        table = root / "t.csv"
        table.write_text("\n".join(lines))
        return table, {"kind": kind}

    if kind == "parquet":
        columns = {"image": images, "label": labels}
        pq.write_table(pa.table(columns), root / "a.parquet")
        return root, {"kind": kind}

    # Members of tars: the text of a `cls`, or a field of a `json`.
    settings = {"kind": "webdataset"}
    if kind == "json":
        settings["label"] = "json:class"
    members = {}
    for number, text in enumerate(labels):
        content = json.dumps({"class": text}) if kind == "json" else text
        members[f"{number:03}.png"] = images[number]
        members[f"{number:03}.{kind}"] = content.encode()
    write_tars(root, {"a.tar": members})
    return root, settings


# What int() of Python or a spreadsheet would take for a number, and a text.
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
    place = places.get(kind, "a.tar/013.png")
    assert f"such as {odd!a} of {place!r}" in text


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
    made = prepared(source, tmp_path / "s", source=settings)
    assert list(made.classes) == classes.split()


def test_floats_are_refused_and_a_mark_of_windows_is_no_part_of_a_number(tmp_path):
    floats = [f"{number}.0" for number in range(12)]
    source, settings = write_labels("path_table", tmp_path / "in", floats)
    text = refusal(tmp_path, source, source=settings)
    assert "such as '0.0' of '0.png'" in text

    # Notepad writes a byte order mark before the number.
    source, settings = write_labels("cls", tmp_path / "tars", ["0", "\ufeff1", "2"])
    made = prepared(source, tmp_path / "s", source=settings)
    assert made.classes == ("0", "1", "2")


def test_folders_named_by_numbers_are_sorted_as_text_and_it_is_said(tmp_path):
    source = write_folder(tmp_path / "in", {str(number): 1 for number in range(11)})
    (note,) = prepared(source, tmp_path / "s").notes
    assert "'10' has label 2, and '2' 3" in note

    # 0 to 9 and a name are in the order of the numbers.
    named = write_folder(tmp_path / "b", dict.fromkeys([*"0123456789", "none"], 1))
    assert prepared(named, tmp_path / "s2").notes == ()

    # 3 and 03 would be two classes.
    write_folder(source, {"03": 1})
    assert "such as '03'" in refusal(tmp_path, source)


def test_parquet_files_must_name_their_classes_alike(tmp_path):
    root = tmp_path / "in"
    root.mkdir()

    # As the `datasets` package stores the names of classes.
    feature = {"_type": "ClassLabel", "names": ["cat", "dog"]}
    info = {"info": {"features": {"label": feature}}}
    metadata = {"huggingface": json.dumps(info)}
    images = [picture(1), picture(2)]
    table = pa.table({"image": images, "label": pa.array([0, 1])})

    # One of two files has names: the numbers of the other may mean anything.
    pq.write_table(table.replace_schema_metadata(metadata), root / "a.parquet")
    pq.write_table(table, root / "b.parquet")
    text = refusal(tmp_path, root, source={"kind": "parquet"})
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
    output = tmp_path / "s"
    prepared(root / "t.csv", output, source=kind, images=ANY_BAD)
    entries = pq.read_table(output / "ledger.parquet").to_pylist()
    reasons = Counter(entry["reason"] for entry in entries)
    assert reasons == {None: 7, "duplicate_path": 7}

    def pixel(text):
        """ "a0" -> class a, and the colour of 0.png."""
        class_name, number = text
        image = Image.open(root / f"{number}.png")
        return class_name, str(image.getpixel((0, 0)))

    # One of each file that has one class and one split; the right image, not only its name.
    train = {pixel(text) for text in "a0 b3 a4 a6 b7".split()}
    assert stored(output) == {"train": train, "val": {pixel("a2")}}


def test_one_tar_or_table_under_two_names_is_refused(tmp_path):
    root = tmp_path / "in"
    kind = {"kind": "webdataset"}
    write_tars(root, {"a.tar": {"0.png": picture(0), "0.cls": b"0"}})
    (root / "b.tar").symlink_to("a.tar")
    text = refusal(tmp_path, root, source=kind)
    assert "one file has two names: 'a.tar' and 'b.tar'" in text

    # Also where each split has one of the names.
    splits = kind | {"splits": {"train": "a.tar", "val": "b.tar"}}
    text = refusal(tmp_path, root, source=splits)
    assert "two splits share files" in text


def test_equal_bytes_in_two_splits_are_counted_for_every_source(tmp_path):
    images = {"train/a": 3, "val/a": 2, "test/a": 2}
    root = write_folder(tmp_path / "in", images)
    for split in ("val", "test"):
        shutil.copy(root / "train/a/1.png", root / split / "a/copy.png")

    # Each pair of splits once.
    made = prepared(root, tmp_path / "s")
    notes = [note for note in made.notes if "bytes" in note]
    assert notes == [
        "1 images of test have the bytes of images of val",
        "1 images of test have the bytes of images of train",
        "1 images of val have the bytes of images of train",
    ]

    # An index of tars that others made says the same.
    members = {
        "0.png": picture(1),
        "0.cls": b"0",
        "1.png": picture(2),
        "1.cls": b"0",
    }
    write_tars(tmp_path / "tars", {"train-0.tar": members, "val-0.tar": members})
    text = index(tmp_path / "tars", tmp_path / "index")
    assert "note: 2 images of val have the bytes of images of train" in text


# ---- keys, cuts ----------------------------------------------------------------------------------


def sorted_tars(root):
    """Six tars of one class each, in which the same keys begin anew."""
    for label in range(6):
        members = {}
        for number in range(20):
            key = f"{number:03}"
            members[f"{key}.png"] = picture(100 * label + number)
            members[f"{key}.cls"] = str(label).encode()
        write_tars(root, {f"{label}.tar": members})
    return root


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sorted")
    index(sorted_tars(folder / "tars"), folder / "index")
    return folder / "index"


def opened(path, **settings) -> TrainingSet:
    data = DataSettings(
        path=str(path),
        global_batch=2,
        **settings,
    )
    return open_training_set(data, seed=0)


def test_keys_that_tars_share_get_the_name_of_their_tar(indexed, tmp_path):
    split = read_split(indexed, split="train")
    keys = sample_keys(split, range(split.num_samples))
    assert len(set(keys)) == 6 * 20
    assert keys[25] == "1/005"

    # The ledger and the list for duplicates find the members by the same names.
    rows = pq.read_table(indexed / "ledger.parquet").to_pylist()
    paths = pa.concat_tables(list_samples(indexed))["path"].to_pylist()
    assert paths == [f"{key.replace('/', '.tar/')}.png" for key in keys]
    assert {row["key"] for row in rows} == set(keys)

    # A list takes the samples that it names, by the bytes in the tars.
    listing = tmp_path / "keys.txt"
    listing.write_text("2/003\n5/019\n")
    chosen = opened(indexed, only_keys=str(listing)).parts[0]
    for sample, seed in enumerate((203, 519)):
        assert chosen.read(sample) == picture(seed)


def test_unique_keys_stay_as_they_are(tmp_path):
    tars = {}
    for number in range(2):
        # One key that the other tar lacks, and one that both have.
        tars[f"{number}.tar"] = {
            f"k{number}.png": picture(number),
            f"k{number}.cls": b"0",
            "same.png": picture(8 + number),
            "same.cls": b"0",
        }
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
    folder = tmp_path / "index"
    manifest = read_manifest(folder)
    assert check_folder(folder, manifest=manifest, num_workers=1) == []
    for split in ("train", "val"):
        index_of_split = read_split(folder, split=split)
        assert sample_keys(index_of_split, [0]) == ["0"]
    num = store(list_samples(folder), tmp_path / "list")
    with refused("samples of several splits have the same keys"):
        check_keys(folder, [tmp_path / "list"], num=num)


def test_a_list_refuses_an_index_whose_keys_repeat(indexed, tmp_path):
    """As earlier versions made them."""
    old = tmp_path / "old"
    old.mkdir()
    index_path = old / "index.parquet"
    table = pq.read_table(indexed / "index.parquet")
    keys = table["key"].to_pylist()
    short = pa.array([key.partition("/")[2] for key in keys])
    pq.write_table(table.set_column(0, "key", short), index_path)

    # All else of the folder fits, so that only the keys are wrong.
    for name in ("tars-train.arrow", "positions-train.bin"):
        shutil.copy(indexed / name, old)
    manifest = json.loads((indexed / "manifest.json").read_text())
    manifest["index_bytes"] = index_path.stat().st_size
    manifest["shards_root"] = str(indexed.parent / "tars")
    (old / "manifest.json").write_text(json.dumps(manifest))

    listing = tmp_path / "keys.txt"
    listing.write_text("003\n")
    split = read_split(old, split="train")
    with refused("share keys, such as '003'.*(.|\n)*index again"):
        choose_by_key(split, str(listing))


def test_parts_of_sorted_tars_are_drawn_from_all_of_them(indexed):
    for settings in ({"first_percent": 30.0}, {"dev_percent": 30.0}):
        training_set = opened(indexed, **settings)
        (part,) = training_set.parts
        assert set(part.label.tolist()) == set(range(6))

        # Drawn the same way at every start, and read tar after tar.
        again = opened(indexed, **settings)
        assert training_set.fingerprint == again.fingerprint
        assert np.all(np.diff(part.stored.astype(int)) > 0)

    # 30 % of 120 are held out, from every tar; the two parts are the whole.
    held_out = training_set.dev
    assert set(held_out.label.tolist()) == set(range(6))
    keys = sample_keys(part, range(part.num_samples))
    held_keys = sample_keys(held_out, range(held_out.num_samples))
    assert len(keys) == 84
    assert len(held_keys) == 36
    assert len({*keys, *held_keys}) == 120

    # Half of what the cut leaves for training.
    both = opened(indexed, first_percent=50.0, dev_percent=50.0)
    assert both.parts[0].num_samples == 30
    assert both.dev is not None


def test_an_index_is_checked_as_a_whole_too(tmp_path):
    tars = {}
    for number, (split, name) in enumerate((("train", b"cat"), ("val", b"Cat"))):
        tars[f"{split}-0.tar"] = {"0.png": picture(number), "0.cls": name}
    write_tars(tmp_path / "tars", tars)
    done = run_index(tmp_path / "tars", tmp_path / "index")

    assert done.returncode == 2
    assert "'Cat' has 1, such as 'val-0.tar/0.png'" in done.stderr
    assert not (tmp_path / "index").exists()


# ---- another source ------------------------------------------------------------------------------


def test_an_output_of_another_source_is_refused(tmp_path, monkeypatch):
    one = tmp_path / "one"
    two = tmp_path / "two"
    link = tmp_path / "link"
    for root, num in ((one, 2), (two, 3)):
        write_folder(root, {"a": num, "b": num})
    link.symlink_to("one")
    output = tmp_path / "s"
    prepared(one, output)

    # Other ways to write the same folder.
    monkeypatch.chdir(tmp_path)
    for same in ("one", "./two/../one/", str(one), "link"):
        work = WorkFolder(run_of(Path(same), output))
        assert find_existing(work) is not None

    # An output that is not finished.
    unfinished = tmp_path / "t"
    prepare_here(run_of(one, unfinished), until="finish")
    with refused("begun with other settings: path"):
        prepare_here(run_of(two, unfinished))

    # A link that leads elsewhere now is another source.
    link.unlink()
    link.symlink_to("two")
    for other in ("two", "link", "gone"):
        work = WorkFolder(run_of(Path(other), output))
        with refused(f"made from {tmp_path}/one; source.path is {tmp_path}/"):
            find_existing(work)


# ---- folders without labels ----------------------------------------------------------------------


def test_unlabelled_folders_are_listed_in_parts_with_the_same_result(tmp_path):
    names = [f"{outer}/{inner}" for outer in range(9) for inner in range(9)]
    root = write_folder(tmp_path / "in", dict.fromkeys([".", *names, "0/0/deep"], 1))
    written(root / ".hidden/x.png", picture(1))
    (root / "3/link").symlink_to("../4")
    run = run_of(root, tmp_path / "s", labels={"values": "none"}, images=ANY_BAD)

    work = prepare_here(run, until="list inputs")

    # About one part a folder, each of them once.
    boxes = read_containers(work)
    assert len(boxes) > 9 * 9
    assert len(set(boxes)) == len(boxes)

    # The walk of the standard library tells which files there are; it does not follow links.
    prepare_here(run)
    rows = ledger(tmp_path / "s")
    expected = {"3/link"}
    for folder, _, files in os.walk(root):
        for name in files:
            path = os.path.join(folder, name)
            expected.add(os.path.relpath(path, root))
    assert rows.keys() == expected
    assert rows["3/link"]["reason"] == "linked_folder"
    assert rows[".hidden/x.png"]["reason"] == "hidden"

    # One image in each of the 81 folders, at the top, and in the deep one.
    with tarfile.open(tmp_path / "s/train-000000.tar") as tar:
        keys = {name.removesuffix(".png") for name in tar.getnames()}
    assert "train-0" in keys
    assert len(keys) == 81 + 2
