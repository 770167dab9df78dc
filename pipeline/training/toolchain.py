"""Whether torch.compile can make code here: asked before a process starts."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def check_toolchain(device_type: str) -> None:
    """Refuse to compile for a device type ("cpu" or "cuda") where inductor can't.

    Raises:
        ValueError: what is missing, and how to get it or do without.
    """
    # not at the top: it takes seconds, and only those who compile need it
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "compile=true needs a C++ compiler, and there is none: install g++ or name one in CXX, or use compile=false"
        ) from error
    include = Path(sysconfig.get_path("include"))
    if device_type == "cpu" and not (include / "Python.h").exists():
        raise ValueError(
            f"compile=true needs Python's headers, and {include} has no Python.h: install them (python3-dev), or use "
            "compile=false"
        )
    if device_type == "cuda" and not has_triton():
        raise ValueError("compile=true needs Triton on this GPU: pip install triton, or use compile=false")
