"""The cost of a change of the library: bytes, passes and products, before and after.

    python benchmarks/compare.py --json before.json
    python benchmarks/compare.py --to before.json

The losses of the tests' corpora and of the benchmarks are compiled with
`value_and_grad`, and as the gradient of `microbatch`; nothing runs. A row has the bytes
of temporaries, the passes over parts of the loss, the bytes kept between levels, and
the operations of matrix products and the calls of functions such as `exp`, which are
counted in the program. All but temporaries are there for bfloat16 as well.
`--above 0.9 --rows 1024` prints what takes more than 0.9 of the undivided batch's
temporaries, and why. `--to` prints the differences, and the exit status is 1 if a
figure got worse.
`--counted` prints the bytes by which micro-batches or the undivided batch are chosen
over those of XLA, for these losses, models whose rows meet, and layers over a sequence.
PYTHONPATH= names another checkout to measure, and `--target h200` the compiler of
another machine, which `make accelerators` installs.
"""

import contextlib
import functools
import importlib
import io
import itertools
import math
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import any_loss
import jax
import jax.numpy as jnp
import peers
import record

import ga_optax as ga
from ga_optax._passes import alive, jaxprs
from ga_optax._window import run

HERE = pathlib.Path(__file__).parents[1]
K, ROWS, WIDTH = 4, 96, 64
Case = tuple[Callable[..., jax.Array], Any, Any]  # a loss, parameters and a batch


def cases(number: int = ROWS) -> Iterator[tuple[str, Case]]:
    """All losses, by name, with so many rows."""
    sys.path.append(str(HERE / "tests"))
    names = "corpus.losses", "corpus.scans"
    losses, scans = map(importlib.import_module, names)

    args = losses.arguments(number, jnp.float32, WIDTH)
    for name, row in losses.LOSSES.items():
        yield name, (row.value, *args)
    low = in_dtype((losses.hidden, *args), jnp.bfloat16)[2]
    cast = losses.LOSSES["routed_layers"].value
    yield "routed_layers, which cast their weights", (cast, args[0], low)
    for body in scans.BODIES:
        for how in (scans.How(8), scans.How(8, remat=True)):
            name = f"scan {body.__name__}{', remat' * how.remat}"
            args = scans.arguments(how.length, number, jnp.float32)
            yield name, (scans.loss_of(body, how), *args)
    for aside in (scans.nothing, scans.spread):
        loss, args = scans.decoder(4, aside)
        yield f"decoder, {aside.__name__}", (loss, *args)
    rows = jax.random.normal(jax.random.key(1), (number, WIDTH))
    for scanned, loss in ((True, peers.scanned_loss), (False, peers.unrolled_loss)):
        params = peers.make_params(4, WIDTH, scanned=scanned)
        for dtype in (jnp.float32, jnp.bfloat16):
            cast = functools.partial(jax.tree.map, lambda x, to=dtype: x.astype(to))
            data = rows.astype(dtype)
            name = f"{'scanned' if scanned else 'unrolled'} layers, {data.dtype}"
            yield name, (loss, cast(params), data)
    for name, case in any_loss.cases(2, WIDTH).items():
        both = jnp.hstack([rows, rows]) if name == "contrastive" else rows
        yield f"any loss, {name}", (case.loss, case.params, both)


def in_dtype(case: Case, dtype: Any) -> Case:
    """A loss that computes in a dtype with parameters in float32."""
    loss, params, batch = case

    def cast(tree: Any) -> Any:
        def change(x: jax.Array) -> jax.Array:
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(change, tree)

    return (lambda p, x: loss(cast(p), x).astype(jnp.float32)), params, cast(batch)


FUNCTIONS = (
    "exp exp2 expm1 log log1p logistic tanh sinh cosh asinh acosh atanh sin cos tan "
    "asin acos atan atan2 erf erfc erf_inv lgamma digamma pow sqrt rsqrt cbrt"
)


def operations(fun: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """The operations of matrix products, and the numbers that functions return.

    They are those of the program that is left without what nobody reads. Of the
    branches of a conditional the largest counts.
    """
    closed: Any = jax.make_jaxpr(lambda *args: fun(*args))(*args)  # traced anew
    return _operations(jaxprs.live(closed.jaxpr))


def _operations(jaxpr: Any) -> tuple[int, int]:
    products = functions = 0
    for e in jaxpr.eqns:
        name, sizes = e.primitive.name, [math.prod(x.aval.shape) for x in e.outvars]
        inside = list(map(_operations, jaxprs.inner_programs(e)))
        inside = [max(inside)] if name == "cond" else inside
        products += jaxprs.times(e) * sum(x for x, _ in inside)
        functions += jaxprs.times(e) * sum(x for _, x in inside)
        functions += sum(sizes) * (name in FUNCTIONS.split())
        if name == "dot_general":
            (axes, _), _ = e.params["dimension_numbers"]
            products += (
                2 * sizes[0] * math.prod(e.invars[0].aval.shape[i] for i in axes)
            )
    return products, functions


def counted(case: Case) -> dict[str, Any]:
    """The figures of a loss that need no compiler."""
    loss, *args = case
    report = ga.batch_dependencies(loss, K)(*args)
    products, functions = operations(ga.value_and_grad(loss, K), *args)
    return {
        "forward": report.forward_passes,
        "backward": report.backward_passes,
        "kept": report.kept_bytes,
        "products": products,
        "functions": functions,
    }


def measured(case: Case, target: str | None) -> dict[str, dict[str, int]]:
    """The figures of a loss, by what is differentiated."""
    loss, *args = case
    ways = {
        "value_and_grad": lambda k: jax.jit(ga.value_and_grad(loss, k)),
        "microbatch": lambda k: jax.jit(jax.value_and_grad(ga.microbatch(loss, k))),
    }
    results: dict[str, dict[str, int]] = {}
    for way, make in ways.items():
        how = {"batch_size": K, "candidates": [K], "memory_limit": 2**50}
        with contextlib.redirect_stderr(io.StringIO()):
            plan = ga.plan(make, *args, **how, target=target)
        results[way] = {"temporaries": plan.candidates[0].temp}
    results["value_and_grad"] |= counted(case)
    with contextlib.suppress(TypeError):  # a few losses are of float32 alone
        results["in bfloat16"] = counted(in_dtype(case, jnp.bfloat16))
    return results


def temporaries(compiled: jax.stages.Compiled) -> int:
    """The bytes of temporaries, by XLA."""
    analysis: Any = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes)


def over_undivided(case: Case) -> tuple[float, str]:
    """Temporaries over those of the undivided batch, and why they are not less."""
    loss, *args = case
    ours, whole = (
        temporaries(jax.jit(step).lower(*args).compile())
        for step in (ga.value_and_grad(loss, K), jax.value_and_grad(loss))
    )
    report = ga.batch_dependencies(loss, K)(*args)
    lines = [f"{x.what}, at {x.line}" for x in report.meetings]
    why = report.undivided or f"{report.peak_bytes:,} bytes: {'; '.join(lines)}"
    return ours / max(whole, 1), why


def counted_over_xla(number: int, word: str) -> Iterator[list[Any]]:
    """The name, what runs, and for both ways MB by XLA, and counted over these."""
    real, sequence = map(importlib.import_module, ("real", "sequence"))
    along = {"batch_axes": sequence.AXES}
    every = [
        *((name, (*case, {})) for name, case in cases(number)),
        *real.cases(),
        *((name, (*case, along)) for name, case in sequence.cases()),
    ]
    for name, (loss, *args, how) in every:
        if word not in name:
            continue
        report = ga.batch_dependencies(loss, real.K, **how)(*args)
        row: list[Any] = [name, "undivided" if report.undivided else "divided"]
        divided = functools.partial(ga.value_and_grad, loss, real.K, **how)
        with mock.patch.object(run, "_takes_less", return_value=True):
            for make in (functools.partial(jax.value_and_grad, loss), divided):
                taken = temporaries(jax.jit(make()).lower(*args).compile())
                closed: Any = jax.make_jaxpr(make())(*args)
                found = alive.most_alive(jaxprs.live(closed.jaxpr))
                row += [f"{taken / 1e6:.2f}", f"{found / max(taken, 1):.2f}"]
        yield row


def rows_of(before: dict[str, Any], after: dict[str, Any]) -> list[list[Any]]:
    """The differences: the loss, the figure, the old value and the new value."""
    nothing: dict[str, Any] = {}
    return [
        [name, f"{way}: {figure}", was, now]
        for name, ways in after.items()
        for way, figures in ways.items()
        for figure, now in figures.items()
        if (was := before.get(name, nothing).get(way, nothing).get(figure, now)) != now
    ]


def main() -> int:
    """Prints what differs, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--target", help='the compiler of a machine, such as "h200"')
    parser.add_argument("--only", default="", help="a word of the names of losses")
    parser.add_argument("--rows", type=int, default=ROWS, help="of a batch")
    parser.add_argument(
        "--above", type=float, help="print what takes more of the undivided batch"
    )
    parser.add_argument("--counted", action="store_true", help="counted over XLA's")
    parser.add_argument("--to", type=pathlib.Path, help="print what differs from this")
    args = parser.parse_args()
    if args.target:
        importlib.import_module("accelerators")  # the environment of compilers alone
    results: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is computed whole is among the figures
        if args.counted:
            print("loss, runs, MB undivided, counted, MB divided, counted")
            for row in counted_over_xla(args.rows, args.only):
                print(*row, sep=", ", flush=True)
            return 0
        chosen = (pair for pair in cases(args.rows) if args.only in pair[0])
        for name, case in itertools.islice(chosen, 2 if args.quick else None):
            if args.above is None:
                results[name] = measured(case, args.target)
                continue
            share, why = over_undivided(case)
            results[name] = {"share": share, "why": why}
            if share > args.above:
                print(f"{name}: {share:.2f}, {why}", flush=True)
    record.write(args.json, {"target": args.target, "results": results})
    if args.to is None:
        print(f"{len(results)} losses.")
        return 0
    differ = rows_of(record.read(args.to)["results"], results)
    record.print_table(["loss", "figure", "before", "after"], differ)
    print(f"{len(results)} losses, {len(differ)} figures differ.")
    return int(any(now > was for *_, was, now in differ))


if __name__ == "__main__":
    sys.exit(main())
