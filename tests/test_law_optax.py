"""All of `optax.losses` over micro-batches, as they give it for the whole batch."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax.losses
import pytest
from test_law import assert_close, in_float64

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]
N, T, D, E = 12, 5, 6, 4  # rows, times, features, classes


LOSSES = {
    name: fun
    for name, fun in vars(optax.losses).items()
    if inspect.isfunction(fun) and not name.startswith("_")
}
LOSSES["make_fenchel_young_loss"] = lambda scores, targets: (
    optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)(scores, targets)
)
INTEGERS = ("integer", "multiclass_hinge", "multiclass_perc", "multiclass_spar", "ntx")
SIGNS = ("hinge_loss", "perceptron_loss", "sparsemax_loss")


def arguments():
    rng = np.random.default_rng(3)
    params = [jnp.asarray(rng.normal(size=(D, E)) * 0.6) for _ in range(3)]
    batch = {
        "x": rng.normal(size=(N, T, D)),
        "q": rng.dirichlet(np.ones(E), size=(N, T)),
        "c": rng.integers(0, 3, (N, T)).astype(np.int32),
        "sign": rng.integers(0, 2, (N, T, E)) * 2.0 - 1,
        "keep": rng.random((N, T, E)) < 0.7,
        "frames": (np.arange(T) >= rng.integers(3, T + 1, (N, 1))).astype(float),
        "letters": (np.arange(2) >= rng.integers(1, 3, (N, 1))).astype(float),
    }
    batch["keep"][..., 0] = True
    return params, jax.tree.map(jnp.asarray, batch)


def call(name, params, b, **options):
    """The loss of such a name, of numbers that depend on the parameters."""
    z, second, third = (b["x"] @ w for w in params)
    target = b["sign"] if name.startswith(SIGNS) else b["q"]
    if any(part in name for part in INTEGERS):
        target = b["c"]
    given = {
        **dict.fromkeys(("predictions", "predictor_outputs", "logits", "scores"), z),
        "log_predictions": jax.nn.log_softmax(z),
        "log_targets": jnp.log(b["q"]),
        "embeddings": z[:, 0],
        "anchors": z,
        "positives": second,
        "negatives": third,
        "targets": target,
        "labels": target,
        "alpha": 0.1,
        "logit_paddings": b["frames"],
        "label_paddings": b["letters"],
    }
    if name.startswith("ctc"):
        given["labels"] = b["c"][:, :2] + 1
    if name in ("ntxent", "multiclass_sparsemax_loss"):  # without times
        given |= {"scores": z[:, 0], "labels": b["c"][:, 0]}
    if name == "smooth_labels":
        given["labels"] = jax.nn.softmax(z)
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    needed = [given[p.name] for p in parameters if p.default is p.empty]
    return LOSSES[name](*needed, **options)


def takes(option):
    return {n for n, f in LOSSES.items() if option in inspect.signature(f).parameters}


# One adds over axes, and one has a label for each of the others.
NOT_ALONG = {"dice_loss", "softmax_cross_entropy_with_integer_labels"}
WITH_OPTIONS = {  # which losses, over how many micro-batches, and with which option
    "as they are": (set(LOSSES), 4, {}),
    "over one row": (set(LOSSES), N, {}),
    "along the rows": (takes("axis") - NOT_ALONG, 3, {"axis": lambda b: 0}),
    "over rows and times": ({"dice_loss"}, 4, {"axis": lambda b: (0, 1)}),
    "with a mask": (takes("where"), 4, {"where": lambda b: b["keep"]}),
}


@pytest.mark.grid(4, 8)
@pytest.mark.parametrize(
    ("option", "name"),
    [(o, name) for o, (names, *_) in WITH_OPTIONS.items() for name in sorted(names)],
)
def test_every_loss_of_optax_has_the_gradients_of_the_whole_batch(option, name):
    """Of a mean of what it returns, and of what is not one; and that is aux."""
    _, k, options = WITH_OPTIONS[option]

    def fun(params, b):
        out = call(name, params, b, **{o: f(b) for o, f in options.items()})
        finite = [jnp.where(x > -1e4, x, 0) for x in jax.tree.leaves(out)]  # ctc: log 0
        roots = [jnp.sqrt(jnp.mean(x**2) + 1e-3) for x in finite]
        return sum(x.mean() for x in finite) + sum(roots), out

    with jax.enable_x64(True):
        got, want = in_float64(fun, *arguments(), k=k, has_aux=True)
        assert float(jnp.abs(want[1][0]).max()) > 1e-3
        assert_close(got, want, N)


@pytest.mark.quick
def test_there_are_as_many_losses_as_were_found():
    assert len(LOSSES) >= 30
    assert {"ctc_loss", "ntxent", "dice_loss", "softmax_cross_entropy"} <= set(LOSSES)
