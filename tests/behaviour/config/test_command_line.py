"""Switches, overrides, --help, and the end of a script."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.settings import PredictRun
from pretrain.run import PretrainRun
from tests.support.tables import every, lines, refused, rows
from tests.support.waiting import PATIENCE_S, run_python
from vitscale.config.command_line import Command, load_command
from vitscale.config.errors import UserErrors, run_script

# All that must be set, but for the length: tests add it.
CONFIG = "{name: demo, data: {path: s, global_batch: 64}, model: {preset: B/16}, optim: {lr: 1}"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(CONFIG + ", schedule: {epochs: 3}}")


def command(*argv, **more) -> Command[PretrainRun]:
    """Read the arguments of a script with one switch."""
    switches = {"--dry-run": "show, do not start"}
    texts = {"program": "vitscale x", "description": "Does x."}
    return load_command(PretrainRun, argv=argv, switches=switches, **texts, **more)


# As a person writes it, and as launchers add it.
@every(config="[--config, a.yaml], [--config=a.yaml]")
@every(rank="[], [--local_rank=1], [--local_rank, '1'], [--local-rank=0]")
def test_arguments_may_stand_in_any_order(config, rank):
    found = command(*rank, "seed=3", *config, "--dry-run", "optim.lr=1e-4")
    assert found.run.seed == 3
    assert found.run.optim.lr == 1e-4
    assert found.config_path == "a.yaml"
    assert found.switches == {"--dry-run"}
    assert command(*config).switches == frozenset()


def test_no_configuration_is_answered_with_commands():
    message = r"one of\n    first\n    second\n    vitscale x --help"
    with refused(message):
        command(examples=("first", "second"))


def shown(capsys, *argv):
    """Return what a call prints that only shows something."""
    with pytest.raises(SystemExit) as ended:
        command(*argv, examples=("x.py data.path=SHARDS",))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_lists_groups_or_settings(capsys):
    # Groups alone: all settings would be many pages.
    short = shown(capsys, "--help")
    assert "  x.py data.path=SHARDS" in short
    assert "--dry-run" in short
    assert "\n  optim          a group with the keys name, lr, " in short
    choice = "a group with the key name: masked_patch_prediction, "
    assert f"\n  objective      {choice}" in short

    # The settings of some groups, and of one key.
    optim = shown(capsys, "--help", "optim", "schedule")
    text = "- **`optim.lr`** (a number above 0; required). Peak learning rate"
    assert f"\n{text}" in optim
    assert "`schedule.epochs`" in optim
    assert "data.path" not in optim
    key = shown(capsys, "seed=1", "--help=optim.ema")
    assert key.startswith("\n## optim\n\n- **`optim.ema`** (")
    assert "optim.lr" not in key

    with refused("no group or key 'optm'.*\n.*\n.* did you mean optim?"):
        command("--help", "optm")


def test_options_are_keys():
    options = {"--lr": "optim.lr"}
    given = command("--config", "a.yaml", "--lr", "2e-3", options=options)
    assert given.run.optim.lr == 2e-3
    with refused("command line: argument --lr: expected one argument"):
        command("--config", "a.yaml", "--lr", options=options)


def test_words_are_the_value_of_their_key():
    """Also words that would be no text in YAML."""
    run = command("--config", "a.yaml", "1e5", words_key="output").run
    assert run.output == "1e5"

    # A key that takes one text cannot take two words.
    with refused(r"output: \['b', 'c'\] is a list of 2"):
        command("--config", "a.yaml", "b", "c", words_key="output")

    # A command without a file: brackets and blanks are parts of names.
    predict = load_command(
        PredictRun,
        argv=["init=runs/a", "[b].jpg", "c d.png"],
        needs_config=False,
        words_key="images",
        program="vitscale x",
        description="",
    )
    assert predict.run.images == ("[b].jpg", "c d.png")
    assert predict.config_path is None


def test_command_line_and_file_errors_share_one_report():
    with pytest.raises(UserErrors) as caught:
        command("--config", "a.yaml", "--dryrun", "seed=x", "lr", "--dry")
    texts = [error.text() for error in caught.value.errors]
    assert [text.splitlines()[0] for text in texts] == [
        "command line: unknown switch --dryrun",
        "command line: unknown switch --dry",
        "command line: 'lr' is not key=value",
        "command line: seed: 'x' was read as text",
    ]
    assert "did you mean --dry-run?" in texts[0]


def test_a_reader_that_has_enough_is_no_error():
    # 10 MB, of which `head` takes one line and goes.
    code = (
        "from vitscale.config.errors import run_script\n"
        "run_script(lambda: [print('x' * 1000) for _ in range(10_000)])"
    )
    shell = f'{sys.executable} -c "{code}" | head -1 | wc -c; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.stdout.split() == ["1001", "1"]
    assert done.stderr == ""


def test_a_pipe_other_than_the_output_still_fails():
    def fail():
        raise BrokenPipeError("of a worker")

    # Only the output may be closed; another pipe is a fault that must be seen.
    with pytest.raises(BrokenPipeError, match="of a worker"):
        run_script(fail)


# As people write it for other tools.
@lines("""
words | message
--data.path x | next: write data.path=x\\Z
--seed=5 | next: write seed=5\\Z
--seed | next: write seed=VALUE\\Z
--config runs/old | next: resume this run by its settings: runs/old/config
--config b/nothing.yaml | no file b/nothing.yaml\\n  next: `vitscale configs` lists
""")
def test_a_slip_is_answered_with_the_right_words(words, message):
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/config.yaml").touch()
    with refused(message):
        command("--config", "a.yaml", *words.split())


# One length replaces the other; a length that is taken away leaves the file's.
@rows("""
- [given, steps, epochs, says]
- [steps=5, 5, null, schedule.steps replaces schedule.epochs=3 of a.yaml:1]
- [epochs=7, null, 7, ""]
- [epochs=null schedule.steps=5, 5, null, ""]
- [steps=null, null, 3, ""]
""")
def test_a_length_on_the_command_line_replaces_that_of_the_file(
    given, steps, epochs, says, capsys
):
    words = f"schedule.{given}".split()
    schedule = command("--config", "a.yaml", *words).run.schedule
    assert schedule.steps == steps
    assert schedule.epochs == epochs
    assert capsys.readouterr().err.strip() == says


def test_names_of_evaluations_are_a_list_of_them():
    run = command("--config", "a.yaml", "evaluate=knn, few_shot").run
    assert [evaluation.name for evaluation in run.evaluate] == ["knn", "few_shot"]


INTERRUPTED = """
import os, signal, time, weakref
from vitscale.config import errors
errors.INTERRUPT_S = 1
class Some: pass
def press(*_):
    os.kill(os.getpid(), signal.SIGINT)
def work():
    press()
    time.sleep(60)
def cut_import():
    try:
        work()
    except KeyboardInterrupt:
        raise ImportError("cut off") from None
def callback():
    weak = weakref.ref(Some(), press)
    time.sleep(60)
def clean_up():
    try:
        work()
    finally:
        work()
def before():
    pass
with errors.interrupts_deferred():
    if CASE is before:
        press()
    errors.run_script(work if CASE is before else CASE)
"""


@every(case="work, cut_import, callback, clean_up, before")
def test_ctrl_c_is_one_line(case):
    """In whatever it meets: an import, a callback that drops the exception, a clean-up."""
    program = INTERRUPTED.replace("CASE", case)

    # Runners in the background ignore Ctrl-C, and their children would, too.
    done = run_python(
        "-c",
        program,
        timeout=PATIENCE_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr == "\nstopped by Ctrl-C\n"


def test_a_background_job_ignores_ctrl_c():
    """A shell starts it with the signal ignored, and that is how it stays."""
    code = (
        "import os, signal\nfrom vitscale.config.errors import run_script\n"
        "run_script(lambda: os.kill(os.getpid(), signal.SIGINT))"
    )
    done = run_python(
        "-c",
        code,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0
    assert done.stderr == ""
