"""Matrices as compressed-tensors' own quantizer rounds them, for each layout of weights and inputs. Neither JAX nor us.

python tests/others/write_quantizers.py FILE
"""

import sys

import numpy as np
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam


PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4")


def amaxes(values: torch.Tensor, args) -> torch.Tensor:
    """The largest magnitudes of what shares a scale."""
    rows, columns = values.shape
    if args.strategy == "tensor":
        return values.abs().max()
    if args.strategy == "channel":
        return values.abs().amax(1, keepdim=True)
    height, width = args.block_structure or (1, args.group_size)
    return values.abs().reshape(rows // height, height, columns // width, width).amax((1, 3))


def main(file: str) -> None:
    """Weights and inputs in float32, their scales and their rounded values."""
    random, arrays = torch.Generator().manual_seed(0), {}
    weight = torch.randn((256, 384), generator=random) * torch.exp2(torch.randn((256, 1), generator=random))
    inputs = torch.randn((64, 384), generator=random) * torch.exp2(torch.randn((64, 1), generator=random))
    for preset in PRESETS:
        scheme = preset_name_to_scheme(preset, ["Linear"])
        args, unit = scheme.weights, None
        if args.strategy == "tensor_group":
            unit = generate_gparam(weight.amin(), weight.amax())
        amax = amaxes(weight, args)
        scale, zero = calculate_qparams(-amax, amax, args, global_scale=unit)
        codes = quantize(weight, scale, zero, args, global_scale=unit)
        of_all = scale.float() if unit is None else scale.float() / unit
        arrays |= {f"{preset}/weight": codes.float().numpy(), f"{preset}/weight_scale": of_all.numpy()}
        of_input = scheme.input_activations
        if of_input.dynamic is True:
            scale, zero = compute_dynamic_scales_and_zp(inputs[None], of_input, torch.nn.Linear(1, 1))
            arrays[f"{preset}/input"] = quantize(inputs[None], scale, zero, of_input)[0].float().numpy()
            arrays[f"{preset}/input_scale"] = scale.float().numpy()
    np.savez(file, weight=weight.numpy(), input=inputs.numpy(), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
