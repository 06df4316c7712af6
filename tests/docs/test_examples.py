"""Every example runs, and ends as it says."""

import re

import pytest
from helpers import ROOT, python

for package in ("orbax.checkpoint", "tqdm"):
    pytest.importorskip(package)
image = pytest.importorskip("matplotlib.image")
pytest.importorskip("flax")

FOLDER = ROOT / "examples"
published = pytest.mark.published


# A script and its arguments; how many checks it prints, if any; then patterns of lines
# that it prints, and the last of what it ends with.
RUNS = r"""
blockwise_backward --layers 1 --width 8 --steps 10
^block by block \(most in
step   10   loss .*$

char_lm --layers 2 --width 16 --heads 2 --length 24 --batch-size 16
  --learning-rate 0.01 --num-microbatches 8 --save-every 7 --steps 9 --out OUT
has the gradient of the undivided batch
gradient norm \d
9 steps, .* Lines that the model wrote:\n(\n +.*)+$

contrastive --steps 2 --seeds 2 --out OUT
4 checks
each by itself: another run .*$

data_parallel --devices 2 --processes 2 --kill --steps 8
2 devices, processes: 2
restored after window 4 of 8
# The gradient, and beside it numbers of tokens and losses.
^all-reduce +\d[\d,]+,\d\d\d +1 +once +data
^\d collectives?, none in a loop
# Losses of about 6, summed over 64 lines in another order: 64·6·2^-23.
largest ([1-4]\.\de-05|\S+e-0[6-9]), parameters by \S+e-0[6-9] of
Same bits: (\w+) and \1$

digits --bits --check --steps 1 --out OUT
7 checks
# The zero updates and two copies, against a constant.
^optax.MultiSteps, 4 x 16 .* KiB +[2-9]\d\d %$
^ga.MultiSteps, 4 x 16 .* KiB +[0-4] %$
counters of ga_optax.stats$

elastic --kills 4
^4 kills, [1-4] of them inside a window$
how often: \{.*,.*\}
windows lost: 0 of \d+\nbits that differ: 0 of [\d,]{6,}$

exactness --steps 2 --splits 8 64
of the undivided batch:\nyes$

finetune --layers 2 --width 32 --steps 3 --out OUT
4 checks
\d+ s; the picture is .*png\.$

flax_programs/side_by_side --steps 8 --batch-size 16 --diff --out OUT
3 checks
^\+.*value_and_grad\(
\d+ s; the picture is .*png\.$

noise_scale
step 600: noise scale \d+ examples; a window has 64$

resume --steps 2 --kills 1 --seed 8
the model has float32\[48\], but
killed after micro-step 4\b
restored after micro-step 3 \(3 of 4 in its window\)
^    multi_steps +same bits: state \(
^    accumulate +same bits: state \(
^    train_state +same bits: state \(
^    nnx +same bits: state \(
The files were not changed\.$

tasks --width 64 --rounds 3 --out OUT
4 checks
\d+ s; the picture is .*png\.$
"""
RUNS = [
    [line for line in run.splitlines() if line[0] != "#"]
    for run in RUNS.strip().replace("\n  ", " ").split("\n\n")
]
# Most of the time goes into compiling, and most of that into LLVM's optimizer.
FLAGS = "--xla_backend_optimization_level=0"


@published
@pytest.mark.parametrize("example", RUNS, ids=lambda run: run[0].split(" ")[0])
def test_the_example_runs_and_ends_as_it_says(example, tmp_path):
    (name, *words), *patterns, ends = example[0].split(" "), *example[1:]
    number = int(patterns.pop(0).split(" ")[0]) if "checks" in example[1] else 0
    words = [str(tmp_path) if word == "OUT" else word for word in words]
    place = {"cwd": tmp_path, "TMPDIR": str(tmp_path), "timeout": 400}
    run = python(FOLDER / f"{name}.py", *words, **place, XLA_FLAGS=FLAGS)
    printed = run.stdout
    assert run.returncode == 0, printed + run.stderr
    assert re.search(ends, printed.rstrip()), printed
    for pattern in patterns:
        assert re.search(pattern, printed, re.M), (pattern, printed)
    checks = re.findall(r"^  (ok|FAILED)  ", printed, re.M)
    assert checks == ["ok"] * number
    assert "\r" not in printed  # without a terminal there is no bar
    for picture in tmp_path.glob("*.png"):
        assert image.imread(picture).std() > 0.03
    assert bool([*tmp_path.glob("*.png")]) == ("OUT" in example[0])


def test_every_example_is_run():
    paths = [x for x in FOLDER.rglob("*.py") if "__main__" in x.read_text("utf-8")]
    scripts = {str(path.relative_to(FOLDER))[:-3] for path in paths}
    beside = {name for name in scripts if re.search("flax_programs/(linen|nnx)", name)}
    assert scripts - beside == {run[0].split(" ")[0] for run in RUNS}
