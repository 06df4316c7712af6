"""Every example runs, and ends as it says."""

import re
from typing import NamedTuple

import pytest
from helpers import ROOT, python

for package in ("orbax.checkpoint", "tqdm"):
    pytest.importorskip(package)
image = pytest.importorskip("matplotlib.image")
pytest.importorskip("flax")

FOLDER = ROOT / "examples"
published = pytest.mark.published


class Run(NamedTuple):
    arguments: str
    ends: str  # a pattern that what it prints ends with
    oks: int = 0  # how many checks it prints
    also: tuple[str, ...] = ()  # patterns of lines before


PLAN = (
    "--layers 2 --width 16 --heads 2 --length 24 --batch-size 16 --learning-rate 0.01"
)
CHAR_LM = f"{PLAN} --num-microbatches 8 --save-every 7"
PICTURE = r"\d+ s; the picture is .*png\.$"
RUNS = {
    "blockwise_backward": Run(
        "--layers 1 --width 8 --steps 10",
        r"step   10   loss .*$",
        also=(r"^block by block \(most in",),
    ),
    "char_lm": Run(
        f"{CHAR_LM} --steps 9 --out OUT",
        r"9 steps, .* Lines that the model wrote:\n(\n +.*)+$",
        also=("has the gradient of the undivided batch", r"gradient norm \d"),
    ),
    "contrastive": Run(
        "--steps 2 --seeds 2 --out OUT", r"each by itself: another run .*$", oks=4
    ),
    "data_parallel": Run(
        "--devices 2 --processes 2 --kill --steps 8",
        r"Same bits: (\w+) and \1$",
        also=(
            "2 devices, processes: 2",
            "restored after window 4 of 8",
            # The gradient, and beside it numbers of tokens and losses.
            r"^all-reduce +\d[\d,]+,\d\d\d +1 +once +data",
            r"^\d collectives?, none in a loop",
            # Losses of about 6, summed over 64 lines in another order: 64·6·2^-23.
            r"largest ([1-4]\.\de-05|\S+e-0[6-9]), parameters by \S+e-0[6-9] of",
        ),
    ),
    "digits": Run(
        "--bits --check --steps 1 --out OUT",
        r"counters of ga_optax.stats$",
        oks=7,
        # The zero updates and two copies, against a constant.
        also=(
            r"^optax.MultiSteps, 4 x 16 .* KiB +[2-9]\d\d %$",
            r"^ga.MultiSteps, 4 x 16 .* KiB +[0-4] %$",
        ),
    ),
    "elastic": Run(
        "--kills 4",
        r"windows lost: 0 of \d+\nbits that differ: 0 of [\d,]{6,}$",
        also=("^4 kills, [1-4] of them inside a window$", r"how often: \{.*,.*\}"),
    ),
    "exactness": Run("--steps 2 --splits 8 64", r"of the undivided batch:\nyes$"),
    "finetune": Run("--layers 2 --width 32 --steps 3 --out OUT", PICTURE, oks=4),
    "flax_programs/compare": Run(
        "--steps 8 --batch-size 16 --diff --out OUT",
        PICTURE,
        oks=3,
        also=(r"^\+.*value_and_grad\(",),
    ),
    "noise_scale": Run("", r"step 600: noise scale \d+ examples; a window has 64$"),
    "resume": Run(
        "--steps 2 --kills 1 --seed 8",
        r"The files were not changed\.$",
        also=(
            r"the model has float32\[48\], but",
            "killed after micro-step 4 ",
            r"restored after micro-step 3 \(3 of 4 in its window\)",
            *(
                rf"^    {way} +same bits: state \("
                for way in ("multi_steps", "accumulate", "train_state", "nnx")
            ),
        ),
    ),
    "tasks": Run("--width 64 --rounds 3 --out OUT", PICTURE, oks=4),
}
# Most of the time goes into compiling, and most of that into LLVM's optimizer.
FLAGS = "--xla_backend_optimization_level=0"


@published
@pytest.mark.parametrize("name", RUNS)
def test_the_example_runs_and_ends_as_it_says(name, tmp_path):
    example = RUNS[name]
    words = example.arguments.replace("OUT", str(tmp_path)).split()
    place = {"cwd": tmp_path, "TMPDIR": str(tmp_path), "timeout": 400}
    run = python(FOLDER / f"{name}.py", *words, **place, XLA_FLAGS=FLAGS)
    printed = run.stdout
    assert run.returncode == 0, printed + run.stderr
    assert re.search(example.ends, printed.rstrip()), printed
    for pattern in example.also:
        assert re.search(pattern, printed, re.M), (pattern, printed)
    checks = re.findall(r"^  (ok|FAILED)  ", printed, re.M)
    assert checks == ["ok"] * example.oks
    assert "\r" not in printed  # without a terminal there is no bar
    for picture in tmp_path.glob("*.png"):
        assert image.imread(picture).std() > 0.03
    assert bool([*tmp_path.glob("*.png")]) == ("OUT" in example.arguments)


def test_every_example_is_run():
    paths = [x for x in FOLDER.rglob("*.py") if "__main__" in x.read_text("utf-8")]
    scripts = {str(path.relative_to(FOLDER))[:-3] for path in paths}
    beside = {name for name in scripts if re.search("flax_programs/(linen|nnx)", name)}
    assert scripts - beside == {*RUNS}
