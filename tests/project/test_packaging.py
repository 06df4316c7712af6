"""What is published works by itself: built, installed elsewhere, its source gone."""

import importlib.metadata
import pathlib
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from typing import NamedTuple

import pytest
from helpers import ROOT, python

import ga_optax

# A few of every kind: numbers, errors, other transformations, what a step compiles to.
SELECTED = "accumulator", "audit", "refused", "multi_steps_composition"
published = pytest.mark.published


class Installed(NamedTuple):
    in_sdist: set[str]
    in_wheel: set[str]
    site: pathlib.Path  # where the wheel is installed, and nothing else
    source: pathlib.Path  # the unpacked sdist, without the package


def succeed(*args, cwd, site=""):
    """What Python says elsewhere, with `site` before whatever else is installed."""
    run = python(*args, cwd=cwd, PYTHONPATH=str(site))
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, built from the sdist; then the sdist's own package is deleted."""
    pytest.importorskip("hatchling", reason="it builds: the dependency group `dev`")
    tmp = tmp_path_factory.mktemp("packaging")
    dist, site = tmp / "dist", tmp / "site"
    succeed("-m", "hatchling", "build", "-t", "sdist", "-d", dist, cwd=ROOT)
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        in_sdist = {name.partition("/")[2] for name in tar.getnames()}
        tar.extractall(tmp, filter="data")
    source = tmp / archive.name.removesuffix(".tar.gz")
    succeed("-m", "hatchling", "build", "-t", "wheel", "-d", dist, cwd=source)
    [wheel] = dist.glob("*.whl")
    install = ("install", "--no-deps", "--no-index", "--target", site, wheel)
    succeed("-m", "pip", *install, cwd=tmp)
    shutil.rmtree(source / "ga_optax")
    with zipfile.ZipFile(wheel) as names:
        return Installed(in_sdist, set(names.namelist()), site, source)


@published
def test_the_wheel_holds_every_module_the_type_marker_and_no_test(installed):
    paths = [*(ROOT / "ga_optax").rglob("*.py"), ROOT / "ga_optax" / "py.typed"]
    package = {path.relative_to(ROOT).as_posix() for path in paths}
    assert package <= installed.in_wheel
    rest = installed.in_wheel - package
    assert {name.split("/")[0] for name in rest} == {"ga_optax-0.1.0.dist-info"}
    assert any(name.endswith("/LICENSE") for name in rest)


@published
def test_the_sdist_holds_what_a_reader_and_a_tester_need(installed):
    due = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}
    due |= {"CITATION.cff", "DESIGN.md", "SECURITY.md"}
    folders = "tests", "examples", "benchmarks", "docs", "notebooks", "release"
    due |= {
        str(path.relative_to(ROOT))
        for folder in (*folders, ".github")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".md", ".ipynb", ".json", ".yml")
        and not {"_build", ".ipynb_checkpoints"} & set(path.parts)
    }
    assert due - installed.in_sdist == set()


@published
def test_at_run_time_it_requires_jax_and_optax_alone(installed):
    [found] = importlib.metadata.distributions(path=[str(installed.site)])
    always = [r for r in found.requires or () if "extra ==" not in r]
    assert sorted(re.split(r"[^\w-]", r)[0] for r in always) == ["jax", "optax"]
    extras = " ".join(sorted(found.metadata.get_all("Provides-Extra") or ()))
    assert extras == "cuda12 cuda13 flax testing"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {found.version} " in changelog


@published
def test_it_imports_nothing_but_jax_and_optax_and_needs_no_flax_or_chex(installed):
    program = """
import importlib, pkgutil, sys
import optax

before, sys.modules["flax"], sys.modules["chex"] = set(sys.modules), None, None
import ga_optax

print(*sorted({x.split(".")[0] for x in set(sys.modules) - before} - {"flax", "chex"}))
for _, name, _ in pkgutil.iter_modules(ga_optax.__path__):
    try:
        importlib.import_module("ga_optax." + name)
    except ImportError:
        print("needs more:", name)
for name in ga_optax.__all__:
    getattr(ga_optax, name)
print(ga_optax.__file__)
"""
    site = installed.site
    said = succeed("-c", program, cwd=installed.source, site=site).splitlines()
    assert said[:-1] == ["ga_optax jax", "needs more: flax", "needs more: testing"]
    assert said[-1] == str(site / "ga_optax" / "__init__.py")


@published
def test_tests_pass_against_the_wheel_with_its_source_gone(installed):
    folder = pathlib.Path(installed.source) / "tests"
    tests = [str(next(folder.rglob(f"test_{name}.py"))) for name in SELECTED]
    command = "-m", "pytest", "-q", "-x", "-m", "not fuzz", *tests
    printed = succeed(*command, cwd=installed.source, site=installed.site)
    assert re.search(r"\b\d\d+ passed", printed)


@pytest.mark.slow
def test_a_copy_inside_of_another_package_works(tmp_path):
    inside = tmp_path / "trainer" / "_vendored" / "accumulation"
    shutil.copytree(ROOT / "ga_optax", inside)
    program = """
import sys
sys.modules["ga_optax"] = None  # the copy must not need it
import jax, jax.numpy as jnp, optax
from trainer._vendored import accumulation as ga

loss = lambda p, x: ((x * p - (x * p).mean()) ** 4).mean()
got = jax.jit(ga.value_and_grad(loss, 2))(2.0, jnp.arange(4.0))
tx = ga.MultiSteps(optax.sgd(0.1), 2)
ga.apply_gradients(tx, jnp.ones([]), tx.init(jnp.ones([])), jnp.ones([]))
print(bool(jnp.allclose(got[1], jax.grad(loss)(2.0, jnp.arange(4.0)))))
"""
    assert succeed("-c", program, cwd=tmp_path, site=tmp_path) == "True\n"


def type_check(program, site):
    pytest.importorskip("pyrefly", reason="types are checked with pyrefly")
    command = "-m", "pyrefly", "check", "--output-format", "min-text"
    places = "--python-interpreter-path", sys.executable, "--site-package-path", site
    return python(*command, *places, program, cwd=site, PYTHONPATH="")


@published
def test_types_pass_in_a_users_program_which_runs_and_every_mistake_is_found(installed):
    programs = installed.source / "tests" / "typing"
    right, wrong = programs / "user_program.py", programs / "wrong_program.py"
    run = type_check(right, installed.site)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 errors" in run.stdout + run.stderr
    assert succeed(right, cwd=installed.source, site=installed.site)
    lines = wrong.read_text("utf-8").splitlines()  # the twin
    marked = {str(n) for n, line in enumerate(lines, 1) if "# wrong:" in line}
    assert len(marked) > 10
    run = type_check(wrong, installed.site)
    assert {*re.findall(r"wrong_program\.py:(\d+):", run.stdout + run.stderr)} == marked


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert ga_optax.__version__ == project["version"]


def test_the_changelog_names_every_public_name():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in ga_optax.__all__:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


WORKFLOWS = ROOT / ".github" / "workflows"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


def test_workflows_parse_and_call_make_targets_that_exist():
    yaml = pytest.importorskip("yaml")
    texts = [path.read_text(encoding="utf-8") for path in WORKFLOWS.glob("*.yml")]
    called = set(re.findall(r"^ *(?:- run: )?make ([a-z-]+)", "\n".join(texts), re.M))
    assert {"docs", "lint", "oldest", "pytest", "release-check"} <= called <= TARGETS
    flows = list(map(yaml.safe_load, texts))
    for flow in flows:
        assert flow["permissions"] == {"contents": "read"}
    for job in (job for flow in flows for job in flow["jobs"].values()):
        actions = {step["uses"] for step in job["steps"] if "uses" in step}
        # Only the job that publishes may prove who it is, and it builds nothing.
        publishes = "pypa/gh-action-pypi-publish@release/v1" in actions
        rights = {"id-token": "write"} if publishes else None
        assert job.get("permissions") == rights
        assert not (publishes and any("run" in step for step in job["steps"]))
        for action in actions - {"pypa/gh-action-pypi-publish@release/v1"}:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", action)


def test_documents_name_make_targets_that_exist():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert (
            set() < {*re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.M)} <= TARGETS
        )
