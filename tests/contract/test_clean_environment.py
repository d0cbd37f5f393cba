"""Tests do not inherit what the shell of a cluster, a container or nohup hands down."""

import json
import os
import signal

from tests.contract.tree import ROOT
from tests.support.waiting import run_python

# What a test sees, and a process that it starts.
DESCRIBE = """
import json, os, signal, sys
ignored = [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigIgn")]
blocked = list(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
umask = os.umask(0)
facts = {"environment": dict(os.environ), "ignored": int(ignored[0], 16), "blocked": blocked}
print(json.dumps(facts | {"umask": umask}))
"""
CLEAN = """
import subprocess, sys
from tests.support.clean_environment import clean_environment
clean_environment()
raise SystemExit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""
# What launchers, clusters, containers and shells leave there: of ranks, of SLURM, of languages and
# terminals, of stores and keys, of proxies.
HOSTILE = dict(
    word.split("=", 1)
    for word in """
    RANK=3 WORLD_SIZE=64 LOCAL_RANK=5 MASTER_ADDR=192.0.2.1 SLURM_JOB_ID=7 SLURM_PROCID=1
    SBATCH_PARTITION=none SLURM_CONF=/no GLOO_SOCKET_IFNAME=ib7 OMP_NUM_THREADS=2,1
    TORCHELASTIC_RUN_ID=a LC_ALL=C LANG=de_DE COLUMNS=20 NO_COLOR=1 FORCE_COLOR=1 TERM=dumb
    PYTHONSTARTUP=/no TZ=Asia/Kathmandu MPLBACKEND=tkagg MLFLOW_TRACKING_URI=http://192.0.2.1
    HF_TOKEN=x AWS_PROFILE=no WANDB_MODE=online VITSCALE_SITE=/no VITSCALE_ATTEMPT=9
    HTTP_PROXY=http://192.0.2.1:1 NO_PROXY=example.org
    """.split()
)


# As a job under nohup or a container's init may start it.
def become_hostile():
    os.umask(0o077)
    for number in (
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGCHLD,
    ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])


def test_a_test_inherits_nothing_of_the_shell_that_starts_it():
    done = run_python(
        "-c",
        CLEAN,
        DESCRIBE,
        cwd=ROOT,
        env=HOSTILE | {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        preexec_fn=become_hostile,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    environment = facts["environment"]
    kept = {name for name, value in HOSTILE.items() if environment.get(name) == value}
    assert kept == {"HTTP_PROXY"}, "a proxy may be the only way to a package index"

    # Tests start servers on this machine, which no proxy can reach.
    assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert environment["VITSCALE_SITE"] == ""
    assert environment["LC_ALL"] == "C.UTF-8"
    assert environment["PATH"] == os.environ["PATH"]

    # Python itself ignores two, which are about its own output. The C library keeps 32 and 33 for
    # itself: no program can set them, and some container runtimes hand down 32 as ignored.
    changeable = signal.valid_signals()
    ignored = {number for number in changeable if facts["ignored"] >> (number - 1) & 1}
    assert ignored == {signal.SIGPIPE, signal.SIGXFSZ}
    assert facts["blocked"] == []
    assert facts["umask"] == 0o022
