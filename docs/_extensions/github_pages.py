"""Pages that are read on GitHub as they are, and here as a site.

GitHub shows files, so pages link to files of the repository. Where the site has a page
in the place of a file, such as a notebook or the reference that is made of a module's
docstrings, the link leads to that page.

GitHub runs no directive: it shows no table of times and includes no text. A paragraph
that begins with "On GitHub, " and links to the file that has it is for readers there;
the site is built without it.
"""

import re
from typing import Any

# What follows the folder of the repository: what follows that of the site.
_PLACES = {
    "notebooks/": "notebooks/",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "optax_sparse_adam/__init__.py": "api/index.rst",
    "optax_sparse_adam/native/__init__.py": "api/native.rst",
    "optax_sparse_adam/torch_compat/__init__.py": "api/torch_compat.rst",
}


def for_the_site(text: str) -> str:
    text = re.sub(r"^On GitHub, .*?(?:\n\n|\Z)", "", text, flags=re.M | re.S)
    for file, page in _PLACES.items():
        text = text.replace(f"](../{file}", f"]({page}")
    return text


def _read(app: Any, page: str, source: list[str]) -> None:
    source[0] = for_the_site(source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
