"""Files under configs/ load and say what they are; every setting is described; locked versions and
site files of containers agree with the rest."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.settings_page import ALL_RUN_TYPES, PAGE, renewed
from tests.contract.tree import ROOT
from tests.support.tables import every
from tests.support.waiting import run_python
from vitscale.config.command_line import settings_reference
from vitscale.config.errors import UserErrors
from vitscale.config.loader import load_run, load_run_file, run_to_yaml

CONFIGS = sorted(
    path for path in (ROOT / "configs").rglob("*") if path.suffix in (".yaml", ".yml")
)
# Weights that stand for those that the user chooses.
INIT = f"init={ROOT}/tests/golden/weights/google/model.npz"
CARD = ("What", "Command", "Hardware", "Expect", "Source")


def _name(path):
    return str(path.relative_to(ROOT))


def test_configs_load_and_are_read_back(tmp_path):
    resolved = tmp_path / "config.yaml"
    wrong = {}
    for path in CONFIGS:
        try:
            # This one takes its model from weights, which have to be there.
            words = [INIT] if path.stem == "own" else []
            loaded = load_run(ALL_RUN_TYPES, path, overrides=words)
        except UserErrors as error:
            wrong[_name(path)] = str(error)
            continue

        # Each rank reads the file that the launcher has written.
        resolved.write_text(run_to_yaml(loaded.run))
        if load_run_file(ALL_RUN_TYPES, resolved) != loaded.run:
            wrong[_name(path)] = "differs when written and read back"
        if ("stage",) not in loaded.places:
            wrong[_name(path)] = "neither the file nor its base names the stage"
    assert not wrong


def test_configs_begin_with_a_run_card():
    """The card has all lines of CARD, and its command names it."""
    wrong = {}
    for path in CONFIGS:
        # The card is the comment on top.
        card = {}
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                break
            label, _, text = line[2:].partition(":")
            card[label] = text.strip()
        missing = [label for label in CARD if not card.get(label)]

        # A copied card would start another run than its own.
        name = _name(path).removeprefix("configs/").removesuffix(".yaml")
        if missing or name not in card["Command"].split():
            wrong[_name(path)] = missing or "the command names another one"
    assert not wrong


def test_every_setting_and_group_has_a_docstring():
    # The docstrings are the reference that --help and the documentation print.
    entries = []
    for group in settings_reference(ALL_RUN_TYPES).values():
        entries += group
    assert len(entries) > 150
    assert not [entry.key for entry in entries if not entry.text]


def test_configuration_page_is_up_to_date():
    page = PAGE.read_text()
    assert renewed(page) == page, "renew it: python docs/settings_page.py"


# ---- files beside the code -----------------------------------------------------------------------

VERSION = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def _versions(name):
    pairs = VERSION.findall((ROOT / name).read_text())
    return {canonicalize_name(package): version for package, version in pairs}


def test_the_lock_has_the_versions_last_tested():
    locked = _versions("requirements.lock")
    tested = _versions("constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {
        canonicalize_name(Requirement(text).name) for text in project["dependencies"]
    }
    assert needed <= set(locked), "renew it: make lock"

    # Each of the two files has packages that the other one leaves out.
    for name in locked.keys() & tested.keys():
        assert locked[name] == tested[name], name


@every(name="apptainer, pyxis")
def test_the_site_files_of_containers_are_valid(name, monkeypatch):
    # The line of the site file is shown as the place of its values.
    site = f"containers/{name}.yaml"
    monkeypatch.setenv("VITSCALE_SITE", site)
    words = ("launch/slurm.py", "--config", "configs/vit_h14.yaml", "--print-config")
    shown = run_python(*words, cwd=ROOT, check=True).stdout
    assert f"{site}:3" in shown
    assert "/images/vitscale.s" in shown


def test_the_docs_show_the_site_file_of_apptainer():
    # All but its first line, which is a comment.
    _, _, settings = (ROOT / "containers/apptainer.yaml").read_text().partition("\n")
    assert settings in (ROOT / "docs/containers.md").read_text()
