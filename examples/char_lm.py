"""A small language model of Python source, learned in token-weighted micro-batches.

    python examples/char_lm.py

A decoder-only transformer reads the standard library of the Python that runs it, byte
by byte. One example is one line. Lines have very different lengths, so micro-batches
with the same number of lines hold different numbers of tokens. The mean of their mean
losses is then not the mean over the tokens, and its gradient is wrong, too. So each
micro-batch is weighted by its tokens. That takes one argument,
`weight_fn=count_tokens`.

The program first compares these gradients on the first window. It exits with 1 if the
token-weighted gradient is not that of the undivided batch. Then it trains, with a whole
window in one jitted step, and different dropout in each micro-batch. It prints the loss
on held-out files, and at the end some lines from the model. The loss curve is in
out/char_lm.png. A run takes two minutes on two CPU cores, or seconds with `--quick`.

It needs flax, matplotlib and tqdm: the dependency group `demo`.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import tqdm
from jax.flatten_util import ravel_pytree

import ga_optax as ga
from ga_optax import data

mpl.use("Agg")
import matplotlib.pyplot as plt


@dataclasses.dataclass(frozen=True)
class Config:
    """Model and run. The number of micro-batches changes neither, and is not here."""

    layers: int = 4  # transformer blocks, with stacked parameters
    width: int = 96  # features of a token between the blocks
    heads: int = 4  # of the attention; they share the width
    length: int = 64  # tokens of an example; the rest of a line is cut off
    dropout: float = 0.05  # fraction of the features set to zero
    steps: int = 400
    batch_size: int = 64  # lines in a window
    learning_rate: float = 4e-3  # the largest, after the warm-up
    seed: int = 0


QUICK = Config(layers=2, width=32, heads=2, length=32, steps=40, batch_size=32)


def make_key(config: Config, purpose: str) -> jax.Array:
    """A separate key for each purpose, so that no two draws are related."""
    purposes = "parameters", "windows", "held out", "dropout", "sample"
    key = jax.random.key(config.seed, impl="rbg")  # compiles faster
    return jax.random.fold_in(key, purposes.index(purpose))


# -- The corpus: one line, one example -------------------------------------------------

PAD = 0  # a byte that no Python source holds
NEWLINE = 10  # starts and ends every line
VOCABULARY = 256
CORPUS_BYTES = 4 * 2**20  # more only takes longer to load


class Corpus(NamedTuple):
    """Lines, uint8 `[lines, length + 1]`: a newline, the bytes, a newline, padding."""

    train: np.ndarray
    held_out: np.ndarray


def load_corpus(length: int) -> Corpus:
    """Reads the standard library's modules in the order of their names.

    Every tenth file is held out as a whole, because lines of a file resemble each
    other.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = [], []
    size = 0
    for i, path in enumerate(sorted(folder.glob("*.py"))):
        source = path.read_bytes()
        size += len(source)
        if size > CORPUS_BYTES:
            break
        for line in source.splitlines():
            if line.strip():
                line = (b"\n" + line.rstrip() + b"\n")[: length + 1]
                parts[i % 10 == 9].append(line.ljust(length + 1, b"\0"))
    train, held_out = (
        np.frombuffer(b"".join(lines), np.uint8).reshape(-1, length + 1)
        for lines in parts
    )
    return Corpus(train, held_out)


def draw_window(lines: np.ndarray, key: jax.Array, step: int, size: int) -> np.ndarray:
    """The lines of a step, int32 `[size, length + 1]`, before they are split."""
    rows = data.window_indices(key, step, len(lines), size, 1)
    return lines[np.asarray(rows).ravel()].astype(np.int32)


def count_tokens(tokens: jax.Array) -> jax.Array:
    """The weight of a micro-batch: the tokens that its loss is a mean over."""
    return jnp.sum(tokens[:, 1:] != PAD)


# -- The model -------------------------------------------------------------------------


class Block(nn.Module):
    """Attention, then two dense layers; the body of a scan over layers."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Maps `[batch, length, width]` to the same shape."""
        config = self.config
        dropout = nn.Dropout(config.dropout, deterministic=self.deterministic)

        # No biases: the gradient of the keys' bias is zero, apart from rounding.
        qkv = nn.Dense(3 * config.width, use_bias=False)(nn.LayerNorm()(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], config.heads, -1), 3, axis=-1)
        # Padding comes last, so the causal mask hides it from the tokens, too.
        mask = nn.make_causal_mask(x[..., 0])
        attended = nn.dot_product_attention(q, k, v, mask=mask)
        x = x + dropout(nn.Dense(config.width)(attended.reshape(x.shape)))

        hidden = nn.gelu(nn.Dense(4 * config.width)(nn.LayerNorm()(x)))
        return x + dropout(nn.Dense(config.width)(hidden)), None


class Transformer(nn.Module):
    """Predicts the next token: an embedding, blocks, and the embedding again."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        """Maps tokens `[batch, length]` to logits `[batch, length, VOCABULARY]`."""
        config = self.config
        embed = nn.Embed(VOCABULARY, config.width)
        positions = nn.Embed(config.length, config.width)
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))[None]
        # One block is compiled for all layers. Its activations are computed again in
        # the backward pass.
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.layers,
        )
        x, _ = blocks(config, deterministic)(x, None)
        return embed.attend(nn.LayerNorm()(x))


def make_model(config: Config) -> Transformer:
    """The model; `init_params` makes its parameters."""
    return Transformer(config)


def init_params(config: Config) -> optax.Params:
    """The parameters that every run with this seed starts from."""
    tokens = jnp.zeros((1, config.length), jnp.int32)
    return jax.jit(make_model(config).init)(make_key(config, "parameters"), tokens)


def loss_fn(
    model: nn.Module,
    params: Any,
    tokens: jax.Array,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """The mean cross-entropy of the tokens that are not padding, in nats.

    Args:
      model: from `make_model`.
      params: its parameters.
      tokens: int `[lines, length + 1]`, padded with `PAD`.
      dropout_key: the key for dropout; None for no dropout.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    logits: Any = model.apply(params, inputs, dropout_key is None, rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    total = jnp.sum(jnp.where(targets != PAD, losses, jnp.zeros_like(losses)))
    return total / jnp.maximum(count_tokens(tokens), 1).astype(total.dtype)


# -- One step, and the loss on a whole window ------------------------------------------


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine decay. It clips the gradient of the window."""
    peak, steps = config.learning_rate, config.steps
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup_steps=steps // 10, decay_steps=steps, end_value=peak / 20
    )
    adamw = optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_step(num_microbatches: int, config: Config = Config()) -> Any:
    """A jitted step over a window; `ga.plan` can choose its number of micro-batches.

    Returns:
      A function `(params, state, tokens, dropout_key) -> (params, state, loss)`. It
      donates parameters and state.
    """
    tx = make_optimizer(config)
    loss = functools.partial(loss_fn, make_model(config))
    value_and_grad = ga.value_and_grad(
        loss, num_microbatches, rng_argnums=2, weight_fn=count_tokens
    )

    def step(params: Any, state: Any, tokens: jax.Array, dropout_key: jax.Array) -> Any:
        loss, grads = value_and_grad(params, tokens, dropout_key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def make_evaluate(num_microbatches: int, config: Config = Config()) -> Any:
    """A jitted function `(params, tokens) -> loss` of a whole window, without dropout.

    It accumulates as in training. The compiler removes the unused gradient.
    """
    loss = functools.partial(loss_fn, make_model(config))
    value_and_grad = ga.value_and_grad(loss, num_microbatches, weight_fn=count_tokens)
    return jax.jit(lambda params, tokens: value_and_grad(params, tokens)[0])


# -- What must hold: the gradient of the undivided batch -------------------------------
#
# Let gᵢ be the gradients of the k micro-batches, wᵢ their tokens, and eps = 2⁻²³. Then
#
#     |accumulated - undivided|  <=  2·k·eps · Σ wᵢ·|gᵢ| / Σ wᵢ      in every element.
#
# In float32 the products, the sum and the division round at most k + 1 times, each time
# by eps / 2 of numbers of this size (Higham, "Accuracy and Stability of Numerical
# Algorithms", 2002, eq. 4.4). That is half of the bound. The network itself rounds
# more, and differently for a larger batch. So we compare in float64, where all rounding
# is 2²⁹ times smaller. A correct program is far below the bound, and a wrong one far
# above.

EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # for elements whose gradient is zero


class Check(NamedTuple):
    """Gradients of one window without dropout, compared with the undivided batch's.

    Attributes:
      counts: the tokens of each micro-batch.
      loss: three losses: undivided, weighted by tokens, and as a mean of means.
      relative: the relative error, in norm, of the gradients of the last two.
      bounds: the error of their worst element, in units of its bound.
    """

    counts: np.ndarray
    loss: list[float]
    relative: list[float]
    bounds: list[float]

    @property
    def ok(self) -> bool:
        """Whether the accumulated gradient is the undivided one, up to rounding."""
        return self.bounds[0] <= 1


def check_gradient(
    config: Config,
    params: optax.Params,
    tokens: np.ndarray,
    num_microbatches: int,
    weight_fn: Callable[[jax.Array], jax.Array] | None = count_tokens,
) -> Check:
    """Compares the gradients of one window. A test passes `weight_fn=None`."""
    loss = functools.partial(loss_fn, make_model(config))
    micro = np.split(tokens, num_microbatches)
    counts = np.array([np.count_nonzero(batch[:, 1:]) for batch in micro])
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
        whole = jax.jit(jax.value_and_grad(loss))
        split = jax.jit(ga.value_and_grad(loss, num_microbatches, weight_fn=weight_fn))
        found = [whole(params, tokens), split(params, tokens)]
        found += [whole(params, batch) for batch in micro]
        losses = np.array([value for value, _ in found])
        vectors = np.stack([ravel_pytree(grads)[0] for _, grads in found])
    undivided, accumulated, *_ = vectors
    off = np.abs([accumulated - undivided, np.mean(vectors[2:], axis=0) - undivided])
    size = np.average(np.abs(vectors[2:]), axis=0, weights=counts)
    return Check(
        counts,
        [float(x) for x in (*losses[:2], np.mean(losses[2:]))],
        list(np.linalg.norm(off, axis=1) / np.linalg.norm(undivided)),
        list(np.max(off / (2 * num_microbatches * EPS * size + TINY), axis=1)),
    )


def print_check(check: Check) -> None:
    """Prints three rows, of which the first two agree."""
    k, counts = len(check.counts), check.counts
    print(
        f"\nThe first window, in {k} micro-batches of {min(counts)} to {max(counts)} "
        f"tokens, {sum(counts):,} in all:\n\n"
        f"{'':24}{'loss':>10}   gradient off by   its worst element off by\n"
        f"{'undivided batch':24}{check.loss[0]:10.6f}"
    )
    for i, name in enumerate(("weighted by tokens", "mean of means")):
        print(
            f"{name:24}{check.loss[i + 1]:10.6f}{100 * check.relative[i]:14.2g} %"
            f"{check.bounds[i]:14.2g} times the bound"
        )
    print("", flush=True)


# -- Training --------------------------------------------------------------------------


class Run(NamedTuple):
    """The result of a run: parameters, training losses, and held-out losses by step."""

    params: optax.Params
    losses: list[float]
    held_out: dict[int, float]


def train(
    config: Config, corpus: Corpus, params: optax.Params, num_microbatches: int
) -> Run:
    """Trains a copy of `params`. The same call gives the same bits."""
    step = make_step(num_microbatches, config)
    # The held-out window is eight times as long, in micro-batches of the same size.
    evaluate = make_evaluate(8 * num_microbatches, config)
    size = config.batch_size
    validation = draw_window(corpus.held_out, make_key(config, "held out"), 0, 8 * size)
    params = jax.tree.map(jnp.copy, params)
    state = make_optimizer(config).init(params)
    losses, held_out = [], {0: float(evaluate(params, validation))}
    every, tokens, seconds = max(1, config.steps // 16), 0, 0.0

    bar = tqdm.tqdm(range(config.steps), unit="step", disable=None)
    bar.write(f"step {0:5}   held-out loss {held_out[0]:.4f} nats a byte")
    for i in bar:
        start = time.perf_counter()
        window = draw_window(corpus.train, make_key(config, "windows"), i, size)
        dropout_key = jax.random.fold_in(make_key(config, "dropout"), i)
        params, state, loss = step(params, state, window, dropout_key)
        losses.append(float(loss))
        if i > 0:  # the first call compiles
            tokens += np.count_nonzero(window[:, 1:])
            seconds += time.perf_counter() - start
        speed = f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed}", refresh=False)
        done = i + 1
        if done % every == 0 or done == config.steps:
            loss = held_out[done] = float(evaluate(params, validation))
            bar.write(f"step {done:5}   held-out loss {loss:.4f} nats a byte   {speed}")
    return Run(params, losses, held_out)


# -- Output ----------------------------------------------------------------------------


def sample(
    config: Config, params: Any, lines: int, temperature: float = 0.7
) -> list[str]:
    """Samples lines from the model, byte by byte, all in one jitted loop."""
    model, key = make_model(config), make_key(config, "sample")

    def write(i: jax.Array, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens[:, :-1])
        # The first logit is that of padding, which the model must not write.
        likely = logits[:, i, 1:] / temperature
        byte = jax.random.categorical(jax.random.fold_in(key, i), likely) + 1
        ended = (i > 0) & ((tokens[:, i] == NEWLINE) | (tokens[:, i] == PAD))
        return tokens.at[:, i + 1].set(jnp.where(ended, PAD, byte.astype(jnp.int32)))

    tokens = jnp.zeros((lines, config.length + 1), jnp.int32).at[:, 0].set(NEWLINE)
    tokens = jax.jit(lambda x: jax.lax.fori_loop(0, config.length, write, x))(tokens)
    rows = np.asarray(tokens).astype(np.uint8)
    texts = [row.tobytes().decode(errors="replace") for row in rows]
    return ["".join(c for c in text if c.isprintable()) for text in texts]


def byte_frequency_loss(corpus: Corpus) -> float:
    """The held-out loss of a model that knows only how frequent each byte is."""
    learned, seen = (
        np.bincount(lines[:, 1:].ravel(), minlength=VOCABULARY)[PAD + 1 :]
        for lines in corpus
    )
    return float(-np.average(np.log((learned + 1) / np.sum(learned + 1)), weights=seen))


def draw_picture(path: pathlib.Path, run: Run, check: Check, baseline: float) -> None:
    """Plots the loss over the steps, and why micro-batches need weights."""
    blue, orange, grey = "#2b6cb0", "#dd6b20", "#718096"
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.2), width_ratios=(2, 1), layout="constrained"
        )
        left.axhline(baseline, color=grey, ls="--", label="byte frequencies alone")
        steps = np.arange(len(run.losses)) + 1
        left.plot(steps, run.losses, color=blue, alpha=0.5, lw=1, label="training")
        at, losses = list(run.held_out), list(run.held_out.values())
        left.plot(at, losses, "o-", color=orange, label=f"held out: {losses[-1]:.2f}")
        left.set(xlabel="step", ylabel="loss, nats a byte", ylim=(0, None))
        left.set_title("Learning Python, a byte at a time", loc="left", weight="bold")
        left.legend(frameon=False)
        left.grid(axis="y", alpha=0.25)

        numbers = np.arange(len(check.counts)) + 1
        right.bar(numbers, check.counts, color=blue, alpha=0.75)
        right.axhline(np.mean(check.counts), color=grey, ls="--")
        right.set(
            xlabel="micro-batch of the first window",
            ylabel="tokens; dashed: their mean",
        )
        lesson = (
            f"With equal weights the\ngradient is {100 * check.relative[1]:.2g} % off"
        )
        right.locator_params("x", integer=True)
        right.set_title(lesson, loc="left", weight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Checks, trains and plots; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small run")
    sizes = "layers", "width", "heads", "length", "steps", "batch_size", "seed"
    for name in sizes:
        usual = f"{getattr(Config, name)}, or {getattr(QUICK, name)} if quick"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, metavar="N", help=f"default: {usual}")
    parser.add_argument(
        "--num-microbatches", type=int, metavar="N", default=16, help="default: 16"
    )
    parser.add_argument("--out", type=pathlib.Path, default="out", help="default: out")
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in sizes}
    config = dataclasses.replace(
        QUICK if args.quick else Config(),
        **{name: value for name, value in given.items() if value is not None},
    )
    k = args.num_microbatches
    if min(k, *(getattr(config, name) for name in sizes if name != "seed")) < 1:
        parser.error(f"Every size must be at least 1, but they are {config}.")
    if config.batch_size % k or config.width % config.heads:
        parser.error("Micro-batches must divide the batch size, and heads the width.")

    corpus, params = load_corpus(config.length), init_params(config)
    baseline = byte_frequency_loss(corpus)
    print(
        f"{len(corpus.train):,} lines to learn, {len(corpus.held_out):,} held out; "
        f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters.\nNats a byte: "
        f"{np.log(VOCABULARY):.2f} guessed, {baseline:.2f} by byte frequencies alone."
    )
    first = draw_window(corpus.train, make_key(config, "windows"), 0, config.batch_size)
    check = check_gradient(config, params, first, k)
    print_check(check)
    if not check.ok:
        print("This build does not accumulate correctly.")
        return 1

    start = time.perf_counter()
    run = train(config, corpus, params, k)
    picture = args.out / "char_lm.png"
    draw_picture(picture, run, check, baseline)
    print(
        f"\n{config.steps} steps in {time.perf_counter() - start:.0f} s; the curve is "
        f"in {picture}. Lines that the model wrote:\n"
    )
    for line in sample(config, run.params, 16):
        print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
