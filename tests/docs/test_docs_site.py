"""The documentation site builds without a warning, and has every public name."""

import importlib.util
import json
import re

import pytest
from helpers import ROOT, python

import ga_optax
from ga_optax import accumulator, blocks, config, data

NEEDED = ("sphinx", "myst_nb", "furo", "sphinx_copybutton")

pytestmark = [
    pytest.mark.published,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)),
        reason=f"the site needs {', '.join(NEEDED)}: the group `docs`",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once, with warnings as errors, such as of a link to nowhere."""
    target = tmp_path_factory.mktemp("site")
    command = "-m", "sphinx", "-W", "--keep-going", "-q", ROOT / "docs", target
    run = python(*command, DOCS_OFFLINE="1")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return target


# What a search leads to a section of.
WORDS = """nan, out of memory, batch norm, resume, batch too large, dropout, multi gpu,
mixed precision, lora, fp8, gradient_accumulation_steps, chunked cross entropy, ctc,
grpo, hsdp, last batch, sam, vendoring, debug nans, diffrax, numpyro, retrieval, siglip,
long context, host memory, gradient accumulation, clip loss, clipping, scan, fsdp, pinn,
scan over layers, segment_ids"""


def test_the_search_leads_to_a_section_first(site):
    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";)\n"))
    # The places are those of sections, so that `search_scorer.js` finds their names.
    sections = [place for places in index["alltitles"].values() for place in places]
    for words in " ".join(WORDS.split()).split(", "):
        [(number, place, is_main)] = index["indexentries"][words]
        assert is_main, words
        assert [number, place] in sections, words
        text = (site / f"{index['docnames'][number]}.html").read_text("utf-8")
        assert f'<section id="{place}"' in text
    script = (site / "_static/language_data.js").read_text("utf-8")
    assert "result[1] =" in script
    assert "Search.htmlToText =" in script  # summaries of words, not of numbers


def test_every_public_name_is_in_the_reference(site):
    pages = (path.read_text("utf-8") for path in (site / "api").glob("*.html"))
    anchors = set(re.findall(r'\bid="([^"]+)"', "".join(pages)))
    modules = [accumulator, blocks, config, data]
    due = {f"module-{module.__name__}" for module in modules}
    due |= {"module-ga_optax.flax", "module-ga_optax.testing"}
    for module in (ga_optax, *modules):
        names = [x for x in module.__all__ if getattr(module, x) not in modules]
        due |= {f"{module.__name__}.{name}" for name in names}
    assert due - anchors == set()
