"""What exact_adam refuses, as one table: how it is called, and the words of the error.

All of it is known while tracing. What only a running program knows is in
`test_exact_adam_changes` and `test_exact_adam_copies`: an error outside of a program,
NaN in it. What reads parameters is in `test_exact_adam_readers`.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.exact_adam import RATE, ROWS, WIDTH, batches, gradient, loss, start
from ..helpers.support import slow_but


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


class Refusal(NamedTuple):
    """Calls, each of which raises.

    Attributes:
      words: Those of the error.
      calls: `calls()`, functions without arguments.
      error: Its type.
      most: How many characters the error has at most.
    """

    words: str
    calls: Callable
    error: type = ValueError
    most: int = 2000


# Gradients.


def of_table(change):
    return lambda grads: {**grads, "table": change(grads["table"])}


GRADIENT_CHANGES = {
    "nothing": lambda grads: grads,
    "coalesce": of_table(osa.coalesce),
    "scale": of_table(lambda grad: 0.5 * grad),
    "sum_duplicates": of_table(lambda grad: grad.sum_duplicates(nse=4)),
    "astype": of_table(lambda grad: grad.astype("float32")),
    "jit": of_table(jax.jit(lambda grad: grad)),
    "lazy": lambda g: osa.lazy(optax.clip(1.0)).update(g, optax.EmptyState())[0],
}
OPTIMIZER_AROUND = {
    "nothing": lambda tx: tx,
    "chain": lambda tx: optax.chain(osa.lazy(optax.clip(1.0)), tx),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.sgd(0.1)}, {"table": "a", "w": "b"}
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, max_consecutive_errors=3),
}
# What is around is passed through before a gradient is looked at: each with each change
# of the core, and all changes without.
WITHOUT_READ = [("nothing", change) for change in GRADIENT_CHANGES]
WITHOUT_READ += [
    (around, change)
    for around in list(OPTIMIZER_AROUND)[1:]
    for change in ("nothing", "lazy")
]


def without_read(around, change):
    params, tx = start(), OPTIMIZER_AROUND[around](osa.exact_adam(RATE))
    state, change = tx.init(params), GRADIENT_CHANGES[change]

    def call():
        grads = change(gradient(params))
        jax.eval_shape(tx.update, grads, state, params)

    return [call]


@pytest.mark.slow
@pytest.mark.parametrize("around", slow_but(OPTIMIZER_AROUND, "partition"))
def test_with_read(around):
    params, tx = start(), OPTIMIZER_AROUND[around](osa.exact_adam(RATE))
    state = tx.init(params)
    grads = of_table(osa.coalesce)(gradient(params, read=state))
    jax.eval_shape(tx.update, grads, state, params)


def read_of_some():
    """The state of a part of the parameters is none of the others."""
    params, tx = start(), osa.exact_adam(RATE)
    some = tx.init({"table": None, "w": params["w"]})
    grads = gradient(params, read=some)
    return [lambda: jax.eval_shape(tx.update, grads, tx.init(params), params)]


def without_read_in_nnx():
    model = nnx.Embed(ROWS, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, osa.exact_adam(RATE), wrt=nnx.Param)
    grads = flax_nnx.grad(lambda m: jnp.sum(m(batches(1)[0]) ** 2))(model)
    update = nnx.jit(lambda optimizer, *args: optimizer.update(*args))
    return [lambda: update(optimizer, model, grads)]


# States.


def of_another_height(name, size):
    tx, params = osa.exact_adamw(RATE), start()
    state, other = tx.init(params), tx.init(start(size))
    mixed = state._replace(**{name: getattr(other, name)})
    grads = gradient(params, read=state)
    return [
        lambda: jax.eval_shape(tx.update, grads, mixed, params),
        lambda: gradient(params, read=mixed),
        lambda: osa.flush(params, mixed),
        lambda: osa.evaluate(loss, read=mixed)(params, batches(1)[0]),
    ]


def of_more_parameters(name):
    tx, params = osa.exact_adamw(RATE), start()
    state, other = tx.init(params), tx.init({**start(), "more": jnp.ones(2)})
    value = getattr(other, name)
    value = jnp.ones(3, "int32") if name in ("count", "clock") else value
    return [lambda: osa.flush(params, state._replace(**{name: value}))]


def of_other_parameters():
    state = osa.exact_adam(RATE).init(start())
    many = {f"layer {i}": jnp.ones(2) for i in range(50)}
    return [lambda: osa.flush(many, state)]


def of_another_optimizer(tx, other):
    params = start()
    grads = gradient(params, read=tx.init(params))
    return [lambda: tx.update(grads, other.init(params), params)]


PAIR = {"exact_adam": osa.exact_adam(0.1), "exact_adamw": osa.exact_adamw(0.1)}

# Optimisers that are made of it.


def named(*parts):
    return optax.named_chain(*((str(k), part) for k, part in enumerate(parts)))


def behind(part, place, chain=optax.chain):
    tx = chain(place(osa.exact_adam(RATE)), part)
    params = start()
    state = tx.init(params)
    return [
        lambda: gradient(params, read=state),
        lambda: osa.flush(params, state),
        lambda: osa.make_train_step(loss, tx)(start(), tx.init(params), batches(1)[0]),
    ]


BEHIND = {
    "freeze": optax.freeze({"table": True, "w": False}),
    "scale": optax.scale(0.5),
    "ema": optax.ema(0.9),
    "weight decay": optax.add_decayed_weights(0.1),
    "lazy": osa.lazy(optax.clip(0.1)),
}
PARTS = {"exact": osa.exact_adam(RATE), "rest": optax.sgd(RATE)}
MASKS = {"exact": {"table": True, "w": False}, "rest": {"table": False, "w": True}}
AROUND = {
    "schedule_free": (
        lambda tx: optax.contrib.schedule_free(tx, RATE),
        "Nothing may change the updates",
    ),
    "MultiSteps": (
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
        r"inside optax\.MultiSteps.*gradient span the micro-batches.*lax\.scan",
    ),
    "mechanize": (optax.contrib.mechanize, "Nothing may change the updates"),
    "flatten": (optax.flatten, r"optax\.flatten.*without it"),
    "masks in a chain": (
        lambda _: optax.chain(*(optax.masked(PARTS[k], MASKS[k]) for k in PARTS)),
        r"groups of parameters.*optax\.partition",
    ),
    "rounding": (lambda tx: osa.stochastic_rounding(tx, 0), "cannot be around"),
    "per_row": (osa.per_row, "per_row cannot be around exact_adam"),
    # Its rows would not move: another optimiser, and nothing would say so.
    "lazy": (
        lambda tx: osa.lazy(optax.chain(optax.clip_by_global_norm(1.0), tx)),
        "exact Adam advances all rows",
    ),
    "lazy(per_row)": (lambda tx: osa.lazy(osa.per_row(tx)), "advances all rows|around"),
    "a plain tuple": (
        lambda tx: tx._replace(init=lambda params: (tx.init(params), jnp.zeros(()))),
        r"plain tuple .* let that of a wrapper of your own be a NamedTuple",
    ),
}


def around(wrapper):
    def call():
        gradient(start(), read=wrapper(osa.exact_adam(RATE)).init(start()))

    return [call]


def late(function, *args):
    """Arrays are made in the test, in its types."""
    return functools.partial(function, *args)


REFUSALS = {
    **{
        f"without read: {way}, {change}": Refusal(
            r"made with read=.*'table'.*without", late(without_read, way, change)
        )
        for way, change in WITHOUT_READ
    },
    "read of some": Refusal("made with read=", read_of_some),
    "without read in NNX": Refusal("made with read=", without_read_in_nnx),
    **{
        f"{name} of {size} rows": Refusal(
            rf"`{name}.*must have the shape", late(of_another_height, name, size)
        )
        for name in ("mu", "nu", "last", "log_decay")
        for size in (ROWS - 1, ROWS + 5)
    },
    **{
        f"{name} of more": Refusal(f"`{name}` of shape", late(of_more_parameters, name))
        for name in ("values_until", "remaining", "decay", "count", "clock")
    },
    "of others": Refusal("belong to the parameters", of_other_parameters, most=299),
    **{  # one sentence, without the tree
        f"state of {name}": Refusal(
            "takes its own state",
            late(of_another_optimizer, osa.exact_adam(RATE), other),
            TypeError,
            most=399,
        )
        for name, other in {
            "adam": optax.adam(RATE),
            "sparse_adam": osa.sparse_adam(RATE),
        }.items()
    },
    **{
        f"{name} with the state of {other}": Refusal(
            re.escape(f"{name} needs a state that was made by {name}, got that of")
            + f" {other}: ",
            late(of_another_optimizer, PAIR[name], PAIR[other]),
        )
        for name, other in zip(PAIR, reversed(PAIR), strict=True)
    },
    **{
        f"{name} behind {how}": Refusal(
            "Nothing may follow exact_adam", late(behind, part, place)
        )
        for name, part in BEHIND.items()
        for how, place in {"it": lambda tx: tx, "a chain": optax.chain}.items()
    },
    **{
        f"{name} by name": Refusal(
            "Nothing may follow exact_adam",
            late(behind, BEHIND[name], lambda tx: tx, named),
        )
        for name in ("freeze", "lazy")
    },
    **{
        f"{name} around": Refusal(words, late(around, wrapper))
        for name, (wrapper, words) in AROUND.items()
    },
}
CORE = {x for x in REFUSALS if not re.match(r"without read: |.* of 35 rows", x)}
CORE |= {f"without read: nothing, {x}" for x in ("nothing", "coalesce", "lazy")}
CORE |= {"without read: partition, nothing"}


@pytest.mark.parametrize("name", slow_but(REFUSALS, *CORE))
def test_refused(name):
    refusal = REFUSALS[name]
    for call in refusal.calls():
        with pytest.raises(refusal.error, match=refusal.words) as raised:
            call()
        assert len(str(raised.value)) <= refusal.most
