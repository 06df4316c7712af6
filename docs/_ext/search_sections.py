"""Search results of index entries lead to their section, by its name.

Sphinx gives an entry of the directive `index` a target of its own, and a search shows
it with the title of the page. Here it gets the target of the section that it stands
before, and `search_scorer.js` shows the title of that section.
"""

from docutils import nodes
from sphinx import addnodes


def lead_to_sections(app, doctree, name):
    """Replaces the targets of the index entries of a page."""
    del app, name
    place = {
        target: section["ids"][0]
        for section in doctree.findall(nodes.section)
        for target in section["ids"]
    }
    for node in doctree.findall(addnodes.index):
        node["entries"] = [
            (kind, value, place.get(target, target), *rest)
            for kind, value, target, *rest in node["entries"]
        ]


def setup(app):
    """Connects the function above."""
    app.connect("doctree-resolved", lead_to_sections)
    return {"parallel_read_safe": True}
