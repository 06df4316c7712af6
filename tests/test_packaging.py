"""What is published works by itself: built, installed elsewhere, its source gone."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from typing import NamedTuple

import pytest

import ga_optax

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
# A few of every kind: numbers, errors, other transformations, what a step compiles to.
SELECTED = (
    "test_accumulator.py",
    "test_audit.py",
    "test_refused.py",
    "test_multi_steps_composition.py",
)


def built(test):
    """Marks a test of the built package, which needs the tool that builds it."""
    missing = pytest.mark.skipif(
        importlib.util.find_spec("hatchling") is None,
        reason="the package is built with hatchling: the dependency group `dev`",
    )
    return pytest.mark.published(missing(test))


class Installed(NamedTuple):
    in_sdist: set[str]
    in_wheel: set[str]
    site: pathlib.Path  # where the wheel is installed, and nothing else
    source: pathlib.Path  # the unpacked sdist, without the package


def call(*args, cwd, site=None):
    """Runs Python elsewhere, with `site` before whatever else is installed."""
    env = os.environ | {"PYTHONPATH": str(site or "")}
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def succeed(*args, **options):
    run = call(*args, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, built from the sdist; then the sdist's own package is deleted."""
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


# -- What is in it ---------------------------------------------------------------------


@built
def test_the_wheel_holds_every_module_the_type_marker_and_no_test(installed):
    package = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "ga_optax").rglob("*.py")
    }
    assert len(package) > 10
    rest = installed.in_wheel - package - {"ga_optax/py.typed"}
    assert package | {"ga_optax/py.typed"} <= installed.in_wheel
    assert {name.split("/")[0] for name in rest} == {"ga_optax-0.1.0.dist-info"}
    assert any(name.endswith("/LICENSE") for name in rest)


@built
def test_the_sdist_holds_what_a_reader_and_a_tester_need(installed):
    due = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}
    due |= {"CITATION.cff", "SECURITY.md"}
    folders = "tests", "examples", "benchmarks", "docs", "notebooks", "release"
    for folder in (*folders, ".github"):
        due |= {
            str(path.relative_to(ROOT))
            for suffix in ("py", "md", "ipynb", "json", "yml")
            for path in (ROOT / folder).rglob(f"*.{suffix}")
            if not {"_build", ".ipynb_checkpoints"} & set(path.parts)
        }
    assert due - installed.in_sdist == set()


@built
def test_at_run_time_it_requires_jax_and_optax_alone(installed):
    [found] = importlib.metadata.distributions(path=[str(installed.site)])
    always = [r for r in found.requires or () if "extra ==" not in r]
    assert sorted(re.split(r"[^\w-]", r)[0] for r in always) == ["jax", "optax"]
    extras = found.metadata.get_all("Provides-Extra") or []
    assert set(extras) == {
        *("cuda12", "cuda13", "flax", "target-gpu", "target-tpu", "testing")
    }
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {found.version} " in changelog


# -- It works by itself ----------------------------------------------------------------


@built
def test_its_command_runs(installed):
    command = installed.site / "bin" / "ga-optax"
    printed = succeed(command, "--version", cwd=installed.source, site=installed.site)
    assert printed == "ga-optax 0.1.0\n"


@built
def test_it_imports_where_neither_flax_nor_chex_is(installed):
    program = """
import importlib, pkgutil, sys
import jax, optax  # whatever they import themselves

sys.modules["flax"] = sys.modules["chex"] = None
import ga_optax

for _, name, _ in pkgutil.iter_modules(ga_optax.__path__):
    try:
        if name != "__main__":
            importlib.import_module("ga_optax." + name)
    except ImportError:
        print("needs more:", name)
for name in ga_optax.__all__:
    getattr(ga_optax, name)
print(ga_optax.__file__)
"""
    *needy, path = succeed(
        "-c", program, cwd=installed.source, site=installed.site
    ).splitlines()
    assert path == str(installed.site / "ga_optax" / "__init__.py")
    assert needy == ["needs more: flax", "needs more: testing"]


# It takes more than ten seconds: a hundred tests, in a process that starts JAX.
@built
def test_tests_pass_against_the_wheel_with_its_source_gone(installed):
    tests = [installed.source / "tests" / name for name in SELECTED]
    options = ("-q", "-x", "-m", "not fuzz", "-p", "no:cacheprovider")
    printed = succeed(
        *("-m", "pytest", *options, *tests), cwd=installed.source, site=installed.site
    )
    assert re.search(r"\b\d\d+ passed", printed)


# -- What importing it costs -----------------------------------------------------------


@built
def test_importing_it_imports_nothing_else_that_optax_does_not(installed):
    program = (
        "import sys, optax, jax.extend; before = set(sys.modules); import ga_optax;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    printed = succeed("-c", program, cwd=installed.site, site=installed.site)
    assert printed.split() == ["ga_optax"]


# -- Types -----------------------------------------------------------------------------


def type_check(program, site):
    pytest.importorskip("pyrefly", reason="types are checked with pyrefly")
    return call(
        *("-m", "pyrefly", "check", "--output-format", "min-text"),
        *("--python-interpreter-path", sys.executable),
        *("--site-package-path", site, program),
        cwd=site,
    )


@built
def test_types_pass_in_a_users_program_which_runs_and_every_mistake_is_found(installed):
    programs = installed.source / "tests" / "typing"
    program = programs / "user_program.py"
    run = type_check(program, installed.site)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 errors" in run.stdout + run.stderr
    assert succeed(program, cwd=installed.source, site=installed.site)
    program = programs / "wrong_program.py"  # the twin
    lines = program.read_text(encoding="utf-8").splitlines()
    marked = {n for n, line in enumerate(lines, 1) if "# wrong:" in line}
    assert len(marked) > 10
    run = type_check(program, installed.site)
    assert run.returncode == 1
    found = re.findall(r"wrong_program\.py:(\d+):", run.stdout + run.stderr)
    assert set(map(int, found)) == marked


# -- What the documents say ------------------------------------------------------------


def test_the_changelog_names_every_public_name():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in ga_optax.__all__:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


# -- Workflows -------------------------------------------------------------------------


def make_targets(text):
    return set(re.findall(r"^([a-z-]+):", text, re.M))


def test_workflows_parse_and_call_make_targets_that_exist():
    yaml = pytest.importorskip("yaml")
    texts = [path.read_text(encoding="utf-8") for path in WORKFLOWS.glob("*.yml")]
    targets = make_targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    called = set(re.findall(r"^ *(?:- run: )?make ([a-z-]+)", "\n".join(texts), re.M))
    assert {"docs", "lint", "oldest", "pytest", "release-check"} <= called <= targets
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
    targets = make_targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.M))
        assert named
        assert named <= targets
