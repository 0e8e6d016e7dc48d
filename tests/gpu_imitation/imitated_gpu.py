"""Has torch work with the imitated GPU of ``device.cpp``, which says what is imitated.

It has to be there before torch is imported: ``pytest -p imitated_gpu`` with this folder on PYTHONPATH, or

    python imitated_gpu.py MODULE ARGUMENTS ...        as python -m MODULE ARGUMENTS ...
"""

import ctypes
import gc
import importlib.util
import itertools
import os
import runpy
import sys
import traceback
from types import SimpleNamespace

import compiled


def _load() -> ctypes.CDLL:
    if "torch" in sys.modules:
        raise RuntimeError("torch is there already; import imitated_gpu before it")
    if compiled.obstacle():
        raise RuntimeError(f"no GPU can be imitated: {compiled.obstacle()}")
    library = ctypes.CDLL(str(compiled.library()), mode=ctypes.RTLD_GLOBAL)
    graph, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, *arguments in (
        ("stream_now", number),
        ("stream_enter", None, number),
        ("memory_now", number),
        ("memory_peak", number),
        ("graph_begin", graph, number),
        ("graph_calls", number, graph),
        ("graph_replay", ctypes.c_int, graph),
        ("graph_free", None, graph, number),
        ("graph_resume", None, FUNCTION, number),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64)
LIBRARY = _load()

import torch  # noqa: E402  the library comes first
from torch._decomp import decomposition_table  # noqa: E402


class Stream:
    """A stream; all run one after the other."""

    numbers = itertools.count(1)

    def __init__(self, device=None, priority=0, number=None):
        self.cuda_stream = next(self.numbers) if number is None else number
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other):
        pass

    def record_event(self, event=None):
        return object()

    def wait_event(self, event):
        pass

    def synchronize(self):
        synchronize()

    def __eq__(self, other):
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self):
        return self.cuda_stream


class StreamContext:
    """Makes a stream the current one meanwhile."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.before = LIBRARY.stream_now()
        if self.stream is not None:
            LIBRARY.stream_enter(self.stream.cuda_stream)

    def __exit__(self, *error):
        LIBRARY.stream_enter(self.before)


def synchronize(device=None):
    if LIBRARY.graph_capturing():
        raise RuntimeError("imitated GPU: synchronize: operation not permitted when stream is capturing")


class CUDAGraph:
    """Calls that can be repeated where they were."""

    pools = itertools.count(1)
    captures = replays = 0
    """Of all graphs."""
    nodes = 0
    """Of the graphs that there are."""

    def __init__(self, keep_graph=False):
        self.handle, self.name, self.size = None, None, 0

    def capture_begin(self, pool=None, capture_error_mode="global"):
        if LIBRARY.stream_now() == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.name = (0, next(self.pools)) if pool is None else pool
        self.handle = LIBRARY.graph_begin(self.name[1])
        CUDAGraph.captures += 1

    def capture_end(self):
        LIBRARY.graph_end()
        self.size = LIBRARY.graph_calls(self.handle)
        CUDAGraph.nodes += self.size

    def pool(self):
        return self.name

    def replay(self):
        synchronize()
        CUDAGraph.replays += 1
        if not LIBRARY.graph_replay(self.handle):
            raise RuntimeError("imitated GPU: a graph's replay failed")

    def reset(self):
        if self.handle is not None:
            LIBRARY.graph_free(self.handle, self.name[1])
            CUDAGraph.nodes -= self.size
            self.handle = None

    def __del__(self):
        self.reset()


class Capture:
    """torch.cuda.graph."""

    def __init__(self, cuda_graph, pool=None, stream=None, capture_error_mode="global"):
        self.graph, self.pool, self.mode = cuda_graph, pool, capture_error_mode
        self.stream = StreamContext(stream or Stream())

    def __enter__(self):
        gc.collect()
        self.stream.__enter__()
        self.graph.capture_begin(self.pool, self.mode)

    def __exit__(self, *error):
        self.graph.capture_end()
        self.stream.__exit__(*error)


class Device:
    """torch.cuda.device and device_of: there is one."""

    def __init__(self, device):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


# Triton cannot compile for it, but its interpreter can run here.
MAJOR = 9 if os.environ.get("TRITON_INTERPRET") == "1" else 7
PROPERTIES = SimpleNamespace(name="imitated GPU", major=MAJOR, minor=0, total_memory=80 << 30)

NODE = 10 << 10
"""Bytes that a call of a graph takes beside the tensors."""


def mem_get_info(device=None):
    used = LIBRARY.memory_peak() + NODE * CUDAGraph.nodes
    return PROPERTIES.total_memory - used, PROPERTIES.total_memory


# A function each: torch's compiler knows functions by their names and wants none to have two.
for name, value in {
    "is_available": lambda: True,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda value: None,
    "device": Device,
    "device_of": lambda tensor: Device(tensor),
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "is_bf16_supported": lambda including_emulation=True: True,
    "synchronize": synchronize,
    "Stream": Stream,
    "stream": lambda stream: StreamContext(stream),
    "current_stream": lambda device=None: Stream(number=LIBRARY.stream_now()),
    "CUDAGraph": CUDAGraph,
    "graph": Capture,
    "graph_pool_handle": lambda: (0, next(CUDAGraph.pools)),
    "is_current_stream_capturing": lambda: bool(LIBRARY.graph_capturing()),
    "memory_allocated": lambda device=None: LIBRARY.memory_now(),
    "memory_reserved": lambda device=None: LIBRARY.memory_peak(),
    "max_memory_allocated": lambda device=None: LIBRARY.memory_peak(),
    "reset_peak_memory_stats": lambda device=None: LIBRARY.memory_forget_peak(),
    "mem_get_info": mem_get_info,
    "empty_cache": lambda: None,
    "manual_seed": lambda value: None,
    "manual_seed_all": lambda value: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
}.items():
    setattr(torch.cuda, name, value)
torch.Tensor.record_stream = lambda tensor, stream: None
torch._C._set_cudnn_enabled(False)
torch._C._cuda_clearCublasWorkspaces = lambda: LIBRARY.work_clear()


# ---- Operations that have no code for a CPU, or less of it ----


def _lstm_cell(from_x, from_h, c, bias_x=None, bias_h=None):
    _both_or_none(bias_x, bias_h)
    gates = from_x + from_h if bias_x is None else from_x + from_h + bias_x + bias_h
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * c + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(dh, dc, c, after, kept, has_bias):
    i, f, g, o = kept.chunk(4, 1)
    inner = after.tanh()
    dc = torch.zeros_like(c) if dc is None else dc
    dh = torch.zeros_like(c) if dh is None else dh
    dc = dc + dh * o * (1 - inner * inner)
    gates = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * inner * o * (1 - o)]
    gates = torch.cat(gates, 1)
    return gates, dc * f, gates.sum(0) if has_bias else torch.Tensor()


def _gru_cell(from_x, from_h, h, bias_x=None, bias_h=None):
    _both_or_none(bias_x, bias_h)
    if bias_x is not None:
        from_x, from_h = from_x + bias_x, from_h + bias_h
    (x_r, x_z, x_n), (h_r, h_z, h_n) = from_x.chunk(3, 1), from_h.chunk(3, 1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    n = (x_n + r * h_n).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, h_n], 1)


def _gru_cell_backward(dh, kept, has_bias):
    r, z, n, h, h_n = kept.chunk(5, 1)
    dn = dh * (1 - z) * (1 - n * n)
    dz, dr = dh * (h - n) * z * (1 - z), dn * h_n * r * (1 - r)
    from_x, from_h = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    sums = (from_x.sum(0), from_h.sum(0)) if has_bias else (torch.Tensor(), torch.Tensor())
    return from_x, from_h, dh * z, *sums


def _as_cudnn(function):
    """Whose passes can go backward in training alone."""

    def refuse(gradient):
        raise RuntimeError("imitated GPU: cudnn RNN backward can only be called in training mode")

    def run(x, state, weights, has_biases, layers, dropout, train, *rest):
        y, *after = function(x, state, weights, has_biases, layers, dropout, train, *rest)
        if x.is_cuda and not train and y.requires_grad:
            y.register_hook(refuse)
        return y, *after

    return run


torch.lstm, torch.gru = _as_cudnn(torch.lstm), _as_cudnn(torch.gru)


def _both_or_none(bias_x, bias_h):
    if (bias_x is None) != (bias_h is None):
        raise RuntimeError("imitated GPU: input_bias and hidden_bias have to have the same size")


_operations = torch.library.Library("aten", "IMPL")
for name, function in {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}.items():
    _operations.impl(name, function, "CUDA")
for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
    _operations.impl(name, decomposition_table[getattr(torch.ops.aten, name).default], "CUDA")


def _bytes(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _for_gpu(function, name):
    host = getattr(torch.UntypedStorage, name)

    def either(storage):
        return function(storage) if storage.device.type == "cuda" else host(storage)

    setattr(torch.UntypedStorage, name, either)


_for_gpu(lambda storage: _bytes(storage).clone().untyped_storage(), "clone")
_for_gpu(lambda storage: _bytes(storage).cpu().untyped_storage(), "cpu")


# ---- Who reads memory by its address ----

_address = torch.Tensor.data_ptr


def _address_unless_compiled(tensor):
    if tensor.device.type == "cuda" and "ops/native" in sys._getframe(1).f_code.co_filename:
        raise RuntimeError("imitated GPU: compiled code for the CPU was given a tensor of the GPU")
    return _address(tensor)


torch.Tensor.data_ptr = _address_unless_compiled

_launches = []


@FUNCTION
def _launch_again(number):
    try:
        _launches[number]()
    except BaseException:
        traceback.print_exc()
        os._exit(3)  # An error cannot pass through the library.


def _interpret_in_graphs():
    """Has graphs repeat what Triton's interpreter does."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def launch_and_keep(self, *args, **kwargs):
        if not LIBRARY.graph_capturing():
            return launch(self, *args, **kwargs)
        LIBRARY.graph_pause()
        launch(self, *args, **kwargs)
        _launches.append(lambda: launch(self, *args, **kwargs))
        LIBRARY.graph_resume(_launch_again, len(_launches) - 1)

    interpreter.GridExecutor.__call__ = launch_and_keep


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _interpret_in_graphs()

if __name__ == "__main__":
    sys.modules["imitated_gpu"] = sys.modules["__main__"]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
