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


@dataclass
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
    if not path.exists():
        return []
    # What follows the last line end is torn, or empty.
    *lines, _ = path.read_text().split("\n")
    rows = []
    for line in lines:
        values = json.loads(line).items()
        rows.append({key: value for key, value in values if not key.startswith(TIMES)})
    return rows


def differences(ours: RunState, theirs: RunState) -> list[str]:
    """One line for each thing that is not equal bit by bit; empty for equal runs."""
    lines = []
    if ours.step != theirs.step:
        lines.append(f"step: {ours.step}, not {theirs.step}")
    lines += _different_tensors(ours.tensors, theirs.tensors)
    for name in ("progress", "description"):
        one = getattr(ours, name)
        other = getattr(theirs, name)
        for key in {**one, **other}:
            if one.get(key) != other.get(key):
                lines.append(f"{name} {key}: {one.get(key)}, not {other.get(key)}")

    # The first row that differs tells when the runs parted; later ones follow from it.
    if ours.journal != theirs.journal:
        pairs = zip(ours.journal, theirs.journal, strict=False)
        first = next((f"{a} not {b}" for a, b in pairs if a != b), "lengths")
        lines.append(
            f"journal ({len(ours.journal)} and {len(theirs.journal)} rows): {first}"
        )
    return lines


def _different_tensors(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> list[str]:
    lines = []
    for name in sorted(ours.keys() ^ theirs.keys()):
        lines.append(f"tensor {name}: only one has it")
    unequal = [
        name
        for name in sorted(ours.keys() & theirs.keys())
        if _as_bytes(ours[name]) != _as_bytes(theirs[name])
    ]
    # By kind: a part of the state that was not restored differs in all tensors of a kind.
    if unequal:
        kinds = sorted({name.partition(".")[0] for name in unequal})
        lines.append(f"{len(unequal)} of {len(theirs)} tensors: {', '.join(kinds)}")
    return lines


def _as_bytes(tensor: torch.Tensor) -> tuple[torch.dtype, bytes]:
    # NaN then equals itself, and -0 is not 0.
    return tensor.dtype, tensor.numpy().tobytes()
