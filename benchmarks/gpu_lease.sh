#!/usr/bin/env bash
# Prove the project on one GPU that is lent for a quarter of an hour.
#
#   benchmarks/gpu_lease.sh wheels FOLDER              where there is a network: what that machine lacks
#   benchmarks/gpu_lease.sh "STEPS" OUTPUT [--toy]     there; WHEELS=FOLDER installs it for this call
#   benchmarks/gpu_lease.sh all OUTPUT --toy           every step on a CPU, in tiny sizes
#
# STEPS are starts of names: "a" is all of part a, "c b-loops-H14" two things, "all" everything.
#   a  tests/gpu, and every training of the reference table beside the plain loop
#   b  rate of products, models, loops beside a bare one and timm's, real tars, checkpoints
#   c  objectives without labels, distillation by a live teacher, by stored targets, by none
#   d  a ViT to its end, killed twice, beside the same undisturbed; journal and comparison page
# OUTPUT gets summary.txt and results.tar.gz, both renewed after each step, so that a call that is
# cut off leaves what it has. The call ends after MINUTES (9). The exit code is that of the worst.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 2; fi

# Not part of the image of the machine that is lent. MLflow is left out: runs there do without.
CARRIED="timm webdataset braceexpand hjson pydantic pydantic-core annotated-types typing-inspection
  typing-extensions plotly blake3 simplejpeg submitit"
NEEDED="$CARRIED deepspeed torch torchvision pyarrow PyYAML safetensors huggingface-hub Jinja2
  matplotlib psutil fsspec einops msgpack py-cpuinfo pytest pytest-timeout pytest-xdist hypothesis
  scikit-learn"
LIBRARY=vitscale/images/jpeg/_region.abi3.so

if [ "$1" = wheels ]; then
  set -e
  mkdir -p "$2"
  platforms=$(printf -- '--platform manylinux%s_x86_64 ' _2_28 _2_27 _2_17 2014)
  # The versions that were tested, of no needs: what these need is there, or is named here.
  python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    $platforms -c constraints.txt -d "$2" $CARRIED
  # DeepSpeed is published as source alone; without its kernels it is pure Python.
  DS_BUILD_OPS=0 python3 -m pip wheel --no-deps --no-build-isolation -c constraints.txt -w "$2" deepspeed
  cp "$LIBRARY" "$2"
  du -sh "$2"
  exit
fi

STEPS=$1
OUTPUT=$(realpath -m "$2")
TOY=${TOY:-}
if [ "${3:-}" = --toy ]; then TOY=1; fi
MINUTES=${MINUTES:-${TOY:+4}9}
# Apart from OUTPUT, of which few files come back; the results of an earlier call are kept.
WORK=${WORK:-$PWD/runs/gpu-lease}
RESULTS=$WORK/results
DEADLINE=$((SECONDS + MINUTES * 60))
worst=0
mkdir -p "$OUTPUT" "$RESULTS"

if [ -n "${WHEELS:-}" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$WORK/site" \
    "$WHEELS"/*.whl || exit
  export PYTHONPATH=$WORK/site
  [ -e "$LIBRARY" ] || cp "$WHEELS/${LIBRARY##*/}" "$LIBRARY"
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# All calls share what is compiled.
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor
python3 - $NEEDED <<'PYTHON' || exit
import sys
from importlib.metadata import PackageNotFoundError, version
missing = []
for name in sys.argv[1:]:
    try: print(name, version(name), end="; ")
    except PackageNotFoundError: missing.append(name)
print()
if missing: sys.exit(f"missing: {' '.join(missing)}. Carry them: benchmarks/gpu_lease.sh wheels")
PYTHON

# step NAME SECONDS COMMAND...: run it if it is asked for; one line, its log, and all results so far.
step() {
  local name=$1 limit=$2 left=$((DEADLINE - SECONDS)) wanted began=$SECONDS code result=passed
  shift 2
  for wanted in $STEPS; do
    [[ $wanted = all || $name = $wanted* ]] && break
  done
  [[ $wanted = all || $name = $wanted* ]] || return 0
  if ((left < 20)); then
    echo "$name: left out, $MINUTES minutes are over" | tee -a "$RESULTS/summary.txt"
    ((worst > 124)) || worst=124
    return 0
  fi
  # A rehearsal may share its machine with others.
  [ -z "$TOY" ] || limit=$left
  timeout --kill-after=10 $((limit < left ? limit : left)) "$@" >"$RESULTS/$name.log" 2>&1
  code=$?
  ((code == 0)) || result="FAILED ($code)"
  ((code <= worst)) || worst=$code
  echo "$name: $((SECONDS - began)) s, $result, $name.log" | tee -a "$RESULTS/summary.txt"
  ((code == 0)) || tail -n 15 "$RESULTS/$name.log"
  cp "$RESULTS/summary.txt" "$OUTPUT"
  tar -czf "$OUTPUT/results.part" -C "$RESULTS" . && mv "$OUTPUT/results.part" "$OUTPUT/results.tar.gz"
}

# training NAME SECONDS SECTION OPTIONS...: a section of gpu_training.py, which writes JSON, too.
training() {
  local name=$1 limit=$2 section=$3
  shift 3
  step "$name" "$limit" python3 benchmarks/gpu_training.py --sections $section --rounds "$ROUNDS" \
    --steps "$LOOP_STEPS" --work "$WORK" --json "$RESULTS/$name.json" $SMALL "$@"
}

# train NAME: a stock command; the same one resumes it.
train() {
  python3 -m vitscale.command pretrain demo/pretrain --num-procs 1 name="$1" tracking.uri=null \
    output="$WORK/$1" data.path="$WORK/shards" engine.device="$DEVICE" $VIT "evaluate=[{name: classification}]"
}

# Killed with SIGKILL after each of two checkpoints, then trained to the end; and undisturbed.
whole_run() {
  set -e
  rm -rf "$WORK"/{images,shards,killed,undisturbed}
  python3 -m vitscale.command prepare corpus characters "$WORK/images" $CORPUS
  python3 -m vitscale.command prepare shards data/characters source.path="$WORK/images" \
    output="$WORK/shards"

  local before pid
  for before in 0 1; do
    train killed &
    pid=$!
    while (($(find "$WORK/killed/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | wc -l) <= before)); do
      kill -0 $pid || { echo "ended before checkpoint $((before + 1))"; return 1; }
      sleep 0.2
    done
    # The rank, which is the child of its launcher.
    python3 - $pid <<'PYTHON'
import psutil, sys
for launcher in psutil.Process(int(sys.argv[1])).children():
    for rank in launcher.children(): rank.kill()
PYTHON
    wait $pid || echo "killed after checkpoint $((before + 1)): exit code $?"
  done
  train killed
  train undisturbed
  python3 -m vitscale.command compare "$WORK/killed" "$WORK/undisturbed" \
    --output "$RESULTS/d-comparison.html"
  cp "$WORK/killed/journal.jsonl" "$RESULTS/d-journal.jsonl"
  # Losses of the last tenth, beside those of the run that nobody killed.
  python3 - "$WORK/killed" "$WORK/undisturbed" "$RESULTS/d-end.json" <<'PYTHON'
import json, sys
from pathlib import Path
ends = {}
for folder in sys.argv[1:3]:
    rows = [json.loads(line) for line in (Path(folder) / "journal.jsonl").open()]
    values = {}
    for row in rows: values.update({k: v for k, v in row.items() if k in ("step", "train/loss", "val/top1")})
    ends[Path(folder).name] = values
print(ends)
Path(sys.argv[3]).write_text(json.dumps(ends))
a, b = ends.values()
sys.exit(a["step"] != b["step"] or abs(a["train/loss"] - b["train/loss"]) > 0.02)
PYTHON
}

# Sizes: of a GPU of 80 GB, or of a rehearsal.
DEVICE=cuda SMALL="" ROUNDS=3 LOOP_STEPS=10 CORPUS=""
VIT="data.global_batch=512 engine.max_micro_batch=512 data.num_workers=12 model.image_size=48
  model.width=384 model.depth=12 model.num_heads=6 model.mlp_width=1536 optim.lr=1e-3
  schedule.steps=900 checkpoint.every_steps=200 tracking.log_every_steps=10"
TARGETS="--device cuda --teachers L --steps 30 --total-mib 64"
TESTS="not reference" REFERENCE=reference PARALLEL="-n 8"
if [ -n "$TOY" ]; then
  DEVICE=cpu SMALL="--toy --device cpu" ROUNDS=1 LOOP_STEPS=2 CORPUS="--num-train 4 --num-test 2"
  VIT="schedule.steps=12 schedule.warmup_steps=2 checkpoint.every_steps=4 tracking.log_every_steps=2
    data.global_batch=16"
  TARGETS=--toy
  TESTS="trained_resumed" REFERENCE="clip and not fp16" PARALLEL=""
  export PYTEST_GPU_DEVICE=cpu
fi

step a-tests 150 python3 -m pytest tests/gpu -q -k "$TESTS"
step a-reference 150 python3 -m pytest tests/gpu -q $PARALLEL -k "$REFERENCE"
training b-product 60 probe
training b-models 150 models
training b-loops-L16 150 loops --models L16
training b-loops-B16x64 120 loops --models B16x64
training b-stall 60 stall
training b-data 90 data
training b-loops-B16 120 loops --models B16
training b-loops-H14 180 loops --models H14
training c-objectives 150 objectives
step c-targets 180 python3 benchmarks/stored_targets.py --rates-alone --rounds 1 --work "$WORK" \
  --json "$RESULTS/c-targets.json" $TARGETS
export -f train whole_run
export DEVICE VIT WORK RESULTS CORPUS
step d-run 240 bash -c whole_run
exit $worst
