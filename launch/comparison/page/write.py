"""Write the comparison page: one HTML file that loads nothing.

Owns: filling `page.html.j2` with the data, the style, uPlot and the scripts.
Leaves out: the data (`data`).

Names of runs, parameters and metrics come from untrusted files. They enter the page as JSON that
cannot close its element, and the scripts only ever set them as text. The page's security policy
admits its own scripts and style by hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from launch.comparison.differences import Comparison
from launch.comparison.page.data import page_data
from launch.comparison.runs import RUNS_FOLDER, ComparedRun
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import write_text

FOLDER = Path(__file__).parent
UPLOT = ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE")
# In the order in which they are run.
SCRIPTS = ("state", "format", "curves", "charts", "tables", "sections", "main")


def default_output(runs: Sequence[ComparedRun]) -> Path:
    """runs/compare.html if there is a runs/ folder here, else beside the first run."""
    first = runs[0].folder
    if RUNS_FOLDER.is_dir() or first is None:
        return RUNS_FOLDER / "compare.html"
    return first.resolve().parent / "compare.html"


def write_report(comparison: Comparison, *, path: Path | str) -> Path:
    """Write the page atomically. Raises UserError when it cannot be written."""
    path = Path(path)
    page = render(comparison)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            next_step="choose another file",
        ) from None
    return path


def render(comparison: Comparison) -> str:
    """The page as text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    uplot, uplot_style, licence = (_vendored(name) for name in UPLOT)
    style = f"{uplot_style}\n{(FOLDER / 'style.css').read_text()}"
    parts = [(FOLDER / "scripts" / f"{name}.js").read_text() for name in SCRIPTS]
    script = "(function () {\n'use strict';\n" + "\n".join(parts) + "})();\n"
    return environment.get_template("page.html.j2").render(
        labels=[run.label for run in comparison.runs],
        data=json_in_html(page_data(comparison)),
        style=style,
        style_hash=_source_hash(style),
        scripts=(uplot, script),
        script_hashes=(_source_hash(uplot), _source_hash(script)),
        licence=licence,
    )


def json_in_html(data: object) -> str:
    """JSON that cannot end the script element it is in, nor open a comment there."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _vendored(name: str) -> str:
    return (FOLDER / "uplot" / name).read_text().strip()


def _source_hash(text: str) -> str:
    """As Content-Security-Policy names an inline script or style."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
