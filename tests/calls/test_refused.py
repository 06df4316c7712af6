"""What does not fit is refused, with what was required, what came and what to do.

A table has a row for each error: `code -> V parts | of the message`, in their order, of
`ValueError`, and T of a `TypeError`. A row goes on in lines that are indented.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import mean_of, mesh_of, put, refusals, says
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
CLASSES = {"x": np.ones((16, 4)), "y": np.ones((10, 16))}
SEQUENCE = {"tokens": np.ones((1, 11), np.float32)}
BASE = {"w": np.ones((16, 8)), "head": np.ones((64, 2)), "layers": np.ones((3, 8))}
ROWS = np.ones(2048, np.float32)
RAW_KEY = {"dropout_key": jax.random.PRNGKey(0)}
WORDS = ["a"] * 8


def returns(value, fun=loss):
    """A function that returns something beside its loss."""
    return lambda w, x, *rest: (fun(w, x), value)


def softmax(w, x, *rest):
    return jnp.mean(jax.nn.log_softmax(jnp.outer(x, x) * w)[0])


def shifted(w, batch):
    return jnp.mean(jnp.sin(jnp.cumsum(w * batch["tokens"][:, :-1], 1)))


def of(*args, fun=untraced, k=2, **options):
    """What a function is made with, and what it is called with."""
    named = ("batch", "rngs", "y", "z") & options.keys()
    return fun, k, options, args, {name: options.pop(name) for name in named}


# Of `value_and_grad` and `accumulate`; the code is the arguments of `of`.
BOTH = """
k=0 -> V must be at least 1 | it is 0 | 1 is the undivided batch
k=True -> T must be an int | True of type bool | Pass an int that is known
W, {} -> V must name arguments that hold arrays with rows | argument 1 is {} | Pass
W, X, batch_axes=None -> V hold arrays with rows | batch_axes is None | their axis
jax.eval_shape(lambda: W), X -> T argument 0 must | the only leaf is a | Pass arrays
W, {"x": X, "y": jax.eval_shape(lambda: X)} -> T argument 1 | leaf ['y'] | Pass arrays
W, X[:0] -> V at least one example | shape (0,) | Skip the call
argnums=1 -> V Each argument must have one role | argnums and batch_argnums name
  | argument 1. Name it once | ga_optax.microbatch(
batch_argnums=() -> V batch_argnums must name | () | Leave it out
batch_argnums=1.5 -> T an int or a sequence of ints | it is 1.5 | Number the positional
batch_axes="0" -> T batch_axes must be an int, None, or a | it holds '0' | the axis to
batch_argnames=3 -> T batch_argnames must be a | it is 3 | Name the keyword arguments
fun=3 -> T fun must be a function | it is 3 | Pass the loss function
optimize=1 -> T optimize must be of type bool | it is 1 | Pass True or False
has_aux="yes" -> T has_aux must be of type bool | it is 'yes' | Pass True or False
W, batch=X -> V batch_argnums must | names 1, and the call has 1 | for keywords there is
W, X, z=1, batch_argnames="y" -> V batch_argnames must | names 'y', and the | Pass that
{"n": np.int32(1), "w": W}, X
  -> T leaf ['n'] of argument 0 must | dtype int32 | or allow_int=True, which
argnums=(0, 0) -> V must have one role | argnums and argnums name argument 0. Name it
{"f": jax.nn.relu}, X -> T must be an array or a number | custom_jvp | eqx.partition
W, {"a": X, "id": np.array(WORDS)} -> T leaf ['id'] | dtype <U1 | None in batch_axes
W, X, batch_axes=1 -> V leaf of the batch must have a batch | (8,) | None in batch_axes
W, {"b": X}, batch_axes={"a": 0} -> V must be a prefix of the | 'a' | Pass an int, None
{"x": np.ones((8, 3), np.float32), "y": X}, {"w": np.ones(3), "b": W}, k=4
  -> V But argument 1 has leaves of length 3, argument 0 has 8 in all: is
  | that the batch? Then swap the arguments, or name that one in batch_argnums.
W, {"x": X[:3], "y": X[:3]}, k=4 -> V =4 must | leaf ['x'] has shape (3,)
  | . One example, or one sequence, has no rows: give each leaf a batch axis
W, X, fun=lambda w, x: x -> V be a scalar | shape | Return its mean
W, X, fun=lambda w, x: jnp.int32(1) -> T The loss must be real | dtype int32 | Cast it
W, X, fun=lambda w, x: jax.lax.complex(loss(w, x), w)
  -> T The loss must be real | dtype complex64 | real part, or pass holomorphic
W, X, fun=returns(X) -> T must return the loss | a number there. Pass has_aux=True
W, X, fun=lambda w, x: None -> T must return the loss | its loss is None. | Return
W, X, fun=loss, has_aux=True
  -> T return (loss, aux) with has_aux=True | float32[] | leave out
W, X, fun=lambda w, x: (loss(w, x), 1, 2), has_aux=True
  -> T with has_aux=True | but it returned ( | 1, 2). Return such
"""

# Of `accumulate` alone: there what is split decides what comes out.
EACH = """
W, BASE, {"x": ROWS, "y": ROWS}, k=32
  -> V But argument 1 has leaves of length 3, 16, 64, argument 2 has 2,048 in all:
  | is that the batch? Pass batch_argnums=2.
W, BASE, batch={"x": ROWS}, k=5
  -> V argument 'batch' has 2,048 in all: is that the batch? Pass batch_argnames='batch'
W, IMAGES, k=4
  -> V num_microbatches=4 must | leaf ['image'] has shape | Use 1, 2, 5 or 10. Or drop
  | 2 of the rows, or add 2, which a mask leaves out
W, {"x": X, "id": WORDS} -> T leaf ['id'][0] must be an | str | None in batch_axes
W, [1.0] * 8 -> V must have a batch axis | [0] is a scalar | None in batch_axes
W, CLASSES -> V All leaves of the batch must have one length
  | say in batch_axes where they are
W, [(np.ones(4), np.ones(3))] * 16, k=4 -> V But the batch is a list of 16 | Stack them
W, LENGTHS -> V All leaves of the batch | leaf ['b'] has shape (4,) | say in batch_axes
W, {"x": X} | RAW_KEY -> V ['dropout_key'] has shape | name them in rng_argnums
W, {"a": X, "b": 3.0} -> V must have a batch axis | ['b'] is a sca | Give it None in
W, X, rng_argnums=-1 -> V one role | batch_argnums and rng_argnums name argument 1
carry_argnums=(2, 1) -> V one role | and carry_argnums name argument 1. Name it once
batch_argnames="x", rng_argnames="x"
  -> V one role | batch_argnames and rng_argnames name argument 'x'. Name it once
rng_argnames=("a", 1) -> T must be a str or a sequence of strs | ('a', 1) | Name the
W, X, X, rng_argnums=2 -> V must name PRNG keys, or trees of them | shape (8,) | one key
W, X, {"k": jax.random.split(KEYS["a"], 8)}, rng_argnums=2 -> V must name PRNG keys
  | leaf ['k'] of argument 2 has shape (8,) and dtype key | Pass one key
W, X, rngs=KEYS -> V A PRNG key must differ | argument 'rngs' | rng_argnames='rngs'.
W, X, KEYS -> V A PRNG key must differ | ['a'] of argument 2  | rng_argnums=2.
W, {"x": X} | KEYS -> V leaf ['a'] | name them in rng_argnums
W, X, {"f": "a"}, rng_argnums=2 -> T leaf ['f'] of | of type str | Pass PRNG keys alone
W, X, X -> V An argument with the batch's 8 | argument 2, of | batch_argnums=(1, 2) to
W, X, LENGTHS | {"b": X} -> V 8 rows must have a role | argument 2 | None for it
W, X, X, X, y=X, batch_argnums=(1, 2), batch_argnames="y"
  -> V 8 rows must have a role | argument 3 | batch_argnums=(1, 2, 3)
weight_fn=3 -> T weight_fn must be a function | is 3 | Pass None
W, X, weight_fn=lambda x: x -> V be a | shape (4,) | Pass the number of examples
W, X, weight_fn=lambda x: -1.0 -> V not negative | -1.0 | Pass the number of examples
W, X, weight_fn=lambda a, b: 1.0 -> T must take the batch | (a, b) | Give it one
W, X, fun=returns({}), has_aux=True, weight_fn=lambda x: 1.0
  -> T weight_fn must take the batch | takes (x) | Give it one parameter
aux="median" -> V aux must be one of 'mean', 'sum', 'last', 'stack', | holds 'median'
W, X, fun=returns(1j), has_aux=True, aux="max"
  -> T aux="max" must have real numbers | has dtype complex64 | Use "last" or
W, X, fun=returns({"a": 1}), has_aux=True, aux={"b": "mean"}
  -> V aux must be a tree | fun returned PyTreeDef({'a': *}) | Name the same keys
W, X, fun=returns(KEYS), has_aux=True
  -> T aux="mean" must have numbers | ['a'] of the aux has dtype key | Use "last" or
W, X, fun=returns({"kept": "text"}), has_aux=True
  -> T leaf ['kept'] of the aux | of type str | Leave it out
W, X, X, fun=lambda w, x, c: loss(w, x), carry_argnums=2
  -> T return (loss, carry) with carry_argnums | it returned | leave out the
W, X, W, fun=lambda w, x, c: (loss(w, x), c), carry_argnums=2, has_aux=True
  -> T fun must return (loss, (carry, aux)) with carry_argnums and has_aux=True
  | it returned | leave out the option
W, X, ZEROS, fun=returns({"a": jnp.zeros(3)}), carry_argnums=2
  -> V leaf [0]['a'] of the carry must have shape (2,) | shape (3,)
  | Return each carried argument with the tree
W, X, ZEROS, fun=returns({"b": jnp.zeros(2)}), carry_argnums=2
  -> V the carry must have the tree | leaf [0]['a'] is missing | Return each carried
W, X, {"f": jnp.tanh}, carry_argnums=2
  -> T leaf ['f'] of argument 2 must be an array or | PjitFunction | Carry arrays alone
num_real_microbatches=5 -> V num_real_microbatches must be | but it is 5 | Pass how many
num_real_microbatches=1.5 -> T must be an integer scalar | dtype float | Pass how many
"""

# Of `value_and_grad` alone.
LAW = """
W, {"w": np.ones((3, 9, 9)), "b": W[None]}, {"x": ROWS}, k=4
  -> V =4 must be at most the number of rows, but leaf ['w'] has shape (3, 9, 9). But
  | argument 1 has leaves of length 1, 3, argument 2 has 2,048 in all: is that the
  | batch? Pass batch_argnums=2. If not, use 3 or fewer; or,
W, CLASSES, k=4, fun=lambda w, b: jnp.std(w * b["y"])
  -> V =4 must divide | leaf ['y'] has shape (10, 16) | Use 1
W, X, holomorphic=True -> T parameters must be | argument 0 has dtype float32 | leave
np.complex64(W), X, fun=lambda w, x: loss(w.real, x), holomorphic=True
  -> T The loss must be complex | dtype float32 | leave holomorphic out
{"f": jnp.tanh}, X, allow_int=True -> T must be an array or a number | PjitFunction
allow_int=1 -> T allow_int must be of type bool | it is 1 | Pass True or False
W, [1.0] * 8 -> V hold arrays with rows | argument 1 is [1.0, | Pass the batch
W, {"table": np.ones(11), "x": X}, fun=lambda w, b: jnp.std(w * b["table"])
  -> V num_microbatches=2 must divide | drop 1 of the rows, or add 1, which a mask
accumulator_dtype=jnp.int32 -> T must be a | int32 | Use float32
W, X, accumulator_dtype={"w": None}
  -> V accumulator_dtype must be one for all leaves, or a prefix | {'w': *}
  | the parameters are PyTreeDef(*). Take the containers
W, X, accumulator_dtype={"w": 3} -> T must be a floating dtype | it is 3 | Use float32
k=None -> T One of num_microbatches and microbatch_size must be given | neither was
  | Pass how many micro-batches there are, or how many rows
microbatch_size=8 -> T One of num_microbatches and microbatch_size must be given
  | each of them was | Pass how many
k=None, microbatch_size=0 -> V microbatch_size must be at least 1 | it is 0
  | how many rows
k=None, microbatch_size=2.0 -> T microbatch_size must be an | 2.0 | Pass how many rows
W, X, k=9 -> V num_microbatches=9 must be at most the number of rows, but the only leaf
  | of argument 1 has shape (8,). Use 8 or fewer.
W, SEQUENCE, k=4 -> V (1, 11). Use 1 or fewer. One example, or one sequence, has no
W, SEQUENCE, k=4, batch_axes=1, fun=shifted -> V =4 must divide | (1, 11) | rows meet at
  | Use 1 or 11.
W, X[:7], fun=softmax, k=None, microbatch_size=4
  -> V microbatch_size=4 must divide | Use 1 or 7. | drop 3 of the rows
W, X[:7], fun=softmax, k=5 -> V num_microbatches=5 must divide | rows meet at | 1 or 7.
W, fun=lambda w: jnp.mean(X * w) -> V fun must take its batch: what it closes
residual_bytes=-1 -> V residual_bytes must be a number of | it is -1 | Leave it out
"""


@pytest.mark.parametrize(
    ("make", "code", "error", "said"),
    [(ga.value_and_grad, *row) for row in refusals(BOTH + LAW)]
    + [(mean_of, *row) for row in refusals(BOTH + EACH)],
)
def test_what_does_not_fit_is_refused(make, code, error, said):
    def run():
        fun, k, options, args, kwargs = eval(f"of({code})")
        step = make(fun, k, **options)
        assert args  # an option alone is refused before there is a call
        step(*args, **kwargs)

    says(run, error, said)


# -- Other functions -------------------------------------------------------------------

PARAMS = {"w": jnp.ones((3, 8, 16)), "b": jnp.ones(16)}
LOGICAL = ga.DataAxis("data", logical_devices=4)


def verify(fun=untraced, params=W, batch=X, k=2, **options):
    ga.verify(fun, params, batch, k, **options)


def scaled(w, scale=2.0, x=None):
    return x * w * scale


def equivalent(params, batch):
    testing.assert_accumulation_equivalent(untraced, params, batch, 2)


def plan(make=lambda k: jax.jit(untraced), **options):
    ga.plan(make, **({"batch_size": 64, "memory_limit": 1} | options))


def sharded(rows=64, k=4, n=8, name="data", frozen=False, **options):
    """A call on a mesh of n devices; frozen parameters may stand before the batch."""
    data_axis = ga.DataAxis(name, mesh=mesh_of(n), **options)
    make = mean_of if "logical_devices" in options else ga.value_and_grad
    args = PARAMS, jnp.ones((rows, 16)), *[jnp.ones((64, 16))] * frozen
    jax.jit(make(untraced, k, data_axis=data_axis))(*args)


def carried(x):
    axis = ga.DataAxis("data", mesh=mesh_of())
    mean_of(untraced, 1, carry_argnums=2, data_axis=axis)(W, X, x)


def explicit():
    """The types of the arrays name the devices."""
    x = put(jnp.ones((64, 3)), mesh_of(8, kind=AxisType.Explicit), P("data"))
    jax.jit(ga.value_and_grad(untraced, 16))(jnp.ones(3), x)


def mapped(make, sync="last", **where):
    """A loss that maps over the data axis itself, and sums over it."""
    sums = lambda x: jax.lax.psum(jnp.sum(x), "data")  # noqa: E731
    where |= {"in_specs": P("data"), "out_specs": P()}
    fun = lambda w, x: w * jax.shard_map(sums, **where)(x)  # noqa: E731
    with jax.set_mesh(mesh_of(2)):
        step = jax.jit(make(fun, 2, data_axis=ga.DataAxis("data", sync=sync)))
        return step(W, jax.device_put(X, P("data")))[0]


VERIFY = """
verify(params={"x": X, "y": X}, batch={"w": np.ones(3), "b": np.ones(5)})
  -> V argument 1 has leaves of length 3, 5, argument 0 has 8 in all: is that the
  | batch? Then swap the arguments | verify asks
verify(k=3) -> V must divide the batch axis | one size | use 1, 2, 4 or 8. | any number
verify(params={}) -> V params must | this dict has no array
verify(params={"n": jnp.arange(3)}) -> T leaf ['n'] of argument 0
verify(batch=()) -> V must name arguments that hold arrays with rows | is ()
verify(batch=jax.eval_shape(lambda: X)) -> T argument 1 must hold numbers | is a type
verify(batch_axes={"a": 0}) -> V batch_axes must be a prefix of the batch
verify(weight_fn=3) -> T weight_fn must be a function
verify(rng=jnp.ones(3)) -> V PRNG key
verify(lambda w, x: x * w) -> V must be a scalar
verify(returns(1)) -> T has_aux=True
verify(loss, has_aux=True) -> T (loss, aux) with has_aux=True
verify(loss, weight_fn=lambda x: x) -> V weight must be
equivalent({}, X) -> E at least one array
equivalent(np.arange(2), X) -> T floating or complex
"""

PLAN = """
plan(memory_limit="16G") -> V but it is '16G'. | Pass bytes
plan(memory_limit=0) -> V at least one byte, | but it is 0
plan(memory_limit=float("nan")) -> V it is nan
plan(batch_size=0) -> V batch_size must be at least 1, | it is 0
plan(candidates=[]) -> V candidates must not be empty
plan(candidates=[1, 3]) -> V but 3 does not. | Choose from 1, 2, 4
plan(candidates=[0]) -> V candidate must be at least 1 | it is 0
plan(candidates=4) -> T a sequence of ints, but it is 4. | Choose from 1, 2
plan(3) -> T make_step must be a function | it is 3
plan(loss) -> V loss() missing 1 required | call make_step(1)
plan(lambda k: len) -> V no attribute 'lower'. make_step must return a jitted
"""
OF_CPUS = """
plan(memory_limit=None) -> V memory_limit must be given | "16GiB"
"""  # a GPU reports its memory

WORDS_OF_OTHERS = """
ga.verify(jnp.mean, 1.0, X, 2, rngs=2) -> T rngs was passed | Is it rng?
ga.value_and_grad(jnp.mean, n_microbatches=2)
  -> T value_and_grad must be among | Is it num_microbatches? | docs/migrating.md
ga.value_and_grad(jnp.mean, 2, rows=3) -> T rows was passed | Leave it out.
ga.microbatch(lambda w, x: "text", 2)(W, X) -> T what fun returns must be an array | str
ga.microbatch(scaled, 4, batch_argnums=-3)(W, X) -> V names -3, and the call has 2
ga.microbatch(scaled, 4, batch_argnums=2)(W, 3.0) -> V names 2, and the call has 2
ga.config.update("optimise", False) -> A The option of ga_optax.config must be
ga.config.update("optimize", 0) -> T must be a bool, but it got 0
"""
INTEGER = {"w": W, "n": np.int32(1)}
for _fun in ("value_and_grad", "batch_dependencies", "accumulate"):
    _acc = "ga.accumulator.init(INTEGER), " * (_fun == "accumulate")
    WORDS_OF_OTHERS += f"ga.{_fun}(untraced, 2)({_acc}INTEGER, X) -> T leaf ['n'] of "
    WORDS_OF_OTHERS += "argument 0 must be floating or complex | int32 | allow_int=Tr\n"
for _fun in ("value_and_grad", "accumulate", "microbatch", "batch_dependencies"):
    for _args in ("X", "2, X"):
        WORDS_OF_OTHERS += f"ga.{_fun}(jnp.mean, {_args}) -> T {_fun} must get"
        WORDS_OF_OTHERS += f" | came. Call it twice: {_fun}(fun\n"

AUDIT = """
ga.audit(jax.jit(loss)) -> T needs a compiled | PjitFunction | lower(*args).compile(
ga.audit(jax.jit(loss).lower(W, X)) -> T needs a compiled | Lowered | .compile(
ga.audit("module @jit_f { func.func }") -> V optimised HLO module with an ENTRY
ga.audit("HloModule", "mesh") -> T mesh must be a | it is | the mesh of the program
"""

DEVICES = """
ga.DataAxis(None) -> T must name a mesh axis | data_axis=None
ga.DataAxis(("data", "data")) -> T different names
ga.DataAxis("data", mesh=3) -> T must be a jax.sharding.Mesh | 3 | jax.make_mesh
ga.DataAxis("data", sync="never") -> V sync must be "last" or "each"
ga.DataAxis("data", param_specs=P("data"), grad_specs=P("data"))
  -> V grad_specs must be None with param_specs | one of them out
ga.DataAxis("data", logical_devices=6) -> V power of two | it is 6. | Use 4 or 8
ga.DataAxis("data", logical_devices=0) -> V at least 1 | it is 0
ga.DataAxis("data", logical_devices=8, sync="each") -> V sync is "each"
ga.value_and_grad(untraced, 2, data_axis=LOGICAL)
  -> V no logical_devices | logical_devices=4 | Use ga_optax.accumulate
ga.value_and_grad(untraced, 2, data_axis="data")(W, X)
  -> V there is no mesh. | Call inside jax.set_mesh
sharded(name="rows") -> V must be an axis of the mesh | 'data' | splits
sharded(60) -> V 8 devices | must divide | (60, 16) | 56 or 64
sharded(k=3) -> V num_microbatches=3 must divide | 8 examples | 1, 2, 4 or 8
sharded(6, frozen=True) -> V (6, 16). But argument 1 has | Pass batch_argnums=2.
explicit() -> V of each of the 8 devices, 8 examples | 2, 4
sharded(48, 1, 3, logical_devices=8)
  -> V must divide logical_devices=8 | are 3. | Use 1, 2, 4 or 8
sharded(12, 1, 2, logical_devices=8) -> V 8 logical devices | (12, 16) | a batch of 8
sharded(32, 3, 2, logical_devices=8) -> V each of the 8 logical devices, | Use 1, 2 or 4
mapped(ga.value_and_grad)
  -> V jax.shard_map in fun must not be over 'data': leave it out | Or pass sync="each"
mapped(mean_of) -> V jax.shard_map in fun must not be over 'data' | Or pass sync="each"
carried(jax.random.key(0)) -> T With a data_axis | a PRNG key | it in rng_argnums
ga.merge_across(jnp.ones(3), "data") -> T acc must be of type | pass the accumulator
ga.merge_across("data", ga.accumulator.init(DENSE))
  -> T data_axis must be the name | an object of type Accumulator. | Pass
"""
SPECS = """
sharded(NAME={"w": "data"}) -> T NAME must be a tree of PartitionSpec
sharded(NAME=P(None, None, None, "data")) -> V NAME must fit the param
sharded(NAME=P("data")) -> V leaf ['w'] | (3, 8, 16)
sharded(NAME={"w": P(), "b": P("data", *[None] * 9)})
  -> V NAME must fit the param | 10 entries, and leaf ['b'] | at most one entry
sharded(NAME={"w": P()}) -> V NAME must be | a prefix of | 'w': *} | 'b': *, 'w'
sharded(NAME=P("dta")) -> V NAME must name axes | the only leaf names 'dta', | Name one
sharded(NAME=P("data", None, "data")) -> V axes of the mesh, each | 'data' twice, and
"""
DEVICES += "".join(SPECS.replace("NAME", x) for x in ("param_specs", "grad_specs"))

# -- Across calls ----------------------------------------------------------------------

DENSE = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
GRADS = jax.tree.map(jnp.ones_like, DENSE)
OTHER = {"dense": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}}
WHOLE = {**DENSE, "name": "a model"}
SGD, PLATEAU = optax.sgd(0.1), optax.contrib.reduce_on_plateau()
PLAIN = optax.scale(-1.0)
ONE = jnp.ones(1)


def made(k=2, opt=SGD, **options):
    return ga.MultiSteps(opt, k, **options)


def started(*args, **options):
    return made(*args, **options).init(DENSE)


def called(way, tx=None, *, grads=GRADS, params=DENSE, state=None, **options):
    """A call of `update`, of `apply_gradients` or of `flush`; `of_tx` make one."""
    it = tx or made(**options.pop("of_tx", {}))
    held = it.init(DENSE) if state is None else state
    if way == "update":
        return it.update(grads, held, params, **options)
    if way == "flush":
        return ga.flush(it, held, params, **options)
    return ga.apply_gradients(it, grads, held, params, **options)


update, apply, flush = (
    functools.partial(called, way) for way in ("update", "apply", "flush")
)


def traced(k):
    """Inside of `jit`, with the state of another run, so that `init` has not seen k."""
    jax.eval_shape(lambda: update(state=STATE, of_tx={"k": k}))


def skips(answer):
    started(should_skip_update_fn=lambda *_: answer)


def chained(inner):
    started(opt=optax.chain(SGD, inner))


TX, CHAIN = made(), optax.chain(optax.clip(1.0), made())
NORMED, INNER = made(track_norm=True), made(opt=PLAIN)
STATE, NORM = (tx.init(DENSE) for tx in (TX, NORMED))
AVERAGES = {"of_tx": {"opt": PLATEAU, "mean_argnames": "value"}}
OF_OPTAX = optax.MultiSteps(SGD, 4)
OF_ONE = {"of_tx": {"k": 1}}
SKIP, DROP = "should_skip_update_fn", "should_drop_window_fn"
APPLY = optax.apply_every(2)
THEN = optax.chain(APPLY, SGD)
LABELS = {"dense": {"kernel": "a", "bias": "b"}}
# Everything that may hold an optimizer, and where that one accumulates.
WITHIN = """
APPLY -> the top
THEN -> [0]
optax.partition({"a": SGD, "b": APPLY}, LABELS) -> .inner_states['b'].inner_state
optax.conditionally_transform(APPLY, lambda step: step > 3) -> .inner_state
optax.lookahead(THEN, 5, 0.5) -> .fast_state[0]
optax.contrib.schedule_free(THEN, 0.1) -> .base_optimizer_state[0]
optax.contrib.split_real_and_imaginary(THEN) -> is that
"""
# The length of a window, and what it is made of.
MADE = """
made(np.int32(0)) -> V at least 1
made(2.0) -> T must be an int, but it is 2.0 of type float. | or a function
made(True) -> T True of type bool
made(jnp.ones(2)) -> T must be an int | or a function
traced(lambda step: step * 1j) -> T every_k_schedule must be an int, but it is complex
started(opt=TX) -> V at the top is that of a ga_optax.MultiSteps
started(opt=OF_OPTAX) -> V at the top is that of an optax.MultiS
chained(TX) -> V at [1] is that of a ga_optax.MultiSteps | k x (the inner k)
chained(OF_OPTAX.gradient_transformation()) -> V at [1] | an optax.MultiSteps
made(opt=optax.adam) -> T must be an optax
made(should_skip_update_fn=True) -> T should_skip_update_fn must be a function
made(should_drop_window_fn=True) -> T should_drop_window_fn must be a function
skips((jnp.ones(2, bool), ())) -> V boolean scalar | but one returned (Array([ True
skips(jnp.array(True)) -> V the pair
made(should_skip_update_fn=ga.drop_window_if_not_finite)
  -> V Pass should_drop_window_fn=ga_optax.drop_
made(accumulator_dtype=jnp.int32) -> T floating dtype
started(accumulator_dtype={"dense": {"bias": None}})
  -> V The dtype must be one for all leaves, or a prefix | Take the containers
made(track_norm="False") -> T track_norm must be of type bool | Pass True or False
made(opt=PLATEAU, mean_argnames="weight") -> V mean_argnames must name
"""
for _row in WITHIN.strip().splitlines():
    _opt, _, _at = _row.partition(" -> ")
    MADE += (
        f"started(opt={_opt}) -> V {_at} | optax.apply_every | without that accumul\n"
    )
for _word in ("k", "gradient_accumulation_steps", "num_microbatches", "tx"):
    MADE += f"ga.MultiSteps(SGD, **{{'{_word}': 4}})"
    MADE += f" -> T must be among opt, every_k_schedule, | track_norm, | {_word} was\n"
for _call in ("started", "traced"):
    MADE += f"""
{_call}(lambda step: 0) -> V every_k_schedule must be at least 1, but it is 0
{_call}(lambda step, k=jnp.int32(-3): k) -> V at least 1, but it is -3
{_call}(lambda step: -0.5) -> V every_k_schedule must be at least 1, but it is 0
{_call}(lambda step: np.nan) -> T every_k_schedule must be an int, but it is nan
{_call}(lambda step: jnp.ones(2)) -> T an int | Return the number of micro-steps
"""

ACROSS = """
apply(params=OTHER) -> V ['dense']['kernel'] | params
TX.init(WHOLE) -> T leaf ['name'] of params | Pass a tree of arrays alone
apply(grads=(1.0, GRADS)) -> V pair which value_and_grad returns: pass the second
update(params=WHOLE) -> T leaf ['name'] of params | Pass a tree of arrays alone
apply(params=None) -> T params must be the parameters
apply(value=ONE, **AVERAGES) -> V value must be a scalar | (1,)
apply(value=3.0, state=STATE, **AVERAGES) -> V must fit mean_argnames | while no window
apply(value="3", **AVERAGES) -> T value must be a real | every call
update(of_tx={"opt": PLATEAU}) -> T 'value'
# One that is misspelt does not go to the optimizer in silence.
update(wieght=3.0) -> T 'wieght' looks like 'weight'
apply(weights=3.0) -> T 'weights' looks like 'weight'
update(emit=True) -> T only ga_optax.apply_gradients has emit=. Call it instead
apply(INNER, loss=3.0) -> T plain GradientTransformation | 'loss'
apply(optax.GradientTransformation(*TX), weight=2) -> T 'weight'
apply(emit=1) -> T a Python bool, or a bool scalar
apply(emit=ONE > 0) -> T a Python bool, or a bool scalar
# States, and what only a MultiSteps can do.
apply(SGD, weight=2.0) -> V there is none
ga.stats({"mini_step": 1}) -> V there is none | restored without a target
update(state=started(1), of_tx={"k": 4}) -> V every_k_schedule=1 | _replace
apply(emit=False, **OF_ONE) -> V every_k_schedule=1
apply(emit=ONE[0] > 0, **OF_ONE) -> V must hold an accumulator
apply(CHAIN, emit=True) -> T emit needs tx | MultiSteps(optax.chain
flush(CHAIN) -> T flush needs tx
update(state=SGD.init(DENSE)) -> T must be of type MultiStepsState
ga.apply_gradients(TX, GRADS, DENSE, STATE) -> T swapped? | grads, state, params
TX.update(GRADS, DENSE, STATE) -> T swapped? | grads, state, params
ga.apply_gradients(GRADS, TX, STATE, DENSE) -> T must be an | The order is apply
ga.apply_gradients(STATE, GRADS, TX, DENSE)
  -> T an optax.GradientTransformation | MultiStepsState | order is apply_gradients(tx
ga.flush(STATE, TX, DENSE) -> T of type MultiStepsState
  | The order is apply_gradients(tx
ga.from_optax(SGD.init(DENSE)) -> V there is none
update(state=OF_OPTAX.init(DENSE)) -> T from_optax
ga.has_updated(OF_OPTAX.init(DENSE)) -> V from_optax
# The norm.
ga.grad_norm(STATE) -> V track_norm=True, but the field grad_norm is
ga.grad_norm((NORM, NORM)) -> V 2: [0] | , [1] | Pass one
apply(NORMED, state=STATE) -> V _replace(grad_norm=
"""
for _k in (1, 2):
    ACROSS += f"""
update(params=None, of_tx={{"k": {_k}, "opt": optax.adamw(0.1)}}) -> V params is None
update(params=None, of_tx={{"k": {_k}, "opt": optax.novograd(0.1)}}) -> V params is None
update(weight=-1.0, of_tx={{"k": {_k}}}) -> V not negative, but it is -1.0
update(weight=jnp.ones(3), of_tx={{"k": {_k}}}) -> V scalar, but it has shape (3,)
apply(weight=float("nan"), of_tx={{"k": {_k}}}) -> V finite | nan
apply(weight="3", of_tx={{"k": {_k}}}) -> T str
"""

# -- The accumulator, data and blocks --------------------------------------------------


def added(grads=GRADS, weight=None, params=DENSE):
    ga.accumulator.add(ga.accumulator.init(params), grads, weight)


def spoilt(**leaves):
    """The gradients with some leaves replaced or removed."""
    dense = {**GRADS["dense"], **leaves}
    return {"dense": {name: leaf for name, leaf in dense.items() if leaf is not None}}


def merged(one, other):
    both = ga.accumulator.init({"a": one}), ga.accumulator.init({"a": other})
    ga.accumulator.merge(*both)


def continued(acc, params):
    acc = acc if acc is W else ga.accumulator.init(acc)
    ga.accumulate(untraced, 2)(acc, params, X)


def window(*args, key=KEYS["a"]):
    ga.data.window_indices(key, *args)


def epoch(*args, key=KEYS["a"]):
    ga.data.epoch_indices(key, *args)


FOLDS = """
added([DENSE]) -> V ['dense']['bias']
added(spoilt(kernel=jnp.ones((2, 3), int))) -> T ['dense']['kernel'] | int32
added([ONE], None, (ONE,)) -> V containers differ
added(weight=jnp.ones(2)) -> V scalar | (2,)
added(weight=float("nan")) -> V finite | nan
added(weight=jnp.float32(-2.0)) -> V not negative | -2
added(weight=jnp.complex64(1)) -> T real number, but it has dtype complex64 | Pass the
ga.accumulator.init(DENSE, jnp.int32) -> T floating dtype
ga.accumulator.init({"w": W, "f": jax.nn.relu}) -> T leaf ['f'] of params must be an arr
continued(W, W) -> T must be the accumulator to continue | of type float32, | Start
ga.accumulate(untraced, 2)(DENSE, X) -> T must be the | of type dict, | Start with acc =
ga.accumulate(untraced, 2)(DENSE, ga.accumulator.init(DENSE), X)
  -> T must be the accumulator to continue | dict, Accumulator, ndarray | The order is
ga.accumulate(untraced, 2)(*[ga.accumulator.init(DENSE)] * 2, X)
  -> T and the only one | of type Accumulator, Accumulator, | The order is
added((1.0, GRADS)) -> V That is the pair which value_and_grad returns: pass the second
continued(DENSE, OTHER) -> V ['dense']['kernel'] of the parameters
continued(DENSE, {"dense": {"bias": ONE}}) -> V ['dense']['kernel'] is missing
merged(jnp.ones(2), jnp.ones(3)) -> V ['a'] | (2,) | (3,)
epoch(0, 5, 10, 1) -> V batch_size=10 and num_examples=5
window("0", 10, 4, 2) -> T step must be an integer | '0'
ga.blocks.report("x") -> T params must be an array or a number | str | of arrays alone
ga.blocks.partition({"a": "x"}, 1) -> T leaf ['a'] of params must be an array or a
ga.blocks.partition(DENSE, 3.5) -> T by must be an int | 3.5 of type float | Use 1
ga.blocks.replace(PARTS, DENSE, "dense", jax.tree.map(np.float16, DENSE["dense"]))
  -> V ['bias'] of the new tree must have dtype float32 | float16. | blocks.select
ga.blocks.add(PARTS, np.ones((50, 50)), "dense", GRADS["dense"])
  -> T acc must be an Accumulator or | an array of shape (50, 50) | Make one
ga.blocks.unflatten(PARTS, "x", SPEC) -> T vector must be an | str | Pass a vector like
ga.blocks.unflatten(PARTS, SPEC, VECTOR) -> T spec must be of type | Pass the spec that
ga.accumulator.merge(ga.accumulator.init(DENSE), GRADS) -> T b must be of | Start with
"""
for _code in ("add(DENSE, GRADS)", "mean(GRADS)"):
    FOLDS += f"ga.accumulator.{_code} -> T acc must be of type Accumulator, but it is"
    FOLDS += " | Start with accumulator.init(\n"
for _code in (
    *("norms(DENSE, PARTS)", 'select(DENSE, PARTS, "dense")'),
    'replace(DENSE, PARTS, "dense", GRADS["dense"])',
    *('flatten("x", DENSE, "dense")', "unflatten(DENSE, VECTOR, SPEC)"),
    'add(None, None, "dense", GRADS["dense"])',
):
    FOLDS += f"ga.blocks.{_code} -> T partition must be of type Partition, but it is"
    FOLDS += " | Make one with blocks.partition(\n"
for _draw in ("window", "epoch"):
    FOLDS += f"""
{_draw}(0, 100, 10, 3) -> V num_microbatches=3 must divide batch_size
{_draw}(0, 100, 0, 1) -> V batch_size must be at least 1
{_draw}(0, 2**31, 10, 1) -> V fit in an int32
{_draw}(0, True, 10, 1) -> T num_examples must be an int
{_draw}(-1, 100, 10, 1) -> V step must be from 0 to 2^32 - 1
{_draw}(0.5, 100, 10, 1) -> T step must be an integer scalar
{_draw}(2**32, 100, 10, 1) -> V must | from 0
{_draw}(0, 10, 4, 2, key=None) -> T key must be one PRNG key | None | jax.random.key(0)
{_draw}(0, 10, 4, 2, key=W) -> T one PRNG key | np.float32(2.0).
  | Pass jax.random.key(0)
"""

PARTS = ga.blocks.partition(DENSE, 1)
VECTOR, SPEC = ga.blocks.flatten(PARTS, DENSE, "dense")
OTHERS = [
    *refusals(VERIFY + PLAN + WORDS_OF_OTHERS + AUDIT + DEVICES + MADE + ACROSS + FOLDS)
]
OTHERS += [pytest.param(*row, marks=pytest.mark.cpu) for row in refusals(OF_CPUS)]


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(("code", "error", "said"), OTHERS)
def test_other_functions_say_it_too(code, error, said):
    says(lambda: eval(code), error, said)


def test_what_fits_is_not_refused():
    """The twin."""
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        test_what_does_not_fit_is_refused(mean_of, "W, X, fun=loss", ValueError, "")
    for make in (ga.value_and_grad, mean_of):
        assert float(jax.jit(make(loss, np.int64(4)))(W, X)[0]) == 2
    assert float(mapped(ga.value_and_grad, sync="each")) == 16


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


# -- Across calls: what is lost, and what is advised -----------------------------------


@pytest.mark.usefixtures("optax_promotion")
def test_what_those_messages_advise_works():
    apply(value=3.0)  # optimizers take other arguments
    apply(CHAIN, weight=2.0)
    chain = optax.chain(INNER, optax.identity())
    apply(chain, value=3.0, weight=2)  # all members of a chain get them
    for k in (1, 2):
        update(params=None, of_tx={"k": k})  # this one needs no parameters
    new = started(4)._replace(inner_opt_state=started(1).inner_opt_state)
    update(state=new, of_tx={"k": 4})
    _, state = apply(of_tx={SKIP: lambda *_: (True, ())})
    assert int(ga.stats(state).skipped_micro_steps) == 1
    apply(NORMED, state=STATE._replace(grad_norm=NORM.grad_norm))


SPOILT = """
bias=None -> V ['dense']['bias'] is missing
extra=ONE -> V ['dense']['extra'] | not in
bias=jnp.ones(4) -> V ['dense']['bias'] | (3,) | (4,)
bias=jnp.ones(3, int) -> T ['dense']['bias'] | int32
bias=1 -> V ['dense']['bias'] | ()
"""


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(("code", "error", "said"), refusals(SPOILT))
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradients_that_do_not_fit_raise_trace_nothing_and_lose_nothing(
    code, error, said, k, jit
):
    traced, grads = [], eval(f"spoilt({code})")

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
    says(
        lambda: apply(TX, grads=grads, params=params, state=state),
        TypeError,
        "['n'] | 0",
    )
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
        says(call, ValueError, f"{field} | {name} | _replace({field}=")
        # What the message advises works, in the middle of a window too.
        held = old._replace(mini_step=jnp.int32(1))
        new = held._replace(**{field: getattr(tx.init(DENSE), field)})
        assert int(apply(GRADS, new, DENSE)[1].gradient_step) == 1
