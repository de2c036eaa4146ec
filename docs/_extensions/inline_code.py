"""Names in single backticks, as docstrings have them: a link, or just code."""

import re
from typing import Any

from docutils import nodes

_QUOTED = re.compile(r"(``.+?``|`[^`]+`)([A-Za-z]?)", re.DOTALL)


def to_code(
    app: Any, env: Any, node: nodes.Element, contnode: nodes.Node
) -> nodes.Node | None:
    """What is no name of the reference stays code, without a warning."""
    is_default_role = node.get("refdomain") == "py" and node.get("reftype") == "obj"
    return contnode if is_default_role else None


def separate_endings(app: Any, what: str, *rest: Any) -> None:
    """Lets letters follow a name, as in `BCOO`s: reStructuredText wants `BCOO`\\ s."""
    lines = rest[-1]

    def separate(match: re.Match[str]) -> str:
        quoted, letter = match.groups()
        return rf"{quoted}\ {letter}" if letter else quoted

    lines[:] = _QUOTED.sub(separate, "\n".join(lines)).split("\n")


def setup(app: Any) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.config.default_role = "py:obj"
    app.connect("missing-reference", to_code)
    app.connect("autodoc-process-docstring", separate_endings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
