"""Do the tests see it? Faults put into a copy of the package, one at a time.

    python tests/mutations.py             # all; prints which tests saw each
    python tests/mutations.py psum mean   # those with one of these words in their name

A row is what is wrong then, the file, the text that is replaced, what stands there
instead, and the files of tests of which one must fail. `test_mutations.py` holds that
each text is still there, once.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Mutation(NamedTuple):
    name: str
    file: str  # below ga_optax
    old: str
    new: str
    tests: str  # files below tests, with spaces between


def gives(fun, result, indent=""):
    """The texts of a function that returns something else, of `given`."""
    old = f"def {fun}("
    other = f"{old}*given, **options):\n{indent}    return {result}\n\n{indent}"
    return old, f"{other}def as_it_was_{fun}("


def method_gives(fun, result):
    return gives(fun, result, "    ")


# What the law says, `value_and_grad` and `microbatch`: file, fault, and who sees it.
_PART = "_partition/"
OF_THE_LAW = [
    Mutation(name, file, *texts, f"{tests}.py")
    for name, file, texts, tests in [
        (
            "a cast counts rows whatever it does to numbers",
            _PART + "indexing.py",
            gives("_holds", "True"),
            "test_law_mended",
        ),
        (
            "results of a program are no readers",
            "_passes/ir.py",
            gives("num_readers", "1"),
            "test_law_mended",
        ),
        (
            "extrema are taken for stopped",
            _PART + "reductions.py",
            gives("_only_stopped", "True"),
            "test_law_mended",
        ),
        (
            "a backward rule is taken for linear",
            _PART + "custom.py",
            gives("_is_linear", "True"),
            "test_law_mended",
        ),
        (
            "sums that wait are scaled by what is no number",
            _PART + "writer.py",
            gives("_is_scaled", "False"),
            "test_law_mended",
        ),
        (
            "each micro-batch prints",
            _PART + "custom.py",
            gives("_run_once", "given[0].bound(*given[1:])"),
            "test_law_effects",
        ),
        (
            "a whole addend is added k times",
            _PART + "writer.py",
            method_gives("addend", "given[1].x"),
            "test_law",
        ),
        (
            "a dropped psum",
            _PART + "writer.py",
            ('return self._over("psum", x)', "return x"),
            "test_law",
        ),
        (
            "each micro-batch takes the first rows for its own",
            _PART + "values.py",
            gives("own", "as_it_was_own(*given[:2], 0 * given[2], given[3])"),
            "test_law_models",
        ),
        (
            "rows beyond the last count",
            _PART + "writer.py",
            method_gives("filled", "given[1].x"),
            "test_law_mended",
        ),
        (
            "a draw without its offset",
            _PART + "randoms.py",
            ("if d != rows.dim:\n        return here", "return here"),
            "test_law",
        ),
        (
            "gradients of rows upside down",
            "_calls/layouts.py",
            (
                "for x, due, d in triples",
                "for x, due, d in ((x[::-1], *r) for x, *r in triples)",
            ),
            "test_anywhere",
        ),
        (
            "gradients of bfloat16 are rounded in each micro-batch",
            "_loop/step.py",
            method_gives("low_precision", "False"),
            "test_law_dtypes",
        ),
        (
            "nothing is dropped between levels",
            "_window/room.py",
            gives("_segments", "()"),
            "test_law_costs",
        ),
        (
            "each level is traced by itself",
            "_passes/ir.py",
            gives("form", "object()"),
            "test_law_costs",
        ),
        (
            "rows are kept once for each of their shapes",
            _PART + "writer.py",
            ('_SHAPES = ("transpose", "reshape", "squeeze")', "_SHAPES = ()"),
            "test_law_costs",
        ),
        (
            "a sum waits for a product that makes more of it",
            _PART + "linear.py",
            gives("_grows", "False"),
            "test_law_costs",
        ),
        (
            "a gradient comes with the value always",
            "_passes/divided.py",
            method_gives("comes_with_value", "True"),
            "test_anywhere",
        ),
        (
            "the cotangents of rows are left out",
            "_calls/equation.py",
            ("[paired(x, ct) for", "[paired(x, ct * 0 + 1) for"),
            "test_anywhere",
        ),
        (
            "a call takes all rows for those of one device",
            "_devices/meshes.py",
            gives("sees_all_rows", "False"),
            "test_anywhere",
        ),
        (
            "a rule that fails is not said",
            _PART + "writer.py",
            gives("_warn", "None"),
            "test_law_told",
        ),
        (
            "an equation knows nothing of its caller",
            "_passes/places.py",
            gives("placed", "given[0]"),
            "test_law_told",
        ),
        (
            "what saves little is not said",
            "_calls/savings.py",
            method_gives("is_little", "False"),
            "test_law_told",
        ),
    ]
]
MUTATIONS = [
    *OF_THE_LAW,
    Mutation(
        "an extremum that no row attains in a later level",
        "_partition/reductions.py",
        "later = not any(v.params for v in vs) and any(map(_is_of_rows, vs))",
        "later = False",
        "test_law_mended.py",
    ),
    Mutation(
        "a micro-batch that is not added",
        "accumulator.py",
        " + _in(term, wide)",
        "",
        "test_accumulator.py",
    ),
    Mutation(
        "a product with the reciprocal of the weight",
        "accumulator.py",
        "return t / jnp.where(jnp.isnan(t), jnp.ones_like(w), w)",
        "return t * (1 / w)",
        "test_accumulator.py",
    ),
    Mutation(
        "the mean of what an empty accumulator holds",
        "accumulator.py",
        "    return jnp.where(weight == 0, jnp.zeros_like(total), some)",
        "    return some",
        "test_accumulator.py",
    ),
    Mutation(
        "an empty accumulator that is added",
        "accumulator.py",
        "return jnp.where(b.count == 0, x, jnp.where(a.count == 0, y, x + y))",
        "return x + y",
        "test_accumulator.py",
    ),
    Mutation(
        "complex numbers weighted as a whole",
        "accumulator.py",
        "    if not jnp.issubdtype(wide, jnp.complexfloating):\n",
        "    if True:\n",
        "test_accumulator.py",
    ),
    Mutation(
        "a window without a weight for its micro-batches",
        "_across/window.py",
        "after = accumulator.add(self.before, values, weight)",
        "after = accumulator.add(self.before, values)",
        "test_multi_steps_numbers.py",
    ),
    Mutation(
        "a sum for a mean across calls",
        "_across/storage.py",
        "jax.tree.map(divide, grads) if self.use_grad_mean else grads\n",
        "grads\n",
        "test_multi_steps_numbers.py",
    ),
    Mutation(
        "skips on one device alone",
        "_across/storage.py",
        "lambda x: jax.lax.pmax(x, self.axes),",
        "lambda x: jax.lax.pmin(x, self.axes),",
        "test_multi_steps_devices.py",
    ),
    Mutation(
        "reduced gradients that nobody refuses",
        "_across/storage.py",
        "            if reduced:\n",
        "            if False:\n",
        "test_multi_steps_devices.py",
    ),
    Mutation(
        "a dropped window that steps",
        "_across/closing.py",
        "            ~drop,\n",
        "            drop,\n",
        "test_multi_steps_numbers.py",
    ),
    Mutation(
        "a window that begins with a fill of 1",
        "_across/closing.py",
        "mini_step=jnp.where(closes, jnp.zeros_like(count), count)",
        "mini_step=jnp.where(closes, jnp.ones_like(count), count)",
        "test_multi_steps_numbers.py",
    ),
    Mutation(
        "the optimizer sees the dtype of the gradients",
        "_across/request.py",
        "        if before == after:\n            return grads\n",
        "        return as_given\n",
        "test_multi_steps_numbers.py",
    ),
    Mutation(
        "a running mean taken for a sum",
        "_across/state.py",
        "return a * count.astype(a.dtype) if use_grad_mean else a",
        "return a",
        "test_multi_steps_drop_in.py",
    ),
    Mutation(
        "noise that forgets the weights",
        "_across/noise_scale.py",
        "squares + weight * term)",
        "squares + term)",
        "test_noise.py",
    ),
    Mutation(
        "noise of one window too many",
        "_across/noise_scale.py",
        "noise.count - 1, jnp.ones_like",
        "noise.count, jnp.ones_like",
        "test_noise.py",
    ),
    Mutation(
        "an epoch that repeats the last order",
        "data.py",
        "jax.random.fold_in(key, step // steps)",
        "key",
        "test_data.py",
    ),
    Mutation(
        "a ramp that is a step late",
        "schedules.py",
        "begun = later <= ",
        "begun = later < ",
        "test_schedules.py",
    ),
    Mutation(
        "norms without the imaginary parts",
        "blocks/_summary.py",
        "return square(x.real) + square(x.imag)",
        "return square(x.real)",
        "test_blocks.py",
    ),
    Mutation(
        "blocks of one micro-batch with two weights",
        "blocks/_micro_step.py",
        "if not same and weight is not known:",
        "if False:",
        "test_blocks.py",
    ),
    Mutation(
        "a train state that counts updates",
        "flax/_states.py",
        "step=self.step + 1",
        "step=self.step",
        "test_flax.py",
    ),
    Mutation(
        "each by itself: a weight forgotten in the mean of a loss",
        "_loop/ways.py",
        "accumulator.weighted(x, weight, d, own)",
        "x.astype(d)",
        "test_accumulate.py",
    ),
    Mutation(
        "each by itself: a sum of aux that loses the rows before",
        "_loop/ways.py",
        "[s + x.astype(s.dtype) for s, x in pairs]",
        "[x.astype(s.dtype) for s, x in pairs]",
        "test_accumulate.py",
    ),
    Mutation(
        "each by itself: counts that wrap in eight bits",
        "_loop/ways.py",
        "return np.promote_types(dtype, kind)",
        "return np.dtype(dtype)",
        "test_accumulate.py",
    ),
    Mutation(
        "each by itself: rows of different examples are added up in silence",
        "_loop/ways.py",
        "if longer[i].shape != x.shape:",
        "if False:",
        "test_accumulate.py",
    ),
    Mutation(
        "devices: an all-reduce left out",
        "_devices/collectives.py",
        "sums = jax.lax.psum([result[i] for i in members], left)",
        "sums = [result[i] for i in members]",
        "test_law_devices.py",
    ),
    Mutation(
        "devices: the last aux is that of the first device",
        "_loop/ways.py",
        "meshes.num_devices(axes) - 1",
        "0",
        "test_devices.py",
    ),
    Mutation(
        "devices: rows of a strided split taken as neighbours",
        "_devices/membership.py",
        "parts = parts[::-1] if strided else parts",
        "parts = parts",
        "test_membership.py",
    ),
    Mutation(
        "devices: a program for several devices splits neighbours",
        "_devices/membership.py",
        'strided = getattr(its, "num_devices", 1) > 1',
        "strided = False",
        "test_membership.py",
    ),
    Mutation(
        "devices: a sync that is none",
        "_devices/data_axis.py",
        'if self.sync not in ("last", "each"):',
        "if False:",
        "test_refused.py",
    ),
    Mutation(
        "logical devices: neighbours are added in another order",
        "_devices/logical.py",
        "x = plus(x[0::2], x[1::2])",
        "x = plus(x[: x.shape[0] // 2], x[x.shape[0] // 2 :])",
        "test_logical_devices.py",
    ),
    Mutation(
        "logical devices: a loop that XLA compiles as one function",
        "_loop/fences.py",
        "cpu=lambda *pair: jax.lax.sort(jnp.stack(pair))[1],",
        "cpu=lambda count, following: following,",
        "test_logical_devices.py",
    ),
    Mutation(
        "plan: what is donated counts twice",
        "_compiled/plan.py",
        "return self.temp + self.argument + self.output - self.alias",
        "return self.temp + self.argument + self.output",
        "test_plan.py",
    ),
    Mutation(
        "audit: loops in loops do not multiply",
        "_compiled/hlo.py",
        "math.prod(t for t in trips if t is not None)",
        "max(t for t in [*trips, 1] if t is not None)",
        "test_audit.py",
    ),
    Mutation(
        "verify: every difference is rounding",
        "_verify/comparison.py",
        "return bool((rest <= self.allowed(scale)).all())",
        "return True",
        "test_verify.py",
    ),
    Mutation(
        "verify: a mask in half a float is summed as it is",
        "_verify/counts.py",
        "and leaf.dtype.itemsize < 4",
        "and leaf.dtype.itemsize < 1",
        "test_verify.py",
    ),
    Mutation(
        "verify: a NaN of weight 0 is the first",
        "_verify/comparison.py",
        "parts = map(int, np.flatnonzero(self.share))",
        "parts = range(len(self.share))",
        "test_verify.py",
    ),
    Mutation(
        "rows that a transposition leaves where they were",
        "_passes/primitives.py",
        'return [range(_rank(e))], [e.params["permutation"]]',
        "return [range(_rank(e))], [range(_rank(e))]",
        "test_whole_batch_table.py",
    ),
    Mutation(
        "a dimension of a reduction that is one too far",
        "_passes/primitives.py",
        "[[d for d in range(_rank(e)) if d not in gone]]",
        "[[d for d in range(_rank(e)) if d + 1 not in gone]]",
        "test_whole_batch_table.py",
    ),
    Mutation(
        "a sum over rows that is dropped",
        "_partition/factors.py",
        "return [(x, PARTIAL) for x in",
        "return [(x, WHOLE) for x in",
        "test_law_dtypes.py",
    ),
    Mutation(
        "groups of the whole batch in a micro-batch",
        "_partition/products.py",
        "here = [jnp.clip(x - first, 0, length)",
        "here = [jnp.clip(x, 0, length)",
        "test_ragged.py",
    ),
    Mutation(
        "a promise that is not checked",
        "_partition/promised.py",
        "if came != due:",
        "if not came:",
        "test_rowwise.py",
    ),
    Mutation(
        "a name in no operand taken for one to split along",
        "_partition/promised.py",
        "None not in way.outs and any(d is not None for d in way.ins)",
        "None not in way.outs",
        "test_rowwise.py",
    ),
    Mutation(
        "an axis of vmap that is one off",
        "_passes/rowwise.py",
        "else d + 1 for d, first in pairs",
        "else d for d, first in pairs",
        "test_rowwise.py",
    ),
    Mutation(
        "a kernel with scratch taken for one whose programs are apart",
        "_partition/kernels.py",
        "return bool(grid.scratch_avals) and not is_parallel",
        "return False",
        "test_kernels.py",
    ),
    Mutation(
        "a factor that is needed whole taken for one that is passed on",
        "_partition/declared.py",
        "        *rule.need_replication_factors,\n",
        "",
        "test_kernels.py",
    ),
    Mutation(
        "rows of a device that are those of another",
        "_partition/nested.py",
        "def _on_device(",
        "def _on_device(layout, *args, **kw):\n    return layout\n\n\ndef _unused(",
        "test_regions.py",
    ),
]


def run(mutation):
    """What pytest's last line says with the fault in, and whether a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        package = shutil.copytree(ROOT / "ga_optax", pathlib.Path(folder, "ga_optax"))
        path = package / mutation.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "pytest", "-q", "-x"),
                *("-m", "not exhaustive and not published"),
                *("-p", "no:cacheprovider"),
                *(f"tests/{name}" for name in mutation.tests.split()),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = done.stdout.splitlines() or [done.stderr]
    seen = [line.split(" ")[1] for line in lines if line.startswith("FAILED ")]
    return done.returncode == 1, " ".join(seen) or lines[-1]


def main(words):
    missed = 0
    for mutation in MUTATIONS:
        if words and not any(word in mutation.name for word in words):
            continue
        caught, how = run(mutation)
        missed += not caught
        print(f"{'seen  ' if caught else 'MISSED'}  {mutation.name}: {how}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
