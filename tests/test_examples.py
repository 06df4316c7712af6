"""Every example runs, ends as it says, refuses bad numbers, and tells a wrong build."""

import ast
import json
import pathlib
import re
import signal
import sys
import time
import tomllib
from typing import NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ga_optax as ga

for package in ("orbax.checkpoint", "sklearn", "tqdm"):
    pytest.importorskip(package)
image = pytest.importorskip("matplotlib.image")
nn = pytest.importorskip("flax.linen")

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "examples"

published = pytest.mark.published
promotes = pytest.mark.usefixtures("optax_promotion", "fast_compilation")


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
        also=("has the gradient of the undivided batch", "tokens, a window has"),
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
        "--check --steps 1 --out OUT",
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
    # Of 24 intervals of 95 % over one run, which share most of their windows.
    "noise_scale": Run("--out OUT", r"2[0-4] of 24 intervals hold the exact .*png\.$"),
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
    words = [str(out) if word == "OUT" else word for word in arguments.split()]
    return [str(FOLDER / f"{name}.py"), *words]


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
    assert [process.returncode for process in processes] == [0, 0], out + err
    assert (out, err) == other
    assert "FAILED" not in out

    row = r"^(\d+ x \d+) +(\S.*?)  +(\S+) +(0x1\S*) +(\S+) +(0x1\S*) +([\d,]+|-)$"
    rows = re.findall(row, out, re.MULTILINE)
    assert {row[0] for row in rows} == {"1 x 64", "8 x 8", "64 x 1"}
    assert len(rows) == 1 + 2 * 4
    for _, _, decimal, bits, validation, validation_bits, _ in rows:
        for number, exact in ((decimal, bits), (validation, validation_bits)):
            assert np.float32(float(number)) == float.fromhex(exact)
    # The twin of the second table: in the first, most splits have other bits.
    assert sum(row[-1] not in ("-", "0") for row in rows) > 4
    answers = re.findall(r"^accumulate.* (yes|NO)$", out, re.M)
    assert answers == ["yes"] * 3
    placed = re.findall(r"^(.* logical .*?)  .* (yes|no)$", out, re.M)
    same = [name for name, answer in placed if answer == "yes"]
    assert same == [f"8 logical devices on {n}" for n in (8, 4, 2, 1)]
    assert len(placed) == 10
    assert re.search(r"^optax\.MultiSteps +no$", out, re.MULTILINE)


@published
def test_a_language_model_that_is_killed_goes_on_with_the_same_bits(tmp_path):
    char_lm = helpers.load(FOLDER / "char_lm.py")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(folder):
        words = command("char_lm", f"{CHAR_LM} --steps 24 --out OUT", tmp_path / folder)
        return helpers.started(*words, XLA_FLAGS=FLAGS, **cache)

    def outcome(folder):
        """What a run leaves, but for its speed."""
        log = (tmp_path / folder / "log.jsonl").read_text().splitlines()
        lines = [json.loads(line) | {"tokens_per_second": 0} for line in log]
        with char_lm.open_checkpoints(tmp_path / folder) as checkpoints:
            last = checkpoints.latest_step()
            tree = checkpoints.restore(last, args=char_lm.ocp.args.StandardRestore())
        return lines, last, helpers.bits(tree)

    peaceful = start("peaceful")
    assert "Continues" not in peaceful.communicate()[0]
    killed, log = start("killed"), tmp_path / "killed" / "log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = start("killed")
    assert "Continues after micro-step" in again.communicate()[0]
    codes = [one.returncode for one in (peaceful, killed, again)]
    assert codes == [0, -signal.SIGKILL, 0]
    assert outcome("killed") == outcome("peaceful")
    lines, *_ = outcome("killed")
    assert lines[-1]["held_out"] < lines[0]["held_out"] - 0.5


# -- A wrong build ---------------------------------------------------------------------


@pytest.fixture
def load(monkeypatch):
    """A function that executes an example anew, with its neighbours on the path."""
    before = set(sys.modules)

    def load(name):
        path = FOLDER / f"{name}.py"
        monkeypatch.syspath_prepend(str(path.parent))
        return helpers.load(path)

    yield load
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def without_the_last(batch, k):
    return jax.tree.map(lambda x: x[: -len(x) // k], batch)


def half_of_the_gradient(example, patch):
    """Of the contrastive loss: the others of a batch are held fast."""

    def loss(params, pairs):
        a, b = example.encode(params, pairs)
        others = jax.lax.stop_gradient((a, b))
        return example.contrast(params["scale"], a, b, *others, 0)

    side = ga.value_and_grad(loss, example.K)
    patch.setitem(example.SIDES, example.WHOLE, side)
    # And if the undivided batch stands for plain accumulation, nothing differs.
    patch.setitem(example.SIDES, example.ALONE, example.SIDES["undivided, 512"])


def three_wrong_sides(digits, patch):
    """A sum, too few bits, windows of one micro-batch, and one that is dropped."""
    make_sides, apply = digits.make_sides, ga.apply_gradients

    def drop_one(tx, grads, state, params):
        weight = jnp.where(state.mini_step == 2, 0.0, 1.0)
        return apply(tx, grads, state, params, weight=weight)

    def wrong(loss, opt):
        k = digits.K
        undivided, _, ours, *_ = make_sides(loss, opt)

        def across(name, apply=apply, every=k, **options):
            tx = ga.MultiSteps(opt, every, **options)
            whole = jax.value_and_grad(loss)
            return digits.Side(name, k, whole, tx, apply)

        return [
            undivided,
            ours,
            across("sum", use_grad_mean=False),
            across("bfloat16", accumulator_dtype=jnp.bfloat16),
            across("no accumulation", every=1),
            across("dropped", drop_one),
        ]

    patch.setattr(digits, "make_sides", wrong)
    patch.setattr(digits, "print_table", lambda *_: None)

    class Linear(nn.Module):  # which takes little time to compile
        @nn.compact
        def __call__(self, images):
            return nn.Dense(10)(images.reshape(len(images), -1))

    patch.setattr(digits, "NETWORK", Linear())


def a_lost_micro_batch_and_the_whole_tree(finetune, patch):
    make_ways = finetune.make_ways

    def wrong(opt):
        ways = make_ways(opt)
        inside, whole = ways["split, inside a call"], ways["whole, inside a call"]

        def loses_one(adapters, state, network, batch):
            kept = without_the_last(batch, finetune.K)
            return inside.call(adapters, state, network, kept)

        def everything_moves(*args):
            params, state = whole.call(*args)
            return jax.tree.map(lambda p: p * 1.001, params), state

        return ways | {
            "split, across calls": ways["whole, across calls"],
            "split, inside a call": inside._replace(call=loses_one),
            "whole, inside a call": whole._replace(call=everything_moves),
        }

    patch.setattr(finetune, "make_ways", wrong)


def windows_of_two_tasks_without_weights(tasks, patch):
    make_ways = tasks.make_ways

    def wrong(opt):
        across = tasks.across_calls(ga.MultiSteps(opt, 2))
        others = {"across calls": across, "without weights": tasks.inside_a_call(opt)}
        return make_ways(opt) | others

    patch.setattr(tasks, "make_ways", wrong)


def verified_without_weights(char_lm, patch):
    verify = ga.verify
    patch.setattr(ga, "verify", lambda *args, weight_fn: verify(*args))


def small(exactness, patch):
    """Two groupings into calls; what verify finds is tested where verify is."""
    patch.setattr(exactness, "GROUPINGS", (1, 2))
    patch.setattr(exactness, "make_placed", lambda fun, opt: {})
    patch.setattr(exactness, "check_network", lambda *_: None)


def one_rounding_more(exactness, patch):
    """An accumulator whose sum is moved by a bit, as another order of adding would."""
    make = ga.accumulate

    def moved(fun, k, **options):
        def call(acc, *args):
            value, acc = make(fun, k, **options)(acc, *args)
            total = jax.tree.map(lambda t: t * jnp.float32(1 + 2**-23), acc.total)
            return value, acc._replace(total=total)

        return call

    small(exactness, patch)
    patch.setattr(ga, "accumulate", moved)


def mean_over_one_less(exactness, patch):
    def wrong(fun, k, **options):
        def value_and_grad(params, batch):
            parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
            values, grads = jax.vmap(jax.value_and_grad(fun), (None, 0))(params, parts)
            less = jnp.float32(1 / (k - 1))
            return jnp.mean(values), jax.tree.map(lambda g: g.sum(0) * less, grads)

        return value_and_grad

    small(exactness, patch)
    patch.setattr(ga, "value_and_grad", wrong)


def sum_for_mean(exactness, patch):
    make = ga.MultiSteps
    small(exactness, patch)
    patch.setattr(ga, "MultiSteps", lambda opt, k: make(opt, k, use_grad_mean=False))


def nothing_known(example, patch):
    tx = ga.MultiSteps(optax.sgd(0.1), 8, track_noise=True)
    row = example.Row(25, 1.0, ga.noise_scale(tx.init(jnp.ones(2))), 70.0)
    patch.setattr(example, "train", lambda *_: [row])


def other_bits(example, patch):
    right = example.block_by_block

    def wrong(partition, params, window, *args, **kwargs):
        other = np.concatenate([window[:-1], window[:1]])
        return right(partition, params, other, *args, **kwargs)

    patch.setattr(example, "block_by_block", wrong)


# The example, what is wrong with it, arguments, and how many of its checks fail then,
# or what it prints.
WRONG = [
    ("blockwise_backward", other_bits, "--layers 1 --width 8 --steps 1", "Bits differ"),
    ("char_lm", verified_without_weights, f"{CHAR_LM} --steps 9", "(WEIGHTS)"),
    ("contrastive", half_of_the_gradient, "--steps 1 --seeds 1", 4),
    ("digits", three_wrong_sides, "--check --steps 1", 7),
    (
        "finetune",
        a_lost_micro_batch_and_the_whole_tree,
        "--layers 2 --width 32 --steps 3",
        4,
    ),
    *(
        ("exactness", spoil, "--steps 1 --splits 8", said)
        for spoil, said in (
            (one_rounding_more, "the bits of accumulate, 2 x 4"),
            (mean_over_one_less, "given gradients, ga.value_and_grad"),
            (sum_for_mean, "undivided batch: ga.MultiSteps"),
        )
    ),
    ("noise_scale", nothing_known, "", "never became known"),
    ("tasks", windows_of_two_tasks_without_weights, "--width 64 --rounds 3", 3),
]


@published
@promotes
@pytest.mark.parametrize(
    ("name", "spoil", "arguments", "found"), WRONG, ids=[row[0] for row in WRONG]
)
def test_a_wrong_build_is_told_and_the_exit_status_is_1(
    name, spoil, arguments, found, load, monkeypatch, tmp_path, capsys
):
    example = load(name)
    spoil(example, monkeypatch)
    if hasattr(example, "draw_picture"):
        monkeypatch.setattr(example, "draw_picture", lambda *_: None)
        arguments += f" --out {tmp_path}"
    assert example.main(arguments.split()) == 1
    printed = capsys.readouterr().out
    failed = re.findall(r"^  FAILED.*$", printed, re.M)
    if isinstance(found, int):
        assert len(failed) == found, printed
    else:
        assert found in printed
    if name == "digits":
        blamed = [re.split(", ", line.partition(" in: ")[2]) for line in failed]
        wrong = {"sum", "bfloat16", "no accumulation", "dropped"}
        assert set().union(*blamed) == wrong  # and none of the right ones


# Other masks, and a mean that counts the padding.
@published
@promotes
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("linen_classifier", "state.step)", "state.step + 1)"),
        ("nnx_lm", "targets != 0", "targets >= 0"),
    ],
)
def test_another_flax_program_is_told(name, good, bad, load, tmp_path, monkeypatch):
    compare = load("flax_programs/compare")
    source = (FOLDER / "flax_programs" / f"{name}_accumulated.py").read_text()
    assert good in source
    wrong = tmp_path / f"{name}_wrong.py"
    wrong.write_text(source.replace(good, bad))
    monkeypatch.syspath_prepend(str(tmp_path))
    row = compare.compare(name, 1, 16, twin=wrong.stem)
    assert row.off_by > 1000 * compare.BOUND
    assert not compare.check({name: row})
    assert 4 <= len(compare.difference(name)) <= 16


@published
def test_bits_that_differ_are_counted(load):
    elastic, one = load("elastic"), np.float32([1, 2])
    for other, count in ((one, 0), ([1, -2], 1), ([1, 2 + 2.0**-22], 1)):
        assert elastic.different_bits(one, np.float32(other)) == count


@published
@promotes
def test_no_two_gradients_of_blocks_are_alive_at_once(load):
    example = load("blockwise_backward")
    params = example.init_params(layers=6, width=64)
    partition = ga.blocks.partition(params, 1)
    window = example.draw_window(
        example.load_corpus(example.LENGTH).train, jax.random.key(0), 0, 4
    )
    seen = []

    class Watch(example.Memory):
        def count(self, more, name):
            super().count(more, name)
            if name == "blocks.add":
                seen.append(example._alive() - self.before)

    memory = Watch(params)
    example.block_by_block(partition, params, window, 4, memory)
    sizes = [4 * block.elements for block in partition.blocks]
    # What enters a layer, one for each and two more on the way; tokens and counters.
    entering = (len(params) + 1) * 64 * example.LENGTH * 4
    bound = 2 * sum(sizes) + max(sizes) + entering + 64 * 1024
    assert max(seen) <= bound
    assert max(seen) + sorted(sizes)[-2] > bound  # the twin: of two blocks
    # And a piece is compiled once, not once a layer.
    assert (len(memory.compiled), memory.calls["layer_backward"]) == (5, 6 * 4)


# -- What they ask for -----------------------------------------------------------------

REFUSED = [
    ("blockwise_backward", "--layers 0", "must be at least 1"),
    ("char_lm", "--num-microbatches 7", "must"),
    ("char_lm", "--heads 7", "must"),
    ("contrastive", "--seeds 0", "--seeds must be at least 1, but it is 0."),
    ("data_parallel", "--devices 3 --processes 2", "processes share the devices"),
    ("digits", "--steps 101", "--steps must be 1 to 100, but it is 101."),
    ("elastic", "--kills 0", "--kills must be at least 1, but it is 0."),
    ("finetune", "--steps 0", "must be at least 1"),
    ("flax_programs/compare", "--batch-size 10", "a multiple of 4"),
    ("noise_scale", "--steps 24", "--steps must be at least 25, but it is 24."),
    ("resume", "--kills 400", "--kills less than micro-steps"),
    ("tasks", "--rounds 0", "must be at least 1"),
]


@published
@promotes
@pytest.mark.parametrize(("name", "arguments", "words"), REFUSED)
def test_numbers_that_do_not_fit_are_refused(name, arguments, words, load, capsys):
    example = load(name)
    with pytest.raises(SystemExit) as exit_:
        example.main(arguments.split())
    assert exit_.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


SCRIPTS = [
    path
    for folder in ("examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
EXAMPLES = [path for path in SCRIPTS if path.is_relative_to(ROOT / "examples")]
# What is installed with ga_optax, and what the others are called on a package index.
ALWAYS = {"ga_optax", "jax", "numpy", "optax", *sys.stdlib_module_names}
NAMES = {"orbax": "orbax-checkpoint", "sklearn": "scikit-learn"}
OURS = {"ga_optax.flax": "flax", "ga_optax.testing": "chex"}


def imported(path):
    """The modules that a script imports, and `from` them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def needs(path):
    """The packages that a script imports, itself or through the scripts beside it."""
    found = set()
    for name in imported(path):
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
    [sentence] = re.findall(
        r"It needs(.*?)the\s+dependency\s+group\s+`demo`", text, re.S
    )
    return set(re.findall(r"[a-z][a-z-]+", re.sub(r"`.*?`", "", sentence)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_names_all_that_it_needs_and_the_group_has_it(path):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert needs(path) <= declared(path)
    assert needs(path) <= {re.split(r"[^\w-]", name)[0] for name in groups["demo"]}


def test_a_package_that_comes_through_a_module_of_ours_is_seen(tmp_path):
    """The twin: what hid chex from the list."""
    program = tmp_path / "program.py"
    program.write_text('"""It needs flax: the dependency\ngroup `demo`."""\n')
    assert needs(program) == set()
    for line in ("from ga_optax import testing", "import beside"):
        (tmp_path / "beside.py").write_text("import ga_optax.testing, orbax.checkpoint")
        program.write_text(f"{program.read_text()}{line}\n")
        assert "chex" in needs(program)
        assert declared(program) == {"flax"}
    assert needs(program) == {"chex", "orbax-checkpoint"}


HELP = """
import pathlib, runpy, sys

for path in sys.argv[1:]:
    sys.path[0] = str(pathlib.Path(path).parent)
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        assert stop.code in (0, None), (path, stop)
    else:
        raise AssertionError(path)
"""


@pytest.mark.published
def test_every_script_has_help():
    run = helpers.python("-c", HELP, *SCRIPTS)
    assert run.returncode == 0, run.stderr
    for path in SCRIPTS:
        assert f"usage: {path.name} [-h]" in run.stdout
