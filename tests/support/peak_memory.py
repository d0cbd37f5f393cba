"""The peak of a child process' resident memory, above what it had before."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name + ":")) / 1024

{imports}
# As a worker that has handled large images: from here on the C library keeps smaller pieces.
large = bytearray(31 << 20)
del large
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = resident("VmRSS")
{work}
print(resident("VmHWM") - before)
"""


def peak_mib(*, imports: str, work: str) -> float:
    """MiB that `work` takes at its peak, in a process of its own."""
    code = CHILD.format(imports=imports, work=work)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return float(child.stdout.splitlines()[-1])
