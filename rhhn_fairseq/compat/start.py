"""How a program of fairseq runs and how its training starts: one function for each, its steps in order."""

import time

from rhhn_fairseq.compat import (
    divergence,
    in_place_of,
    loading,
    quiet,
    restarts,
    starting,
    stopping,
    torchrun,
)


def run_a_program() -> bool:
    """``call_main`` runs a program's main function, in this process or in one for each worker."""
    from fairseq.distributed import utils

    @in_place_of(utils, "call_main")
    def call_main(inner, cfg, main, **kwargs):
        torchrun.train_bf16_without_tpu(cfg)
        with loading.readers_ended(), torchrun.off_gpu(cfg), torchrun.joined(cfg, main):
            try:
                return inner(cfg, main, **kwargs)
            finally:
                stopping.REQUEST.listen_no_more()
                starting.HELD.close()

    return True


def start_a_training() -> bool:
    """``load_checkpoint`` is what a training calls first, whether it resumes or is new."""
    from fairseq import checkpoint_utils

    @in_place_of(checkpoint_utils, "load_checkpoint")
    def load_checkpoint(load, cfg, trainer, **kwargs):
        starting.require_named_checkpoint(cfg, trainer)
        stopping.listen(trainer)
        starting.decided_by_rank_0(trainer, lambda: begin(cfg, trainer))
        cfg = starting.with_a_good_checkpoint(cfg, trainer)
        extra_state, epochs = load(cfg, trainer, **kwargs)
        restarts.end_where_complete(trainer, extra_state, epochs)
        return extra_state, epochs

    return True


def make_an_update() -> bool:
    """The trainer's step names what diverges, and the first one is summed up."""
    from fairseq.trainer import Trainer

    @in_place_of(Trainer, "get_train_iterator")
    def get_train_iterator(get_iterator, self, *args, **kwargs):
        batches = get_iterator(self, *args, **kwargs)
        self.batches_of_an_epoch = len(batches)
        return batches

    @in_place_of(Trainer, "train_step")
    def train_step(inner, self, *args, **kwargs):
        started = time.perf_counter()
        with divergence.named(self):
            output = inner(self, *args, **kwargs)
        quiet.sum_up_the_start(self, output, time.perf_counter() - started)
        return output

    return True


def begin(cfg, trainer) -> None:
    """What the first worker does for all before a training starts."""
    starting.make_event_directory(trainer.cfg.common.tensorboard_logdir)
    starting.train_alone(cfg)
