"""The kernels that vLLM's CPU attention writes its cache with, as far as this machine has them."""

import pytest
import torch

from lmcache_connector.cpu_packing import CpuKernel

NO_AMX = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this machine has no AMX")
NO_FP8 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="a cache in fp8 takes AVX-512")

KERNELS = [
    pytest.param(CpuKernel("vec", torch.float32), 64, id="vec-float32"),
    pytest.param(CpuKernel("vec", torch.bfloat16), 64, id="vec-bfloat16"),
    pytest.param(CpuKernel("vec16", torch.float16), 80, id="vec16-float16"),
    pytest.param(CpuKernel("amx", torch.bfloat16), 32, id="amx-bfloat16", marks=NO_AMX),
    pytest.param(CpuKernel("vec", torch.float32, "fp8"), 64, id="vec-fp8", marks=NO_FP8),
    pytest.param(CpuKernel("vec", torch.float16, "fp8_e5m2"), 32, id="vec-fp8_e5m2", marks=NO_FP8),
    pytest.param(CpuKernel("amx", torch.bfloat16, "fp8_e4m3"), 64, id="amx-fp8_e4m3", marks=NO_AMX),
]
"""(kernel, a head size that it takes)."""
