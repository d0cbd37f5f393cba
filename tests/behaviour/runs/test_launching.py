"""Validation of the launch section; plans and problems of the rates of a run."""

import shlex
import subprocess
import sys
from itertools import product

import yaml

from launch.jobs.preparation import check_job, job_folder, run_name
from launch.jobs.submission import sbatch_text
from pretrain.run import PretrainRun
from tests.support.corpora.image_corpus import run_of
from tests.support.tables import refused
from vitscale.config.errors import UserError
from vitscale.runs.launching import LaunchSettings, launch_problems
from vitscale.runs.training import MicroBatches, training_plan

# Fields whose text is no shell. `setup` and `python` are shell by design, on one line.
QUOTED_FIELDS = yaml.safe_load(
    "[gpu_type, partition, account, srun_args, sbatch value, sbatch option, run name]"
)
# Each would make a file if a shell read it: by substitution, as a command of its own, by leaving
# quotes, on a line of its own, by redirection, behind bytes that some programs take for line ends.
HOSTILE = yaml.safe_load(r"""
- $(touch canary)
- "`touch canary`"
- ; touch canary
- "x & touch canary #"
- x | touch canary
- "'; touch canary; '"
- '"; touch canary; "'
- "x\ntouch canary"
- "> canary"
- "x\rtouch canary"
- "x\0touch canary"
- "x\u2028touch canary"
""")


def script_with(field, text):
    """The batch script with a hostile text in one field; None if it is refused."""
    values = {
        "srun_args": {"srun_args": [f"--x={text}"]},
        "sbatch value": {"sbatch": {"mail-user": text}},
        "sbatch option": {"sbatch": {text: True}},
        "run name": {},
    }
    launch = LaunchSettings.model_validate(values.get(field, {field: text}))

    # Its name is that of the output, and is also in the path of the job folder.
    output = text if field == "run name" else "shards"
    run = run_of("images", output)
    # A refusal is as good as quotes.
    if list(launch_problems(launch)):
        return None
    try:
        check_job(run, num_tasks=1, cluster="slurm")
    except UserError:
        return None
    folder = job_folder(run, cluster="slurm")
    return sbatch_text(
        launch,
        name=run_name(run),
        folder=folder,
        code=folder / "code-1",
    )


def test_no_field_runs_as_shell(tmp_path):
    accepted = {}
    for field, text in product(QUOTED_FIELDS, HOSTILE):
        script = script_with(field, text)
        if script is not None:
            accepted[field, text] = script

    # Texts and paths are quoted; option names are checked.
    assert {field for field, _ in accepted} == {*QUOTED_FIELDS} - {"sbatch option"}
    assert not [text for _, text in accepted if "\n" in text]
    for script in accepted.values():
        for line in script.splitlines():
            if line.startswith("#SBATCH "):
                assert len(shlex.split(line.removeprefix("#SBATCH "))) == 1

    # As SLURM does: bash runs the whole script. The last one shows that a canary would be seen.
    control = sbatch_text(
        LaunchSettings(setup=("touch control",)), name="run", folder=tmp_path
    )
    for program in ("python", "srun"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / program).chmod(0o755)
    expected = {"control", "python", "srun"}
    for number, script in enumerate([*accepted.values(), control]):
        text = script.replace(sys.executable, str(tmp_path / "python"))
        name = f"{number:03}.sh"
        (tmp_path / name).write_text(text)
        expected.add(name)
    subprocess.run(
        ["bash", "-c", "for each in *.sh; do bash -e $each || exit; done"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
    )

    # Nothing else was made, under whatever name.
    assert {path.name for path in tmp_path.iterdir()} == expected


# ---- plans of trainings -------------------------------------------------------------------------


def run(**changes):
    sections = yaml.safe_load("""
    data: {path: shards, global_batch: 8}
    model: {preset: B/16}
    optim: {lr: 0.001}
    schedule: {steps: 100, warmup_steps: 10}
    """)
    for group, values in changes.items():
        sections[group] = sections.get(group, {}) | values
    return PretrainRun.model_validate({"name": "x", **sections})


def plan_of(chosen, *, ranks=1, samples=8):
    return training_plan(chosen, world_size=ranks, num_samples=samples)


def test_cooldown_of_a_plan_is_its_share_of_the_steps():
    # A share that is not zero has a step at least.
    for share, steps in ((0.25, 25), (0.001, 1), (0.0, 0)):
        chosen = run(schedule={"decay": "constant", "cooldown_share": share})
        plan = plan_of(chosen)
        assert plan.total_steps == 100
        assert plan.cooldown_steps == steps
    # Beside the 10 steps of warm-up no more than 90 are left.
    late = run(schedule={"decay": "constant", "cooldown_share": 0.95})
    with refused("schedule.cooldown_share: 10 .* and 95 of cool-down"):
        plan_of(late)


def test_warmup_of_a_plan_may_be_given_in_epochs():
    # Three epochs of 83 images have 31 whole batches of 8.
    short = run(schedule={"warmup_steps": 0, "warmup_epochs": 3})
    assert plan_of(short, samples=83).warmup_steps == 31
    half = run(schedule={"warmup_steps": 0, "warmup_epochs": 0.5})
    assert plan_of(half, samples=83).warmup_steps == 41 // 8

    with refused("schedule.warmup_epochs: 150 .* in 100 steps"):
        plan_of(short, samples=400)


def test_micro_batch_is_the_largest_that_fits():
    # 12 images a rank: 6 divides them, and 7 and 8 do not.
    wide = run(data={"global_batch": 24}, engine={"max_micro_batch": 8})
    plan = plan_of(wide, ranks=2)
    assert plan.micro_batch == 6
    assert plan.accumulation == 2

    # Images are mixed in pairs, and both of a pair are in one micro-batch.
    data = {"global_batch": 18, "mixing": {}}
    mixed = run(data=data, engine={"max_micro_batch": 9})
    with refused("no even micro-batch divides the 9 images"):
        plan_of(mixed, ranks=2)


def test_the_nearest_batches_with_a_large_micro_batch_are_those_of_an_exhaustive_search():
    """By the divisors of every share: small is 1, 2 or less than half of the largest."""

    def largest(share):
        sizes = range(unit, limit + 1, unit)
        return max((size for size in sizes if share % size == 0), default=0)

    def is_good(share):
        size = largest(share)
        # The whole share, or the largest size that is allowed.
        if size in (share, limit // unit * unit):
            return size > 0
        return size > 2 and size >= limit / 2

    num_small = 0
    for limit, unit in product((1, 2, 3, 5, 8, 17, 64), (1, 2)):
        sizes = MicroBatches(largest=limit, unit=unit)
        good = {share for share in range(1, 400) if is_good(share)}
        for share in filter(largest, range(1, 250)):
            advice = sizes.advice(share, world_size=3)
            assert (advice is None) == (share in good)
            if advice is None:
                continue

            # The nearest good shares, as batches of three ranks.
            num_small += 1
            above = min(number for number in good if number > share)
            below = [number for number in good if number < share]
            near = [max(below), above] if below else [above]
            shown = " or ".join(f"{3 * n} ({largest(n)} images)" for n in near)
            assert f"only {largest(share)} of the {limit} images" in advice
            assert advice.endswith(f": {shown}")

    # The search has met bad shares at all.
    assert num_small > 100


def test_batch_that_does_not_divide_names_its_neighbours():
    # Below 16 there is no multiple of 16: zero images are no batch.
    with refused("multiples of 3: 6 or 9"):
        plan_of(run(), ranks=3)
    with refused("multiples of 16: 16\\n"):
        plan_of(run(), ranks=16)
