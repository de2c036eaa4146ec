"""The packages that extras name, with those of the extras that they name in turn."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]


def packages(extra):
    for line in PROJECT["optional-dependencies"][extra]:
        if itself := re.fullmatch(rf"{PROJECT['name']}\[(.*)\]", line):
            for other in itself[1].split(","):
                yield from packages(other)
        else:
            yield line


print(*dict.fromkeys(x for extra in sys.argv[1:] for x in packages(extra)), sep="\n")
