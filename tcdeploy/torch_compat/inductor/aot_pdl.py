"""Programmatic dependent launch (pdl.py) of the kernels in ahead-of-time packages.

In torch 2.11 to 2.13 the C++ code of a package launches every kernel without PDL, also kernels that were generated with
`triton.enable_pdl`. `dependent_launches` changes the C++ code while a package is compiled: kernels that torch would
launch with PDL from Python are launched with PDL from C++ too, if their source waits for the previous kernel.

The effect was not measured on its own. Before, a decode step of Llama 3.1 8B at batch 32 took 1.1% longer than with jit
programs; with PDL 0.0 and 0.5%, on other machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tcdeploy.torch_compat.internal import find, find_code, internal, mentions

KERNEL_CALL = "torch._inductor.codegen.cpp_wrapper_gpu:DeferredTritonCallWrapper"
CUDA_CODE = "torch._inductor.codegen.cuda.device_op_overrides:CUDADeviceOpOverrides"
ORDINARY_CALL, DEPENDENT_CALL = "launchKernel(", "launchDependentKernel("
WAIT = "gdc_wait"
LAUNCH_PARAMETERS = (
    "void launchKernel( CUfunction func, uint32_t gridX, uint32_t gridY, uint32_t gridZ, uint32_t numWarps, "
    "uint32_t sharedMemBytes, void* args[], cudaStream_t stream)"
)
# It has the same parameters as torch's `launchKernel`.
DEPENDENT_LAUNCH = """
            static inline void launchDependentKernel(
                    CUfunction func,
                    uint32_t gridX,
                    uint32_t gridY,
                    uint32_t gridZ,
                    uint32_t numWarps,
                    uint32_t sharedMemBytes,
                    void* args[],
                    cudaStream_t stream) {
                CUlaunchAttribute attribute = {};
                attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                attribute.value.programmaticStreamSerializationAllowed = 1;
                CUlaunchConfig config = {};
                config.gridDimX = gridX;
                config.gridDimY = gridY;
                config.gridDimZ = gridZ;
                config.blockDimX = 32 * numWarps;
                config.blockDimY = 1;
                config.blockDimZ = 1;
                config.sharedMemBytes = sharedMemBytes;
                config.hStream = stream;
                config.attrs = &attribute;
                config.numAttrs = 1;
                CUDA_DRIVER_CHECK(cuLaunchKernelEx(&config, func, args, nullptr));
            }
"""


@internal(
    "dependent launch in packages",
    "torch._inductor.codegen.cpp_wrapper_gpu.DeferredTritonCallWrapper.generate_launch_kernel",
    "decode steps of `--programs aot` may be about 1% slower",
)  # fmt: skip
def supported() -> bool:
    launch, driver = find_code(f"{KERNEL_CALL}.generate_launch_kernel"), find_code(f"{CUDA_CODE}.kernel_driver")
    return (
        launch is not None
        and driver is not None
        and {"self", "prefix", "params"} <= set(launch.co_varnames[: launch.co_argcount])
        and mentions(find_code(f"{KERNEL_CALL}.generate"), "kernel_name_to_body", "generate_launch_kernel")
        and any(LAUNCH_PARAMETERS in " ".join(text.split()) for text in driver.co_consts if isinstance(text, str))
    )


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Packages that are compiled in this context launch kernels with PDL where torch does from Python."""
    if not supported():
        yield
        return
    kernel_call, cuda_code = find(KERNEL_CALL), find(CUDA_CODE)
    generate_launch, kernel_driver = kernel_call.generate_launch_kernel, cuda_code.kernel_driver

    def generate(call: Any, prefix: Any, wrapper: Any, *arguments: Any, **keywords: Any) -> None:
        code = type(prefix)()
        generate_launch(call, code, wrapper, *arguments, **keywords)
        text = code.getvalue()
        params = arguments[-1] if arguments else keywords["params"]
        prefix.splice(text.replace(ORDINARY_CALL, DEPENDENT_CALL) if _waits(call, params) else text)

    kernel_call.generate_launch_kernel = generate
    cuda_code.kernel_driver = lambda code: kernel_driver(code) + DEPENDENT_LAUNCH
    try:
        yield
    finally:
        kernel_call.generate_launch_kernel, cuda_code.kernel_driver = generate_launch, kernel_driver


def _waits(call: Any, params: dict[str, Any]) -> bool:
    """Whether torch launches the kernel with PDL from Python, and the kernel waits for its predecessor."""
    return bool(params["triton_meta"].get("launch_pdl")) and WAIT in call.kernel_name_to_body[call.kernel_name]
