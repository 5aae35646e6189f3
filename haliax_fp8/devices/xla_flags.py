"""The flags that a user gives XLA, including the one that matters most for FP8 on NVIDIA GPUs."""

import dataclasses
import os
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any


__all__ = [
    "TRITON_PRODUCTS",
    "XlaFlags",
]


TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
"""Whether XLA may use Triton for matrix products, as it does by default; otherwise it uses cuBLASLt."""

_BOOLEANS = {"true": True, "1": True, "": True, "false": False, "0": False}


@dataclasses.dataclass(frozen=True)
class XlaFlags:
    """Flags by name, without dashes; all others have XLA's defaults.

    Args:
        values: The text of each flag's value; empty for a flag without one, which is true.

    Example:
        >>> XlaFlags.parse("--xla_gpu_enable_triton_gemm=false --xla_dump_to=/tmp/x").triton_products
        False
        >>> XlaFlags().triton_products
        True
    """

    values: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> "XlaFlags":
        """Reads flags as XLA does: of several with the same name, the last one counts.

        Args:
            text: The value of `XLA_FLAGS`: flags, or the name of a file that holds them.

        Raises:
            ValueError: If it names a file that cannot be read.
        """
        if text.strip() and not text.lstrip().startswith("-"):
            try:
                text = pathlib.Path(text.strip()).read_text()
            except OSError as error:
                raise ValueError(
                    f"XLA_FLAGS={text!r} names a file that cannot be read; flags start with two dashes, such as "
                    f"--{TRITON_PRODUCTS}=false"
                ) from error
        values = {}
        for token in shlex.split(text):
            name, _, value = token.lstrip("-").partition("=")
            values[name] = value
        return XlaFlags(values)

    @staticmethod
    def of_environment(environment: Mapping[str, str] | None = None, *, platform: str = "") -> "XlaFlags":
        """The flags in `XLA_FLAGS`, and for TPUs those in `LIBTPU_INIT_ARGS`, where their compiler has its own.

        XLA reads each variable once, when JAX first uses it.

        Args:
            environment: The environment variables; by default those of the process.
            platform: The platform of the device to compile for, such as `tpu`.

        Raises:
            ValueError: See `parse`.

        Example:
            >>> environment = {"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=65536"}
            >>> print(XlaFlags.of_environment(environment, platform="tpu"))
            --xla_tpu_scoped_vmem_limit_kib=65536
        """
        variables = os.environ if environment is None else environment
        flags = XlaFlags.parse(variables.get("XLA_FLAGS", ""))
        return flags.with_options(_of_libtpu(variables.get("LIBTPU_INIT_ARGS", ""))) if platform == "tpu" else flags

    def with_options(self, options: Mapping[str, Any]) -> "XlaFlags":
        """These flags, overridden by a compiler's options.

        Args:
            options: As in `jax.jit(compiler_options=...)`.
        """
        return XlaFlags({**self.values, **{name: _text(value) for name, value in options.items()}})

    @property
    def triton_products(self) -> bool:
        """Whether XLA may use Triton for matrix products.

        Raises:
            ValueError: If the flag is neither true nor false.
        """
        text = self.values.get(TRITON_PRODUCTS, "true")
        value = _BOOLEANS.get(text.lower())
        if value is None:
            raise ValueError(f"{TRITON_PRODUCTS}={text!r} must be true or false")
        return value

    def __str__(self) -> str:
        if not self.values:
            return "XLA's defaults"
        return " ".join(f"--{name}={value}" if value else f"--{name}" for name, value in self.values.items())


def _of_libtpu(text: str) -> dict[str, str]:
    """Flags as libtpu reads them: between spaces, without quotes, each with its value after `=` or after a space."""
    values: dict[str, str] = {}
    last = None
    for token in text.split():
        if token.startswith("-"):
            name, has_value, value = token.lstrip("-").partition("=")
            values[name] = value
            last = None if has_value else name
        elif last is not None:
            values[last], last = token, None
    return values


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
