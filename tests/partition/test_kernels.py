"""Kernels run on the part of their grid that goes over a micro-batch's rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error, normal
from jax.interpreters import mlir
from jax.lax import pmean

import ga_optax as ga
from ga_optax._partition import splits
from ga_optax._passes import jaxprs

pl = pytest.importorskip("jax.experimental.pallas")
pltpu = pytest.importorskip("jax.experimental.pallas.tpu")
pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]
K = 4
W, X = normal(16, 16) / 4, normal(32, 16, seed=1)
BOUND = 1e-5  # in float32, of sums of a hundred terms


def tail(y):
    return jnp.mean(y**2) + jnp.mean(y) ** 2


def computed_whole(loss, *args):
    return {note.name for note in ga.batch_dependencies(loss, K)(*args).whole}


FEW = W[:4, :4], X[:8, :4]
# Where the rows of an operand are, and how a result of that shape becomes `[8, 4]`.
VIEWS = {
    "rows": (lambda h: h, lambda o: o),
    "heads": (lambda h: h.reshape(16, 2), lambda o: o.reshape(8, 4)),
    "segments": (lambda h: jnp.concatenate([h, 2 * h]), lambda o: o[:8] + o[8:]),
    "one": (lambda h: jnp.ones((1, 4)), lambda o: o + jnp.zeros((8, 4))),
}


def shape_of(view):
    return jax.eval_shape(VIEWS[view][0], jnp.ones((8, 4)))


def array(view="rows", index=lambda i, *_: i, block=(1, 4), column=lambda *_: 0):
    """An operand or a result: a block of it for each program, at an index."""
    return view, pl.BlockSpec(block, lambda *ids: (index(*ids), column(*ids)))


def kernel(does="", ins=None, out=None, grid=(8,), **more):
    """A kernel of `[8, 4]`; from each row to itself if no arrays are given."""
    ins, (to, spec) = ins or [array()], out or array()
    more |= {"in_specs": [spec for _, spec in ins], "out_specs": spec, "grid": grid}
    more["cost_estimate"] = pl.CostEstimate(64, 64, 64)  # which is split, too
    if "scratch" in does:
        more["scratch_shapes"] = [pltpu.VMEM((1, 4), jnp.float32)]
    if "begins" in does:
        turns = *["parallel"] * (len(grid) - 1), "arbitrary"
        more["compiler_params"] = pltpu.CompilerParams(dimension_semantics=turns)

    def program(*refs):
        out, *scratch = refs[len(ins) :]
        of = [x[...] for x in refs[: len(ins)]]
        of = [x if x.shape == out.shape else jnp.full(out.shape, x.mean()) for x in of]
        value = sum((i + 1) * jnp.tanh(x) for i, x in enumerate(of))
        if "asks" in does:
            value = value * (1 + pl.program_id(0)).astype(value.dtype)
        if "divides" in does:
            value = value / pl.num_programs(0)
        if "writes" in does:  # each leaves the half of it to the next
            refs[len(ins) - 1][...] *= 0.5
        for kept in scratch:  # what earlier ones left, from the last that began anew
            old = jnp.nan_to_num(kept[...])
            if "begins" in does:
                old = jnp.where(pl.program_id(len(grid) - 1) == 0, 0.0, old)
            kept[...] = old + jnp.mean(value)
            value = value + jnp.mean(old)
        if "adds" in does:
            value = value + jnp.nan_to_num(out[...])
        out[...] = value

    call = pl.pallas_call(program, shape_of(to), interpret=True, **more)

    def run(*xs):
        xs = xs if len(xs) == len(ins) else xs * len(ins)
        given = [VIEWS[view][0](x) for (view, _), x in zip(ins, xs, strict=True)]
        return VIEWS[to][1](jnp.nan_to_num(call(*given)))  # what no program wrote

    return run


def loss_of(kernel):
    return lambda w, x: tail(kernel(x) @ w)


def called(program, index=lambda i: i, scalars=(), **options):
    """With scalars, of which `index` may say which row a program reads."""

    def kernel(x):
        spec = pl.BlockSpec((1, x.shape[1]), lambda i, *xs: (index(i, *xs), 0))
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(len(x),),
            in_specs=[spec],
            out_specs=spec,
        )
        how = {"grid_spec": grid, "interpret": True, **options}
        return pl.pallas_call(program, jax.typeof(x), **how)(*scalars, x)

    return loss_of(kernel)


NUMBERS = (jnp.arange(8, dtype=jnp.int32),)


def scaled(numbers, x, o):
    o[...] = jnp.sin(x[...]) * numbers[1].astype(jnp.float32)


def of_some(x, o):
    """The other numbers of the block stay what they are."""
    o[:, :2] = jnp.sin(x[:, :2])


def asks_in_a_branch(x, o):
    @pl.when(x[0, 0] > 0)
    def _():
        o[...] = x[...] * pl.program_id(0).astype(jnp.float32)


def mapped(x):
    def double(x, o):
        o[...] = jnp.sin(x[...])

    shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return jax.vmap(pl.pallas_call(double, out_shape=shape, interpret=True))(x)


HALF_OF = array(block=(1, 2), column=lambda i, j: j)
HEADS_OF, SEGMENTS = array("heads", block=(1, 2)), array("segments")
SHARED, ONE = array(index=lambda i: i // 2), array("one", lambda i: 0)
ALL, FIRST = array(index=lambda *_: 0, block=(8, 4)), array(index=lambda i: 0)
NEXT, FLIPPED = array(index=lambda i: (i + 1) % 8), array(index=lambda i: 7 - i)
LARGE, IN_PLACE = array(block=(4, 4)), {"input_output_aliases": {0: 0}}
# Of each kernel, the condition for which it is computed whole, if one alone is.
SPLIT, ANY = "", "any"
KERNELS = {
    "plain": (kernel(), SPLIT),
    "number of programs": (kernel("divides"), SPLIT),
    "by heads": (kernel("", [HEADS_OF, SHARED], HEADS_OF, (16,)), SPLIT),
    "segments": (kernel("", [SEGMENTS], SEGMENTS, (16,)), SPLIT),
    "mapped": (mapped, SPLIT),
    "scratch": (kernel("scratch begins", [HALF_OF], HALF_OF, (8, 2)), SPLIT),
    "asks where it is": (kernel("asks"), "_depends"),
    "asks, mapped": (
        lambda x: jax.vmap(kernel("asks"))(jnp.stack([x, 2 * x])).sum(0),
        "_depends",
    ),
    "scratch goes on": (kernel("scratch", [HALF_OF], HALF_OF, (8, 2)), "_depends"),
    "an operand is written": (kernel("writes", [array(), ONE]), "_depends"),
    "written over others": (kernel("", [FIRST], **IN_PLACE), ANY),
    "next rows": (kernel("", [NEXT]), "_moves"),
    "flipped": (kernel("", [FLIPPED]), "_moves"),
    "a sum": (kernel("adds", [array()], ONE), ANY),
    "all rows": (kernel("", [ALL]), ANY),
    "larger blocks": (kernel("", [LARGE], LARGE, (2,)), ANY),
    "no grid": (kernel("", [ALL], ALL, ()), ANY),
}
KERNELS = {name: (loss_of(k), how) for name, (k, how) in KERNELS.items()} | {
    "scalars": (called(scaled, lambda i, numbers: i, NUMBERS), SPLIT),
    "scalars say which": (called(scaled, lambda i, xs: xs[i], NUMBERS), ANY),
    "in place": (lambda w, x: called(of_some, **IN_PLACE)(w, 2 * x), SPLIT),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_split_if_its_programs_have_their_own_rows(name):
    loss, condition = KERNELS[name]
    assert computed_whole(loss, *FEW) == ({"pallas_call"} if condition else set())
    assert error(loss, K, *FEW) < BOUND


def test_one_that_asks_in_a_branch_is_computed_whole():
    """JAX does not interpret it, so it only is traced."""
    assert computed_whole(called(asks_in_a_branch), *FEW) == {"pallas_call"}


@pytest.mark.parametrize("name", [x for x, (_, how) in KERNELS.items() if "_" in how])
def test_the_numbers_of_one_that_is_split_all_the_same_are_wrong(name, monkeypatch):
    loss, condition = KERNELS[name]
    if condition == "_depends":
        monkeypatch.setattr(splits, "_depends", lambda *_: False)
    else:  # Any index map that is no constant goes along the rows.
        monkeypatch.setattr(splits, "_moves", lambda b, d, x, *_: x is None or x.any())
    assert computed_whole(loss, *FEW) == set()
    assert not error(loss, K, *FEW) < BOUND


def flash(q, k, v):
    tpu = pytest.importorskip("jax.experimental.pallas.ops.tpu.flash_attention")
    return tpu.flash_attention(q, k, v, causal=True)


def splash(q, k, v):
    ops = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"
    masks, kernels = (pytest.importorskip(ops + name) for name in ("mask", "kernel"))
    mask = masks.MultiHeadMask([masks.CausalMask(q.shape[2:3] * 2)] * q.shape[1])
    return jax.vmap(kernels.make_splash_mha_single_device(mask))(q, k, v)


@pytest.mark.parametrize("attend", [flash, splash])
def test_kernels_for_tpus_are_split(attend):
    """Traced alone: only a TPU runs them."""

    def loss(params, x):
        heads = (x @ w for w in params)
        return jnp.mean(attend(*heads).astype(jnp.float32) ** 2)

    params = [jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)] * 3
    x = jax.ShapeDtypeStruct((16, 2, 512, 128), jnp.bfloat16)
    assert computed_whole(loss, params, x) == set()


NAME = "custom_partitioning"
custom = pytest.importorskip(f"jax.experimental.{NAME}")


def scaled_tanh(x, scale):
    return jnp.tanh(x) * scale


def partitioned(rule, lower=scaled_tanh, ins=None):
    """A loss whose call has a rule for shardings; `lower` is what a device runs."""

    @custom.custom_partitioning
    def call(x, scale):
        return scaled_tanh(x, scale)

    def partition(mesh, args, out):
        given = tuple(x.sharding for x in args)
        return mesh, lower, out.sharding, ins(mesh, given) if ins else given

    call.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, args, out: args[0].sharding,
        sharding_rule=rule,
    )
    return lambda w, x: tail(call(x.reshape(len(x), 2, -1), jnp.arange(8.0)) @ w[:8])


def whole_rows(mesh, given):
    return jax.NamedSharding(mesh, jax.P()), given[1]


def object_of(*rows, **more):
    """A rule that is no text, in which these are the dimensions of rows."""
    return custom.SdyShardingRule(((*rows, "d"), ("d",)), ((*rows, "d"),), **more)


STRAIGHT = "n t d, d -> n t d"
COMPOUND = custom.CompoundFactor("n", "m")
# Whether a call with this rule, and what a device runs by it, is split.
RULES = {
    "a text": (True, STRAIGHT),
    "dots": (True, "... d, d -> ... d"),
    "an object": (True, object_of(custom.BATCHING)),
    "a function": (False, lambda *args: STRAIGHT),
    "part of a dimension": (False, object_of(COMPOUND, "t", n=4, m=8)),
    "needed whole": (False, object_of("n", "t", need_replication_factors=("n",))),
    "other shardings": (False, STRAIGHT, scaled_tanh, whole_rows),
    "devices that speak": (False, STRAIGHT, lambda x, s: s * pmean(x, splits._AXIS)),
    "another result": (False, STRAIGHT, lambda x, s: jnp.tanh(x[:, :1])),
    "of something else": (False, "n d, d -> n d"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_call_is_split_if_its_rule_for_shardings_only_passes_rows_on(name):
    is_split, *rule = RULES[name]
    loss = partitioned(*rule)
    assert computed_whole(loss, W, X) == (set() if is_split else {NAME})
    assert error(loss, K, W, X) < BOUND


def test_what_a_device_runs_is_what_a_micro_batch_runs():
    """The twin: what it runs on several devices is wrong, and so is the gradient."""
    loss = partitioned(STRAIGHT, lambda x, scale: scaled_tanh(x + 1, scale))
    assert error(loss, K, W, X) > 0.1


HALF = jnp.bfloat16
SHAPE = (16, 128, 2, 64)  # rows, time, heads, width


def of_jax(q, k, v, bias, lengths, others, scale):
    """What cuDNN computes, as JAX does it elsewhere; what there is none of is empty."""
    given = {"query_seq_lengths": lengths, "key_value_seq_lengths": others}
    options = given if lengths.size else {}
    bias = bias if bias.size else None
    return jax.nn.dot_product_attention(q, k, v, bias, scale=scale, **options)


def forward(*xs, scale, **_):
    q, stats = xs[0], jnp.zeros((len(xs[0]), *xs[0].shape[2:0:-1]), jnp.float32)
    return [of_jax(*xs[:6], scale), stats.reshape(len(q), q.shape[2], q.shape[1])]


def backward(*xs, scale, variadic_args, **_):
    number = 4 if variadic_args[1] else 3

    def of(*some):
        return of_jax(*some, *xs[number:6], scale)

    return list(jax.vjp(of, *xs[:number])[1](xs[12]))


@pytest.fixture
def cudnn(monkeypatch):
    """JAX as if cuDNN were there: a CPU runs what it would compute."""
    attention = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(attention, "check_cudnn_version", lambda: 91300)
    for way, fun in (("fwd", forward), ("bwd", backward)):
        primitive = getattr(attention, f"_dot_product_attention_{way}_p_wrapper")
        rule = mlir.lower_fun(fun, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform="cpu")
    return attention


FUSED = {  # options, of a bias for all rows, the rows and the length of each
    "windows": lambda *_: {"is_causal": True, "local_window_size": (16, 0)},
    "lengths": lambda bias, x, lengths: dict.fromkeys(
        ["query_seq_lengths", "key_value_seq_lengths"], lengths
    ),
    "a bias for all": lambda bias, *_: {"bias": bias},
    "a bias for each": lambda bias, x, _: {"bias": bias * x[:, 0, :, :1, None]},
}


def fused(options, params, batch):
    x, lengths = batch
    # In float32, in which its gradient is summed up.
    q = (x.astype(jnp.float32) * params["scale"]).astype(HALF)
    how = {"implementation": "cudnn", **options(params["bias"], x, lengths)}
    y = jax.nn.dot_product_attention(q, q, q, **how)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def arguments():
    bias, x = (normal(*s).astype(HALF) for s in ((1, 2, 128, 128), SHAPE))
    lengths = jnp.asarray(50 + np.arange(SHAPE[0]) * 31 % 78, jnp.int32)
    return {"scale": jnp.ones(()), "bias": bias}, (x, lengths)


CALLS = [f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd")]


def traced(loss):
    """With how many rows cuDNN is called, there and back, and what is whole."""
    args = arguments()
    closed = jax.make_jaxpr(ga.value_and_grad(loss, K))(*args)
    calls = [
        e for e in jaxprs.equations(closed.jaxpr) if "attention" in e.primitive.name
    ]
    assert {e.primitive.name for e in calls} == {*CALLS}
    [shape] = {e.invars[0].aval.shape for e in calls}
    assert shape[1:] == SHAPE[1:]
    return shape[0], computed_whole(loss, *args)


@pytest.mark.parametrize("name", FUSED)
def test_attention_of_cudnn_is_called_with_the_rows_of_a_micro_batch(name, cudnn):
    loss = functools.partial(fused, FUSED[name])
    assert traced(loss) == (SHAPE[0] // K, set())
    # A sum over rows is rounded once for each micro-batch, to 8 bits.
    assert error(loss, K, *arguments()) < K * 2.0**-8
