"""Compiles the kernel for CPUs while the package is built, and makes its page.

Without a C++ compiler, without jaxlib's headers or with `OPTAX_SPARSE_ADAM_NATIVE=0`
the package is the same without it, and runs in plain JAX.
"""

import functools
import importlib.util
import os
import re
import shutil
import sysconfig
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import platform_tags

_NATIVE = Path(__file__).parent / "optax_sparse_adam" / "native"
_OLDEST = (0, 3)  # the interface of the oldest jaxlib that the package runs with


def _load_build() -> ModuleType:
    """The module that compiles, without its package, which needs JAX."""
    spec = importlib.util.spec_from_file_location("_build", _NATIVE / "_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_build = _load_build()


def headers() -> Path | None:
    """Those of the environment that is installed into, or else of the build's own."""
    spec = importlib.util.find_spec("jaxlib")
    own = spec.submodule_search_locations if spec else None
    for jaxlib in (Path(sysconfig.get_path("platlib"), "jaxlib"), *(own or ())):
        include = Path(jaxlib, "include")
        try:
            if _build.interface(include) >= _OLDEST:
                return include
        except RuntimeError:
            continue
    return None


def wanted() -> bool:
    """Whether to compile."""
    try:
        found = bool(_build.compiler())
    except RuntimeError:
        found = False
    return found and not _build.switched_off()


class PageHook(MetadataHookInterface):
    """The README as the page of a package index, which has no files beside it.

    Links and pictures lead to the repository, `GITHUB_REPOSITORY`, which its workflows
    set. Elsewhere there is none to lead to: of links the words stay.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        picture, link = (
            r"!\[([^]]*)\]\((?!\w+:)(.+?)\)",
            r"\[([^]]*)\]\((?!\w+:)(.+?)\)",
        )
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            raw = f"https://raw.githubusercontent.com/{repository}/HEAD"
            page = f"https://github.com/{repository}"
            text = re.sub(picture, rf"![\1]({raw}/\2)", text)
            text = re.sub(link, rf"[\1]({page}/blob/HEAD/\2)", text)
            owner, name = repository.split("/")
            documentation = f"https://{owner}.github.io/{name}"
            urls = {"Source": page, "Documentation": documentation}
        else:
            text, urls = re.sub(link, r"\1", re.sub(picture, "", text)), {}
        metadata["urls"] = urls
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the compiled library to a wheel, or puts it next to its source."""

    @functools.cached_property
    def _folder(self) -> Path:
        return Path(tempfile.mkdtemp())

    def finalize(self, *_: Any) -> None:
        shutil.rmtree(self._folder)

    def dependencies(self) -> list[str]:
        if not wanted() or headers():
            return []
        required = self.metadata.core.dependencies
        return [name for name in required if name.startswith("jaxlib")]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            self._compile(version == "editable", build_data)
        except Exception as error:  # whatever it is, the package works without it
            self.app.display_warning(
                f"Built without the kernel for CPUs: {error}. Plain JAX runs; to "
                "compile it later: python -m optax_sparse_adam.native"
            )

    def _compile(self, editable: bool, build_data: dict[str, Any]) -> None:
        include = headers()
        if not wanted() or include is None:
            raise RuntimeError(
                "it needs a C++ compiler (CXX, c++, g++ or clang++), the headers of "
                "jaxlib, no OPTAX_SPARSE_ADAM_NATIVE=0, and a system other than Windows"
            )
        self.app.display_info("Compiling the kernel for CPUs, for some ten seconds")
        began = time.perf_counter()
        library = _build.compile_into(_NATIVE if editable else self._folder, include)
        self.app.display_info(f"Compiled in {time.perf_counter() - began:.0f} s")
        if editable:
            # Those of this source for the jaxlib of another environment stay.
            source = library.name.rpartition("-")[0]
            for old in {*_NATIVE.glob("rows-*")} - {*_NATIVE.glob(f"{source}-*")}:
                old.unlink()
            return
        place = f"optax_sparse_adam/native/{library.name}"
        build_data["force_include"][str(library)] = place
        # Of Python the library knows nothing. On macOS it is for one processor and this
        # version of the system, where Python itself may be for more.
        plain = (x for x in platform_tags() if not x.startswith(("many", "musl")))
        build_data["tag"] = f"py3-none-{next(plain)}"
        build_data["pure_python"] = False
