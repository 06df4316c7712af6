"""Kernels run on the part of their grid that goes over a micro-batch's rows."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whole_kernels
from helpers import apart, mean_of, off
from jax.interpreters import mlir
from whole_kernels import array, kernel

import ga_optax as ga
from ga_optax._compiled.plan import temporaries
from ga_optax._partition import factors, kernels, table
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

FEW = W[: whole_kernels.D, : whole_kernels.D], X[: whole_kernels.N, : whole_kernels.D]


def loss_of(kernel):
    return lambda w, x: tail(kernel(x) @ w)


def called(program, index=lambda i: i, scalars=(), **options):
    """What `whole_kernels` has not; `index` says which row a program reads."""

    def kernel(x):
        spec = pl.BlockSpec((1, x.shape[1]), lambda i, *xs: (index(i, *xs), 0))
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(len(x),),
            in_specs=[spec],
            out_specs=spec,
        )
        how = {"grid_spec": grid, "interpret": True, **options}
        return pl.pallas_call(program, whole_kernels.SHAPE, **how)(*scalars, x)

    return loss_of(kernel)


NUMBERS = (jnp.arange(whole_kernels.N, dtype=jnp.int32),)


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


HALF_OF_A_ROW = array()._replace(
    block=(1, whole_kernels.D // 2), maps=(("itself", 0, 0), ("itself", 1, 1))
)
TWICE = {"grid": (whole_kernels.N, 2), "body": {"scratch"}}
HALVES = HALF_OF_A_ROW, HALF_OF_A_ROW
SEGMENTS = array("segments"), array("segments")
HEADS_AND_ROWS = array("heads"), array("rows", "shared"), array("heads")
SPLIT = {
    "plain": loss_of(kernel()),
    "number of programs": loss_of(kernel(body={"number"})),
    "by heads": lambda w, x: tail(kernel(*HEADS_AND_ROWS, grid=(16,))(x, x) @ w),
    "segments": loss_of(kernel(*SEGMENTS, grid=(16,))),
    "mapped": loss_of(mapped),
    "in place": lambda w, x: called(of_some, input_output_aliases={0: 0})(w, 2 * x),
    "scalars": called(scaled, lambda i, numbers: i, NUMBERS),
    "scratch": loss_of(kernel(*HALVES, **TWICE, semantics=("parallel", "arbitrary"))),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_kernel_whose_programs_have_their_own_rows_is_split(name):
    assert computed_whole(SPLIT[name], *FEW) == set()
    assert distance(SPLIT[name], *FEW) < BOUND


ALL = array(kind=None, block=whole_kernels.N)
FIRST, FACTOR = array(kind=None), array(None, None)
LARGE = array(block=whole_kernels.N // 2)


def of_halves(x):
    """Each program leaves the half of a factor to the next."""
    run = kernel(array(), FACTOR, array(), body={"writes"})
    return run(x, jnp.ones((1, whole_kernels.D)))


# What is wrong if a kernel is split that must not be: a condition, as if it held.
WHOLE = {
    "asks where it is": (kernel(body={"place"}), "_depends"),
    "scratch goes on": (kernel(*HALVES, **TWICE), "_depends"),
    "an operand is written": (of_halves, "_depends"),
    "written over others": (kernel(FIRST, array(), body={"alias"}), None),
    "next rows": (kernel(array(kind="next"), array()), "_moves"),
    "flipped": (kernel(array(kind="flipped"), array()), "_moves"),
    "a sum": (kernel(array(), FACTOR, body={"adds"}), None),
    "all rows": (kernel(ALL, array()), None),
    "larger blocks": (kernel(LARGE, LARGE, grid=(2,)), None),
    "no grid": (kernel(ALL, ALL, grid=()), None),
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


def as_if_it_held(monkeypatch, condition):
    if condition == "_depends":
        monkeypatch.setattr(kernels, "_depends", lambda *_: False)
    else:  # Any index map that is no constant goes along the rows.
        monkeypatch.setattr(kernels, "_moves", lambda b, d, x, *_: x is None or x.any())


@pytest.mark.parametrize("name", [name for name, (_, how) in WHOLE.items() if how])
def test_the_numbers_of_one_that_is_split_all_the_same_are_wrong(name, monkeypatch):
    loss, condition = WHOLE[name]
    as_if_it_held(monkeypatch, condition)
    assert computed_whole(loss, *FEW) == set()
    assert not distance(loss, *FEW) < BOUND


# -- In a model ------------------------------------------------------------------------


def test_in_layers_that_are_scanned_and_under_checkpoint_it_is_split_too():
    one = kernel(array(), array(), array(), array())
    fun, given = whole_kernels.function(one, one), jnp.ones_like(FEW[1])

    @jax.checkpoint
    def layer(h, w):
        return h + fun(h @ w, given), None

    def loss(params, x):
        return tail(jax.lax.scan(layer, x, params)[0])

    args = jnp.stack([FEW[0], FEW[0].T]), FEW[1]
    assert computed_whole(loss, *args) == set()
    assert distance(loss, *args) < BOUND


ROWS, TIME, HEADS, WIDTH = 16, 16, 2, 32
OF_GPUS, OF_TPUS = "gpu.attention", "tpu.flash_attention"
SPLASH = "tpu.splash_attention.splash_attention_kernel"


def ops(name):
    """A module of JAX's own kernels, which move from version to version."""
    return pytest.importorskip(f"jax.experimental.pallas.ops.{name}")


def on_gpus(q, k, v, of=None, causal=True):
    gpu = ops(OF_GPUS)
    sizes = gpu.BlockSizes(*[q.shape[1]] * 6)
    return gpu.mha(q, k, v, of, 0.1, causal, sizes, interpret=True)


def on_tpus(q, k, v):
    tpu, swap = ops(OF_TPUS), functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    return swap(tpu.flash_attention(*map(swap, (q, k, v)), causal=True))


def splash(q, k, v):
    swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    masks = ops("tpu.splash_attention.splash_attention_mask")
    causal = masks.CausalMask((q.shape[1], q.shape[1]))
    mask = masks.MultiHeadMask([causal] * q.shape[2])
    kernel = ops(SPLASH).make_splash_mha_single_device(mask, interpret=True)
    return swap(jax.vmap(kernel)(*map(swap, (q, k, v))))


def attention(kernel, params, batch):
    x, of = batch
    shape = *x.shape[:2], HEADS, -1
    q, k, v = (jnp.reshape(x @ w, shape) for w in params)
    more = {"of": of, "causal": of is None} if kernel is on_gpus else {}
    return jnp.mean(kernel(q, k, v, **more) ** 2)


def attention_of(kernel, time, has_segments=False):
    params = jnp.asarray(RNG.normal(size=(3, WIDTH, WIDTH)) / 8, jnp.float32)
    x = jnp.asarray(RNG.normal(size=(ROWS, time, WIDTH)), jnp.float32)
    of = np.sort(RNG.integers(0, 3, (ROWS, time)), 1).astype(np.int32)
    batch = x, jnp.asarray(of) if has_segments else None
    return functools.partial(attention, kernel), params, batch


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels that do not ask for it, of TPUs, run as JAX."""
    call = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", call)


slow = pytest.mark.slow


# Its estimate counts results that are kept until a cotangent is complete.
@pytest.mark.filterwarnings("ignore:.*micro-batches need about")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kernel", "time", "segments"),
    [
        pytest.param(on_gpus, TIME, False, id="GPUs, causal"),
        pytest.param(on_gpus, TIME, True, id="GPUs, segments", marks=slow),
        pytest.param(on_tpus, 128, False, id="TPUs", marks=slow),
        pytest.param(splash, 128, False, id="TPUs, splash", marks=slow),
    ],
)
def test_attention_takes_the_memory_of_the_plain_loop(kernel, time, segments):
    loss, *args = attention_of(kernel, time, segments)
    assert computed_whole(loss, *args) == set()
    step, ours = compiled(ga.value_and_grad(loss, K), *args)
    _, plain = compiled(mean_of(loss, K), *args)
    assert ours <= 1.1 * plain
    want = jax.jit(jax.value_and_grad(loss))(*args)
    assert off(step(*args), want) < BOUND


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_without_the_rule_it_takes_more_than_twice_as_much(monkeypatch):
    monkeypatch.delitem(table.RULES.known, "pallas_call")
    loss, *args = attention_of(on_gpus, TIME)
    _, ours = compiled(ga.value_and_grad(loss, K), *args)
    _, plain = compiled(mean_of(loss, K), *args)
    assert ours > 2 * plain


# -- Random kernels --------------------------------------------------------------------


@pytest.mark.grid(4, 20)
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("seed", range(200))
def test_random_kernels(seed):
    """`python tests/whole_kernels.py` runs more of them."""
    assert whole_kernels.check(seed).error < whole_kernels.BOUND


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("seed", [5, 27])  # One asks where it is, one has scratch.
def test_random_kernels_that_are_split_all_the_same_are_wrong(seed, monkeypatch):
    assert whole_kernels.check(seed).whole == ["pallas_call"]
    as_if_it_held(monkeypatch, "_depends")
    error, whole = whole_kernels.check(seed)
    assert whole == []
    assert not error < 100 * whole_kernels.BOUND


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
    "plain": {},
    "causal": {"is_causal": True},
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


@pytest.mark.parametrize("name", FUSED)
def test_attention_of_cudnn_is_called_with_the_rows_of_a_micro_batch(name, cudnn):
    calls, whole = traced(functools.partial(fused, FUSED[name]))
    assert whole == set()
    assert calls == {(name, (SHAPE[0] // K, *SHAPE[1:])) for name in CALLS}


# A sum over rows is rounded once for each micro-batch, to 8 bits.
ROUNDED = K * 2.0**-8


@pytest.mark.parametrize("name", ["lengths", "a bias for all", "a bias for each"])
def test_its_gradients_are_those_of_the_undivided_batch(name, cudnn):
    assert distance(functools.partial(fused, FUSED[name]), *arguments()) < ROUNDED


def test_a_gradient_of_a_bias_that_is_no_sum_would_be_seen(cudnn, monkeypatch):
    """The twin."""
    monkeypatch.setattr(factors, "PARTIAL", "whole")
    loss = functools.partial(fused, FUSED["a bias for all"])
    assert not distance(loss, *arguments()) < 4 * ROUNDED


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
