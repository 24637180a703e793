"""``.. generated:: NAME`` puts a piece of documentation there that is made from the code at build time (see facts.py, commands.py).

What is made anew with every build cannot be out of date, and a page that names what no longer exists fails to build.
"""

from collections.abc import Callable
from typing import Any, Final

import commands
import facts
import refusals
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

GENERATORS: Final[dict[str, Callable[[], str]]] = {
    "bounds": facts.bounds,
    "cli": commands.cli,
    "counters": facts.counters,
    "errors": facts.errors,
    "events": facts.events,
    "gauges": facts.gauges,
    "limits": facts.limits,
    "model-states": facts.model_states,
    "plan": refusals.plan_example,
    "refused-by-engine": refusals.by_the_engine,
    "refused-by-launch": refusals.by_the_launch,
    "replica-states": facts.replica_states,
    "route-scopes": facts.route_scopes,
    "request-limits": facts.request_limits,
    "settings": facts.settings,
    "sources": facts.sources,
}


class Generated(SphinxDirective):
    """The directive. Its one argument names a generator."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in GENERATORS:
            raise self.error(f"nothing generates {name!r}; there are {', '.join(GENERATORS)}")
        return self.parse_text_to_nodes(GENERATORS[name](), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's entry point. Pages with the directive are read anew in every build, since the code may have changed."""
    app.add_directive("generated", Generated)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
