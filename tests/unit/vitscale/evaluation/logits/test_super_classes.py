"""Super-classes come from WordNet's file of nouns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine.given_outputs import given_outputs
from vitscale.config.errors import UserError
from vitscale.distributed.world import World
from vitscale.evaluation.logits.super_classes import SuperClasses, SuperClassesSettings
from vitscale.evaluation.logits.wordnet import ancestor, path_to, read_nouns

# entity > animal > (fish > (eel, tench), dog), and entity > tool. `~` is a hyponym, `+` a verb.
NOUNS = """\
  1 This line is of the licence.
00000001 03 n 01 entity 0 002 ~ 00000002 n 0000 ~ 00000007 n 0000 | a thing
00000002 05 n 0a animal 0 beast 0 brute 0 a 0 b 0 c 0 d 0 e 0 f 0 g 0 001 @ 00000001 n 0000 | alive
00000003 05 n 01 fish 0 002 + 01140794 v 0101 @ 00000002 n 0000 | swims | well
00000004 05 n 01 eel 0 001 @ 00000003 n 0000 | long
00000005 05 n 01 tench 0 002 @ 00000003 n 0000 @ 00000007 n 0000 | the first hypernym counts
00000006 05 n 01 dog 0 001 @ 00000002 n 0000 | barks
00000007 06 n 01 tool 0 001 @i 00000001 n 0000 | used
"""
CLASSES = ("n00000004", "n00000005", "n00000006", "n00000007")
TABLE = """\
label,class,images,correct,top1
0,n00000003 fish,2,2,1.000000
1,n00000006 dog,2,1,0.500000
2,n00000007 tool,0,0,
"""


@pytest.fixture
def nouns(tmp_path: Path) -> Path:
    (tmp_path / "data.noun").write_text(NOUNS)
    return tmp_path / "data.noun"


def test_paths_follow_the_first_hypernym(nouns: Path) -> None:
    found = read_nouns(nouns)
    assert path_to("n00000005", found) == ["n00000001", "n00000002", "n00000003", "n00000005"]
    at = [ancestor("n00000004", found, depth=depth, among=()) for depth in (0, 1, 2, 3, 9)]
    assert at == ["n00000001", "n00000002", "n00000003", "n00000004", "n00000004"]
    near = [ancestor("n00000004", found, depth=9, among=(each,)) for each in (at[1], CLASSES[3])]
    assert near == ["n00000002", "n00000004"]


def test_metrics_equal_a_case_by_hand(world: World, nouns: Path, tmp_path: Path) -> None:
    settings = SuperClassesSettings(wordnet=str(nouns), depth=2)
    logits = torch.eye(4)[[1, 0, 2, 0]]  # an eel taken for a tench is still a fish
    subject = given_outputs(world, logits, [0, 0, 2, 2], classes=CLASSES, folder=tmp_path)
    evaluation = SuperClasses(settings)
    evaluation.check(subject)
    assert evaluation.metrics(subject) == {"super_top1": 0.75, "super_mean_top1": 0.75}
    assert (tmp_path / "super_classes.csv").read_text() == TABLE


def test_bad_input_is_one_error(world: World, nouns: Path, tmp_path: Path) -> None:
    subject = given_outputs(world, torch.zeros(1, 4), [0], classes=CLASSES)
    with pytest.raises(UserError, match="(?s)No such file.*wordnet-base"):
        SuperClasses(SuperClassesSettings(wordnet=str(tmp_path / "none"))).check(subject)
    (tmp_path / "other").write_text("Hello\n")
    with pytest.raises(UserError, match="line 1 is not one of WordNet"):
        SuperClasses(SuperClassesSettings(wordnet=str(tmp_path / "other"))).check(subject)
    settings = SuperClassesSettings(wordnet=str(nouns))
    digits = given_outputs(world, torch.zeros(1, 4), [0], classes=("0", *CLASSES[:3]))
    with pytest.raises(UserError, match="1 of 4 names are no nouns.*'0'"):
        SuperClasses(settings).check(digits)
