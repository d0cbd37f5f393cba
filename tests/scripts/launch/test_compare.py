"""launch/compare.py as a command."""

import contextlib
import math
import re
import shutil
import subprocess

import pytest

from launch.comparison.differences import compare
from launch.comparison.page import render
from launch.comparison.runs import ComparedRun
from tests.support.corpora.indexing import run
from tests.support.levels import skip_or_fail
from tests.support.run_folders import tracker_of
from tests.support.tables import lines
from tests.support.waiting import PATIENCE_S, ROOT
from vitscale.tracking.journal import Row

# One transparent pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


def run_compare(folder, *arguments):
    with contextlib.chdir(folder):
        return run(ROOT / "launch/compare.py", *arguments)


def make_run(root, name, *, lr, gain):
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: {name}\nseed: 7\noptim:\n  lr: {lr}\n")
    data = {"vitscale.data": "digits, 9 images"}
    with tracker_of(folder, name=name, tags=data) as tracker:
        for step in range(1, 4):
            # A metric that is never a number must not end a comparison.
            tracker.log({"train/loss": 1 / step, "odd/name": math.nan}, step=step)
        tracker.log({"val/top1": gain}, step=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    make_run(root, "small-lr", lr=0.001, gain=0.5)
    make_run(root, "large-lr", lr=0.01, gain=0.75)
    pictures = root / "runs" / "large-lr" / "pictures"
    pictures.mkdir()
    (pictures / "attention_of_a_7.png").write_bytes(PNG)
    return root


def test_text_and_report_show_differences(root):
    done = run_compare(root, "runs/small-lr", "large-lr")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["optim.lr", "0.001", "0.01"] in lines
    assert not any(line[:1] == ["seed"] for line in lines)  # equal: left out
    assert "val/top1 50.0 % 75.0 % *".split() in lines
    best = "large-lr is best: val/top1 75.0 %; next is small-lr, 50.0 %."
    assert done.stdout.startswith(best)
    assert done.stdout.rstrip().endswith("report: runs/compare.html")

    # The page as it is written: one file that loads nothing, so it can be sent, and opened
    # without a network. What follows is the library of the charts.
    text = (root / "runs/compare.html").read_text().partition("<script>")[0]
    references = re.findall(r"(?:src|href)=.(.{11})", text)
    assert references
    assert set(references) == {"data:image/"}
    assert not re.search("<(link|iframe|object)", text)
    assert "@import" not in text
    assert "url(" not in text
    assert best in text
    assert "They differ in optim.lr (0.01 against 0.001)." in text
    assert "Loss on training images <code>train/loss</code>" in text
    assert "<h3>Attention of a 7</h3>" in text
    assert "data:image/png;base64" in text


def test_runs_are_found_in_mlflow_by_name_and_id(tmp_path, mlflow_database):
    uri = f"sqlite:///{mlflow_database}"
    # MLflow's parameters are text: without quotes it refuses the filter.
    wrong = run_compare(tmp_path, "--filter", "params.seed = 7", "--uri", uri)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error:\n--filter: MLflow at ")
    make_run(tmp_path, "stored", lr=0.125, gain=0.875)
    sent = run_compare(tmp_path, "sync", "stored", "--uri", uri)
    assert sent.returncode == 0, sent.stderr
    run_id = sent.stdout.partition("; run ")[2].split()[0]

    # The line that says what a run was made of is the same from its folder and from MLflow.
    here = run_compare(tmp_path, "stored")
    there = run_compare(tmp_path, "stored", "--uri", uri)
    origin, other = re.findall(r"\d{4}-\d\d-\d\d; .*", here.stdout + there.stdout)
    assert origin == other
    assert "; digits, 9 images;" in origin

    # The same name below runs/ with other values: --uri selects that of MLflow.
    shutil.rmtree(tmp_path / "runs/stored")
    make_run(tmp_path, "stored", lr=0.5, gain=0.25)
    done = run_compare(tmp_path, "stored", run_id, "runs/stored", "--uri", uri)
    assert done.returncode == 0, done.stderr
    assert "87.5 %" in done.stdout
    assert done.stdout.count(f"MLflow run {run_id}") == 1
    assert "stored (2)" in done.stdout
    assert "25.0 %" in done.stdout
    assert "finished" in done.stdout
    filtered = ("--filter", "params.optim.lr = '0.125'", "--uri", uri)
    done = run_compare(tmp_path, *filtered)
    assert done.returncode == 0, done.stderr
    assert f"MLflow run {run_id}" in done.stdout
    assert "87.5 %" in done.stdout


# Which runs, from where, and where the page goes.
@lines("""
words|message
|no run given
small-lr --filter params.seed='7'|both runs and --filter
--filter params.seed='7'|no run with metrics matches
stored --uri mlruns|'mlruns' is not a tracking URI
small-lr --output /proc/none/x.html|cannot be written
small-lr --output x.pdf|'x.pdf' is not an HTML file
""")
def test_bad_input_is_reported_with_exit_code_2(root, words, message):
    done = run_compare(root, *words.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_browser_draws_the_charts_and_shows_hostile_names_as_text(tmp_path):
    chromium = shutil.which("chromium") or skip_or_fail("no chromium on this machine")
    # Runs of others are compared too: a name in a page must never be a program.
    evil = "<img src=x onerror=document.title='evil'>"
    evil += "</script><script>document.title='evil'</script>"
    runs = []
    for number, label in enumerate(("slow", evil)):
        rows = []
        for step in range(1, 1000):
            metrics = {
                "train/loss": 3 / (1 + number + step / 99),
                "val/top1": step / 1e4,
            }
            # Late, and infinite at every second step: charts have gaps.
            if step > 900:
                metrics[f"val/{evil}"] = [1.0, math.inf][step % 2]
            rows.append(Row(step=step, time=60.0 * step, metrics=metrics))
        params = {"optim.lr": str(number), f"note.{evil}": evil}
        run = ComparedRun(label=label, source=evil, params=params, rows=tuple(rows))
        runs.append(run)
    page = tmp_path / "compare.html"
    page.write_text(render(compare(runs)))
    show = [
        chromium,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        # Nobody listens there: whatever the page would load fails.
        "--proxy-server=127.0.0.1:9",
        f"--user-data-dir={tmp_path}/profile",
        # Until the charts are drawn, in the page's own time.
        "--virtual-time-budget=20000",
        "--dump-dom",
        page.as_uri(),
    ]
    shown = subprocess.run(
        show,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout
    # Three charts (plotly draws each in two layers), two of them with a line for each run.
    assert shown.count('class="main-svg"') >= 2 * 3
    assert shown.count('class="js-line"') >= 2 * 2
    body = shown.partition("<body")[2].partition("<script")[0]
    assert "<img" not in body
    # The program would have changed the title.
    title = shown.partition("<title>")[2].partition("<")[0]
    assert "evil" not in title[:9]
    legend = body.partition('class="legend"')[2].partition("</div>")[0]
    assert legend.count("<button") == 2
    assert "&lt;img src=x" in legend
    # The tool bar waits for the mouse.
    assert shown.count("modebar--hover") >= 3
