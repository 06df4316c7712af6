"""The gradients of trainers' own losses and models: theirs, ours, undivided.

    pip install google-tunix keras    # beside ga_optax
    python benchmarks/trainers.py

MaxText and big_vision run as well if they can be imported. The first needs `pip install
maxtext tokamax tiktoken omegaconf drjax aqtp tensorflow-cpu tensorboardX`, the second a
checkout on `PYTHONPATH`, and `pip install einops ml_collections tensorflow-cpu`.

A trainer's loss is differentiated for all rows at once, by the trainer's own gradient
accumulation, and by `ga.value_and_grad`, with eight micro-batches. The table shows how
far each is from the undivided gradient, and the temporaries of the compiled program.
Those of a trainer that sees one micro-batch at a time are those of one micro-batch.
What cannot be imported is left out.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from flax import nnx

import ga_optax as ga
import ga_optax.flax

K, SEED = 8, 0
UNDIVIDED, THEIRS, OURS = "undivided", "their accumulation", "ga_optax"
WAYS = (UNDIVIDED, THEIRS, OURS)


class Case(NamedTuple):
    """A loss of a trainer.

    Attributes:
      trainer: the distribution that has it, as the package index names it.
      name: which of its losses.
      ways: for each way, a function of no arguments that returns gradients, and bytes.
    """

    trainer: str
    name: str
    ways: dict[str, Callable[[], tuple[Any, int]]]


def compiled(fun: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """The results of a function, and the temporaries of the function's program."""
    program = jax.jit(fun).lower(*args).compile()
    memory: Any = program.memory_analysis()
    return program(*args), memory.temp_size_in_bytes


def part_of(tree: Any, i: int) -> Any:
    """The rows of a micro-batch, of leaves that have rows first."""
    return jax.tree.map(lambda x: x[i * len(x) // K : (i + 1) * len(x) // K], tree)


# -- Tunix -----------------------------------------------------------------------------

LENGTH, ANSWER = 64, 32


def tunix_cases(quick: bool) -> Iterator[Case]:
    """Preference tuning and reinforcement learning of a small Llama."""
    from tunix.rl import algo_core, common
    from tunix.rl.grpo import grpo_learner
    from tunix.sft.dpo import dpo_trainer

    rows = K if quick else 4 * K
    rng = np.random.default_rng(SEED)

    def tokens(length: int, shortest: int) -> tuple[Any, Any]:
        """Tokens, and which of them are real: at least so many from the left."""
        real = np.arange(length) < rng.integers(shortest, length + 1, (rows, 1))
        ids = np.where(real, rng.integers(2, 256, (rows, length)), 0)
        return jnp.asarray(ids, jnp.int32), jnp.asarray(real, jnp.int32)

    prompt, is_prompt = (jnp.flip(x, 1) for x in tokens(LENGTH - ANSWER, 4))
    chosen, rejected = tokens(ANSWER, 1), tokens(ANSWER, 1)

    def pairs(i: int | None) -> Any:
        """The trainer's input for pairs of answers, for all or for a micro-batch."""
        inputs = dpo_trainer.TrainingInput(*(prompt, is_prompt, *chosen, *rejected))
        inputs = inputs if i is None else part_of(inputs, i)
        tuning = dpo_trainer.DPOTrainer(
            llama(1 + SEED), llama(SEED), optax.sgd(1.0), dpo_config(dpo_trainer)
        )
        return tuning._prepare_inputs(inputs)

    for algorithm in ("dpo", "orpo"):
        loss = _loss_of(dpo_trainer.dpo_loss_fn, algorithm=algorithm)
        yield Case("google-tunix", algorithm.upper(), _of_modules(loss, pairs))

    answers = common.TrainExample(
        *(prompt, is_prompt, *chosen),
        advantages=jnp.asarray(rng.normal(size=rows), jnp.float32),
        ref_per_token_logps=jnp.asarray(-rng.random((rows, ANSWER)), jnp.float32),
        old_per_token_logps=None,
    )
    for mode in ("sequence-mean-token-mean", "token-mean"):
        config = grpo_learner.GRPOConfig(loss_agg_mode=mode)
        config.temperature = 1.0  # as a learner does, from its rollouts
        loss = _loss_of(algo_core.grpo_loss_fn, algo_config=config, pad_id=0, eos_id=1)
        ways = _of_modules(
            loss, lambda i: answers if i is None else part_of(answers, i)
        )
        yield Case("google-tunix", f"GRPO, {mode}", ways)


def _loss_of(fun: Any, **settings: Any) -> Any:
    """A loss of Tunix with the trainer's settings, for a model and a batch."""

    def loss(model: nnx.Module, train_example: Any) -> Any:
        return fun(model, train_example, **settings)

    return loss


def dpo_config(dpo_trainer: Any) -> Any:
    """The least that a trainer asks for."""
    return dpo_trainer.DPOTrainingConfig(eval_every_n_steps=1, max_steps=1)


def llama(seed: int) -> nnx.Module:
    """Tunix's Llama 3, made small."""
    from tunix.models.llama3 import model

    nothing = model.ShardingConfig(*[(None,) * 3] * 11)
    config = model.ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
        shd_config=nothing,
    )
    return model.Llama3(config, rngs=nnx.Rngs(seed))


def _of_modules(loss: Any, batch_of: Callable[[int | None], Any]) -> dict[str, Any]:
    """The ways of a trainer of modules, which hands a micro-batch to each call."""
    graph, params, rest = nnx.split(llama(1 + SEED), nnx.Param, ...)

    def gradient_by(value_and_grad: Any) -> Any:
        def gradient(params: Any, batch: Any) -> Any:
            model = nnx.merge(graph, params, rest)
            return value_and_grad(model, train_example=batch)[1]

        return gradient

    whole = gradient_by(nnx.value_and_grad(loss, has_aux=True))
    step = ga_optax.flax.value_and_grad(
        loss, K, has_aux=True, batch_argnums=(), batch_argnames="train_example"
    )

    def theirs() -> tuple[Any, int]:
        tx = optax.MultiSteps(optax.sgd(1.0), K)
        state, new, most = tx.init(params), params, 0
        for i in range(K):
            grads, size = compiled(whole, params, batch_of(i))
            updates, state = tx.update(grads, state, params)
            new, most = optax.apply_updates(new, updates), max(most, size)
        return jax.tree.map(jnp.subtract, params, new), most

    return {
        UNDIVIDED: lambda: compiled(whole, params, batch_of(None)),
        THEIRS: theirs,
        OURS: lambda: compiled(gradient_by(step), params, batch_of(None)),
    }


# -- Keras -----------------------------------------------------------------------------


def keras_cases(quick: bool) -> Iterator[Case]:
    """Batch normalisation, and padded sequences with `sample_weight`."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    rows, rng = (2 * K if quick else 64 * K), np.random.default_rng(SEED)
    images = jnp.asarray(rng.normal(size=(rows, 16, 16, 3)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 10, rows))
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    network = keras.Sequential(
        [
            layers.Input((16, 16, 3)),
            *(layers.Conv2D(16, 3, padding="same"), layers.BatchNormalization()),
            *(layers.ReLU(), layers.Conv2D(16, 3), layers.BatchNormalization()),
            *(layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(10)),
        ]
    )
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ways = _of_keras(network, cross_entropy, (images, labels, None))
    yield Case("keras", "batch normalisation", ways)

    length = 8 if quick else 64
    words = rng.integers(1, 500, (rows // 2, length + 1))
    real = np.arange(length) < rng.integers(1, length + 1, (rows // 2, 1))
    reader = keras.Sequential(
        [
            layers.Input((length,), dtype="int32"),
            *(layers.Embedding(500, 64), layers.GRU(64, return_sequences=True)),
            layers.Dense(500),
        ]
    )
    mean = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    batch = words[:, :-1], words[:, 1:], real.astype(np.float32)
    ways = _of_keras(reader, mean, jax.tree.map(jnp.asarray, batch))
    yield Case("keras", "padded tokens, sample_weight", ways)


def _of_keras(model: Any, loss: Any, batch: Any) -> dict[str, Any]:
    """The ways of Keras's trainer, which differentiates a function of the trainer."""
    import keras

    model.compile(loss=loss, optimizer=keras.optimizers.SGD(1.0))
    x, y, weight = batch
    model.train_on_batch(*(None if leaf is None else leaf[:2] for leaf in batch))
    start = [variable.value for variable in model.trainable_variables]
    state = [variable.value for variable in model.non_trainable_variables]
    metrics = [variable.value for variable in model.metrics_variables]
    memory = [variable.value for variable in model.optimizer.variables]

    def fun(params: Any, x: Any, y: Any, weight: Any) -> Any:
        loss, _ = model.compute_loss_and_updates(
            *(params, state, metrics, x, y, weight),
            training=True,
            optimizer_variables=memory,
        )
        return loss

    whole = jax.grad(fun)
    ours = ga.value_and_grad(fun, K, batch_argnums=(1, 2, 3))

    def theirs() -> tuple[Any, int]:
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=K)
        optimizer.build(model.trainable_variables)
        for variable, value in zip(model.trainable_variables, start, strict=True):
            variable.assign(value)
        most = 0
        for i in range(K):
            grads, size = compiled(whole, start, *part_of((x, y, weight), i))
            optimizer.apply(grads, model.trainable_variables)
            most = max(most, size)
        new = [variable.value for variable in model.trainable_variables]
        return [a - b for a, b in zip(start, new, strict=True)], most

    return {
        UNDIVIDED: lambda: compiled(whole, start, x, y, weight),
        THEIRS: theirs,
        OURS: lambda: compiled(lambda *xs: ours(*xs)[1], start, x, y, weight),
    }


# -- big_vision ------------------------------------------------------------------------


def big_vision_cases(quick: bool) -> Iterator[Case]:
    """SigLIP: pairs of images and texts, each told from all others of the batch."""
    from big_vision import utils
    from big_vision.models.proj.image_text import two_towers

    rows, rng = (K if quick else 16 * K), np.random.default_rng(SEED)
    images = jnp.asarray(rng.normal(size=(rows, 32, 32, 3)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 500, (rows, 16)), jnp.int32)
    tower = {"width": 64, "depth": 4, "mlp_dim": 256, "num_heads": 4}
    model = two_towers.Model(
        image={**tower, "patch_size": (4, 4), "head_zeroinit": False},
        text={**tower, "vocab_size": 500},
        out_dim=64,
        temperature_init=10.0,
        bias_init=-10.0,
    )
    params = model.init(jax.random.key(SEED), images[:1], labels[:1])["params"]

    def loss(params: Any, images: Any, labels: Any) -> Any:
        """The loss of the trainer for SigLIP, whose step closes over the batch."""
        image, text, extras = model.apply({"params": params}, images, labels)
        logits = jnp.dot(image, text.T) * extras["t"] + extras["b"]
        sign = -jnp.ones_like(logits) + 2 * jnp.eye(image.shape[0])
        return jnp.mean(-jnp.sum(jax.nn.log_sigmoid(sign * logits), axis=-1))

    whole = jax.value_and_grad(loss)
    gradients = {
        UNDIVIDED: whole,
        THEIRS: lambda *args: utils.accumulate_gradient(whole, *args, K),
        OURS: ga.value_and_grad(loss, K, batch_argnums=(1, 2)),
    }

    def way(fun: Any) -> Callable[[], tuple[Any, int]]:
        return lambda: compiled(lambda *xs: fun(*xs)[1], params, images, labels)

    ways = {name: way(fun) for name, fun in gradients.items()}
    yield Case("big_vision", "SigLIP", ways)


# -- MaxText ---------------------------------------------------------------------------


def maxtext_cases(quick: bool) -> Iterator[Case]:
    """A mixture of experts with padded rows: a mean over tokens, and a balance term."""
    from flax.core.spmd import logical_axis_rules
    from maxtext.trainers.pre_train import train
    from maxtext.utils import gradient_accumulation, maxtext_utils, model_creation_utils

    rows, length, rng = (K if quick else 8 * K), 64, np.random.default_rng(SEED)
    config = maxtext_config(rows, 1)
    devices = maxtext_utils.create_device_mesh(config)
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(SEED))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    ids = rng.integers(1, 512, (rows, length + 1))
    place = np.broadcast_to(np.arange(length), (rows, length))
    real = place < rng.integers(1, length + 1, (rows, 1))
    sides = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    batch = {
        name + suffix: jnp.asarray(leaf, jnp.int32)
        for name, ids in sides.items()
        for suffix, leaf in {"": ids, "_position": place, "_segmentation": real}.items()
    }

    def loss(model: nnx.Module, batch: Any) -> Any:
        return train.loss_fn(model, config, dict(batch), None, None)

    def theirs(model: nnx.Module, batch: Any) -> Any:
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        *out, grads = gradient_accumulation.gradient_accumulation_loss_and_grad(
            *(train.loss_fn, maxtext_config(rows, K), model, None),
            *(jax.tree.map(lambda x: whole, params), dict(batch), None),
        )
        return out, grads

    def way(fun: Any) -> Callable[[], tuple[Any, int]]:
        def gradient(params: Any, batch: Any) -> Any:
            return fun(nnx.merge(graph, params, rest, copy=True), batch)[1]

        def run() -> tuple[Any, int]:
            rules = logical_axis_rules(config.logical_axis_rules)
            with jax.set_mesh(mesh), rules:
                return compiled(gradient, params, batch)

        return run

    yield Case(
        "maxtext",
        "mixture of experts, padded tokens",
        {
            UNDIVIDED: way(nnx.value_and_grad(loss, has_aux=True)),
            THEIRS: way(theirs),
            OURS: way(ga_optax.flax.value_and_grad(loss, K, has_aux=True)),
        },
    )


def maxtext_config(rows: int, accumulation: int) -> Any:
    """A small Mixtral, for so many rows in so many micro-batches."""
    import maxtext
    from maxtext.configs import pyconfig

    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    settings = {
        "run_name": "small",
        "enable_checkpointing": False,
        "log_config": False,
        "skip_jax_distributed_system": True,
        "hardware": "cpu",
        "decoder_block": "mixtral",
        "base_num_decoder_layers": 2,
        "base_emb_dim": 64,
        "base_mlp_dim": 128,
        "base_moe_mlp_dim": 128,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 4,
        "head_dim": 16,
        "vocab_size": 512,
        "max_target_length": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "load_balance_loss_weight": 0.01,
        "sparse_matmul": False,
        "megablox": False,
        "capacity_factor": -1.0,
        "attention": "dot_product",
        "dtype": "float32",
        "weight_dtype": "float32",
        "enable_dropout": False,
        "per_device_batch_size": rows // accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    return pyconfig.initialize(["", str(base)], **settings)


# -- The table -------------------------------------------------------------------------

TRAINERS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "tunix": tunix_cases,
    "keras": keras_cases,
    "maxtext": maxtext_cases,
    "big_vision": big_vision_cases,
}


def version_of(trainer: str) -> str:
    """The installed version, or "(a checkout)"."""
    try:
        return importlib.metadata.version(trainer)
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout)"


def measure(case: Case) -> dict[str, Any]:
    """The error of each way's gradient, and the bytes of the program."""
    results = {way: case.ways[way]() for way in WAYS}

    def flat(grads: Any) -> Any:
        leaves = jax.tree.leaves(grads)
        return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])

    exact = flat(results[UNDIVIDED][0])
    return {
        "trainer": case.trainer,
        "version": version_of(case.trainer),
        "loss": case.name,
        "off": {
            way: float(np.linalg.norm(flat(results[way][0]) - exact))
            / float(np.linalg.norm(exact))
            for way in WAYS[1:]
        },
        "megabytes": {way: results[way][1] / 1e6 for way in WAYS},
    }


def show(results: list[dict[str, Any]]) -> None:
    """Prints the table."""
    columns = ["trainer", "loss", *(f"off, {way}" for way in WAYS[1:])]
    record.print_table(
        [*columns, *(f"MB, {way}" for way in WAYS)],
        [
            [
                f"{row['trainer']} {row['version']}",
                row["loss"],
                *(f"{row['off'][way]:.1e}" for way in WAYS[1:]),
                *(f"{row['megabytes'][way]:.1f}" for way in WAYS),
            ]
            for row in results
        ],
    )


def main() -> None:
    """Prints the table."""
    args = record.make_parser(__doc__).parse_args()
    results = [
        measure(case)
        for module, cases in TRAINERS.items()
        if importlib.util.find_spec(module) is not None
        for case in cases(args.quick)
    ]
    if not results:
        raise SystemExit("None of google-tunix and keras is installed.")
    show(results)
    content = {"num_microbatches": K, "results": results}
    record.write(args.json, content)


if __name__ == "__main__":
    main()
