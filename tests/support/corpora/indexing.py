"""Index tars with data_prep/index_shards.py, verify and read the index."""

import io
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests.support.waiting import ROOT
from vitscale.data.index import read_split, sample_keys

SCRIPT = ROOT / "data_prep/index_shards.py"
VERIFY = ROOT / "data_prep/verify_shards.py"


def run(script: Path, *arguments) -> subprocess.CompletedProcess[str]:
    """Run a script in this process, because starting one takes longer than its work."""
    assert "run_rank_script" not in script.read_text(), (
        "a rank ends its process, a minute later too"
    )
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
    # `SystemExit("text")` prints the text and ends with 1; no script of ours does that.
    assert isinstance(code, int)
    # What subprocess.run would give, so that a test can do either.
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def index_command(source, output: Path, *overrides: str) -> list[object]:
    return [
        "--config",
        ROOT / "configs/data/index_shards.yaml",
        f"source.path={source}",
        f"output={output}",
        *overrides,
    ]


def run_index(
    source: Path | str, output: Path, *overrides: str
) -> subprocess.CompletedProcess[str]:
    return run(SCRIPT, *index_command(source, output, *overrides))


def index(source, output: Path, *overrides: str) -> str:
    finished = run_index(source, output, *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def verify(folder: Path):
    finished = run(VERIFY, folder)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def samples(folder: Path, split: str) -> dict[str, tuple[bytes, str]]:
    """key -> (image, class), read by the training loader."""
    entries = read_split(folder, split=split)
    stored = {}
    for i, key in enumerate(sample_keys(entries, range(entries.num_samples))):
        class_name = entries.classes[entries.label[i]]
        stored[key] = (entries.read(i), class_name)
    return stored
