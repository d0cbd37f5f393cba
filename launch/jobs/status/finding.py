"""Find the folders of runs that names on the command line mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.distributed.failures.events import EVENTS_NAME
from vitscale.tracking.journal import JOURNAL_NAME
from vitscale.tracking.run_facts import ARTIFACTS_FOLDER

RUNS_FOLDER = Path("runs")
# runs/CHAIN/STAGE/RUN
MAX_DEPTH = 3
RUN_FILES = ("config.yaml", JOURNAL_NAME, EVENTS_NAME)
# All that a run has that was submitted, or started, and has not trained yet.
JOB_FOLDERS = ("slurm", "local")
# Copies of config.yaml are among the artifacts.
NO_RUNS = (*JOB_FOLDERS, ARTIFACTS_FOLDER)


def find_runs(names: Sequence[str]) -> list[Path]:
    """The run folders of each name: itself, or all below it; without names all below runs/.

    The folder of a chain stands for all its runs.

    Raises UserErrors for every name that means none.
    """
    if not names:
        found = list(_below(RUNS_FOLDER, depth=MAX_DEPTH))
        if not found:
            raise UserError(
                f"no run folder below {RUNS_FOLDER.absolute()}",
                next_step="change to the folder that you started the run from, or name a run",
            )
        return found
    folders: list[Path] = []
    errors = []
    for name in names:
        found = _named(name)
        folders += found
        if not found:
            errors.append(_no_run(name))
    if errors:
        raise errors[0] if len(errors) == 1 else UserErrors(errors)
    return list(dict.fromkeys(folders))


def _named(name: str) -> list[Path]:
    for folder in (Path(name), RUNS_FOLDER / name):
        if folder.is_dir():
            return list(_below(folder, depth=MAX_DEPTH))
    return []


def _below(folder: Path, *, depth: int) -> Iterator[Path]:
    """The folder if it is a run, else those in it."""
    if any((folder / name).is_file() for name in RUN_FILES):
        yield folder
        return
    found = []
    if depth:
        inner = sorted(path for path in _folders(folder) if path.name not in NO_RUNS)
        found = [run for path in inner for run in _below(path, depth=depth - 1)]
    yield from found
    if not found and any((folder / name).is_dir() for name in JOB_FOLDERS):
        yield folder


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def _no_run(name: str) -> UserError:
    for folder in (Path(name), RUNS_FOLDER / name):
        if folder.is_dir():
            return UserError(
                f"{folder} is no run folder, and has none below it",
                where="RUN",
                allowed=f"a folder with {', '.join(RUN_FILES)}, {' or '.join(JOB_FOLDERS)}/",
                next_step="give the output folder of a run",
            )
    known = [path.name for path in _below(RUNS_FOLDER, depth=MAX_DEPTH)]
    close = nearest(Path(name).name, known)
    what = f"{name} is a file, not a run folder" if Path(name).exists() else f"no such run: {name}"
    return UserError(
        what,
        where="RUN",
        allowed=f"a folder, or one of: {', '.join(known[:20])}" if known else "a run folder",
        next_step=f"did you mean {close}?" if close else None,
    )
