"""Measure the peak of resident memory in a child process."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name + ":")) / 1024

{imports}
# As in a worker that has handled large images: now the C library keeps smaller blocks.
large = bytearray(31 << 20)
del large
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets the peak
before = resident("VmRSS")
{work}
print(resident("VmHWM") - before)
"""


def peak_mib(*, imports: str, work: str) -> float:
    """MiB that `work` takes at its peak, in its own process."""
    code = CHILD.format(imports=imports, work=work)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return float(child.stdout.splitlines()[-1])
