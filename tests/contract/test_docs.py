"""Hold the documentation to the tree: the paths, links and metrics that it names exist."""

import ast
import re
import subprocess
from itertools import pairwise
from pathlib import Path

from tests.contract.tree import ROOT, parsed

LOGGING = (
    "vitscale/data",
    "vitscale/evaluation",
    "vitscale/objectives",
    "vitscale/training",
    "pretrain",
    "finetune",
)
# The last one has those of objectives.
METRIC_PAGES = ("tracking", "evaluation", "configuration")
METRIC = re.compile(r"(train|val|vitals)/[a-z0-9_]*[a-z0-9]")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CARDS = [ROOT / "Makefile", *sorted((ROOT / "configs").rglob("*.yaml"))]
URL = re.compile(r"\w+://\S+")
# Braces stand for several files; only the folder before them is checked.
PATH = re.compile(r"(?<![\w./~-])(?:[\w.*-]+/)+[\w.*-]*+(?!\{)")
FILE_NAME = re.compile(r"(?<![\w./~*-])\w+\.(?:py|c|h|toml|svg|j2)\b")
SUFFIXES = (".py", ".c", ".h", ".svg", ".j2")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Files of other projects, cited as sources, and names that Python code of a reader would have.
EXTERNAL = set(
    """
    jpeglib.h models_vit.py models_v2.py utils.py train_vit_g.py optax.py bit_hyperrule.py
    configs/vit_i21k.py configs/vit_s16_i1k.py configs/vit_i1k.py models_resnet.py
    configs/bit_i21k.py configs/bit_i1k.py models/bit_paper.py bit_pytorch/models.py
    configs/models.py configs/common.py configs/augreg.py models/vit.py input_pipeline.py
    pp/ops_image.py transforms_factory.py datasets.py models_mae.py util/pos_embed.py eval/knn.py
    eval/linear.py evaluators/fewshot_lsr.py
    """.split()
)


def _tracked():
    """Every file and folder of the tree that git knows or would add."""
    command = "git ls-files --cached --others --exclude-standard".split()
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout

    # A file that was removed and not yet committed is still in git's list.
    known = set()
    for name in names.splitlines():
        if (ROOT / name).exists():
            known |= {name, *map(str, Path(name).parents)}
    return known


def _anchors(page):
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def _is_known(path, tracked):
    """Paths may be relative to any folder; `*` stands for part of a name, NAME for a new file."""
    if "NAME" in path:
        path = "/".join(path.split("/")[:2])
    if "*" in path:
        return any(ROOT.glob(path))
    if f"configs/{path}.yaml" in tracked:  # the name that `vitscale` takes
        return True
    return path in tracked or any(known.endswith(f"/{path}") for known in tracked)


def test_paths_named_in_docs_exist():
    tracked = _tracked()
    folders = {path for path in tracked if (ROOT / path).is_dir() and "/" not in path}
    names = {Path(path).name for path in tracked} | EXTERNAL

    def is_wrong(path):
        # Other words with a slash are no paths, such as and/or.
        is_path = path.split("/")[0] in folders or path.endswith(SUFFIXES)
        return is_path and path not in EXTERNAL and not _is_known(path, tracked)

    wrong = []
    for page in PAGES + CARDS:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            text = URL.sub("", line)
            paths = [path.rstrip("/.") for path in PATH.findall(text)]
            lost = list(filter(is_wrong, paths))
            lost += [name for name in FILE_NAME.findall(text) if name not in names]
            wrong += [f"{page.relative_to(ROOT)}:{number}: {path}" for path in lost]
    assert not wrong


def test_links_in_docs_lead_somewhere():
    wrong = []
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            # Other sites change at any time, and tests run without a network.
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            # "#anchor" alone leads to the page itself.
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong


def test_lists_begin_after_a_blank_line():
    """GitHub shows other lists too; the site does not, nor blocks in lists indented by two."""
    wrong = []
    for page in PAGES:
        # Code may have lines that look like lists.
        prose = re.sub(
            r"^```.*?^```", "```", page.read_text(), flags=re.MULTILINE | re.DOTALL
        )
        for before, line in pairwise(prose.splitlines()):
            is_item = re.match(r"\s*([-*]|\d+\.) ", line)
            is_inside = re.match(r"\s*([-*]|\d+\.) |\s+\S|#", before)
            is_late = is_item and before and not is_inside
            if is_late or re.match(r" {1,3}(```|[-*] )", line):
                wrong.append(f"{page.relative_to(ROOT)}: {line}")
    assert not wrong


def test_the_docs_list_every_metric():
    pages = [(ROOT / f"docs/{page}.md").read_text() for page in METRIC_PAGES]
    names = re.findall(r"`([^` ]+)`", "\n".join(pages))
    documented = {name for name in names if METRIC.fullmatch(name)}
    # Both ways: a metric that nobody logs any more is as wrong as one that nobody explains.
    logged = set()
    for folder in LOGGING:
        for path in (ROOT / folder).rglob("*.py"):
            logged |= set(_metrics_in(path))
    assert documented == logged


def _metrics_in(path):
    """Literal names, and in evaluations the keys of dicts that are returned or called metrics."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and METRIC.fullmatch(str(node.value)):
            yield str(node.value)
        if "evaluation" not in path.parts:
            continue

        keys = []
        is_metrics = isinstance(node, ast.AnnAssign) and "metrics" in ast.dump(node)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "metrics":
            keys = [node.slice]
        elif isinstance(node, ast.Return) or is_metrics:
            keys = getattr(node.value, "keys", [])
        for key in keys:
            if isinstance(key, ast.Constant):
                yield f"val/{key.value}"
