"""Functions that go by the size of a table, of which a step has some rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from ..helpers.host_tables import (
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import slow_but


def is_large(params):
    """Of the table, and not of the rows of a batch."""
    return jax.tree.map(lambda x: x.size > 400, params)


def is_largest(params):
    most = max(x.size for x in jax.tree.leaves(params))
    return jax.tree.map(lambda x: x.size == most, params)


def labels(params):
    return jax.tree.map(lambda large: "rows" if large else "dense", is_large(params))


PARTS = {"rows": osa.exact_adam(0.1), "dense": optax.sgd(0.1)}
INSIDE = {"rows": osa.rowwise_adagrad(0.1), "dense": optax.sgd(0.1)}
BY_SIZE = {
    "exact_adamw": osa.exact_adamw(0.1, weight_decay=0.2, mask=is_large),
    "lazy": osa.lazy(optax.adamw(0.1, weight_decay=0.2, mask=is_large)),
    "in front": optax.chain(
        osa.lazy(optax.masked(optax.clip(0.1), is_large)), osa.exact_adam(0.1)
    ),
    "the largest": osa.lazy(optax.adamw(0.1, weight_decay=0.2, mask=is_largest)),
    "labels": optax.partition(PARTS, labels),
    "labels inside of lazy": osa.lazy(optax.partition(INSIDE, labels)),
}


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", BY_SIZE)
def test_optimisers_that_go_by_size_are_refused(name):
    with pytest.raises(ValueError, match=r"HostTrainer runs .* depends on the number"):
        host.HostTrainer(loss, BY_SIZE[name], host_params(*begin()))


PLATEAU = optax.contrib.reduce_on_plateau()
WITH_EXTRA_ARGS = {
    "lazy": osa.lazy(optax.chain(optax.adamw(0.1, mask=is_large), PLATEAU)),
    "exact_adamw": optax.chain(
        osa.lazy(PLATEAU), osa.exact_adamw(0.1, weight_decay=0.2, mask=is_large)
    ),
}


def of_keyword(grads, state, params=None, *, factor, **_):
    return jax.tree.map(lambda x: factor * x, grads), state


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", WITH_EXTRA_ARGS)
def test_those_that_want_the_loss_are_refused(name):
    with pytest.raises(ValueError, match=r"HostTrainer runs .* depends on the number"):
        host.HostTrainer(loss, WITH_EXTRA_ARGS[name], host_params(*begin()))


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("mask", [is_large, {"table": True, "w": False}], ids=type)
def test_those_that_want_a_keyword_are_asked_in_the_first_step(mask):
    """Nothing is trained, and nothing is lost."""
    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, of_keyword)
    tx = osa.lazy(optax.chain(inner, optax.adamw(0.1, mask=mask)))
    (batch,) = batches(0, 1)
    with host.HostTrainer(loss, tx, host_params(*begin())) as trainer:
        before = np.array(trainer.params["table"])
        if mask is is_large:
            for _ in range(2):
                with pytest.raises(ValueError, match="depends on the number of rows"):
                    trainer.step(*batch, factor=0.5)
            np.testing.assert_array_equal(trainer.params["table"], before)
        else:
            trainer.step(*batch, factor=0.5)
            assert (trainer.params["table"] != before).any()


@pytest.mark.slow
@pytest.mark.parametrize("count", slow_but([5, 6], 5))
def test_a_batch_of_as_many_rows_as_another_leaf_has(count):
    """A mask by that number would take the rows for that leaf."""
    mask = lambda tree: jax.tree.map(lambda x: x.shape[0] == 6, tree)  # noqa: E731
    tx = osa.exact_adamw(0.05, weight_decay=0.9, mask=mask)
    params = host_params(*begin()) | {"u": np.ones((6, 3), np.float32)}
    with host.HostTrainer(lambda p, i: p["table"][i].sum(), tx, params) as trainer:
        ids = np.arange(count)
        if count == 6:
            with pytest.raises(ValueError, match=r"for its touched rows \(6\)"):
                trainer.step(ids)
        else:
            trainer.step(ids)


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", slow_but(BY_SIZE, "lazy"))
def test_they_are_refused_beside_a_leaf_that_is_none(name):
    """As `eqx.partition` has one for each field that is no array."""
    params = {"a": None, "b": {"c": None}, **host_params(*begin())}
    with pytest.raises(ValueError, match=r"HostTrainer runs .* depends on the number"):
        host.HostTrainer(loss, BY_SIZE[name], params)


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.slow
@pytest.mark.parametrize("tx", [osa.exact_adam(0.1), osa.lazy(optax.adam(0.1))])
def test_leaves_that_are_none(tx):
    """Before the table, between and after; nothing is refused, nothing else trained."""
    rows, w = begin()
    params = {"a": None, **host_params(rows, w), "u": None, "z": [None]}
    expected = {**params, "table": rows}
    expected = train_in_memory(loss, tx, expected, batches(0, 4))
    by_size = {"sparse": lambda path, x: x.size > 400}
    with host.HostTrainer(loss, tx, params, **by_size) as trainer:
        values = list(trainer.run(batches(0, 4)))
        assert_trained_alike(trainer, values, expected)


MASKED = {
    "exact_adamw": lambda tree: osa.exact_adamw(0.1, weight_decay=0.2, mask=tree),
    "lazy": lambda tree: osa.lazy(optax.adamw(0.1, weight_decay=0.2, mask=tree)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", MASKED)
def test_the_tree_that_such_a_function_returns(name):
    """As the refusal advises; a `HostTable` has a size, too."""
    rows, w = begin()
    params = host_params(rows, w)
    tx = MASKED[name](is_large(params))
    assert is_large(params) == {"table": True, "w": False}
    expected = train_in_memory(loss, tx, {"table": rows, "w": w}, batches(0, 4))
    with host.HostTrainer(loss, tx, params) as trainer:
        values = list(trainer.run(batches(0, 4)))
        assert_trained_alike(trainer, values, expected)


@pytest.mark.slow
def test_sparse_is_asked_of_whole_tables():
    """Of some rows it would say that the gradient is dense, and train as lazy Adam."""
    tx, (rows, w) = osa.exact_adam(0.1), begin()
    expected = train_in_memory(loss, tx, {"table": rows, "w": w}, batches(0, 4))
    by_size = {"sparse": lambda path, x: x.size > 400}
    with host.HostTrainer(loss, tx, host_params(rows, w), **by_size) as trainer:
        values = list(trainer.run(batches(0, 4)))
        assert_trained_alike(trainer, values, expected)


@pytest.mark.parametrize("sparse", [{"table": np.False_, "w": True}, lambda *_: False])
def test_a_table_whose_gradient_is_dense_is_refused(sparse):
    words = r"the gradient of \['table'\] is dense.* say True for the table"
    with pytest.raises(ValueError, match=words):
        host.HostTrainer(
            loss, osa.exact_adam(0.1), host_params(*begin()), sparse=sparse
        )


def by_number(grads, state, params=None):
    table = grads["table"]
    return grads | {"table": table * (1 / table.nse)}, state


@pytest.mark.slow
@pytest.mark.parametrize("length", [1008, 1009, 1010])
def test_a_state_as_long_as_no_table(length):
    """Tables are asked of with 1009 rows or so, as no array that is there has."""

    def init(params):
        return jnp.zeros(length), jnp.zeros((), jnp.int32)

    def keep(updates, state, params=None, *, value):
        values, count = state
        return updates, (values.at[count % length].set(value), count + 1)

    history = optax.GradientTransformationExtraArgs(init, keep)
    tx = optax.chain(osa.sparse_adam(0.1), history)
    with host.HostTrainer(loss, tx, host_params(*begin())) as trainer:
        values = [trainer.step(*batch) for batch in batches(0, 2)]
        assert trainer.state[1][0][:2].tolist() == [float(x) for x in values]


@pytest.mark.usefixtures("as_optax_expects")
def test_behind_a_part_that_takes_no_dense_gradients():
    part = optax.GradientTransformation(optax.init_empty_state, by_number)
    tx = optax.chain(part, BY_SIZE["lazy"])
    trainer = host.HostTrainer(loss, tx, host_params(*begin()))
    with pytest.raises(ValueError, match=r"lazy runs .* depends on the number"):
        trainer.step(*next(batches(0, 1)))
