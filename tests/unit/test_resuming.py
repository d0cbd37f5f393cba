"""Which changes are said at a resume."""

from __future__ import annotations

from vitscale.resuming import CHANGES_SHOWN, RECORD, changes


def test_every_difference_is_one_line_and_equal_records_are_silent() -> None:
    saved = {RECORD: {"config optim.lr": "0.001", "torch": "2.11.0", "gone": "1"}}
    now = {"config optim.lr": "0.0005", "torch": "2.11.0", "config new": "2"}
    assert list(changes(saved, now)) == [
        "changed since the checkpoint:\n    new: not set -> 2\n    optim.lr: 0.001 -> 0.0005\n"
        "    gone: 1 -> not set"
    ]
    assert list(changes({RECORD: now}, now)) == []


def test_checkpoint_without_a_record_says_nothing() -> None:
    assert list(changes({}, {"torch": "2.11.0"})) == []


def test_long_lists_end() -> None:
    saved = {RECORD: {f"config {number:03d}": "a" for number in range(CHANGES_SHOWN + 5)}}
    (text,) = changes(saved, {})
    assert text.splitlines()[-1] == "    ... 5 more" and len(text.splitlines()) == CHANGES_SHOWN + 2
