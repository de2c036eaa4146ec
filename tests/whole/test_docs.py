"""The site is built without a warning, its code runs, and it has every public name."""

import ast
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import jax
import optax
import pytest

import optax_sparse_adam as osa

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TEXTS = {page: page.read_text(encoding="utf-8") for page in sorted(_DOCS.glob("*.md"))}
_README = _ROOT / "README.md"
_PAGES = [page for page, text in _TEXTS.items() if _BLOCK.search(text)]
_PACKAGE = "optax_sparse_adam"
_PUBLIC = [
    _PACKAGE,
    *(f"{_PACKAGE}.{x}" for x in ("flax_nnx", "host_tables", "keras", "native")),
    f"{_PACKAGE}.torch_compat",
]


@pytest.fixture
def defaults(strict):
    """JAX as a reader has it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def loads_no_program(page):
    """Where the page says that none may come from JAX's cache, none is written."""
    name = "jax_persistent_cache_min_compile_time_secs"
    seconds = getattr(jax.config, name)
    if "leave `JAX_COMPILATION_CACHE_DIR`" in _TEXTS[page]:
        jax.config.update(name, math.inf)
    yield
    jax.config.update(name, seconds)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("loads_no_program")
def test_code_of_a_page_runs_from_top_to_bottom(page, defaults, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where pages save
    text, names = _TEXTS[page], {"__name__": "__main__"}
    if "import torch\n" in text:
        pytest.importorskip("torch")
    for block in _BLOCK.finditer(text):
        # Line numbers of errors are those of the page.
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(code, str(page), "exec"), names)


def test_every_training_step_is_in_place():
    """Without donation a step costs what the table costs."""
    steps = 0
    for page in (*_PAGES, _README):
        for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for function in ast.walk(ast.parse(block)):
                if isinstance(function, ast.FunctionDef) and _is_step(function):
                    steps += 1
                    where = f"{page.name}: {function.name}"
                    jits = [ast.unparse(x) for x in function.decorator_list]
                    # A step without a decorator is compiled below. Mutable arrays
                    # change in place without donation.
                    code = "".join(jits) or block
                    is_mutable = "var_defaults(ref=True)" in block
                    assert is_mutable or "donate_argnums=" in code, where
    assert steps >= 15


def _is_step(function):
    """Whether a function changes parameters, in itself or in what it decorates."""
    adds = r"osa\.apply_updates\(|optimizer\.update\(model|apply_gradients\("
    return bool(re.search(adds, ast.unparse(function))) and not any(
        isinstance(x, ast.FunctionDef) and x is not function and _is_step(x)
        for x in ast.walk(function)
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q"]
    places = ["-d", folder / "doctrees", _DOCS, folder / "html"]
    env = os.environ | {"GITHUB_REPOSITORY": "owner/name"}  # as in the workflow
    done = subprocess.run([*command, *places], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_public_name_is_in_the_reference(site):
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4])
    documented = {line.split()[0] for line in inventory.decode().splitlines()}
    for module in _PUBLIC:
        members = vars(importlib.import_module(module)).items()
        public = {
            f"{module}.{name}"
            for name, value in members
            if not name.startswith("_")
            and callable(value)
            and value.__module__.startswith(module)
        }
        assert public
        assert not public - documented


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("keras", "keras"),
        ("gpu", "gpu"),
        ("new tokens", "frozen_rows"),
        ("does not fit in memory", "large_tables"),
        ("kernel", "kernel"),
    ],
)
def test_search(site, words, page):
    """The site's index has the page for what a reader would type."""
    from sphinx.search.en import SearchEnglish

    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    language, pages = SearchEnglish({}), []
    for word in set(words.split()) - language.stopwords:
        places = [
            index[x].get(language.stem(word), []) for x in ("terms", "titleterms")
        ]
        numbers = [[x] if isinstance(x, int) else x for x in places]
        pages.append({index["docnames"][i] for x in numbers for i in x})
    assert page in set.intersection(*pages)


def test_every_page_is_in_the_index():
    index = (_DOCS / "index.md").read_text(encoding="utf-8")
    table = index[: index.index("## Names")]
    names = {page.name for page in _TEXTS} - {"index.md"}
    places = {  # which stand for files of the repository
        "benchmarks.md": "../benchmarks/README.md",
        "changelog.md": "../CHANGELOG.md",
        "contributing.md": "../CONTRIBUTING.md",
    }
    missing = [x for x in names if f"({places.get(x, x)})" not in table]
    assert not missing


def test_pages(site):
    """Titles, formulas, tables of times, pages in place of files."""

    def page(name):
        return (site / f"{name}.html").read_text(encoding="utf-8")

    version = importlib.import_module(_PACKAGE).__version__
    title = rf'class="site-title" href="[^"]*">{_PACKAGE} {version}<'
    assert re.search(title, page("api/index"))
    assert 'href="https://github.com/owner/name"' in page("recipes")
    assert page("api/optimizers").count('class="math') >= 5
    assert page("benchmarks").count("<table") >= 6
    assert "On GitHub," not in page("benchmarks")
    for name in ("notebooks/optimizers", "contributing", "changelog", "api/index"):
        assert re.search(rf'<td>.*href="{name}.html"', page("index")), name
    assert not (site / "_downloads").exists()  # of files for which no page stands


def test_readers_on_github_find_what_the_site_includes():
    made = re.compile(r"^```\{(?:literal)?include.*?^```$\s*", re.M | re.S)
    rests = [(page, rest) for page in _TEXTS for rest in made.split(_TEXTS[page])[1:]]
    assert len(rests) >= 6
    for page, rest in rests:
        hint = rest.split("\n\n")[0]
        assert hint.startswith("On GitHub, "), f"{page.name}: {rest[:80]}"
        assert "](../" in hint, f"{page.name}: {hint}"


def _prose(path):
    """A text without its blocks of code."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def _anchors(path):
    """Those that GitHub makes of headings."""
    heads = re.findall(r"^#+ (.+)$", _prose(path), re.M)
    return {re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in heads}


def test_links_lead_to_files_that_git_tracks():
    """As GitHub shows the texts. The site's links are checked by its build."""
    listed = ""
    if shutil.which("git"):
        listed = subprocess.run(
            ["git", "ls-files"], cwd=_ROOT, capture_output=True, text=True
        ).stdout
    tracked = {_ROOT / name for name in listed.splitlines()}
    if not tracked:
        pytest.skip("not in a clone of the repository")
    tracked |= {folder for path in tracked for folder in path.parents}
    texts = [*_ROOT.glob("*.md"), *_TEXTS, *(_ROOT / "benchmarks").glob("*.md")]
    checked = 0
    for text in texts:
        links = re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]+))?\)", _prose(text))
        for name, anchor in links:
            path = (text.parent / name).resolve() if name else text
            assert path in tracked, f"{text.name}: {name}"
            assert not anchor or anchor in _anchors(path), (
                f"{text.name}: {name}#{anchor}"
            )
        checked += len(links)
    assert checked > 100


def test_every_name_that_the_pages_use_exists():
    package = importlib.import_module(_PACKAGE)
    texts = (*_TEXTS.values(), _README.read_text(encoding="utf-8"))
    names = {x for text in texts for x in re.findall(r"\bosa\.(\w+)", text)}
    assert not [name for name in sorted(names) if not hasattr(package, name)]


def test_the_files_to_read_have_what_is_to_be_read():
    """The tables of "Reading the code"."""
    text = _TEXTS[_DOCS / "how_it_works.md"].split("## Reading the code")[1]
    rows = [x.strip("|").split("|") for x in text.splitlines() if ".py`" in x]
    tables = [x for x in rows if len(x) >= 3]
    assert len(tables) >= 30
    for row in tables:
        at = next(i for i, cell in enumerate(row) if re.match(r" `[\w/]+\.py` $", cell))
        code = (_ROOT / _PACKAGE / row[at].strip(" `")).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", row[at + 1]):
            assert re.search(rf"(def |class |^){name}\b", code, re.M), (name, row[at])


def test_the_tree_of_calls_is_that_of_a_step(defaults, without_kernel):
    """Each line of it is called while the one that it stands below runs."""
    text = _TEXTS[_DOCS / "how_it_works.md"]
    block = re.search(r"^```text\n(step .*?)^```$", text, re.M | re.S)[1]
    stack, expected, running, seen = [], [], [], set()
    for line in block.splitlines():
        name, file = line.split()[:2]
        depth = (len(line) - len(line.lstrip())) // 2
        stack[depth:] = [(file, name)]
        expected.append(tuple(stack[-2:]))

    def profile(frame, event, arg):
        path, _, file = frame.f_code.co_filename.rpartition(f"{_PACKAGE}/")
        call = file, frame.f_code.co_name
        if path and event == "call":
            seen.update((caller, call) for caller in running)
            running.append(call)
        elif path and event == "return":
            running.pop()

    table, tx = jax.numpy.ones((1013, 5)), osa.lazy(optax.adamw(1e-3))
    step, state = osa.make_train_step(lambda t, ids: t[ids].sum(), tx), tx.init(table)
    sys.setprofile(profile)
    try:
        step(table, state, jax.numpy.array([3, 7, 3]))
    finally:
        sys.setprofile(None)
    assert len(expected) > 20
    assert [x for x in expected[1:] if x not in seen] == []
