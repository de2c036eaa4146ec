"""`Optimizer`: an optax transformation, its state in variables of Keras."""

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

import optax_sparse_adam

from .._exact_adam.flush import flush
from .._exact_adam.state import is_exact
from .._optimizers.lazy import lazy
from .._rows.checks import is_bcoo
from .._rows.stale import contains_stale
from .._train_step import params_at_once

_jitted_flush = jax.jit(flush, donate_argnums=(0, 1))
# A saved model names the functions that its optimiser was made by.
for _package in (optax_sparse_adam, optax):
    for _function in filter(inspect.isfunction, vars(_package).values()):
        keras.saving.register_keras_serializable(_package.__name__)(_function)
_REFUSED = {
    "use_ema": "an average of all rows costs what the table costs at each step",
    "loss_scale_factor": "gradients of bfloat16 and float32 need none",
    "gradient_accumulation_steps": "a larger batch_size costs no more, row by row",
    # As an attribute.
    "weight_decay": "it is an argument of the transformation, as of osa.exact_adamw",
}


@keras.saving.register_keras_serializable("optax_sparse_adam")
class Optimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optax transformation as the optimiser of a Keras model.

    `Optimizer(osa.sparse_adam, 1e-3, b2=0.99)` is `osa.sparse_adam(1e-3, b2=0.99)` with
    a learning rate that Keras knows. For anything else pass a function of the rate:
    `Optimizer(lambda rate: osa.lazy(optax.adamw(rate)), 1e-3)`. It is called whenever a
    step is compiled.

    A number is a variable of the optimiser, which `LearningRateScheduler` and
    `ReduceLROnPlateau` change. `exact_adam` and `exact_adamw` move stale rows by rates
    that are known ahead, and refuse that: give them a schedule.

    `clipnorm`, `clipvalue` and `global_clipnorm` are what they are in Keras, of each
    row's summed gradient; 0 clips nothing. Weight decay is that of the transformation:
    `Optimizer(osa.exact_adamw, 1e-3, weight_decay=1e-4)`. Other arguments of Keras'
    optimisers are refused. So are constraints of variables under `exact_adam`; under
    others a constraint of a table costs what the table costs.

    A saved model holds the names of public functions of this package and of optax, of
    functions registered with `keras.saving.register_keras_serializable`, and numbers.
    With others, as a lambda, saving works, and `load_model` says how to go on.

    Args:
      transformation: A function of the learning rate and `arguments`; or a
        transformation, whose rate Keras neither knows nor changes.
      learning_rate: A number, a schedule of optax or of Keras, or `None` where
        `transformation` takes none.
      clipnorm: The largest norm of a variable's gradient.
      clipvalue: The largest absolute value in a gradient.
      global_clipnorm: The largest norm of all gradients together.
      name: The name of the optimiser.
      **arguments: What else `transformation` takes.

    Raises:
      TypeError: If `transformation` is neither a function nor a transformation, the
        learning rate neither a number nor a schedule, or an argument is one that Keras'
        optimisers take and this one does not.
      ValueError: For a second way of clipping. When it is built, for a variable that
        it cannot train.
    """

    def __init__(
        self,
        transformation: Callable[..., Any] | optax.GradientTransformation,
        learning_rate: Any = None,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "optax",
        **arguments: Any,
    ) -> None:
        _refuse((arguments.keys() & _REFUSED.keys()) - {"weight_decay"})
        is_made = isinstance(transformation, optax.GradientTransformation)
        if not (is_made or callable(transformation)):
            raise TypeError(
                "Optimizer needs a function that makes a transformation of optax, as "
                f"osa.sparse_adam, or one, got {type(transformation).__name__}."
            )
        if is_made and (learning_rate is not None or arguments):
            raise TypeError(
                "Optimizer passes arguments to a function that makes a transformation, "
                "got what it has made: write Optimizer(osa.sparse_adam, 1e-3)."
            )
        is_number = not (learning_rate is None or callable(learning_rate))
        if is_number and not _is_number(learning_rate):
            raise TypeError(
                "Optimizer needs a learning rate that is a number or a schedule, got "
                f"{learning_rate!r}."
            )
        super().__init__(
            float(learning_rate) if is_number else self._rate_now,
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            name=name,
        )
        self._transformation = transformation
        # Keras makes of a dictionary, and of lists in it, what JAX takes for no tree.
        self._arguments = types.MappingProxyType(arguments)
        # As it was passed; from `build` on, as it was set until then.
        self._rate = float(learning_rate) if is_number else learning_rate
        self._is_variable, self._is_prepared = is_number, False

    def _rate_now(self) -> Any:
        """What Keras reads: the schedule at this step; NaN where there is no rate."""
        if self._rate is None:
            return float("nan")
        return self._rate(self.iterations.value) if callable(self._rate) else self._rate

    def _made(self, rate: Any) -> optax.GradientTransformation:
        """The transformation, behind what clips its gradients."""
        make: Any = self._transformation
        rates = () if rate is None else (rate,)
        is_made = isinstance(make, optax.GradientTransformation)
        tx: Any = make if is_made else make(*rates, **self._arguments)
        clip = None
        if (self.clipnorm or 0) > 0:  # as in Keras, where 0 clips nothing
            clip = optax.stateless_with_tree_map(self._clip_norm)
        elif (self.global_clipnorm or 0) > 0:
            clip = optax.clip_by_global_norm(self.global_clipnorm)
        elif (self.clipvalue or 0) > 0:
            clip = optax.clip(self.clipvalue)
        return tx if clip is None else optax.chain(lazy(clip), tx)

    def _clip_norm(self, grad: jax.Array, _: Any) -> jax.Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(grad)))
        return grad * (self.clipnorm / jnp.maximum(norm, self.clipnorm))

    def build(self, variables: list[Any]) -> None:
        """Makes the state for these variables, as variables of the optimiser."""
        if self.built:
            return
        _refuse({name for name in _REFUSED if getattr(self, name, None)})
        values = [v.value for v in variables]
        if self._is_variable:
            rate = self._learning_rate.numpy()
            if rate != rate.dtype.type(self._rate):  # the variable was assigned
                self._rate = float(rate)
        state = self._made(self._rate).init(values)
        self._is_exact = contains_stale(state)
        self._is_variable = self._is_variable and not self._is_exact
        for v in variables:
            if getattr(v, "overwrite_with_gradient", False):
                raise ValueError(f"Optimizer cannot train {v.path}, of float8 layers.")
            if self._is_exact and v.constraint is not None:
                raise ValueError(
                    "exact_adam stores rows ahead of their values, which a constraint "
                    f"needs, got one of {v.path}. Leave it out, or take sparse_adam."
                )
        super().build(variables)
        self._first = len(self._variables)
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(state)
        self._treedef = treedef
        self._keys = [_key_impl(x) for _, x in paths]
        for path, leaf in paths:
            x = _stored(leaf)
            if any(x is value for value in values):
                x = jnp.copy(x)  # a buffer is donated once only
            layout = x.sharding if keras.distribution.distribution() else None
            name = jax.tree_util.keystr(path, simple=True, separator="_") or "state"
            kind = {"dtype": x.dtype.name, "layout": layout, "name": name}
            self.add_variable(x.shape, lambda *_, x=x, **__: x, **kind)

    def state_of(self, optimizer_variables: list[Any]) -> Any:
        """The transformation's state, of the values of the optimiser's variables."""
        leaves = optimizer_variables[self._first :]
        both = zip(leaves, self._keys, strict=True)
        return self._treedef.unflatten(_restored(x, impl) for x, impl in both)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        """One step, of a `train_step` or a loop of your own; new values of both.

        For a loop `row_sparse(model)` and `model.compile(optimizer)` come before it.

        Args:
          optimizer_variables: Values of the optimiser's variables.
          grads: Gradients by `osa.value_and_grad`, with `read=state_of(...)`.
          trainable_variables: Values of the model's trainable variables.

        Raises:
          ValueError: If no model that `row_sparse` was called for is compiled with it,
            if no gradient is row-sparse, or for other variables than those that it was
            built with.
        """
        if not self._is_prepared:
            raise ValueError(
                "Optimizer trains models that row_sparse was called for: call "
                "optax_sparse_adam.keras.row_sparse(model), also after load_model and "
                "clone_model; for a loop of your own compile the model with it, too."
            )
        if grads and not any(map(is_bcoo, grads)):
            raise ValueError(
                "Optimizer needs row-sparse gradients, got dense ones: in a train_step "
                "of your own call osa.value_and_grad in place of jax.value_and_grad."
            )
        return self._stepped(optimizer_variables, grads, trainable_variables)

    def _stepped(
        self, slots: list[Any], grads: list[Any], trainable: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        self._check_number(len(trainable))
        tx = self._made(slots[1] if self._is_variable else self._rate)
        state = self.state_of(slots)

        new, state = params_at_once("Optimizer", tx, grads, state, trainable)
        for i, v in enumerate(self._trainable_variables):
            if v.constraint is not None:
                new[i] = v.constraint(new[i])
        leaves = map(_stored, self._treedef.flatten_up_to(state))
        return new, [slots[0] + 1, *slots[1 : self._first], *leaves]

    def _trains(self, model: Any) -> bool:
        """Whether it was built for the variables that are trainable now, if it was."""
        of_both = self._trainable_variables, model.trainable_variables
        here, there = ([*map(id, variables)] for variables in of_both)
        return not self.built or here == there

    def _check_variables(self, model: Any) -> None:
        if not self._trains(model):
            of_both = self._trainable_variables, model.trainable_variables
            here, there = ([v.path for v in variables] for variables in of_both)
            raise ValueError(
                f"Optimizer was built for the trainable variables {here}, got {there}: "
                "after a change of `trainable`, compile with a new Optimizer."
            )

    def _check_number(self, number: int) -> None:
        expected = len(self._trainable_variables)
        if self.built and number != expected:
            raise ValueError(
                f"Optimizer was built for {expected} trainable variables, got {number}:"
                " after a change of `trainable`, compile with a new Optimizer."
            )

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Refused: the loop around it would copy tables; `stateless_apply` is there."""
        raise TypeError(
            "Optimizer has no apply, which would copy whole tables. In a loop of your "
            "own call stateless_apply under jax.jit, its arguments donated."
        )

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """Refused: what does not decay is said by `mask`, as to `osa.exact_adamw`."""
        raise TypeError(
            "Optimizer has no exclude_from_weight_decay: it is the transformation that "
            "decays, and a mask, in the order of model.trainable_variables, says what. "
            "Pass mask=['bias' not in v.path for v in model.trainable_variables]."
        )

    @property
    def learning_rate(self) -> Any:
        """The rate as it is now; NaN if only the transformation knows it."""
        return self._learning_rate if self._is_variable else self._rate_now()

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        if not self._is_variable:
            raise TypeError(
                "The learning rate cannot be set: it is a schedule, or in what was "
                "made before, or exact_adam's, which needs rates that are known ahead. "
                "Pass Optimizer(osa.sparse_adam, 1e-3); for exact_adam a schedule, or "
                "call flush(model) and compile with a new Optimizer."
            )
        self._learning_rate.assign(rate)

    def finalize_variable_values(self, var_list: list[Any]) -> None:
        """Brings all rows up to date: Keras calls it at the end of `fit`."""
        # A step that raised has left Keras' variables without values.
        if self.built and all(v._value is not None for v in self.variables):
            self._flush()

    def _flush(self) -> None:
        """`optax_sparse_adam.flush` of the variables that this optimiser trains."""
        if not self.built or not self._is_exact:
            return
        state = self.state_of([v.value for v in self.variables])
        nodes = filter(is_exact, jax.tree.leaves(state, is_leaf=is_exact))
        if all((node.values_until == node.clock).all() for node in nodes):
            return
        values = [v.value for v in self._trainable_variables]
        values, state = _jitted_flush(values, state)
        leaves = map(_stored, jax.tree.leaves(state))
        variables = [*self._trainable_variables, *self.variables[self._first :]]
        for v, x in zip(variables, [*values, *leaves], strict=True):
            v.assign(x)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same optimiser of, without its state."""
        rate = self._rate
        if self._is_variable:
            rate = float(self._learning_rate.numpy())
        parts = {"transformation": self._transformation, "learning_rate": rate}
        parts |= self._arguments
        unsaved = [name for name, x in parts.items() if not _is_saveable(x)]
        names = "name", "clipnorm", "clipvalue", "global_clipnorm"
        config = {name: getattr(self, name) for name in names}
        if unsaved:
            return config | {"unsaved": unsaved}
        save = keras.saving.serialize_keras_object
        return config | {name: save(x) for name, x in parts.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The optimiser of a saved model."""
        if "unsaved" in config:
            raise ValueError(
                f"{config['unsaved']} of this Optimizer are no numbers and no public "
                "functions of optax or optax_sparse_adam, and have no name in the "
                "file. Call load_model(path, compile=False), row_sparse(model), "
                "model.compile, model.optimizer.build(model.trainable_variables), and "
                "then model.load_weights(path). Or, before saving, register functions "
                "by keras.saving.register_keras_serializable."
            )
        load = keras.saving.deserialize_keras_object
        return cls(**{name: load(x, custom_objects) for name, x in config.items()})


def _refuse(names: Iterable[str]) -> None:
    for name in names:
        raise TypeError(f"Optimizer takes no {name}: {_REFUSED[name]}. Leave it out.")


def _is_number(x: Any) -> bool:
    """Whether it is one number: of Python, of NumPy, or of JAX."""
    return np.ndim(x) == 0 and np.issubdtype(np.asarray(x).dtype, np.number)


def _key_impl(x: Any) -> Any:
    """The kind of a random key; `None` for other arrays."""
    is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return jax.random.key_impl(x) if is_key else None


def _stored(x: Any) -> jax.Array:
    """A leaf of the state as a variable's value."""
    return jnp.asarray(x) if _key_impl(x) is None else jax.random.key_data(x)


def _restored(x: Any, impl: Any) -> Any:
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def _is_saveable(x: Any) -> bool:
    if type(x) in (list, tuple):
        return all(map(_is_saveable, x))
    if isinstance(x, np.ndarray | jax.Array):
        return _key_impl(x) is None and x.dtype.kind in "biuf"
    if inspect.isfunction(x):
        name = keras.saving.get_registered_name(x)
        return keras.saving.get_registered_object(name) is x
    schedule = keras.optimizers.schedules.LearningRateSchedule
    return x is None or isinstance(x, bool | int | float | str | np.generic | schedule)
