"""What stands in for CUDA, triton and kernels of others, so that Megatron runs on a CPU.

Call in this order: `without_triton()`, `without_fla()`, `without_mamba()`, import torch,
`without_cuda()`, import Megatron, and after its parallel state is initialised
`without_cuda_rng()`.
"""

import contextlib
import importlib.machinery
import sys
import types
import typing

import typing_extensions


class Anything(types.ModuleType):
    """A module whose attributes are modules and whose calls are decorators that change nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda function: function

    def __mro_entries__(self, bases):
        return ()


def install(module: types.ModuleType) -> types.ModuleType:
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    module.__path__ = []
    sys.modules[module.__name__] = module
    return module


def without_triton() -> None:
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # megatron.training, on Python 3.11
    # torch must look for triton before the stand-in is there.
    import torch._dynamo.testing
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_compat  # noqa: F401

    for name in ("", ".language", ".language.extra", ".runtime", ".backends"):
        install(Anything("triton" + name)).__version__ = "0.0"
    sys.modules["triton"].language = sys.modules["triton.language"]


def without_fla() -> None:
    """Kernels that are never called with deterministic_mode, but for the l2norm."""
    import torch

    def kernel(*args, **kwargs):
        raise RuntimeError("flash-linear-attention is not installed")

    def l2norm(x, *args, **kwargs):
        return torch.nn.functional.normalize(x, dim=-1)

    parts = {
        "": {},
        ".modules": {},
        ".modules.convolution": {"causal_conv1d": kernel, "causal_conv1d_update": kernel},
        ".modules.l2norm": {"l2norm": l2norm},
        ".ops": {},
        ".ops.gated_delta_rule": {
            "chunk_gated_delta_rule": kernel,
            "fused_recurrent_gated_delta_rule": kernel,
        },
        ".ops.gdn2": {},
        ".ops.gdn2.chunk": {"chunk_gdn2": kernel},
    }
    for name, attributes in parts.items():
        vars(install(types.ModuleType("fla" + name))).update(attributes)


def without_mamba() -> None:
    """What a MambaMixer needs to be made: a norm with a weight. Its kernels are never called."""
    import torch

    def kernel(*args, **kwargs):
        raise RuntimeError("mamba_ssm and causal_conv1d are not installed")

    class RMSNorm(torch.nn.Module):
        def __init__(self, size, *, device=None, dtype=None, **options):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    parts = {
        "causal_conv1d": {"causal_conv1d_fn": kernel},
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": kernel},
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": kernel,
            "mamba_split_conv1d_scan_combined": kernel,
        },
    }
    for name, attributes in parts.items():
        vars(install(types.ModuleType(name))).update(attributes)


class Device(str):
    """The current device: `cpu`, but a number in `f"cuda:{current_device()}"`."""

    __slots__ = ()

    def __format__(self, spec):
        return "0"


class Stream:
    """A stream, an event and a device context in one: everything has happened already."""

    def __init__(self, *args, **kwargs):
        import torch

        self.cuda_stream = 0
        self.device = torch.device("cpu")

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__

    def done(self, *args, **kwargs):
        return self

    wait_stream = wait_event = wait = record = synchronize = record_event = done

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


def without_cuda() -> None:
    """Lets Megatron allocate on the CPU where it says cuda."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    cuda = torch.cuda
    cuda.current_device = lambda: Device("cpu")
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    cuda.empty_cache = cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = cuda.stream = lambda *args, **kwargs: Stream()
    cuda.device = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda *args, **kwargs: None

    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(
        lambda group, device_type="cpu", *args, **kwargs: from_group(group, "cpu", *args, **kwargs)
    )

    _lengths_on_the_host()

    def on_cpu(make):
        def made(*args, **kwargs):
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _lengths_on_the_host() -> None:
    """all_to_all_single takes lists; Megatron gives what it would have copied from the device."""
    import torch
    import torch.distributed as dist

    real = dist.all_to_all_single

    def on_host(value):
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def all_to_all_single(output, input, *lengths, **kwargs):
        named = {
            key: on_host(value) if "split_sizes" in key else value for key, value in kwargs.items()
        }
        return real(output, input, *map(on_host, lengths), **named)

    dist.all_to_all_single = all_to_all_single


class NoRngTracker:
    """Megatron's CUDA RNG tracker where there is no CUDA: forks change nothing."""

    def __init__(self):
        self.states_ = {}

    def is_initialized(self):
        return False

    def get_states(self):
        return {}

    def set_states(self, states):
        pass

    def add(self, *args):
        pass

    def reset(self):
        pass

    @contextlib.contextmanager
    def fork(self, *args, **kwargs):
        yield


def without_cuda_rng() -> None:
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER = NoRngTracker()
