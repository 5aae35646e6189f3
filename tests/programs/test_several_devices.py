"""What each function of `_jax/xla.py` does to programs for one H100 or four: with it and without it."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from compiled_models import on, struct
from jax import lax
from jax.sharding import PartitionSpec as P
from test_xla import IN, OUT, ROWS, f8, f32, quantized, readers_of_the_argument

from haliax_fp8._jax.meshes import divided
from haliax_fp8._jax.xla import divided_as_made, gathered_once, transposed_separately, transposed_separately_on_one


def along(x, w, axis):
    """A product that sums over an axis of the second operand."""
    return lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.bfloat16)


def gathered_for_both(told, w, x, grad):
    """A kernel that every device needs whole for both products. Without the barrier, it travels before the cast."""
    data = (gathered_once if told else lambda x: x)(quantized(w))
    data = divided(data, P())
    return along(x, data, 0), along(grad, data, 1)


def gathered_and_transposed(told, w, x, grad):
    """If the transposition had a barrier of its own, as one device needs it, it would read another copy."""
    data = gathered_once(quantized(w))
    separately = transposed_separately_on_one if told else transposed_separately
    return along(x, data, 0), along(grad, separately(data), 1)


def measured_with_a_kernel(told, x, w):
    """An activation that every device has, and a kernel whose rows are divided: the amaxes of both are joined."""
    activation = jnp.tanh(x)
    amaxes = [jnp.max(jnp.abs(y.astype(f32)), axis=1) for y in (activation, w)]
    amaxes[0] = divided_as_made(amaxes[0]) if told else amaxes[0]
    return activation, jnp.max(jnp.stack(amaxes), axis=1)


def gathered_types(text):
    """The element types of all arrays that are gathered."""
    results = re.findall(r"= (.*?) all-gather(?:-start)?\(", text)
    return sorted(dtype for result in results for dtype in re.findall(r"(\w+)\[", result))


def sizes_of_the_activation(text):
    """The rows that a device keeps of what `tanh` makes."""
    return sorted({int(rows) for rows in re.findall(r"= \w+\[(\d+),\d+\]\S* tanh\(", text)})


ROWS_DIVIDED = (P("data"), P("data"), P("data"))
OPERANDS = (struct(IN, OUT), struct(ROWS, IN, dtype=f8), struct(ROWS, OUT, dtype=f8))

# A function, its arguments, how four devices divide them, and what is found in the program if told, and if not.
CASES = {
    "gathered_once": (gathered_for_both, OPERANDS, ROWS_DIVIDED, gathered_types, ["f8e4m3fn"], ["f32"]),
    "transposed_separately_on_one": (
        *(gathered_and_transposed, OPERANDS, ROWS_DIVIDED, gathered_types),
        *(["f8e4m3fn"], ["f8e4m3fn", "f8e4m3fn"]),
    ),
    "divided_as_made": (
        *(measured_with_a_kernel, (struct(IN, OUT), struct(IN, OUT)), (P(), P("data")), sizes_of_the_activation),
        *([IN], [IN // 4]),
    ),
}


@pytest.mark.parametrize(("name", "device"), on(CASES, ["h100"]))
def test_what_devices_send_and_keep(name, device, compiled):
    function, args, shardings, read, if_told, if_not = CASES[name]
    options = {"device": device, "mesh": {"data": 4}, "shardings": shardings}
    texts = [compiled(jax.jit(functools.partial(function, told)), *args, **options)[0] for told in (True, False)]
    assert [read(text) for text in texts] == [if_told, if_not]


@pytest.mark.parametrize(("separately", "device"), on(["on_one", "never"], ["h100"]))
def test_one_device_transposes_separately(separately, device, compiled):
    """The launch that casts and measures is then the only one that reads the operand in high precision."""
    separates = transposed_separately_on_one if separately == "on_one" else lambda x: x

    def program(x):
        data = quantized(x)
        return data, separates(data).T, jnp.max(jnp.abs(x))

    text, _ = compiled(jax.jit(program), struct(ROWS, IN), device=device)
    assert readers_of_the_argument(text) == (1 if separately == "on_one" else 2)
