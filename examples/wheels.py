"""Public data sets that Python packages carry, read out of their wheels.

A wheel is a zip file. `pip download --no-deps` fetches it without installing anything;
it is kept in the user's cache folder, and nothing of it is copied elsewhere. The data
have terms of their own: MovieLens 100k, in the wheel of recbole, is for research, and
may be neither redistributed nor used commercially without permission (its README,
https://files.grouplens.org/datasets/movielens/ml-100k-README.txt).
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
CACHE /= "optax_sparse_adam"

# What the published figures were made with, or the same data; see docs/results.md.
VERSIONS = {"recbole": "1.2.1", "pykeen": "1.11.1", "gensim": "4.4.0"}


def find_wheel(package, folder=None):
    """The wheel of a package, downloaded once; in `folder`, or in the user's cache."""
    folder, version = Path(folder or CACHE), VERSIONS[package]
    if not (found := sorted(folder.glob(f"{package}-{version}-*.whl"))):
        print(
            f"downloading the wheel of {package} {version}, for its data, to {folder}"
        )
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", str(folder)]
        done = subprocess.run([*command, f"{package}=={version}"], check=False)
        found = sorted(folder.glob(f"{package}-{version}-*.whl"))
        if done.returncode or not found:
            sys.exit(
                f"could not download the wheel of {package} {version}; run pip "
                f"download --no-deps {package}=={version} elsewhere, and put it into "
                f"{folder}"
            )
    return found[-1]


def read_lines(package, path, folder=None):
    """The lines of a text file in a package's wheel."""
    with zipfile.ZipFile(find_wheel(package, folder)) as wheel:
        return wheel.read(path).decode("utf-8").splitlines()
