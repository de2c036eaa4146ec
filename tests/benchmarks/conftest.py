"""The modules of benchmarks/ can be imported by name, as its programs do."""

import sys
from pathlib import Path

for folder in ("benchmarks", "examples"):
    sys.path.append(str(Path(__file__).parents[2] / folder))
