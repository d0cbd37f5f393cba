"""Train what a study lacks on this machine: several trainings at a time, failures reported last.

Owns: the order (a transfer after its pre-training), progress lines, stopping, and the report.
Leaves out: one job (`launch.jobs`), and what is missing (`states`).
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Thread

from launch.jobs.monitor import CONTROLLER_SECONDS, JobResult, StopFlag, end, failure_report, follow
from launch.jobs.preparation import prepare_job
from launch.jobs.submission import Submission, start_locally
from launch.studies.grid import TRIAL, Grid, StudyTraining
from launch.studies.results import shown_value, trial_value
from launch.studies.selection import chosen
from launch.studies.states import (
    FINISHED,
    Completion,
    TrainingState,
    changed_error,
    is_diverged_trial,
    state_of,
)
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError
from vitscale.distributed.processes import num_cores
from vitscale.tracking.console import format_duration

POLL_SECONDS = 0.2
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRun:
    """A run of a study or a chain that failed, for the report at the end."""

    name: str
    what: str
    command: str | None = None
    """Runs this training alone; None if it never started, and in chains."""


@dataclass(kw_only=True)
class LocalTrainings:
    """Trainings of a study on this machine."""

    grid: Grid
    num_procs: int
    """Processes of each training."""
    parallel: int
    """Trainings at a time."""
    say: Say
    stop: StopFlag
    failures: list[FailedRun] = field(default_factory=list)
    _waiting: list[str] = field(default_factory=list)
    _running: dict[str, _Job] = field(default_factory=dict)
    _ended: SimpleQueue[tuple[str, JobResult | BaseException]] = field(default_factory=SimpleQueue)
    _done: set[str] = field(default_factory=set)
    _stopped: set[str] = field(default_factory=set)
    _total: int = 0

    def train(self, states: Mapping[str, TrainingState]) -> None:
        """Train everything that is missing or resumable. Ends no later than its processes."""
        self._done = {n for n, state in states.items() if state.progress in FINISHED}
        self._waiting = [name for name in self.grid.trainings if name not in self._done]
        self._total = len(self._waiting)
        try:
            while self._running or (self._waiting and not self.stop.is_set):
                if not self.stop.is_set:
                    self._start_ready()
                self._collect()
        finally:
            self._end_all()
        self._stopped |= set(self._waiting)

    @property
    def was_stopped(self) -> bool:
        """Whether repeating the study would train more, apart from what failed."""
        return bool(self._stopped)

    def _start_ready(self) -> None:
        failed = {failure.name for failure in self.failures}
        for name in list(self._waiting):
            needed = self.grid.trainings[name].waits_for
            if source := next((each for each in needed if each in failed), None):
                failed.add(name)
                self._fail(name, f"not started: {source} failed")
            elif self._stopped & set(needed):
                self._waiting.remove(name)
                self._stopped.add(name)
            elif len(self._running) < self.parallel and self._done >= set(needed):
                if self.grid.trainings[name].candidates and not self._choose(name):
                    continue
                self._waiting.remove(name)
                self._running[name] = self._start(self.grid.trainings[name])

    def _fail(self, name: str, what: str) -> None:
        self._waiting.remove(name)
        self.failures.append(FailedRun(name=name, what=what))

    def _choose(self, name: str) -> bool:
        """Make a final run the one with its best value. Whether it is to be trained."""
        assert self.grid.study.select is not None
        axis = self.grid.study.select.axis
        try:
            training = chosen(self.grid, self.grid.trainings[name])
        except UserError as error:
            self._fail(name, f"not started: {error.text()}")
            return False
        self.grid = replace(self.grid, trainings=self.grid.trainings | {name: training})
        self.say(f"chosen  {axis} {training.labels[axis]} for {name}")
        state = state_of(training)
        if state.progress is Completion.CHANGED:
            self._fail(name, changed_error(training, state).text())
        elif state.progress is Completion.DONE:
            self._waiting.remove(name)
            self._done.add(name)
        return name in self._waiting

    def _start(self, training: StudyTraining) -> _Job:
        run = training.run
        if self.parallel > 1 and run.engine.num_threads is None:
            # Each would otherwise use all cores.
            threads = max(1, num_cores() // (self.parallel * self.num_procs))
            engine = run.engine.model_copy(update={"num_threads": threads})
            run = run.model_copy(update={"engine": engine})
        job, folder = prepare_job(run, cluster="local")
        submission = start_locally(job, launch=run.launch, num_procs=self.num_procs, folder=folder)
        started = _Job(
            submission=submission,
            command=shlex.join(
                ["python", "launch/local.py", "--config", os.path.relpath(job.config)]
                + ["--num-procs", str(self.num_procs)]
            ),
            since=time.monotonic(),
        )
        number = self._total - len(self._waiting)
        self.say(f"[{number}/{self._total}] started {training.name}, log {submission.log(0)}")
        Thread(target=self._follow, args=(training.name, submission), daemon=True).start()
        return started

    def _follow(self, name: str, submission: Submission) -> None:
        """In a thread of its own: wait for the end of one training."""
        try:
            with open(os.devnull, "w") as nothing:
                self._ended.put((name, follow(submission, output=nothing, stop=self.stop)))
        except BaseException as error:
            self._ended.put((name, error))

    def _collect(self) -> None:
        try:
            name, result = self._ended.get(timeout=POLL_SECONDS)
        except Empty:
            return
        job = self._running.pop(name)
        if isinstance(result, BaseException):
            raise result
        duration = format_duration(time.monotonic() - job.since)
        if result.exit_code == 0:
            self._done.add(name)
            self.say(f"done    {name} in {duration}{self._value(name)}")
        elif result.exit_code == EXIT_STOPPED_RESUMABLE:
            self._stopped.add(name)
            self.say(f"stopped {name} after {duration}, resumable")
        elif is_diverged_trial(self.grid.trainings[name]):
            self._done.add(name)
            self.say(f"diverged {name} after {duration}: counted as the worst")
        else:
            what = failure_report(job.submission, result, streamed=False)
            self.failures.append(FailedRun(name=name, what=what, command=job.command))
            self.say(f"FAILED  {name} after {duration}; the others continue")

    def _value(self, name: str) -> str:
        """The metric, for the progress line; not every stage has it."""
        study, training = self.grid.study, self.grid.trainings[name]
        metric = study.select_metric if training.kind == TRIAL else study.metric
        try:
            value = trial_value(training, metric)
        except UserError:
            return ""
        return f": {metric} {shown_value(value, None, metric=metric)}"

    def _end_all(self) -> None:
        """Leave no process running, whatever ended the study."""
        if not self._running:
            return
        # A second Ctrl-C would leave processes running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for job in self._running.values():
            assert job.submission.controller is not None
            job.submission.controller.send_signal(signal.SIGINT)
        for job in self._running.values():
            end(job.submission, wait_first=CONTROLLER_SECONDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    submission: Submission
    command: str
    since: float


def report(failures: list[FailedRun], *, again: str) -> str:
    """List the failed trainings, each with its error, its log and the command to run it alone."""
    lines = [f"{len(failures)} training(s) failed:"]
    for failure in failures:
        lines.append(f"  {failure.name}: {failure.what}")
        if failure.command is not None:
            lines.append(f"    alone: {failure.command}")
    lines.append(f"then repeat the study; it trains what is missing ({again})")
    return "\n".join(lines)
