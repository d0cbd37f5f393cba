"""Find run folders by the names that people give, and the log of a run.

Owns: where runs are, and what makes a folder that of a run.
Leaves out: the state of a run (`run_states`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import TypeVar

from vitscale.config.errors import UserError, UserErrors, did_you_mean
from vitscale.tracking.journal import JOURNAL_NAME
from vitscale.tracking.mlflow_sync import ARTIFACTS_FOLDER

RUNS_FOLDER = Path("runs")
# runs/CHAIN/STAGE/RUN
MAX_DEPTH = 3
RUN_FILES = ("config.yaml", JOURNAL_NAME)
# All that a run has that was submitted, or started, and has not trained yet.
JOB_FOLDERS = ("slurm", "local")
# The configurations that its jobs were started with.
CONFIGS = "*/config-*.yaml"
Item = TypeVar("Item")
Result = TypeVar("Result")


def find_runs(names: Sequence[str]) -> list[Path]:
    """The run folders of each name: itself, or all below it; without names all below runs/.

    Raises UserErrors for every name that means none.
    """
    runs = for_each(names or [str(RUNS_FOLDER)], _find)
    # Names may overlap.
    return list(dict.fromkeys(itertools.chain.from_iterable(runs)))


def for_each(items: Iterable[Item], work: Callable[[Item], Result]) -> list[Result]:
    """The result for each item. Raises UserErrors with the errors of all items."""
    results = []
    errors = []
    for item in items:
        try:
            results.append(work(item))
        except UserError as error:
            errors.append(error)
    if errors:
        raise UserErrors(errors)
    return results


def _find(name: str) -> list[Path]:
    """The run folders that a name means. Raises UserError for none, and for those of others."""
    name = os.path.expanduser(name)
    # A run may have the name of a folder of the code, such as "pretrain".
    places = [path for path in (Path(name), RUNS_FOLDER / name) if path.is_dir()]
    try:
        # The first place that has any counts.
        for place in places:
            if runs := _runs_below(place):
                return runs
    except PermissionError as error:
        closed = Path(str(error.filename))
        raise UserError(
            "cannot be read: a run folder is for its owner alone, unless the owner shares it",
            where=closed,
            next_step=f"ask its owner for: chmod -R g+rX {quote(str(closed.parent))}",
        ) from None

    what = f"no such run: {name}"
    if places:
        what = f"no run folder in {places[0]}"
    known = [str(path.relative_to(RUNS_FOLDER)) for path in _runs_below(RUNS_FOLDER)]
    advice = "change to the folder that you started the run from, or name its output"
    raise UserError(
        what,
        where="RUN",
        allowed=f"a run folder, one with runs, or one of: {', '.join(known[:20])}",
        next_step=did_you_mean(Path(name).name, known, advice),
    )


def _runs_below(folder: Path, *, depth: int = MAX_DEPTH) -> list[Path]:
    """Return the folder if it is a run, else those in it."""
    if any((folder / name).is_file() for name in RUN_FILES):
        return [folder]

    runs: list[Path] = []
    if depth and folder.is_dir():
        for path in sorted(folder.iterdir()):
            # Copies of config.yaml are among the artifacts.
            if path.is_dir() and path.name not in (*JOB_FOLDERS, ARTIFACTS_FOLDER):
                runs += _runs_below(path, depth=depth - 1)
    if not runs and any((folder / name).is_dir() for name in JOB_FOLDERS):
        runs.append(folder)
    return runs


def newest_log(folder: Path) -> Path | None:
    """The log of rank 0 that was written to last."""
    return newest(
        path for name in JOB_FOLDERS for path in folder.glob(f"{name}/*/*_0_log.out")
    )


def newest(paths: Iterable[Path]) -> Path | None:
    """The path that was written last, of a link the link itself; None without any."""
    return max(paths, key=lambda path: path.lstat().st_mtime, default=None)
