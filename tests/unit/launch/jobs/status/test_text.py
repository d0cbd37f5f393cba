"""What status.py prints."""

from __future__ import annotations

import json

import pytest

from launch.jobs.attempts import Ending
from launch.jobs.status.reading import read_status
from launch.jobs.status.text import age, as_text, as_values, lines_of, plain_reason
from tests.unit.launch.jobs.status.conftest import NOW, RunFolder, job


def test_a_queued_run_says_why_and_until_when(run: RunFolder) -> None:
    waiting = job("PENDING", reason="Resources", start=NOW + 3600)
    head, why = lines_of(read_status(run.folder, jobs=[waiting], now=NOW), now=NOW)
    assert head.endswith("(12 min)") and ": queued since " in head
    assert why.startswith("  job 4711: waits for free nodes (Resources); expected to start at ")


def test_a_running_run_says_how_far_and_how_fast(run: RunFolder) -> None:
    run.attempt(Ending.KILLED)
    run.attempt(None)
    run.log(30, ago=20)
    run.log(40, **{"vitals/images_per_s": 8120.0, "perf/mfu": 0.412})
    found = read_status(run.folder, jobs=[job("RUNNING", nodes="n[1-2]")], now=NOW)
    head, place, speed, restarts = lines_of(found, now=NOW)
    assert head.endswith(": running, step 40 of 100 (40%), 0:00:50 left")
    assert place == "  job 4711 on n[1-2], attempt 2"
    assert speed.startswith("  8,120 img/s, MFU 41.2%, loss 1.2500, last written to the log ")
    assert restarts.startswith("  restarted once: 1 killed; ")


def test_a_failed_run_says_what_failed(run: RunFolder) -> None:
    run.task(1, None, "RuntimeError: no such tensor")
    run.attempt(Ending.KILLED, "rank 1 on n2 was killed by SIGKILL")
    head, *lines = lines_of(read_status(run.folder, jobs=[], now=NOW), now=NOW)
    assert ": failed, " in head
    assert lines[0] == "  rank 1 on n2 was killed by SIGKILL"
    assert lines[1] == "  RuntimeError: no such tensor"
    assert lines[2].startswith("  log: ")


def test_active_runs_are_first_and_all_are_counted(run: RunFolder) -> None:
    run.log(100, **{"val/top1": 0.75} | {f"val/m{number}": 0.5 for number in range(9)})
    run.checkpoint(100)
    finished = read_status(run.folder, jobs=[], now=NOW)
    running = read_status(run.folder, jobs=[job("RUNNING")], now=NOW)
    lines = as_text([finished, running], now=NOW).splitlines()
    assert ": running" in lines[0]
    metrics = "".join(f", val/m{number} 0.5000" for number in range(5))
    assert f"  val/top1 0.7500{metrics}, train/loss 1.2500" in lines
    assert lines[-1] == "2 runs: 1 running, 1 finished"


def test_values_are_plain_json(run: RunFolder) -> None:
    run.attempt(Ending.FAILED, "rank 0 ended with code 1")
    values = as_values(read_status(run.folder, jobs=[job("FAILED")], now=NOW))
    assert json.loads(json.dumps(values)) == values
    assert (values["name"], values["state"]) == ("vit", "failed")
    assert values["attempt"]["ending"] == "failed"


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (None, "the scheduler has not looked at it yet"),
        ("Priority", "jobs of higher priority are before it (Priority)"),
        ("QOSMaxNodePerUserLimit", "its quality of service has reached a limit"),
        ("launch failed requeued held", "a node could not start it"),
        ("Unheard", "SLURM says Unheard"),
    ],
)
def test_reasons_are_in_plain_words(reason: str | None, text: str) -> None:
    assert plain_reason(reason).startswith(text)


def test_ages_are_in_their_largest_unit() -> None:
    ages = [age(s) for s in (-1, 12, 720, 7200, 10 * 86400)]
    assert ages == ["0 s", "12 s", "12 min", "2.0 h", "10 days"]
