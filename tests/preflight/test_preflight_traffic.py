"""The bytes that a launch reads and writes, of instructions written by hand and counted by hand."""

import pytest

from haliax_fp8.devices import Efficiency, Traffic
from haliax_fp8.devices.catalog import peaks
from haliax_fp8.devices.roofline import Roofline
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.instruction import Shape
from haliax_fp8.preflight.program import entry_sites, launches
from haliax_fp8.preflight.sizes import Dimensions
from haliax_fp8.preflight.traffic import is_launch, touched, traffic_of
from haliax_fp8.preflight.verdict import indivisible


MATRIX, ROW, INDEX = 4 * 1000 * 64, 4 * 64, 4


def bytes_of(entry, *functions):
    """Of all launches of a program; functions are given as `(header, lines)`."""
    indented = lambda lines: "\n".join(f"  {line}" for line in lines)
    bodies = "".join(f"{header} {{\n{indented(lines)}\n}}\n\n" for header, lines in functions)
    text = f"HloModule m, is_scheduled=true\n\n{bodies}ENTRY %main (x: f32[2]) -> f32[2] {{\n{indented(entry)}\n}}\n"
    return sum(touched(launch) for launch in launches(entry_sites(parse_hlo(text))) if opcode(launch) != "parameter")


def opcode(launch):
    return launch.instruction.opcode


PARAMETERS = [
    "%x = f32[1000,64]{1,0} parameter(0)",
    "%row = f32[1,64]{1,0} parameter(1)",
    "%i = s32[] parameter(2)",
]


@pytest.mark.parametrize(
    "line, expected",
    [
        # The row is read and written; the rest of the matrix stays where it is.
        ("f32[1000,64]{1,0} dynamic-update-slice(%x, %row, %i, %i)", 2 * ROW),
        # Read and written, and where it begins.
        ("f32[1,64]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,64}", 2 * ROW + 2 * INDEX),
        ("f32[1,64]{1,0} slice(%x), slice={[3:4], [0:64]}", 2 * ROW),
        # Where to, and what: both are read, and as much is written.
        ("f32[1000,64]{1,0} scatter(%x, %i, %row), to_apply=%add", 2 * (INDEX + ROW)),
    ],
    ids=["dynamic-update-slice", "dynamic-slice", "slice", "scatter"],
)
def test_outside_a_fusion(line, expected):
    assert bytes_of([*PARAMETERS, f"ROOT %r = {line}"]) == expected


def fused(lines, out, *operands):
    entry = [*PARAMETERS, f"ROOT %f = {out} fusion({', '.join(operands)}), kind=kLoop, calls=%fused"]
    return bytes_of(entry, (f"%fused (a: f32[2]) -> {out}", lines))


def test_slices_that_together_exceed_their_operand_read_it_once():
    """Two slices of 600 of 1000 rows: what they share is read once, and never more than there is."""
    lines = [
        "%a = f32[1000,64]{1,0} parameter(0)",
        "%first = f32[600,64]{1,0} slice(%a), slice={[0:600], [0:64]}",
        "%last = f32[600,64]{1,0} slice(%a), slice={[400:1000], [0:64]}",
        "ROOT %sum = f32[600,64]{1,0} add(%first, %last)",
    ]
    assert fused(lines, "f32[600,64]{1,0}", "%x") == MATRIX + 600 * ROW


def test_slices_within_their_operand_read_what_they_take():
    lines = [
        "%a = f32[1000,64]{1,0} parameter(0)",
        "%first = f32[1,64]{1,0} slice(%a), slice={[0:1], [0:64]}",
        "%last = f32[1,64]{1,0} slice(%a), slice={[999:1000], [0:64]}",
        "ROOT %sum = f32[1,64]{1,0} add(%first, %last)",
    ]
    assert fused(lines, "f32[1,64]{1,0}", "%x") == 3 * ROW


def test_a_parameter_that_a_fusion_hands_on_is_not_written():
    """It stays where it is: counted as read at most. The row is read, and written negated."""
    lines = [
        "%a = f32[1000,64]{1,0} parameter(0)",
        "%b = f32[1,64]{1,0} parameter(1)",
        "%c = f32[1,64]{1,0} negate(%b)",
        "ROOT %t = (f32[1000,64]{1,0}, f32[1,64]{1,0}) tuple(%a, %c)",
    ]
    assert fused(lines, "(f32[1000,64]{1,0}, f32[1,64]{1,0})", "%x", "%row") == MATRIX + 2 * ROW


def test_an_operand_that_a_fusion_within_a_fusion_only_renames_is_read_whole():
    """As TPUs' compiler wraps the operands of products."""
    text = """HloModule m

%inner (p: bf16[64,1000]) -> bf16[1,64,1000] {
  %p = bf16[64,1000]{1,0} parameter(0)
  ROOT %b = bf16[1,64,1000]{2,1,0} bitcast(%p)
}

%outer (a: bf16[16,64], w: bf16[64,1000]) -> bf16[16,1000] {
  %a = bf16[16,64]{1,0} parameter(0)
  %w = bf16[64,1000]{1,0} parameter(1)
  %named = bf16[1,64,1000]{2,1,0} fusion(%w), kind=kLoop, calls=%inner
  ROOT %c = bf16[16,1000]{1,0} convolution(%a, %named), window={size=1}, dim_labels=bf_0io->bf
}

ENTRY %main (x: bf16[16,64], k: bf16[64,1000]) -> bf16[16,1000] {
  %x = bf16[16,64]{1,0} parameter(0)
  %k = bf16[64,1000]{1,0} parameter(1)
  ROOT %f = bf16[16,1000]{1,0} fusion(%x, %k), kind=kOutput, calls=%outer
}
"""
    (fusion,) = (site for site in launches(entry_sites(parse_hlo(text))) if site.instruction.opcode == "fusion")
    assert touched(fusion) == 2 * (16 * 64 + 64 * 1000 + 16 * 1000)


WIDE, FP8, TURNED = "bf16[64,32]{1,0}", "f8e4m3fn[64,32]{1,0}", "f8e4m3fn[32,64]{1,0}"
FP8_STACK, TURNED_STACK = "f8e4m3fn[8,64,32]{2,1,0}", "f8e4m3fn[8,32,64]{2,1,0}"
FP4 = "f4e2m1fn[64,32]{1,0:E(4)}"
ELEMENTS = 64 * 32


@pytest.mark.parametrize(
    "operand, lines, out, expected",
    [
        (WIDE, [f"ROOT %r = {WIDE} negate(%a)"], WIDE, Traffic(1, plain=4 * ELEMENTS)),
        (WIDE, [f"ROOT %r = {FP8} convert(%a)"], FP8, Traffic(1, casts=3 * ELEMENTS)),
        # Two elements of FP4 in a byte.
        (FP8, [f"ROOT %r = {FP4} convert(%a)"], FP4, Traffic(1, casts=ELEMENTS + ELEMENTS // 2)),
        (FP8, [f"ROOT %r = {WIDE} convert(%a)"], WIDE, Traffic(1, casts=3 * ELEMENTS)),
        (FP8, [f"ROOT %r = {TURNED} transpose(%a), dimensions={{1,0}}"], TURNED, Traffic(1, casts=2 * ELEMENTS)),
        # Two casts in one launch, neither of which is transposed.
        (
            WIDE,
            [f"%b = {FP8} convert(%a)", f"%n = {WIDE} negate(%a)", f"%c = {FP8} convert(%n)"]
            + [f"ROOT %t = ({FP8}, {FP8}) tuple(%b, %c)"],
            f"({FP8}, {FP8})",
            Traffic(1, casts=4 * ELEMENTS),
        ),
        (
            WIDE,
            [f"%b = {FP8} convert(%a)", f"%c = {TURNED} transpose(%b), dimensions={{1,0}}"]
            + [f"ROOT %t = ({FP8}, {TURNED}) tuple(%b, %c)"],
            f"({FP8}, {TURNED})",
            Traffic(1, two_layouts=4 * ELEMENTS),
        ),
        # Both are written into stacks, in place.
        (
            WIDE,
            [f"%b = {FP8} convert(%a)", f"%c = {TURNED} transpose(%b), dimensions={{1,0}}", "%z = s32[] constant(0)"]
            + [f"%s = {FP8_STACK} parameter(1)", f"%t = {TURNED_STACK} parameter(2)"]
            + ["%d = f8e4m3fn[1,64,32]{2,1,0} bitcast(%b)", "%e = f8e4m3fn[1,32,64]{2,1,0} bitcast(%c)"]
            + [f"%u = {FP8_STACK} dynamic-update-slice(%s, %d, %z, %z, %z)"]
            + [f"%v = {TURNED_STACK} dynamic-update-slice(%t, %e, %z, %z, %z)"]
            + [f"ROOT %r = ({FP8_STACK}, {TURNED_STACK}) tuple(%u, %v)"],
            f"({FP8_STACK}, {TURNED_STACK})",
            Traffic(1, casts=4 * ELEMENTS),
        ),
        # What is transposed is not what is quantized: scales of blocks are no values.
        (
            WIDE,
            ["%s = f8e8m0fnu[64,32]{1,0} convert(%a)", f"%c = {WIDE} negate(%a)"]
            + [f"ROOT %t = (f8e8m0fnu[64,32]{{1,0}}, {WIDE}) tuple(%s, %c)"],
            f"(f8e8m0fnu[64,32]{{1,0}}, {WIDE})",
            Traffic(1, plain=5 * ELEMENTS),
        ),
    ],
    ids=["plain", "cast", "to four bits", "back", "transposition", "two casts", "two layouts", "stacks", "scales"],
)
def test_kinds_of_launches(operand, lines, out, expected):
    body = "\n".join(f"  {line}" for line in (f"%a = {operand} parameter(0)", *lines))
    operands = "%x, %y, %z" if "parameter(2)" in body else "%x"
    text = f"""HloModule m

%fused (a: {operand}, s: f8e4m3fn[8,64,32], t: f8e4m3fn[8,32,64]) -> {out} {{
{body}
}}

ENTRY %main (x: {operand}) -> {out} {{
  %x = {operand} parameter(0)
  %y = {FP8_STACK} parameter(1)
  %z = {TURNED_STACK} parameter(2)
  ROOT %f = {out} fusion({operands}), kind=kLoop, calls=%fused
}}
"""
    (fusion,) = (site for site in launches(entry_sites(parse_hlo(text))) if site.instruction.opcode == "fusion")
    assert traffic_of(fusion) == expected


def test_each_kind_has_its_share_of_the_bandwidth():
    shares = Efficiency(
        bandwidth=0.8, cast_bandwidth=0.5, two_layouts_bandwidth=0.25, block_bandwidth=0.125, launch=3e-6
    )
    roofline, tb = Roofline(peaks["h100"], shares), 10**12
    traffic = Traffic(4, plain=8 * tb, casts=5 * tb, two_layouts=2 * tb) * 2 + Traffic(1, blocks=tb)
    assert traffic == Traffic(9, 16 * tb, 10 * tb, 4 * tb, tb) and traffic.bytes == 31 * tb
    assert roofline.others(traffic) == pytest.approx((20 + 20 + 16 + 8) / 3.35 + 27e-6)


@pytest.mark.parametrize(
    "opcode, runs",
    [
        ("add", True),
        ("all-gather-start", True),
        ("all-gather-done", False),
        ("async-update", False),
        ("bitcast", False),
    ],
)
def test_what_only_names_or_ends_something_is_no_launch(opcode, runs):
    text = "HloModule m\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2]{0} parameter(0)\n"
    text += f"  ROOT %r = f32[2]{{0}} {opcode}(%x)\n}}\n"
    assert [is_launch(site) for site in entry_sites(parse_hlo(text))] == [False, runs]


def test_sides_before_they_were_padded():
    """A product of `5 × 4095` and `4095 × 30` runs as one of multiples of 16, or as its transpose."""
    of = lambda m, n, k: Dimensions(1, m, n, k, *[Shape("f8e4m3fn", (2, 2))] * 3)
    written = of(5, 30, 4095)
    assert of(16, 32, 4096).as_written(written) == of(5, 30, 4095)
    assert of(32, 16, 4096).as_written(written) == of(30, 5, 4095)
    assert of(32, 48, 4096).as_written(written) == of(32, 48, 4096), "another product"


@pytest.mark.parametrize(
    "sizes, named",
    [((32, 48, 64), ""), ((24, 48, 64), "m=24"), ((32, 8, 40), "n=8, k=40"), ((5, 16, 4095), "m=5, k=4095")],
)
def test_sides_that_are_no_multiples_of_16(sizes, named):
    """Multiples of 8, which bf16 products take, are not enough."""
    m, n, k = sizes
    shape = Shape("f8e4m3fn", (2, 2))
    assert indivisible(Dimensions(1, m, n, k, shape, shape, shape)) == named
