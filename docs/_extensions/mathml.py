"""Formulas as MathML, which browsers show by themselves.

Sphinx has MathJax, which a browser fetches from another server, and images, which need
LaTeX. docutils, on which Sphinx stands, can translate LaTeX to MathML.
"""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)


def to_mathml(latex: str, node: nodes.Node, block: bool) -> str:
    """Translates a formula; lines of a block are aligned at `&`."""
    # docutils knows \textstyle only where a group begins.
    latex = re.sub(r"\\textstyle\s*(\\sum_\w)", r"{\\textstyle\1}", latex)
    try:
        return latex2mathml.tex2mathml(latex, as_block=block)
    except MathError as error:
        _LOGGER.warning("cannot translate %r: %s", latex, error, location=node)
        return latex


def visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(to_mathml(node.astext(), node, block=False))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    math = to_mathml(node.astext(), node, block=True)
    self.body.append(f'<div class="math">{math}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
