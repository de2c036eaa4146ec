"""Strict JAX for every test: nothing is promoted or broadcast in silence."""

import os

# Eight devices, set before JAX starts; tests that need a mesh take what they need.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
