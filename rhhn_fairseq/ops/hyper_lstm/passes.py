"""The forward and the backward pass of a HyperLSTM over a sequence, for ``hyper_lstm``.

Shapes: T time, B batch, H hidden, N hyper, Z embedding; gates i, f, g, o in every weight's columns.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.backends import Plan, pointwise
from rhhn_fairseq.ops.buffers import Gated, GatedGradients
from rhhn_fairseq.ops.hyper_lstm.rank_scaled_gates import RankScaledGates
from rhhn_fairseq.ops.lstm import (
    GatedMasks,
    GatedNumbers,
    make_buffers,
    make_gradients,
    split_sums,
    state_gradient,
)
from rhhn_fairseq.ops.matmul.gemm import PackedWeight
from rhhn_fairseq.ops.sequence import (
    Resets,
    block_steps,
    operand_blocks,
    previous_states,
    through_recurrence,
    weight_gradient,
)


class Weights(NamedTuple):
    """The parameters of both networks except those of normalisation.

    Attributes:
        weight: W_h [H, 4 H]. weight_hyper: from h to the hypernetwork [H, 4 N].
        weight_e: the hypernetwork's recurrent matrix [N, 4 N].
        weight_z: [N, 12 Z] with bias_z [12 Z].
        weight_d: [12, Z, H] and bias: b_0 [4, H], state type.
        weight_r: if several outer products scale W_h, the map to their vectors, state type, see
            ``RankScaledGates``; weight_z then has Z more columns.
    """

    weight: Tensor
    weight_hyper: Tensor
    weight_e: Tensor
    weight_z: Tensor
    bias_z: Tensor
    weight_d: Tensor
    bias: Tensor
    weight_r: Tensor | None = None


def make_gates(weights: Weights, gx: Tensor, gemm: str) -> RankScaledGates:
    """Returns what computes the sums of the main network's gates if several outer products scale W_h."""
    w = weights
    assert w.weight_r is not None
    return RankScaledGates(w.weight, w.weight_d, w.bias, w.weight_r, gx, gemm)


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass.

    Attributes:
        u: products of h with [weight, weight_hyper], [T, B, 4 (H + N)].
        h, c: all states of the main network, [T, B, H]; h is empty if the outputs are the same.
        a: sums of the hypernetwork's gates, [T, B, 4 N]. e, k: its states, [T, B, N]. z: [T, B, 12 Z].
        read: e before resets cleared it; empty without resets.
    """

    u: Tensor
    h: Tensor
    c: Tensor
    a: Tensor
    e: Tensor
    k: Tensor
    z: Tensor
    read: Tensor


def make_both_buffers(
    kept: Kept,
    state: Sequence[Tensor],
    norms: Sequence[Tensor],
    masks: GatedMasks,
    numbers: GatedNumbers,
    scaled: tuple[Weights, Tensor] | None,
    y: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Gated, Gated]:
    """Returns the buffers of the main network and of the hypernetwork; the latter has no noise of its own.

    Args:
        scaled: the weights and gx, if the point-wise work scales the main network's sums. y: the outputs of
            both networks, in a forward pass with a mask; those of the hypernetwork may be missing.
    """
    u, h, c, a, e, k, z, _ = kept
    half, plain = len(norms) // 2, GatedNumbers(numbers.forget_bias)
    further, outputs = {}, {}
    if scaled is not None:
        weights, gx = scaled
        further = {"gx": gx, "z": z, "weight_d": weights.weight_d, "bias": weights.bias}
    if y is not None:
        further["y"], outputs["y"] = y[0], torch.empty_like(e) if y[1] is None else y[1]
    of_h = u[:, :, : 4 * h.shape[-1]]
    main = make_buffers((of_h, h, c), state[:2], norms[:half], masks, numbers, **further)
    return main, make_buffers((a, e, k), state[2:], norms[half:], GatedMasks(masks.real), plain, **outputs)


class Forward:
    """The forward pass step by step: the products, and a call for each network.

    Args:
        merged: weight and weight_hyper side by side; None for a product with each.
        gates: what computes the sums of the main network's gates; None if a product and the point-wise
            work do.
    """

    def __init__(
        self,
        kept: Kept,
        weights: Weights,
        merged: Tensor | None,
        previous: bool,
        plan: Plan,
        gates: RankScaledGates | None,
    ):
        (T, B, H), N = kept.c.shape, kept.e.shape[-1]
        self.z, self.gates = kept.z, gates
        self.u, self.weights, self.previous, self.plan = kept.u, weights, previous, plan
        self.sides = kept.u.split((4 * H, 4 * N), dim=-1)
        self.from_h = None if merged is None else PackedWeight(merged, T, B, plan.gemm)
        self.from_e = PackedWeight(weights.weight_e, T, B, plan.gemm)
        self.to_z = PackedWeight(weights.weight_z, T, B, plan.gemm)

    def steps(
        self, main: Gated, hyper: Gated, g_hyper: Tensor, gal: Tensor | None
    ) -> Callable[[int, int], None]:
        """Returns a function that runs some steps."""
        main_step = pointwise.gated(self.plan, main)
        run_hyper = self._hypernetwork(main, hyper, g_hyper)
        sides = (side.unbind(0) for side in self.sides)
        from_main = list(zip(self.u.unbind(0), *sides, previous_states(main.h0, main.h), strict=True))

        def run(start: int, stop: int) -> None:
            for t in range(start, stop):
                u_t, main_t, hyper_t, h_t = from_main[t]
                if gal is not None:
                    h_t = h_t * gal
                if self.from_h is not None:
                    self.from_h.product(h_t, u_t)
                else:
                    if self.gates is None:
                        torch.mm(h_t, self.weights.weight, out=main_t)
                    torch.mm(h_t, self.weights.weight_hyper, out=hyper_t)
                run_hyper(t)
                if self.gates is not None:
                    self.gates.forward(t, h_t, self.z[t], main_t)
                main_step(t)

        return run

    def _hypernetwork(self, main: Gated, hyper: Gated, g_hyper: Tensor):
        """Returns a function that computes z of a step from the hypernetwork's product of h."""
        step = pointwise.gated(self.plan, hyper)
        rows = zip(
            g_hyper.unbind(0),
            self.sides[1].unbind(0),
            hyper.u.unbind(0),
            previous_states(hyper.h0, hyper.h),
            hyper.h.unbind(0),
            self.z.unbind(0),
            strict=True,
        )

        def run(t: int) -> None:
            g_t, side_t, a_t, e_t, e_new, z_t = next(rows)
            torch.add(g_t, side_t, out=a_t)
            self.from_e.product(e_t, a_t, a_t)
            step(t)
            self.to_z.product(e_t if self.previous else e_new, z_t, self.weights.bias_z)

        return run


class Backward:
    """The backward pass, one block of steps after another, from the last to the first."""

    def __init__(
        self,
        kept: Kept,
        gx: Tensor,
        state: Sequence[Tensor],
        weights: Weights,
        previous: bool,
        plan: Plan,
    ):
        self.kept, self.gx, self.state, self.weights = kept, gx, state, weights
        self.previous, self.plan = previous, plan
        self.gates = None if weights.weight_r is None else make_gates(weights, gx, plan.gemm)
        self.T, self.B, self.H = kept.c.shape
        self.N = kept.e.shape[-1]
        self.steps = block_steps(self.T, self.B, kept.u.dtype, kept.c.dtype)
        if self.gates is not None:
            self.gates.start_backward()
        from_h = torch.cat(weights[:2], dim=1) if self.gates is None else weights.weight_hyper
        self.matrices = from_h, weights.weight_e, weights.weight_z
        self.dgx, self.dg_hyper, self.dz = (torch.empty_like(tensor) for tensor in (gx, kept.a, kept.z))

    def run(
        self, gradients, norms: Sequence[Tensor], masks: GatedMasks, numbers: GatedNumbers
    ) -> list[Tensor]:
        """See ``hyper_lstm_backward``."""
        dy, *last = gradients
        kept, gemm = self.kept, self.plan.gemm
        scaled = (self.weights, self.gx) if self.gates is None else None
        buffers = make_both_buffers(kept, self.state, norms, masks, numbers, scaled)
        du = kept.u.new_empty(self.steps, *kept.u.shape[1:])
        du_main, du_hyper = du.split((4 * self.H, 4 * self.N), dim=-1)
        further = {"dgx": self.dgx, "dz": self.dz}
        if self.gates is None:
            shape = self.weights.weight_d.shape
            further["dweight_d"] = pointwise.gradient_sums(self.plan, shape, buffers[0].c0)
        main = make_gradients(self.plan, buffers[0], dy, last[:2], du_main, **further)
        hyper = make_gradients(self.plan, buffers[1], None, last[2:], du_hyper)
        du = du if self.gates is None else hyper.du
        run = self._steps((buffers[0], main), (buffers[1], hyper), du, masks)
        resets = Resets(masks.resets)
        of_state = [main.dh, main.dh_direct, main.dc, hyper.dh, hyper.dh_direct, hyper.dc]
        dmerged, dweight_e = torch.empty_like(self.matrices[0]), torch.empty_like(self.matrices[1])
        for start in reversed(range(0, self.T, self.steps)):
            stop = min(start + self.steps, self.T)
            resets.backward(run, start, stop, of_state)
            block, add = slice(start, stop), stop < self.T
            du_block, de_block = du[: stop - start], hyper.du[: stop - start]
            self.dg_hyper[block] = de_block
            h_blocks = operand_blocks(self.state[0], kept.h, masks.gal, block)
            e_blocks = operand_blocks(self.state[2], kept.e, None, block)
            weight_gradient(h_blocks, du_block, gemm, dmerged, add)
            weight_gradient(e_blocks, de_block, gemm, dweight_e, add)
        read = [kept.read if kept.read.numel() else kept.e]
        if self.previous:
            read = operand_blocks(self.state[2], kept.e, None)
        (dbias, *dnorm), (_, *dhyper_norm) = split_sums(main), split_sums(hyper)
        if self.gates is None:
            # An operation's results must not share memory.
            sides = dmerged.split((4 * self.H, 4 * self.N), dim=1)
            dweight, dweight_hyper = (side.clone(memory_format=torch.contiguous_format) for side in sides)
            of_scaling = [main.dweight_d.sum(0), dbias.view(4, self.H)]
        else:
            dweight, dweight_hyper = self.gates.dweight.to(dmerged.dtype), dmerged
            of_scaling = [self.gates.dweight_d, self.gates.dbias, self.gates.dweight_r]
        return [
            self.dgx,
            self.dg_hyper,
            state_gradient(main),
            main.dc,
            state_gradient(hyper),
            hyper.dc,
            dweight,
            dweight_hyper,
            dweight_e,
            weight_gradient(read, self.dz, gemm),
            self.dz.sum((0, 1)),
            *of_scaling,
            *((*dnorm, *dhyper_norm) if norms else ()),
        ]

    def _steps(
        self,
        main: tuple[Gated, GatedGradients],
        hyper: tuple[Gated, GatedGradients],
        du_KBU: Tensor,
        masks: GatedMasks,
    ) -> Callable[[int, int], None]:
        """Returns a function that runs some steps backward: in one call, or step by step with the products
        and a call for each network.

        Args:
            main, hyper: the buffers of each network, and their gradients.
            du_KBU: gradients of a block's products of h with ``matrices[0]``.
        """
        buffers, grads = main
        numbers = sum(matrix.numel() for matrix in self.matrices)
        if self.gates is None and self.plan.fits_one_call(self.steps, self.B, numbers, buffers.u.dtype):
            vectors = (None, None, masks.gal, masks.h_share)
            panels = [native.pack([matrix], "backward") for matrix in self.matrices]
            return native.hyper_lstm_sequence(main, hyper, panels, vectors, self.previous)
        to_h, *others = (
            PackedWeight(matrix, self.T, self.B, self.plan.gemm, transpose=True) for matrix in self.matrices
        )
        main_step = pointwise.gated(self.plan, *main)
        run_hyper = self._hypernetwork(*hyper, *others)
        du, before = du_KBU.unbind(0), previous_states(buffers.h0, buffers.h)

        def run(start: int, stop: int) -> None:
            for t in reversed(range(start, stop)):
                main_step(t)
                through_gates = None
                if self.gates is not None:
                    h = before[t] if masks.gal is None else before[t] * masks.gal
                    du_t = grads.du[t % self.steps]
                    through_gates = self.gates.backward(t, h, self.kept.z[t], du_t, grads.dz[t], grads.dgx[t])
                run_hyper(t)
                to_h.product(du[t % self.steps], grads.dh)
                if through_gates is not None:
                    grads.dh.add_(through_gates)
                through_recurrence(grads.dh, masks.gal, masks.h_share, t)

        return run

    def _hypernetwork(
        self, buffers: Gated, hyper: GatedGradients, to_e: PackedWeight, from_z: PackedWeight
    ) -> Callable[[int], None]:
        """Returns a function that turns a step's gradient of z into those of the hypernetwork's sums and
        state."""
        step = pointwise.gated(self.plan, buffers, hyper)
        du, dz = hyper.du.unbind(0), self.dz.unbind(0)

        def run(t: int) -> None:
            if not self.previous:
                from_z.product(dz[t], hyper.dh, hyper.dh)
            step(t)
            to_e.product(du[t % self.steps], hyper.dh)
            if self.previous:
                from_z.product(dz[t], hyper.dh, hyper.dh)

        return run
