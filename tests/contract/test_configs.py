"""Files under configs/ load and say what they are; every setting is described."""

from __future__ import annotations

from pathlib import Path

from launch.planning.configuration import ALL_RUN_TYPES, PAGE, renewed
from tests.contract.tree import ROOT
from vitscale.config.command_line import settings_reference
from vitscale.config.errors import UserErrors
from vitscale.config.loader import load_run, load_run_file, run_to_yaml

CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*") if p.suffix in (".yaml", ".yml"))
CARD = ("What", "Command", "Hardware", "Expect", "Source")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_configs_load_and_are_read_back(tmp_path: Path) -> None:
    resolved = tmp_path / "config.yaml"
    wrong = {}
    for path in CONFIGS:
        try:
            loaded = load_run(ALL_RUN_TYPES, path)
        except UserErrors as error:
            wrong[_name(path)] = str(error)
            continue
        resolved.write_text(run_to_yaml(loaded.run))
        if load_run_file(ALL_RUN_TYPES, resolved) != loaded.run:
            wrong[_name(path)] = "differs when written and read back"
        if ("stage",) not in loaded.places:
            wrong[_name(path)] = "neither the file nor its base names the stage"
    assert not wrong


def test_configs_begin_with_a_run_card() -> None:
    """The card has all lines of CARD, and its command names it."""
    wrong = {}
    for path in CONFIGS:
        header = []
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                break
            header.append(line)
        cards = {line[2:].partition(":")[0]: line.partition(":")[2].strip() for line in header}
        missing = [label for label in CARD if not cards.get(label)]
        name = _name(path).removeprefix("configs/").removesuffix(".yaml")
        if missing or name not in cards["Command"].split():
            wrong[_name(path)] = missing or "the command names another one"
    assert not wrong


def test_every_setting_and_group_has_a_docstring() -> None:
    entries = [each for group in settings_reference(ALL_RUN_TYPES).values() for each in group]
    assert len(entries) > 150
    assert not [entry.key for entry in entries if not entry.text]


def test_configuration_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert renewed(page) == page, "renew it: python -m launch.planning.configuration"
