"""`example-programs`: each file of `examples/`, with a head that links to it."""

import ast
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[2] / "examples"


class ExamplePrograms(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(FOLDER))
        return [self._section(path) for path in sorted(FOLDER.glob("*.py"))]

    def _section(self, path: Path) -> nodes.section:
        self.env.note_dependency(str(path))
        code = path.read_text(encoding="utf-8")
        title = (ast.get_docstring(ast.parse(code)) or path.stem).splitlines()[0]
        section = nodes.section("", nodes.title("", title.rstrip(".")), ids=[path.stem])
        section += nodes.literal_block(code, code, language="python")
        self.state.document.note_explicit_target(section)
        return section


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("example-programs", ExamplePrograms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
