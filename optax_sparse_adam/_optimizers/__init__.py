"""What has `init` and `update`: the optimisers, and the wrappers of optax's.

Each public name has a file with its formula. They stand on `_rows`, which gathers the
touched rows and scatters them back.
"""
