import pickle

import yaml

from data_prep.steps.labels import Labels, load_labels
from tests.support.tables import every, refused, rows
from vitscale.data.label_spaces import LABEL_SPACES, known_space
from vitscale.runs.data_prep import LabelSettings

# Google's list of 21k has two more than the public one, and the winter 2021 release fewer.
# How many classes each has, the first and the last of them.
SIZES = """
- [name, num, first, last]
- [imagenet_1k, 1000, n01440764, n15075141]
- [imagenet_12k, 11821, n00005787, n15102894]
- [imagenet_21k_goog, 21843, n00004475, n15102894]
- [imagenet_22k, 21841, n00004475, n15102894]
- [imagenet_21k_p, 11221, n00005787, n15102894]
- [imagenet_21k_p_winter21, 10450, n00005787, n15102894]
"""


def labels(**settings) -> Labels:
    return load_labels(LabelSettings.model_validate(settings))


def written(path, text):
    path.write_bytes(text.encode())
    return str(path)


@rows(SIZES)
def test_known_spaces_have_their_published_sizes(name, num, first, last):
    classes = known_space(name)
    assert len(classes) == num
    assert classes[0] == first
    assert classes[-1] == last
    assert len(set(classes)) == num


def test_every_known_space_has_a_published_size():
    assert {row[0] for row in yaml.safe_load(SIZES)[1:]} == {*LABEL_SPACES}


def test_numeric_labels_keep_their_numbers():
    counts = {"10": 1, "2": 5, "0": 1}
    known = labels()

    # Numbers that no image has stay free: class 10 keeps label 10.
    numbers = tuple(map(str, range(11)))
    assert known.label_map(counts, keep_numbers=True) == numbers
    assert known.label_map({}, keep_numbers=True) == ()

    # As names they are sorted as text, like all names.
    assert known.label_map(counts) == ("0", "10", "2")
    assert known.label_map({"a": 1, "10": 9, "2": 9}) == ("10", "2", "a")


def test_labels_are_the_sorted_classes_or_all_of_a_space():
    own = labels()
    assert own.class_of("dog") == "dog"
    assert own.class_of(None) is None

    # By code points, so upper case comes first in every locale.
    counts = {"dog": 1, "Eel": 2, "cat": 3}
    assert own.label_map(counts) == ("Eel", "cat", "dog")

    # n00004475 is a class of ImageNet-21k only.
    known = labels(space="imagenet_1k")
    assert known.class_of("n01440764") == "n01440764"
    assert known.class_of("n00004475") is None
    assert known.label_map({"n01440764": 3}) == known_space("imagenet_1k")


# What int() of Python takes, an Arabic digit included, and what it does not.
@every(value=["-1", "1000", "", " 1", "1_0", "٣", "1.0", "9" * 5000])
def test_invalid_positions_have_no_class(value):
    known = labels(space="imagenet_1k", values="index")
    assert known.class_of(value) is None


def test_maps_apply_before_the_space(tmp_path):
    # A byte order mark, and a name with a comma.
    by_class = '\ufefftench,n01440764\n"a, b",n01443537\nx,nowhere\n'
    known = labels(space="imagenet_1k", map=written(tmp_path / "a.csv", by_class))

    assert known.class_of("tench") == "n01440764"
    assert known.class_of("a, b") == "n01443537"
    assert known.class_of("x") is None

    # The name of the space is no source class once there is a map.
    assert known.class_of("n01440764") is None

    # Positions instead of names; workers get the labels by pickle.
    to_index = written(tmp_path / "b.tsv", "tench\t0\ncat\t-1\n")
    known = labels(space="imagenet_1k", map=to_index, values="index")
    assert known.class_of("tench") == "n01440764"
    assert known.class_of("cat") is None
    assert pickle.loads(pickle.dumps(known)).class_of("tench") == "n01440764"


# Each with its line: too few cells, a second mapping, an open quote; then the file as a whole.
@rows(r"""
- [key, name, text, message]
- [map, a.csv, "a,b\nc\n", 'a.csv:2: 1 values instead of 2.*\n.*source class, class']
- [map, a.csv, "a,b\n\na,c\n", "a.csv:3: 'a' is there already"]
- [map, a.csv, "a,\"b\nc", "a.csv:.*unexpected end of data"]
- [map, a.tsv, "a,b\n", "a.tsv:1: 1 values instead of 2"]
- [map, a.csv, "", is empty]
- [map, a.csv, null, No such file]
- [map, a.xls, "a,b\n", neither .csv nor .tsv]
- [space, a.txt, "a\n\nb\n", ":2: is empty"]
- [space, a.txt, "a\nb\na\n", ":3: 'a' is already in line 1"]
- [space, a.txt, "", is empty]
""")
def test_malformed_files_are_refused_with_their_line(
    key, name, text, message, tmp_path
):
    if text is not None:
        written(tmp_path / name, text)
    with refused(message):
        labels(**{key: str(tmp_path / name)})


def test_unknown_classes_are_counted():
    known = labels(space="imagenet_1k")

    # 40 classes with 7 images each, and one that has the most.
    unknown = dict.fromkeys(known_space("imagenet_22k")[:40], 7)
    unknown["n02000000"] = 9
    assert not any(map(known.class_of, unknown))
    message = r"41 classes of the source \(289 images\) are not among the 1,000 of imagenet_1k"
    with refused(message) as caught:
        known.check(unknown, found={"n01440764": 5})
    text = str(caught.value)
    assert "; 5 images match; " in text
    assert "'n02000000' (9 images)" in text

    # A source without unknown classes.
    known.check({}, found={})


def test_unknown_classes_may_be_rejected_but_not_all():
    known = labels(space="imagenet_1k", unknown="reject")
    known.check({"cat": 3}, found={"n01440764": 5})

    # Nothing would be left: the list is the wrong one, so rejecting is no advice.
    with refused("1 classes of the source .3 images.*; 0 images") as caught:
        known.check({"cat": 3}, found={})
    assert "labels.unknown=reject" not in str(caught.value)
    assert "labels.space=null" in str(caught.value)


def test_errors_distinguish_positions_map_and_space(tmp_path):
    positions = labels(space="imagenet_1k", values="index")
    with refused(r"not among the 1,000 of imagenet_1k.*'11000' \(2 images"):
        positions.check({"11000": 2}, found={})

    # dog is not in the map; cat is, but leads to no class.
    path = written(tmp_path / "a.csv", "tench,n01440764\ncat,pussy\n")
    known = labels(space="imagenet_1k", map=path)
    with refused(r"labels.map: .* are not among the 2 of .*a.csv"):
        known.check({"dog": 1}, found={})
    with refused(r"labels.space: .*mapped to 'pussy'"):
        known.check({"cat": 1}, found={})
