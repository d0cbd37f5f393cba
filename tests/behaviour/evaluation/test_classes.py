"""A model's outputs meet the classes of a data set by name and by what names mean."""

import unicodedata

import numpy as np
from timm.data import ImageNetInfo
from torchvision.models._meta import _IMAGENET_CATEGORIES as TORCHVISION

from tests.support.tables import every, refused, rows
from vitscale.data.label_spaces import known_space
from vitscale.evaluation.classes import column_of_each_class

# timm's own reader of the same files.
INFO = ImageNetInfo("imagenet-1k")
SYNSETS = tuple(INFO.label_names())
WORDS = tuple(INFO.index_to_description(label) for label in range(1000))
DETAILED = tuple(
    INFO.index_to_description(label, detailed=True) for label in range(1000)
)
NUMBERS = tuple(sorted(map(str, range(1000))))  # as text, as folders are sorted
SHUFFLED = np.random.default_rng(0).permutation(1000).tolist()
# Folders of Imagenette, by what they show.
IMAGENETTE = (
    "English springer",
    "French horn",
    "cassette player",
    "church",
    "tench",
)
IMAGENETTE_IDS = (
    "n02102040",
    "n03394916",
    "n02979186",
    "n03028079",
    "n01440764",
)


def in_order(names, order):
    return tuple(names[index] for index in order)


@every(model=[SYNSETS, WORDS, DETAILED, TORCHVISION, None])
@every(data=[SYNSETS, WORDS, TORCHVISION])
def test_imagenets_classes_meet_however_they_are_written(model, data):
    """Words alone do not tell: two classes are called `crane`, labels 134 and 517."""
    matched = column_of_each_class(model, data, num_outputs=1000)
    assert matched.columns == tuple(range(1000))

    # timm's lists of ids say the same of the releases of 21,843 classes. One of ImageNet-1k's,
    # the teddy bear, is not among them.
    larger = known_space("imagenet_21k_goog")
    matched = column_of_each_class(None, data, num_outputs=len(larger))
    expected = [larger.index(synset) if synset in larger else -1 for synset in SYNSETS]
    assert list(matched.columns) == expected
    assert expected.count(-1) == 1


@every(model=[SYNSETS, WORDS, TORCHVISION, None])
def test_ids_in_any_order_and_number_find_their_outputs(model):
    # All classes in another order, and a few of them, as a data set of ten classes has.
    for order in (SHUFFLED, SHUFFLED[:10]):
        data = in_order(SYNSETS, order)
        matched = column_of_each_class(model, data, num_outputs=1000)
        assert list(matched.columns) == order
        assert matched.how.startswith("matched by")


@every(model=[SYNSETS, WORDS, None])
def test_numbers_are_positions_in_imagenets_list(model):
    # Folders are sorted as text, "10" before "2", so label and number differ.
    matched = column_of_each_class(model, NUMBERS, num_outputs=1000)
    assert list(matched.columns) == [int(name) for name in NUMBERS]


def test_words_of_a_few_classes_find_their_outputs():
    expected = [SYNSETS.index(synset) for synset in IMAGENETTE_IDS]
    for model in (SYNSETS, WORDS, None):
        matched = column_of_each_class(model, IMAGENETTE, num_outputs=1000)
        assert list(matched.columns) == expected

    # Ids on one side and words on the other meet as well, for a head of five classes.
    matched = column_of_each_class(IMAGENETTE, IMAGENETTE_IDS[::-1], num_outputs=5)
    assert matched.columns == (4, 3, 2, 1, 0)
    matched = column_of_each_class(IMAGENETTE_IDS, IMAGENETTE[1:4], num_outputs=5)
    assert matched.columns == (1, 2, 3)


# Outputs of the model, classes of the data, the column of each, and how they are matched.
@rows("""
- [model, data, columns, how]
- [[cat, dog], [cat, dog], [0, 1], ""]
- [[cat, dog], [dog, cat], [1, 0], matched by name]
- [[cat, dog, eel], [eel], [2], matched by name]
- [[cat, dog], [cat, zander], [0, -1], matched by name]
# Numbers that both sides have are names like others.
- [["1", "10", "2"], ["10", "2", "1"], [1, 2, 0], matched by name]
- [["7", cat], [cat, "7"], [1, 0], matched by name]
- [null, ["0", "1", "2"], [0, 1, 2], "matched by position, since neither side has names"]
- [null, ["0", "2", "1"], [0, 2, 1], "matched by position, since neither side has names"]
# Two outputs with one name are none that a class could be matched with.
- [[cat, cat, dog], [dog, cat], [2, -1], matched by name]
- [[A, a], [a, A], [1, 0], matched by name]
- [[kit_fox, xyz], [kit fox, xyz], [0, 1], matched by WordNet's ids and words]
# Position says nothing where one side has names.
- [[cat, dog], ["0", "1"], [-1, -1], matched by name]
- [["0", "1"], [cat, dog], [-1, -1], matched by name]
""")
def test_other_classes_meet_by_name(model, data, columns, how):
    matched = column_of_each_class(model, data, num_outputs=len(model or data))
    assert list(matched.columns) == columns
    assert matched.how == how


def test_both_spellings_of_an_accent_are_one_name():
    names = ("café", "tea")
    # As macOS writes the names of folders.
    data = tuple(unicodedata.normalize("NFD", name) for name in names)
    assert data[0] != names[0]

    matched = column_of_each_class(names, data, num_outputs=2)
    assert matched.columns == (0, 1)


def test_classes_that_only_one_side_names_are_refused():
    """Position says nothing there: MNIST's digits are not ImageNet's first ten classes."""
    digits = tuple(map(str, range(10)))
    # Names that no release of ImageNet has, and fewer numbers than the model has outputs.
    for data, num_outputs in (
        (("cat", "dog"), 2),
        (digits, 1000),
        (("cat", "dog"), 1000),
    ):
        with refused("outputs are unknown"):
            column_of_each_class(None, data, num_outputs=num_outputs)


def test_names_of_several_classes_are_names_of_none():
    """Which crane it is nothing tells, nor which of two folders the tenches are in."""
    for data in (("crane", "goldfish"), ("tench", "goldfish", "Tinca tinca")):
        matched = column_of_each_class(SYNSETS, data, num_outputs=1000)

        # The goldfish is found all the same: one doubtful name does not spoil the others.
        assert matched.columns[0] == -1
        assert matched.columns[1] == 1
        assert matched.lacking(data) == [name for name in data if name != "goldfish"]
