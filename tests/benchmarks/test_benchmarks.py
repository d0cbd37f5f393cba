"""Each benchmark runs from end to end at toy sizes, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
# Command -> what it prints.
COMMANDS = {
    "checkpoint_stall.py": "stall / torch.save: ",
    "gpu_training.py --device cpu": "real / synthetic: ",
    "loader_speed.py": "ours (region) / webdataset: ",
    "sharding_speed.py": "header / shardwriter: ",
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", COMMANDS)
def test_benchmark_runs(tmp_path: Path, command: str) -> None:
    script, *options = command.split()
    results = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, "--toy", *options]
        + ["--work", tmp_path, "--json", results],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert COMMANDS[command] in done.stdout
    assert json.loads(results.read_text())["environment"]
    assert list(tmp_path.iterdir()) == [results], "left behind"
