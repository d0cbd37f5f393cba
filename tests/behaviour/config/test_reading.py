"""The YAML dialect, files with their bases, and layers of values with the place of each."""

import copy
import os

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.run import FinetuneRun
from finetune.settings import EvaluateRun, ExportRun, PredictRun, VisualizeRun
from launch.chains.settings import ChainRun
from pretrain.run import PretrainRun
from tests.support.tables import every, lines, rows
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import (
    PATH_KEYS,
    load_run,
    load_run_file,
    read_override,
    read_yaml,
    run_to_yaml,
    yaml_flow,
)
from vitscale.config.section import settings_of
from vitscale.runs.data_prep import DataPrepRun
from vitscale.tracking.settings import absolute_uri

STAGES = {"pretrain": PretrainRun, "finetune": FinetuneRun}

# The least that a pre-training needs.
VALID = """\
stage: pretrain
name: demo
data:
  path: shards
  global_batch: 64
model:
  preset: B/16
optim:
  lr: 1e-3
schedule:
  epochs: 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with one valid run file, as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(VALID)
    return tmp_path


def errors_of(path, *overrides):
    with pytest.raises(UserErrors) as caught:
        load_run(PretrainRun, path, overrides=overrides)
    return [error.text() for error in caught.value.errors]


# ---- the dialect ------------------------------------------------------------------------------


def value_of(text):
    return read_yaml(f"key: {text}", name="x").values["key"]


# Numbers as people write them; what YAML 1.1 takes for something else: times, dates, words.
# value: as Python writes it, or nothing for the text itself.
@lines(r"""
text | value
1e-4 | 0.0001
1E5 | 100000.0
.5 | 0.5
2. | 2.0
+3 | 3
-1.5e+2 | -150.0
010 | 10
true | True
False | False
null | None
~ | None
| None
1_000 |
1:30 |
1e |
.inf |
1e999 |
99999999999999999999 |
2024-01-01 |
'1' | '1'
"true" | 'true'
= |
[1, a, null] | [1, 'a', None]
{a: {b: 1}, 1: c} | {'a': {'b': 1}, '1': 'c'}
on |
off |
yes |
no |
y |
N |
""")
def test_scalars_resolve_to_typed_values(text, value):
    # By `repr`, since 1 == True and 0.0 == -0.0.
    assert repr(value_of(text)) == (value or repr(text))


# Twice the same key; aliases, which can grow without end; tags, which make objects; and bad texts.
REFUSED = r"""
- [text, message]
- ["a: 1\nb: 2\na: 3", "x:3: a: key 'a' is given twice; first at x:1"]
- ["a: &x 1", "x:1: not readable as YAML: anchor x; write plain values"]
- ["a: 1\nb: {<<: *x}", "x:2: not readable as YAML: anchor x; write plain values"]
- ["a: !!python/object/apply:os.system [ls]", "x:1: not readable as YAML: tag tag:yaml.org,20"]
- ["a: !env HOME", "x:1: not readable as YAML: tag !env; write plain values"]
- ["? [a]\n: 1", "x:1: a list or group cannot be a key"]
- ["a: 1\n---\nb: 2", "x:2: not readable as YAML: expected a single document"]
- ["a:\n\t- 1", "x:2: not readable as YAML"]
- ['a: "\UFFFFFFFF"', "x:1: not readable as YAML"]
- ['a: "\U00110000"', "x:1: not readable as YAML"]
- ["a: \0", "x:1: not readable as YAML"]
- [DEEP, "x:1: not readable as YAML: maximum recursion depth"]
"""


@rows(REFUSED.replace("DEEP", f"'{'[' * 5000}'"))
def test_unsupported_yaml_is_refused(text, message):
    with pytest.raises(UserError) as caught:
        read_yaml(text, name="x")
    assert caught.value.text().startswith(message)


# Signs that have a meaning at the start of a YAML value, or behind one.
@every(text=r"sqlite:///x.db|a: b|a # b|*x|!x|C:\x|- a".split("|"))
def test_text_on_the_command_line_needs_no_quotes(text):
    assert read_override(f"g.k={text}").values == {"g": {"k": text}}


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
)  # fmt: skip
KEYS = st.text(min_size=1, max_size=100)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
    ),
)


@given(VALUES)
def test_written_values_are_read_back(value):
    assert repr(value_of(yaml_flow(value))) == repr(value)


@given(st.text(max_size=60))
def test_any_text_gives_values_or_errors(text):
    try:
        read_yaml(text, name="x")
    except UserError as error:
        assert error.where


# ---- files ------------------------------------------------------------------------------------


# No text, no settings, no stage, no base that could be read.
@rows(r"""
- [text, message]
- ["a: \xff\n", "b.yaml: is not UTF-8 text"]
- ["- 1\n", "b.yaml: contains a list instead of keys and values"]
- ["stage: [pretrain]\n", "b.yaml:1: stage: ['pretrain'] is not a stage of this script"]
- ["base: [a.yaml]\n", "b.yaml:1: base: ['a.yaml'] is a list"]
- ["# card\nbase: A.yml\n", "b.yaml:2: base: there is no file A.yml"]
- ["base: no/a.yaml\n", "b.yaml:1: base: there is no file no/a.yaml"]
- ["base: .\n", "b.yaml:1: base: cannot be read (Is a directory)"]
""")
def test_unreadable_file_is_one_error(here, text, message):
    (here / "b.yaml").write_bytes(text.encode("latin1"))
    (error,) = errors_of("b.yaml")
    assert error.startswith(message)


def test_a_file_above_one_mebibyte_is_refused(here):
    (here / "b.yaml").write_bytes(b"#" * ((1 << 20) + 1))
    (error,) = errors_of("b.yaml")
    assert error.startswith("b.yaml: is larger than 1 MiB")


@every(data=[b"", b"# nothing\n"])
def test_an_empty_file_lacks_all_keys_and_one_of_windows_none(here, data):
    file = here / "b.yaml"
    file.write_bytes(data)
    lines = [text.splitlines()[0] for text in errors_of("b.yaml")]
    missing = [line.split(": ")[1] for line in lines]
    assert missing == "name data optim schedule".split()

    # As Windows writes files.
    text = VALID.replace("\n", "\r\n")
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_run_file(STAGES, "b.yaml") == load_run_file(PretrainRun, "a.yaml")


# ---- layers -----------------------------------------------------------------------------------


def test_command_line_beats_file_beats_base_beats_default(here):
    (here / "sub").mkdir()
    (here / "sub/b.yaml").write_text(
        "base: ../a.yaml\noptim:\n  lr: 2e-3\ndata: {path: b}\n"
        "launch: {setup: [a, b], sbatch: {x: 1}}\n"
    )
    given = "data.path=c|launch.setup=[c]|launch.sbatch={y: 2}|launch.sbatch.z=3"
    loaded = load_run(PretrainRun, "sub/b.yaml", overrides=given.split("|"))

    run = loaded.run
    places = loaded.places
    assert run.data.path == "c"
    assert run.optim.lr == 2e-3
    assert run.data.global_batch == 64
    assert run.seed == 0

    # Lists are replaced, groups merged.
    assert run.launch.setup == ("c",)
    assert run.launch.sbatch == {"x": 1, "y": 2, "z": 3}
    assert places["data", "path"] == "command line"
    assert places["optim", "lr"] == "sub/b.yaml:3"
    assert places["data", "global_batch"] == "a.yaml:5"

    # What nobody set has no place.
    assert ("seed",) not in places


def test_the_site_file_is_above_defaults_and_below_files(here, monkeypatch):
    monkeypatch.delenv("VITSCALE_SITE", raising=False)
    monkeypatch.setenv("HOME", str(here))
    assert load_run(PretrainRun, "a.yaml").run.launch.partition is None
    site = here / ".config/vitscale/site.yaml"
    site.parent.mkdir(parents=True)

    # An empty group is no mistake.
    site.write_text(
        "launch:\n  partition: gpu\n  setup: [a]\n  sbatch: {x: 1}\ntracking:\n"
    )
    (here / "b.yaml").write_text("base: a.yaml\nlaunch: {partition: low}\n")
    loaded = load_run(PretrainRun, "b.yaml", overrides=["launch.sbatch.y=2"])
    launch = loaded.run.launch
    places = loaded.places
    assert launch.partition == "low"
    assert places["launch", "partition"] == "b.yaml:2"
    assert launch.setup == ("a",)
    assert places["launch", "setup"] == ".config/vitscale/site.yaml:3"
    assert launch.sbatch == {"x": 1, "y": 2}

    # A resolved file ignores it.
    assert load_run_file(PretrainRun, "a.yaml").launch.sbatch == {}

    # Set to nothing: no site file, also not the one in the home.
    monkeypatch.setenv("VITSCALE_SITE", "")
    assert load_run(PretrainRun, "a.yaml").run.launch.partition is None


def test_mistakes_in_the_site_file_are_reported_with_their_place(here, monkeypatch):
    site = here / "site.yaml"
    monkeypatch.setenv("VITSCALE_SITE", str(site))
    site.write_text(
        "launch:\n  partitoin: gpu\n  cpus_per_task: many\n"
        "data: {num_workers: 4}\ntraking: {uri: null}\ntracking: http://mlflow\n"
    )
    (here / "b.yaml").write_text("base: a.yaml\nsede: 1\n")
    lines = sorted(text.splitlines()[0] for text in errors_of("b.yaml"))
    assert lines == [
        "b.yaml:2: sede: unknown key sede",
        "site.yaml:2: launch.partitoin: unknown key launch.partitoin",
        "site.yaml:3: launch.cpus_per_task: 'many' was read as text",
        "site.yaml:4: data: data as a group of keys cannot be set in a site file",
        "site.yaml:5: traking: traking as a group of keys cannot be set in a site file",
        "site.yaml:6: tracking: tracking as text cannot be set in a site file",
    ]

    # A run without these groups ignores them.
    site.write_text("launch: {partitoin: gpu}\n")
    visualize = load_run(VisualizeRun, None, overrides=["init=runs/a"])
    assert visualize.run.init == "runs/a"

    # A variable that names a file means that file.
    site.unlink()
    (error,) = errors_of("a.yaml")
    assert error.startswith("VITSCALE_SITE: there is no file site.yaml")


# ---- choices ----------------------------------------------------------------------------------


# Two files, the second of which is based on the first.
BASE = {
    "objective": "objective:\n  loss: sigmoid\n  label_smoothing: 0.1\n",
    "mae": "base: objective.yaml\nobjective: {name: mae, mask_ratio: 0.5}\n",
}


@rows("""
- [base, child, expected]
# Another name inherits only the keys that the new group has.
- [objective, "{name: mae}", {name: mae, mask_ratio: 0.75}]
- [objective, "{name: distillation, teacher: {weights: x}}", {label_smoothing: 0.1}]
# What was dropped stays dropped, also back at the first name.
- [mae, "{name: supervised}", {loss: softmax, label_smoothing: 0.0}]
# The same name, or none, inherits all.
- [mae, "{normalized_pixels: false}", {name: mae, mask_ratio: 0.5}]
- [objective, "{loss: softmax}", {name: supervised, label_smoothing: 0.1}]
""")
def test_a_choice_inherits_what_its_group_has(here, base, child, expected):
    for name, text in BASE.items():
        if name == "objective":
            text = VALID + text
        (here / f"{name}.yaml").write_text(text)
    (here / "child.yaml").write_text(f"base: {base}.yaml\nobjective: {child}\n")
    run = load_run(PretrainRun, "child.yaml").run
    assert run.objective.model_dump().items() >= expected.items()

    # Written and read again, and as an override instead of a file: the same run.
    (here / "resolved.yaml").write_text(run_to_yaml(run))
    assert load_run_file(PretrainRun, "resolved.yaml") == run
    override = f"objective={child}"
    overridden = load_run(PretrainRun, f"{base}.yaml", overrides=[override]).run
    assert overridden.model_dump() == run.model_dump()


def test_a_group_of_no_name_has_the_default_one_which_nobody_set(here):
    model = load_run(PretrainRun, "a.yaml").run.model
    assert model.name == "vit"
    assert model.model_fields_set == {"preset"}


def test_a_key_missing_in_a_replaced_list_is_placed_in_the_new_list(here):
    mixture = "data:\n  mixture:\n    - {path: b, share: 0.5}\n"
    (here / "b.yaml").write_text("base: a.yaml\n" + mixture)
    (here / "c.yaml").write_text("base: b.yaml\ndata:\n  mixture:\n\n  - {path: c}\n")

    # Line 5 of the new list, not line 3 of the one that it replaced.
    assert errors_of("c.yaml")[0].startswith("c.yaml:5: data.mixture.0.share: ")


# ---- writing, and anything at all ---------------------------------------------------------------


# The ends of ranges, other types, deep and empty values, and presets that only look right.
EXTREMES = yaml.safe_load(r"""
[null, true, 0, -1, 9223372036854775807, 1.0e+308, 5.0e-324, -0.0, "", "on", a/b/c, "\U0001f600",
[], [0], [null, null], [1.0e+308, -1.0e+308], {}, {a: 1}, {"": 1}, 0/0, B/0, B/999999999999]
""")
EXTREMES.append("x" * 200)

# A valid run, from which the changes start: with groups that take keys of their own.
TREE = read_yaml(
    f"""\
{VALID}
engine: {{zero_stage: 1}}
deepspeed: {{zero_optimization: {{reduce_bucket_size: 9}}}}
launch: {{sbatch: {{x: 1}}}}
tracking: {{tags: {{"a: b": "on", "1": "1e5"}}}}
""",
    name="",
).values
KEYS_OF_RUNS = []
for setting in settings_of(PretrainRun).values():
    if setting.key:
        KEYS_OF_RUNS.append(setting.key.split("."))
DROPPED = object()

# One key, what becomes of it, and an end of its name: one in four is misspelt.
CHANGES = st.tuples(
    st.sampled_from(KEYS_OF_RUNS),
    st.sampled_from([*EXTREMES, DROPPED, DROPPED]) | st.text(max_size=8),
    st.sampled_from(["", "", "", "_"]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(CHANGES, min_size=1, max_size=4))
def test_any_configuration_is_a_valid_run_or_a_user_error(here, changes):
    """Valid values, but for up to four that are dropped, misspelt, of another type or extreme."""
    tree = copy.deepcopy(TREE)
    for path, value, typo in changes:
        group = tree
        for part in path[:-1]:
            # An earlier change may have put a value where the group was.
            group = group.setdefault(part, {}) if isinstance(group, dict) else {}
        if isinstance(group, dict):
            group.pop(path[-1], None)
            if value is not DROPPED:
                group[path[-1] + typo] = copy.deepcopy(value)
    (here / "m.yaml").write_text(yaml_flow(tree))
    try:
        run = load_run(STAGES, "m.yaml").run
    except UserErrors as errors:
        assert all(error.where for error in errors.errors)
        return

    # A valid run is one that can be written and read again.
    assert not list(run.problems())
    (here / "resolved.yaml").write_text(run_to_yaml(run))
    assert load_run_file(STAGES, "resolved.yaml") == run


@every(text="'007', 1e3, '0.50', '1.0', 'true', 'TRUE'")
def test_the_advice_to_quote_shows_a_value_as_it_was_written(text, tmp_path):
    """Another text would name another class."""
    (tmp_path / "a.yaml").write_text(VALID)
    classes = f"only_classes: [cat, {text}]"
    listed = VALID.replace("  path: shards\n", f"  path: shards\n  {classes}\n")
    (tmp_path / "b.yaml").write_text(listed)

    # In a file, in a list of the command line, and as a value of its own.
    for file, *overrides in (
        ("b.yaml",),
        ("a.yaml", f"data.only_classes=[cat, {text}]"),
        ("a.yaml", f"data.train_split={text}"),
    ):
        with pytest.raises(UserError) as caught:
            load_run(PretrainRun, tmp_path / file, overrides=overrides)
        assert f'put it in quotes: "{text}"' in caught.value.text()


# ---- homes in paths ---------------------------------------------------------------------------

RUN_TYPES = (
    PretrainRun,
    FinetuneRun,
    EvaluateRun,
    PredictRun,
    ExportRun,
    VisualizeRun,
    DataPrepRun,
)

# Texts that name something else than a place of this machine.
NO_PATHS = {
    *"""
    name data.train_split data.val_split data.views.N.name data.only_classes model.preset
    model.model objective.teacher.model objective.teachers.N.model split push source.splits
    source.image_column source.label
    source.holdout_split stages.N.name stages.N.overrides stages.N.inputs stages.N.after
    stages.N.variants overrides tracking.uri tracking.experiment tracking.tags
    """.split()
}


def holds_text(node):
    """Whether a value of this JSON schema can be a free text, or can hold one."""
    if node.get("type") == "string":
        return "enum" not in node and "const" not in node
    inner = [*node.get("anyOf", ())]
    inner += [node.get("items"), node.get("additionalProperties")]
    return any(isinstance(child, dict) and holds_text(child) for child in inner)


def test_every_text_is_known_as_a_path_or_as_none():
    """A new setting with a path is expanded, or this fails."""
    texts = set()
    for run_type in (*RUN_TYPES, ChainRun):
        for setting in settings_of(run_type).values():
            # The words of SLURM are for its nodes, where homes may be others.
            is_ours = setting.key and not setting.key.startswith("launch.")
            if is_ours and holds_text(setting.node):
                texts.add(setting.key)

    # A list of paths has a key of its own, and one for its elements.
    paths = {key for key in PATH_KEYS if not key.endswith(".N")}
    assert texts - NO_PATHS == paths


def test_homes_are_expanded_in_every_path_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/mé x")
    file = tmp_path / "a.yaml"
    file.write_text(
        "stage: data_prep\noutput: ~/shards\n"
        "source: {path: ~/images, leave_out: '~', val_labels: a/~/b, splits: {train: ~/x}}\n"
        "labels: {map: ~nobody-here/map.csv, space: ./~/space}\n"
    )
    run = load_run(DataPrepRun, file).run
    assert run.output == "/home/mé x/shards"
    assert run.source.path == "/home/mé x/images"
    assert run.source.leave_out == "/home/mé x"

    # In the middle, of an unknown user, or behind another folder: a name like others.
    assert run.source.val_labels == "a/~/b"
    assert run.labels.map == "~nobody-here/map.csv"
    assert run.labels.space == "./~/space"

    # Patterns of splits are below source.path, which is expanded.
    assert run.source.splits == {"train": "~/x"}

    given = ["init=~/runs/a", "images=[~/a b.png,hf://x/~y,~root/c]", "output=~/x.csv"]
    predict = load_run(PredictRun, None, overrides=given).run
    assert predict.images == (
        "/home/mé x/a b.png",
        "hf://x/~y",
        os.path.expanduser("~root/c"),
    )
    assert predict.init == "/home/mé x/runs/a"
    assert predict.output == "/home/mé x/x.csv"


def test_files_are_found_below_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("output: ~/x\nsource: {path: a}\n")
    base = "base: ~/base.yaml\nstage: data_prep\n"
    (tmp_path / "a.yaml").write_text(base)
    assert load_run(DataPrepRun, "~/a.yaml").run.output == f"{tmp_path}/x"

    # The site file and the address of a database, which are no settings of a file.
    monkeypatch.setenv("VITSCALE_SITE", "~/site.yaml")
    (tmp_path / "site.yaml").write_text("launch: {partition: mine}\n")
    assert load_run(DataPrepRun, "~/a.yaml").run.launch.partition == "mine"
    assert absolute_uri("sqlite:///~/m.db") == f"sqlite:///{tmp_path}/m.db"
