"""The cells that have a fused operation, and a pass of one as the tests of operations compare it."""

import torch

from rhhn_fairseq.cells import CELLS, build_cell
from rhhn_fairseq.cells.selection import available_backends
from rhhn_fairseq.ops.backends import FUSED

GATED_NOISE = dict(
    recurrent_dropout=0.3, gal_dropout=0.2, zoneout=0.1, zoneout_c=0.2, h_detach=0.5, c_detach=0.5
)
RHN_NOISE = dict(recurrent_dropout=0.3, gal_dropout=0.2, zoneout=0.1, h_detach=0.5)
SIZES = {
    "lstm": {},
    "ln_lstm": {},
    "hyperlstm": dict(hyper_size=3, hyper_embed_size=2),
    "ln_hyperlstm": dict(hyper_size=3, hyper_embed_size=2),
    "rhn": dict(rhn_depth=3),
    "hyperrhn": dict(hyper_size=3, rhn_depth=3),
    "hyperrhn, rank 3": dict(hyper_size=3, rhn_depth=3, hyper_rank=3),
    "rolled_hyperrhn": dict(hyper_size=3, rhn_depth=3),
}
"""The cells that have a fused operation, and what follows their names here, with their sizes."""

FUSED_CELLS = {entry.cell for entry in CELLS.values() if getattr(entry.cell, "operation", None) in FUSED}


def backends(cell, device="cpu", dtype=torch.float32):
    """Names of the backends that run a cell with masks and noise, the preferred first."""
    return available_backends(cell, device, dtype, padded=True)


def make_cell(name, options=(), C=4, H=5, dtype=torch.float64):
    torch.manual_seed(0)
    cell = build_cell(cell_name(name), C, H, **SIZES[name] | dict(options)).to(dtype)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return cell


def cell_name(name):
    """The registered name of a cell in ``SIZES``."""
    return name.partition(",")[0]


def noise_options(name):
    return RHN_NOISE if "rhn" in name else GATED_NOISE


def run_pass(cell, x, state, mask, noise, backend, monkeypatch):
    """Outputs, final state and all gradients of a weighted sum of the outputs and the final state."""
    monkeypatch.setenv("RHHN_KERNEL", backend)
    x = x.clone().requires_grad_()
    state = None if state is None else tuple(tensor.clone().requires_grad_() for tensor in state)
    y, final = cell(x, state, mask, noise)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    loss = (y * weights).sum() + sum((tensor * tensor).sum() for tensor in final)
    inputs = [x, *(state or ()), *cell.parameters()]
    return [y.detach(), *(tensor.detach() for tensor in final), *torch.autograd.grad(loss, inputs)]


def assert_equal(results, exact, tolerance):
    for one, other in zip(results, exact, strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).norm() <= tolerance * (1 + other.norm())


def doubled(tensors):
    """States or noise in float64."""
    if tensors is None:
        return None
    if isinstance(tensors, dict):
        return {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
    return tuple(tensor.double() for tensor in tensors)
