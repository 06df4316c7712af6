"""Search results of index entries lead to their section, by its name.

Sphinx gives an entry of the directive `index` a target of its own, and a search shows
it with the title of the page. Here it gets the target of the section that it stands
before, and `search_scorer.js` shows the title of that section.
"""

from docutils import nodes


def sections(doctree):
    """The target of the section that each target in it belongs to."""
    found = {}
    for section in doctree.findall(nodes.section):  # outer sections come first
        for node in section.findall(nodes.Element):
            found |= dict.fromkeys(node.get("ids", ()), section["ids"][0])
    return found


def lead_to_sections(app, env):
    """Replaces the targets of all index entries."""
    del app
    for name, entries in env.domaindata["index"]["entries"].items():
        place = sections(env.get_doctree(name)) if entries else {}
        entries[:] = [
            (kind, value, place.get(target, target), *rest)
            for kind, value, target, *rest in entries
        ]


def setup(app):
    """Connects the function above."""
    app.connect("env-check-consistency", lead_to_sections)
    return {"parallel_read_safe": True}
