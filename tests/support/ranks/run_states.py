"""Read the final state of a run and compare two runs bit by bit."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.tables import Values
from vitscale.checkpoint.folders import newest_checkpoint
from vitscale.checkpoint.store import read_tensors

# These differ between equal runs.
TIMES = ("time", "vitals/")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run folder that no process writes to."""

    step: int
    progress: Values
    description: Values
    tensors: dict[str, torch.Tensor]
    journal: list[Values]


def read_state(folder: Path) -> RunState:
    """Read and verify the newest checkpoint and the journal. Raises ValueError for none."""
    checkpoint, complaints = newest_checkpoint(folder / "checkpoints")
    if checkpoint is None or complaints:
        raise ValueError(f"{folder}: no checkpoint, or damaged ones: {complaints}")
    return RunState(
        step=checkpoint.step,
        progress=checkpoint.progress,
        description=dict(checkpoint.description),
        tensors=read_tensors(checkpoint.files),
        journal=journal_rows(folder),
    )


def journal_rows(folder: Path) -> list[Values]:
    """Rows without times. The torn last line of a killed run is skipped."""
    path = folder / "journal.jsonl"
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            values = json.loads(line)
            rows.append(
                {
                    key: value
                    for key, value in values.items()
                    if not key.startswith(TIMES)
                }
            )
    return rows


def differences(ours: RunState, theirs: RunState) -> list[str]:
    """One line for each thing that is not equal bit by bit; empty for equal runs."""
    found = (
        [] if ours.step == theirs.step else [f"step: {ours.step}, not {theirs.step}"]
    )
    found += _different_tensors(ours.tensors, theirs.tensors)
    for name in ("progress", "description"):
        one = getattr(ours, name)
        other = getattr(theirs, name)
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        found += [f"{name} {key}: {one.get(key)}, not {other.get(key)}" for key in keys]
    if ours.journal != theirs.journal:
        pairs = zip(ours.journal, theirs.journal, strict=False)
        first = next((f"{a} not {b}" for a, b in pairs if a != b), "lengths")
        found.append(
            f"journal ({len(ours.journal)} and {len(theirs.journal)} rows): {first}"
        )
    return found


def _different_tensors(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> list[str]:
    found = [
        f"tensor {name}: only one has it"
        for name in sorted(ours.keys() ^ theirs.keys())
    ]
    unequal = [
        name
        for name in sorted(ours.keys() & theirs.keys())
        # As bytes: NaN equals itself, and -0 is not 0.
        if ours[name].dtype != theirs[name].dtype
        or ours[name].numpy().tobytes() != theirs[name].numpy().tobytes()
    ]
    if unequal:
        kinds = sorted({name.partition(".")[0] for name in unequal})
        found.append(f"{len(unequal)} of {len(theirs)} tensors: {', '.join(kinds)}")
    return found
