"""Start a real SLURM on this machine: munged, one slurmctld and two slurmd.

Everything is in one temporary folder, with its own munge key and socket, ports and spools. A SLURM
or munge that already runs on the machine is not touched. Both nodes are this host under two names,
so processes are tracked by ancestry (`linuxproc`) and CPU counts are invented (`config_overrides`).
No cgroups and no accounting are needed.
"""

import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from launch.jobs.preparation import submitting
from launch.jobs.submission import StageJob, Submission, submit_to_slurm
from tests.support.levels import skip_or_fail
from tests.support.waiting import PATIENCE_S, ROOT, wait_until
from vitscale.distributed.processes import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")

# A requeued job waits until its old credential has expired: 120 s unless cred_expire says less.
CONFIGURATION = """\
ClusterName=vitscaletest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
MinJobAge=300
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=test Nodes={names} Default=YES MaxTime=60 State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=2000"


@dataclass
class SlurmCluster:
    """A running cluster; commands find it through `environment`."""

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """munged, slurmctld, and each slurmd by its node."""

    def run(
        self, command: Sequence[object], *, cwd: Path | None = None, **more: str
    ) -> str:
        """Standard output of a command. Raises with its errors. more: variables."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environment | more,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def script(self, name: str, *arguments, cwd: Path, **more: str) -> str:
        return self.run([sys.executable, ROOT / name, *arguments], cwd=cwd, **more)

    def job(self, job_id: str) -> dict[str, str]:
        """The controller's fields of a job, for example JobState, ExitCode and Restarts."""
        ask = f"scontrol --oneliner show job {job_id}"

        # A controller that has just started may drop a request.
        words = self.run(["bash", "-c", f"{ask} || (sleep 5; {ask})"]).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job_id: str, *, states: Sequence[str]) -> dict[str, str]:
        """Wait until the job is in one of `states`. A timeout shows the job and all logs."""
        wait_until(
            lambda: self.job(job_id)["JobState"] in states,
            else_say=lambda: f"job {job_id} is {self.job(job_id)}\n{self.logs()}",
            every_s=0.2,
        )
        return self.job(job_id)

    def kill_node(self, name: str):
        """End everything of a node at once, as a loss of power does."""
        # The daemon first: it would tell the controller how its tasks ended.
        self.kill(name)
        for process, _ in self.processes(SLURMD_NODENAME=name):
            with suppress(psutil.Error):
                parent = process.parent()
                # The daemons of steps have no such variable.
                if parent is not None and parent.name() == "slurmstepd":
                    parent.kill()
                process.kill()

    def processes(
        self, **variables: str
    ) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        """All that runs in this cluster with these variables, and its environment."""
        variables["SLURM_CONF"] = self.environment["SLURM_CONF"]
        for process in psutil.process_iter():
            # A process may end while it is looked at.
            with suppress(psutil.Error):
                environment = process.environ()
                is_ours = variables.items() <= environment.items()
                if is_ours and process.status() != "zombie":
                    yield process, environment

    def kill(self, daemon: str):
        self.daemons[daemon].kill()
        self.daemons[daemon].wait()

    def start(self, daemon: str, *, without: Path | None = None):
        """Start munged, slurmctld or the slurmd of a node, again if it was killed.

        It is in the foreground, as a child process that is easy to end. without: a folder that is
        empty on this node.
        """
        if daemon in NODES:
            command = [str(_program("slurmd")), "-D", "-N", daemon]
        elif daemon == "slurmctld":
            # A controller without saved state ends, but for -i.
            command = [str(_program(daemon)), "-D", "-i"]
        else:
            # --force: the folder's parents may be writable by others; the key itself is not.
            command = [str(_program(daemon)), "-F", "--force", *self._munge_files()]
        # Hidden in its own mount namespace, which all that it starts inherits.
        if without is not None:
            hide = f"mount -t tmpfs none {shlex.quote(str(without))} && exec {shlex.join(command)}"
            command = ["unshare", "--mount", "sh", "-c", hide]
        with open(self.folder / f"{daemon}-output.log", "ab") as output:
            self.daemons[daemon] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=output,
            )

    def _munge_files(self) -> Iterator[str]:
        """Each would otherwise be the file of a munge that runs on this machine."""
        munge = self.folder / "munge"
        yield f"--socket={munge}/socket"
        for name in ("key", "pid", "seed", "log"):
            yield f"--{name}-file={munge}/{name}"

    def num_idle(self) -> int:
        words = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        # Of a controller that does not answer yet, no node is idle.
        answer = subprocess.run(
            words, env=self.environment, capture_output=True, text=True
        )

        # A node is listed once for each partition.
        return sum(line.endswith(" idle") for line in set(answer.stdout.splitlines()))

    def await_idle(self):
        def are_idle():
            return self.num_idle() == len(NODES)

        wait_until(are_idle, else_say=self.logs, every_s=0.2)

    def logs(self) -> str:
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)


def _program(name: str) -> str | None:
    # /usr/sbin is not on every user's PATH.
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _write_configuration(folder: Path, *, more: str) -> Path:
    host = socket.gethostname().split(".")[0]
    # A port that is free twice in a row may be given twice.
    ports = set()
    while len(ports) <= len(NODES):
        ports.add(free_port())
    ctld_port, *node_ports = ports
    nodes = []
    for name, port in zip(NODES, node_ports, strict=True):
        nodes.append(NODE.format(name=name, host=host, port=port))
    path = folder / "slurm.conf"
    text = CONFIGURATION.format(
        folder=folder,
        host=host,
        user=pwd.getpwuid(os.getuid()).pw_name,
        ctld_port=ctld_port,
        nodes="\n".join(nodes),
        names=",".join(NODES),
    )
    path.write_text(text + more)
    return path


@contextmanager
def slurm_cluster(*, more: str = "") -> Iterator[SlurmCluster]:
    """A cluster of two idle nodes, removed completely when the block ends.

    more: lines added to slurm.conf. Skips the test where programs are missing.
    """
    missing = [name for name in DAEMONS if _program(name) is None]
    if missing:
        names = ", ".join(missing)
        install = "Debian, Ubuntu: apt-get install slurm-wlm munge"
        skip_or_fail(f"no {names} here ({install})")

    # Short, since the munge socket's path must stay below 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    munge = folder / "munge"
    munge.mkdir(mode=0o755)
    (folder / "state").mkdir(mode=0o755)
    # munged refuses a key that others can read, and one that is short.
    key = munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    # These tests may themselves run in a job, whose variables sbatch would take for options.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM")
    }
    environment["SLURM_CONF"] = str(_write_configuration(folder, more=more))
    cluster = SlurmCluster(folder=folder, environment=environment)
    cluster.start("munged")
    try:
        wait_until((munge / "socket").exists, else_say=cluster.logs)
        for name in ("slurmctld", *NODES):
            cluster.start(name)
        cluster.await_idle()
        try:
            yield cluster
        finally:
            # Jobs end before the daemons.
            cluster.run(["scancel", f"--user={pwd.getpwuid(os.getuid()).pw_name}"])
            cluster.await_idle()
    finally:
        # The nodes before the controller, and all before munged, which they sign messages with.
        for daemon in reversed(cluster.daemons.values()):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


# The interpreter of ranks: what is wrong with one node is a file of shell lines, named after it.
PYTHON = """\
#!/bin/sh
fault={folder}/nodes/$SLURMD_NODENAME
[ ! -f "$fault" ] || . "$fault"
exec {python} "$@"
"""


def breakable_python(folder: Path) -> Path:
    """An interpreter for `launch.python` that begins with the lines of `folder/nodes/NODE`."""
    (folder / "nodes").mkdir()
    path = folder / "python"
    path.write_text(PYTHON.format(folder=folder, python=sys.executable))
    path.chmod(0o755)
    return path


def with_module(folder: Path, module: str, text: str) -> str:
    """The shell line of a node whose Python finds this module first."""
    package = folder / f"broken-{module}"
    package.mkdir(exist_ok=True)
    (package / f"{module}.py").write_text(text)
    return f"export PYTHONPATH={package}:$PYTHONPATH"


def without_folder(folder: Path) -> str:
    """The shell line of a node where a folder is empty."""
    start = f'mount -t tmpfs none {folder} && exec {sys.executable} "$@"'
    return f"exec unshare --mount sh -c '{start}' sh \"$@\""


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def submit(slurm, tmp_path, monkeypatch, request) -> Callable[..., Submission]:
    """Submit a stand-in script as a stage of the run in tmp_path, with LAUNCH of the test's file.

    The submitted function takes changes of LAUNCH.
    """
    # In this process, so that a test can patch what is submitted.
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    folder = tmp_path / "slurm"
    folder.mkdir()

    def submit_script(text, **changes):
        script = folder / "main.py"
        config = folder / "config.yaml"
        script.write_text(textwrap.dedent(text))
        config.touch()
        job = StageJob(script=str(script), config=str(config), run_folder=str(tmp_path))
        launch = request.module.LAUNCH.model_copy(update=changes)
        with submitting(folder):
            return submit_to_slurm(job, launch=launch, name="stand-in", folder=folder)

    return submit_script


def wait_for_files(folder: Path, *names: str):
    wait_until(
        lambda: all((folder / name).exists() for name in names),
        else_say=lambda: f"no {names} in {sorted(folder.iterdir())}",
    )
