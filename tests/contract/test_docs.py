"""Hold the documentation to the tree: the paths, tests, links and messages that it names exist."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from tests.contract.tree import ROOT, module_files, parsed, python_files

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CARDS = [ROOT / "Makefile", *sorted((ROOT / "configs").rglob("*.yaml"))]
URL = re.compile(r"\w+://\S+")
# Braces stand for several files; only the folder before them is checked.
PATH = re.compile(r"(?<![\w./~-])(?:[\w.*-]+/)+[\w.*-]*+(?!\{)")
FILE_NAME = re.compile(r"(?<![\w./~*-])\w+\.(?:py|c|h|toml|svg|j2)\b")
# As in the recipes: `NAME` in `PATH`, or `PATH`: one line in `NAME`.
NAME_IN_FILE = re.compile(r"`(\w+)`\s+in\s+`([\w./]+\.py)`")
FILE_OF_NAME = re.compile(r"`([\w./]+\.py)`: one (?:line|entry|function and one line) in\s+`(\w+)`")
SUFFIXES = (".py", ".c", ".h", ".svg", ".j2")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Files of other projects, cited as sources, and names that Python code of a reader would have.
EXTERNAL = {
    *("jpeglib.h", "models_vit.py", "models_v2.py", "utils.py", "train_vit_g.py", "optax.py"),
    *("bit_hyperrule.py", "configs/vit_i21k.py", "configs/vit_s16_i1k.py", "configs/vit_i1k.py"),
    *("models_resnet.py", "configs/bit_i21k.py", "configs/bit_i1k.py", "models/bit_paper.py"),
    "bit_pytorch/models.py",
    *("configs/models.py", "configs/common.py", "configs/augreg.py", "models/vit.py"),
    *("input_pipeline.py", "pp/ops_image.py", "transforms_factory.py", "datasets.py"),
    *("models_mae.py", "util/pos_embed.py", "util/lars.py"),
    *("eval/knn.py", "eval/linear.py", "evaluators/fewshot_lsr.py"),
}
TEST_NAME = re.compile(r"\btest_(?!NAME)\w+")
# A cell of the tables of messages: the first column, in backticks.
MESSAGE = re.compile(r"^\| `([^`]+)`", re.MULTILINE)
FILLED_IN = re.compile(r"\b[A-Z]+\b(?! out of memory)|\.\.\.")
MIN_PART = 12
FROM_ELSEWHERE = {"CUDA out of memory"}


def _tracked() -> set[str]:
    """Every file and folder of the tree that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {Path(name) for name in names.splitlines() if (ROOT / name).exists()}
    return {str(path) for file in files for path in (file, *file.parents)}


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _is_known(path: str, tracked: set[str]) -> bool:
    """Paths may be relative to any folder; `*` stands for part of a name, NAME for a new file."""
    if "NAME" in path:
        path = "/".join(path.split("/")[:2])
    if "*" in path:
        return any(ROOT.glob(path))
    return path in tracked or any(known.endswith(f"/{path}") for known in tracked)


def test_paths_named_in_docs_exist() -> None:
    tracked = _tracked()
    folders = {path for path in tracked if (ROOT / path).is_dir() and "/" not in path}
    names = {Path(path).name for path in tracked} | EXTERNAL
    wrong = []
    for page in PAGES + CARDS:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            where, text = f"{page.relative_to(ROOT)}:{number}", URL.sub("", line)
            paths = [path.rstrip("/.") for path in PATH.findall(text)]
            wrong += [
                f"{where}: {path}"
                for path in paths
                if (path.split("/")[0] in folders or path.endswith(SUFFIXES))
                and path not in EXTERNAL
                and not _is_known(path, tracked)
            ]
            wrong += [f"{where}: {name}" for name in FILE_NAME.findall(text) if name not in names]
    assert not wrong


def test_names_are_defined_where_docs_say() -> None:
    said = [
        (page.name, name, path)
        for page in PAGES
        for name, path in (
            *NAME_IN_FILE.findall(page.read_text()),
            *(found[::-1] for found in FILE_OF_NAME.findall(page.read_text())),
        )
        if (ROOT / path).is_file()
    ]
    assert len(said) > 10
    assert not [each for each in said if not _is_defined(each[1], ROOT / each[2])]


def _is_defined(name: str, path: Path) -> bool:
    pattern = rf"^(?:\s*(?:def|class) {name}\b|{name}(?:: .*)? = )"
    return re.search(pattern, path.read_text(), flags=re.MULTILINE) is not None


def test_links_in_docs_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong


def test_tests_named_in_docs_exist() -> None:
    tests = [path for path in python_files() if path.is_relative_to(ROOT / "tests")]
    names = {path.stem for path in tests} | {
        node.name
        for path in tests
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
    }
    wrong = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in TEST_NAME.findall(page.read_text())
        if not any(known.startswith(name) for known in names)
    }
    assert not wrong


def _texts() -> list[str]:
    """Every string of the product, with a NUL for each value that it fills in."""
    found = []
    for path in module_files().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_in_troubleshooting_exist() -> None:
    """A part of each message that is not filled in is a string of the product."""
    texts = "\n".join(_texts())
    messages = MESSAGE.findall((ROOT / "docs/troubleshooting.md").read_text())
    assert messages
    wrong = []
    for message in set(messages) - FROM_ELSEWHERE:
        parts = [part.strip(" :;,") for part in FILLED_IN.split(message)]
        if not any(part in texts for part in parts if len(part) >= MIN_PART):
            wrong.append(message)
    assert not wrong
