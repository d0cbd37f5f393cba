"""Run a plan on this machine: stage after stage, several runs at a time, failures reported last.

Owns: the order, progress lines, stopping, and the report.
Leaves out: one job (`launch.jobs`), and what is done (`states`).
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

from finetune.inference.settings import EvaluateRun
from launch.jobs.monitor import CONTROLLER_SECONDS, JobResult, StopFlag, end, failure_report, follow
from launch.jobs.preparation import LaunchableRun, prepare_job, with_num_workers
from launch.jobs.supervision.foreground import EXIT_INTERRUPTED, StartedJob, finish, start
from launch.plans.stages import Plan, Stage, Step, as_known_now
from launch.plans.states import StepState, stage_states
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.distributed.processes import num_cores
from vitscale.runs.training import TrainingRun
from vitscale.tracking.console import format_duration

POLL_SECONDS = 0.2
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRun:
    """A run, or a stage, that is not done, for the report at the end."""

    name: str
    what: str
    command: str | None = None
    """Runs it alone; None if it never started."""


@dataclass(kw_only=True)
class LocalPlan:
    """A plan on this machine."""

    plan: Plan
    num_procs: int
    """Processes of each run."""
    parallel: int
    """Runs at a time; the output of a run is shown if it is 1."""
    say: Say
    stop: StopFlag
    failures: list[FailedRun] = field(default_factory=list)
    _states: dict[str, StepState] = field(default_factory=dict)
    _not_done: set[str] = field(default_factory=set)
    """Names of stages."""

    def run(self) -> int:
        """Run what is not done: 0, 1 after a failure, 75 if it was stopped.

        Raises KeyboardInterrupt after Ctrl-C. No process is left, however it ends.
        """
        for number, stage in enumerate(self.plan.stages, start=1):
            title = stage.name
            if len(self.plan.stages) > 1:
                title = f"[{number}/{len(self.plan.stages)}] {title}"
            blocked = next((name for name in stage.needs if name in self._not_done), None)
            if blocked is not None:
                self._not_done.add(stage.name)
                what = f"not started: stage {blocked} is not done"
                self.failures.append(FailedRun(name=stage.name, what=what))
            elif self._run_stage(as_known_now(stage) if stage.needs else stage, title):
                return EXIT_STOPPED_RESUMABLE
        return 1 if self.failures else 0

    def _run_stage(self, stage: Stage, title: str) -> bool:
        """Whether it was stopped."""
        self._states |= stage_states(self.plan, stage, self._states)
        missing = [step for step in stage.steps if not self._states[step.name].is_done]
        if not missing:
            self.say(f"{title}: done before")
            return False
        self.say(f"{title}: {len(missing)} run(s)")
        runs = _StageRuns(
            stage=stage,
            states=self._states,
            num_procs=self.num_procs,
            parallel=self.parallel,
            say=self.say,
            stop=self.stop,
        )
        runs.run()
        self.failures += runs.failures
        self._states |= stage_states(self.plan, stage, self._states)
        if runs.failures:
            self._not_done.add(stage.name)
        return bool(runs.stopped)


@dataclass(kw_only=True)
class _StageRuns:
    """The runs of one stage. They are known here by their short names."""

    stage: Stage
    states: dict[str, StepState]
    num_procs: int
    parallel: int
    say: Say
    stop: StopFlag
    failures: list[FailedRun] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    """Runs that would be continued by repeating the plan."""
    _done: set[str] = field(default_factory=set)
    _waiting: list[str] = field(default_factory=list)
    _running: dict[str, _Running] = field(default_factory=dict)
    _ended: SimpleQueue[tuple[str, JobResult | BaseException]] = field(default_factory=SimpleQueue)
    _total: int = 0

    def run(self) -> None:
        """Run everything that is not done. Ends no later than its processes."""
        self._done = {s.short_name for s in self.stage.steps if self.states[s.name].is_done}
        self._waiting = [s.short_name for s in self.stage.steps if s.short_name not in self._done]
        self._total = len(self._waiting)
        try:
            while self._running or (self._waiting and not self.stop.is_set):
                if not self.stop.is_set:
                    self._start_ready()
                self._collect()
        finally:
            self._end_all()
        self.stopped |= set(self._waiting)

    def _start_ready(self) -> None:
        failed = {failure.name for failure in self.failures}
        for name in list(self._waiting):
            needed = self._step(name).needs
            if source := next((each for each in needed if each in failed), None):
                failed.add(name)
                self._fail(name, f"not started: {source} failed")
            elif self.stopped & set(needed):
                self._waiting.remove(name)
                self.stopped.add(name)
            elif len(self._running) < self.parallel and self._done >= set(needed):
                if self._is_allowed(name):
                    self._waiting.remove(name)
                    self._start(self._step(name))

    def _step(self, name: str) -> Step:
        return next(step for step in self.stage.steps if step.short_name == name)

    def _fail(self, name: str, what: str, command: str | None = None) -> None:
        if name in self._waiting:
            self._waiting.remove(name)
        self.failures.append(FailedRun(name=name, what=what, command=command))

    def _is_allowed(self, name: str) -> bool:
        """Whether its folder has no run with other settings; known only now that all is made."""
        if error := self.states[self._step(name).name].error:
            self._fail(name, error.text())
        return name in self._waiting

    def _start(self, step: Step) -> None:
        name, since = step.short_name, time.monotonic()
        run = self._with_share_of_cores(step.run)
        job, folder = prepare_job(run, cluster="local")
        started = start(job, launch=run.launch, num_procs=self.num_procs, folder=folder)
        words = ["python", "launch/local.py", "--config", os.path.relpath(job.config)]
        command = shlex.join([*words, "--num-procs", str(self.num_procs)])
        self._running[name] = _Running(started=started, command=command, since=since)
        number, log = self._total - len(self._waiting), started.submission.log(0)
        self.say(f"[{number}/{self._total}] started {name}, log {log}")
        Thread(target=self._follow, args=(name, started), daemon=True).start()

    def _with_share_of_cores(self, run: LaunchableRun) -> LaunchableRun:
        """Runs at the same time would otherwise use all cores each."""
        cores = max(1, num_cores() // (self.parallel * self.num_procs))
        if self.parallel > 1 and isinstance(run, TrainingRun) and run.engine.num_threads is None:
            engine = run.engine.model_copy(update={"num_threads": cores})
            return run.model_copy(update={"engine": engine})
        if self.parallel > 1 and isinstance(run, EvaluateRun) and run.compute.num_threads is None:
            compute = run.compute.model_copy(update={"num_threads": cores})
            return run.model_copy(update={"compute": compute})
        return with_num_workers(run, num_cores=cores)

    def _follow(self, name: str, started: StartedJob) -> None:
        """In a thread of its own: wait for the end of one run."""
        try:
            with open(os.devnull, "w") as nothing:
                output = sys.stdout if self.parallel == 1 else nothing
                result = follow(started.submission, output=output, stop=self.stop)
                self._ended.put((name, result))
        except BaseException as error:
            self._ended.put((name, error))

    def _collect(self) -> None:
        try:
            name, result = self._ended.get(timeout=POLL_SECONDS)
        except Empty:
            return
        if isinstance(result, BaseException):
            raise result
        job = self._running.pop(name)
        code, report = finish(job.started, result), ""
        if code not in (0, EXIT_STOPPED_RESUMABLE):
            report = failure_report(job.started.submission, result, streamed=self.parallel == 1)
        self._end(name, code, job.since, command=job.command, report=report)

    def _end(self, name: str, code: int, since: float, *, command: str | None, report: str) -> None:
        """Sort in a run that has ended."""
        duration = format_duration(time.monotonic() - since)
        if code == 0:
            self._done.add(name)
            self.say(f"done    {name} in {duration}")
        elif code == EXIT_STOPPED_RESUMABLE:
            self.stopped.add(name)
            self.say(f"stopped {name} after {duration}, resumable")
        else:
            self._fail(
                name, f"ended with code {code} after {duration}{report and f'; {report}'}", command
            )
            self.say(f"FAILED  {name} after {duration}; the others continue")

    def _end_all(self) -> None:
        """Leave no process running, whatever ended the plan."""
        if not self._running:
            return
        # A second Ctrl-C would leave processes running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        jobs = [job.started for job in self._running.values()]
        for job in jobs:
            assert job.submission.controller is not None
            job.submission.controller.send_signal(signal.SIGINT)
        for job in jobs:
            end(job.submission, wait_first=CONTROLLER_SECONDS)
            finish(job, JobResult(exit_code=EXIT_INTERRUPTED, failure=None))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    started: StartedJob
    command: str
    since: float


def report(failures: list[FailedRun], *, plan: Plan) -> str:
    """List what is not done, each with its error, its log and the command to run it alone."""
    lines = [f"{len(failures)} part(s) of the {plan.kind} are not done:"]
    for failure in failures:
        lines.append(f"  {failure.name}: {failure.what}")
        if failure.command is not None:
            lines.append(f"    alone: {failure.command}")
    lines.append("the same command runs what is not done")
    return "\n".join(lines)
