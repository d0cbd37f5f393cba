"""What a submission leaves in the job folder: a copy of the code, the configuration, no rests."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from launch.jobs.preparation import check_job, job_folder, prepare_job, submitting
from launch.jobs.snapshot import kept_code
from launch.jobs.submission import StageJob, _say_once, sbatch_text, submit_to_slurm
from tests.support.corpora.image_corpus import run_of
from tests.support.tables import every, refused
from vitscale.config.errors import UserError
from vitscale.config.packaged import RECORD_NAME, source_version
from vitscale.runs.launching import LaunchSettings


def git(root, *arguments):
    identity = "-c user.name=n -c user.email=e@example.org".split()
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True)


@pytest.fixture
def root(tmp_path):
    """A small checkout with one commit."""
    root = tmp_path / "checkout"
    files = yaml.safe_load(r"""
    .gitignore: "*.so\n__pycache__/\n/runs/\n"
    vitscale/model.py: "width = 1\n"
    vitscale/old.py: "old = 1\n"
    launch/job.sh: "#!/bin/sh\n"
    docs/page.md: "text\n"
    """)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all")
    return root


def copy_of(root, folder):
    return kept_code(LaunchSettings(), folder, root=root)


def test_a_snapshot_is_the_code_as_it_is_on_disk(root, tmp_path):
    """Edits, new files and extensions; no other folders."""
    (root / "vitscale/model.py").write_text("width = 2\n")
    (root / "vitscale/old.py").unlink()
    (root / "vitscale/new é.py").touch()

    # Git ignores both; a job cannot run without the extension, and needs no bytecode.
    (root / "vitscale/_region.abi3.so").write_bytes(b"ELF")
    (root / "vitscale/__pycache__").mkdir()
    (root / "vitscale/__pycache__/model.pyc").touch()

    copy = copy_of(root, tmp_path)
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(copy)) for path in files) == [
        "launch/job.sh",
        "source.json",
        "vitscale/_region.abi3.so",
        "vitscale/model.py",
        "vitscale/new é.py",
    ]
    assert (copy / "vitscale/model.py").read_text() == "width = 2\n"

    # From the commit and the patch the code can be made again, when the copy is gone.
    record = json.loads((copy / RECORD_NAME).read_text())
    assert record["patch"].startswith("# untracked: vitscale/new é.py\n")
    assert "-width = 1\n+width = 2\n" in record["patch"]


def test_what_is_no_code_is_not_copied(root, tmp_path):
    """A pipe would never end, a link may lead nowhere, and weights would take the memory."""
    os.mkfifo(root / "vitscale/pipe.py")
    (root / "vitscale/lost.py").symlink_to("nowhere")
    (root / "vitscale/itself.py").symlink_to("itself.py")
    (root / "vitscale/up").symlink_to(root)
    copy = copy_of(root, tmp_path)
    names = {str(path.relative_to(copy)) for path in copy.rglob("*.py")}
    assert names == {"vitscale/model.py", "vitscale/old.py"}

    # A file of 4 TiB that takes no space.
    with open(root / "vitscale/weights.npz", "wb") as file:
        file.truncate(1 << 42)
    with refused("weights.npz: has 4,398,046,511,104 bytes"):
        copy_of(root, tmp_path)


def test_the_record_replaces_git_inside_a_snapshot(root, tmp_path):
    # A run folder is often inside the checkout, whose commit may have moved on.
    (root / "runs").mkdir()
    copy = copy_of(root, root / "runs")
    recorded = source_version(copy)
    assert recorded == source_version(root)
    assert not recorded.patch

    git(root, "commit", "--quiet", "--allow-empty", "--message", "later")
    assert source_version(copy) == recorded
    assert source_version(root) != recorded

    # A job that submits another one copies its own copy.
    assert copy_of(copy, tmp_path).name == copy.name


def test_equal_code_shares_one_folder_and_other_code_does_not(root, tmp_path):
    first = copy_of(root, tmp_path)
    assert copy_of(root, tmp_path) == first

    # A new name is other code, and so is the same code without a commit to its name.
    (root / "launch/job.sh").rename(root / "launch/job")
    second = copy_of(root, tmp_path)
    (root / ".git").rename(tmp_path / "elsewhere")  # as in an installed package
    third = copy_of(root, tmp_path)
    assert len({first, second, third}) == 3
    assert len(list(tmp_path.glob("*code-*"))) == 3
    assert source_version(third) is None

    assert kept_code(LaunchSettings(snapshot=False), tmp_path, root=root) is None


# ---- the job folder ---------------------------------------------------------------------------


def test_a_refusal_removes_no_files_of_other_submissions(tmp_path):
    folder = tmp_path / "run/slurm"

    def submit():
        with submitting(folder):
            (folder / "12").mkdir()
            (folder / "config-2.yaml").touch()

    # The other one starts while this one is under way, and has to wait for its end.
    other = threading.Thread(target=submit)
    with pytest.raises(UserError), submitting(folder):
        (folder / "config-1.yaml").touch()
        other.start()
        other.join(0.2)
        raise UserError("refused")
    other.join()
    assert {path.name for path in folder.iterdir()} == {"12", "config-2.yaml"}


def test_a_job_has_a_private_folder_and_the_script_of_its_preparation(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = run_of("tars", "shards", source={"kind": "webdataset"}, script="index_shards")
    job = prepare_job(run, cluster="slurm")
    config = Path(job.config)

    # What is in these folders is executed with the user's rights.
    for folder in config.parents[:2]:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert Path(job.script).name == "index_shards.py"
    assert Path(job.script).is_file()
    assert job.run_folder is None
    assert "script: index_shards" in config.read_text()

    # A folder where the file should be is one error and no traceback.
    config.unlink()
    config.mkdir()
    with refused("output=.*: cannot be written"):
        prepare_job(run, cluster="slurm")

    monkeypatch.setattr(os, "getuid", lambda: 1234)
    with refused("another user, who could change the job"):
        prepare_job(run, cluster="slurm")


# sbatch fills in a "%", and takes the other two as marks of its own: files would be elsewhere.
@every(mark=["%", ":", "\\"])
def test_sbatch_reads_no_folder_otherwise(mark, tmp_path, monkeypatch):
    folder = tmp_path / f"a{mark}b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with refused("the job folder's path .* contains"):
        check_job(run_of("images", "x"), cluster="slurm")


def test_preparations_of_different_outputs_have_different_job_folders(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def folder_of(output):
        return job_folder(run_of("images", output), cluster="slurm")

    # The last part of a path alone would put two preparations into one folder.
    outputs = "shards a/shards b/shards a/b/shards /a/shards ~/shards ../shards".split()
    assert len({folder_of(output) for output in outputs}) == len(outputs)
    same = ["a/shards", "./a/shards/", "b/../a/shards", str(tmp_path / "a/shards")]
    assert len({folder_of(output) for output in same}) == 1

    # People still read the output in the name.
    assert folder_of("shards") == tmp_path / "runs/data_prep-shards/slurm"
    assert folder_of("a/shards").parent.name.startswith("data_prep-shards-")


# ---- what the shell that submits has ------------------------------------------------------------

# Prints what sbatch, and with it the job, would see.
SBATCH = """\
#!/bin/sh
env > "$SEEN"
echo "Submitted batch job 12"
"""
# man sbatch, INPUT ENVIRONMENT VARIABLES: each outranks the line of the script.
OVERRIDES = dict(
    word.split("=", 1)
    for word in """
    SBATCH_TIMELIMIT=5 SBATCH_SIGNAL=TERM@5 SBATCH_NO_REQUEUE=1 SBATCH_ARRAY_INX=0-99
    SBATCH_GRES=none SBATCH_GPUS=0 SBATCH_OPEN_MODE=truncate SBATCH_NEW_OPTION=1 SLURM_NTASKS=7
    SLURM_CPU_BIND=none SRUN_CPUS_PER_TASK=1 MASTER_ADDR=192.0.2.1 MASTER_PORT=29500 RANK=3
    WORLD_SIZE=8 LOCAL_RANK=3
    """.split()
)
# Of each variable a value, and the setting of a run that decides the same.
OF_SITE = yaml.safe_load("""
SBATCH_ACCOUNT: [other, {account: mine}]
SBATCH_PARTITION: [login, {partition: gpu}]
SBATCH_MEM_PER_NODE: [100M, {mem_gb: 8}]
SBATCH_MEM_PER_CPU: [1M, {mem_gb: 8}]
SBATCH_QOS: [low, {sbatch: {qos: high}}]
SBATCH_RESERVATION: [x, {sbatch: {reservation: y}}]
""")
Submit = Callable[[LaunchSettings], dict[str, str]]
CLUSTER = {"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_CLUSTERS": "c1"}


@pytest.fixture
def seen_by_sbatch(tmp_path, monkeypatch):
    """Submit a job with these settings; return the environment of sbatch."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "srun"):
        (programs / name).write_text(SBATCH)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))

    # The tests themselves may run in a job.
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
    _say_once.cache_clear()

    def submit(launch):
        folder = tmp_path / "job"
        folder.mkdir(exist_ok=True)
        job = StageJob(script="main.py", config="config.yaml")
        submit_to_slurm(
            job,
            launch=launch,
            name="x",
            folder=folder,
        )
        lines = seen.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    yield submit


def test_variables_of_the_shell_override_nothing_that_a_run_says(
    seen_by_sbatch, monkeypatch, capsys
):
    settings = {}
    for name, (value, setting) in OF_SITE.items():
        monkeypatch.setenv(name, value)
        settings |= setting
    # Two of them are of one section, which the second would have replaced.
    settings["sbatch"] = {"qos": "high", "reservation": "y"}
    for name, value in (OVERRIDES | CLUSTER).items():
        monkeypatch.setenv(name, value)

    before = dict(os.environ)
    variables = seen_by_sbatch(LaunchSettings(**settings))
    assert not variables.keys() & {*OVERRIDES, *OF_SITE}
    # Which cluster it is only the shell knows.
    assert CLUSTER.items() <= variables.items()
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert all(name in printed for name in (*OVERRIDES, *OF_SITE))
    assert dict(os.environ) == before

    # Once, however many runs are submitted.
    seen_by_sbatch(LaunchSettings(**settings))
    assert capsys.readouterr().err == ""


def test_the_site_decides_what_a_run_leaves_to_it(seen_by_sbatch, monkeypatch, capsys):
    values = {name: value for name, (value, _) in OF_SITE.items()}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert values.items() <= seen_by_sbatch(LaunchSettings()).items()

    # A forgotten variable would send jobs to another account, so each is said.
    printed = capsys.readouterr().err
    for name, value in values.items():
        assert f"{name}={value} of this shell counts" in printed


def test_a_job_around_the_shell_gives_nothing_to_the_new_one(
    seen_by_sbatch, monkeypatch, capsys
):
    of_job = "SLURM_JOB_ID SLURM_NTASKS SLURM_JOB_GPUS SLURMD_NODENAME".split()
    for name in of_job:
        monkeypatch.setenv(name, "3")
    assert not seen_by_sbatch(LaunchSettings()).keys() & {*of_job}
    assert capsys.readouterr().err == ""  # all of them, as everybody expects


def test_the_profile_of_a_node_names_no_ranks(tmp_path):
    """What bash has after the lines before srun, with a stale address in its environment."""
    launch = LaunchSettings(
        setup=("echo in setup: ${MASTER_PORT:-none} ${RANK:-none}",)
    )
    text = sbatch_text(launch, name="x", folder=tmp_path)
    first = text.partition("# setup\n")[2].partition("set +eu")[0]
    done = subprocess.run(
        ["bash", "-c", first],
        env=os.environ | {"MASTER_PORT": "29500", "RANK": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "in setup: none none\n"


# A word for the shell that splits it, ends a quotation, is filled in, or matches files.
@pytest.mark.parametrize("name", ["my run", "it's", "$HOME", "*", "Läufe (1)"])
def test_the_batch_script_takes_any_name_of_a_run(name, tmp_path):
    folder = str(tmp_path / name)
    text = sbatch_text(
        LaunchSettings(),
        name="x",
        folder=tmp_path / name / "slurm",
        run_folder=folder,
    )

    # The lines that use the folder, with programs that only print their arguments.
    lines = re.findall(r"^(?:next=|watch_lock |failed=).*$", text, re.MULTILINE)
    shows = 'printf "%s\\n" "$@"'
    shell = [
        f"{sys.executable}() {{ {shows}; }}; watch_lock() {{ {shows} >&3; }}",
        "exec 3>&1; job=17 code=0 srun_errors=/dev/null SLURM_JOB_ID=17",
        *lines,
        'wait; echo "$next"; echo "$failed"',
    ]
    words = subprocess.check_output(["bash", "-c", "\n".join(shell)], text=True)
    assert {folder, f"{folder}/.lock"} < {*words.splitlines()}
    assert words.endswith(f"{folder}/slurm/17/17.failed_starts\n")
