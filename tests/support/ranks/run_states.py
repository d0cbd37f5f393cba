"""Read the final state of a run and compare two runs bit by bit.

Owns: the newest checkpoint, the journal without times, the recorded batches, and differences.
Leaves out: starting and disturbing runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vitscale.checkpoint.folders import newest_checkpoint

# These differ between equal runs.
TIMES = ("time", "vitals/")
SHOWN = 6
# (rank, step, micro-step) -> hashes of the samples
Batches = dict[tuple[int, int, int], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run folder that no process writes to."""

    step: int
    progress: dict[str, Any]
    description: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    journal: list[dict[str, Any]]
    batches: Batches
    contradictions: list[str] = field(default_factory=list)
    """Batches that were repeated after a resume with other samples."""


def read_state(folder: Path, *, records: Path | None = None) -> RunState:
    """Read and verify the newest checkpoint, and everything else. Raises ValueError for none.

    records: where `recorded_rank` wrote.
    """
    checkpoint, complaints = newest_checkpoint(folder / "checkpoints")
    if checkpoint is None or complaints:
        raise ValueError(f"{folder}: no checkpoint, or damaged ones: {complaints}")
    batches: Batches = {}
    contradictions = []
    for key, samples in recorded_batches(records) if records is not None else ():
        if batches.setdefault(key, samples) != samples:
            contradictions.append(
                f"rank {key[0]} step {key[1]} micro-step {key[2]} changed when repeated"
            )
    return RunState(
        step=checkpoint.step,
        progress=checkpoint.progress,
        description=dict(checkpoint.description),
        tensors=checkpoint.tensors(),
        journal=journal_rows(folder),
        batches=batches,
        contradictions=contradictions,
    )


def recorded_batches(records: Path) -> Iterator[tuple[tuple[int, int, int], tuple[str, ...]]]:
    """Batches in the order in which each rank took them, over all starts."""
    for path in sorted(records.glob("batches-*.jsonl")):
        rank = int(path.stem.removeprefix("batches-"))
        for line in path.read_text().splitlines():
            row = json.loads(line)
            yield (rank, row["step"], row["micro_step"]), tuple(row["samples"])


def journal_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows without times. The torn last line of a killed run is skipped."""
    path = folder / "journal.jsonl"
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            values = json.loads(line)
            rows.append({key: value for key, value in values.items() if not key.startswith(TIMES)})
    return rows


def differences(ours: RunState, theirs: RunState) -> list[str]:
    """One line for each thing that is not equal bit by bit; empty for equal runs."""
    found = list(ours.contradictions)
    if ours.step != theirs.step:
        found.append(f"step: {ours.step}, not {theirs.step}")
    found += _different_tensors(ours.tensors, theirs.tensors)
    for name in ("progress", "description"):
        found += _different_values(name, getattr(ours, name), getattr(theirs, name))
    if ours.journal != theirs.journal:
        pairs = zip(ours.journal, theirs.journal, strict=False)
        first = next((f"{a} not {b}" for a, b in pairs if a != b), "lengths")
        found.append(f"journal ({len(ours.journal)} and {len(theirs.journal)} rows): {first}")
    found += _different_values("batches", ours.batches, theirs.batches)
    return found


def _different_tensors(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> list[str]:
    found = [f"tensor {name}: only one has it" for name in sorted(ours.keys() ^ theirs.keys())]
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


def _different_values(name: str, ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> list[str]:
    keys = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    shown = [
        f"{name} {key}: {str(ours.get(key))[:80]}, not {str(theirs.get(key))[:80]}"
        for key in keys[:SHOWN]
    ]
    return shown + ([f"{name}: {len(keys) - SHOWN} more"] if len(keys) > SHOWN else [])
