"""Losses with code that cannot be read, promised to work row by row, and as it is.

Each takes `promise`: `ga_optax.rowwise`, or a function that changes nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir

ROWS, TIME, WIDTH, EXPERTS = 32, 16, 32, 4


def arguments(rows=ROWS):
    rng = np.random.default_rng(1)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    router, experts = array(WIDTH, EXPERTS), array(EXPERTS, WIDTH, WIDTH) / 8
    return {"router": router, "experts": experts}, array(rows, TIME, WIDTH)


def as_it_is(fun, in_axes=0, out_axes=0):
    """What promises nothing."""
    del in_axes, out_axes
    return fun


def ends(h):
    """A loss in which rows meet otherwise, too."""
    return jnp.mean(h**2) + jnp.mean(h) ** 2


# -- Dropless experts ------------------------------------------------------------------


def dropless(x, router, experts):
    """Tokens sorted by expert, and one ragged product."""
    tokens = x.reshape(-1, WIDTH)
    gates = jax.nn.softmax(tokens @ router)
    order = jnp.argsort(jnp.argmax(gates, axis=1))
    sizes = jnp.bincount(jnp.argmax(gates, axis=1), length=EXPERTS)
    found = jax.lax.ragged_dot(tokens[order], experts, sizes.astype(jnp.int32))
    found = jnp.zeros_like(found).at[order].set(found)
    return (found * jnp.max(gates, axis=1, keepdims=True)).reshape(x.shape)


def with_closure(p, x, promise):
    layer = promise(lambda x: dropless(x, p["router"], p["experts"]))
    return ends(x + layer(x))


def jitted(p, x, promise):
    layer = jax.jit(promise(dropless, in_axes=(0, None, None)))
    return ends(x + layer(x, p["router"], p["experts"]))


def in_layers(p, x, promise):
    @jax.checkpoint
    def layer(h, scale):
        step = promise(lambda h: dropless(h, p["router"], p["experts"]))
        return h + scale * step(h), None

    return ends(jax.lax.scan(layer, x, jnp.asarray([1.0, 0.5]))[0])


# -- vmap, and gradients inside --------------------------------------------------------


def mixed(x, scale, w):
    """A function that can be read, but one row with itself."""
    return jnp.tanh(x @ w) * jnp.sum(x, axis=-1, keepdims=True) * scale


def mapped_rows(p, x, promise):
    """The promise is of what is no row, and rows are what `vmap` adds."""
    step = promise(mixed, in_axes=(0, None, None))
    return ends(jax.vmap(step, (0, None, None))(x, 2.0, p["experts"][0]))


def mapped_experts(p, x, promise):
    """`vmap` adds what is no row."""
    step = promise(mixed, in_axes=(0, None, None))
    return ends(jax.vmap(step, (None, None, 0))(x, 2.0, p["experts"]))


def gradient_inside(p, x, promise):
    def energy(x, w):
        return jnp.sum(promise(lambda x: mixed(x, 1.0, w))(x) ** 2)

    of_rows, of_all = jax.grad(energy, (0, 1))(x, p["experts"][0])
    return ends(of_rows) + 1e-4 * jnp.mean(of_all**2)


# -- Code that cannot be read ----------------------------------------------------------


def sort_on_the_host(x):
    def run(x):
        return np.sort(np.asarray(x), axis=-1)

    return jax.pure_callback(run, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def callback(p, x, promise):
    h = x @ p["experts"][0]
    return ends(h * promise(sort_on_the_host)(jax.lax.stop_gradient(h)))


# As a library's: nothing is known of it, and its derivative is another one.
opaque_p = core.Primitive("opaque")
opaque_p.def_abstract_eval(lambda x, scale: x)
mlir.register_lowering(
    opaque_p,
    mlir.lower_fun(
        lambda x, scale: jnp.cumsum(jnp.tanh(x), axis=-1) * scale,
        multiple_results=False,
    ),
)


@jax.custom_vjp
def opaque(x, scale):
    return opaque_p.bind(x, scale)


def _backward(saved, ct):
    x, scale = saved
    out = opaque_p.bind(x, jnp.ones_like(scale))
    of_x = jnp.flip(jnp.cumsum(jnp.flip(ct * scale, -1), axis=-1), -1)
    return of_x / jnp.cosh(x) ** 2, jnp.sum(ct * out, axis=tuple(range(ct.ndim - 1)))


opaque.defvjp(lambda x, scale: (opaque(x, scale), (x, scale)), _backward)


def custom_call(p, x, promise):
    h = x @ p["experts"][0]
    return ends(promise(opaque, in_axes=(0, None))(h, p["router"][:, 0]))


LOSSES = {
    f.__name__: f
    for f in (
        *(with_closure, jitted, in_layers, mapped_rows, mapped_experts),
        *(gradient_inside, callback, custom_call),
    )
}
