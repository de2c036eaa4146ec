"""Losses with mutable arrays, `loss(t, ids, w)`, for tests/gradients/test_differential.

`t` is a table `[rows, 4]`, `ids` three row ids, and `w` four numbers.
"""

import jax
import jax.numpy as jnp
from jax import lax

import optax_sparse_adam as osa


def zeros(*shape, dtype=jnp.float32):
    return jax.new_ref(jnp.zeros(shape, dtype))


def read(ref, w):
    return jnp.sum(ref[...] ** 2 * w)


def loop(body, steps=3):
    lax.fori_loop(0, steps, lambda k, _: body(k), None)


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (tripled(x), x), lambda x, g: (3 * g * x,))


@jax.custom_jvp
def odd(x):
    return jnp.sin(x)


odd.defjvps(lambda g, ans, x: 3 * g * x)


@jax.custom_vjp
def through_ref(x):
    ref = jax.new_ref(x)
    ref[...] *= 2
    return ref[...]


through_ref.defvjp(lambda x: (through_ref(x), x), lambda x, g: (3 * g * x,))


def added_outside_of_loops(t, ids, w):
    ref = zeros(4)
    ref[...] += t[ids[0]] * w
    ref[...] += t[ids].sum(0)
    return read(ref, w)


def added_in_a_loop(t, ids, w):
    ref = zeros()

    def body(k):
        ref[...] += jnp.sum(t[ids[k]] ** 2 * w)

    loop(body)
    return ref[...]


def read_in_a_later_step(t, ids, w):
    one, two = zeros(4), zeros(4)

    def step(total, i):
        total += read(two, w)
        two[...] = one[...] * w
        one[...] = t[i]
        return total, None

    return lax.scan(step, 0.0, ids)[0]


def recurrent(t, ids, w):
    ref = zeros(4)

    def step(total, i):
        ref[...] = jnp.tanh(ref[...] * w + t[i])
        return total + jnp.sum(ref[...]), None

    return lax.scan(step, 0.0, ids, reverse=True)[0]


def loops_in_a_loop(t, ids, w):
    ref = zeros(4)

    def outer(j):
        def inner(k):
            ref[...] = jnp.sin(ref[...]) + t[ids[k]] * w

        loop(inner, 2)
        ref[...] *= 0.5

    loop(outer, 2)
    return read(ref, w)


def frozen(t, ids, w):
    ref = jax.new_ref(t[ids])
    ref[1] = ref[0] * w
    return jnp.sum(jax.freeze(ref) ** 2)


def swapped(t, ids, w):
    ref = jax.new_ref(t[ids])
    old = jax.ref.swap(ref, (0,), t[ids[2]] * w)
    return jnp.sum(old * ref[0]) + jnp.sum(ref[1])


def rows_added_to(t, ids, w):
    ref = zeros(5, 4)
    jax.ref.addupdate(ref, ids % 5, t[ids])
    jax.ref.addupdate(ref, (2,), t[ids[0]] * w)
    return read(ref, w)


def rows_of_a_cache(t, ids, w):
    """Attention over what earlier steps have written."""
    keys = zeros(3, 4)

    def step(total, xs):
        k, i = xs
        keys[k] = t[i]
        weights = jax.nn.softmax(keys[...] @ t[i])
        return total + jnp.sum(weights @ keys[...] * w), None

    return lax.scan(step, 0.0, (jnp.arange(3), ids))[0]


def parts_of(t, ids, w):
    ref = jax.new_ref(t[ids])
    ref[0, 1:3] = ref[1, :2] * 2
    ref[:, 0] += w[1]
    return jnp.sum(ref[1:, :2] ** 2) + jnp.sum(ref[ids[0] % 3] * w)


def ids_in_one(t, ids, w):
    ref = jax.new_ref(ids)
    ref[0] = (ref[1] + 1) % t.shape[0]
    return jnp.sum(t[ref[...]] ** 2 * w)


def counted(t, ids, w):
    ref = zeros(dtype=jnp.int32)
    ref[...] += 1
    total = jnp.sum(t[ids[ref[...]]] ** 2 * w)
    ref[...] += 1
    return total + jnp.sum(t[ids[ref[...]]] * w) * ref[...].astype(float)


def written_by_a_jit(t, ids, w):
    ref = zeros(4)

    @jax.jit
    def add(ref, rows):
        ref[...] += rows * 2

    add(ref, t[ids[0]])
    add(ref, t[ids[1]])
    return read(ref, w)


def looked_up_in_a_jit(t, ids, w):
    ref = zeros(4)

    @jax.jit
    def add(ref, t, i):
        ref[...] += t[i]

    add(ref, t, ids[0])
    add(ref, t, ids[1])
    return read(ref, w)


def closed_over_by_a_jit(t, ids, w):
    ref = zeros(4)

    @jax.jit
    def add():
        ref[...] += t[ids].sum(0)

    add()
    add()
    return read(ref, w)


def written_by_a_branch(t, ids, w):
    ref = zeros(4)

    def yes():
        ref[...] += t[ids[0]]

    def no():
        ref[...] = t[ids[1:]].sum(0)

    lax.cond(ids[0] == 0, yes, no)
    return read(ref, w)


def read_by_a_branch(t, ids, w):
    ref = jax.new_ref(t[ids])
    return lax.cond(
        ids[0] == 0, lambda: jnp.sum(ref[0] ** 2), lambda: jnp.sum(ref[1] * w)
    )


def made_in_a_branch(t, ids, w):
    def yes():
        ref = jax.new_ref(t[ids])
        ref[0] *= w
        return jnp.sum(ref[...] ** 2)

    return lax.cond(ids[0] == 0, yes, lambda: jnp.sum(t[ids[:2]]))


def written_by_a_checkpoint(t, ids, w):
    ref = zeros(4)

    @jax.checkpoint
    def add(t):
        ref[...] += jnp.sin(t[ids]).sum(0)

    add(t)
    return read(ref, w)


def beside_a_checkpoint(t, ids, w):
    ref = zeros(4)
    rows = jax.checkpoint(lambda t, i: jnp.sin(t[i]) * w)
    ref[...] = rows(t, ids[0])
    ref[...] += rows(t, ids[1])
    return read(ref, w)


def made_in_a_checkpoint(t, ids, w):
    @jax.checkpoint
    def function(t):
        ref = jax.new_ref(jnp.sin(t[ids]))
        ref[0] *= w
        return jnp.sum(ref[...] ** 2)

    return function(t)


def checkpoint_of_steps(t, ids, w):
    ref = zeros(4)

    @jax.checkpoint
    def step(total, i):
        rows = jnp.sin(t[i])
        return total + jnp.sum(rows * w), rows

    total = 0.0
    for k in range(3):
        total, rows = step(total, ids[k])
        ref[...] += rows
    return total + read(ref, w)


def through_a_custom_vjp(t, ids, w):
    ref = zeros(4)
    ref[...] += tripled(t[ids[0]])
    ref[...] *= tripled(t[ids[1]])
    return jnp.sum(ref[...] * w)


def through_a_custom_jvp(t, ids, w):
    ref = zeros(4)

    def body(k):
        ref[...] += odd(t[ids[k]])

    loop(body)
    return read(ref, w)


def made_in_a_custom_vjp(t, ids, w):
    return jnp.sum(through_ref(t[ids]) * w)


def in_a_custom_vjp_in_a_loop(t, ids, w):
    ref = zeros(4)

    def body(k):
        ref[...] += through_ref(t[ids[k]]) * w

    loop(body)
    return read(ref, w)


def made_under_vmap(t, ids, w):
    def one(i):
        ref = jax.new_ref(t[i])
        ref[0] *= 2
        return jnp.sum(ref[...] ** 2 * w)

    return jnp.sum(jax.vmap(one)(ids))


def written_under_vmap(t, ids, w):
    ref = zeros(3, 4)

    def one(ref, i):
        ref[...] = t[i] * w

    jax.vmap(one)(ref, ids)
    return jnp.sum(ref[...] ** 3)


def scanned_over(t, ids, w):
    ref = zeros(3, 4)

    def step(total, xs):
        own, i = xs
        own[...] = jnp.sin(t[i])
        return total + jnp.sum(own[...]), None

    total, _ = lax.scan(step, 0.0, (ref, ids))
    return total + read(ref, w)


def rows_scanned_over(t, ids, w):
    ref = jax.new_ref(t[ids])

    def step(total, own):
        own[...] = jnp.sin(own[...]) * w
        return total, None

    lax.scan(step, 0.0, ref)
    return read(ref, w)


def bags_in_one(t, ids, w):
    ref = zeros(4)
    ref[...] = osa.embedding_bag(t, ids[None])[0]
    return read(ref, w)


def of_a_lower_type(t, ids, w):
    ref = zeros(4, dtype=jnp.bfloat16)
    ref[...] += t[ids[0]].astype(jnp.bfloat16)
    return jnp.sum(ref[...].astype(jnp.float32) * w)


def scaled_before(t, ids, w):
    ref = zeros(4)

    def body(k):
        ref[...] += jnp.tanh(2 * t)[ids[k]]

    loop(body)
    return read(ref, w)


def of_other_parameters(t, ids, w):
    ref = jax.new_ref(w)
    ref[0] = ref[1] * 2
    return jnp.sum(t[ids] * ref[...])


def slice_of_the_table(t, ids, w):
    ref = zeros(2, 4)
    ref[...] += lax.dynamic_slice_in_dim(t, ids[0], 2)
    return read(ref, w)


def overwritten(t, ids, w):
    ref = jax.new_ref(t[ids[0]])
    ref[...] = t[ids[1]] * w
    return read(ref, w)


def logged(t, ids, w):
    """A row that is written, and read by nobody."""
    ref = zeros(3, 4)

    def step(total, xs):
        k, i = xs
        ref[k] = t[i]
        return total + jnp.sum(t[i] ** 2 * w), None

    return lax.scan(step, 0.0, (jnp.arange(3), ids))[0]


# The gradient of the table is row-sparse.
SPARSE = [
    added_outside_of_loops,
    added_in_a_loop,
    read_in_a_later_step,
    recurrent,
    loops_in_a_loop,
    frozen,
    swapped,
    rows_added_to,
    rows_of_a_cache,
    parts_of,
    ids_in_one,
    counted,
    written_by_a_jit,
    looked_up_in_a_jit,
    closed_over_by_a_jit,
    written_by_a_branch,
    read_by_a_branch,
    made_in_a_branch,
    written_by_a_checkpoint,
    beside_a_checkpoint,
    made_in_a_checkpoint,
    checkpoint_of_steps,
    through_a_custom_vjp,
    through_a_custom_jvp,
    made_in_a_custom_vjp,
    in_a_custom_vjp_in_a_loop,
    made_under_vmap,
    written_under_vmap,
    scanned_over,
    rows_scanned_over,
    bags_in_one,
    of_a_lower_type,
    scaled_before,
    of_other_parameters,
    slice_of_the_table,
    overwritten,
    logged,
]


def whole_table(t, ids, w):
    ref = jax.new_ref(t)
    ref[2] *= 2
    return jnp.sum(ref[ids] ** 2 * w)


def whole_and_rows(t, ids, w):
    ref = jax.new_ref(t * 2)
    return jnp.sum(ref[ids] ** 2 * w) + jnp.sum(t[ids])


def whole_in_a_loop(t, ids, w):
    ref = jax.new_ref(jnp.zeros_like(t))

    def body(k):
        ref[...] = ref[...] * 0.5 + t

    loop(body)
    return jnp.sum(ref[ids] ** 2)


def decay_in_a_loop(t, ids, w):
    ref = zeros()

    def body(k):
        ref[...] += jnp.sum(t**2) + jnp.sum(t[ids[k]])

    loop(body)
    return ref[...]


def whole_log(t, ids, w):
    """A log that nobody reads: see `_has_effect` in `_gradients/backward_slice.py`."""
    ref = zeros(3)

    def step(total, xs):
        k, i = xs
        ref[k] = jnp.sum(t**2)
        return total + jnp.sum(t[i] ** 2 * w), None

    return lax.scan(step, 0.0, (jnp.arange(3), ids))[0]


DENSE = [whole_table, whole_and_rows, whole_in_a_loop, decay_in_a_loop, whole_log]
