"""The command line: the questions that you can ask without writing a program.

    ga-optax verify package.module:loss package.module:make_inputs -k 4
    ga-optax plan package.module:make_step package.module:make_inputs
    ga-optax audit module.after_optimizations.txt

`python -m ga_optax` is the same. A command is a function in `_COMMANDS` that returns
what to print, and the exit status. Its docstring is its help: the first line stands in
the list of commands, and what begins with "exit status:" stands below the arguments.
The exit status is 0 for good news and 1 for bad. It is 2 if there is no answer, because
an argument is wrong, the user's code raised, or the numbers cannot be compared.
"""

import argparse
import ast
import dataclasses
import difflib
import enum
import importlib
import importlib.metadata
import inspect
import json
import math
import operator
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._checks import one_of
from ga_optax._compiled.audit import audit
from ga_optax._compiled.plan import NothingFitsError, parse_bytes, plan
from ga_optax._verify import verify

Answer = tuple[object, int]
_INPUTS = "MODULE:MAKE_INPUTS"


class _Version(argparse.Action):
    """Looks the version up if asked: a copy that is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("ga-optax", importlib.metadata.version("ga-optax"))
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="ga-optax",
        description="Gradient accumulation: questions to ask about your own code.",
        epilog="ga-optax COMMAND --help says more about a command.",
        formatter_class=layout,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (run, add_arguments) in _COMMANDS.items():
        question, _, page = (inspect.getdoc(run) or "").partition("\n\n")
        description, mark, status = page.partition("exit status:")
        command = commands.add_parser(
            name,
            help=question[:1].lower() + question[1:],
            description=description,
            epilog=mark + status,
            formatter_class=layout,
        )
        command.set_defaults(run=run, error=command.error)
        add_arguments(command.add_argument)
        as_json = "print the answer as JSON, for other programs"
        command.add_argument("--json", action="store_true", help=as_json)
    # The user's modules are in the current directory, as for a script.
    if "" not in sys.path:
        sys.path.insert(0, "")
    arguments = parser.parse_args(argv)
    try:
        page, status = arguments.run(arguments)
    except Exception as error:
        if _is_about_an_argument(error):
            return arguments.error(str(error))  # exits with status 2
        traceback.print_exc()
        return 2
    print(_json(page) if arguments.json else page)
    return status


def _is_about_an_argument(error: Exception) -> bool:
    """Whether a check of ours raised it, with no code of the user's in between."""
    here = str(pathlib.Path(__file__).parent)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    ours = all(frame.f_code.co_filename.startswith(here) for frame in frames)
    checked = isinstance(error, (ValueError, TypeError)) and error.__cause__ is None
    return ours and checked


def _json(page: object) -> str:
    """The fields and the properties of a page as JSON; null for a NaN."""

    def plain(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, Exception):
            return {"message": str(value)}
        names = [field.name for field in dataclasses.fields(value)]
        names += [n for n, x in vars(type(value)).items() if isinstance(x, property)]
        return {name: getattr(value, name) for name in names}

    text = json.dumps(page, default=plain)
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2)


# -- The commands ----------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> Answer:
    """Do micro-batches, each by itself, give the gradient of the batch, or why not?

    Compares the gradient of your loss over one batch with the gradient accumulated over
    the same rows in micro-batches. Prints what is wrong, how large the difference is,
    and the line of code that fixes it.

    Your module needs two functions, with any names:

        def loss(params, batch):         # or loss(params, batch, key)
            ...
            return jnp.mean(...)         # a scalar

        def make_inputs():
            return params, batch         # or params, batch, key

    params is a tree of arrays. batch is a tree of arrays whose axis 0 is the rows. Real
    parameters and a real batch tell the most. If both functions are in train.py, run:

        ga-optax verify train:loss train:make_inputs --num-microbatches 4

    exit status:
      0  the gradients are equal, or differ only by rounding
      1  they differ; the page says why
      2  they cannot be compared: a number is not finite, an argument is wrong, or
         your code raised
    """
    loss = _function(arguments.loss)
    weight_fn = arguments.weight_fn and _function(arguments.weight_fn)
    inputs = _inputs(arguments, "(params, batch) or (params, batch, key)", (2, 3))
    params, batch, rng = (*inputs, None)[:3]
    options = {"has_aux": arguments.has_aux, "batch_axes": arguments.batch_axes}
    options |= {"weight_fn": weight_fn, "rng": rng}
    report = verify(loss, params, batch, arguments.num_microbatches, **options)
    return report, 2 if math.isnan(report.relative) else int(not report.ok)


def _verify_arguments(add: Callable[..., Any]) -> None:
    add("loss", metavar="MODULE:LOSS", help="the loss, of (params, batch[, key])")
    add("make_inputs", metavar=_INPUTS, help="a function that returns those arguments")
    number = "the number of micro-batches; it must divide the rows of the batch"
    names = ("-k", "--num-microbatches")
    add(*names, type=int, required=True, metavar="K", help=number)
    weight = (
        "a function of a micro-batch (and of the aux, with --has-aux) that returns its "
        "weight, such as how many of its tokens are not padding; by default, all weigh "
        "the same"
    )
    add("--weight-fn", metavar="MODULE:FUNCTION", help=weight)
    add("--has-aux", action="store_true", help="the loss returns (loss, anything else)")
    split = (
        "which axis of the leaves is split, as in Python: 1, None for whole ones, or "
        "\"{'x': 1, 'y': 0}\"; default: 0"
    )
    add("--batch-axes", type=_literal, default=0, metavar="AXES", help=split)


def _literal(text: str) -> Any:
    """What a Python literal stands for."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        what = f"it must be as Python writes it, such as 1, but it is {text!r}"
        raise argparse.ArgumentTypeError(what) from None


def _plan(arguments: argparse.Namespace) -> Answer:
    """How many micro-batches does the step need to fit into memory?

    Compiles your step for several numbers of micro-batches, without running it. Prints
    the fewest that fit into the memory of a device, and a table of what each of them
    needs.

    Your module needs two functions, with any names:

        def make_step(num_microbatches):
            ...
            return jax.jit(step, donate_argnums=(0, 1))

        def make_inputs():
            return params, state, batch  # the arguments of step, the batch last

    The arguments are arrays, or the jax.ShapeDtypeStruct that jax.eval_shape returns,
    which take no memory. If both functions are in train.py, run:

        ga-optax plan train:make_step train:make_inputs --memory-limit 16GiB

    exit status:
      0  the page names the fewest micro-batches that fit
      1  nothing fits; the page says how much memory the smallest need is
      2  there is no plan: an argument is wrong, or your code raised
    """
    make_step, limit = _function(arguments.make_step), arguments.memory_limit
    limit = limit and parse_bytes(limit)
    inputs = _inputs(arguments, "the arguments of the step")
    batch_size = arguments.batch_size
    if batch_size is None:
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(inputs[-1])}
        if len(rows) != 1 or rows == {()}:
            raise ValueError(
                "the batch size must be known, but the leaves of the last argument of "
                "the step have no common axis 0. Pass --batch-size."
            )
        [[batch_size]] = rows
    options = {name: getattr(arguments, name) for name in ("candidates", "target")}
    options |= {"batch_size": batch_size, "memory_limit": limit}
    try:
        return plan(make_step, *inputs, **options), 0
    except NothingFitsError as page:
        return page, 1


def _plan_arguments(add: Callable[..., Any]) -> None:
    make_step = "a function of the number of micro-batches that returns a jitted step"
    add("make_step", metavar="MODULE:MAKE_STEP", help=make_step)
    inputs = "a function without arguments that returns the arguments of the step"
    add("make_inputs", metavar=_INPUTS, help=inputs)
    machine = 'a machine that is not here, such as "h100", "h100:8" or "v5e:2x4"'
    add("--target", metavar="NAME", help=machine)
    limit = "the memory of one device, such as 16GiB; by default that of the target, or"
    add("--memory-limit", metavar="BYTES", help=f"{limit} what the device reports")
    rows = "examples in a batch; by default, the length of axis 0 of the last argument"
    add("--batch-size", type=int, metavar="N", help=rows)
    numbers = "numbers of micro-batches to choose from; by default, all divisors of N"
    add("--candidates", type=int, nargs="+", metavar="K", help=numbers)


def _audit(arguments: argparse.Namespace) -> Answer:
    """What does a compiled step communicate, and how often?

    Reads a compiled program and prints its collectives: what crosses the network, how
    many bytes on each device, and whether it is in a loop.

    The file holds optimised HLO. Write it from Python, or let XLA dump all programs:

        compiled = jax.jit(step).lower(*arguments).compile()
        pathlib.Path("step.txt").write_text(compiled.as_text())

        XLA_FLAGS=--xla_dump_to=hlo python train.py   # *after_optimizations.txt

    Then run:

        ga-optax audit step.txt

    exit status:
      0  no collective is in a loop
      1  some are; the last lines say what that means
      2  there is nothing to read: the file is missing, or is not optimised HLO
    """
    try:
        found = audit(pathlib.Path(arguments.file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise ValueError(f"cannot read {arguments.file}: {wrong}") from None
    return found, int(bool(found.in_loop))


def _audit_arguments(add: Callable[..., Any]) -> None:
    add("file", metavar="FILE", help="optimised HLO text")


_COMMANDS = {
    "verify": (_verify, _verify_arguments),
    "plan": (_plan, _plan_arguments),
    "audit": (_audit, _audit_arguments),
}


# -- The user's code -------------------------------------------------------------------


def _function(name: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module_name, _, attribute = name.partition(":")
    path = pathlib.PurePath(module_name)
    if not (module_name and attribute) or path.suffix == ".py" or len(path.parts) > 1:
        module, function = path.stem or "train", attribute or "loss"
        raise ValueError(
            f"functions are named MODULE:FUNCTION, but {name!r} is not. Write "
            f"{module}:{function} for {function} in {module}.py, and run this in the "
            "directory that holds it."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        # A module that the user's module imports deserves its traceback.
        if not f"{module_name}.".startswith(f"{missing.name}."):
            raise
        raise ValueError(
            f"there must be a module {module_name!r} for {name!r}, but Python finds no "
            f"{missing.name!r}. Run this in the directory that holds it, or install it."
        ) from None
    try:
        found = operator.attrgetter(attribute)(found)
    except AttributeError as missing:
        names = [x for x in dir(missing.obj) if not x.startswith("_")]
        close = one_of(difflib.get_close_matches(str(missing.name), names))
        todo = f"Did you mean {close}?" if close else "Check the name."
        raise ValueError(
            f"{name!r} must name a function, but {missing}. {todo}"
        ) from None
    if not callable(found):
        raise ValueError(
            f"{name!r} must be a function, but it is of type {type(found).__name__}. "
            "Name the function, not its value."
        )
    return found


def _inputs(
    arguments: argparse.Namespace, expected: str, lengths: tuple[int, ...] = ()
) -> tuple[Any, ...]:
    """What make_inputs returns: a tuple that is not empty, of one of these lengths."""
    inputs = _function(arguments.make_inputs)()
    what = f"a value of type {type(inputs).__name__}"
    if isinstance(inputs, (tuple, list)):
        if inputs and (not lengths or len(inputs) in lengths):
            return tuple(inputs)
        what += f" and length {len(inputs)}"
    raise ValueError(
        f"{arguments.make_inputs} must return {expected}, but it returned {what}. "
        "Return a tuple of those."
    )


if __name__ == "__main__":
    sys.exit(main())
