"""Notebooks and benchmarks run from end to end, and leave nothing behind."""

import json
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.levels import by_level
from tests.support.tables import every
from tests.support.waiting import PATIENCE_S, ROOT

FOLDER = ROOT / "docs/notebooks"
# What comes first trains; with its pictures.
NOTEBOOKS = {"own_images": 2, "what_has_it_learned": 6}
# Command of a benchmark at toy size -> what it prints.
COMMANDS = {
    "billion.py --rounds 1": "all records read and hashed, s",
    "checkpoint_stall.py": "stall / torch.save: ",
    "gpu_training.py --device cpu --models L16": "real / synthetic: ",
    "loader_speed.py": "ours (region) / webdataset: ",
    "preparation_size.py": "plan: 10 N / N takes ",
    "sharding_speed.py": "header / shardwriter: ",
    "stored_targets.py": "stored S / live S: ",
}
# Those of the loader, of shards and of targets; the others train for as long again.
BEFORE_A_MERGE = ("loader_speed.py", "sharding_speed.py", "stored_targets.py")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_the_notebooks_run(tmp_path, monkeypatch):
    """From top to bottom, one after the other, in a folder without a checkout."""
    monkeypatch.setenv("STEPS", "70")
    for name, num_pictures in NOTEBOOKS.items():
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        # Stored outputs grow the repository, and may show another version's.
        for cell in notebook.cells:
            has_run = cell.get("outputs") or cell.get("execution_count")
            assert not has_run, f"{name} is stored with outputs"
        resources = {"metadata": {"path": tmp_path}}
        NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
        pictures = 0
        for cell in notebook.cells:
            for output in cell.get("outputs", ()):
                pictures += "image/png" in output.get("data", {})
        assert pictures == num_pictures


@pytest.mark.distributed
@every(command=by_level(COMMANDS, slow=BEFORE_A_MERGE))
def test_benchmark_runs(tmp_path, command):
    script, *options = command.split()
    results = tmp_path / "results.json"
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "benchmarks" / script,
            "--toy",
            *options,
            "--work",
            tmp_path,
            "--json",
            results,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Its last line, the ratio that docs/benchmarks.md states.
    assert COMMANDS[command] in done.stdout
    # Without the machine, numbers say nothing.
    assert json.loads(results.read_text())["environment"]
    assert [*tmp_path.iterdir()] == [results], "left behind"
