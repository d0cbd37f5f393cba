"""`--help` and configuration errors need nothing heavy and come at once."""

import json
import os

import pytest

from tests.contract.tree import ROOT, imports_of, module_files, scripts
from tests.support.waiting import PATIENCE_S, run_python

HEAVY = ("torch", "torchvision", "deepspeed", "timm", "mlflow", "webdataset")
# What the files of a script or a folder say.
STAGE_OF = {
    "data_prep": "data_prep",
    "finetune": "finetune",
    "finetune.embed": "embed",
    "finetune.evaluate_model": "evaluate",
    "finetune.export": "export",
    "finetune.predict": "predict",
    "finetune.visualize": "visualize",
    "pretrain.prepare_targets": "targets",
}
# Of all scripts together; about a second. With torch it would be over a thousand.
MAX_MODULES = 800
WITH_CONFIG = sorted(
    module
    for module in scripts()
    if "vitscale.config.command_line" in imports_of(module)
)
# One process runs all scripts. Heavy imports fail there, so that each script has to try its own.
RUN_ALL = """
import contextlib, io, json, os, runpy, sys
heavy, commands = json.loads(sys.argv[1])
tried = []
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in heavy:
            tried.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
# A rank that fails ends its process in seconds, but this one tries them all.
from vitscale.distributed import processes
processes.EXIT_S = 1e5
def run(path, *arguments):
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(path)
    tried.clear()
    output = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            code = repr(error)
    return {"code": code, "output": output.getvalue(), "heavy": list(tried)}
found = {name: run(*command) for name, command in commands.items()}
# As in a container whose orchestrator numbers them: no other process speaks for this one.
from vitscale.config import errors
errors.FIRST_RANK_S = 0.0
os.environ["RANK"] = "1"
ranks = {name: run(*command) for name, command in commands.items() if "--help" not in command}
print(json.dumps({"runs": found, "ranks": ranks, "modules": sorted(sys.modules)}), flush=True)
os._exit(0)  # not with the code of the last script
"""


def run_all(folder, commands):
    """What RUN_ALL found; the scripts write nothing."""
    before = sorted(folder.iterdir())
    done = run_python(
        "-c",
        RUN_ALL,
        json.dumps([HEAVY, commands]),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr

    # Lines before the last one are of scripts that print at import.
    report = json.loads(done.stdout.splitlines()[-1])
    assert sorted(folder.iterdir()) == before, "a script wrote files"
    return report


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Every script with --help, and those with a configuration with a wrong one."""
    folder = tmp_path_factory.mktemp("started")
    commands = {}
    for module in sorted(scripts()):
        commands[f"{module} --help"] = [str(module_files()[module]), "--help"]
    for module in WITH_CONFIG:
        stage = STAGE_OF.get(module, STAGE_OF.get(module.split(".")[0], "pretrain"))
        # Three mistakes: an unknown key, a wrong type, and a key of the command line that is none.
        config = f"stage: {stage}\nno_such_key: 1\nseed: many\n"
        (folder / f"{stage}.yaml").write_text(config)
        arguments = [str(module_files()[module]), "--config", f"{stage}.yaml", "lr.=1"]
        commands[f"{module} --config"] = arguments
    report = run_all(folder, commands)
    assert len(report["runs"]) == len(scripts()) + len(WITH_CONFIG)
    return report


def test_a_missing_package_is_named():
    # -I and -S hide everything that is installed, as in another environment's Python. These two
    # are started by programs that have found the package already.
    others = {"launch.jobs.requeue_decision", "vitscale.command"}
    for script in scripts() - others:
        done = run_python("-I", "-S", module_files()[script])
        assert done.returncode == 2, done
        assert "Run: pip install -e ." in done.stderr, done


@pytest.mark.slow
def test_training_imports_no_tracker():
    # mlflow alone takes seconds to import, on every rank.
    code = "import sys, vitscale.training.session; print({'mlflow', 'wandb'} & {*sys.modules})"
    assert run_python("-c", code, cwd=ROOT).stdout.endswith("set()\n")


def test_scripts_start_light(started):
    for name, run in started["runs"].items():
        assert not run["heavy"], name
    assert len(started["modules"]) < MAX_MODULES


def test_help_is_short_and_names_every_group(started):
    outputs = {}
    for name, run in started["runs"].items():
        if name.endswith("--help"):
            assert not run["code"], run
            assert "usage" in run["output"].lower(), run
            outputs[name] = run["output"]

    # It fits a screen of 45 lines, with the groups of settings by name alone.
    names = "pretrain.main finetune.main launch.slurm data_prep.make_shards"
    for name in names.split():
        output = outputs[f"{name} --help"]
        assert len(output.splitlines()) <= 45, output
        assert "\n  launch  " in output, output


def test_configuration_errors_are_reported(started):
    # All of them at once, with file and line.
    parts = (".yaml:2: no_such_key", ".yaml:3: seed", "'lr.' is not a key")
    for name, run in started["runs"].items():
        if name.endswith("--config"):
            assert run["code"] == 2, run
            for part in parts:
                assert part in run["output"], run


def test_a_wrong_path_is_an_error_before_torch_is_imported(tmp_path):
    """That of a model, and of an image."""
    commands = {}
    for name, words in (
        ("embed", "init=lost data.path=x output=x.parquet"),
        ("predict", "init=lost x"),
        ("predict", "init=. x"),
        ("visualize", "init=lost"),
        ("visualize", "init=. x"),
        ("export", "init=lost to=timm x"),
    ):
        path = module_files()[f"finetune.{name}"]
        commands[f"{name} {words}"] = [str(path), *words.split()]

    for name, run in run_all(tmp_path, commands)["runs"].items():
        expected = "no such file or folder: 'x'"
        if "lost" in name:
            expected = "init=lost: no such run or checkpoint folder"
        assert run["code"] == 2, run
        assert not run["heavy"], run
        assert expected in run["output"], run


def test_no_script_ends_without_its_error_where_rank_is_set(
    started,
):
    # Only the first rank reports; where no other process is the first one, nobody would.
    assert len(started["ranks"]) == len(WITH_CONFIG)
    for name, run in started["ranks"].items():
        assert run["code"] == 2, name
        assert ".yaml:2: no_such_key" in run["output"], name
