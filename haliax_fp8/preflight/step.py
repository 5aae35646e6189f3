"""inspect_step: compiles a step for a device that need not be here, and reads what it will run."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..devices import Device
from ..devices.xla_flags import TRITON_PRODUCTS, XlaFlags
from ..layers import reasons_of_layers, recipes_of
from ..recipes import training_options
from .analyze import analyze
from .compile import MeshLike, Traced, compile_for, make_mesh
from .devices import CompilableDevice, as_compilable
from .product import Program
from .report import PreflightReport


def inspect_step(
    step_fn: Callable[..., Any],
    *args: Any,
    device: str | CompilableDevice = "h100",
    devices: int | None = None,
    mesh: MeshLike | None = None,
    shardings: Any = None,
    compare: Callable[..., Any] | tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    other_setting: bool = False,
    progress: Callable[[str], None] | None = None,
) -> PreflightReport:
    """Reports what a training step will run on a device, and in which formats, without the device.

    The step is compiled, not run; no array is allocated. XLA gets the same flags as in a real run: those of the
    environment (`XLA_FLAGS`, for TPUs also `LIBTPU_INIT_ARGS`) and `compiler_options`, otherwise its defaults. Threads
    take turns.

    Args:
        step_fn: The step: any callable, jitted or not.
        *args: Its arguments: trees of arrays, or of `jax.ShapeDtypeStruct`s from `eqx.filter_eval_shape`. Everything
            that is not an array is static, as in `eqx.filter_jit`.
        device: One of `compilable_devices`, or your own `CompilableDevice`. `"local"` is the local device.
        devices: The number of devices; by default as many as `mesh` has, or one.
        mesh: The mesh axes and their sizes, such as `{"data": 8}`; or a mesh that has them.
        shardings: A tuple with a `PartitionSpec` (or a tree of them, or None) for each argument. By default the arrays'
            own shardings, if the mesh has those axes.
        compare: A baseline: another step with the same arguments, or `(step, arguments)`.
        compiler_options: XLA's options, as in `jax.jit(compiler_options=...)`; they override the environment's flags.
            Those of a `TrainStep` count by themselves, also where `step_fn` calls one. Another step that passes options
            to its own `jit` reports them with a method `compiler_options(*args, device=device)`.
        other_setting: For NVIDIA GPUs, whether to compile the step once more with the other setting of
            `xla_gpu_enable_triton_gemm`, so that the report says what that changes.
        progress: Called with the name of each stage, such as `compiling the step`.

    Raises:
        ValueError: If the arguments, the device, the mesh or the shardings do not fit. Errors of the step itself are
            not caught.
        RuntimeError: If the device's compiler is not installed; the message has the command that installs it.

    Example:
        >>> step = jax.grad(lambda w, x: (x @ w).sum())
        >>> report = inspect_step(step, jnp.ones((32, 16)), jnp.ones((8, 32)), device="local")
        >>> [(p.name, p.flops) for p in report.products]
        [('backward', 8192)]
    """
    say = progress or (lambda _: None)
    chosen = as_compilable(device)
    _require_call(step_fn, args)
    its_mesh = make_mesh(chosen, devices, mesh)
    trace = partial(Traced.of, mesh=its_mesh, shardings=shardings)
    traced = trace(step_fn, args)
    step_options, dropped = _options_of_step(step_fn, args, traced, chosen.hardware)
    xla_options = {**step_options, **(compiler_options or {})}
    flags = XlaFlags.of_environment(platform=chosen.hardware.platform).with_options(xla_options)

    def program(traced: Traced, arguments: tuple[Any, ...], **more: Any) -> Program:
        options = {**xla_options, **more}
        compiled = compile_for(traced, device=chosen, flags=flags.with_options(options), options=options)
        reasons = {path: why for argument in arguments for path, why in reasons_of_layers(argument).items()}
        return analyze(compiled, chosen, reasons)

    say(f"compiling the step for {chosen.kind}")
    step = program(traced, args)
    baseline = None
    if compare is not None:
        say(f"compiling the baseline for {chosen.kind}")
        other, other_args = compare if isinstance(compare, tuple) else (compare, args)
        baseline = program(trace(other, other_args), other_args)
    with_other = None
    if other_setting and chosen.hardware.platform == "cuda":
        say(f"compiling the step with the other setting of {TRITON_PRODUCTS}")
        with_other = program(traced, args, **{TRITON_PRODUCTS: not flags.triton_products})
    dropped = {name: x for name, x in dropped.items() if flags.with_options({name: x}).values != flags.values}
    return PreflightReport(chosen, dict(its_mesh.shape), step, baseline, flags, with_other, dropped)


def _require_call(step_fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        inspect.signature(step_fn).bind(*args)
    except ValueError:  # A builtin has no signature; the call itself will say what is wrong.
        return
    except TypeError as error:
        if "missing" not in str(error):
            return  # Python miscounts the parameters of some callables, such as a static `__call__`.
        raise ValueError(
            f"step_fn cannot be called with the {len(args)} arguments in args: {error}. Pass the arguments of one step "
            "after it, inspect_step(step, model, state, batch); shapes from eqx.filter_eval_shape will do"
        ) from None


def _options_of_step(
    step_fn: Callable[..., Any], args: tuple[Any, ...], traced: Traced, device: Device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that a step passes to its own `jit`, or a `TrainStep` that it calls; and those that get lost, because
    the `TrainStep` is inside another `jit`, where JAX accepts none."""
    options: Callable[..., Mapping[str, Any]] | None = getattr(step_fn, "compiler_options", None)
    if options is not None:
        return {**options(*args, device=device)}, {}
    of_train_step = training_options(recipes_of(args), device) if traced.train_steps else {}
    return ({}, of_train_step) if True in traced.train_steps else (of_train_step, {})
