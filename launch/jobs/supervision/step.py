"""Run srun, and read from its errors which tasks failed.

Leaves out: what follows from it (`supervisor`).
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from launch.jobs.scontrol import host_names

# srun: error: n[1-2]: tasks 0-1: Exited with exit code 75
TASK_ENDED = re.compile(r"srun: error: ([^\s:]+): tasks? ([\d,-]+): (.+)")
EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
OUT_OF_MEMORY = "Out Of Memory"
# A process that outlives srun may keep its errors open.
READ_S = 5.0


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
        self.last_error = ""
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
        elif line.startswith("srun: error:"):
            self.last_error = line.removeprefix("srun: error:").strip()

    def wait(self) -> int:
        """Wait for the end. Returns srun's exit code."""
        code = self._process.wait()
        self._reader.join(timeout=READ_S)
        return code
