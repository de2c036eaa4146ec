"""Keys that come and go, and the rows that they have: on the host, in NumPy.

`vocabulary` has the public class, `results` what it returns, and `contents` what one
batch does. `one_writer` is its threads, `history` the batches that can be taken back,
`servers` what those are told that serve its rows, `checkpoint` its arrays. They stand
on `store`, which keeps keys in rows with what is known of them, and takes changes back.
`index` finds the rows of keys, by cuckoo hashing; `order` finds the rows of lowest
score without looking at all. Neither is in a checkpoint, nor does any result depend on
how they are laid out: both are made again from the arrays. `codes` makes 64 bits of a
key. `native/_keys.py` does what takes longest in the package's library, where that is.

Words: a *key* is the user's, an integer, a string or bytes; its *code* is the `uint64`
that stands for it; a *row* is a row of the table. Row 0 has no key: it is that of all
keys that have none of their own.
"""
