"""The command line: the questions that you can ask without writing a program.

    python -m ga_optax verify package.module:loss package.module:make_inputs -k 4
    python -m ga_optax plan package.module:make_step package.module:make_inputs
    python -m ga_optax audit module.after_optimizations.txt

`_add_<command>` says what a command takes, and `_<command>` answers with a page and
whether it is good news. The exit status is 0 for good news and 1 for bad. It is 2 if
there is no answer, because an argument is wrong or because the user's code raised.
"""

import argparse
import importlib
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._audit import audit
from ga_optax._plan import NothingFitsError, parse_bytes, plan
from ga_optax._verify import verify

_DESCRIPTION = """\
Gradient accumulation for JAX and Optax: questions that you can ask about your own code.

  verify   Is the gradient over micro-batches the gradient of the undivided batch?
           If not, why not, and which line of code fixes it?
  plan     How many micro-batches does the step need to fit into memory?
  audit    What does a compiled step communicate, and how often?
"""

_VERIFY = """\
Compares the gradient of your loss over one batch with the gradient accumulated over the
same rows in micro-batches. Prints what is wrong, how large the difference is, and the
line of code that fixes it.

Your module needs two functions, with any names:

    def loss(params, batch):         # or loss(params, batch, key)
        ...
        return jnp.mean(...)         # a scalar

    def make_inputs():
        return params, batch         # or params, batch, key

params is a tree of arrays. batch is a tree of arrays whose axis 0 is the rows. Real
parameters and a real batch tell the most. If both functions are in train.py, run:

    python -m ga_optax verify train:loss train:make_inputs --num-microbatches 4
"""

_PLAN = """\
Compiles your step for several numbers of micro-batches, without running it. Prints the
fewest that fit into the memory of a device, and a table of what each of them needs.

Your module needs two functions, with any names:

    def make_step(num_microbatches):
        ...
        return jax.jit(step, donate_argnums=(0, 1))

    def make_inputs():
        return params, state, batch  # the arguments of step, the batch last

The arguments are arrays, or the jax.ShapeDtypeStruct that jax.eval_shape returns, which
take no memory. If both functions are in train.py, run:

    python -m ga_optax plan train:make_step train:make_inputs --memory-limit 16GiB
"""

_AUDIT = """\
Reads a compiled program and prints its collectives: what crosses the network, how many
bytes on each device, and whether it is in a loop.

The file holds optimised HLO. Write it from Python, or let XLA dump all programs:

    compiled = jax.jit(step).lower(*arguments).compile()
    pathlib.Path("step.txt").write_text(compiled.as_text())

    XLA_FLAGS=--xla_dump_to=hlo python train.py   # *after_optimizations.txt

Then run:

    python -m ga_optax audit step.txt
"""

_STATUS = """\
exit status:
  0  {good}
  1  {bad}
  2  {failed}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ga_optax",
        description=_DESCRIPTION,
        epilog="python -m ga_optax COMMAND --help says more about a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_verify, _add_plan, _add_audit):
        add(commands)
    # The user's modules are in the current directory, as for a script.
    if "" not in sys.path:
        sys.path.insert(0, "")
    arguments = parser.parse_args(argv)
    try:
        page, good = arguments.run(arguments)
    except argparse.ArgumentTypeError as wrong:
        arguments.error(str(wrong))
    except Exception:
        traceback.print_exc()
        return 2
    print(page)
    return 0 if good else 1


# -- The commands ----------------------------------------------------------------------


def _add_verify(commands: Any) -> None:
    add = _command(
        commands,
        _verify,
        "is it the same gradient, and if not, why not?",
        _VERIFY,
        good="the gradients are equal, or differ only by rounding",
        bad="they differ; the page says why",
        failed="they could not be compared: an argument is wrong, or your code raised",
    )
    add(
        "loss",
        metavar="MODULE:LOSS",
        type=_function,
        help="the loss, loss(params, batch) or loss(params, batch, key)",
    )
    add(
        "make_inputs",
        metavar="MODULE:MAKE_INPUTS",
        type=_function,
        help="a function without arguments that returns (params, batch[, key])",
    )
    add(
        "-k",
        "--num-microbatches",
        type=int,
        required=True,
        metavar="K",
        help="the number of micro-batches; it must divide the rows of the batch",
    )
    add(
        "--weight-fn",
        metavar="MODULE:FUNCTION",
        type=_function,
        help="a function of a micro-batch that returns its weight, such as how many of "
        "its tokens are not padding; by default, all micro-batches weigh the same",
    )
    add(
        "--has-aux",
        action="store_true",
        help="the loss returns a pair (loss, anything else)",
    )


def _verify(arguments: argparse.Namespace) -> tuple[Any, bool]:
    expected = "(params, batch) or (params, batch, key)"
    params, batch, *rng = _inputs(arguments, expected, range(2, 4))
    report = verify(
        arguments.loss,
        params,
        batch,
        arguments.num_microbatches,
        weight_fn=arguments.weight_fn,
        has_aux=arguments.has_aux,
        rng=rng[0] if rng else None,
    )
    return report, report.ok


def _add_plan(commands: Any) -> None:
    add = _command(
        commands,
        _plan,
        "how many micro-batches does the step need to fit into memory?",
        _PLAN,
        good="the page names the fewest micro-batches that fit",
        bad="nothing fits; the page says how much memory the smallest need is",
        failed="there is no plan: an argument is wrong, or your code raised",
    )
    add(
        "make_step",
        metavar="MODULE:MAKE_STEP",
        type=_function,
        help="a function of the number of micro-batches that returns a jitted step",
    )
    add(
        "make_inputs",
        metavar="MODULE:MAKE_INPUTS",
        type=_function,
        help="a function without arguments that returns the arguments of the step",
    )
    add(
        "--memory-limit",
        metavar="BYTES",
        type=_size,
        help="the memory of one device, such as 16GiB; by default, the memory that the "
        "device reports, but a CPU reports none",
    )
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="examples in a batch; by default, the length of axis 0 of the last "
        "argument",
    )
    add(
        "--candidates",
        type=int,
        nargs="+",
        metavar="K",
        help="the numbers of micro-batches to choose from; by default, all divisors of "
        "the batch size",
    )


def _plan(arguments: argparse.Namespace) -> tuple[Any, bool]:
    inputs = _inputs(arguments, "the arguments of the step", range(1, sys.maxsize))
    batch_size = arguments.batch_size
    if batch_size is None:
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(inputs[-1])}
        if len(rows) != 1 or rows == {()}:
            raise argparse.ArgumentTypeError(
                "the batch size must be known, but the leaves of the last argument "
                "that MAKE_INPUTS returned have no common axis 0. Pass --batch-size."
            )
        ((batch_size,),) = rows
    try:
        found = plan(
            arguments.make_step,
            *inputs,
            batch_size=batch_size,
            memory_limit=arguments.memory_limit,
            candidates=arguments.candidates,
        )
    except NothingFitsError as page:
        return page, False
    return found, True


def _add_audit(commands: Any) -> None:
    add = _command(
        commands,
        _audit,
        "what does a compiled step communicate, and how often?",
        _AUDIT,
        good="no collective is in a loop",
        bad="some are; the last lines say what that means",
        failed="there is nothing to read: the file is missing, or is not optimised HLO",
    )
    add("file", metavar="FILE", type=pathlib.Path, help="optimised HLO text")


def _audit(arguments: argparse.Namespace) -> tuple[Any, bool]:
    try:
        found = audit(arguments.file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        message = f"cannot read {arguments.file}: {wrong}"
        raise argparse.ArgumentTypeError(message) from None
    return found, not found.in_loop


# -- What they share -------------------------------------------------------------------


def _command(
    commands: Any,
    run: Callable[[argparse.Namespace], tuple[Any, bool]],
    question: str,
    description: str,
    **status: str,
) -> Callable[..., Any]:
    """Adds a command, named as the function that runs it; returns `add_argument`."""
    parser = commands.add_parser(
        run.__name__.removeprefix("_"),
        help=question,
        description=description,
        epilog=_STATUS.format(**status),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, error=parser.error)
    return parser.add_argument


def _inputs(
    arguments: argparse.Namespace, expected: str, lengths: range
) -> tuple[Any, ...]:
    """What MAKE_INPUTS returns: a tuple of one of these lengths."""
    inputs = arguments.make_inputs()
    if isinstance(inputs, (tuple, list)) and len(inputs) in lengths:
        return tuple(inputs)
    size = f" and length {len(inputs)}" if isinstance(inputs, (tuple, list)) else ""
    raise argparse.ArgumentTypeError(
        f"MAKE_INPUTS must return {expected}, but it returned a value of type "
        f"{type(inputs).__name__}{size}. Return a tuple of those."
    )


def _size(text: str) -> int:
    """The bytes that an argument such as "16GiB" says."""
    try:
        return parse_bytes(text)
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None


def _function(name: str) -> Callable[..., Any]:
    """The function that an argument "module:function" names."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise argparse.ArgumentTypeError(
            f"functions are named MODULE:FUNCTION, but {name!r} is not. For loss in "
            "train.py, write train:loss."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = getattr(error, "name", None)
        # A module that the user's module imports deserves its traceback.
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{missing}."
        ):
            raise argparse.ArgumentTypeError(
                f"there must be a module {module_name!r} for {name!r}, but Python finds "
                f"no {missing!r}. Run this in the directory that holds it, or install "
                "it."
            ) from None
        traceback.print_exc()
        raise SystemExit(2) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise argparse.ArgumentTypeError(
                f"module {module_name!r} has no {attribute!r}. Check the name."
            )
        found = getattr(found, part)
    if not callable(found):
        raise argparse.ArgumentTypeError(
            f"{name!r} must be a function, but it is a {type(found).__name__}. Name "
            "the function, not its value."
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
