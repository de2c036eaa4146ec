"""The table of wrappers: what may stand around an optimiser of rows."""

import copy
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_sparse_adam as osa

from . import wrapper_changes as changes
from . import wrapper_forms as forms
from .wrapper_changes import halve, log_norm, zero
from .wrappers import (
    after,
    around,
    before,
    in_chain,
    norm,
    of_data,
    of_entries,
    of_leaf,
    of_rows,
    of_value,
    on_rows,
)


class Case(NamedTuple):
    """A wrapper.

    Attributes:
      wrapper: `wrapper(tx, seen)`.
      exact: Whether `exact_adam` takes it: it refuses a state behind its own, as of
        what changes its updates, and needs to be found in the state.
      sums: Whether it takes gradients whose duplicates are added up.
      value: Whether it asks for the loss.
      in_flax: Whether Flax does, which takes no state whose structure changes, no
        gradients but as they are, and labels and masks of its own trees only.
    """

    wrapper: object
    exact: bool = False
    sums: bool = False
    value: bool = False
    in_flax: bool = True


def chain_of_rows(function):
    return Case(in_chain(of_rows(function)))


def chain_of_data(function):
    return Case(in_chain(of_data(function)))


def chain_of_entries(function):
    return Case(in_chain(of_entries(function)))


def of_gradients(function, **facts):
    return Case(before(lambda grads, *_: on_rows(function, grads)), **facts)


def in_lazy(part):
    return Case(forms.behind(osa.lazy(part)))


SCHEDULE = optax.linear_schedule(1.0, 0.0, 4)

# What is usual. It is tried around two optimisers.
USUAL = {
    "nothing": Case(lambda tx, seen: tx, exact=True),
    "extra args": Case(lambda tx, seen: optax.with_extra_args_support(tx), exact=True),
    "chain of one": Case(forms.behind(), exact=True),
    "chain and identity": Case(forms.behind(optax.identity())),
    "passes": Case(after(changes.passes)),
    "halve": Case(in_chain(halve)),
    "halve around": Case(after(halve)),
    "halve by an operator": chain_of_rows(lambda x: x * 0.5),
    "cap": chain_of_data(lambda data: jnp.clip(data, -0.01, 0.01)),
    "freeze a row": chain_of_rows(changes.freeze_a_row),
    "by path": Case(in_chain(changes.by_path)),
    "count": Case(after(changes.count, zero)),
    "log": Case(in_chain(log_norm)),
    "log in order": Case(after(changes.log_in_order, zero)),
    "log each": Case(in_chain(changes.log_each)),
    "print": Case(in_chain(changes.print_step)),
    "log twice and halve": Case(in_chain(log_norm, halve, log_norm)),
    "store": Case(after(changes.store), in_flax=False),
    "store the norm": Case(after(changes.store_norm, lambda _: jnp.zeros(()))),
    "store the sum": Case(after(changes.store_sum, changes.zeros_like)),
    "store parameters": Case(after(changes.store_params, lambda _: jnp.zeros((4, 3)))),
    "make dense": chain_of_rows(lambda x: x.todense()),
    "make zeros": chain_of_data(jnp.zeros_like),
    "drop": chain_of_rows(lambda x: None),
    "replace": chain_of_rows(changes.replace),
    "noise": Case(after(changes.add_noise, changes.first_key)),
    "decay": Case(after(changes.decay)),
    "clip rows before": Case(before(changes.clip_rows)),
    "log before": Case(before(changes.log_gradient), exact=True),
    "update replaced": Case(forms.update_replaced),
    "update wrapped": Case(forms.update_wrapped),
    "update subclassed": Case(forms.update_subclassed),
    "slots": Case(forms.Slots, exact=True),
    "mean of two": Case(around(forms.mean_of_two)),
    "other parameters": Case(around(forms.at_other_parameters)),
    "partition": Case(forms.partition, in_flax=False),
    "partition and halve": Case(forms.partition_and_halve, in_flax=False),
    "masked": Case(forms.masked, in_flax=False),
    "inject_hyperparams": Case(forms.injected),
    "named_chain": Case(forms.named_chain),
    "apply_if_finite": Case(forms.finite(times=1), sums=True),
    "conditionally_mask": Case(forms.always(optax.conditionally_mask), sums=True),
    "conditionally_transform": Case(
        forms.always(optax.conditionally_transform), sums=True
    ),
}
# How a transformation is made, called and kept.
FORMS = {
    "tuple of own": Case(forms.pair_of(lambda update: update), exact=True),
    "partial": Case(forms.pair_of(functools.partial), exact=True),
    "lambda": Case(forms.pair_of(lambda f: lambda *a, **kw: f(*a, **kw)), exact=True),
    "bound method": Case(forms.pair_of(lambda update: update.__call__), exact=True),
    "shallow copy": Case(forms.pair_of(copy.copy), exact=True),
    "jit": Case(forms.pair_of(jax.jit), exact=True),
    "checkpoint": Case(forms.pair_of(jax.checkpoint), exact=True),
    "record": Case(lambda tx, seen: forms.Record(*tx), exact=True),
    "init and update again": Case(
        lambda tx, seen: optax.GradientTransformation(*tx), exact=True
    ),
    "deep copy": Case(lambda tx, seen: copy.deepcopy(tx), exact=True),
    "mock": Case(forms.mocked, exact=True),
    "named_scope": Case(around(forms.in_scope), exact=True),
    "jit of a log": Case(forms.jitted_log),
    "scan of one step": Case(around(forms.in_scan)),
    "vmap of one step": Case(around(forms.in_vmap)),
    "own skip": Case(around(forms.in_cond), sums=True),
    "state in a dict": Case(
        forms.kept(lambda x: {"a": x}, lambda x, _: x["a"]), exact=True
    ),
    "state in a record": Case(
        forms.kept(forms.Held, lambda x, _: x.inner), exact=True, in_flax=False
    ),
    "leaves of the state": Case(forms.kept(jax.tree.leaves, forms.unflatten)),
    "state of low precision": Case(forms.kept(forms.low, forms.like)),
    "state as a vector": Case(
        forms.kept(forms.as_vector, forms.unravel), in_flax=False
    ),
    "another init": Case(forms.init_replaced),
    "sum of two": Case(forms.sum_of_two),
}
OF_OPTAX = {
    "multi_transform": Case(forms.with_labels(forms.LABELS), in_flax=False),
    "labels by names": Case(forms.with_labels(lambda _: forms.LABELS), in_flax=False),
    "mask by names": Case(forms.mask_by_names, in_flax=False),
    "selective_transform": Case(forms.selective_transform, in_flax=False),
    "freeze": Case(forms.behind(optax.freeze(forms.IS_W)), in_flax=False),
    "freeze the table": Case(forms.behind(optax.freeze(forms.IS_TABLE)), in_flax=False),
    "zero_nans": Case(forms.behind(optax.zero_nans()), in_flax=False),
    "set_to_zero": Case(forms.behind(optax.set_to_zero())),
    "identity in front": Case(forms.in_front(optax.identity()), exact=True),
    "chain of chains": Case(forms.chain_of_chains),
    "extra args twice": Case(forms.extra_args_twice),
    "inject a factor": Case(forms.inject_factor(0.5)),
    "inject a schedule": Case(forms.inject_factor(SCHEDULE)),
    "snapshot": Case(forms.behind(optax.snapshot("size", norm))),
    "monitor": Case(forms.monitor),
    "stateless": Case(
        forms.behind(optax.stateless(lambda updates, _: forms.halved(updates)))
    ),
    "lazy clip in front": Case(forms.in_front(osa.lazy(optax.clip(0.1)))),
    "lazy norm in front": Case(
        forms.in_front(osa.lazy(optax.clip_by_global_norm(0.5)))
    ),
    "lazy scale": in_lazy(optax.scale(0.5)),
    "lazy schedule": in_lazy(optax.scale_by_schedule(SCHEDULE)),
    "lazy decay": in_lazy(optax.add_decayed_weights(-0.01)),
    "lazy momentum": in_lazy(optax.trace(0.9)),
    "lazy ema": in_lazy(optax.ema(0.9)),
    "lazy trust ratio": in_lazy(optax.scale_by_trust_ratio()),
    "apply_if_finite twice": Case(forms.finite(times=2), sums=True),
    "finite in a partition": Case(forms.finite_in_a_partition, sums=True),
}
# What users write.
OF_USERS = {
    "decaying": Case(changes.by_count(lambda count: 1 / (1 + count))),
    "every second step": Case(changes.by_count(lambda count: count % 2)),
    "one step only": Case(changes.by_count(lambda n: jnp.where(n < 1, 1.0, 0.0))),
    "own ema": Case(after(changes.average_updates, lambda _: jnp.zeros((12, 3)))),
    "average of parameters": Case(after(changes.average_params, changes.table_of)),
    "own lookahead": Case(after(changes.lookahead, changes.table_and_count)),
    "row norms": chain_of_data(lambda x: x / jnp.maximum(1, 9 * changes.row_norms(x))),
    "norm of the leaf": chain_of_data(changes.clip_leaf),
    "norm of all": Case(in_chain(changes.clip_all)),
    "signs": chain_of_data(lambda x: 0.01 * jnp.sign(x)),
    "low precision": chain_of_data(lambda x: x.astype(jnp.bfloat16).astype(x.dtype)),
    "drop rows": Case(after(changes.drop_rows, changes.first_key)),
    "coalesce": chain_of_rows(osa.coalesce),
    "sort_indices": chain_of_rows(lambda x: x.sort_indices()),
    "two halves": chain_of_entries(changes.two_halves),
    "more padding": chain_of_entries(changes.more_padding),
    "turned": chain_of_entries(lambda data, ids: (data[::-1], ids[::-1])),
    "arrays in another order": chain_of_rows(changes.in_another_order),
    "first entry": chain_of_entries(lambda data, ids: (data[:1], ids[:1])),
    "other rows": chain_of_entries(lambda d, i: (d, jnp.where(i < 12, 11 - i, 12))),
    "few rows": chain_of_entries(lambda d, i: (d, jnp.where(i < 6, i, 12))),
    "from a dense one": chain_of_rows(changes.from_dense),
    "rows_of a dense one": chain_of_rows(
        lambda x: osa.rows_of(x.todense(), jnp.arange(8))
    ),
    "drop w": Case(in_chain(of_leaf("w", lambda x: None))),
    "zero w": Case(in_chain(of_leaf("w", jnp.zeros_like))),
    "negated table": Case(in_chain(of_leaf("table", lambda x: -x))),
    "in a ball": Case(after(changes.in_a_ball)),
    "nonnegative": Case(after(changes.nonnegative)),
    "histogram": Case(after(changes.histogram, lambda _: jnp.zeros(12, jnp.int32))),
    "refuse NaN": Case(in_chain(changes.refuse_nan)),
    "scale on the host": Case(in_chain(changes.scale_on_host)),
    "log if large": Case(in_chain(changes.log_if_large)),
    "log paths": Case(in_chain(changes.log_paths)),
    "log arrays": Case(in_chain(changes.log_arrays)),
    "two effects": Case(after(changes.two_effects, zero)),
    "halved twice": Case(in_chain(halve, changes.passes, halve)),
    "scaled by the loss": Case(of_value(changes.scale_by_loss), value=True),
    "best loss": Case(of_value(changes.store_best_loss, changes.infinity), value=True),
    "plateau": Case(of_value(changes.plateau, changes.first_plateau), value=True),
    "negated gradients": of_gradients(lambda x: -x),
    "coalesced gradients": of_gradients(osa.coalesce, exact=True),
    "dense gradients": of_gradients(lambda x: x.todense()),
    "gradients of few rows": of_gradients(changes.without_far_rows),
    "means of duplicates": of_gradients(changes.mean_of_duplicates),
    "noisy gradients": of_gradients(changes.noisy),
    "centred rows": of_gradients(changes.centred),
    "no gradient of w": Case(before(changes.no_gradient_of_w)),
}
CASES = USUAL | FORMS | OF_OPTAX | OF_USERS
