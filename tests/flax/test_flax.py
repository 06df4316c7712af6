"""Train state, NNX optimizer and NNX gradients: as Flax's own, for windows."""

import flax.linen as nn
import flax.struct
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    array,
    bits,
    leaves_of,
    mesh_of,
    off,
    put,
    python,
    refusals,
    says,
    times_rate,
)
from jax.sharding import AxisType, PartitionSpec

import ga_optax as ga
from ga_optax.flax import (
    Optimizer,
    TrainState,
    accumulate,
    batch_dependencies,
    value_and_grad,
)

pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"w": jnp.array([1.0, -2.0])}
GRADS = [{"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, -4.0])}]
MEAN = {"w": jnp.array([2.0, -1.0])}
ADAM, REPLACED = optax.adam(0.1), nn.fp8_ops.OVERWRITE_WITH_GRADIENT
STATES = TrainState, flax.training.train_state.TrainState


def linear(size=3, seed=0, **options):
    return nnx.Linear(size, 1, rngs=nnx.Rngs(seed), **options)


def create(tx, cls=TrainState, params=PARAMS, **kwargs):
    return cls.create(apply_fn=None, params=params, tx=tx, **kwargs)


def after(state, grads=GRADS):
    for g in grads:
        state = state.apply_gradients(grads=g)
    return state


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_step_counts_calls_as_flax_does_and_optimizer_steps_the_updates(jit):
    traces = []

    def apply(state, grads):
        traces.append(0)
        return state.apply_gradients(grads=grads)

    apply, seen = jax.jit(apply) if jit else apply, []
    state, flax_state = (create(ga.MultiSteps(ADAM, 2), cls) for cls in STATES)
    plain = create(ADAM).apply_gradients(grads=MEAN)
    for grads in GRADS * 2:
        state, flax_state = apply(state, grads), apply(flax_state, grads)
        assert int(state.step) == int(flax_state.step)
        seen.append((state.step, state.optimizer_steps, state.micro_step))
        if len(seen) == 2:
            for own in (state, flax_state):
                assert off(own.params, plain.params) < 1e-6
    np.testing.assert_array_equal(seen, [(1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0)])
    assert len(traces) == 2 or not jit  # one for each kind of state


def test_without_one_accumulator_there_is_no_window():
    ours, theirs = (after(create(ADAM, cls)) for cls in STATES)
    assert (ours.step, ours.optimizer_steps, ours.micro_step) == (2, 2, 0)
    assert bits(ours.params) == bits(theirs.params)
    with pytest.raises(TypeError, match="flush needs tx to be"):
        ours.flush()
    both = {"a": ga.MultiSteps(ADAM, 2), "b": ga.MultiSteps(ADAM, 3)}
    params = dict.fromkeys(both, PARAMS)
    tx = optax.partition(both, {"a": "a", "b": "b"})
    state = after(create(tx, params=params), [params])
    assert int(state.step) == 1
    with pytest.raises(ValueError, match="there are 2"):
        _ = state.optimizer_steps


def test_flush_closes_the_window_and_is_no_call():
    state = after(create(ga.MultiSteps(ADAM, 8)))
    assert bits(state.params) == bits(PARAMS)  # the twin: nothing has closed it
    state = state.flush()
    assert (state.step, state.optimizer_steps, state.micro_step) == (2, 1, 0)
    assert bits(state.params) == bits(after(create(ga.MultiSteps(ADAM, 2))).params)
    assert bits(state.flush()) == bits(state)  # an empty window


def test_flush_passes_extra_arguments_on():
    tx = ga.MultiSteps(times_rate(), 8)
    state = create(tx).apply_gradients(grads=GRADS[0], rate=1.0).flush(rate=0.5)
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"] - GRADS[0]["w"] / 2)


def test_of_a_module_what_is_not_named_in_wrt_stays():
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    optimizer = Optimizer(model, ga.MultiSteps(optax.sgd(1.0), 1), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    for x, due in ((model.scale, 0), (model.bias, -1), (model.mean, 0), (model.var, 1)):
        np.testing.assert_array_equal(x[...], due)


def test_weights_emit_fields_and_extra_arguments_pass_through():
    class WithStats(TrainState):
        batch_stats: dict = flax.struct.field(pytree_node=True)

    tx = ga.MultiSteps(times_rate(), 2)
    state = create(tx, WithStats, batch_stats={"mean": 0})
    options = {"weight": 3, "emit": False, "rate": 1.0, "batch_stats": {"mean": 1}}
    state = state.apply_gradients(grads=GRADS[0], **options)
    assert state.batch_stats == {"mean": 1}
    state = state.apply_gradients(grads=GRADS[1], weight=1, emit=True, rate=0.5)
    assert (int(state.optimizer_steps), int(state.micro_step)) == (1, 0)
    expected = PARAMS["w"] - 0.5 * (3 * GRADS[0]["w"] + GRADS[1]["w"]) / 4
    np.testing.assert_array_equal(state.params["w"], expected)


def test_fp8_scaling_factors_are_overwritten_with_their_gradient():
    params = {"params": PARAMS, REPLACED: {"scale": jnp.float32(1.0)}}
    state = create(ga.MultiSteps(optax.sgd(1.0), 2), params=params)
    for i, grads in enumerate(GRADS):
        factor = {"scale": jnp.float32(2.0 + i)}
        state = after(state, [{"params": grads, REPLACED: factor}])
        assert float(state.params[REPLACED]["scale"]) == 2.0 + i
    assert bits(state.flush().params) == bits(state.params)
    np.testing.assert_array_equal(state.params["params"]["w"], PARAMS["w"] - MEAN["w"])


# -- NNX -------------------------------------------------------------------------------


ROWS_OF_3 = array(8, 3)


def loss(model, x, y):
    return jnp.mean(jnp.square(model(x)[:, 0] - y))


def test_the_nnx_optimizer_takes_weights_and_arguments_and_flushes():
    model = linear(use_bias=False)
    before = jnp.copy(model.kernel[...])
    optimizer = Optimizer(model, ga.MultiSteps(times_rate(), 8), wrt=nnx.Param)
    ones = jax.tree.map(jnp.ones_like, nnx.state(model))
    zeros = jax.tree.map(jnp.zeros_like, ones)
    optimizer.update(model, ones, weight=3.0, emit=False, rate=1.0)
    np.testing.assert_array_equal(model.kernel[...], before)
    optimizer.update(model, zeros, weight=1.0, emit=True, rate=1.0)
    np.testing.assert_allclose(model.kernel[...], before - 0.75, rtol=1e-6)
    optimizer.update(model, ones, rate=1.0)
    flush = nnx.jit(lambda optimizer, model, rate: optimizer.flush(model, rate=rate))
    flush(optimizer, model, 0.5)
    np.testing.assert_allclose(model.kernel[...], before - 1.25, rtol=1e-6)
    assert (int(optimizer.step[...]), int(optimizer.optimizer_steps)) == (3, 2)
    plain = Optimizer(model, ADAM, wrt=nnx.Param)
    plain.update(model, ones)
    assert (int(plain.optimizer_steps), plain.micro_step) == (1, 0)


# -- Gradients of modules: one call over all rows --------------------------------------

K, ROWS = 4, 16
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 3)) + np.arange(ROWS)[:, None]
Y = DRAW.normal(size=ROWS)
LORA = nnx.DiffState(0, nnx.LoRAParam)
FAST = pytest.mark.usefixtures("fast_compilation")


def in_float64(module):
    def wide(x):
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    nnx.update(module, jax.tree.map(wide, nnx.state(module)))
    return module


class Noisy(nnx.Module):
    """Batch statistics as long as the batch, masks, and something that counts."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.first = nnx.Linear(3, ROWS, rngs=rngs)
        self.norm = nnx.BatchNorm(ROWS, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.LoRALinear(ROWS, 4, lora_rank=2, rngs=rngs)
        self.again = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros([], jnp.int32))
        in_float64(self)

    def __call__(self, x):
        self.calls[...] += 1
        hidden = self.dropout(jnp.tanh(self.norm(self.first(x))))
        return self.again(self.second(hidden)), hidden == 0


def noisy_loss(model, x, y):
    out, mask = model(x)
    error = jnp.square(out[:, 0] ** 3 - y)
    return jnp.sqrt(jnp.mean(error)), {"mask": mask, "out": out, "mean": out.mean(0)}


def numbers(tree):
    """Its leaves as numbers: of keys their data."""

    def number(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(number, nnx.as_pure(tree))


def distance(ours, theirs):
    return off(numbers(ours), numbers(theirs))


NOISY = {"batch_argnums": (1, 2), "has_aux": True}
STACKED = NOISY | {"aux": "stack"}


def run(compute, windows=1, x=X, y=Y):
    """Results of windows one after another, and the variables after each."""
    model, found = Noisy(), []
    compute = nnx.jit(compute)
    for _ in range(windows):
        found.append((compute(model, x, y), nnx.state(model)))
    return jax.tree.map(jnp.asarray, found)


def of_rows(fun=noisy_loss, **options):
    given = NOISY | {"num_microbatches": K, "accumulator_dtype": None}
    return value_and_grad(fun, **(given | options))


def one_after_another(fun, argnums=0, **options):
    """The mean gradient of micro-batches, each by itself."""
    step = accumulate(fun, K, argnums=argnums, **options)
    kind = nnx.LoRAParam if argnums is LORA else nnx.Param

    def compute(model, *rows):
        acc = ga.accumulator.init(nnx.state(model, kind), None)
        value, acc = step(acc, model, *rows)
        return value, ga.accumulator.mean(acc)

    return compute


@FAST
@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("argnums", [0, LORA], ids=["all", "lora"])
def test_value_gradients_aux_and_variables_are_those_of_one_call(argnums):
    with jax.enable_x64(True):
        due = run(nnx.value_and_grad(noisy_loss, argnums=argnums, has_aux=True), 2)
        ours = run(of_rows(argnums=argnums), 2)
        assert distance(ours, due) < 1e-11
        assert int(ours[1][1]["calls"][...]) == 2
        # The twin: gradients, statistics and masks of micro-batches are others.
        apart = run(one_after_another(noisy_loss, argnums, **STACKED))
        [((_, aux), grads), state], [((_, other), others), left] = ours[0], apart[0]
        assert distance(others, grads) > 1e-4
        stats = (nnx.filter_state(x, nnx.BatchStat) for x in (left, state))
        assert distance(*stats) > 1e-4
        assert (other["mask"].reshape(aux["mask"].shape) != aux["mask"]).any()
        assert int(left["calls"][...]) == K


@FAST
@pytest.mark.parametrize("argnums", [0, nnx.DiffState(0, nnx.Param)])
def test_dtypes_of_sums_may_be_a_tree_of_the_variables(argnums):
    """Their sums of 1,024 ones are 1,024 in float32, and 256 in bfloat16."""
    model, x = linear(1), jnp.ones((1024, 1))

    def step(dtype):
        options = {"argnums": argnums, "accumulator_dtype": dtype}
        fun = value_and_grad(lambda m, x: jnp.sum(m(x)), 1024, **options)
        return fun(model, x)[1]

    tree = jax.tree.map(lambda _: jnp.bfloat16, nnx.state(model, nnx.Param))
    tree["bias"] = jax.tree.map(lambda _: jnp.float32, tree["bias"])
    found, due = step(tree), {"kernel": 256, "bias": 1024}
    assert {name: x[...].sum() for name, x in found.items()} == due
    assert {float(x[...].sum()) for x in step(jnp.bfloat16).values()} == {256}  # twin
    says(lambda: step({"kernel": None}), ValueError, "accumulator_dtype must be one")


@FAST
def test_where_rows_of_a_module_meet_is_what_the_step_does():
    with jax.enable_x64(True):
        model = Noisy()
        before = numbers(nnx.state(model))
        found = batch_dependencies(noisy_loss, K, **NOISY)(model, X, Y)
        assert bits(numbers(nnx.state(model))) == bits(before)
        nothing = {"argnums": nnx.DiffState(0, nnx.Cache), **NOISY}
        with pytest.raises(ValueError, match="The selection of argnums in argument 0"):
            batch_dependencies(noisy_loss, K, **nothing)(model, X, Y)
    # Two layers, each with the mean of what comes and that of its squares.
    sizes = [x.type.size for x in found.meetings if x.kind == "sum"]
    assert sorted(size for size in sizes if size > 1) == [4, 4, ROWS, ROWS]
    line = noisy_loss.__code__.co_firstlineno + 3
    assert f"test_flax.py:{line}:" in str(found)


@FAST
@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_over_devices_statistics_and_masks_are_those_of_one_call_too(kind):
    with jax.enable_x64(True):
        # What the first window leaves in the module lies on the mesh in the second.
        due = run(nnx.value_and_grad(noisy_loss, has_aux=True), 2)
        mesh = mesh_of(kind=kind)
        x, y = put((X, Y), mesh, PartitionSpec("data"))
        axis = ga.DataAxis("data", mesh=mesh)
        ours = run(of_rows(num_microbatches=2, data_axis=axis), 2, x=x, y=y)
        assert distance(ours, due) < 1e-11
        # The twin: rows of one device for those of another are another batch.
        assert distance(run(of_rows(), x=jnp.roll(X, 4, 0)), due[:1]) > 1e-4


def adds(models, x):
    models[0].rows = nnx.Intermediate(x * 2)
    models[1].mean = nnx.Intermediate(jnp.mean(x))
    return jnp.std(models[0](x) - models[1](x))


def switches(models, x):
    out = models[0](x) + models[1](x)
    models[0].use_bias = not models[0].use_bias
    return jnp.std(out)


def assigns(models, x):
    models[0].kernel[...] *= 2
    models[1].bias[...] = models[0].bias[...] + 1
    return jnp.std(models[0](x) * models[1](x))


@pytest.mark.filterwarnings("ignore:What value_and_grad or accumulate returned")
@pytest.mark.parametrize("fun", [adds, switches, assigns])
def test_whatever_fun_does_to_modules_is_done_as_by_nnx(fun):
    ours, theirs, before = ([linear(), linear(seed=1)] for _ in range(3))
    x = jnp.asarray(X, jnp.float32)
    got = nnx.jit(value_and_grad(fun, K))(ours, x=x)  # rows may come by their name
    due = nnx.jit(nnx.value_and_grad(fun))(theirs, x)
    assert jax.tree.structure(got) == jax.tree.structure(due)
    for a, b in leaves_of(got, due):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert nnx.graphdef(ours) == nnx.graphdef(theirs)
    for a, b in leaves_of(nnx.state(ours), nnx.state(theirs)):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    # The twin: it is not what there was before.
    (graph, left), (other, old) = map(nnx.split, (ours, before))
    assert graph != other or bits(left) != bits(old)


@FAST
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:What value_and_grad or accumulate returned")
@pytest.mark.parametrize("argnums", [0, LORA], ids=["all", "lora"])
def test_a_module_is_as_after_one_micro_batch_after_another(argnums):
    with jax.enable_x64(True):
        # The second window goes on where the first one ended.
        ours = run(one_after_another(noisy_loss, argnums, **STACKED), 2)
        compute = nnx.value_and_grad(noisy_loss, has_aux=True, argnums=argnums)
        parts = list(zip(np.split(X, K), np.split(Y, K), strict=True))

        def by_hand(model, *_):
            found = [compute(model, *map(jnp.asarray, part)) for part in parts]
            (value, aux), grads = jax.tree.map(lambda *x: jnp.stack(x), *found)
            return (value.mean(), aux), jax.tree.map(lambda g: g.mean(0), grads)

        due = run(by_hand, 2)
        assert distance(ours, due) < 1e-11
        assert int(ours[1][1]["calls"][...]) == 2 * K
        # The twin: statistics and streams that stay where they were give others.
        assert distance(ours[0], ours[1]) > 1e-4


# -- Errors ----------------------------------------------------------------------------


def mean_loss(model, x):
    return jnp.mean(model(x))


def pair(model, x):
    return mean_loss(model, x), 1


def at_first(fun):
    """Of the first of two modules."""
    return lambda model, x: fun([model, linear()], x)


def called(of, fun=mean_loss, num_microbatches=2, **options):
    model = linear()
    acc = [ga.accumulator.init(nnx.state(model))] if of is accumulate else []
    of(fun, num_microbatches, **options)(*acc, model, ROWS_OF_3)


def swapped():
    model = linear()
    optimizer = Optimizer(model, ga.MultiSteps(ADAM, 1), wrt=nnx.Param)
    optimizer.update(nnx.state(model), model)


def of_optax():
    """A state with an accumulator of Optax, which Flax's own takes."""
    tx = optax.chain(optax.MultiSteps(ADAM, 2).gradient_transformation(), ADAM)
    return create(ADAM).replace(tx=tx, opt_state=create(tx, STATES[1]).opt_state)


def added_fp8():
    params, loss, x = fp8()
    ga.accumulate(loss)(ga.accumulator.init(params), params, x)


ERRORS = """
after(create(optax.MultiSteps(ADAM, 2))) -> T ga_optax.MultiSteps
Optimizer(linear(), of_optax().tx, wrt=nnx.Param) -> T ga_optax.MultiSteps
after(of_optax()) -> T ga_optax.MultiSteps
of_optax().optimizer_steps -> T ga_optax.MultiSteps
Optimizer(ADAM, linear(), wrt=nnx.Param) -> T Linear | The order is Optimizer(model, tx
swapped() -> T of type Linear | The order is update(model, grads)
added_fp8() -> V accumulate must | input_amax_history | value
called(accumulate, whole_batch=True) -> T whole_batch was passed
called(accumulate, carry_argnums=2) -> T carry_argnums was passed
called(accumulate, at_first(adds)) -> V ['rows'] | nnx.pop
called(accumulate, at_first(switches)) -> V model.train
called(accumulate, at_first(assigns)) -> V must not assign
"""
for _of in ("accumulate", "value_and_grad", "batch_dependencies"):
    ERRORS += f"""
called({_of}, argnums=LORA) -> V selection of argnums in argument 0
called({_of}, has_aux=True) -> T fun must return
called({_of}, num_microbatches=64) -> V num_microbatches=64 must
called({_of}, batch_argnums=(1, 2)) -> V names 2, and the call has 2
called({_of}, batch_argnums=-3) -> V names -3, and the call has 2
"""
for _of in ("value_and_grad", "batch_dependencies"):
    ERRORS += f"""
called({_of}, pair) -> T its loss is ( | Pass has_aux=True
called({_of}, aux="mean") -> T but aux was passed | accumulate has it
called({_of}, rng_argnums=2) -> T but rng_argnums was passed | accumulate has it
called({_of}, batch_argnums=0, argnums=1) -> V arrays with rows, but argument 0
called({_of}, batch_argnum=1) -> T batch_argnum
"""


@pytest.mark.quick
@pytest.mark.parametrize(("code", "error", "said"), refusals(ERRORS))
def test_what_has_no_place_or_does_not_fit_is_said(code, error, said):
    says(lambda: eval(code), error, said)


def test_batch_dependencies_has_one_name_for_variables_without_gradient():
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    report = batch_dependencies(mean_loss, 2)(model, jnp.ones((8, 4)))
    assert report.given_whole == {"other variables of modules": 2 * 4 * 4}


@pytest.mark.slow
def test_the_package_imports_flax_when_it_is_first_asked_for():
    ask = "sys.modules['ga_optax'].flax.TrainState"
    program = f"import sys, ga_optax; {ask}; print('flax' in sys.modules)"
    missing = f"import sys; sys.modules['flax'] = None; import ga_optax; {ask}"
    found, failed = (python("-c", text) for text in (program, missing))
    assert found.stdout == "True\n", found.stderr
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ga_optax.flax needs Flax"), failed.stderr
    assert last.endswith('pip install "flax>=0.12.8".')
    assert "flax" not in ga.__all__  # a star import must not need it


# -- fp8 -------------------------------------------------------------------------------


class Fp8(nn.Module):
    op: type = nn.fp8_ops.Fp8DirectDotGeneralOp

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dot_general_cls=self.op)(x)


def fp8(op=Fp8.op, of_output=lambda y: jnp.mean(jnp.square(y))):
    """A model with fp8 scales, as the second step finds them, its loss and a batch."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32) * 10
    model = Fp8(op)
    params = dict(model.init(jax.random.key(0), x))

    def loss(params, x):
        return of_output(model.apply(params, x))

    grads = jax.jit(jax.grad(loss))(params, x)
    return {**params, REPLACED: grads[REPLACED]}, loss, x


def spread_of(y):
    return jnp.mean(jnp.square(y - y.mean(0)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp", "ignore:.*computed whole")
@pytest.mark.filterwarnings("ignore:The function dot_general_with_precision")
@pytest.mark.parametrize("name", ["Fp8DirectDotGeneralOp", "Fp8DotGeneralOp"])
@pytest.mark.parametrize("data_axis", [None, "data"])
def test_fp8_scales_are_those_of_the_whole_batch(data_axis, name):
    params, loss, x0 = fp8(getattr(nn.fp8_ops, name), spread_of)
    devices = 1 if data_axis is None else 2
    with jax.set_mesh(mesh_of(2)):
        step = jax.jit(ga.value_and_grad(loss, 4 // devices, data_axis=data_axis))
        value, got = jax.device_get(step(params, x0))
    want, due = jax.jit(jax.value_and_grad(loss))(params, x0)
    # A cotangent is a sum of 16 rows at most, and a gradient one of as many: 16 eps.
    tolerance = 16 * np.finfo(np.float32).eps
    assert off((value, got[REPLACED]), (want, due[REPLACED])) < tolerance
    # Of a bias, from which a mean is subtracted, the terms cancel: of all leaves' size.
    one = [jax.flatten_util.ravel_pytree(x["params"])[0] for x in (got, due)]
    assert off(*one) < tolerance
    # The twin: a micro-batch by itself has larger cotangents, and its own statistics.
    alone = jax.jit(jax.grad(loss))(params, x0[:4])
    assert off(alone[REPLACED], due[REPLACED]) > 0.5


def test_gradients_of_modules_outside_of_jit_warn_once():
    model, step = linear(), value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), 2)
    step(model, ROWS_OF_3)
    with pytest.warns(UserWarning, match=r"outside of jax\.jit again"):
        step(model, ROWS_OF_3)
    step(model, ROWS_OF_3)
