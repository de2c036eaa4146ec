"""Two optimisers of torch go on as one partition of optax, and back, beside torch."""

import io

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam import torch_compat

ROWS, DIM = 12, 4
EXACT = {"tables": osa.exact_adam(0.02), "rest": optax.adam(0.02)}


def parts(**changes):
    own = {"tables": osa.sparse_adam(0.02), "rest": optax.adam(0.02)} | changes
    labels = {"items": "tables", "users": "tables", "out": {"w": "rest", "b": "rest"}}
    return optax.partition(own, labels)


class Model(torch.nn.Module):
    """Two tables of one shape, and a layer, whose weight is transposed in JAX."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        make = torch.nn.Embedding
        # In another order than that of the tree.
        self.users = make(ROWS, DIM, sparse=sparse)
        self.items = make(ROWS, DIM, sparse=sparse)
        self.out = torch.nn.Linear(DIM, 3)
        self.double()

    def forward(self, users, items):
        return self.out(torch.tanh(self.users(users) * self.items(items)))


def tree_of(model, function):
    """Of each parameter, and whether it is transposed; in the tree of JAX."""
    own = {
        "items": (model.items.weight, False),
        "users": (model.users.weight, False),
        "out": {"w": (model.out.weight, True), "b": (model.out.bias, False)},
    }
    return jax.tree.map(
        lambda x: function(*x), own, is_leaf=lambda x: isinstance(x, tuple)
    )


def array(x, turned):
    return jnp.array(np.array(x.detach()).T if turned else np.array(x.detach()))


def loss(params, users, items, y):
    both = jnp.tanh(params["users"][users] * params["items"][items])
    predicted = both @ params["out"]["w"] + params["out"]["b"][None]
    return jnp.mean((predicted - y) ** 2)


def batches(first, last):
    for number in range(first, last):
        rng = np.random.default_rng(number)
        users, items = (rng.zipf(1.3, (2, 9)) % ROWS).astype(np.int32)
        yield users, items, rng.normal(size=(9, 3))


def optimizers_of(model, sparse):
    tables = [model.users.weight, model.items.weight]
    kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
    return [kind(tables, lr=0.02), torch.optim.Adam(model.out.parameters(), lr=0.02)]


def train(model, optimizers, batches):
    for users, items, y in batches:
        predicted = model(
            torch.from_numpy(users).long(), torch.from_numpy(items).long()
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.mean((predicted - torch.from_numpy(y)) ** 2).backward()
        for optimizer in optimizers:
            optimizer.step()


def states_of(model, saved):
    """As a user has them: two files, and the order in which parameters were given."""
    of_tables, of_rest = (x["state"] for x in saved)
    names = {
        model.users.weight: of_tables[0],
        model.items.weight: of_tables[1],
        model.out.weight: of_rest[0],
        model.out.bias: of_rest[1],
    }

    def state(x, turned):
        own = names[x]
        moments = {key: own[key] for key in ("exp_avg", "exp_avg_sq")}
        return {"step": own["step"]} | {
            key: x.T if turned else x for key, x in moments.items()
        }

    return tree_of(model, state)


def from_file(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def to_torch(x):
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def give_back(model, optimizers, params, states):
    """Loads parameters and state into torch, by its own `load_state_dict`."""
    tables, rest = (x.state_dict() for x in optimizers)
    out = states["out"]
    turned = {"exp_avg": out["w"]["exp_avg"].T, "exp_avg_sq": out["w"]["exp_avg_sq"].T}
    tables["state"] = {0: states["users"], 1: states["items"]}
    rest["state"] = {0: out["w"] | turned, 1: out["b"]}
    for optimizer, state in zip(optimizers, (tables, rest), strict=True):
        optimizer.load_state_dict(jax.tree.map(to_torch, state))

    def copy(x, is_turned):
        own = {
            model.users.weight: params["users"],
            model.items.weight: params["items"],
            model.out.weight: params["out"]["w"],
            model.out.bias: params["out"]["b"],
        }
        new = np.array(own[x])
        with torch.no_grad():
            x.copy_(torch.from_numpy(new.T.copy() if is_turned else new))

    tree_of(model, copy)


@pytest.mark.parametrize("kind", ["sparse_adam", "exact_adam", "schedule"])
def test_there_and_back_beside_torch(kind):
    """Six steps in torch, six here, six in torch again; torch alone does eighteen.

    The rate of a schedule that begins at the step of the checkpoint shows its count.
    """
    is_sparse = kind != "exact_adam"
    changes = EXACT if kind == "exact_adam" else {}
    if kind == "schedule":
        changes = {"rest": optax.adam(lambda count: jnp.where(count < 6, 1e9, 0.02))}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        tx = parts(**changes)
        model = Model(is_sparse)
        theirs = optimizers_of(model, is_sparse)
        train(model, theirs, batches(0, 6))
        saved = [from_file(x.state_dict()) for x in theirs]
        params = tree_of(model, array)
        state = torch_compat.to_state(tx, params, states_of(model, saved))
        step = osa.make_train_step(loss, tx)
        for batch in batches(6, 12):
            params, state, _ = step(params, state, *batch)
        if kind == "exact_adam":
            with pytest.raises(ValueError, match=r"flush\(params, state\) first"):
                torch_compat.from_state(params, state)
            params, state = osa.flush(params, state)
        train(model, theirs, batches(6, 12))
        assert_near(params, tree_of(model, array))
        other = Model(is_sparse)
        again = optimizers_of(other, is_sparse)
        back = torch_compat.from_state(params, state)
        assert back["users"]["step"] == 12
        assert isinstance(back["users"]["step"], int) == is_sparse
        give_back(other, again, params, back)
        for own, optimizers in ((model, theirs), (other, again)):
            train(own, optimizers, batches(12, 18))
        assert_near(*(tree_of(x, array) for x in (other, model)))
        assert again[0].state[other.users.weight]["step"] == 18


@pytest.mark.slow
def test_tables_of_torch_in_host_memory():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        tx, model = parts(), Model(True)
        theirs = optimizers_of(model, True)
        train(model, theirs, batches(0, 6))
        params = tree_of(model, array)
        saved = [x.state_dict() for x in theirs]
        state = torch_compat.to_state(tx, params, states_of(model, saved))
        tables = {
            name: host.HostTable(
                (ROWS, DIM), "float64", init=lambda a, b, own=params[name]: own[a:b]
            )
            for name in ("users", "items")
        }
        with host.HostTrainer(loss, tx, params | tables, state=state) as trainer:
            assert len([*trainer.run(batches(6, 12))]) == 6
            train(model, theirs, batches(6, 12))
            assert_near(trainer.params, tree_of(model, array))


def assert_near(actual, expected):
    """In float64, after six steps: sums of another order, and `1 - b2**t`."""
    chex.assert_trees_all_close(actual, expected, rtol=1e-11, atol=1e-13)


def state_of(shape=(3,), step=2):
    return {"step": step, "exp_avg": np.ones(shape), "exp_avg_sq": np.ones(shape)}


ADAM = optax.adam(1)
TWO = {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}
WRONG = {
    "a tree like the parameters": (ADAM, {"a": state_of()}),
    "transposed or joined": (ADAM, {"a": state_of(), "b": state_of((4,))}),
    "a part of their own": (ADAM, {"a": state_of(), "b": state_of(step=3)}),
    "before a parameter's first step": (ADAM, {"a": state_of(), "b": None}),
    "torch's state of \\['b'\\]": (ADAM, {"a": state_of(), "b": {"step": 2}}),
    "it would be lost": (optax.sgd(1), {"a": state_of(), "b": None}),
    "no two moments": (osa.lazy(optax.rmsprop(1)), {"a": None, "b": state_of()}),
    "Of amsgrad": (ADAM, {"a": state_of() | {"max_exp_avg_sq": 1}, "b": state_of()}),
    "of a whole state_dict give": (ADAM, {"a": {"state": {}}, "b": state_of()}),
    "got one that counts those of each": (
        osa.lazy(osa.per_row(ADAM)),
        {"a": state_of(), "b": state_of()},
    ),
    "a count of steps": (ADAM, {"a": state_of(step=1.5), "b": state_of(step=1.5)}),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_has_no_place_is_refused(words):
    tx, states = WRONG[words]
    params = (
        {k: np.ones((3, 2), np.float32) for k in TWO} if "rowwise" in words else TWO
    )
    with pytest.raises(ValueError, match=words):
        torch_compat.to_state(tx, params, states)


def test_steps_apart_and_counts_without_moments():
    labels = {"a": "one", "b": "two"}
    adams = optax.partition({"one": optax.adam(1), "two": optax.adam(1)}, labels)
    states = {"a": state_of(step=2), "b": state_of(step=3)}
    state = torch_compat.to_state(adams, TWO, states)
    back = torch_compat.from_state(TWO, state)
    assert [float(back[x]["step"]) for x in "ab"] == [2, 3]
    sgd = optax.sgd(optax.constant_schedule(1))
    mixed = optax.partition({"one": optax.adam(1), "two": sgd}, labels)
    state = torch_compat.to_state(mixed, TWO, states | {"b": {"step": 2}})
    counts = [int(x) for _, x in optax.tree.get_all_with_path(state, "count")]
    assert counts == [2, 2]
    with pytest.raises(ValueError, match="no step for the count at"):
        torch_compat.to_state(mixed, TWO, states | {"b": {"step": 4}})
    assert torch_compat.from_state(TWO, state)["b"] is None
    with pytest.raises(ValueError, match="keeps two moments"):
        torch_compat.from_state(TWO, sgd.init(TWO))


def test_what_remembers_otherwise_is_new():
    """A count goes with the moments beside it, of which torch has none."""
    schedule = optax.scale_by_schedule(lambda count: jnp.where(count == 50, 2.0, 9.0))
    states = {x: state_of(step=50) for x in TWO}
    for adam in (ADAM, optax.inject_hyperparams(optax.adam)(1.0)):
        tx = optax.chain(adam, optax.ema(0.9), schedule)
        state = torch_compat.to_state(tx, TWO, states)
        assert [int(state[i].count) for i in (1, 2)] == [0, 50]
        with jax.numpy_dtype_promotion("standard"):  # optax.ema mixes types
            updates, _ = tx.update(TWO, state, TWO)
            alone, _ = adam.update(TWO, state[0], TWO)
        twice = jax.tree.map(lambda x: 2 * x, alone)
        chex.assert_trees_all_close(updates, twice, rtol=1e-6)
    noise = torch_compat.to_state(
        optax.chain(ADAM, optax.add_noise(1.0, 0.5, 0)), TWO, states
    )
    assert int(noise[1].count) == 50  # a random key is no moment
    by_row = osa.lazy(osa.per_row(ADAM))
    with pytest.raises(ValueError, match=r"from_state needs .* counts those of each"):
        torch_compat.from_state(TWO, by_row.init(TWO))


def test_the_state_owns_its_arrays():
    """A step that donates the state leaves torch's tensors as they are."""
    params = {"a": jnp.ones((ROWS, DIM))}
    tensors = torch.ones(ROWS, DIM), torch.ones(ROWS, DIM)
    states = {"a": {"step": 1, "exp_avg": tensors[0], "exp_avg_sq": tensors[1]}}
    tx = osa.sparse_adam(0.1)
    state = torch_compat.to_state(tx, params, states)
    step = osa.make_train_step(lambda params, ids: jnp.sum(params["a"][ids]), tx)
    step(params, state, np.arange(3))
    assert all(bool((x == 1).all()) for x in tensors)


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("kind", ["sparse_adam", "exact_adam", "lazy"])
def test_labels_that_are_a_prefix_of_the_parameters(kind):
    """optax masks a subtree by one node; the state is that of labels for each leaf."""
    of_rows = {
        "sparse_adam": osa.sparse_adam(0.1),
        "exact_adam": osa.exact_adam(0.1),
        "lazy": osa.lazy(optax.adam(0.1)),
    }[kind]
    tables = [jnp.ones((4, 2)), jnp.ones((5, 2))]
    params = {"tables": tables, "layer": {"w": jnp.ones(2), "b": jnp.ones(1)}}
    states = jax.tree.map(
        lambda x: {"step": 3, "exp_avg": x / 2, "exp_avg_sq": x / 4}, params
    )
    rest = optax.adam(0.1)
    labels = {"tables": "rows", "layer": "rest"}
    of_leaves = {"tables": ["rows"] * 2, "layer": dict.fromkeys("wb", "rest")}
    made, expected = (
        torch_compat.to_state(
            optax.partition({"rows": of_rows, "rest": rest}, x), params, states
        )
        for x in (labels, of_leaves)
    )
    chex.assert_trees_all_equal(jax.tree.leaves(made), jax.tree.leaves(expected))
    tx = optax.partition({"rows": of_rows, "rest": rest}, labels)
    assert jax.tree.structure(made) == jax.tree.structure(tx.init(params))
    back = torch_compat.from_state(params, made)
    chex.assert_trees_all_equal(back, states)
    tx.update(jax.tree.map(jnp.ones_like, params), made, params)
