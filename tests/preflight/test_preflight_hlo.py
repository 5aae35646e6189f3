"""The reader of HLO text: on text written by hand, and on what XLA prints."""

import re

import jax
import jax.numpy as jnp
import pytest

from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.instruction import Shape
from haliax_fp8.preflight.program import entry_sites, launches, opened


HEADER = "HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2]{0})->f32[2]{0}}\n\n"


def instruction(line, header=HEADER):
    """The one instruction of a program."""
    return parse_hlo(f"{header}ENTRY %main (x: f32[2]) -> f32[2] {{\n  ROOT {line}\n}}\n").entry.root


@pytest.mark.parametrize(
    "text, dtype, dims, size, total",
    [
        ("f32[2,3]{1,0}", "f32", (2, 3), 6, 24),
        ("bf16[]", "bf16", (), 1, 2),
        ("f8e4m3fn[4,8]{1,0:T(8,128)(4,1)S(1)}", "f8e4m3fn", (4, 8), 32, 32),
        ("f4e2m1fn[7]{0}", "f4e2m1fn", (7,), 7, 4),
        ("s4[2,3]{1,0:E(4)}", "s4", (2, 3), 6, 3),
        ("pred[5]{0}", "pred", (5,), 5, 5),
        ("f8e8m0fnu[3]", "f8e8m0fnu", (3,), 3, 3),
        ("c64[2]", "c64", (2,), 2, 16),
        ("s32[<=10,2]{1,0}", "s32", (10, 2), 20, 80),
        ("f32[0,4]{1,0}", "f32", (0, 4), 0, 0),
        ("token[]", "token", (), 1, 0),
        ("u8[16]{0:S(5)}", "u8", (16,), 16, 16),
    ],
)
def test_shapes(text, dtype, dims, size, total):
    shape = instruction(f"%p = {text} parameter(0)").shape
    assert (shape.dtype, shape.dims, shape.size, shape.bytes) == (dtype, dims, size, total)


def test_tuples_are_read_with_their_comments():
    text = "%t = (f32[2]{0}, /*index=1*/(s8[4]{0}, bf16[2,2]{1,0:T(8,128)}), /*index=5*/pred[]) custom-call(%a, %b)"
    shape = instruction(text).shape
    assert [str(part) for part in shape.elements] == ["f32[2]", "(s8[4], bf16[2,2])", "pred[]"]
    assert [array.dtype for array in shape.arrays] == ["f32", "s8", "bf16", "pred"]
    assert shape.bytes == 8 + 4 + 8 + 1


def test_operands_with_and_without_shapes():
    plain = instruction("%a = f32[2]{0} add(%x.1, %y-2)")
    typed = instruction("%a = f32[2]{0} add(f32[2]{0} %x.1, f32[2]{0:T(256)} %y-2)")
    bare = instruction("a = f32[2]{0} add(x.1, y-2)")
    assert plain.operands == typed.operands == bare.operands == ("x.1", "y-2")


def test_attributes_keep_what_brackets_and_strings_hold():
    line = (
        '%c = f32[2]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul$f8", '
        'metadata={op_name="jit(f)/contract a, b -> c)/x=\\"}\\"" source_line=3}, '
        'backend_config={"gemm_backend_config":{"alpha_real":1,"lhs":["1","2"]},"n":"a,b}"}, operand_layout={{1,0}}'
    )
    call = instruction(line)
    assert call.attribute("custom_call_target") == "__cublas$lt$matmul$f8"
    assert call.op_name == 'jit(f)/contract a, b -> c)/x="}"'
    assert call.config["gemm_backend_config"] == {"alpha_real": 1, "lhs": ["1", "2"]}
    assert call.config["n"] == "a,b}"
    assert call.attributes["operand_layout"] == "{{1,0}}"


def test_integers_and_called_computations():
    dot = instruction(
        "%d = f32[2]{0} dot(%x, %y), lhs_contracting_dims={1,3}, to_apply=%region_0.2, branch_computations={%a.1, %b-2}"
    )
    assert dot.ints("lhs_contracting_dims") == (1, 3)
    assert dot.ints("rhs_contracting_dims") == ()
    assert dot.called("to_apply", "branch_computations") == ("region_0.2", "a.1", "b-2")


def test_configurations_that_are_no_json_are_empty():
    assert instruction('%c = f32[2]{0} custom-call(%x), backend_config="kernel_name: x"').config == {}
    assert instruction('%c = f32[2]{0} custom-call(%x), backend_config="[1]"').config == {}
    assert instruction('%c = f32[2]{0} custom-call(%x), backend_config="{\\"a\\": 1}"').config == {"a": 1}


@pytest.mark.parametrize("line", ["%k = f32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })", "%k = f32[] constant(nan)"])
def test_constants(line):
    assert instruction(line).opcode == "constant"


def test_computations_users_and_parameters():
    module = parse_hlo(
        HEADER
        + 'FileNames\n1 "/a.py"\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n'
        + "%inner (p0: f32[2], p1: f32[2]) -> f32[2] {\n"
        + "  %p1 = f32[2]{0} parameter(1)\n  %p0 = f32[2]{0} parameter(0)\n  ROOT %s = f32[2]{0} subtract(%p0, %p1)\n"
        + '}, execution_thread="main"\n\n'
        + "ENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2]{0} parameter(0)\n"
        + "  ROOT %f = f32[2]{0} fusion(%x, %x), kind=kLoop, calls=%inner\n}\n"
    )
    assert set(module.computations) == {"inner", "main"} and module.entry.name == "main"
    assert [p.name for p in module["inner"].parameters] == ["p0", "p1"]
    assert [user.name for user in module.entry.users["x"]] == ["f"]
    (root,) = (site for site in opened(list(entry_sites(module))[-1]) if site.instruction.opcode == "subtract")
    assert [operand.instruction.name for operand in root.operands] == ["p0", "p1"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("module @jit_f {}", "not an HLO module"),
        (HEADER, "no ENTRY"),
        (HEADER + "ENTRY %main (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n}\n", "no ROOT"),
        (HEADER + "ENTRY %main () -> f32[] {\n  what is this\n}\n", "not an HLO instruction"),
        (HEADER + "ENTRY %main () -> f32[] {\n  ROOT %x = what(%y)\n}\n", "not an HLO shape"),
        (HEADER + "ENTRY %main () -> f32[] {\n  ROOT %x = f32[] 1(%y)\n}\n", "no opcode"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_hlo(text)


def programs():
    """Programs with loops, branches, sorts and reductions: lowered, and compiled for the CPU."""

    def f(x, w):
        def body(carry, weight):
            carry = jnp.tanh(carry @ weight)
            return jax.lax.cond(carry.sum() > 0, lambda c: c + 1, lambda c: c - 1, carry), carry.max()

        y, maxima = jax.lax.scan(body, x, w)
        return jnp.sort(y), maxima, jnp.array([[1, 2], [3, 4]])

    lowered = jax.jit(jax.value_and_grad(lambda x, w: f(x, w)[0].sum())).lower(jnp.ones((4, 4)), jnp.ones((3, 4, 4)))
    yield "lowered", lowered.as_text("hlo", debug_info=True)
    yield "compiled", lowered.compile().as_text()


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in programs()])
def test_nothing_of_a_real_program_is_lost(text):
    module = parse_hlo(text)
    lines = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.MULTILINE)
    instructions = [instruction for computation in module.computations.values() for instruction in computation]
    assert len(instructions) == len(lines) > 20
    assert text.count("ROOT ") == len(module.computations)
    assert {i.opcode for i in instructions} >= {"while", "conditional", "dot", "sort", "parameter"}
    for computation in module.computations.values():
        for instruction in computation:
            if instruction.opcode not in ("parameter", "constant"):
                assert all(name in computation.instructions for name in instruction.operands)
            for name in instruction.called("calls", "to_apply", "body", "condition", "branch_computations"):
                assert name in module.computations


def test_every_launch_is_met_once_for_each_run():
    module = parse_hlo(next(text for name, text in programs() if name == "compiled"))
    sites = [site for launch in launches(entry_sites(module)) for site in opened(launch)]
    # Three steps of the loop, each with a product and its gradient with respect to the carry.
    assert sum(site.executions for site in sites if site.instruction.opcode == "dot") == 6


def test_shape_of_a_number():
    assert Shape("f32").size == 1 and Shape("f32").bytes == 4
