"""What Sphinx lacks for this site: a reference in the package's groups, and links.

A package's `__init__.py` imports its public names in groups, each below a comment that
says what they are. Here one group, or all names where there are no groups:

    .. public-names:: optax_sparse_adam
       :group: Optimisers

With `:summary:` it is a table of the names and the first line of each docstring.

GitHub shows files, so pages link to files of the repository. Where the site has a page
in the place of a file, such as a notebook, the link leads to that page. GitHub includes
no text: a paragraph that begins with "On GitHub, " and links to the file that has it is
for readers there, and left out here.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

_IMPORTS = re.compile(r"^from \..*?(?:\(.*?\)|$)", re.MULTILINE | re.DOTALL)
_EXPORTED = re.compile(r"\b(\w+) as \1\b")

# What follows the folder of the repository: what follows that of the site.
_PLACES = {
    "notebooks/": "notebooks/",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "optax_sparse_adam/__init__.py": "api/index.rst",
    "optax_sparse_adam/host_tables/__init__.py": "api/host_tables.rst",
    "optax_sparse_adam/keras/__init__.py": "api/keras.rst",
    "optax_sparse_adam/native/__init__.py": "api/native.rst",
    "optax_sparse_adam/torch_compat/__init__.py": "api/torch_compat.rst",
}


def lead_to_pages(app: Any, page: str, source: list[str]) -> None:
    text = re.sub(r"^On GitHub, .*?(?:\n\n|\Z)", "", source[0], flags=re.M | re.S)
    for file, place in _PLACES.items():
        text = text.replace(f"](../{file}", f"]({place}")
    source[0] = text


def public_names(module: str) -> dict[str, list[str]]:
    """The names that a package exports, by the heads of their groups."""
    path = inspect.getsourcefile(importlib.import_module(module))
    assert path is not None
    groups: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8")):
        names = [x for i in _IMPORTS.findall(block) for x in _EXPORTED.findall(i)]
        comment = re.match(r"\s*# (?!ruff)(.+?)[.:]?\n", block)
        if names:
            groups.setdefault(comment[1] if comment else "", []).extend(names)
    return groups


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
        names = groups[head] if head else [x for xs in groups.values() for x in xs]
        # Optimisers before their parts, and states last.
        names.sort(key=lambda x: 2 * x.endswith("State") + x.startswith("scale_by_"))
        if "summary" in self.options:
            lines = [".. autosummary::", "   :nosignatures:", ""]
            lines += [f"   ~{module}.{name}" for name in names]
        else:
            lines = [x for name in names for x in self._document(module, name)]
        return self.parse_text_to_nodes("\n".join(lines))

    def _document(self, module: str, name: str) -> list[str]:
        value = getattr(importlib.import_module(module), name)
        if not inspect.isclass(value):
            return [f".. autofunction:: {module}.{name}", ""]
        is_state = hasattr(value, "_fields")
        members = [] if is_state else ["   :members:", "   :inherited-members:"]
        return [f".. autoclass:: {module}.{name}", *members, ""]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    app.connect("source-read", lead_to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
