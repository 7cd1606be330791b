"""Kernels that try to pass a check without being right, or to learn about it.

Each is the text of `kernel.py`, the verdict, and words that its first line must have. The reference
`reference.py:gemm` is a product of two matrices, and `mxfp8` is declared for both unless `formats` is
False.
"""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE = '''
import torch

LAST = []


def gemm(x, w):
    """Multiply a matrix by the transpose of another one."""
    y = torch.nn.functional.linear(x, w)
    LAST[:] = [y]
    return y


def silu(x):
    return x * torch.sigmoid(x)
'''


@dataclass(frozen=True)
class Cheat:
    """A kernel file, and what `qgate check` has to say of it."""

    text: str
    verdict: str
    words: str
    like: str = "reference.py:gemm"
    formats: bool = False


CHEATS = {
    "calls the reference": Cheat(
        """
        import reference
        def kernel(x, w):
            return reference.gemm(x, w)
        """,
        "refused",
        "kernel calls the reference (kernel.py, line 4)",
    ),
    "imports the reference at the first call": Cheat(
        """
        def kernel(x, w):
            from reference import gemm as helper
            try:
                return helper(x, w)
            except Exception:
                return x @ w.T
        """,
        "refused",
        "kernel calls the reference (kernel.py, line 5)",
    ),
    "loads the file of the reference under another name": Cheat(
        """
        import importlib.util, pathlib
        def load():
            path = pathlib.Path(__file__).with_name("reference.py")
            spec = importlib.util.spec_from_file_location("helpers", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        HELPERS = load()
        def kernel(x, w):
            return HELPERS.gemm(x, w)
        """,
        "refused",
        "the file of the reference",
    ),
    "runs the text of the reference": Cheat(
        """
        import pathlib
        NAMES = {}
        exec(pathlib.Path(__file__).with_name("reference.py").read_text(), NAMES)
        def kernel(x, w):
            return NAMES["gemm"](x, w)
        """,
        "refused",
        "kernel opens the file of the reference (kernel.py, line 4)",
    ),
    "copies the code of the reference": Cheat(
        """
        import types, reference
        CODE = types.FunctionType(reference.gemm.__code__, vars(reference))
        def kernel(x, w):
            return CODE(x, w)
        """,
        "refused",
        "kernel calls the reference (kernel.py, line 5)",
    ),
    "hands its arguments to the function of torch that it replaces": Cheat(
        """
        import torch
        def kernel(x, w):
            return torch.nn.functional.linear(x, w) + 0
        """,
        "refused",
        "kernel calls the reference (kernel.py, line 4)",
        like="torch.nn.functional:linear",
    ),
    "calls the reference through a module of torch": Cheat(
        """
        import torch
        def kernel(x):
            return torch.nn.GELU()(x) * 1.0
        """,
        "refused",
        "kernel calls the reference (kernel.py, line 4)",
        like="torch.nn.functional:gelu",
    ),
    "calls the operator of the reference by another name": Cheat(
        """
        import torch
        def kernel(x):
            return torch.ops.aten.gelu.default(x)
        """,
        "refused",
        "kernel calls the reference (kernel.py, line 4)",
        like="torch.nn.functional:gelu",
    ),
    "returns memory of the reference": Cheat(
        """
        import reference
        def kernel(x, w):
            return reference.LAST[0] if reference.LAST else x @ w.T * 1.02
        """,
        "fail",
        "kernel is wrong: the result is 1.02 times the expected one",
    ),
    "looks for the result among all objects": Cheat(
        """
        import gc, torch
        def kernel(x, w):
            for value in gc.get_objects():
                if type(value) is torch.Tensor and value.shape == (len(x), len(w)):
                    return value
            return x @ w.T
        """,
        "refused",
        "kernel looks for other objects in memory by gc.get_objects (kernel.py, line 4)",
    ),
    "reads the stack": Cheat(
        """
        import sys
        def kernel(x, w):
            frame = sys._getframe(1)
            while frame is not None:
                if "like" in frame.f_locals:
                    return frame.f_locals["like"](x, w)
                frame = frame.f_back
            return x @ w.T
        """,
        "refused",
        "kernel reads the stack by sys._getframe (kernel.py, line 4)",
    ),
    "reads the stack through inspect": Cheat(
        """
        import inspect
        def kernel(x, w):
            names = [entry.function for entry in inspect.stack()]
            return x @ w.T * (1.0 if "check_kernel" in names else 0.5)
        """,
        "refused",
        "kernel reads the stack by sys._getframe (kernel.py, line 4)",
    ),
    "reads the stack from an exception": Cheat(
        """
        def kernel(x, w):
            try:
                raise ValueError
            except ValueError as error:
                caller = error.__traceback__.tb_frame.f_back
            return x @ w.T
        """,
        "refused",
        "kernel reads the stack by tb_frame (kernel.py, line 6)",
    ),
    "looks if qgate is loaded": Cheat(
        """
        import sys
        def kernel(x, w):
            y = x @ w.T
            return y if "qgate" in sys.modules else y * 0.5
        """,
        "refused",
        "kernel asks for 'qgate' (kernel.py, line 5)",
    ),
    "asks the environment in pieces": Cheat(
        """
        import os
        def kernel(x, w):
            name = "_".join(["PYTEST", "CURRENT", "TEST"])
            return x @ w.T * (1.0 if name in os.environ else 0.5)
        """,
        "refused",
        "kernel asks the environment for PYTEST_CURRENT_TEST (kernel.py, line 5)",
    ),
    "reads the command of its parent": Cheat(
        """
        import os
        def kernel(x, w):
            words = open(f"/proc/{os.getppid()}/cmdline").read()
            return x @ w.T * (1.0 if "check" in words else 0.5)
        """,
        "refused",
        "kernel reads the state of processes in /proc (kernel.py, line 4)",
    ),
    "recognizes the shape of the example": Cheat(
        """
        def kernel(x, w):
            y = x @ w.T
            return y if x.shape == (24, 64) else y * 0.5
        """,
        "fail",
        "kernel is wrong for ",
    ),
    "refuses all shapes but one": Cheat(
        """
        def kernel(x, w):
            if x.shape != (24, 64) or w.shape != (16, 64) or not x.isfinite().all() or x.abs().max() > 99:
                raise NotImplementedError("only 24x64")
            return x @ w.T
        """,
        "inconclusive",
        "kernel agrees at the example's sizes alone",
    ),
    "knows the sizes of all derived inputs": Cheat(
        """
        KNOWN = {1, 3, 8, 15, 16, 17, 23, 24, 25, 31, 32, 33, 37, 63, 64, 65, 129, 257, 0}
        def kernel(x, w):
            y = x @ w.T
            return y if {len(x), len(w), x.shape[1]} <= KNOWN else y * 0.5
        """,
        "fail",
        "kernel is wrong for shapes ",
    ),
    "remembers results by shape": Cheat(
        """
        SEEN = {}
        def kernel(x, w):
            key = x.shape, w.shape
            if key not in SEEN:
                SEEN[key] = x @ w.T
            return SEEN[key]
        """,
        "fail",
        "kernel gives its earlier result where other values in the same memory are given",
    ),
    "remembers results by address": Cheat(
        """
        SEEN = {}
        def kernel(x, w):
            key = x.data_ptr(), x.shape, w.data_ptr(), w.shape
            if key not in SEEN:
                SEEN[key] = x @ w.T
            return SEEN[key]
        """,
        "fail",
        "gives its earlier result where other values in the same memory are given",
    ),
    "is right in its first calls": Cheat(
        """
        CALLS = [0]
        def kernel(x, w):
            CALLS[0] += 1
            return x @ w.T if CALLS[0] < 80 else x @ w.T * 0.5
        """,
        "fail",
        "calls, kernel is wrong: ",
    ),
    "knows the values of a seed": Cheat(
        """
        import torch
        def known(seed):
            generator = torch.Generator().manual_seed(seed)
            return torch.randn(24, 64, generator=generator)
        KNOWN = [known(seed) for seed in range(50)]
        def kernel(x, w):
            if any(torch.equal(x, value) for value in KNOWN):
                return x @ w.T
            return torch.zeros(len(x), len(w))
        """,
        "fail",
        "kernel is wrong: the result is all zeros",
    ),
    "answers every comparison with true": Cheat(
        """
        import torch
        class Equal(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func in (torch.Tensor.__eq__, torch.equal, torch.Tensor.__le__, torch.Tensor.__ge__):
                    return torch.ones(args[0].shape, dtype=torch.bool)
                return super().__torch_function__(func, types, args, kwargs or {})
        def kernel(x, w):
            return torch.zeros(len(x), len(w)).as_subclass(Equal)
        """,
        "fail",
        "kernel is wrong: the result is all zeros",
    ),
    "changes torch, which judges it": Cheat(
        """
        import torch
        torch.equal = lambda *_: True
        torch.Tensor.__le__ = torch.Tensor.__ge__ = lambda a, b: torch.ones(a.shape, dtype=torch.bool)
        torch.Tensor.any = lambda *_, **__: torch.tensor(False)
        torch.nn.functional.linear = lambda x, w: torch.zeros(len(x), len(w))
        def kernel(x, w):
            return torch.zeros(len(x), len(w))
        """,
        "fail",
        "kernel is wrong: the result is all zeros",
    ),
    "makes its arguments zero": Cheat(
        """
        import torch
        def kernel(x, w):
            x.zero_()
            return torch.zeros(len(x), len(w))
        """,
        "fail",
        "kernel changes argument 0 in place; the reference does not",
    ),
    "ends its process with status 0": Cheat(
        """
        import os
        def kernel(x, w):
            print('{"verdict": "pass"}', flush=True)
            os._exit(0)
        """,
        "fail",
        "kernel ended its process",
    ),
    "leaves with a status of success": Cheat(
        """
        import sys
        def kernel(x, w):
            sys.exit(0)
        """,
        "fail",
        "kernel raised SystemExit for the example",
    ),
    "writes into qgate": Cheat(
        """
        import os, sysconfig
        def kernel(x, w):
            os.close(os.open(PACKAGE + "/kernel_checks/never_written.py", os.O_RDWR))
            return x @ w.T
        """,
        "refused",
        "kernel writes into the package that judges it (kernel.py, line 4)",
    ),
    "quantizes nothing": Cheat(
        """
        def kernel(x, w):
            return x @ w.T
        """,
        "fail",
        "each of arguments 0, 1 is not quantized to mxfp8_e4m3",
        formats=True,
    ),
    "never comes back": Cheat(
        """
        def kernel(x, w):
            while True:
                pass
        """,
        "fail",
        "kernel gives no answer within 1 s for the example",
    ),
}
