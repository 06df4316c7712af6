"""What does not fit is refused, with what was required, what came and what to do.

A row is a call, the type of its error, and parts of the message in their order.
`untraced` shows that it is before anything is traced.
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import mean_of, mesh_of, put
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax import testing

pytestmark = pytest.mark.quick


def untraced(*args, **kwargs):
    raise AssertionError("fun must not be traced")


def loss(w, x):
    return jnp.mean(x * w)


W = np.float32(2.0)
X = np.ones(8, np.float32)
KEYS = {"a": jax.random.key(0)}
IMAGES = {"image": np.ones((10, 28, 28), np.float32)}
ZEROS = {"a": jnp.zeros(2)}
LENGTHS = {"a": X, "b": X[:4]}
LOGICAL = ga.DataAxis("data", logical_devices=4)
V, T = ValueError, TypeError


def of(*args, fun=untraced, k=2, **options):
    """A case: what the function is made with, what it is called with, what is said.

    That is what was required, what came (or `@`, for `came`), and what to do.
    """
    named = ("batch", "rngs", "y", "z") & options.keys()
    kwargs = {name: options.pop(name) for name in named}
    case = fun, k, options, args, kwargs
    return lambda error, said, came="": (case, error, said.replace("@", came))


def returns(value, fun=loss):
    """The options of a function that returns something beside its loss."""
    return lambda w, x, *rest: (fun(w, x), value)


ONE_ROLE = "Give each argument one role"
NUMBERED = "an int or a sequence of ints | @ | Number the positional arguments"
NOT_OVERLAP = "batch_argnums must not overlap argnums"
AXES = "batch_axes must be an int, None, or a tree | @ | Pass the axis to split along"
A_BOOL = "optimize must be a bool | @ | Pass False for the plain scan"
ARRAYS = "batch_argnums must name arguments that hold arrays | @ | Pass the batch there"
RAW_KEY = {"dropout_key": jax.random.PRNGKey(0)}
A_NUMBER = "must be an array or a number"
PREFIX = "batch_axes must be a prefix of the batch | @ | Pass an int, None, or one for"
AN_AXIS = (
    "Every leaf of the batch must have a batch axis | @ | Give it None in batch_axes"
)
THE_LOSS = "fun must return the loss | @ | Pass has_aux=True if"
FLOATING = "The loss must be real and floating | dtype int32 | Cast it"

# Of `value_and_grad` and `accumulate`. An error has what was required, what came, and
# what to do, in that order.
BOTH = [
    of(k=0)(V, "must be at least 1 | it is 0 | 1 is the undivided batch"),
    of(k=True)(T, "must be an int | True of type bool | Pass an int that is known"),
    of(W, IMAGES, k=4)(
        V, "num_microbatches=4 must | leaf ['image'] has shape | Use 1, 2, 5 or 10."
    ),
    of(W, {})(V, ARRAYS, "argument 1 is a dict without leaves"),
    of(W, None)(V, ARRAYS, "argument 1 is None"),
    of(W, X, batch_axes=None)(
        V, "hold arrays | None to all leaves of argument 1 | the axis of these"
    ),
    of(W, {"x": X, "id": ["a"] * 8})(
        T, "must hold arrays | argument 1 has a list of 8 strings | such as token ids"
    ),
    of(W, [1.0] * 8)(T, "a list of 8 numbers | Pass jnp.asarray of it"),
    of(W, X[:0])(V, "at least one example | shape (0,) | Skip the call"),
    of(argnums=1)(
        V, f"{NOT_OVERLAP} | name argument 1 | {ONE_ROLE} | ga_optax.microbatch("
    ),
    of(batch_argnums=())(V, "batch_argnums must name | () | Leave it out"),
    of(argnums=())(V, "argnums must name an argument | () | Leave it out"),
    of(batch_argnums=1.5)(T, NUMBERED, "it is 1.5"),
    of(batch_axes="0")(T, AXES, "it holds '0'"),
    of(batch_argnames=3)(
        T, "batch_argnames must be a str or a | it is 3 | Name the keyword arguments"
    ),
    of(fun=3)(T, "fun must be a function | it is 3 | Pass the loss function"),
    of(optimize=1)(T, A_BOOL, "it is 1"),
    of(has_aux="yes")(T, "has_aux must be a bool | it is 'yes' | returns (loss, aux)"),
    of(W, batch=X)(
        V, "batch_argnums must name | names number 1, and 1 of | for keywords there is"
    ),
    of(W, X, z=1, batch_argnames="y")(
        V, "batch_argnames must name | names 'y', and z came | Pass that argument as a"
    ),
    of({"n": np.int32(1), "w": W}, X)(
        T, "leaf ['n'] of argument 0 must | dtype int32 | or allow_int=True, which"
    ),
    of(argnums=(0, 0))(V, "argnums must name each argument once | 0 twice | it once"),
    of(batch_argnums=(1, 1))(V, "batch_argnums must name each argument once | 1 twice"),
    of(batch_argnums=True)(T, NUMBERED, "it is True"),
    of({"f": jax.nn.relu}, X)(T, f"{A_NUMBER} | custom_jvp | eqx.partition"),
    of({"w": W, "name": "abc"}, X)(
        T, f"leaf ['name'] of | {A_NUMBER} | str | without this leaf"
    ),
    of(jnp.tanh, X)(T, f"{A_NUMBER} | PjitFunction | eqx.partition"),
    of(W, {"a": X, "id": np.array(["a"] * 8)})(
        T, f"leaf ['id'] {A_NUMBER} | dtype <U1 | None in batch_axes"
    ),
    of(W, X, batch_axes=1)(V, AN_AXIS, "has shape (8,)"),
    of(W, {"b": X}, batch_axes={"a": 0})(V, PREFIX, "'a'"),
    of(W, (X, X), batch_axes=(0, 0, 0))(V, PREFIX, "*, *"),
    of(W, X, fun=lambda w, x: x)(V, "be a scalar | shape | Return its mean"),
    of(W, X, fun=lambda w, x: jnp.int32(1))(T, FLOATING),
    of(W, X, fun=lambda w, x: jax.lax.complex(loss(w, x), w))(
        T, "The loss must be real | dtype complex64 | real part, or pass holomorphic"
    ),
    of(W, X, fun=returns(X))(T, THE_LOSS, "a tuple of 2"),
    of(W, X, fun=lambda w, x: None)(
        T, "must return the loss | None. | Is a return mis"
    ),
    of(W, X, fun=lambda w, x: {"loss": x})(T, "the loss | of type dict | Return the"),
    of(W, X, fun=loss, has_aux=True)(
        T, "return (loss, aux) with has_aux=True | an array of shape () | leave out"
    ),
    of(W, X, fun=lambda w, x: (loss(w, x), 1, 2), has_aux=True)(
        T, "with has_aux=True | instead of a pair came a tuple of 3. | Return it"
    ),
    of(W, X, fun=lambda w, x: None, has_aux=True)(
        T, "with has_aux=True | came None. | Is a return missing?"
    ),
]

LENGTH = "All leaves of the batch must have one length | @ | say in batch_axes"
A_KEY = "must name PRNG keys, or trees of them | @ | Pass one key"
DIFFERS = "A PRNG key must differ between micro-batches"
A_ROLE = "An argument with the batch's 8 rows must have a role"
COUNTS = "Pass the number of examples (or tokens) in the micro-batch"
TAKES = (
    "weight_fn must take the batch arguments, argument 1, | @ | Give it one parameter"
)
MODES = "aux must be one of 'mean', 'sum', 'last', 'stack' | @ | Pass one of"
AS_IT_CAME = (
    "Return each carried argument with the tree, shapes and dtypes it came with"
)
PADDED = "num_real_microbatches must be | @ | Pass how many"
STR = (
    "rng_argnames must be a str or a sequence of strs | @ | Name the keyword arguments"
)

# Of `accumulate` alone: there what is split decides what comes out.
EACH = [
    of(W, {"a": X, "id": "a"})(
        T, f"leaf ['id'] {A_NUMBER} | of type str | None in batch_axes"
    ),
    of(W, LENGTHS)(V, LENGTH, "leaf ['b'] has shape (4,)"),
    of(W, {"a": X[:3], "x": X})(
        V, LENGTH, "leaf ['x'] has shape (8,) and leaf ['a'] has shape (3,)"
    ),
    of(W, {"x": X} | RAW_KEY)(
        V, "['dropout_key'] has shape | name them in rng_argnums"
    ),
    of(W, {"a": X, "b": 3.0})(V, AN_AXIS, "['b'] is a sca"),
    of(rng_argnums=1)(V, f"rng_argnums must not overlap | 1 | {ONE_ROLE}"),
    of(W, X, rng_argnums=-1)(V, f"must not | both name | {ONE_ROLE}"),
    of(carry_argnums=(2, 1))(V, f"carry_argnums must not | 1 | {ONE_ROLE}"),
    of(batch_argnames="x", rng_argnames="x")(
        V, f"rng_argnames must not overlap batch_argnames | 'x' | {ONE_ROLE}"
    ),
    of(rng_argnames=("a", 1))(T, STR, "('a', 1)"),
    of(W, X, X, rng_argnums=2)(V, A_KEY, "shape (8,)"),
    of(W, X, {"k": jax.random.split(KEYS["a"], 8)}, rng_argnums=2)(
        V, A_KEY, "leaf ['k'] of argument 2 has shape (8,) and dtype key"
    ),
    of(W, X, rngs=KEYS)(V, f"{DIFFERS} | argument 'rngs' | rng_argnames='rngs'."),
    of(W, X, KEYS)(V, f"{DIFFERS} | ['a'] of argument 2  | rng_argnums=2."),
    of(W, {"x": X} | KEYS)(V, "leaf ['a'] | name them in rng_argnums"),
    of(W, {"x": X} | KEYS, batch_axes={"x": 0, "a": None})(V, DIFFERS),
    of(W, X, {"f": "a"}, rng_argnums=2)(
        T, f"leaf ['f'] of argument 2 {A_NUMBER} | of type str | Pass PRNG keys alone"
    ),
    of(W, X, X)(V, f"{A_ROLE} | argument 2, of | batch_argnums=(1, 2) to"),
    of(W, X, LENGTHS | {"b": X})(V, f"{A_ROLE} | argument 2 | None for it"),
    of(W, X, X, X, y=X, batch_argnums=(1, 2), batch_argnames="y")(
        V, f"{A_ROLE} | argument 3 | batch_argnums=(1, 2, 3)"
    ),
    of(weight_fn=3)(T, "weight_fn must be a function | is 3 | Pass None"),
    of(W, X, weight_fn=lambda x: x)(V, f"be a | shape (4,) | {COUNTS}"),
    of(W, X, weight_fn=lambda x: -1.0)(V, f"not negative | -1.0 | {COUNTS}"),
    of(W, X, weight_fn=lambda a, b: 1.0)(T, TAKES, "(a, b)"),
    of(W, X, fun=returns({}), has_aux=True, weight_fn=lambda x: 1.0)(
        T, "weight_fn must take the batch | takes (x) | Give it one parameter"
    ),
    of(W, X, fun=returns({}), has_aux=True, weight_fn=lambda x, a: jnp.ones(2))(
        V, f"weight must be a scalar | shape (2,) | {COUNTS}"
    ),
    of(W, X, fun=returns({}), has_aux=True, weight_fn=lambda x, a: -1)(
        V, f"not negative | -1 | {COUNTS}"
    ),
    *(
        of(aux=mode)(V, MODES, f"it holds {mode!r}")
        for mode in ("median", "auto", "concat", "max")
    ),
    of(W, X, fun=returns({"a": 1}), has_aux=True, aux={"b": "mean"})(
        V, "aux must be a tree | fun returned PyTreeDef({'a': *}) | Name the same keys"
    ),
    of(W, X, fun=returns(KEYS), has_aux=True)(
        T, "must have numbers | ['a'] of the aux has dtype key | Use \"last\" or"
    ),
    *(
        of(W, X, fun=returns({"kept": leaf}), has_aux=True)(
            T, f"must be arrays or numbers | ['kept'] is {came} | Leave it out"
        )
        for leaf, came in (("text", "'text'"), (jnp.sin, "<PjitFunction"))
    ),
    of(W, X, X, fun=lambda w, x, c: loss(w, x), carry_argnums=2)(
        T, "return (loss, carry) with carry_argnums | a pair came | leave out carry"
    ),
    of(W, X, W, fun=lambda w, x, c: (loss(w, x), c), carry_argnums=2, has_aux=True)(
        T,
        "fun must return (loss, (carry, aux)) with carry_argnums and has_aux=True | "
        "instead of a pair came | leave out carry_argnums and",
    ),
    of(W, X, ZEROS, fun=returns({"a": jnp.zeros(3)}), carry_argnums=2)(
        V, f"must keep the shape (2,) | shape (3,) | {AS_IT_CAME}"
    ),
    of(W, X, ZEROS, fun=returns({"a": jnp.zeros(2, "bfloat16")}), carry_argnums=2)(
        V, f"dtype float32 | dtype bfloat16 | {AS_IT_CAME}"
    ),
    of(W, X, ZEROS, fun=returns({"b": jnp.zeros(2)}), carry_argnums=2)(
        V, f"The carry must have the tree | leaf [0]['a'] is missing | {AS_IT_CAME}"
    ),
    of(W, X, {"f": jnp.tanh}, carry_argnums=2)(
        T, f"leaf ['f'] of argument 2 {A_NUMBER} | PjitFunction | Carry arrays alone"
    ),
    of(num_real_microbatches=5)(V, PADDED, "but it is 5"),
]

ONE_OF_TWO = "One of num_microbatches and microbatch_size must be given"
HOW_MANY = "Pass how many micro-batches there are, or how many rows"
PASS_ROWS = "Pass how many rows"

# Of `value_and_grad` alone.
LAW = [
    of(W, X, holomorphic=True)(
        T, "parameters must be complex | argument 0 has dtype float32 | leave"
    ),
    of(np.complex64(W), X, fun=lambda w, x: loss(w.real, x), holomorphic=True)(
        T, "The loss must be complex | dtype float32 | Leave that out"
    ),
    of({"f": jnp.tanh}, X, allow_int=True)(T, f"{A_NUMBER} | PjitFunction"),
    of(allow_int=1)(T, "allow_int must be a bool | it is 1 | hold integers"),
    of(W, "abc")(V, ARRAYS, "none with an axis: the only leaf is of type str"),
    of(W, {"t": W})(V, ARRAYS, "none with an axis: leaf ['t'] is a scalar"),
    of(W, {"table": np.ones(11), "x": X})(
        V, "but leaf ['table'] has shape (11,) | 1 or 11; or | leaf ['table'] None in"
    ),
    of(accumulator_dtype=jnp.int32)(T, "must be a | int32 | Use float32"),
    of(k=None)(T, f"{ONE_OF_TWO} | neither came | {HOW_MANY}"),
    of(microbatch_size=8)(T, f"{ONE_OF_TWO} | both came | {HOW_MANY}"),
    of(k=None, microbatch_size=0)(
        V, f"microbatch_size must be at least 1 | it is 0 | {PASS_ROWS}"
    ),
    of(k=None, microbatch_size=2.0)(
        T, f"microbatch_size must be an int | 2.0 | {PASS_ROWS}"
    ),
    of(W, X, k=None, microbatch_size=5)(
        V, "microbatch_size=5 must divide the batch | shape (8,) | Use 1, 2, 4 or 8."
    ),
    of(residual_bytes=-1)(
        V, "residual_bytes must be a number of bytes | it is -1 | Leave it out"
    ),
]


def says(call, error, parts):
    with pytest.raises(error) as raised:
        call()
    message, at = " ".join(str(raised.value).split()), 0
    for part in parts.split(" | "):
        assert part in message[at:], message
        at = message.index(part, at)


@pytest.mark.parametrize(
    ("make", "row"),
    [(ga.value_and_grad, row) for row in BOTH + LAW]
    + [(mean_of, row) for row in BOTH + EACH],
)
def test_what_does_not_fit_is_refused(make, row):
    (fun, k, options, args, kwargs), error, said = row

    def run():
        step = make(fun, k, **options)
        assert args  # an option alone is refused before there is a call
        step(*args, **kwargs)

    says(run, error, said)


# -- Other functions -------------------------------------------------------------------

PARAMS = {"w": jnp.ones((3, 8, 16)), "b": jnp.ones(16)}


def verify(fun=untraced, params=W, batch=X, k=2, **options):
    return lambda: ga.verify(fun, params, batch, k, **options)


def equivalent(params, batch):
    return lambda: testing.assert_accumulation_equivalent(untraced, params, batch, 2)


def plan(make=lambda k: jax.jit(untraced), **options):
    return lambda: ga.plan(make, **({"batch_size": 64, "memory_limit": 1} | options))


def make_step(k):
    return jax.jit(ga.value_and_grad(loss, k))


def axis(name="data", **options):
    return lambda: ga.DataAxis(name, **options)


def sharded(rows=64, k=4, n=8, name="data", **options):
    """A call on a mesh of n devices."""

    def call():
        data_axis = ga.DataAxis(name, mesh=mesh_of(n), **options)
        make = mean_of if "logical_devices" in options else ga.value_and_grad
        step = make(untraced, k, data_axis=data_axis)
        jax.jit(step)(PARAMS, jnp.ones((rows, 16)))

    return call


def explicit():
    """The types of the arrays name the devices."""
    x = put(jnp.ones((64, 3)), mesh_of(8, kind=AxisType.Explicit), P("data"))
    jax.jit(ga.value_and_grad(untraced, 16))(jnp.ones(3), x)


ONCE = "must name axes of the mesh, each once"

OTHERS = {
    "verify": [
        (verify(k=3), V, "must divide the batch axis"),
        (verify(params={}), V, "params must | this dict has no array"),
        (verify(params={"n": jnp.arange(3)}), T, "leaf ['n'] of params"),
        (verify(batch=()), V, "batch must hold at least one array"),
        (
            verify(batch=jax.eval_shape(lambda: X)),
            T,
            "numbers | is a type. | Pass arrays",
        ),
        (verify(batch={"x": 1.0}), V, "['x'] is a scalar. | Give it None"),
        (verify(batch=LENGTHS), V, "['b'] has shape (4,)"),
        (verify(weight_fn=3), T, "weight_fn must be a function"),
        (verify(rng=()), V, "rng must hold at least one array"),
        (verify(rng=jnp.ones(3)), V, "PRNG key"),
        (verify(3), T, "fun must be a function"),
        (verify(lambda w, x: x * w), V, "must be a scalar"),
        (verify(returns(1)), T, "has_aux=True"),
        (verify(loss, has_aux=True), T, "(loss, aux) with has_aux=True"),
        (verify(loss, weight_fn=lambda x: x), V, "weight must be"),
        (equivalent({}, X), AssertionError, "at least one array"),
        (equivalent(np.arange(2), X), T, "floating or complex"),
    ],
    "cpu": [  # a GPU reports its memory
        (plan(memory_limit=None), V, 'memory_limit must be given | "16GiB"'),
    ],
    "plan": [
        *(
            (plan(memory_limit=limit), error, said)
            for limit, error, said in (
                ("16G", V, "but it is '16G'. | Pass bytes"),
                ("-1GiB", V, "it is '-1GiB'"),
                (0, V, "at least one byte, | but it is 0"),
                (float("nan"), V, "it is nan"),
                (True, T, "it is True of type bool"),
            )
        ),
        (plan(batch_size=0), V, "batch_size must be at least 1, | it is 0"),
        (plan(batch_size=6.0), T, "batch_size must be an int, | it is 6.0"),
        (plan(candidates=[]), V, "candidates must not be empty"),
        (plan(candidates=[1, 3]), V, "but 3 does not. | Choose from 1, 2, 4"),
        (plan(candidates=[0]), V, "candidate must be at least 1 | it is 0"),
        (plan(candidates=["4"]), T, "must be an int, | '4' of type str"),
        (plan(3), T, "make_step must be a function | it is 3"),
        (plan(jax.jit(loss)), T, "make_step must | a jitted function. | lambda k: jax"),
        (plan(loss), T, "take num_microbatches alone | (w, x) | lambda k: jax.jit("),
        (plan(lambda k: len), T, "no `lower`. | Return jax.jit"),
        (plan(candidates=4), T, "a sequence of ints, but it is 4. | Choose from 1, 2"),
        *(
            (
                functools.partial(
                    ga.plan, make_step, W, X, batch_size=n, memory_limit=1 << 30
                ),
                V,
                f"batch_size must be | it is {n}, and | a batch of 8. | that number",
            )
            for n in (7, 12)
        ),
    ],
    "audit": [
        (lambda: ga.audit(jax.jit(loss)), T, "needs a compiled | PjitFunction | lower"),
        *(
            (
                lambda mesh=mesh: ga.audit("HloModule", mesh),
                T,
                "mesh must be a jax.sharding.Mesh | it is | the mesh of the program",
            )
            for mesh in ("mesh", P("data"), 3)
        ),
    ],
    "devices": [
        (axis(None), T, "must name a mesh axis | data_axis=None"),
        (axis(("data", "data")), T, "different names"),
        (axis(mesh=3), T, "must be a jax.sharding.Mesh | 3 | jax.make_mesh"),
        (axis(sync="never"), V, 'sync must be "last" or "each"'),
        (
            axis(param_specs=P("data"), grad_specs=P("data")),
            V,
            "grad_specs must be None with param_specs | one of them out",
        ),
        (axis(logical_devices=6), V, "power of two | it is 6. | Use 4 or 8"),
        (axis(logical_devices=0), V, "at least 1 | it is 0"),
        (axis(logical_devices=8.0), T, "an int | 8.0"),
        (axis(logical_devices=8, sync="each"), V, 'sync is "each"'),
        *(
            (
                lambda make=make: make(untraced, 2, data_axis=LOGICAL),
                V,
                "no logical_devices | logical_devices=4 | Use ga_optax.accumulate",
            )
            for make in (ga.value_and_grad, ga.microbatch, ga.batch_dependencies)
        ),
        (
            lambda: ga.value_and_grad(untraced, 2, data_axis="data")(W, X),
            V,
            "there is no mesh. | Call inside jax.set_mesh",
        ),
        (sharded(name="rows"), V, "must be an axis of the mesh | 'data' | splits"),
        (sharded(60), V, "8 devices | must divide | (60, 16) | 56 or 64"),
        (sharded(4), V, "8 devices | must divide | (4, 16) | a batch of 8 examples."),
        (sharded(k=3), V, "num_microbatches=3 must divide | 8 examples | 1, 2, 4 or 8"),
        (explicit, V, "of each of the 8 devices, 8 examples | 2, 4"),
        (
            sharded(48, 1, 3, logical_devices=8),
            V,
            "must divide logical_devices=8 | are 3. | Use 1, 2, 4 or 8",
        ),
        (
            sharded(12, 1, 2, logical_devices=8),
            V,
            "8 logical devices | (12, 16) | a batch of 8 or 16",
        ),
        (
            sharded(32, 3, 2, logical_devices=8),
            V,
            "each of the 8 logical devices, 4 examples | Use 1, 2 or 4",
        ),
        *(
            (sharded(**{name: specs}), error, said)
            for name in ("param_specs", "grad_specs")
            for specs, error, said in (
                ({"w": "data"}, T, f"{name} must be a tree of PartitionSpec"),
                ({"w": P()}, V, f"{name} must be a prefix"),
                (P(None, None, None, "data"), V, f"{name} must fit the param"),
                (P("data"), V, "leaf ['w'] | (3, 8, 16)"),
                ({"w": P(), "c": P()}, V, "prefix | leaf ['b'] has no spec | Pass jax"),
                (
                    {"w": P(), "b": P(), "c": P()},
                    V,
                    "prefix | have no leaf ['c'], which has a spec | Pass jax.tree",
                ),
                *(
                    (spec, V, f"{ONCE} | the only leaf names {came}, and | Name one")
                    for spec, came in (
                        (P("dta"), "'dta'"),
                        (P(None, ("data", "dta")), "'dta'"),
                        (P(3), "3"),
                        (P("data", None, "data"), "'data' twice"),
                    )
                ),
            )
        ),
        (
            lambda: ga.merge_across(jnp.ones(3), "data"),
            T,
            "acc must be of type Accumulator, but it is | pass the accumulator",
        ),
        (
            lambda: ga.merge_across("data", ga.accumulator.init(DENSE)),
            T,
            "data_axis must be the name | an object of type Accumulator. | Pass",
        ),
    ],
}


# -- Across calls ----------------------------------------------------------------------

DENSE = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
GRADS = jax.tree.map(jnp.ones_like, DENSE)
OTHER = {"dense": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}}
WHOLE = {**DENSE, "name": "a model"}
SGD, PLATEAU = optax.sgd(0.1), optax.contrib.reduce_on_plateau()
PLAIN = optax.scale(-1.0)
ONE = jnp.ones(1)


def made(k=2, opt=SGD, **options):
    return lambda: ga.MultiSteps(opt, k, **options)


def started(*args, **options):
    return lambda: made(*args, **options)().init(DENSE)


def called(way, tx=None, *, grads=GRADS, params=DENSE, state=None, **options):
    """A call of `update`, of `apply_gradients` or of `flush`; `of_tx` make one."""

    def call():
        of_tx = options.pop("of_tx", {})
        it = tx or made(**of_tx)()
        held = it.init(DENSE) if state is None else state
        if way == "update":
            return it.update(grads, held, params, **options)
        if way == "flush":
            return ga.flush(it, held, params, **options)
        return ga.apply_gradients(it, grads, held, params, **options)

    return call


def scheduled(k):
    return lambda: made(k)().init(DENSE)


def traced(k):
    """Inside of `jit`, with the state of another run, so that `init` has not seen k."""
    return lambda: jax.eval_shape(called("update", state=STATE, of_tx={"k": k}))


def skips(answer):
    return started(should_skip_update_fn=lambda *_: answer)


def chained(inner):
    return started(opt=optax.chain(SGD, inner))


TX, CHAIN = made()(), optax.chain(optax.clip(1.0), made()())
NORMED, INNER = made(track_norm=True)(), made(opt=PLAIN)()
STATE, HELD, NORM = (tx.init(DENSE) for tx in (TX, CHAIN, NORMED))
AVERAGES = {"of_tx": {"opt": PLATEAU, "mean_argnames": "value"}}
OF_OPTAX = optax.MultiSteps(SGD, 4)
SKIP, DROP = "should_skip_update_fn", "should_drop_window_fn"
NAME = "leaf ['name'] of params | Pass a tree of arrays alone"
A_K, SCHEDULE = "int or a function", "The result of every_k_schedule must be"
APPLY, EVERY = optax.apply_every(2), "optax.apply_every | without that accumulation"
THEN = optax.chain(APPLY, SGD)
LABELS = {"dense": {"kernel": "a", "bias": "b"}}
# Everything that may hold an optimizer, and where that one accumulates.
WITHIN = [
    ("the top", APPLY),
    ("[0]", THEN),
    ("[1][0]", optax.chain(SGD, THEN)),
    ("['a']", optax.named_chain(("a", APPLY), ("b", SGD))),
    (".inner_states['b'].inner_state", optax.partition({"a": SGD, "b": APPLY}, LABELS)),
    (".inner_state", optax.masked(APPLY, True)),
    ("[0]", optax.flatten(THEN)),
    (".inner_state[0]", optax.inject_hyperparams(lambda r: THEN)(0.1)),
    (".inner_state", optax.conditionally_transform(APPLY, lambda step: step > 3)),
    (".inner_state", optax.conditionally_mask(APPLY, lambda step: step > 3)),
    (".inner_state[0]", optax.apply_if_finite(THEN, 3)),
    (".fast_state[0]", optax.lookahead(THEN, 5, 0.5)),
    (".base_optimizer_state[0]", optax.contrib.schedule_free(THEN, 0.1)),
    (".base_optimizer_state[0]", optax.contrib.mechanize(THEN)),
    (".opt_state[0]", optax.contrib.sam(THEN, SGD)),
    ("", optax.contrib.split_real_and_imaginary(THEN)),
]
NO_OPTIMIZER = "tx must be an optax.GradientTransformation, but it is of type"
AMONG = "must be among opt, every_k_schedule, | track_norm, | , but"
ORDER = "The order is apply_gradients(tx"
MISSPELT = "weights", "wieght", "emits"
TAKES_NONE = "plain GradientTransformation | 'loss'"
KERNEL, BIAS = "['dense']['kernel']", "['dense']['bias']"

ACROSS = [
    # The length of a window.
    (made(0), V, "at least 1, but it is 0"),
    (made(np.int32(0)), V, "at least 1"),
    (made(2.0), T, f"{A_K}, but it is 2.0 of type float"),
    (made(True), T, "True of type bool"),
    (made(jnp.array(2)), T, A_K),
    *(
        (call(lambda step, k=k: k), error, f"{SCHEDULE} {said}")
        for call in (scheduled, traced)
        for k, error, said in (
            (0, V, "at least 1, but it is 0"),
            (np.int64(0), V, "at least 1, but it is 0"),
            (jnp.int32(-3), V, "at least 1, but it is -3"),
            (2.5, T, "an int, but it is 2.5"),
            (np.array([2]), T, "an int, but it is array([2])"),
            *((k, T, "an int | jnp.int32(k)") for k in (jnp.ones(2), True, None, "2")),
        )
    ),
    (traced(lambda step: step / 2), T, f"{SCHEDULE} an int, but it is float32[]"),
    (traced(lambda step: jnp.stack([step] * 2)), T, "an int, but it is int32[2]"),
    (traced(lambda step: step > 0), T, "an int, but it is bool[]"),
    (scheduled(lambda step: 2 * step), V, "at least 1, but it is 0"),
    (started(opt=TX), V, "2 x 2 = 4 micro-steps"),
    (started(opt=OF_OPTAX), V, "it is an optax.MultiS"),
    (chained(TX), V, "at [1] is that of a ga_optax.MultiSteps | k x (the inner k)"),
    (chained(OF_OPTAX.gradient_transformation()), V, "at [1] | an optax.MultiSteps"),
    *((started(opt=opt), V, f"{at} is that of an {EVERY}") for at, opt in WITHIN),
    # What it is made of.
    *(
        (functools.partial(ga.MultiSteps, SGD, **{name: 4}), T, f"{AMONG} {name} was")
        for name in ("k", "gradient_accumulation_steps", "num_microbatches", "tx")
    ),
    *((made(opt=opt), T, "must be an optax") for opt in (optax.adam, None, "adam", 3)),
    *((made(**{name: True}), T, f"{name} must be a function") for name in (SKIP, DROP)),
    (skips((jnp.ones(2, bool), ())), V, "boolean scalar | bool and shape (2,)"),
    (skips((jnp.float32(1.0), ())), V, "boolean scalar | float32 and shape ()"),
    (skips(jnp.array(True)), V, "the pair"),
    (made(**{SKIP: ga.drop_window_if_not_finite}), V, f"Pass {DROP}=ga_optax.drop_"),
    *(
        (made(accumulator_dtype=dtype), T, "floating dtype")
        for dtype in (jnp.int32, jnp.complex64, "number")
    ),
    (made(track_norm=1), T, "a Python bool"),
    (made(track_norm=1), T, "track_norm must be a Python bool"),
    # Trees and weights.
    (called("apply", params=OTHER), V, f"{KERNEL} | params"),
    (called("flush", params=OTHER), V, f"{KERNEL} | params"),
    (lambda: TX.init(WHOLE), T, NAME),
    (called("update", params=WHOLE), T, NAME),
    (called("apply", params=WHOLE), T, NAME),
    *(
        (called(way, weight=weight, of_tx={"k": k}), error, said)
        for way in ("update", "apply")
        for k in (1, 2)
        for weight, error, said in (
            (-1.0, V, "not negative, but it is -1.0"),
            (float("nan"), V, "finite | nan"),
            (jnp.ones(3), V, "scalar, but it has shape (3,)"),
            ("3", T, "str"),
        )
    ),
    # What the optimizer takes.
    *(
        (called("update", params=None, of_tx={"k": k, "opt": opt}), V, "params is None")
        for opt in (optax.adamw(0.1), optax.novograd(0.1))
        for k in (1, 2)
    ),
    (called("apply", params=None), T, "params must be the parameters"),
    *(
        (made(opt=PLATEAU, mean_argnames=names), V, "mean_argnames must name")
        for names in ("weight", ("value", 3), 3)
    ),
    (called("apply", value=ONE, **AVERAGES), V, "value must be a scalar | (1,)"),
    (
        called("apply", value=3.0, state=STATE, **AVERAGES),
        V,
        "must be that of mean_argnames | while no window is open",
    ),
    *(
        (called("apply", **given, **AVERAGES), T, "value must be a real | every call")
        for given in ({}, {"value": None}, {"value": "3"})
    ),
    (called("update", of_tx={"opt": PLATEAU}), T, "'value'"),
    # Extra arguments: one that is misspelt does not go to the optimizer in silence.
    *(
        (called(way, **{name: 3.0}), T, f"'{name}' looks like '{due}'")
        for way in ("update", "apply")
        for name, due in zip(MISSPELT, ("weight", "weight", "emit"), strict=True)
    ),
    *(
        (called("apply", tx, loss=3.0), T, TAKES_NONE)
        for tx in (INNER, copy.copy(INNER), PLAIN)
    ),
    (called("flush", INNER, loss=3.0), T, TAKES_NONE),
    (called("apply", optax.GradientTransformation(*TX), weight=2), T, "'weight'"),
    *(
        (called("apply", emit=emit), T, "a Python bool, or a bool scalar")
        for emit in (1, "yes", ONE > 0, jnp.int32(1), np.bool_(1))
    ),
    # States, and what only a MultiSteps can do.
    (called("apply", SGD, weight=2.0), V, "there is none"),
    (lambda: ga.stats(SGD.init(DENSE)), V, "there is none"),
    (
        called("update", state=made(1)().init(DENSE), of_tx={"k": 4}),
        V,
        "every_k_schedule=1 | _replace",
    ),
    (called("apply", of_tx={"k": 1}, emit=False), V, "every_k_schedule=1"),
    (called("apply", of_tx={"k": 1}, emit=ONE[0] > 0), V, "must hold an accumulator"),
    (called("apply", CHAIN, emit=True), T, "emit needs tx | MultiSteps(optax.chain"),
    (called("flush", CHAIN), T, "flush needs tx"),
    (called("update", state=SGD.init(DENSE)), T, "must be a MultiStepsState"),
    *(
        (functools.partial(call, *args), T, "swapped? | grads, state, params")
        for call, args in (
            (ga.apply_gradients, (TX, GRADS, DENSE, STATE)),
            (ga.apply_gradients, (TX, STATE, GRADS, DENSE)),
            (ga.apply_gradients, (CHAIN, GRADS, DENSE, HELD)),
            (TX.update, (GRADS, DENSE, STATE)),
            (TX.update, (STATE, GRADS, DENSE)),
            (ga.flush, (TX, DENSE, STATE)),
            (TX.init, (STATE,)),
        )
    ),
    *(
        (functools.partial(call, *args), T, f"{NO_OPTIMIZER} {kind} | {ORDER}")
        for call, args, kind in (
            (ga.apply_gradients, (GRADS, TX, STATE, DENSE), "dict"),
            (ga.apply_gradients, (STATE, GRADS, TX, DENSE), "MultiStepsState"),
            (ga.flush, (STATE, TX, DENSE), "MultiStepsState"),
        )
    ),
    # The norm.
    (lambda: ga.grad_norm(STATE), V, "track_norm=True, but the field grad_norm is"),
    (lambda: ga.grad_norm(optax.EmptyState()), V, "none in this EmptyState"),
    (lambda: ga.grad_norm((NORM, NORM)), V, "2: [0] | , [1] | Pass one"),
    (called("apply", NORMED, state=STATE), V, "_replace(grad_norm="),
    (called("flush", NORMED, state=STATE), V, "_replace(grad_norm="),
]

# -- The accumulator and data ----------------------------------------------------------


def added(grads=GRADS, weight=None, params=DENSE):
    return lambda: ga.accumulator.add(ga.accumulator.init(params), grads, weight)


def spoilt(**leaves):
    """The gradients with some leaves replaced or removed."""
    dense = {**GRADS["dense"], **leaves}
    return {"dense": {name: leaf for name, leaf in dense.items() if leaf is not None}}


def merged(one, other):
    both = ga.accumulator.init({"a": one}), ga.accumulator.init({"a": other})
    return lambda: ga.accumulator.merge(*both)


def init(dtype=None, params=DENSE):
    return lambda: ga.accumulator.init(params, dtype)


def continued(acc, params):
    acc = acc if acc is W else ga.accumulator.init(acc)
    return lambda: ga.accumulate(untraced, 2)(acc, params, X)


NO_STEPS = 2**32, np.int64(2**32), np.array(2**40), np.int8(-1), np.array(-3)
SMALL = ga.data.epoch_indices, jax.random.key(0), 0, 5, 10, 1

FOLDS = [
    (added([DENSE]), V, BIAS),
    (added(spoilt(kernel=jnp.ones((2, 3), int))), T, f"{KERNEL} | int32"),
    (added(spoilt(bias=jnp.ones(3, "complex64"))), T, f"{BIAS} | complex64"),
    (added([ONE], None, (ONE,)), V, "containers differ"),
    (added(weight=jnp.ones(2)), V, "scalar | (2,)"),
    (added(weight=-1), V, "not negative | -1"),
    (added(weight=float("nan")), V, "finite | nan"),
    (added(weight=jnp.float32(-2.0)), V, "not negative | -2"),
    (added(weight=1j), T, "complex"),
    (added(weight=jnp.array([True])), V, "scalar, but it has shape (1,)"),
    (init(jnp.int32), T, "floating dtype"),
    (init(jnp.complex64), T, "floating dtype"),
    (init(params={"w": W, "f": jax.nn.relu}), T, "leaf ['f'] of params must be an arr"),
    (continued(W, W), T, "must be the accumulator to continue"),
    (continued(DENSE, OTHER), V, f"{KERNEL} of the parameters"),
    (continued(DENSE, {"dense": {"bias": ONE}}), V, f"{KERNEL} is missing"),
    (merged(jnp.ones(2), jnp.ones(3)), V, "['a'] | (2,) | (3,)"),
    *(
        (functools.partial(draw, jax.random.key(0), *args), error, said)
        for draw in (ga.data.window_indices, ga.data.epoch_indices)
        for args, error, said in (
            ((0, 100, 10, 3), V, "num_microbatches=3 must divide batch_size"),
            ((0, 100, 0, 1), V, "batch_size must be at least 1"),
            ((0, 0, 10, 1), V, "num_examples must be at least 1"),
            ((0, 2**31, 10, 1), V, "fit in an int32"),
            ((0, 100, 10, -1), V, "num_microbatches must be at least 1"),
            ((0, 100, 10.0, 1), T, "batch_size must be an int, but it is 10.0"),
            ((0, True, 10, 1), T, "num_examples must be an int"),
            ((-1, 100, 10, 1), V, "step must not be negative"),
            ((0.5, 100, 10, 1), T, "step must be an integer scalar"),
            ((np.arange(2), 100, 10, 1), T, "has shape (2,)"),
            *(((step, 100, 10, 1), V, "must | from 0") for step in NO_STEPS),
        )
    ),
    (functools.partial(*SMALL), V, "batch_size=10 and num_examples=5"),
]

PARTS = ga.blocks.partition(DENSE, 1)
DRAWS = ga.data.window_indices, ga.data.epoch_indices
NO_ARRAY = "must be an array or a number | str"
VECTOR, SPEC = ga.blocks.flatten(PARTS, DENSE, "dense")

TYPES = [
    (lambda: ga.blocks.report("x"), T, f"params {NO_ARRAY} | of arrays alone"),
    (lambda: ga.blocks.partition({"a": "x"}, 1), T, f"leaf ['a'] of params {NO_ARRAY}"),
    *(
        (call, T, f"{name} must be of type {kind}, but it is | {todo}")
        for name, kind, todo, calls in (
            (
                "partition",
                "Partition",
                "Make one with blocks.partition(",
                (
                    lambda: ga.blocks.norms(DENSE, PARTS),
                    lambda: ga.blocks.select(DENSE, PARTS, "dense"),
                    lambda: ga.blocks.replace(DENSE, PARTS, "dense", GRADS["dense"]),
                    lambda: ga.blocks.flatten("x", DENSE, "dense"),
                    lambda: ga.blocks.unflatten(DENSE, VECTOR, SPEC),
                    lambda: ga.blocks.add(None, None, "dense", GRADS["dense"]),
                ),
            ),
            (
                "spec",
                "Spec",
                "Pass the spec that blocks.flatten",
                (lambda: ga.blocks.unflatten(PARTS, SPEC, VECTOR),),
            ),
            (
                "acc",
                "Accumulator",
                "Start with accumulator.init(",
                (
                    lambda: ga.accumulator.add(DENSE, GRADS),
                    lambda: ga.accumulator.mean(GRADS),
                ),
            ),
            (
                "b",
                "Accumulator",
                "Start with",
                (lambda: ga.accumulator.merge(ga.accumulator.init(DENSE), GRADS),),
            ),
        )
        for call in calls
    ),
    (
        lambda: ga.blocks.unflatten(PARTS, "x", SPEC),
        T,
        f"vector {NO_ARRAY} | Pass a vector like",
    ),
    *(
        (
            functools.partial(draw, key, 0, 10, 4, 2),
            T,
            f"key must be one PRNG key, but it is {came}. | Pass jax.random.key(0)",
        )
        for draw in DRAWS
        for key, came in ((None, "None"), (3, "3"), (W, "np.float32(2.0)"))
    ),
    (
        functools.partial(DRAWS[0], KEYS["a"], "0", 10, 4, 2),
        T,
        "step must be an integer | '0'",
    ),
]
OTHERS |= {"across calls": ACROSS, "folds": FOLDS, "types": TYPES}


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=f"{at} {row[2]}", marks=[pytest.mark.cpu] if at == "cpu" else []
        )
        for at in OTHERS
        for row in OTHERS[at]
    ],
)
def test_other_functions_say_it_too(row):
    says(*row)


def test_what_fits_is_not_refused():
    """The twin."""
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        test_what_does_not_fit_is_refused(mean_of, of(W, X, fun=loss)(V, ""))
    for make in (ga.value_and_grad, mean_of):
        assert float(jax.jit(make(loss, np.int64(4)))(W, X)[0]) == 2


@pytest.mark.parametrize("make", [ga.value_and_grad, mean_of])
def test_what_is_not_like_a_batch_needs_no_role(make):
    teacher = {"w": np.ones((8, 2), np.float32), "b": np.ones(2, np.float32)}

    def fun(w, x, *rest, **named):
        return loss(w, x)

    step = make(fun, 2)
    step(W, X, teacher, X[:7], 8.0, "eight", None, names=["a"] * 8, t=(X, 1.0))
    # Nothing is split, so nothing can go astray.
    make(fun, 1)(W, X, X, y=X)


def test_a_carry_that_is_changed_where_it_is_counts_as_it_came():
    def grows(w, x, c):
        c["a"] = c["a"] + 1
        if len(x) < 4:
            c["b"] = c["a"]
        return loss(w, x), c

    (_, carry), _ = mean_of(grows, 1, carry_argnums=2)(W, X, {"a": W})
    assert jnp.array_equal(carry["a"], W + 1)
    with pytest.raises(ValueError, match=r"leaf \[0\]\['b'\] is not in its arguments"):
        mean_of(grows, 4, carry_argnums=2)(W, X, {"a": W})


def module(kind):
    """A module of two leaves, the second of which is of a kind."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones([]))
            self.other = getattr(nnx, kind)(jnp.ones([]))

    return Model()


def test_state_of_a_flax_module_is_not_differentiated():
    def fun(model, x):
        return jnp.mean(x * model.w)

    with pytest.raises(TypeError, match=r"other.* BatchStat.*ga_optax\.flax"):
        ga.value_and_grad(untraced, 2)(module("BatchStat"), X)
    with pytest.raises(TypeError, match=r"leaf \['a'\].*BatchStat"):
        ga.value_and_grad(untraced, 2)({"a": module("BatchStat")}, X)
    grads = ga.value_and_grad(fun, 2)(module("Param"), X)[1]
    assert jax.tree.leaves(grads)[-1] == 1


def test_an_error_of_fun_says_what_it_was_given():
    def fun(w, x):  # written for the undivided batch
        return jnp.mean(x * w * jnp.ones(8))

    with pytest.raises(TypeError) as error:
        mean_of(fun, 2)(W, X)
    note = error.value.__notes__[0]  # JAX adds another one
    assert "one of 2 micro-batches" in note
    assert "has shape (4,), split along axis 0 of (8,)." in note
    assert ga.value_and_grad(fun, 2)(W, X) == jax.value_and_grad(fun)(W, X)


@pytest.mark.parametrize("make", [ga.value_and_grad, mean_of, ga.microbatch])
def test_what_jax_says_of_fun_names_fun_and_no_line_of_ours(make):
    def fun(w, x):
        return float(loss(w, x))

    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        make(fun, 2)(W, X)
    assert f"fun at {__file__}:{fun.__code__.co_firstlineno}" in str(error.value)
    assert "ga_optax" not in str(error.value).replace(__file__, "")


def test_a_loss_that_is_not_finite_is_that_of_the_whole_batch():
    def fun(w, x):
        return jnp.sum(x * w) / 0.0

    step = ga.value_and_grad(fun, 2)
    assert step(-W, X) == jax.value_and_grad(fun)(-W, X) == (-np.inf, np.inf)


# -- Across calls: what is lost, and what is advised -----------------------------------


@pytest.mark.usefixtures("optax_promotion")
def test_what_those_messages_advise_works():
    called("apply", value=3.0)()  # optimizers take other arguments
    called("apply", CHAIN, weight=2.0)()
    chain = optax.chain(INNER, optax.identity())
    called("apply", chain, value=3.0, weight=2)()  # all members of a chain get them
    for k in (1, 2):
        called("update", params=None, of_tx={"k": k})()  # this one needs no parameters
    new = started(4)()._replace(inner_opt_state=started(1)().inner_opt_state)
    called("update", state=new, of_tx={"k": 4})()
    _, state = called("apply", of_tx={SKIP: lambda *_: (True, ())})()
    assert int(ga.stats(state).skipped_micro_steps) == 1
    called("apply", NORMED, state=STATE._replace(grad_norm=NORM.grad_norm))()


SPOILT = [
    (spoilt(bias=None), V, f"{BIAS} is missing"),
    (spoilt(extra=ONE), V, "['dense']['extra'] | not in"),
    (spoilt(bias=jnp.ones(4)), V, f"{BIAS} | (3,) | (4,)"),
    (spoilt(bias=jnp.ones(3, int)), T, f"{BIAS} | int32"),
    (spoilt(bias=1), V, f"{BIAS} | ()"),
]


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(("grads", "error", "said"), SPOILT)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradients_that_do_not_fit_raise_trace_nothing_and_lose_nothing(
    grads, error, said, k, jit
):
    traced = []

    def skip(*args):
        traced.append(args)
        return jnp.zeros([], bool), ()

    tx = ga.MultiSteps(optax.adam(0.1), k, should_skip_update_fn=skip)
    step = functools.partial(ga.apply_gradients, tx)
    step = jax.jit(step, donate_argnums=(1, 2)) if jit else step
    params, state = jax.tree.map(jnp.copy, DENSE), tx.init(DENSE)
    copies = jax.tree.map(np.asarray, (params, state))
    traced.clear()
    says(lambda: step(grads, state, params), error, said)
    assert not traced  # before anything of the user's
    # Not donated, not changed.
    jax.tree.map(np.testing.assert_array_equal, (params, state), copies)
    step(GRADS, state, params)
    assert traced


@pytest.mark.usefixtures("optax_promotion")
def test_the_gradient_of_an_integer_that_jax_makes_raises():
    params = {"w": ONE, "n": jnp.array([1, 2])}
    grads = jax.grad(lambda p: jnp.sum(p["w"]), allow_int=True)(params)
    state = TX.init(params)
    says(called("apply", TX, grads=grads, params=params, state=state), T, "['n'] | 0")
    zeros = {**grads, "n": jnp.zeros_like(params["n"])}  # what the message advises
    ga.apply_gradients(TX, zeros, state, params)


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(
    ("field", "name", "decides"),
    [
        ("skip_state", SKIP, optax.skip_not_finite),
        ("drop_state", DROP, ga.drop_window_if_not_finite),
    ],
)
@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_a_state_made_without_what_decides_names_the_argument(
    field, name, decides, jit
):
    tx = ga.MultiSteps(SGD, 2, **{name: decides})
    apply = jit(functools.partial(ga.apply_gradients, tx))
    for old in (
        STATE,
        ga.from_optax(optax.MultiSteps(SGD, 2).init(DENSE)),
        tx.init(DENSE)._replace(**{field: {"other": ONE}}),
    ):
        call = functools.partial(apply, GRADS, old, DENSE)
        says(call, V, f"{field} | {name} | _replace({field}=")
        # What the message advises works, in the middle of a window too.
        held = old._replace(mini_step=jnp.int32(1))
        new = held._replace(**{field: getattr(tx.init(DENSE), field)})
        assert int(apply(GRADS, new, DENSE)[1].gradient_step) == 1
