"""Every public transformation of the installed optax inside `lazy`: works, or why not.

A name that optax adds fails here until it is put into one of the tables.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import optax_sparse_adam as osa

from ..helpers.blocks import recorded
from ..helpers.identity import assert_identity, make_task
from ..helpers.support import bcoo, compile_for_users, slow_but

RATE = 0.1
# Names that optax deprecates are public too.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ADAM = optax.adam(RATE)
ONE = {"table": "a", "bias": "b"}
TABLE = {"table": True, "bias": False}


def early(step, *args, **kwargs):
    return step < 2


def norm(updates, *args, **kwargs):
    return optax.tree.norm(updates)


# Called without arguments, or with the learning rate.
PLAIN = """
adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad centralize fromage
identity keep_params_nonnegative lamb lars lion nadam nadamw normalize_by_update_norm
novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent polyak_sgd radam
rmsprop rprop scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan
scale_by_amsgrad scale_by_belief scale_by_lion scale_by_novograd
scale_by_optimistic_gradient scale_by_param_block_norm scale_by_polyak scale_by_radam
scale_by_rms scale_by_rprop scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev
scale_by_trust_ratio scale_by_yogi set_to_zero sgd sign_sgd signum sm3 yogi zero_nans

contrib.acprop contrib.ademamix contrib.adopt contrib.cocob contrib.dadapt_adamw
contrib.dowg contrib.madgrad contrib.momo contrib.momo_adam contrib.normalize
contrib.prodigy contrib.reduce_on_plateau contrib.scale_by_acprop
contrib.scale_by_ademamix contrib.scale_by_adopt contrib.scale_by_cocob
contrib.scale_by_madgrad contrib.scale_by_simplified_ademamix
contrib.schedule_free_adamw contrib.schedule_free_sgd contrib.simplified_ademamix
"""

# What works: it does to the touched rows what it does to a table of these rows.
WORKS = dict.fromkeys(PLAIN.split(), ()) | {
    "adaptive_grad_clip": (0.1,),
    "add_decayed_weights": (0.1,),
    "add_noise": (0.1, 0.5, 0),
    "apply_if_finite": (ADAM, 3),
    "chain": (optax.clip_by_global_norm(0.5), ADAM),
    "clip": (0.1,),
    "clip_by_global_norm": (0.1,),
    "conditionally_mask": (ADAM, early),
    "conditionally_transform": (ADAM, early),
    "ema": (0.9,),
    "freeze": (TABLE,),
    "inject_hyperparams": lambda inject: inject(optax.adam)(RATE),
    "inject_stateful_hyperparams": lambda inject: inject(optax.adam)(RATE),
    "masked": (ADAM, TABLE),
    "multi_transform": ({"a": ADAM, "b": optax.sgd(RATE)}, ONE),
    "named_chain": (("clip", optax.clip(0.5)), ("adam", ADAM)),
    "noisy_sgd": lambda noisy_sgd: noisy_sgd(RATE, key=0),
    "partition": ({"a": ADAM, "b": optax.sgd(RATE)}, ONE),
    "scale": (0.1,),
    "scale_by_learning_rate": (0.1,),
    "scale_by_schedule": (optax.linear_schedule(1.0, 0.0, 5),),
    "selective_transform": lambda select: select(ADAM, freeze_mask=TABLE),
    "snapshot": ("norm", norm),
    "stateless": (lambda updates, params: jax.tree.map(jnp.sin, updates),),
    "stateless_with_tree_map": (lambda update, param: update * param,),
    "trace": (0.9,),
    "with_extra_args_support": (ADAM,),
    "contrib.dog": lambda dog: dog(init_step=("learning_rate", 1e-6)),
    "contrib.mechanize": (ADAM,),
    "contrib.schedule_free": (ADAM, RATE),
    "contrib.split_real_and_imaginary": (ADAM,),
}

# Of the transformations that work, those that keep rows in their state and treat each
# row alone. The others have no state to take along, or norms of parameters, updates or
# the state, of columns, random numbers or branches in the middle.
IN_BLOCKS = """
adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad chain ema
inject_hyperparams inject_stateful_hyperparams lion masked multi_transform nadam nadamw
named_chain optimistic_adam optimistic_adam_v2 optimistic_gradient_descent partition
radam rmsprop rprop scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan
scale_by_amsgrad scale_by_belief scale_by_lion scale_by_optimistic_gradient
scale_by_radam scale_by_rms scale_by_rprop scale_by_rss scale_by_stddev scale_by_yogi
signum trace with_extra_args_support yogi

contrib.acprop contrib.ademamix contrib.adopt contrib.cocob contrib.madgrad
contrib.scale_by_acprop contrib.scale_by_ademamix contrib.scale_by_adopt
contrib.scale_by_cocob contrib.scale_by_madgrad contrib.scale_by_simplified_ademamix
contrib.schedule_free contrib.schedule_free_adamw contrib.schedule_free_sgd
contrib.simplified_ademamix contrib.split_real_and_imaginary
"""

# One for each form of state: none, moments, a scalar, a key, a column, nested, masked.
FORMS = "chain contrib.prodigy freeze lamb noisy_sgd partition sm3"

# The same, but that their `init` measures the whole table.
MEASURES = {"scale_by_distance_over_gradients": ()}

# What lazy refuses, with the words of the error.
REFUSED = {
    "adafactor": ((), "use sparse_adafactor"),
    "apply_every": ((2,), "lax.scan in the loss"),
    "flatten": ((ADAM,), "hold the rows of a table along their first axes"),
    "lbfgs": ((), "works on the whole gradient"),
    "lookahead": ((ADAM, 2, 0.5), "synchronises all rows"),
    "monitor": (({"norm": norm},), "use optax.snapshot"),
    "scale_by_backtracking_linesearch": ((3,), "searches along the whole gradient"),
    "scale_by_factored_rms": ((), "use sparse_adafactor"),
    "scale_by_lbfgs": ((), "works on the whole gradient"),
    "scale_by_zoom_linesearch": ((3,), "searches along the whole gradient"),
    "contrib.differentially_private_aggregate": ((1.0, 0.0, 0), "each example"),
    "contrib.dpsgd": ((RATE, 1.0, 0.0, 0), "each example"),
    "contrib.galore": ((), "whole matrices"),
    "contrib.hutchinson_estimator_diag_hessian": ((0,), "at all parameters"),
    "contrib.muon": ((), "whole matrices"),
    "contrib.sam": ((ADAM, ADAM), "two steps"),
    "contrib.scale_by_galore": ((), "whole matrices"),
    "contrib.scale_by_muon": ((), "whole matrices"),
    "contrib.sophia": ((), "at all parameters"),
}

# What is wrong, and has no state by which lazy could tell.
WRONG = {
    "clip_by_block_rms": ((0.1,), "its mean over rows counts padding"),
    "scale_by_param_block_rms": ((), "its mean over rows counts padding"),
}

# A part of monitor, whose updates are no updates; functions without a return type that
# make no transformation.
OTHERS = {
    "measure_with_ema",
    "matrix_inverse_pth_root",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
    "contrib.schedule_free_eval_params",
}


def signature(function):
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.signature(function)


def public_transformations():
    """What says that it returns a transformation, or does not say what it returns."""
    found = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, thing in vars(module).items():
            is_function = inspect.isfunction(thing) or isinstance(
                thing, functools.partial
            )
            if name.startswith("_") or not is_function:
                continue
            returns = signature(thing).return_annotation
            if returns is inspect.Signature.empty or "GradientTransf" in str(returns):
                found[prefix + name] = thing
    return found


PUBLIC = public_transformations()


def make(name, arguments):
    function = PUBLIC[name]
    if callable(arguments):
        return arguments(function)
    if not arguments and "learning_rate" in signature(function).parameters:
        return function(learning_rate=RATE)
    return function(*arguments)


@pytest.fixture(autouse=True)
def as_optax_expects():
    """optax promotes types; float64 shows what is rounding and what is not."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(),
    ):
        yield


def check(tx, rows=(2, 5, 7, 11)):
    # Twenty steps of rounding; what is wrong is off by more than a hundredth.
    assert_identity(osa.lazy(tx), tx, make_task(rows), 1e-12, value=jnp.float64(1.0))


def test_every_transformation_is_classified():
    tables = list(map(set, (WORKS, MEASURES, REFUSED, WRONG, OTHERS)))
    assert sum(map(len, tables)) == len(set().union(*tables)), "a name in two tables"
    assert set(PUBLIC) == set().union(*tables)


@pytest.mark.parametrize("name", slow_but(WORKS, *FORMS.split()))
def test_works(name):
    check(make(name, WORKS[name]))


@pytest.mark.parametrize("name", slow_but([*WORKS, *MEASURES], *FORMS.split()))
def test_blocks_and_temporaries(name):
    """Which are updated in blocks; and what a donated step holds for a moment."""
    rows, array = 1_000_000, jax.ShapeDtypeStruct
    params = {"table": array((rows, 5), "float64"), "bias": array((4,), "float64")}
    tx = optax.with_extra_args_support(osa.lazy(make(name, WORKS.get(name, ()))))
    state = jax.eval_shape(tx.init, params)

    def step(params, state, data, indices):
        grad = bcoo(data, indices, params["table"].shape, unique_indices=True)
        grads = params | {"table": grad}
        updates, state = tx.update(grads, state, params, value=jnp.float64(1.0))
        return osa.apply_updates(params, updates), state

    args = params, state, array((8, 5), "float64"), array((8, 1), "int32")
    with recorded() as taken:
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(*args)
    assert any(taken) == (name in IN_BLOCKS.split())
    if any(leaf.shape[:1] == (rows,) for leaf in jax.tree.leaves(state)):
        # A copy of one column of the table would be 8 MB; a table, 40 MB.
        memory = compile_for_users(traced.lower()).memory_analysis()
        assert memory.temp_size_in_bytes < 20_000


@pytest.mark.parametrize("name", MEASURES)
def test_works_on_all_rows(name):
    check(make(name, MEASURES[name]), rows=range(13))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        check(make(name, arguments))


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    arguments, _ = WRONG[name]
    with pytest.raises(AssertionError, match="elements differ"):
        check(make(name, arguments))
