"""The command line: the questions that need no code of their own.

    python -m ga_optax verify package.module:loss package.module:make_inputs -k 4
    python -m ga_optax plan package.module:make_step package.module:make_inputs
    python -m ga_optax audit module.after_optimizations.txt

Each command is a function that adds its parser, with the function that runs it as the
default of `run`; `_COMMANDS` lists them.
"""

import argparse
import importlib
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from ga_optax._audit import audit
from ga_optax._plan import NothingFitsError, parse_bytes, plan
from ga_optax._verify import verify

_DESCRIPTION = """\
Gradient accumulation for JAX and Optax: questions that you can ask of your own code.

  verify   Is the gradient over micro-batches that of the undivided batch?
           If not, why not, and which line mends it?
  plan     How many micro-batches does the step need to fit into memory?
  audit    What does a compiled step communicate, and how often?
"""

_VERIFY = """\
Compares the gradient of your loss over one batch with the gradient accumulated over the
same rows in micro-batches, and prints a page: what is wrong, how large it is, and the
line of code that mends it.

Your module needs two functions (any names will do):

    def loss(params, batch):         # or loss(params, batch, key)
        ...
        return jnp.mean(...)         # a scalar

    def make_inputs():
        return params, batch         # or params, batch, key

where params is a tree of arrays, and batch a tree of arrays whose axis 0 are the rows.
Real parameters and one real batch tell the most. If both are in train.py, here:

    python -m ga_optax verify train:loss train:make_inputs --num-microbatches 4
"""

_VERIFY_END = """\
exit status:
  0  the gradients are equal, or differ by rounding alone
  1  they differ; the page says why
  2  they could not be compared: an argument is wrong, or your code raised
"""

_PLAN = """\
Compiles your step for several numbers of micro-batches, runs none of them, and prints
the fewest that fit into the memory of a device, with a table of what each one needs.

Your module needs two functions (any names will do):

    def make_step(num_microbatches):
        ...
        return jax.jit(step, donate_argnums=(0, 1))

    def make_inputs():
        return params, state, batch  # the arguments of step, the batch last

where the arguments are arrays, or jax.ShapeDtypeStruct, which take no memory, such as
jax.eval_shape returns. If both are in train.py, here:

    python -m ga_optax plan train:make_step train:make_inputs --memory-limit 16GiB
"""

_PLAN_END = """\
exit status:
  0  the page names the fewest micro-batches that fit
  1  nothing fits; the page says how much memory the smallest needs
  2  there is no plan: an argument is wrong, or your code raised
"""


_AUDIT = """\
Reads a compiled program and prints its collectives: what crosses the network, how many
bytes on each device, and whether it stands in a loop.

The file holds optimised HLO. Write it from Python, or let XLA dump all programs:

    compiled = jax.jit(step).lower(*arguments).compile()
    pathlib.Path("step.txt").write_text(compiled.as_text())

    XLA_FLAGS=--xla_dump_to=hlo python train.py   # *after_optimizations.txt

Then:

    python -m ga_optax audit step.txt
"""

_AUDIT_END = """\
exit status:
  0  no collective stands in a loop
  1  some do; the last lines say what to make of it
  2  there is nothing to read: the file is missing, or is no optimised HLO
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ga_optax",
        description=_DESCRIPTION,
        epilog="python -m ga_optax COMMAND --help says more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in _COMMANDS:
        add(commands)
    # Code in the directory where it is called, as with a script.
    if "" not in sys.path:
        sys.path.insert(0, "")
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="is it the same gradient, and if not, why not?",
        description=_VERIFY,
        epilog=_VERIFY_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "loss",
        metavar="MODULE:LOSS",
        help="the loss, loss(params, batch) or loss(params, batch, key)",
    )
    parser.add_argument(
        "make_inputs",
        metavar="MODULE:MAKE_INPUTS",
        help="a function without arguments that returns (params, batch[, key])",
    )
    parser.add_argument(
        "-k",
        "--num-microbatches",
        type=int,
        required=True,
        metavar="K",
        help="into how many micro-batches to split the batch; it must divide the rows",
    )
    parser.add_argument(
        "--weight-fn",
        metavar="MODULE:FUNCTION",
        help="a function of one micro-batch that returns its weight, such as the "
        "number of its tokens that are not padding; left out, all count the same",
    )
    parser.add_argument(
        "--has-aux",
        action="store_true",
        help="the loss returns a pair (loss, anything else)",
    )
    parser.set_defaults(run=_verify, error=parser.error)


def _verify(arguments: argparse.Namespace) -> int:
    """Prints the page of `verify`."""
    error = arguments.error
    loss = _named(arguments.loss, error)
    make_inputs = _named(arguments.make_inputs, error)
    weight_fn = arguments.weight_fn and _named(arguments.weight_fn, error)
    try:
        inputs = make_inputs()
    except Exception:
        # The page was not reached; 1 would say that the gradients differ.
        traceback.print_exc()
        return 2
    if not isinstance(inputs, (tuple, list)) or len(inputs) not in (2, 3):
        what = f"a {type(inputs).__name__}"
        if isinstance(inputs, (tuple, list)):
            what += f" of {len(inputs)}"
        error(
            f"{arguments.make_inputs} must return (params, batch) or (params, batch, "
            f"key), but it returned {what}. Return a tuple of those."
        )
    params, batch, *rng = inputs
    try:
        report = verify(
            loss,
            params,
            batch,
            arguments.num_microbatches,
            weight_fn=weight_fn,
            has_aux=arguments.has_aux,
            rng=rng[0] if rng else None,
        )
    except Exception:
        traceback.print_exc()
        return 2
    print(report)
    return 0 if report.ok else 1


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="how many micro-batches does the step need to fit into memory?",
        description=_PLAN,
        epilog=_PLAN_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "make_step",
        metavar="MODULE:MAKE_STEP",
        help="a function of the number of micro-batches that returns a jitted step",
    )
    parser.add_argument(
        "make_inputs",
        metavar="MODULE:MAKE_INPUTS",
        help="a function without arguments that returns the arguments of the step",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="BYTES",
        help="the memory of one device, such as 16GiB; left out, the device's own, "
        "which a CPU has not",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="examples in a batch; left out, the length of axis 0 of the last argument",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        nargs="+",
        metavar="K",
        help="the numbers of micro-batches to choose from; left out, all divisors of "
        "the batch size",
    )
    parser.set_defaults(run=_plan, error=parser.error)


def _plan(arguments: argparse.Namespace) -> int:
    """Prints the page of `plan`."""
    error = arguments.error
    make_step = _named(arguments.make_step, error)
    make_inputs = _named(arguments.make_inputs, error)
    if arguments.memory_limit is not None:
        try:
            parse_bytes(arguments.memory_limit)
        except ValueError as wrong:
            error(str(wrong))
    try:
        inputs = make_inputs()
    except Exception:
        # The page was not reached; 1 would say that nothing fits.
        traceback.print_exc()
        return 2
    if not isinstance(inputs, (tuple, list)) or not inputs:
        error(
            f"{arguments.make_inputs} must return the arguments of the step, but it "
            f"returned a {type(inputs).__name__}. Return a tuple of them."
        )
    batch_size = arguments.batch_size
    if batch_size is None:
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(inputs[-1])}
        if len(rows) != 1 or rows == {()}:
            error(
                "the batch size must be known, but the leaves of the last argument "
                f"that {arguments.make_inputs} returned have no common axis 0. Pass "
                "--batch-size."
            )
        ((batch_size,),) = rows
    try:
        found = plan(
            make_step,
            *inputs,
            batch_size=batch_size,
            memory_limit=arguments.memory_limit,
            candidates=arguments.candidates,
        )
    except NothingFitsError as page:
        print(page)
        return 1
    except Exception:
        traceback.print_exc()
        return 2
    print(found)
    return 0


def _add_audit(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="what does a compiled step communicate, and how often?",
        description=_AUDIT,
        epilog=_AUDIT_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="optimised HLO text")
    parser.set_defaults(run=_audit, error=parser.error)


def _audit(arguments: argparse.Namespace) -> int:
    """Prints the table of `audit`."""
    error: Callable[[str], NoReturn] = arguments.error
    try:
        text = pathlib.Path(arguments.file).read_text(encoding="utf-8")
        found = audit(text)
    except (OSError, ValueError) as wrong:
        error(f"cannot read {arguments.file}: {wrong}")
    print(found)
    return 1 if found.in_loop else 0


def _named(name: str, error: Callable[[str], NoReturn]) -> Callable[..., Any]:
    """The function called "module:function", or a message for the one who typed it."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        error(
            f"functions are named MODULE:FUNCTION, but {name!r} is not. For loss in "
            "train.py, write train:loss."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        # Not a module that the user's module imports: that deserves its traceback.
        if missing.name is None or not f"{module_name}.".startswith(f"{missing.name}."):
            traceback.print_exc()
            raise SystemExit(2) from None
        error(
            f"there must be a module {module_name!r} for {name!r}, but Python finds no "
            f"{missing.name!r}. Run this in the directory that holds it, or install it."
        )
    except Exception:
        traceback.print_exc()
        raise SystemExit(2) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            error(f"module {module_name!r} has no {attribute!r}. Check the name.")
        found = getattr(found, part)
    if not callable(found):
        error(
            f"{name!r} must be a function, but it is a {type(found).__name__}. Name "
            "the function, not its value."
        )
    return found


_COMMANDS = (_add_verify, _add_plan, _add_audit)

if __name__ == "__main__":
    sys.exit(main())
