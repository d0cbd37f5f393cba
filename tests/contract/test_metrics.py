"""docs/tracking.md lists every metric that the code logs, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.tree import ROOT, parsed
from vitscale.data.remote.store import COUNTS
from vitscale.evaluation.registry import EVALUATIONS

LOGGING = ("vitscale/data", "vitscale/evaluation", "vitscale/training", "pretrain", "finetune")
METRIC = re.compile(r"(train|val|vitals)/[a-z0-9_]*[a-z0-9]")


def test_the_docs_list_every_metric() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/tracking.md").read_text(), re.MULTILINE)
    documented = {name for name in rows if METRIC.fullmatch(name)}
    logged = {f"vitals/remote_{name}" for name in COUNTS}
    for folder in LOGGING:
        for path in (ROOT / folder).rglob("*.py"):
            logged |= set(_metrics_in(path))
    assert documented == logged


def test_evaluations_declare_their_metrics() -> None:
    """A study checks the names before its runs."""
    declared = {f"val/{name}" for each in EVALUATIONS.values() for name in each.Settings.metrics}
    logged = {
        name for path in (ROOT / "vitscale/evaluation").rglob("*.py") for name in _metrics_in(path)
    }
    assert declared == {name for name in logged if METRIC.fullmatch(name)}


def _metrics_in(path: Path) -> Iterator[str]:
    """Literal names, and the keys of metrics that an evaluation returns without a prefix."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and METRIC.fullmatch(str(node.value)):
            yield str(node.value)
        if "evaluation" in path.parts and isinstance(node, ast.Return) and node.value:
            dicts = [part for part in ast.walk(node.value) if isinstance(part, ast.Dict)]
            for key in [key for each in dicts for key in each.keys if key is not None]:
                part = key.values[-1] if isinstance(key, ast.JoinedStr) else key
                yield f"val/{ast.literal_eval(part)}"
