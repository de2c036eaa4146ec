"""What JAX does not offer as a function.

Each file says what is missing, and what stands in for it:
`sharding` (the layout of rows and of states on a mesh), `jaxprs` (programs read and run
again), `varying_axes` (over which mesh axes a value varies), `sums_of_shards` (a sum
that the partitioner computes shard by shard), `unchecked` (operations that checkify
does not look into), `huge_pages` (how large arrays lie in memory).
"""
