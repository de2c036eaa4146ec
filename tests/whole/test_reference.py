"""What the documents that this project began with describe, and the test of each.

They are torch's SparseAdam (documentation and source), torch's Adafactor, and lucid's
SparseAdam. No behaviour of theirs is ever cut, so each stands here beside the test that
holds it; whoever takes a test away sees its line fail. Most of these tests are stories
that run in torch and in the shim alike (`tests/torch_compat/test_programs.py`).
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
SHIM = "torch_compat/test_"
FUNCTIONAL = "optimizers/test_"

SPARSE_ADAM = {
    "params: iterables and generators of parameters or of groups": (
        "groups kinds_of_params"
    ),
    "params that are refused, and the words": "groups refused_params",
    "sparse and complex parameters are refused, by their indices": (
        "groups refused_kinds"
    ),
    "lr: a number, or a tensor of one element": "steps learning_rates",
    "lr, betas and eps out of range are refused": "groups refused_options",
    "defaults, and the options of groups": "groups representation",
    "lr, betas, eps and maximize of each group": "steps options_of_groups",
    "options that change between steps": "steps options_changed_between_steps",
    "the formula, whatever the rows, duplicates and options": (
        f"{FUNCTIONAL}sparse_adam_parity test_hyperparameters"
    ),
    "any number of sparse and dense axes": (
        f"{FUNCTIONAL}sparse_adam_parity test_shapes"
    ),
    "moments and parameters of other rows stay": (
        f"{FUNCTIONAL}sparse_adam test_untouched_rows_are_the_same_bits"
    ),
    "a zero that is stored is not zero": "steps zeros_that_are_stored",
    "gradients set by hand, also sparse tensors made of dense ones": (
        "steps gradients_of_torch"
    ),
    "gradients of a module with sparse=True": "steps test_gradient_of_a_torch_model",
    "gradients of another shape, type or kind are refused": "steps assigned_gradients",
    "a dense gradient is refused": "steps a_dense_gradient",
    "no gradient: no state, and no step is counted": "steps no_gradient",
    "state begins at the first step: step, exp_avg, exp_avg_sq": (
        "state_dict before_the_first_step"
    ),
    "a gradient of zeros is a step, None is none": "steps an_empty_gradient",
    "zero_grad(set_to_none)": "steps zero_grad",
    "step(closure) returns the loss": "steps closures",
    "add_param_group": "groups add_param_group",
    "groups that are refused": "groups refused_groups",
    "state_dict: state by indices, groups with their options": "state_dict structure",
    "load_state_dict: the same run goes on": "state_dict round_trip",
    "groups are matched in order, ids are names only": "state_dict keys_of_ones_own",
    "groups of another count or size are refused": "state_dict wrong_groups",
    "state that belongs to no parameter is kept": "state_dict nested_values",
    "step hooks: order, own and global": "hooks order_of_steps",
    "step pre-hooks that return other arguments": "hooks changed_arguments",
    "step pre-hooks that return something else": "hooks wrong_returns",
    "state_dict pre- and post-hooks that change or replace it": (
        "hooks saving_hooks_that_change"
    ),
    "load_state_dict pre- and post-hooks, on a shallow copy": (
        "hooks loading_hooks_that_change"
    ),
    "prepend=True": "hooks order_of_saving_and_loading",
    "handles: remove()": "hooks handles",
    "repr": "groups representation",
    "deepcopy and pickle": "groups copies",
    "an optimizer of one's own": "groups an_optimizer_of_ones_own",
    "a checkpoint of torch goes on here, and back": (
        "checkpoints test_a_torch_checkpoint_continued"
    ),
    "maximize": f"{FUNCTIONAL}sparse_adam test_maximize_is_the_negated_gradient",
}
ADAFACTOR = {
    "lr, beta2_decay, eps, d, weight_decay, foreach, maximize": (
        "adafactor test_results"
    ),
    "eps of None is that of the type": (
        f"{FUNCTIONAL}sparse_adafactor test_epsilon_of_each_type"
    ),
    "row and column means, or one variance": f"{FUNCTIONAL}sparse_adafactor test_state",
    "options out of range are refused": "adam refused_options",
    "options that change between steps": "adam changed_options",
    "checkpoints": "adam round_trips",
    "checkpoints of older versions": "adafactor steps_that_are_scalars",
    "named_parameters: pairs, in all groups or in none": "groups named_params",
    "names that are missing are refused": "groups refused_names",
    "param_names are saved, replace those that are there, or stay": "state_dict names",
    "names do not affect the loading, but a hook may use them": (
        "state_dict state_by_names"
    ),
    "a loaded learning rate replaces that of the groups": "state_dict round_trip",
    "what a scheduler has put into the groups is loaded": (
        "adam test_a_scheduler_of_torch"
    ),
    "a parameter twice in one group": "groups a_parameter_twice_in_one_group",
}
LUCID = {
    "dense gradients, by SparseAdam's formula": (
        "buffers test_dense_gradients_on_request"
    ),
    "dense gradients of the functional optimiser": (
        f"{FUNCTIONAL}sparse_adam test_mixed_tree_equals_each_alone"
    ),
    "parameters without gradients are skipped": "steps no_gradient",
    "moments are made at the first step": "state_dict before_the_first_step",
    "step(closure) returns the loss, or None": "steps closures",
    "param_groups and defaults": "groups representation",
}


def is_held(place):
    name, test = place.split()
    path = ROOT / f"{name if '/' in name else SHIM + name}.py"
    text = path.read_text()
    # A story that files share is added by a line of its own.
    words = rf"@STORIES\.append\ndef {test}\(", rf"^(for|STORIES).*\b{test}\b"
    if test.startswith("test_"):
        words = (rf"^def {test}\(",)
    return any(re.search(word, text, re.MULTILINE) for word in words)


def test_each_behaviour_is_held_by_a_test():
    documents = SPARSE_ADAM, ADAFACTOR, LUCID
    pairs = [pair for document in documents for pair in document.items()]
    assert not [pair for pair in pairs if not is_held(pair[1])]
