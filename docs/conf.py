"""The documentation site: `python -m sphinx -W --keep-going -n docs build/docs`."""

import os
import shutil
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"  # of the reference
_DOCS = Path(__file__).parent
_ROOT = _DOCS.parent
sys.path[:0] = [str(_DOCS / "_extensions"), str(_ROOT)]

from optax_sparse_adam import __version__  # noqa: E402

project = "optax_sparse_adam"
author = "The optax_sparse_adam authors"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "reference",  # of this folder, our own
]
exclude_patterns = ["_*", "build"]

# Notebooks are in a folder of their own, and run by their own tests. Pages link to that
# one, which GitHub shows; `reference` makes of it links to the copy.
_notebooks = _DOCS / "notebooks"
shutil.rmtree(_notebooks, ignore_errors=True)
shutil.copytree(
    _ROOT / "notebooks", _notebooks, ignore=shutil.ignore_patterns("*checkpoint*")
)
nb_execution_mode = "off"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# Names in single backticks: a link, or else just code.
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", r"(?s).*")]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False
autosummary_generate = False
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = f"optax_sparse_adam {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
# GitHub's name of the repository, where its workflow builds the site.
_repository = os.environ.get("GITHUB_REPOSITORY", "")
_server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
html_theme_options = {
    "article_header_start": ["toggle-primary-sidebar.html", "site-title.html"],
    "repository_url": f"{_server}/{_repository}" if _repository else "",
    "use_repository_button": bool(_repository),
    "show_toc_level": 2,
    "use_download_button": False,
    "navbar_persistent": [],  # the search is in the sidebar
}
html_copy_source = False
html_show_copyright = False
