from __future__ import annotations

import sysconfig

import pytest
import torch._inductor.cpp_builder
import torch.utils._triton
from torch._inductor.exc import InvalidCxxCompiler

from pipeline.training.devices import choose_devices
from pipeline.training.settings import Settings
from pipeline.training.toolchain import check_toolchain


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", lambda: "g++")


def absent() -> str:
    raise InvalidCxxCompiler


def test_all_there():
    check_toolchain("cpu")


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", absent)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler.*install g\+\+ or name one in CXX, or use compile=f"):
        check_toolchain("cpu")


def test_no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"needs Python's headers.*has no Python\.h: install them"):
        check_toolchain("cpu")


def test_no_triton(monkeypatch):
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="needs Triton on this GPU: pip install triton, or use compile=false"):
        check_toolchain("cuda")


def test_it_is_asked_only_for_a_run_that_compiles(monkeypatch):
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", absent)
    assert choose_devices(Settings(device="cpu")).type == "cpu"
    with pytest.raises(ValueError, match="compile=true needs"):
        choose_devices(Settings(device="cpu", compile=True))
