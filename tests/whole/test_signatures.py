"""The names that users write: what may be given by keyword, and the defaults."""

import inspect

import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import torch_compat

from ..helpers.optimizers import OPTIMIZERS

SIGNATURES = {
    osa.value_and_grad: "(fun, argnums=0, has_aux=False, holomorphic=False, "
    "allow_int=False, *, sparse=None, read=None)",  # in the order of JAX's own
    osa.grad: "(fun, argnums=0, has_aux=False, holomorphic=False, "
    "allow_int=False, *, sparse=None, read=None)",
    osa.embedding_bag: "(table, ids, *, offsets=None, segment_ids=None, "
    "num_segments=None, weights=None, mode='sum', include_last_offset=False, "
    "indices_are_sorted=False, unique_indices=False)",
    osa.frozen_lookup: "(trained, ids, *, frozen, rows)",
    osa.coalesce: "(grad)",
    osa.gradient_stats: "(grads)",
    osa.sparse_adam: "(learning_rate, b1=0.9, b2=0.999, eps=1e-08, *, mu_dtype=None, "
    "maximize=False)",
    osa.scale_by_sparse_adam: "(b1=0.9, b2=0.999, eps=1e-08, *, mu_dtype=None)",
    osa.lazy: "(inner)",
    osa.exact_adam: "(learning_rate, b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, "
    "mu_dtype=None, *, nesterov=False)",
    osa.exact_adamw: "(learning_rate, b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, "
    "mu_dtype=None, weight_decay=0.0001, mask=None, *, nesterov=False)",
    osa.flush: "(params, state)",
    osa.sparse_adafactor: "(learning_rate=0.01, beta2_decay=-0.8, eps=(None, 0.001), "
    "d=1.0, weight_decay=0.0, *, maximize=False)",
    osa.apply_updates: "(params, updates)",
    osa.take_rows: "(tx, params, state, ids)",
    osa.put_rows: "(tx, params, state, ids, rows, row_state)",
    osa.reset_rows: "(tx, params, state, ids, rows)",
    osa.rows_of: "(grads, ids)",
    osa.psum: "(grads, axis_name)",
    osa.pmean: "(grads, axis_name)",
    osa.local_rows: "(grad, axis_name)",
}


def signature(function, without=()):
    """Names, kinds and defaults, without types."""
    parameters = inspect.signature(function).parameters.values()
    return inspect.Signature(
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in parameters
        if parameter.name not in without
    )


@pytest.mark.parametrize(
    ("function", "expected"),
    SIGNATURES.items(),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_functions(function, expected):
    assert str(signature(function)) == expected


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["SparseAdam", "Adam", "AdamW", "Adafactor", "Optimizer"]
)
def test_as_torch(name):
    """All that torch's documentation lists; `allow_dense` is ours."""
    torch = pytest.importorskip("torch")
    ours, theirs = getattr(torch_compat, name), getattr(torch.optim, name)
    assert signature(ours, ["allow_dense"]) == signature(theirs)
    for method in (
        "add_param_group",
        "load_state_dict",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "register_step_post_hook",
        "register_step_pre_hook",
        "state_dict",
        "step",
        "zero_grad",
    ):
        ours_, theirs_ = getattr(ours, method), getattr(theirs, method)
        assert signature(ours_) == signature(theirs_), method


WRONG = [
    (osa.rowwise_adagrad, {"initial_accumulator_value": -0.1}, "initial_accumulator"),
    (osa.rowwise_adagrad, {"eps": 0.0}, "eps"),
    (osa.rowwise_adam, {"b1": 1.0}, "beta parameter at index 0"),
    (osa.rowwise_adam, {"b2": -0.1}, "beta parameter at index 1"),
    (osa.rowwise_adam, {"eps": 0.0}, "epsilon"),
    (osa.sparse_adafactor, {"beta2_decay": 0.1}, "beta2_decay"),
    (osa.sparse_adafactor, {"eps": (-1e-9, 1e-3)}, r"eps\[0\]"),
    (osa.sparse_adafactor, {"eps": (None, -1e-9)}, r"eps\[1\]"),
    (osa.sparse_adafactor, {"d": 0.9}, "d:"),
    (osa.sparse_adafactor, {"weight_decay": float("nan")}, "weight_decay"),
]


@pytest.mark.parametrize(("make", "options", "words"), WRONG)
def test_wrong_numbers(make, options, words):
    with pytest.raises(ValueError, match=f"Invalid {words}.* must be"):
        make(0.1, **options)


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"lazy", "per_row"}))
def test_one_rule_for_the_learning_rate(name):
    make = OPTIMIZERS[name].make
    make(0)
    for rate in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"Invalid learning rate: {rate}. It must"):
            make(rate)
