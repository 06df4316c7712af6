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
    # The twin: where they are needed, their absence is seen.
    assert needy == ["needs more: flax", "needs more: testing"]


def run_tests(installed, site):
    tests = [installed.source / "tests" / name for name in SELECTED]
    options = ("-q", "-x", "-m", "not fuzz", "-p", "no:cacheprovider")
    return call("-m", "pytest", *options, *tests, cwd=installed.source, site=site)


# It takes more than ten seconds: a hundred tests, in a process that starts JAX.
@built
def test_tests_pass_against_the_wheel_with_its_source_gone(installed, tmp_path):
    run = run_tests(installed, installed.site)
    assert run.returncode == 0, run.stdout
    assert re.search(r"\b\d\d+ passed", run.stdout)
    # The twin: they test what is installed, not the checkout.
    broken = shutil.copytree(installed.site, tmp_path / "site")
    path = broken / "ga_optax" / "accumulator.py"
    text = path.read_text(encoding="utf-8")
    assert text.count(" + _in(term, wide)") == 1
    path.write_text(text.replace(" + _in(term, wide)", ""), encoding="utf-8")
    run = run_tests(installed, broken)
    assert run.returncode == 1
    assert re.search(r"FAILED .*test_accumulator\.py", run.stdout)


# -- What importing it costs -----------------------------------------------------------


def brought(module, site):
    """The packages that importing a module adds to those of optax and `jax.extend`."""
    program = (
        "import sys, optax, jax.extend; before = set(sys.modules);"
        f"import {module};"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    return set(succeed("-c", program, cwd=site, site=site).split())


@built
def test_importing_it_imports_nothing_else_that_optax_does_not(installed):
    assert brought("ga_optax", installed.site) == {"ga_optax"}
    pytest.importorskip("flax")
    assert "flax" in brought("ga_optax.flax", installed.site)  # the twin


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


def missing_names(names, text):
    return [name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)]


def test_the_changelog_names_every_public_name():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert missing_names(ga_optax.__all__, text) == []
    # The twin: a name that is not there is missed.
    assert missing_names(["Audits"], text) == ["Audits"]


# -- Workflows -------------------------------------------------------------------------


def make_targets(text):
    return set(re.findall(r"^([a-z-]+):", text, re.M))


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def unknown_targets(jobs, targets):
    """The targets that workflows call and the Makefile does not have."""
    called = [
        word
        for job in jobs
        for command in commands(job)
        for line in command.splitlines()
        if line.startswith("make ")
        for word in line.split()[1:]
        if "=" not in word
    ]
    return called, set(called) - targets


def test_workflows_parse_and_call_make_targets_that_exist():
    yaml = pytest.importorskip("yaml")
    paths = sorted(WORKFLOWS.glob("*.yml"))
    assert paths
    flows = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    jobs = [job for flow in flows for job in flow["jobs"].values()]
    targets = make_targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    called, unknown = unknown_targets(jobs, targets)
    assert {"docs", "lint", "oldest", "pytest", "release-check", "types"} <= set(called)
    assert unknown == set()
    twin = [{"steps": [{"run": "make pytest WORKERS=4\nmake tset"}]}]
    assert unknown_targets(twin, {"pytest", "test"}) == (["pytest", "tset"], {"tset"})
    for flow in flows:
        assert flow["permissions"] == {"contents": "read"}
    for job in jobs:
        actions = {step["uses"] for step in job["steps"] if "uses" in step}
        # Only the job that publishes may prove who it is, and it builds nothing.
        publishes = "pypa/gh-action-pypi-publish@release/v1" in actions
        rights = {"id-token": "write"} if publishes else None
        assert job.get("permissions") == rights
        assert not (publishes and commands(job))
        for action in actions - {"pypa/gh-action-pypi-publish@release/v1"}:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", action)


def test_documents_name_make_targets_that_exist():
    targets = make_targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.M))
        assert named
        assert named <= targets


def test_make_takes_the_newest_python_that_starts_and_says_which_does_not(tmp_path):
    if not shutil.which("make"):
        pytest.skip("there is no make")
    for name, text in (
        ("python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127"),
        ("python3.13", f'exec "{sys.executable}" "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    # Not what the `make` that runs this test was told: MAKEFLAGS overrides a variable.
    told = ("PYTHON", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
    env = {name: value for name, value in os.environ.items() if name not in told}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"

    def made(**more):
        return subprocess.run(
            ["make", "-n", ".venv-nowhere/ready", "VENV=.venv-nowhere"],
            cwd=ROOT,
            env={**env, **more},
            capture_output=True,
            text=True,
            check=True,
        )

    out = made()
    assert "python3.13 -m venv" in out.stdout
    said = "Left out python3.14, which does not start: pyenv: python3.14: command not"
    assert out.stderr.count(said) == 1
    out = made(PYTHON="python3.13")  # the twin: the one that is named is taken
    assert out.stderr == ""
