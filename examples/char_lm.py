"""A run from a config to a checkpoint: a small language model of Python source.

    python examples/char_lm.py

A decoder-only transformer reads the standard library of the Python that runs it, byte
by byte. One example is one line. Lines have very different lengths, so micro-batches
with the same number of lines hold different numbers of tokens. The mean of their mean
losses is then not the mean over the tokens. So each micro-batch is weighted by its
tokens.

The program is meant as a model of how to run such a training:

    the config     defaults, `--config FILE`, flags; what was used is in config.json
    the window     `plan` finds the fewest micro-batches that fit into `memory_limit`
    the gradient   `verify` compares it with that of the undivided batch, or it stops
    the data       a pure function of the seed and the step: nothing to restore
    the log        loss, tokens a second and the gradient's norm, in log.jsonl
    checkpoints    Orbax writes one every `save_every` micro-steps, inside a window, too
    a restart      the same command continues a run that was killed, with the same bits

All files are in out/char_lm, also a picture of the curves and of the memory at the end,
when some lines of the model are printed. `--fresh` starts again. A run takes 160 s of
processor time, that is two to three minutes on two idle cores; with `--quick` it takes
less than half. For a GPU: `--layers 12 --width 768 --heads 12 --length 256 --batch-size
512 --memory-limit 20GiB`.

It needs flax, matplotlib, orbax-checkpoint and tqdm: the dependency group `demo`.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import shutil
import sys
import sysconfig
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm

import ga_optax as ga
from ga_optax import data

mpl.use("Agg")
import matplotlib.pyplot as plt


@dataclasses.dataclass(frozen=True)
class Config:
    """Model and run. The number of micro-batches follows from the memory limit."""

    layers: int = 4  # transformer blocks, with stacked parameters
    width: int = 96  # features of a token between the blocks
    heads: int = 4  # of the attention; they share the width
    length: int = 64  # tokens of an example; the rest of a line is cut off
    dropout: float = 0.05  # fraction of the features set to zero
    steps: int = 240
    batch_size: int = 64  # lines in a window
    learning_rate: float = 4e-3  # the largest, after the warm-up
    seed: int = 0
    memory_limit: str = "24MiB"  # what a micro-step may need
    save_every: int = 250  # micro-steps between two checkpoints


QUICK = Config(
    layers=2,
    width=32,
    heads=2,
    length=32,
    steps=40,
    batch_size=32,
    memory_limit="1.5MiB",
    save_every=50,
)


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


def count_tokens(tokens: Any) -> jax.Array:
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


def make_windows(num_microbatches: int, config: Config) -> ga.MultiSteps:
    """The optimizer, run once a window. It keeps the window's loss and its norm."""
    return ga.MultiSteps(
        make_optimizer(config),
        num_microbatches,
        track_norm=True,
        mean_argnames="value",
    )


def make_step(num_microbatches: int, config: Config = Config()) -> Any:
    """A jitted micro-step; `ga.plan` can choose the number of micro-batches.

    It is given the whole window, and reads its own rows: the state knows which come
    next. So the step is the same before and after a restart.

    Returns:
      A function `(params, state, window, dropout_key) -> (params, state)`. It donates
      parameters and state.
    """
    tx = make_windows(num_microbatches, config)
    model = make_model(config)
    rows = config.batch_size // num_microbatches

    def step(params: Any, state: Any, window: jax.Array, dropout_key: jax.Array) -> Any:
        position = ga.stats(state).fill
        tokens = jax.lax.dynamic_slice_in_dim(window, position * rows, rows)
        key = jax.random.fold_in(dropout_key, position)
        compute = jax.value_and_grad(functools.partial(loss_fn, model))
        loss, grads = compute(params, tokens, key)
        weight = count_tokens(tokens)
        return ga.apply_gradients(tx, grads, state, params, weight=weight, value=loss)

    return jax.jit(step, donate_argnums=(0, 1))


def plan(config: Config, candidates: list[int] | None, limit: str) -> ga.Plan:
    """The fewest micro-batches, at least two, that fit into the memory."""
    size = config.batch_size
    params = jax.eval_shape(functools.partial(init_params, config))
    state = jax.eval_shape(make_windows(2, config).init, params)
    window = jax.ShapeDtypeStruct((size, config.length + 1), jnp.int32)
    return ga.plan(
        functools.partial(make_step, config=config),
        params,
        state,
        window,
        make_key(config, "dropout"),
        batch_size=size,
        memory_limit=limit,
        candidates=candidates or [k for k in range(2, size + 1) if size % k == 0],
    )


def make_evaluate(num_microbatches: int, config: Config = Config()) -> Any:
    """A jitted function `(params, tokens) -> loss` of a window, without dropout."""
    loss = functools.partial(loss_fn, make_model(config))
    return jax.jit(ga.microbatch(loss, num_microbatches))


# -- The run ---------------------------------------------------------------------------


class Run(NamedTuple):
    """A folder with everything that a run writes.

    Attributes:
      config: the configuration of model and run.
      num_microbatches: the number of micro-batches in a window.
      memory: pairs of a number of micro-batches and the bytes that a micro-step needs,
        from `plan`.
      limit: the bytes that a micro-step may need; 0 if the number was an option.
      folder: the folder of config.json, log.jsonl, checkpoints and picture.
    """

    config: Config
    num_microbatches: int
    memory: list[list[int]]
    limit: int
    folder: pathlib.Path

    @property
    def file(self) -> pathlib.Path:
        """The facts that a restart reads."""
        return self.folder / "config.json"

    @property
    def log(self) -> pathlib.Path:
        """A line for each step."""
        return self.folder / "log.jsonl"

    def write(self) -> None:
        """Writes the config."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = dataclasses.asdict(self.config)
        content = self._asdict() | {"config": config, "folder": None}
        write(self.file, json.dumps(content, indent=1))


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file: completely, or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def read_run(folder: pathlib.Path) -> Run | None:
    """The run that a folder holds, if any."""
    try:
        content = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return None
    content |= {"config": Config(**content["config"]), "folder": folder}
    return Run(**content)


def read_log(path: pathlib.Path, steps: int) -> list[dict[str, Any]]:
    """The first lines of the log: a killed process may have written some too many."""
    lines = path.read_text().splitlines()[:steps] if path.exists() else []
    if len(lines) < steps:
        raise ValueError(
            f"{path} must have a line for each of the {steps} steps of the checkpoint, "
            f"but it has {len(lines)}. Start again with --fresh."
        )
    return [json.loads(line) for line in lines]


def open_checkpoints(folder: pathlib.Path) -> ocp.CheckpointManager:
    """The checkpoints of a run. Each is written completely, or not at all."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        enable_async_checkpointing=False,  # the next micro-step takes over the buffers
    )
    return ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)


def is_exact(run: Run, params: Any, window: np.ndarray) -> bool:
    """True if a window has the gradient of the undivided batch; prints the result."""
    report = ga.verify(
        functools.partial(loss_fn, make_model(run.config)),
        params,
        window,
        run.num_microbatches,
        weight_fn=count_tokens,
    )
    counts = [count_tokens(part) for part in np.split(window, run.num_microbatches)]
    print(
        f"The first window, in {run.num_microbatches} micro-batches of "
        f"{min(counts)} to {max(counts)} tokens, {sum(counts):,} in all, has "
        + (
            "the gradient of the undivided batch." if report.ok else "another gradient:"
        ),
        flush=True,
    )
    if not report.ok:
        print(f"\n{report}")
    return report.ok


def train(run: Run, corpus: Corpus) -> tuple[Any, list[dict[str, Any]]] | None:
    """Runs to the end from the last checkpoint, if any; None if `verify` says no.

    Returns:
      The parameters and the log.
    """
    config, k, size = run.config, run.num_microbatches, run.config.batch_size
    params = init_params(config)
    state: Any = make_windows(k, config).init(params)
    step = make_step(k, config)
    # The held-out window is eight times as long, in micro-batches of the same size.
    evaluate = make_evaluate(8 * k, config)
    validation = draw_window(corpus.held_out, make_key(config, "held out"), 0, 8 * size)

    def draw(i: int) -> np.ndarray:
        return draw_window(corpus.train, make_key(config, "windows"), i, size)

    with open_checkpoints(run.folder) as checkpoints:
        done = checkpoints.latest_step() or 0  # micro-steps
        if done:
            saved = ocp.args.StandardRestore({"params": params, "state": state})
            restored: Any = checkpoints.restore(done, args=saved)
            params, state = restored["params"], restored["state"]
            print(
                f"Continues after micro-step {done}, {done % k} of {k} in its window."
            )
        elif not is_exact(run, params, draw(0)):
            return None
        log = read_log(run.log, done // k)
        write(run.log, "".join(json.dumps(line) + "\n" for line in log))

        every = max(1, config.steps // 16)
        bar = tqdm.tqdm(
            range(done // k, config.steps),
            initial=done // k,
            total=config.steps,
            unit="step",
            disable=None,
        )
        compiled = False
        for i in bar:
            start, window = time.perf_counter(), draw(i)
            first = done % k
            dropout_key = jax.random.fold_in(make_key(config, "dropout"), i)
            for _ in range(first, k):
                params, state = step(params, state, window, dropout_key)
                done += 1
                if done % config.save_every == 0 and done % k:
                    tree = {"params": params, "state": state}
                    checkpoints.save(done, args=ocp.args.StandardSave(tree))
            line: dict[str, Any] = {
                "step": i + 1,
                "loss": float(state.arg_totals["value"]),
                "grad_norm": float(ga.grad_norm(state)),
            }
            if compiled and not first:
                tokens, seconds = int(count_tokens(window)), time.perf_counter() - start
                line["tokens_per_second"] = round(tokens / seconds)
            compiled = True
            if (i + 1) % every == 0 or i + 1 == config.steps:
                line["held_out"] = float(evaluate(params, validation))
                bar.write(describe(line))
            log.append(line)
            with run.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if done % config.save_every == 0 or i + 1 == config.steps:
                tree = {"params": params, "state": state}
                checkpoints.save(done, args=ocp.args.StandardSave(tree), force=True)
            bar.set_postfix_str(f"loss {line['loss']:.3f}", refresh=False)
    return params, log


def describe(line: dict[str, Any]) -> str:
    """A line of the log to read."""
    speed = line.get("tokens_per_second")
    return (
        f"step {line['step']:5}   loss {line['loss']:.4f}   held out "
        f"{line['held_out']:.4f}   gradient norm {line['grad_norm']:.3f}"
        + (f"   {speed:,} tokens/s" if speed else "")
    )


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


def draw_picture(run: Run, log: list[dict[str, Any]], baseline: float) -> pathlib.Path:
    """Plots loss and gradient norm over the steps, and the memory of a micro-step."""
    blue, orange, grey = "#2b6cb0", "#dd6b20", "#718096"
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, middle, right) = plt.subplots(
            1, 3, figsize=(13, 4), width_ratios=(2, 1, 1), layout="constrained"
        )
        left.axhline(baseline, color=grey, ls="--", label="byte frequencies alone")
        steps = [line["step"] for line in log]
        losses = [line["loss"] for line in log]
        left.plot(steps, losses, color=blue, alpha=0.5, lw=1, label="training")
        rows = [line for line in log if "held_out" in line]
        at, held_out = ([line[key] for line in rows] for key in ("step", "held_out"))
        left.plot(
            at, held_out, "o-", color=orange, label=f"held out: {held_out[-1]:.2f}"
        )
        left.set(xlabel="step", ylabel="loss, nats a byte", ylim=(0, None))
        left.set_title("Learning Python, a byte at a time", loc="left", weight="bold")
        left.legend(frameon=False)
        left.grid(axis="y", alpha=0.25)

        norms = [line["grad_norm"] for line in log]
        middle.plot(steps, norms, color=blue, lw=1)
        middle.set(xlabel="step", ylabel="before clipping", ylim=(0, None))
        middle.set_title("Norm of the gradient", loc="left", weight="bold")
        middle.grid(axis="y", alpha=0.25)

        numbers, sizes = zip(*run.memory, strict=True)
        chosen = [orange if k == run.num_microbatches else blue for k in numbers]
        right.bar([str(k) for k in numbers], np.divide(sizes, 2**20), color=chosen)
        if run.limit:
            right.axhline(run.limit / 2**20, color=grey, ls="--")
        right.set(
            xlabel="micro-batches", ylabel="MiB of a micro-step; dashed: the limit"
        )
        right.set_title(f"{run.num_microbatches} fit", loc="left", weight="bold")
        path = run.folder / "char_lm.png"
        figure.savefig(path, dpi=150)
        plt.close(figure)
    return path


def make_run(args: argparse.Namespace, config: Config) -> Run:
    """Continues the run in the folder, or plans a new one."""
    old = None if args.fresh else read_run(args.out)
    if old is not None:
        if config != old.config:
            raise SystemExit(
                f"{args.out} holds a run with another config, {old.config}, and not "
                f"{config}. Pass another --out, or --fresh to delete it."
            )
        return old
    for name in ("config.json", "log.jsonl", "char_lm.png"):
        (args.out / name).unlink(missing_ok=True)
    shutil.rmtree(args.out / "checkpoints", ignore_errors=True)
    k = args.num_microbatches
    planned = plan(config, [k] if k else None, "1TiB" if k else config.memory_limit)
    if not k:
        print(f"{planned}\n")
    memory = [[c.num_microbatches, c.bytes] for c in planned.candidates if c.bytes]
    limit = 0 if k else planned.memory_limit
    run = Run(config, planned.num_microbatches, memory, limit, args.out)
    run.write()
    return run


def read_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Config:
    """The config of the flags, of the file, and of the defaults, in this order."""
    usual, names = QUICK if args.quick else Config(), dataclasses.asdict(QUICK)
    if args.config:
        content = json.loads(args.config.read_text())
        if unknown := sorted(content.keys() - names):
            parser.error(f"{args.config} must name fields of {QUICK}, not {unknown}.")
        usual = dataclasses.replace(usual, **content)
    options = {name: getattr(args, name) for name in names}
    config = dataclasses.replace(
        usual, **{name: value for name, value in options.items() if value is not None}
    )
    sizes = ("layers", "width", "heads", "length", "steps", "batch_size", "save_every")
    if min(getattr(config, name) for name in sizes) < 1:
        parser.error(f"Every size must be at least 1, but they are {config}.")
    k = args.num_microbatches
    if k is not None and (k < 2 or config.batch_size % k):
        parser.error(
            f"{k} micro-batches must be at least 2, and divide the batch size."
        )
    if config.width % config.heads:
        parser.error("The heads must divide the width.")
    return config


def main(argv: list[str] | None = None) -> int:
    """Plans, verifies, trains and plots; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--config", type=pathlib.Path, help="a JSON file of the below")
    for field in dataclasses.fields(Config):
        usual = f"{field.default}, or {getattr(QUICK, field.name)} if quick"
        kind: Any = type(field.default)
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="X", help=f"default: {usual}")
    parser.add_argument(
        "--num-microbatches", type=int, metavar="N", help="default: what `plan` finds"
    )
    out = pathlib.Path("out/char_lm")
    parser.add_argument("--out", type=pathlib.Path, default=out, help=f"default: {out}")
    parser.add_argument("--fresh", action="store_true", help="delete what is in --out")
    args = parser.parse_args(argv)
    config = read_config(parser, args)

    start = time.perf_counter()
    corpus = load_corpus(config.length)
    baseline = byte_frequency_loss(corpus)
    params = jax.eval_shape(functools.partial(init_params, config))
    print(
        f"{len(corpus.train):,} lines to learn, {len(corpus.held_out):,} held out; "
        f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters.\nNats a byte: "
        f"{np.log(VOCABULARY):.2f} guessed, {baseline:.2f} by byte frequencies alone."
    )
    run = make_run(args, config)
    result = train(run, corpus)
    if result is None:
        return 1
    params, log = result
    picture = draw_picture(run, log, baseline)
    print(
        f"\n{config.steps} steps, {time.perf_counter() - start:.0f} s in this process; "
        f"the picture is {picture}. Lines that the model wrote:\n"
    )
    for line in sample(config, params, 16):
        print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
