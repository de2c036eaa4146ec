"""`public-names`: a reference of what a package exports, in the package's own groups.

A package's `__init__.py` imports its public names in groups, each below a comment that
says what they are. Here one group, or all names where there are no groups:

    .. public-names:: optax_sparse_adam
       :group: Optimisers

With `:summary:` it is a table of the names and the first line of each docstring.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

_IMPORTS = re.compile(r"^from \..*?(?:\(.*?\)|$)", re.MULTILINE | re.DOTALL)
_EXPORTED = re.compile(r"\b(\w+) as \1\b")


def public_names(module: str) -> dict[str, list[str]]:
    """The names that a package exports, by the heads of their groups."""
    path = inspect.getsourcefile(importlib.import_module(module))
    assert path is not None
    groups: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8")):
        names = [x for i in _IMPORTS.findall(block) for x in _EXPORTED.findall(i)]
        comment = re.match(r"\s*# (?!ruff)(.+?)[.:]?\n", block)
        head = comment[1] if comment else ""
        if names:
            groups.setdefault(head, []).extend(names)
    return groups


def _place(name: str) -> int:
    """Optimisers before their parts, and states last."""
    return 2 * name.endswith("State") + name.startswith("scale_by_")


class PublicNames(SphinxDirective):
    required_arguments = 1
    option_spec: ClassVar = {
        "group": directives.unchanged,
        "summary": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        (module,) = self.arguments
        groups = public_names(module)
        head = self.options.get("group")
        if head is not None and head not in groups:
            raise self.error(f"{module} has the groups {list(groups)}, not {head!r}.")
        names = groups[head] if head else [x for xs in groups.values() for x in xs]
        names = sorted(names, key=_place)
        if "summary" in self.options:
            lines = [".. autosummary::", "   :nosignatures:", ""]
            lines += [f"   ~{module}.{name}" for name in names]
        else:
            lines = [x for name in names for x in self._document(module, name)]
        return self.parse_rst(lines)

    def _document(self, module: str, name: str) -> list[str]:
        value = getattr(importlib.import_module(module), name)
        if not inspect.isclass(value):
            return [f".. autofunction:: {module}.{name}", ""]
        is_state = hasattr(value, "_fields")
        members = [] if is_state else ["   :members:", "   :inherited-members:"]
        return [f".. autoclass:: {module}.{name}", *members, ""]

    def parse_rst(self, lines: list[str]) -> list[nodes.Node]:
        node = nodes.container()
        node.document = self.state.document
        self.state.nested_parse(StringList(lines, source=__file__), 0, node)
        return node.children


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
