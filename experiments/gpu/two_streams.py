"""A HyperRHN's hypernetwork and main network on two streams, a chunk apart.

The hypernetwork reads x and its own state only. Today it runs over the whole sequence before the main network
begins, so its L T small products are added to the time: 1.46 times an RHN's. Here it is the first stage of a
pipeline and the main network the second, and the hypervectors of a chunk are one batched product. All but
the first K of T steps of the hypernetwork hide behind the main network: 1 + 0.46 K / T times the RHN's time,
and what the two take from each other. For T = 100 and K = 25, 1.1 to 1.2 is expected.
"""

import torch
from torch import Tensor

from experiments.gpu.wavefront import Lanes, pipeline, starts_of
from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.ops import backends
from rhhn_fairseq.ops.loop import Noise, State


def run_two_streams(
    cell: HyperRHN, x_TBC: Tensor, state=None, mask_TB=None, noise=None, *, lanes: Lanes, chunk=25
) -> tuple[Tensor, State]:
    """Runs ``cell(x_TBC, state, mask_TB, noise)`` in chunks on two lanes; noise is that of all steps."""
    ((s, hyper_s),) = starts_of([cell], x_TBC, state)
    if mask_TB is not None:
        x_TBC = x_TBC.masked_fill(~mask_TB.unsqueeze(-1), 0.0)
    plan = backends.select(cell.request(x_TBC, (s, hyper_s), mask_TB, noise))
    projected, noise = cell.project(x_TBC, gemm=plan.gemm if plan.is_fused else None), noise or {}

    def named(draws) -> Noise | None:
        return dict(zip(noise, draws, strict=True)) or None

    def hyper(item, state):
        gx, hyper_g, mask, *draws = item
        prepared, after = cell.prepare((gx, hyper_g), (None, *state), mask, named(draws), plan)
        return (*prepared, mask, *draws), after[1:]

    def main(item, state):
        gx, trace, mask, *draws = item
        # The second is in the place of the hypernetwork's state, which is not read.
        y, after = cell.run((gx, trace), (*state, *state), mask, named(draws), plan)
        return (y,), after[:1]

    tensors = (*projected, mask_TB, *noise.values())
    (ys,), ((hyper_s,), (s,)) = pipeline([hyper, main], tensors, [(hyper_s,), (s,)], chunk, lanes)
    return torch.cat(ys), (s.to(x_TBC.dtype), hyper_s.to(x_TBC.dtype))
