"""Kernels run on the part of their grid that goes over a micro-batch's rows."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import apart, mean_of, off
from jax.interpreters import mlir

import ga_optax as ga
from ga_optax._compiled.plan import temporaries
from ga_optax._partition import kernels
from ga_optax._passes import ir

pl = pytest.importorskip("jax.experimental.pallas")
pltpu = pytest.importorskip("jax.experimental.pallas.tpu")
pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]
N, D, K = 32, 16, 4
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(D, D)) / 4, jnp.float32)
X = jnp.asarray(RNG.normal(size=(N, D)), jnp.float32)
BOUND = 1e-5  # in float32, of sums of a hundred terms


def tail(y):
    return jnp.mean(y**2) + jnp.mean(y) ** 2


def distance(loss, *args):
    """How far the gradient is off, of its largest number."""
    return apart(ga.value_and_grad(loss, K), jax.value_and_grad(loss), *args)


def computed_whole(loss, *args):
    return {note.name for note in ga.batch_dependencies(loss, K)(*args).whole}


def compiled(fun, *args):
    """A step, and the bytes of its temporaries."""
    step = jax.jit(fun).lower(*args).compile()
    return step, temporaries(step.memory_analysis())


# -- One kernel ------------------------------------------------------------------------

FEW = W[:4, :4], X[:8, :4]
# Where the rows of an operand are, and how a result of that shape becomes `[8, 4]`.
VIEWS = {
    "rows": (lambda h: h, lambda o: o),
    "heads": (lambda h: h.reshape(16, 2), lambda o: o.reshape(8, 4)),
    "segments": (lambda h: jnp.concatenate([h, 2 * h]), lambda o: o[:8] + o[8:]),
    "one": (lambda h: jnp.ones((1, 4)), lambda o: o + jnp.zeros((8, 4))),
}


def array(view="rows", index=lambda i, *_: i, block=(1, 4), column=lambda *_: 0):
    """An operand or a result: a block of it for each program, at an index."""
    return view, pl.BlockSpec(block, lambda *ids: (index(*ids), column(*ids)))


def tanh(*refs):
    *ins, out = refs
    of = [x[...] for x in ins]
    of = [x if x.shape == out.shape else jnp.full(out.shape, x.mean()) for x in of]
    out[...] = sum((i + 1) * jnp.tanh(x) for i, x in enumerate(of))


def kernel(program=tanh, ins=None, out=None, grid=(8,), **more):
    """A kernel of `[8, 4]`; from each row to itself if no arrays are given."""
    ins, (to, spec) = ins or [array()], out or array()
    shape = jax.eval_shape(VIEWS[to][0], jnp.ones((8, 4)))
    more |= {"in_specs": [spec for _, spec in ins], "out_specs": spec}
    more["cost_estimate"] = pl.CostEstimate(64, 64, 64)  # which is split, too
    call = pl.pallas_call(program, shape, grid=grid, interpret=True, **more)

    def run(*xs):
        xs = xs if len(xs) == len(ins) else xs * len(ins)
        given = [VIEWS[view][0](x) for (view, _), x in zip(ins, xs, strict=True)]
        found = call(*given)
        return VIEWS[to][1](jnp.nan_to_num(found))  # what no program wrote

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


def divided(x, o):
    o[...] = x[...] / pl.num_programs(0)


def asks(x, o):
    o[...] = x[...] * pl.program_id(0).astype(jnp.float32)


def asks_in_a_branch(x, o):
    pl.when(x[0, 0] > 0)(lambda: asks(x, o))


def writes(x, factor, o):
    """Each program leaves the half of a factor to the next."""
    tanh(x, factor, o)
    factor[...] = factor[...] * 0.5


def adds(x, o):
    o[...] = jnp.nan_to_num(o[...]) + x[...]


def carries(begins, x, o, scratch):
    """What earlier programs left, from the last that began anew."""
    old = jnp.nan_to_num(scratch[...])
    old = jnp.where(pl.program_id(1) == 0, 0.0, old) if begins else old
    scratch[...] = old + jnp.mean(x[...])
    o[...] = jnp.tanh(x[...]) + jnp.mean(old)


def with_scratch(begins, **more):
    half = array(block=(1, 2), column=lambda i, j: j)
    program = functools.partial(carries, begins)
    scratch = {"scratch_shapes": [pltpu.VMEM((1, 4), jnp.float32)]}
    return kernel(program, [half], half, (8, 2), **scratch, **more)


def mapped(x):
    def double(x, o):
        o[...] = jnp.sin(x[...])

    shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return jax.vmap(pl.pallas_call(double, out_shape=shape, interpret=True))(x)


IN_TURN = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
HEADS_OF, SEGMENTS = array("heads", block=(1, 2)), array("segments")
SHARED, ONE = array(index=lambda i: i // 2), array("one", lambda i: 0)
SPLIT = {
    "plain": loss_of(kernel()),
    "number of programs": loss_of(kernel(divided)),
    "by heads": loss_of(kernel(tanh, [HEADS_OF, SHARED], HEADS_OF, (16,))),
    "segments": loss_of(kernel(tanh, [SEGMENTS], SEGMENTS, (16,))),
    "mapped": loss_of(mapped),
    "in place": lambda w, x: called(of_some, input_output_aliases={0: 0})(w, 2 * x),
    "scalars": called(scaled, lambda i, numbers: i, NUMBERS),
    "scratch": loss_of(with_scratch(True, compiler_params=IN_TURN)),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_kernel_whose_programs_have_their_own_rows_is_split(name):
    assert computed_whole(SPLIT[name], *FEW) == set()
    assert distance(SPLIT[name], *FEW) < BOUND


ALL, FIRST = array(index=lambda *_: 0, block=(8, 4)), array(index=lambda i: 0)
NEXT, FLIPPED = array(index=lambda i: (i + 1) % 8), array(index=lambda i: 7 - i)
LARGE = array(block=(4, 4))
# What is wrong if a kernel is split that must not be: a condition, as if it held.
WHOLE = {
    "asks where it is": (kernel(asks), "_depends"),
    "scratch goes on": (with_scratch(False), "_depends"),
    "an operand is written": (kernel(writes, [array(), ONE]), "_depends"),
    "written over others": (
        kernel(tanh, [FIRST], input_output_aliases={0: 0}),
        None,
    ),
    "next rows": (kernel(tanh, [NEXT]), "_moves"),
    "flipped": (kernel(tanh, [FLIPPED]), "_moves"),
    "a sum": (kernel(adds, [array()], ONE), None),
    "all rows": (kernel(tanh, [ALL]), None),
    "larger blocks": (kernel(tanh, [LARGE], LARGE, (2,)), None),
    "no grid": (kernel(tanh, [ALL], ALL, ()), None),
}
WHOLE = {name: (loss_of(k), how) for name, (k, how) in WHOLE.items()}
WHOLE["scalars say which"] = called(scaled, lambda i, xs: xs[i], NUMBERS), None


@pytest.mark.parametrize("name", WHOLE)
def test_any_other_kernel_is_computed_whole(name):
    loss, _ = WHOLE[name]
    assert computed_whole(loss, *FEW) == {"pallas_call"}
    assert distance(loss, *FEW) < BOUND


def test_one_that_asks_in_a_branch_is_found():
    """JAX does not interpret it, so it only is traced."""
    assert computed_whole(called(asks_in_a_branch), *FEW) == {"pallas_call"}


@pytest.mark.parametrize("name", [name for name, (_, how) in WHOLE.items() if how])
def test_the_numbers_of_one_that_is_split_all_the_same_are_wrong(name, monkeypatch):
    loss, condition = WHOLE[name]
    if condition == "_depends":
        monkeypatch.setattr(kernels, "_depends", lambda *_: False)
    else:  # Any index map that is no constant goes along the rows.
        monkeypatch.setattr(kernels, "_moves", lambda b, d, x, *_: x is None or x.any())
    assert computed_whole(loss, *FEW) == set()
    assert not distance(loss, *FEW) < BOUND


# -- In a model ------------------------------------------------------------------------


def test_in_layers_that_are_scanned_and_under_checkpoint_it_is_split_too():
    fun = jax.custom_vjp(kernel())
    back = kernel(tanh, [array(), array()])
    fun.defvjp(lambda h: (fun(h), h), lambda h, ct: (back(h, ct),))

    @jax.checkpoint
    def layer(h, w):
        return h + fun(h @ w), None

    def loss(params, x):
        return tail(jax.lax.scan(layer, x, params)[0])

    args = jnp.stack([FEW[0], FEW[0].T]), FEW[1]
    assert computed_whole(loss, *args) == set()
    assert distance(loss, *args) < BOUND


# Its estimate counts results that are kept until a cotangent is complete.
@pytest.mark.filterwarnings("ignore:.*micro-batches need about")
@pytest.mark.parametrize(
    "segments", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_attention_takes_the_memory_of_the_plain_loop(segments):
    gpu = pytest.importorskip("jax.experimental.pallas.ops.gpu.attention")
    rows, time, width = 16, 16, 32
    sizes = gpu.BlockSizes(*[time] * 6)

    def loss(params, batch):
        x, of = batch
        heads = (jnp.reshape(x @ w, (*x.shape[:2], 2, -1)) for w in params)
        out = gpu.mha(*heads, of, 0.1, of is None, sizes, interpret=True)
        return jnp.mean(out**2)

    params = jnp.asarray(RNG.normal(size=(3, width, width)) / 8, jnp.float32)
    x = jnp.asarray(RNG.normal(size=(rows, time, width)), jnp.float32)
    of = jnp.arange(rows * time, dtype=jnp.int32).reshape(rows, time) % time // 6
    args = params, (x, of if segments else None)
    assert computed_whole(loss, *args) == set()
    step, ours = compiled(ga.value_and_grad(loss, K), *args)
    _, plain = compiled(mean_of(loss, K), *args)
    assert ours <= 1.1 * plain
    assert off(step(*args), jax.jit(jax.value_and_grad(loss))(*args)) < BOUND


# -- Calls that say how they split -----------------------------------------------------


def partitioned(rule, lower=lambda x, scale: jnp.tanh(x) * scale, ins=None):
    """A loss whose call has a rule for shardings; `lower` is what a device runs."""
    custom = pytest.importorskip("jax.experimental.custom_partitioning")

    @custom.custom_partitioning
    def call(x, scale):
        return jnp.tanh(x) * scale

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
    nothing = jax.sharding.PartitionSpec()
    return jax.sharding.NamedSharding(mesh, nothing), given[1]


def rule_of(name):
    custom = pytest.importorskip("jax.experimental.custom_partitioning")
    n, rule = "n", functools.partial(custom.SdyShardingRule)
    if name == "object":
        maps = (custom.BATCHING, "d")
        return rule((maps, ("d",)), (maps,))
    if name == "compound":
        n = custom.CompoundFactor("n", "m")
        return rule(((n, "t", "d"), ("d",)), ((n, "t", "d"),), n=4, m=8)
    maps = ((n, "t", "d"), ("d",)), ((n, "t", "d"),)
    return rule(*maps, need_replication_factors=("n",))


@pytest.mark.parametrize("rule", ["n t d, d -> n t d", "... d, d -> ... d", "object"])
def test_a_call_with_a_rule_for_shardings_is_split(rule):
    loss = partitioned(rule if "->" in rule else rule_of(rule))
    assert computed_whole(loss, W, X) == set()
    assert distance(loss, W, X) < BOUND


STRAIGHT = "n t d, d -> n t d"
REFUSED = {
    "a function": lambda: partitioned(lambda *args: STRAIGHT),
    "part of a dimension": lambda: partitioned(rule_of("compound")),
    "needed whole": lambda: partitioned(rule_of("whole")),
    "other shardings": lambda: partitioned(STRAIGHT, ins=whole_rows),
    "devices that speak": lambda: partitioned(
        STRAIGHT, lambda x, s: jnp.tanh(x) * s + 0 * jax.lax.psum(x.sum(), "rows")
    ),
    "another result": lambda: partitioned(STRAIGHT, lambda x, s: jnp.tanh(x[:, :1])),
    "of something else": lambda: partitioned("n d, d -> n d"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_whose_rule_does_not_only_pass_rows_on_is_computed_whole(name):
    loss = REFUSED[name]()
    assert computed_whole(loss, W, X) == {"custom_partitioning"}
    assert distance(loss, W, X) < BOUND


def test_what_a_device_runs_is_what_a_micro_batch_runs():
    """The twin: what it runs on several devices is wrong, and so is the gradient."""
    loss = partitioned(STRAIGHT, lambda x, scale: jnp.tanh(x + 1) * scale)
    assert distance(loss, W, X) > 0.1


# -- cuDNN -----------------------------------------------------------------------------

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


def fused(options, params, batch):
    x, lengths = batch
    # In float32, in which its gradient is summed up.
    q = (x.astype(jnp.float32) * params["scale"]).astype(HALF)
    if "bias" in options:
        rows = len(x) if options["bias"] == "own" else 1
        bias = params["bias"] * (x[:, 0, :, :1, None] if rows > 1 else 1)
        options = options | {"bias": jnp.broadcast_to(bias, (rows, 2, 128, 128))}
    if options.get("query_seq_lengths"):
        names = "query_seq_lengths", "key_value_seq_lengths"
        options = options | dict.fromkeys(names, lengths)
    y = jax.nn.dot_product_attention(q, q, q, implementation="cudnn", **options)
    return jnp.mean(y.astype(jnp.float32) ** 2)


FUSED = {
    "windows": {"is_causal": True, "local_window_size": (16, 0)},
    "lengths": {"query_seq_lengths": True},
    "a bias for all": {"bias": "shared"},
    "a bias for each": {"bias": "own"},
}


def arguments():
    rng = np.random.default_rng(1)
    bias, x = (jnp.asarray(rng.normal(size=s), HALF) for s in ((1, 2, 128, 128), SHAPE))
    lengths = jnp.asarray(rng.integers(50, 128, SHAPE[0]), jnp.int32)
    return {"scale": jnp.ones(()), "bias": bias}, (x, lengths)


def traced(loss):
    """The shapes of the first operand of each call of cuDNN, and what is whole."""
    params, batch = arguments()
    closed = jax.make_jaxpr(ga.value_and_grad(loss, K))(params, batch)
    calls = [
        (e.primitive.name, e.invars[0].aval.shape)
        for e in ir.equations(closed.jaxpr)
        if "attention" in e.primitive.name
    ]
    return set(calls), computed_whole(loss, params, batch)


CALLS = [f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd")]


# A sum over rows is rounded once for each micro-batch, to 8 bits.
ROUNDED = K * 2.0**-8


@pytest.mark.parametrize("name", FUSED)
def test_attention_of_cudnn_is_called_with_the_rows_of_a_micro_batch(name, cudnn):
    loss = functools.partial(fused, FUSED[name])
    calls, whole = traced(loss)
    assert whole == set()
    assert calls == {(name, (SHAPE[0] // K, *SHAPE[1:])) for name in CALLS}
    assert distance(loss, *arguments()) < ROUNDED


def with_dropout(params, batch):
    """JAX has no argument for it yet, but its function for cuDNN has."""
    name = "jax._src.cudnn.fused_attention_stablehlo"
    q = batch[0] * params["scale"].astype(HALF)
    y = importlib.import_module(name).dot_product_attention(
        q, q, q, dropout_rate=0.1, seed=1
    )
    return jnp.mean(y.astype(jnp.float32) ** 2)


def test_what_it_draws_for_the_whole_batch_is_drawn_whole(cudnn):
    calls, whole = traced(with_dropout)
    assert whole == {"dot_product_attention_fwd_wrapper"}
    assert calls == {(name, SHAPE) for name in CALLS}
