"""Raise an alarm when a watched run makes no steps, or has ended without a restart.

Owns: what counts as stalled, the sentence, the command that gets it, and the exit code.
Leaves out: the state of a run (`reading`), and when to look.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.jobs.status.following import exit_code
from launch.jobs.status.reading import ACTIVE, RunState, RunStatus
from launch.jobs.status.text import age, headline, shown_folder

EXIT_STALLED = 3
# What the command gets. The sentence is never part of a command line.
SENTENCE_VARIABLE, RUN_VARIABLE = "VITSCALE_SENTENCE", "VITSCALE_RUN"
CALL_SECONDS = 60.0


@dataclass(kw_only=True)
class Watcher:
    """What has been seen of some runs, and told."""

    stalled_min: float | None = None
    """Minutes without a step that are too many; None: any number is fine."""
    command: Sequence[str] = ()
    """Called for every alarm, with the sentence in its environment; empty: none is called."""
    active: dict[Path, RunStatus] = field(default_factory=dict)
    """Runs that were active at the last look."""
    stalled: set[Path] = field(default_factory=set)
    codes: dict[Path, int] = field(default_factory=dict)
    """Exit codes of the runs that have ended meanwhile."""

    def look(self, runs: Sequence[RunStatus], *, slurm_answers: bool, now: float) -> list[str]:
        """Compare with the last look. Returns the alarms, after calling the command for each.

        slurm_answers: without it, a run that was in the queue counts as still there.
        """
        is_first = not self.active and not self.codes
        alarms = {}
        for folder in self.active.keys() - {run.folder for run in runs}:  # removed
            del self.active[folder]
        for run in runs:
            before = self.active.get(run.folder)
            if run.state in ACTIVE:
                self.active[run.folder] = run
                if sentence := self._stalled(run, now=now):
                    alarms[run.folder] = sentence
            elif before is not None and before.job is not None and not slurm_answers:
                continue
            elif before is not None or (is_first and len(runs) == 1):
                self.active.pop(run.folder, None)
                self.stalled.discard(run.folder)
                self.codes[run.folder] = exit_code(run)
                alarms[run.folder] = _ended(run, now=now)
        for folder, sentence in alarms.items():
            self._call(sentence, folder)
        return list(alarms.values())

    @property
    def is_over(self) -> bool:
        """Whether no run that is active makes steps."""
        return set(self.active) <= self.stalled

    @property
    def exit_code(self) -> int:
        """3: a run is stalled; else of the runs that ended while watched: the first failure's."""
        if self.stalled:
            return EXIT_STALLED
        return next(filter(None, self.codes.values()), 0)

    def _stalled(self, run: RunStatus, *, now: float) -> str | None:
        """The alarm of a run that has stalled since the last look."""
        if self.stalled_min is None or run.state is not RunState.RUNNING:
            self.stalled.discard(run.folder)
            return None
        idle_s = now - max(run.logged.time or 0.0, run.since or 0.0)
        if run.tasks and run.log_age_s is not None:  # data preparation has no steps
            idle_s = run.log_age_s
        if idle_s < self.stalled_min * 60:
            self.stalled.discard(run.folder)
            return None
        if run.folder in self.stalled:
            return None
        self.stalled.add(run.folder)
        what = f"{shown_folder(run.folder)}: no step for {age(idle_s)}"
        where = f"; job {run.job.job_id} on {run.job.nodes}" if run.job is not None else ""
        return f"{what} ({headline(run, now=now)}){where}"

    def _call(self, sentence: str, folder: Path) -> None:
        if not self.command:
            return
        environment = os.environ | {SENTENCE_VARIABLE: sentence, RUN_VARIABLE: str(folder)}
        try:
            done = subprocess.run(
                self.command, env=environment, stdin=subprocess.DEVNULL, timeout=CALL_SECONDS
            )
            problem = f"ended with code {done.returncode}" if done.returncode else None
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            print(f"warning: --call: {self.command[0]}: {problem}", file=sys.stderr, flush=True)


def _ended(run: RunStatus, *, now: float) -> str:
    why = run.failure.what if run.failure is not None else ""
    if not why and run.state is RunState.STOPPED and run.attempt is not None:
        why = run.attempt.reason
    return f"{shown_folder(run.folder)}: {headline(run, now=now)}" + (f": {why}" if why else "")
