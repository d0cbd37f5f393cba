"""What tests inherit from the shell that starts them: as little as possible, and the same for all.

Owns: which variables stay; signals, permissions and limits of this process and its children.
"""

import os
import resource
import signal

# What programs need to be found and to reach the network; what configures pytest and its plugins;
# which GPU, compiler and package index to use. Everything else may name a job, a server, a language
# or a width that is not meant for tests.
KEPT = """
    PATH HOME USER LOGNAME TMPDIR LD_LIBRARY_PATH VIRTUAL_ENV
    PYTHONPATH PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PY_COLORS
    CUDA_VISIBLE_DEVICES CUDA_HOME CC CXX CPATH LIBRARY_PATH
    HTTP_PROXY HTTPS_PROXY NO_PROXY REQUESTS_CA_BUNDLE SSL_CERT_FILE
    VITSCALE_REQUIRE_ALL CI
""".split()
KEPT_PREFIXES = ("PYTEST_", "HYPOTHESIS_", "NVIDIA_", "PIP_", "UV_", "CONDA_", "XDG_")
SET = {
    # The developer's own site file has no effect on the tests.
    "VITSCALE_SITE": "",
    "WANDB_MODE": "offline",
    "LC_ALL": "C.UTF-8",
}
# Python's own handling of these is not that of a fresh process.
OWN_SIGNALS = {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}


def clean_environment():
    """Make this process independent of the shell that started it. To be called once, at first."""
    if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        os.environ.setdefault("PY_COLORS", "0")  # for pytest alone
    for name in list(os.environ):
        # Of proxies there are names in small letters, too.
        if name.upper() not in KEPT and not name.startswith(KEPT_PREFIXES):
            del os.environ[name]
    os.environ.update(SET)

    # Servers of tests are on this machine.
    local = [os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, local))

    os.umask(0o022)
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    restore_signals()


def restore_signals():
    """Let children start with the default action of every signal.

    nohup and a shell's `&` let a process ignore signals, and so all that it starts. A handler does
    not: this process goes on after a hang-up, and its children end.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # An ignored SIGCHLD would hide the exit codes of children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in signal.valid_signals() - OWN_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, go_on)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def go_on(*_):
    """Handle a signal that this process ignores."""
