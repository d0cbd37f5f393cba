"""Which settings differ for which purpose; what is a secret, in every form that code has it."""

from typing import get_args

import yaml

from finetune.settings import EvaluateRun
from pretrain.run import PretrainRun
from tests.support.tables import every
from vitscale.config.changes import WITHOUT_EFFECT, Purpose, changed_settings
from vitscale.config.redaction import flatten, flatten_params, redact
from vitscale.config.section import settings_of
from vitscale.runs.data_prep import DataPrepRun

# A setting of every group; the keys of all kinds of run together.
BEFORE = yaml.safe_load("""
name: a
output: runs/a
seed: 0
num_workers: 4
script: make_shards
source: {path: A, kind: image_folder}
labels: {map: m.csv, map_blake3: "12"}
optim: {lr: 0.001}
data: {path: "shards?v=1", num_workers: 2, crop_area: [0.1, 1]}
launch: {nodes: 1, account: x}
checkpoint: {keep: 2}
tracking: {uri: null, tags: {chain: c}}
compute: {batch: 64, precision: bf16}
engine: {precision: bf16}
results: [{top1: 0.5}]
""")

# Key: another value, and the purposes for which it counts.
CASES = yaml.safe_load("""
name: [b, resume output evaluation]
output: [runs/b, resume evaluation]
seed: [1, resume output chain evaluation result table]
num_workers: [8, resume evaluation table]
script: [index_shards, resume chain evaluation result table]
source.path: [B, resume evaluation table]
labels.map_blake3: ["13", resume output chain evaluation result table]
optim.lr: [0.002, resume output chain evaluation result table]
# Not the same folder, though what is shown of it is.
data.path: ["shards?v=2", resume output chain evaluation result table]
data.num_workers: [3, resume output evaluation table]
data.crop_area: [[0.1, 0.9], resume output chain evaluation result table]
launch.nodes: [2, resume evaluation table]
checkpoint.keep: [3, resume output evaluation table]
tracking.uri: ["http://h", resume output evaluation table]
tracking.tags: [{chain: d}, resume output evaluation]
compute.batch: [1, resume output evaluation table]
compute.precision: [fp32, resume output chain evaluation result table]
engine.precision: [fp32, resume output chain evaluation result table]
results: [[], resume output chain result table]
""")

PURPOSES = get_args(Purpose)


@every(key=CASES)
def test_a_difference_counts_for_its_purposes(key):
    value, purposes = CASES[key]
    group, _, name = key.rpartition(".")
    now = BEFORE | {key: value}
    if group:
        now = BEFORE | {group: BEFORE[group] | {name: value}}
    for purpose in PURPOSES:
        changed = changed_settings(BEFORE, now, purpose=purpose)
        assert bool(changed) == (purpose in purposes.split()), purpose

        # Which of both is the older one does not matter.
        turned = changed_settings(now, BEFORE, purpose=purpose)
        assert turned.keys() == changed.keys()

        # Flat settings, as MLflow has them, count alike.
        flat = changed_settings(flatten(BEFORE), flatten(now), purpose=purpose)
        assert flat == changed

    # A missing key differs from any value.
    without = {}
    for flat_key, flat_value in flatten(BEFORE).items():
        if not f"{flat_key}.".startswith(f"{key}."):
            without[flat_key] = flat_value
    changed = changed_settings(without, BEFORE, purpose="resume")
    assert changed
    assert {before for before, _ in changed.values()} == {None}


def test_no_difference_is_none_and_shown_values_have_no_secrets():
    for purpose in PURPOSES:
        assert changed_settings(BEFORE, BEFORE, purpose=purpose) == {}

    # Secrets that differ are a difference, and neither of them is shown.
    old, new = (
        {"uri": f"http://me:{secret}@h", "api_token": secret, "a": 1}
        for secret in ("one", "two")
    )
    assert changed_settings(old, new, purpose="resume") == {
        "api_token": ("***", "***"),
        "uri": ("http://h", "http://h"),
    }


def test_every_key_without_effect_exists():
    # A misspelt key would count for all purposes without a word.
    keys = set()
    for run_type in (PretrainRun, EvaluateRun, DataPrepRun):
        keys.update(setting.key for setting in settings_of(run_type).values())

    # Of the results of an evaluation, which are no configuration.
    assert WITHOUT_EFFECT.keys() - {"results"} <= keys


# ---- secrets ------------------------------------------------------------------------------------

SECRET = "hunter2X9"
# In Python, YAML, JSON, shells, tools, headers, URLs, environments and files. A form a line.
FORMS = r"""
API_KEY="%"
x = {'api_key': '%'}
os.environ['DB_PASSWORD']='%'
os.environ.setdefault("HF_TOKEN", "%")
os.getenv("HF_TOKEN", "%")
token: str = "%"
def f(password: str | None = "%"):
login(token="%")
wandb.login(key="%")
password: %
- password: %
db-password: %
{user: me, password: %}
  "token" : "%",
secret => '%'
if password == "%":
token = (\n+    "a"\n+    "%"\n+)
API_KEYS = ["a", "%"]
passwords: [%]
"passwords": {"a": "%"}
auth=("me", "%")
token="a" "%"
token = tok or "%"
token = '''\n+%\n+'''
passwd: |\n+  %
parser.add_argument("--token", default="%")
run --token %
run --api-key=%
curl -u me:% https://x
sshpass -p % ssh x
setenv HF_TOKEN %
machine h login me password %
<password>%</password>
Authorization: Bearer %
{"Authorization": f"Bearer %"}
"Bearer %"
Basic dXNlcjp%=
https://u:%@h/x
postgresql+psycopg2://u:%@h/db
http://h/x?sig=%
aws_secret_access_key = %
AWS_SECRET_ACCESS_KEY=%
export GH_PAT='%'
DB_PWD=%
SSH_PASSPHRASE=%
MYAPP_CREDENTIALS=%
cookie: %
connection_string = "AccountKey=%"
x="ghp_%abcdefghijkl"
x="hf_%abcdefghijklmnop"
x="eyJhbGciOi%.eyJzdWIi.abc"
-----BEGIN RSA PRIVATE KEY-----\n+MII%+abc\n+-----END RSA PRIVATE KEY-----
-----BEGIN OPENSSH PRIVATE KEY-----\n+%abcdefghijklmnopqrstuv\n
"""

# Words of the field, references instead of values, and long texts that are public.
KEPT = """
POOLS = {"cls": "token", "gap": "avg"}
NAMES = ("cls_token", "reg_token", "mask_token")
class_token: false
num_tokens=16
token = tokens[0]
login(token=True)
export HF_TOKEN=$(cat FILE)
HF_TOKEN_PATH=/home/me/token
GOOGLE_APPLICATION_CREDENTIALS=/home/me/key.json
forward_pass: 3 GFLOPs
the password is wrong
c47cba2269101f2e3d4c5b6a79881726354bcdef
https://host/a/b#c
"""


@every(form=FORMS.strip("\n").split("\n"))
def test_secrets_are_removed_in_every_form(form):
    text = "+" + form.replace("%", SECRET).replace(r"\n", "\n")
    shown = redact(text)
    assert SECRET not in shown
    assert redact(shown) == shown

    # As lines of a diff, with others around.
    diff = f" context\n{text}\n-{text[1:]}\n after"
    assert SECRET not in redact(diff)


@every(text=KEPT.strip().split("\n"))
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_keys_are_names_that_mlflow_takes():
    # Slashes, dots and other signs have a meaning in its keys.
    assert flatten_params({"a//b": 1, "a/../c": 2, "what?": 3}) == {
        "a/b": "1",
        "c": "2",
        "what_": "3",
    }


# Each of these repeats what one of the patterns begins with.
@every(run="ab12|a-|a+|?a|\n| \n|token|a://|'|x_password: \n|+ \n".split("|"))
def test_secrets_are_removed_from_long_runs(run):
    """In quadratic time, a run of this length would take hours."""
    text = run * (1 << 15)
    shown = redact(f"{text}\nHF_TOKEN=abc s3://u:p@h/x\n")
    assert shown.endswith("\nHF_TOKEN=*** s3://h/x\n")
