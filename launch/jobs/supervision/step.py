"""Run srun, and read from its errors which tasks failed and which nodes died.

Leaves out: what follows from it (`supervisor`).
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from launch.jobs.scontrol import host_names, silent_nodes

# srun: error: n[1-2]: tasks 0-1: Exited with exit code 75
TASK_ENDED = re.compile(r"srun: error: ([^\s:]+): tasks? ([\d,-]+): (.+)")
NODE_FAILED = re.compile(r"srun: error: Node failure on (\S+)")
EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
OUT_OF_MEMORY = "Out Of Memory"
# srun ends the other tasks once one has failed. A node whose tasks have not ended by then is dead.
STRAGGLER_S = 90.0
# How often SLURM is asked whether such a node answers.
ASK_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """A line of srun about tasks that failed together."""

    nodes: tuple[str, ...]
    ranks: str
    """As srun writes them: 1, or 0-3,7."""
    what: str
    """As srun writes it: Killed, or Exited with exit code 1."""

    @property
    def exit_code(self) -> int | None:
        """None if a signal ended the tasks."""
        found = EXIT_CODE.search(self.what)
        return int(found[1]) if found else None

    @property
    def first_rank(self) -> int:
        return int(re.split("[,-]", self.ranks)[0])

    @property
    def signal(self) -> signal.Signals | None:
        named = {signal.strsignal(number): number for number in signal.Signals}
        return named.get(self.what.removesuffix(" (core dumped)"))

    @property
    def text(self) -> str:
        many = len(self.nodes) > 1 or not self.ranks.isdecimal()
        who = f"rank{'s' * many} {self.ranks} on {', '.join(self.nodes)}"
        if self.exit_code is not None:
            return f"{who} ended with code {self.exit_code}"
        if self.what == OUT_OF_MEMORY:
            return f"{who} ran out of memory and was killed"
        if self.signal is not None:
            return f"{who} was ended by {self.signal.name} ({self.what})"
        return f"{who}: {self.what}"


class JobStep:
    """A running srun. Its errors are copied to this process's and read."""

    def __init__(self, command: Sequence[str]) -> None:
        self.ends: list[TaskEnd] = []
        self.failed_nodes: list[str] = []
        """Nodes that SLURM says have failed."""
        self.last_error = ""
        self.first_end: float | None = None
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            self.read_line(line)

    def read_line(self, line: str) -> None:
        if found := TASK_ENDED.match(line):
            end = TaskEnd(nodes=host_names(found[1]), ranks=found[2], what=found[3].strip())
            self.ends.append(end)
            self.first_end = self.first_end or time.monotonic()
        elif found := NODE_FAILED.match(line):
            self.failed_nodes += host_names(found[1])
        elif line.startswith("srun: error:"):
            self.last_error = line.removeprefix("srun: error:").strip()

    def wait(self, *, nodes: Sequence[str]) -> tuple[int, list[str]]:
        """Wait for the end. Returns srun's exit code and the nodes that have died.

        srun waits for a dead node until SLURM gives it up (SlurmdTimeout, 5 min by default).
        """
        suspects: list[str] = []
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=ASK_EVERY_S)
                self._reader.join(timeout=ASK_EVERY_S)
                return code, list(self.failed_nodes)
            if self.first_end is None:
                continue
            reported = {node for end in self.ends for node in end.nodes}
            unreported = [node for node in nodes if node not in reported]
            silent = silent_nodes(unreported)
            # Twice: a slurmd may just be restarting.
            dead = [node for node in silent if node in suspects]
            if time.monotonic() - self.first_end > STRAGGLER_S:
                dead = dead or unreported
            if dead:
                self._process.kill()
                return self._process.wait(), dead
            suspects = silent
