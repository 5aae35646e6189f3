"""Wrong changes that somebody could make, and the tests that have to notice each."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Change:
    """A plausible mistake.

    Args:
        what: What is wrong then.
        file: Where the snippet is, relative to the package; code that was moved is found elsewhere too.
        old: Code that is there once. Spaces and line ends are as good as one another.
        new: What stands in its place.
        tests: Which tests have to notice, as on pytest's command line: files, or single tests.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


CHANGES = (
    # --- products
    Change(
        "grouped wgrad accumulates fast",
        "_ragged.py",
        "self._scaled(_ROWS_BY_GRAD, lhs, grad, extras, lax.Precision.HIGHEST, scale)",
        "self._scaled(_ROWS_BY_GRAD, lhs, grad, extras, lax.Precision.DEFAULT, scale)",
        ("test_layers.py::test_every_ragged_product_multiplies_fp8",),
    ),
    Change(
        "a kernel is quantized again without the compute dtype",
        "_products.py",
        "x = round_to(saved, spec.compute_dtype)",
        "x = saved",
        ("test_kernels_quantized_again.py",),
    ),
    Change(
        "a kernel that is lhs is quantized again along rhs's axes",
        "_products.py",
        'contracted[role if product == "product" else 1]',
        "contracted[1]",
        ("test_kernels_quantized_again.py",),
    ),
    Change(
        "a kernel is quantized again along the output gradient's axes",
        "_products.py",
        'contracted[role if product == "product" else 1]',
        "contracted[role]",
        ("test_kernels_quantized_again.py",),
    ),
    Change(
        "scales of blocks of a free axis are taken for scales of columns",
        "_contraction.py",
        "return whole and all(x.scale.shape[axis] == 1 for axis in contract)",
        "return all(x.scale.shape[axis] == 1 for axis in contract)",
        ("test_edges_of_scales.py",),
    ),
    Change(
        "a key that alone is mapped makes no members",
        "_dot_general.py",
        "if any(axis is not None for axis in axes[len(operands) :]):",
        "if axes[len(operands) :] and axes[len(operands)] is not None:",
        ("test_rounding.py::test_an_op_with_state_under_vmap_of_its_keys_or_its_state",),
    ),
    Change(
        "a state that alone is mapped makes no members",
        "_dot_general.py",
        "if any(axis is not None for axis in axes[len(operands) :]):",
        "if axes[len(operands) :] and axes[-1] is not None:",
        ("test_rounding.py::test_an_op_with_state_under_vmap_of_its_keys_or_its_state",),
    ),
    # --- states
    Change(
        "layers in other formats take the first one's limits",
        "_overwrite.py",
        "kinds.setdefault((state.scalings, state.limits, place), []).append(i)",
        "kinds.setdefault((state.scalings, place), []).append(i)",
        ("test_states_together.py",),
    ),
    Change(
        "an input group takes the smallest scale",
        "_overwrite.py",
        "functools.reduce(lax.max, firsts)",
        "functools.reduce(lax.min, firsts)",
        ("test_states_together.py",),
    ),
    Change(
        "whether an op was used is read from its first three numbers",
        "_table.py",
        "for i in range(of_ops.shape[axis])",
        "for i in range(3)",
        ("test_states_together.py",),
    ),
    # --- scalings
    Change(
        "MXFP8 does not double what it divided by 2**-126",
        "_scaling/_mxfp8.py",
        "double = jnp.where(exponent == 0, jnp.float32(2.0), jnp.float32(1.0))",
        "double = jnp.where(exponent == 0, jnp.float32(1.0), jnp.float32(1.0))",
        ("test_edges_of_scales.py",),
    ),
    Change(
        "current scaling ignores the axes of an ensemble",
        "_scaling/_current.py",
        "amax_over(x, tuple(range(use.ensemble, x.ndim)))",
        "amax_over(x, tuple(range(x.ndim)))",
        ("test_edges_of_scales.py",),
    ),
    Change(
        "multipliers of blocks that overflow become float32's largest number",
        "_scaling/_block.py",
        "largest = float(jnp.finfo(x.dtype).max)",
        "largest = float(jnp.finfo(jnp.float32).max)",
        ("test_edges_of_scales.py",),
    ),
    # --- training
    Change(
        "gradients of microbatches are summed in their own dtype",
        "_train_step.py",
        "g.astype(common_dtype(g.dtype, np.dtype(np.float32)))",
        "g",
        ("test_training.py::test_gradients_of_many_microbatches_are_not_summed_in_the_parameters_dtype",),
    ),
    Change(
        "compressed activations have a scale per column",
        "_compressed.py",
        "contracted = (x.ndim - 1,) if x.ndim else ()",
        "contracted = (0,) if x.ndim else ()",
        ("test_memory_options.py::test_an_outlier_among_compressed_activations_spoils_its_own_row_only",),
    ),
    # --- predictions
    Change(
        "products of blocks are predicted at the rate of other products",
        "_roofline.py",
        "share = self.efficiency.block_flops if is_fp8 and work.in_blocks(name) else self.efficiency.flops",
        "share = self.efficiency.flops",
        ("test_where_pays.py::test_products_of_blocks_by_hand",),
    ),
    # --- preflight
    Change(
        "multiples of 8 count as sides that FP8 takes",
        "preflight/_reason.py",
        "if value % 16",
        "if value % 8",
        ("test_preflight_traffic.py",),
    ),
    Change(
        "an update in place counts once, not as read and written",
        "preflight/_traffic.py",
        "return 2 * kernel.operands[1].instruction.shape.bytes",
        "return kernel.operands[1].instruction.shape.bytes",
        ("test_preflight_traffic.py",),
    ),
    Change(
        "several slices may exceed the whole",
        "preflight/_traffic.py",
        "return min(whole, parts)",
        "return parts",
        ("test_preflight_traffic.py",),
    ),
    Change(
        "a parameter that a fusion hands on counts as written",
        "preflight/_traffic.py",
        'if instruction.opcode == "parameter": return 0',
        "",
        ("test_preflight_traffic.py",),
    ),
)
