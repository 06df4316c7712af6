"""Every example runs, ends as it says, refuses bad numbers, and tells a wrong build."""

import ast
import json
import pathlib
import re
import sys
import time
import tomllib
from typing import NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("orbax.checkpoint", "tqdm"):
    pytest.importorskip(package)
datasets = pytest.importorskip("sklearn.datasets")
image = pytest.importorskip("matplotlib.image")
pytest.importorskip("flax")

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "examples"
published = pytest.mark.published

# -- Run as from the command line ------------------------------------------------------


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


def command(name, arguments, out):
    return [FOLDER / f"{name}.py", *arguments.replace("OUT", str(out)).split()]


@published
@pytest.mark.parametrize("name", RUNS)
def test_the_example_runs_and_ends_as_it_says(name, tmp_path):
    example = RUNS[name]
    words = command(name, example.arguments, tmp_path)
    place = {"cwd": tmp_path, "TMPDIR": str(tmp_path), "timeout": 400}
    run = helpers.python(*words, **place, XLA_FLAGS=FLAGS)
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


@published
def test_the_noise_scale_is_that_of_the_gradients_of_all_examples():
    """At parameters that do not move; without the correction by k the twin is off."""
    example = helpers.load(FOLDER / "noise_scale.py")
    draw = np.random.default_rng(0)
    images, labels = datasets.load_digits(return_X_y=True)
    digits = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    params = {
        "hidden": jnp.asarray(draw.normal(size=(64, 32)) / 8, jnp.float32),
        "out": jnp.asarray(draw.normal(size=(32, 10)) / 6, jnp.float32),
    }
    state = example.tx.init(params)
    windows = [example.window(params, state, digits, i)[2] for i in range(300)]
    found = np.mean(windows, 0)
    of_one = jax.vmap(jax.grad(example.loss), (None, 0, 0))
    each = of_one(params, *(x[:, None] for x in digits))
    trace = sum(float(jnp.var(g, 0).sum()) for g in jax.tree.leaves(each))
    square = sum(float((g.mean(0) ** 2).sum()) for g in jax.tree.leaves(each))
    # Four times the standard error of 300 windows, see notebook 5.
    assert abs(found[1] / found[0] / (trace / square) - 1) < 0.1
    biased = found + np.array([trace / 64, 0])
    assert abs(biased[1] / biased[0] / (trace / square) - 1) > 0.1


def test_every_example_is_run():
    scripts = {str(path.relative_to(FOLDER))[:-3] for path in EXAMPLES}
    beside = {name for name in scripts if re.search("flax_programs/(linen|nnx)", name)}
    assert scripts - beside - {"exactness"} == {*RUNS}


# Two processes that compile thirty programs each, side by side.
@published
def test_two_processes_print_the_tables_of_exactness_bit_for_bit():
    words = command("exactness", "--steps 2 --splits 8 64", None)
    processes = [helpers.started(*words, XLA_FLAGS=FLAGS) for _ in range(2)]
    (out, err), other = (process.communicate(timeout=600) for process in processes)
    assert {process.returncode for process in processes} == {0}, out + err
    assert (out, err) == other
    assert "FAILED" not in out

    row = r"^(\d+ x \d+) +(\S.*?)  +(\S+) +(0x1\S*) +(\S+) +(0x1\S*) +([\d,]+|-)$"
    rows = re.findall(row, out, re.MULTILINE)
    splits, _, *numbers, differ = zip(*rows, strict=True)
    assert set(splits) == {"1 x 64", "8 x 8", "64 x 1"}
    assert len(rows) == 1 + 2 * 4
    for decimals, bits in (numbers[:2], numbers[2:]):
        assert [*map(np.float32, decimals)] == [*map(float.fromhex, bits)]
    # The twin of the second table: in the first, most splits have other bits.
    assert len(rows) - differ.count("-") - differ.count("0") > 4
    assert re.findall(r"^accumulate.* (yes|NO)$", out, re.M) == ["yes"] * 3
    placed = re.findall(r"^(.* logical .*?)  .* (yes|no)$", out, re.M)
    same = [name for name, answer in placed if answer == "yes"]
    assert same == [f"8 logical devices on {n}" for n in (8, 4, 2, 1)]
    assert len(placed) == 10
    assert re.search(r"^optax\.MultiSteps +no$", out, re.MULTILINE)


@published
def test_a_language_model_that_is_killed_goes_on_with_the_same_bits(tmp_path):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(folder):
        words = command("char_lm", f"{CHAR_LM} --steps 24 --out OUT", tmp_path / folder)
        return helpers.started(*words, XLA_FLAGS=FLAGS, **cache)

    def log(folder):
        path = tmp_path / folder / "log.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) | {"tokens_per_second": 0} for line in lines]

    assert "Continues" not in start("peaceful").communicate()[0]
    killed = start("killed")
    while len(log("killed")) < 4:
        assert killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    assert "Continues after micro-step" in start("killed").communicate()[0]
    assert log("killed") == log("peaceful")
    assert log("killed")[-1]["held_out"] < log("killed")[0]["held_out"] - 0.5


# -- What they ask for -----------------------------------------------------------------


def scripts(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in paths if "__main__" in path.read_text(encoding="utf-8")]


EXAMPLES, SCRIPTS = scripts("examples"), scripts("examples") + scripts("benchmarks")
# What is installed with ga_optax, and what the others are called on a package index.
ALWAYS = {"ga_optax", "jax", "numpy", "optax", *sys.stdlib_module_names}
NAMES = {"orbax": "orbax-checkpoint", "sklearn": "scikit-learn"}
OURS = {"ga_optax.flax": "flax", "ga_optax.testing": "chex"}


def needs(path):
    """The packages that a script imports, itself or through the scripts beside it."""
    found, names = set(), []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += of + [".".join([*of, alias.name]) for alias in node.names]
    for name in names:
        top = name.partition(".")[0]
        if (beside := path.with_name(f"{top}.py")).exists():
            found |= needs(beside)
        elif name in OURS:
            found.add(OURS[name])
        elif top not in ALWAYS:
            found.add(NAMES.get(top, top))
    return found


def declared(path):
    """The packages that its docstring names, in the sentence that begins "It needs"."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    pattern = r"It needs(.*?)the\s+dependency\s+group\s+`demo`"
    [sentence] = re.findall(pattern, text, re.S)
    return set(re.findall(r"[a-z][a-z-]+", re.sub(r"`.*?`", "", sentence)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_names_all_that_it_needs_and_the_group_has_it(path):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert needs(path) <= declared(path)
    assert needs(path) <= {re.split(r"[^\w-]", name)[0] for name in groups["demo"]}


HELP = """
import pathlib, runpy, sys

for path in sys.argv[1:]:
    sys.path[0] = str(pathlib.Path(path).parent)
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        print(pathlib.Path(path).name, "ends with", stop.code or 0)
"""


@published
def test_every_script_has_help():
    said = helpers.python("-c", HELP, *SCRIPTS)
    for path in SCRIPTS:
        assert f"usage: {path.name} [-h]" in said.stdout
        assert f"{path.name} ends with 0" in said.stdout, said.stderr
