"""Mixtures of experts, as users write them: rows are sent to places, and come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error, of_benchmarks, temporaries
from jax import lax

import ga_optax as ga
from ga_optax._partition import indexing
from ga_optax._window import levels, pieces, room, run

[hlo] = of_benchmarks("hlo")

K = 8
LAYERS, WIDTH, HIDDEN, EXPERTS = 4, 32, 64, 4


def routed(h, p, dtype=jnp.int32):
    """The expert of each row, its gate, and its number among the rows of its expert."""
    gates = jax.nn.softmax(h @ p["router"])
    expert = gates.argmax(-1)
    chosen = jax.nn.one_hot(expert, gates.shape[-1], dtype=dtype)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1) - 1
    return expert, gates.max(-1, keepdims=True), place


def experts(sent, p):
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent, p["up"]))
    return jnp.einsum("ecf,efd->ecd", h, p["down"])


def room_of(h, p):
    return h.shape[0] * 5 // (4 * p["router"].shape[-1])  # not all rows fit


def written(h, p):
    expert, gate, place = routed(h, p)
    sent = jnp.zeros((p["router"].shape[-1], room_of(h, p), h.shape[1]), h.dtype)
    sent = sent.at[expert, place].set(h, mode="drop", unique_indices=True)
    fits = (place < room_of(h, p))[:, None]
    out = experts(sent, p)[expert, jnp.minimum(place, room_of(h, p) - 1)]
    return h + gate * jnp.where(fits, out, 0)


def spilled(h, p):
    """All rows that do not fit are written to one place more, which nobody reads."""
    expert, gate, place = routed(h, p)
    size, (n, d) = room_of(h, p), (p["router"].shape[-1], h.shape[1])
    slot = jnp.where(place < size, expert * size + place, n * size)
    sent = jnp.zeros((n * size + 1, d), h.dtype).at[slot].set(h)[:-1]
    out = experts(sent.reshape(n, size, d), p).reshape(n * size, d)
    out = jnp.concatenate([out, jnp.zeros((1, d), h.dtype)])
    return h + gate * out[slot]


def two_of_them(h, p):
    """Each row goes to the best two."""
    gates, best = lax.top_k(jax.nn.softmax(h @ p["router"]), 2)
    expert, n = best.reshape(-1), p["router"].shape[-1]
    chosen = jax.nn.one_hot(expert, n, dtype=jnp.int32)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1) - 1
    sent = jnp.zeros((n, 2 * room_of(h, p), h.shape[1]), h.dtype)
    sent = sent.at[expert, place].add(jnp.repeat(h, 2, 0), mode="drop")
    out = experts(sent, p).at[expert, place].get(mode="fill", fill_value=0)
    return h + (out.reshape(-1, 2, h.shape[1]) * gates[..., None]).sum(1)


def dropless(h, p):
    expert, gate, _ = routed(h, p)
    order, n = jnp.argsort(expert), p["router"].shape[-1]
    sizes = jnp.bincount(expert, length=n).astype(jnp.int32)
    out = jax.nn.gelu(lax.ragged_dot(h[order], p["up"], sizes))
    return h + gate * lax.ragged_dot(out, p["down"], sizes)[jnp.argsort(order)]


def two_dropless(h, p):
    """Each row goes to the best two, and none is dropped: indices of twice as many."""
    gates, best = lax.top_k(jax.nn.softmax(h @ p["router"]), 2)
    expert, n = best.reshape(-1), p["router"].shape[-1]
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=n).astype(jnp.int32)
    out = jax.nn.gelu(lax.ragged_dot(h[order // 2], p["up"], sizes))
    out = lax.ragged_dot(out, p["down"], sizes)[jnp.argsort(order)]
    return h + (out.reshape(-1, 2, h.shape[1]) * gates[..., None]).sum(1)


SORTED = [dropless, two_dropless]
WAYS = [written, spilled, two_of_them, *SORTED]
HOWS = ["scan", "checkpointed scan", "Python"]


def loss_of(layer, how):
    def step(h, p):
        return layer(h, p), None

    step = jax.checkpoint(step) if "checkpointed" in how else step

    def loss(p, x):
        h = jnp.tanh(x)
        if "scan" in how:
            return (lax.scan(step, h, p)[0] ** 2).mean()
        for i in range(p["up"].shape[0]):
            h, _ = step(h, jax.tree.map(lambda w, i=i: w[i], p))
        return (h**2).mean()

    return loss


def arguments(n, layers=LAYERS, width=WIDTH, hidden=HIDDEN, dtype=np.float32):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, dtype)

    params = {
        "router": normal(layers, width, EXPERTS),
        "up": normal(layers, EXPERTS, width, hidden),
        "down": normal(layers, EXPERTS, hidden, width),
    }
    return params, 2 * normal(n, width)


@pytest.mark.grid(2, 5)
@pytest.mark.usefixtures("optax_promotion", "float64", "fast_compilation")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("layer", WAYS)
def test_experts_have_the_gradients_of_the_whole_batch(layer, how):
    args = arguments(16, 2, 6, 5, np.float64)
    loss = loss_of(layer, how)
    # Sums of at most some hundred terms, in float64.
    assert error(loss, 4, *args, accumulator_dtype="float64") < 1e-12


@pytest.mark.grid(3, 9)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("layer", WAYS)
def test_experts_run_at_most_three_times_and_once_back(layer, how, monkeypatch):
    monkeypatch.setattr(room, "LITTLE", 0)  # not because they are small
    found = ga.batch_dependencies(loss_of(layer, how), K)(*arguments(512))
    assert (found.forward_passes, found.backward_passes) <= (3, 1)
    whole = {note.name for note in found.whole}
    if not found.undivided:
        assert whole == ({"sort", "gather"} if layer in SORTED else set())
    # With a checkpoint, what all rows send to experts is most of what there is to keep.
    assert not found.undivided or how == "checkpointed scan"


@pytest.mark.cpu
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.filterwarnings("ignore:.*computed of all rows at once")  # the twin
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layer", SORTED)
def test_dropless_experts_take_the_memory_of_a_micro_batch(layer, dtype, monkeypatch):
    loss = loss_of(layer, "Python")
    params, x = arguments(1024, 1, 32, 128, dtype)
    plain = jax.jit(jax.value_and_grad(loss))
    undivided, one = (temporaries(plain, params, rows) for rows in (x, x[:128]))

    def needs():
        return temporaries(jax.jit(ga.value_and_grad(loss, 8)), params, x)

    # Sorted and back, and their cotangents, of one expert or of two.
    rows = (4 if layer is dropless else 8) * 4 * x.size
    assert needs() < one + rows < undivided / 2
    monkeypatch.setattr(indexing, "reorders", lambda *args: False)
    assert needs() > undivided / 2


# -- Slots in pieces -------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_experts_run_over_pieces_of_their_slots(dtype, monkeypatch):
    args = arguments(1024, 1, 32, 512, dtype)

    def compiled():
        loss = loss_of(jax.checkpoint(two_of_them), "Python")
        return jax.jit(ga.value_and_grad(loss, K)).lower(*args).compile()

    def bytes_of(program):
        return program.memory_analysis().temp_size_in_bytes

    ours = compiled()
    monkeypatch.setattr(levels, "in_pieces", lambda jaxpr, *_: jaxpr)
    monkeypatch.setattr(run, "_takes_less", lambda *_: True)
    whole = compiled()
    # Two forward, the first of them again, and back all but to the rows.
    of_slots, router = 2 * 2560 * 32 * 512, 2 * 1024 * 32 * EXPERTS
    assert hlo.dot_flops(ours.as_text()) == 6 * of_slots + 3 * router
    hidden = 2 * 1024 * 5 // 4 * 512 * jnp.dtype(dtype).itemsize  # of all slots
    assert bytes_of(whole) - bytes_of(ours) > 2 * hidden * (1 - 1 / K)


@pytest.fixture
def in_pieces(monkeypatch):
    """What is computed in pieces, or None for what might have been."""
    found, divided = [], pieces._divided
    monkeypatch.setattr(pieces, "LITTLE", 0)
    monkeypatch.setattr(
        pieces, "_divided", lambda *args: found.append(divided(*args)) or found[-1]
    )
    return found


@pytest.mark.usefixtures("optax_promotion", "float64", "fast_compilation")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("layer", [written, two_of_them])
def test_experts_in_pieces_have_the_gradients_of_the_whole_batch(layer, how, in_pieces):
    args = arguments(16, 2, 6, 64, np.float64)
    # Sums of at most some hundred terms, in float64.
    assert error(loss_of(layer, how), 4, *args, accumulator_dtype="float64") < 1e-12
    assert len(in_pieces) == 2  # for each layer
    assert None not in in_pieces
