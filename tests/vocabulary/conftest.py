"""What the tests of vocabularies share."""

import pytest

from optax_sparse_adam.native import _build, _keys


@pytest.fixture(params=["library", "numpy"])
def by(request, monkeypatch):
    """With the library, also for few keys, and where there is none."""
    functions = None
    if request.param == "library":
        if not _build.compiler():
            pytest.skip("there is no C++ compiler")
        (library,) = request.getfixturevalue("cache").rglob("*.so")
        functions = _keys.functions_of(library)
    monkeypatch.setattr(_keys, "_functions", lambda: functions)
    monkeypatch.setattr(_keys, "_FEWEST", 0)
