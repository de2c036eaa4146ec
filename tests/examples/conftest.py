"""Runs the examples in this process where they end with a message."""

import pytest


@pytest.fixture
def main_of(monkeypatch, capsys):
    """Runs `main()` of an example; returns the last line of what it ends with."""

    def run(module, *options):
        monkeypatch.setattr("sys.argv", [module.__name__, *map(str, options)])
        with pytest.raises(SystemExit) as stop:
            module.main()
        assert stop.value.code != 0
        lines = f"{capsys.readouterr().err}{stop.value.code}".splitlines()
        return lines[-1] if isinstance(stop.value.code, str) else lines[-2]

    return run
