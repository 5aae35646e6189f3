"""The words that the preflight knows programs by: each is written once, and what it does not know, it says."""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from compiled_models import on, unknown_calls
from test_preflight_products import module, read

import haliax_fp8 as fp8
from haliax_fp8._product import names
from haliax_fp8.preflight import inspect_step
from haliax_fp8.preflight.hlo.text import parse_hlo
from haliax_fp8.preflight.hlo.vocabulary import Call, call_of
from haliax_fp8.preflight.report.report import PreflightReport


ROOT = pathlib.Path(fp8.__file__).parent
OPS = {names.FP8_DOT_GENERAL, names.FP8_RAGGED_DOT, names.ROTATION}
PRODUCTS = {names.FPROP, names.DGRAD, names.WGRAD}
ORIGINS = {ROOT / "_product" / "names.py", ROOT / "_numerics" / "rotation.py"}


def texts(tree):
    """The string constants of a file, without docstrings and the strings behind module-level values."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def texts_of(folder):
    return [(path, text) for path in folder.rglob("*.py") for text in texts(ast.parse(path.read_text()))]


# --- Our own names ----------------------------------------------------------------------------------------------------


def test_the_names_of_scopes_are_written_once():
    """The ops give their products the scopes that the preflight looks for, as the same object."""
    assert {path for path, text in texts_of(ROOT) if text in OPS} == ORIGINS


def test_the_preflight_spells_no_name_of_a_product():
    """Neither alone nor in a pattern; in sentences for people, products have the names that people have for them."""
    is_name = re.compile(rf"[^ ]*\b({'|'.join(OPS | PRODUCTS)})\b[^ ]*")
    assert [text for _, text in texts_of(ROOT / "preflight") if is_name.fullmatch(text)] == []


def test_no_scope_is_named_by_a_copy():
    """`jax.named_scope("dgrad")` would be found only as long as the constant is the same."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("named_scope"):
                given = node.args[0]
                assert not (isinstance(given, ast.Constant) and given.value in OPS | PRODUCTS), path


def test_this_file_sees_names():
    code = 'X = "fprop"\n"""fprop, in prose."""\n\ndef f():\n    """And fprop."""\n    return scope("a/fprop")\n'
    assert list(texts(ast.parse(code))) == ["fprop", "a/fprop"]


# --- XLA's ------------------------------------------------------------------------------------------------------------


def test_xla_s_words_are_in_the_vocabulary_alone():
    """Names of custom calls have dollars or two underscores in front, keys of configurations end in `_config`."""
    is_word = re.compile(r".*\$[a-z].*|__[a-z].*|.*_(config|custom_call|call_target|trip_count)")
    spelled = {path.name for path, text in texts_of(ROOT / "preflight") if is_word.fullmatch(text)}
    # The parser takes an instruction's configuration apart, whatever is in it.
    assert spelled == {"vocabulary.py", "text.py"}
    assert [text for path, text in texts_of(ROOT / "preflight") if path.name == "text.py" and is_word.fullmatch(text)]


# What a program that walks through functions, loops and tuples cannot do without.
GRAMMAR = {"parameter", "constant", "tuple", "get-tuple-element", "call", "while", "conditional"}


def opcodes():
    """The words in the vocabulary's constants before its first function, without those of grammar.

    Element types, which have digits, are left out; and `pad`, which is also an attribute of a convolution's window.
    """
    nodes = ast.parse((ROOT / "preflight" / "hlo" / "vocabulary.py").read_text()).body
    first = next(i for i, node in enumerate(nodes) if isinstance(node, ast.FunctionDef))
    found = texts(ast.Module(nodes[:first], []))
    return {text for text in found if re.fullmatch(r"-?[a-z]+(-[a-z]+)*", text)} - GRAMMAR - {"pad"}


def compared_with_an_opcode(tree):
    """The strings that code compares with an `opcode`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and re.search(r"\bopcode\b", ast.unparse(node)):
            yield from texts(node)


def test_opcodes_are_in_the_vocabulary_alone():
    """Those that it has, wherever they are spelled; others where code compares an opcode with them."""
    known, grammar = opcodes(), set()
    for path in (ROOT / "preflight").rglob("*.py"):
        if path.name != "vocabulary.py":
            tree = ast.parse(path.read_text())
            compared = set(compared_with_an_opcode(tree))
            assert not known.intersection(texts(tree)) and compared <= GRAMMAR, path
            grammar |= compared
    assert grammar == GRAMMAR


def test_this_file_sees_opcodes():
    assert opcodes() >= {
        "dot",
        "ragged-dot",
        "convolution",
        "all-gather",
        "dynamic-update-slice",
        "custom-call",
        "-done",
    }
    code = 'a.opcode == "sort" or opcode in ("x-start", *MORE) or name == "y"'
    assert set(compared_with_an_opcode(ast.parse(code))) == {"sort", "x-start"}


def call(name):
    text = module([f'ROOT %c = f32[2]{{0}} custom-call(), custom_call_target="{name}"'])
    return parse_hlo(text).entry.root


@pytest.mark.parametrize(
    "name, kind",
    [
        ("__cublas$lt$matmul$f8", Call.PRODUCT),
        ("__cublas$lt$matmul$f8$graph", Call.PRODUCT),
        ("__cublas$triangularSolve", Call.OTHER),
        ("__cudnn$convForward", Call.CONVOLUTION),
        ("__cudnn$fmhaSoftmaxBackwardF8", Call.ATTENTION),
        ("__gpu$xla.gpu.triton", Call.OPAQUE),
        ("__cub$DeviceRadixSort", Call.OTHER),
        ("xla_ffi_partitioned_python_gpu_callback", Call.OTHER),
        ("__cublas$lt$somethingNew", Call.UNKNOWN),
        ("my_kernel", Call.UNKNOWN),
        ("", Call.UNKNOWN),
    ],
)
def test_custom_calls_by_what_they_do(name, kind):
    assert call_of(call(name)) is kind


@pytest.mark.parametrize("name", ["my_kernel", "__gpu$xla.gpu.triton", "__cublas$lt$groupedMatmul"])
def test_what_is_not_known_is_named_in_the_report(name):
    """It may multiply anything: it is neither one of the other launches nor missing without a word."""
    text = module(
        [
            "%x = f32[8]{0} parameter(0)",
            f'%c = f32[8]{{0}} custom-call(%x), custom_call_target="{name}"',
            "ROOT %n = f32[8]{0} negate(%c)",
        ]
    )
    program = read(text)
    assert [call.name for call in program.opaque] == [name] and program.others.count == 1
    device, without = fp8.preflight.compilable_devices["h100"], read(module(["ROOT %x = f32[8]{0} parameter(0)"]))
    report = PreflightReport(device, {"devices": 1}, program)
    assert f"1 launches cannot be analyzed, and are not in the times: {name}" in report.caveats
    report = PreflightReport(device, {"devices": 1}, without, baseline=program)
    assert f"1 launches of the baseline cannot be analyzed, and are not in the times: {name}" in report.caveats


def anywhere(x, key):
    """Sorts, random numbers, transforms, convolutions, products."""
    values, indices = jax.lax.top_k(jnp.sort(x, axis=0) + jax.random.normal(key, x.shape), 4)
    window = jax.lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")
    return values, indices, jnp.fft.fft(x), window, x @ x


def here(x, key):
    """And what a process lowers for its own devices alone: decompositions, and calls of Python."""
    jax.debug.callback(lambda _: None, x[0, 0])
    q, r = jnp.linalg.qr(x)
    return anywhere(x, key), jax.scipy.linalg.solve_triangular(r, q)


@pytest.mark.parametrize(("function", "device"), [("here", "local"), *on(["anywhere"], ["h100", "tpu7x"])])
def test_what_jax_compiles_to_is_known(function, device):
    args = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.random.key(0)
    report = inspect_step({"here": here, "anywhere": anywhere}[function], *args, device=device, other_setting=False)
    assert unknown_calls(report.step) == set()
    assert "custom-call" in report.step.text
