"""Run a chain on this machine: one run after another, each as the job that SLURM would run.

Leaves out: what is done (`states`), one job (`launch.jobs`).
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from launch.chains.comparing import comparison_job
from launch.chains.graph import Chain, ChainStep, Stage, as_known_now
from launch.chains.settings import ComparisonRun
from launch.chains.states import StepState, stage_states
from launch.chains.tracking import children, close, open_parent
from launch.jobs.monitor import StopFlag
from launch.jobs.preparation import LaunchableRun, prepare_job, with_num_workers
from launch.jobs.supervision.foreground import EXIT_INTERRUPTED, start_and_watch
from launch.studies.running import FailedRun
from vitscale.config.errors import EXIT_BAD_INPUT, EXIT_STOPPED_RESUMABLE
from vitscale.distributed.processes import num_cores
from vitscale.tracking.console import format_duration

Say = Callable[[str], None]
STOPPED = (EXIT_STOPPED_RESUMABLE, EXIT_INTERRUPTED)


@dataclass(kw_only=True)
class LocalChain:
    """The runs of a chain on this machine."""

    chain: Chain
    num_procs: int
    """Processes of each run."""
    say: Say
    stop: StopFlag
    failures: list[FailedRun] = field(default_factory=list)
    _states: dict[str, StepState] = field(default_factory=dict)
    _not_done: set[str] = field(default_factory=set)
    """Names of stages."""

    def run(self) -> int:
        """Run what is not done. Returns 0, 1 after a failure, 75 or 130 if it was stopped."""
        num_stages = len(self.chain.stages)
        for number, stage in enumerate(self.chain.stages, start=1):
            blocked = next((name for name in stage.needs if name in self._not_done), None)
            if blocked is not None:
                self._not_done.add(stage.name)
                what = f"not started: stage {blocked} is not done"
                self.failures.append(FailedRun(name=stage.name, what=what))
                continue
            code = self._run_stage(as_known_now(stage), f"[{number}/{num_stages}]")
            if code in STOPPED:
                return code
        return 1 if self.failures else 0

    def _run_stage(self, stage: Stage, number: str) -> int:
        """0 or 1; the exit code of a run that was stopped."""
        self._states |= stage_states(self.chain, stage, self._states)
        missing = [step for step in stage.steps if not self._states[step.name].is_done]
        if not missing:
            self.say(f"{number} {stage.name}: done before")
            return 0
        parent = open_parent(stage, say=self.say)
        num_failed = 0
        for step in children(stage, missing, parent):
            self.say(f"{number} {step.name}: {stage.kind} in {step.folder}")
            code = self._run_step(step)
            if code in STOPPED or self.stop.is_set:
                close(stage, parent, status="KILLED", say=self.say)
                return code or EXIT_STOPPED_RESUMABLE
            num_failed += code != 0
        close(stage, parent, status="FAILED" if num_failed else "FINISHED", say=self.say)
        self._states |= stage_states(self.chain, stage, self._states)
        if num_failed:
            self._not_done.add(stage.name)
        return int(num_failed > 0)

    def _run_step(self, step: ChainStep) -> int:
        if error := self._states[step.name].error:
            # Known only now that the shards are made.
            self.failures.append(FailedRun(name=step.name, what=error.text()))
            return EXIT_BAD_INPUT
        since = time.monotonic()
        command = None
        if isinstance(step.run, ComparisonRun):
            try:
                code = comparison_job(step.run)()
            except SystemExit as end:
                code = int(end.code or 1)
            except KeyboardInterrupt:
                code = EXIT_INTERRUPTED
        else:
            code, command = self._run_job(step.run)
        took = format_duration(time.monotonic() - since)
        if code == 0:
            self.say(f"done   {step.name} in {took}")
        elif code not in STOPPED:
            what = f"ended with code {code} after {took}"
            alone = f"\n    alone: {command}" if command else ""
            self.failures.append(FailedRun(name=step.name, what=f"{what}{alone}"))
            self.say(f"FAILED {step.name}, {what}")
        return code

    def _run_job(self, run: LaunchableRun) -> tuple[int, str]:
        """(exit code, the command that runs it alone)."""
        run = with_num_workers(run, num_cores=max(1, num_cores() // self.num_procs))
        job, folder = prepare_job(run, cluster="local")
        code = start_and_watch(
            job, launch=run.launch, num_procs=self.num_procs, folder=folder, stop=self.stop
        )
        words = ["python", "launch/local.py", "--config", os.path.relpath(job.config)]
        return code, shlex.join([*words, "--num-procs", str(self.num_procs)])


def report(failures: list[FailedRun]) -> str:
    """List the runs that are not done, each with its error."""
    lines = [f"{len(failures)} part(s) of the chain are not done:"]
    lines += [f"  {failure.name}: {failure.what}" for failure in failures]
    return "\n".join([*lines, "the same command runs what is not done"])
