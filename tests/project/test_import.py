"""Importing the package changes nothing in JAX."""

from helpers import ROOT, python

# What a process sees before the import of `ga_optax`, and after it. A function is its
# code, its default values, and what its closure holds.
PROGRAM = """
import sys, types
import jax, jax.numpy as jnp
import optax
import jax.ad_checkpoint, jax.experimental.checkify, jax.experimental.layout
import jax.extend.source_info_util, jax.interpreters.mlir

def held(x, deep=True):
    if not isinstance(x, types.FunctionType):
        return id(x)
    cells = [c.cell_contents for c in x.__closure__ or () if c != types.CellType()]
    inside = [held(c, False) if deep else id(c) for c in cells]
    wrapped = held(getattr(x, "__wrapped__", None), False) if deep else ()
    return id(x), id(x.__code__), id(x.__defaults__), *inside, wrapped

def seen():
    found = {}
    for name in names:
        for key, x in vars(sys.modules[name]).copy().items():
            found[name, key] = held(x)
            if type(x) is dict:  # such as the rules of primitives, by primitive
                found |= {(name, key, str(k)): held(v) for k, v in x.items()}
    return found

def lowered():
    def loss(w, x):
        fn = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        return jnp.sum(jax.lax.associative_scan(fn, (jax.nn.sigmoid(x * w), x))[1])
    jax.clear_caches()
    step = jax.jit(jax.grad(loss)).lower(1.0, jnp.arange(8.0))
    return step.as_text(debug_info=True)  # with the source lines

lowered()  # what JAX makes at the first use
names = [n for n in sys.modules if n.split(".")[0] in ("jax", "jaxlib", "optax")]
states = []
for what in ("", sys.argv[1]):
    exec(what)
    states.append((seen(), lowered()))
(before, program), (after, then) = states
for key in (key for key, x in before.items() if after.get(key) != x):
    print("changed:", *key)
print("the same program" if program == then else "another program")
"""
PLANTED = """
scan = jax.lax.associative_scan
for cell in scan.__closure__:
    if cell.cell_contents is scan.__wrapped__:
        cell.cell_contents = lambda *args, **how: scan.__wrapped__(*args, **how)
"""


def said(what):
    run = python("-c", PROGRAM, what, cwd=ROOT, PYTHONPATH=str(ROOT))
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_importing_the_package_changes_nothing_in_jax():
    assert said("import ga_optax") == ["the same program"]


def test_a_function_that_is_replaced_in_a_closure_is_seen():
    *changed, program = said(PLANTED)
    assert "changed: jax.lax associative_scan" in changed
    assert program == "another program"
