"""Gradients and tables of many devices, inside `shard_map` and `pmap`.

`psum` sums row-sparse gradients by gathering the rows of all devices. `psum_scatter`
and `sharded_lookup` send each row only to the device that owns it, by `routing`.
"""
