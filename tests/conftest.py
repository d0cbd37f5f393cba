"""Fixtures of all tests."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from tests.support.clean_environment import clean_environment
from tests.support.golden import Golden
from tests.support.levels import skip_or_fail
from tests.support.ranks.fault_runs import (
    FaultRuns,
    copy_run,
    fault,
    micro_step,
    wait_and_end_others,
)
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.waiting import ROOT
from vitscale.distributed.world import World, process_group
from vitscale.tracking.mlflow_sync import open_client

# The same examples in every run; HYPOTHESIS_PROFILE=explore searches new ones. Without a deadline:
# a shared machine may stall.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
clean_environment()
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


# Files of minutes, the longest first. Workers take a file at a time, in this order, so that none
# is left with a long one when the others have ended.
LONGEST = """
training/test_resume test_reference training/test_other_layouts training/test_golden_curves
test_examples models/test_evaluate_model training/test_storage_faults training/test_stopped_ranks
test_demo training/test_collapse slurm/test_restarts slurm/test_launch training/test_training_runs
launch/test_chains slurm/test_chains models/test_commands slurm/test_submission
""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Put the tests of LONGEST before all others; the order within a file stays."""

    def turn(item):
        name = str(item.path.with_suffix(""))
        for number, end in enumerate(LONGEST):
            if name.endswith(f"/{end}"):
                return number
        return len(LONGEST)

    # Stable, so files keep their order, and what is not named stays behind.
    items.sort(key=turn)


def pytest_addoption(parser: pytest.Parser):
    parser.addoption(
        "--renew-golden",
        action="store_true",
        help="write tests/golden anew",
    )
    parser.addoption(
        "--storm-kills",
        type=int,
        default=200,
        help="faults of each storm",
    )
    parser.addoption(
        "--storm-seed",
        type=int,
        default=1,
        help="decides the plan of each storm",
    )


@pytest.fixture(scope="session")
def golden(pytestconfig) -> Golden:
    return Golden(renew=pytestconfig.getoption("--renew-golden"))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One rank on a CPU. Joining sets variables, which the next one would take for a launcher's."""
    with (
        mock.patch.dict(os.environ),
        process_group(device="cpu", timeout_min=1, num_threads=1) as joined,
    ):
        yield joined


@pytest.fixture(scope="session")
def warm_starter() -> Iterator[WarmStarter]:
    with WarmStarter() as starter:
        yield starter


@pytest.fixture(scope="session")
def new_mlflow_database(tmp_path_factory) -> Path:
    """An MLflow database without runs, to copy: making its tables flushes the disk 200 times."""
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    open_client(f"sqlite:///{database}")
    return database


@pytest.fixture
def mlflow_database(new_mlflow_database, tmp_path) -> Path:
    """A copy of it, in a folder of its own."""
    (tmp_path / "store").mkdir()
    return Path(shutil.copy(new_mlflow_database, tmp_path / "store"))


@contextmanager
def mounted(folder: Path, source: str | Path, *options: str) -> Iterator[Path]:
    """Mount for the length of the block. Skips the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", *options, str(source), str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        skip_or_fail(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        unmount = ["umount", str(folder)]
        # Processes that a test ended may still have files of a tmpfs open.
        if source == "tmpfs":
            unmount.append("--lazy")
        subprocess.run(unmount, check=True)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "disk", "tmpfs", "-t", "tmpfs", "-o", "size=1m") as folder:
        yield folder


@pytest.fixture(scope="session")
def digits_shards(tmp_path_factory) -> Path:
    """The embedded corpus as shards, made by the scripts."""
    folder = tmp_path_factory.mktemp("digits")
    images = folder / "images"
    shards = folder / "shards"
    make_corpus = [ROOT / "data_prep/make_corpus.py", "digits", images]
    make_shards = [
        ROOT / "data_prep/make_shards.py",
        "--config",
        ROOT / "configs/data/digits.yaml",
        f"source.path={images}",
        f"output={shards}",
    ]
    # By the scripts, from another folder: nothing may depend on the one that they start in.
    for command in (make_corpus, make_shards):
        subprocess.run([sys.executable, *command], check=True, cwd=folder)
    return shards


@pytest.fixture(scope="session")
def fault_runs(
    warm_starter,
    digits_shards,
    tmp_path_factory,
) -> FaultRuns:
    folder = tmp_path_factory.mktemp("faults")
    return FaultRuns(warm_starter, shards=digits_shards, folder=folder)


@pytest.fixture(scope="session")
def killed(fault_runs) -> Path:
    """A training killed in step 17, with checkpoints of steps 10 and 15. Tests copy it."""
    folder = fault_runs.folder / "killed"

    # Rank 1 waits 2 s before it dies, so that the save of step 15 is committed.
    faults = {1: [fault("backward", micro_step(17), "lag and kill")]}
    ranks = fault_runs.start(folder, faults=faults)
    # Its own end, not that of the other ranks: otherwise the fault was not what ended the run.
    assert wait_and_end_others(ranks)[1] == -signal.SIGKILL
    return folder


@pytest.fixture
def killed_copy(killed, tmp_path) -> Path:
    return copy_run(killed, tmp_path)
