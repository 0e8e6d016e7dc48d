"""Several workers under torchrun, on GPUs and on the CPU."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rhhn_fairseq.compat import in_place_of
from rhhn_fairseq.errors import UsageError

# torchrun sets all of these for each worker; cluster scripts that set some of them for other
# purposes rarely set LOCAL_RANK.
ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")

LATE = hasattr(sys.modules.get("fairseq_cli.train"), "add_defaults")
"""Whether a training was running when this package was loaded, through --user-dir."""


def launched_by_torchrun(training) -> bool:
    """Returns whether torchrun's environment applies to a `distributed_training` configuration.

    It does not with an explicit init method, on a TPU or with pipeline parallelism, which fairseq
    handles itself.
    """
    return (
        all(name in os.environ for name in ENVIRONMENT)
        and training.distributed_init_method is None
        and not training.tpu
        and not training.pipeline_model_parallel
    )


def join(cfg) -> None:
    """Writes this worker's ranks and world size, as set by torchrun, into the configuration.

    On GPUs the device is the local rank; on the CPU there is none, and gloo replaces nccl. A single
    worker needs no process group and remains a plain process.
    """
    training = cfg.distributed_training
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and not cfg.common.cpu
    training.distributed_world_size = int(os.environ["WORLD_SIZE"])
    training.distributed_rank = int(os.environ["RANK"])
    training.device_id = local_rank if on_gpu else 0
    training.distributed_no_spawn = True
    if training.distributed_world_size > 1:
        training.distributed_init_method = "env://"
        if not on_gpu and training.distributed_backend == "nccl":
            training.distributed_backend = "gloo"


@contextmanager
def joined(cfg, main) -> Iterator[None]:
    """fairseq reads torchrun's environment only if --distributed-world-size is above one.

    The default is the number of GPUs of the node, so with one GPU per node, or on the CPU, N workers
    train N separate models and silently overwrite each other's checkpoints. Where fairseq does read
    it, it divides by the number of GPUs, which is zero on the CPU, and keeps nccl.
    """
    from fairseq.distributed import utils

    launched = launched_by_torchrun(cfg.distributed_training)
    if launched:
        join(cfg)
        workers, program = cfg.distributed_training.distributed_world_size, main.__code__.co_filename
        if workers > 1 and os.path.basename(program) in ("eval_lm.py", "generate.py"):
            raise UsageError(
                f"{os.path.basename(program)} reports on each worker's share and never adds the {workers} "
                "shares up: run it without torchrun"
            )
    yield
    if launched and dist.is_initialized():
        # Otherwise PyTorch warns at exit.
        dist.destroy_process_group()
        vars(utils.get_global_group).pop("_global_group", None)


@contextmanager
def off_gpu(cfg) -> Iterator[None]:
    """fairseq checks for a GPU in places where --cpu should take precedence.

    On a machine with GPUs a run with --cpu opens its process group with an all-reduce on the GPU
    and puts the gradient norm there, which cannot scale gradients on the CPU. During such a run
    `torch.cuda.is_available` returns False.
    """
    is_available = torch.cuda.is_available
    if cfg.common.cpu:
        torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = is_available


def train_bf16_without_tpu(cfg) -> None:
    """fairseq's command line takes --bf16 to mean a TPU, and without torch_xla the run then fails.

    GPUs and CPUs support bfloat16 as well, so without torch_xla --tpu is reset.
    """
    from fairseq.distributed import utils

    if utils.xm is None and cfg.common.bf16 and cfg.common.tpu:
        # The second, a copy, decides whether there are other workers.
        cfg.common.tpu = cfg.distributed_training.tpu = False


def join_late(cfg) -> None:
    """fairseq-hydra-train imports the user directory when `call_main` is already running.

    By then it has decided that there is one process. Directly after the import it calls
    `add_defaults` with the whole configuration, so that is where the worker joins.
    """
    from fairseq.distributed import utils

    if not LATE or dist.is_initialized() or not launched_by_torchrun(cfg.distributed_training):
        return
    join(cfg)
    if cfg.common.cpu:
        # `call_main` was not wrapped when it was called, so this holds until the process ends.
        torch.cuda.is_available = lambda: False
    if cfg.distributed_training.distributed_world_size > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(cfg.distributed_training.device_id)
        utils.distributed_init(cfg)


def decided_by_rank_0(trainer, decide: Callable):
    """Returns on every worker what ``decide`` returns on rank 0, and raises its UsageError on all of them."""
    from fairseq.distributed import utils

    outcome = None
    if trainer.data_parallel_rank == 0:
        try:
            outcome = decide(), None
        except UsageError as error:
            outcome = None, str(error)
    if trainer.data_parallel_world_size > 1:
        group = trainer.data_parallel_process_group
        outcome = utils.broadcast_object(outcome, src_rank=0, group=group, dist_device=trainer.device)
    value, refusal = outcome
    if refusal is not None:
        raise UsageError(refusal)
    return value


@in_place_of("fairseq.models.distributed_fairseq_model:DistributedDataParallel")
def wrap_cpu_modules(inner, module, device_ids=None, output_device=None, **options):
    """--ddp-backend pytorch_ddp, the default, names a GPU on the CPU too, which PyTorch refuses."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    return inner(module, device_ids=device_ids, output_device=output_device, **options)


@in_place_of("fairseq.distributed.utils:_broadcast_object_slow")
def broadcast_object(inner, obj, src_rank, group, dist_device):
    """Workers that resume cannot load what rank 0 sends, the configuration, an OmegaConf object.

    fairseq uses `torch.save` and `torch.load` for this, and the latter refuses it. PyTorch's own
    `broadcast_object_list` unpickles it instead, which is safe: the data comes from rank 0 of the same job,
    which has read the file with `weights_only`.
    """
    holder = [obj]
    dist.broadcast_object_list(holder, src=src_rank, group=group, device=dist_device)
    return holder[0]


@in_place_of("fairseq.distributed.utils:all_gather_list")
def all_gather_list(inner, data, group=None, max_size=16384):
    """fairseq gathers objects (logging outputs that are no plain sums) through CUDA buffers of only 16 KB.

    fairseq-validate always does so, and about twenty batches exceed them. `all_gather_object` replaces it.
    """
    from fairseq import utils
    from fairseq.distributed.utils import get_global_group, get_world_size, use_xla

    if use_xla():
        return inner(data, group=group, max_size=max_size)
    group = get_global_group() if group is None else group
    gathered = [None] * get_world_size(group)
    dist.all_gather_object(gathered, utils.move_to_cpu(data), group=group)
    return gathered


@in_place_of("fairseq.trainer:Trainer.train_step")
def train_step(inner, self, samples, *args, **options):
    """An empty batch behind a real one makes fairseq forget the size of the real one, but not its gradient.

    The last worker has it where the workers times --update-freq do not divide the batches of an epoch. A
    worker with nothing else computes an earlier batch in its place, so that the workers meet.
    """
    # fully_sharded workers, and those that share layers of experts, meet in every batch.
    if not (self.is_fsdp or getattr(self.cfg.model, "base_layers", 0)):
        samples = [sample for sample in samples if sample] or samples[:1]
    return inner(self, samples, *args, **options)


@in_place_of("fairseq.tasks:FairseqTask.valid_step")
def valid_step(inner, self, sample, model, criterion):
    """fairseq-validate gives workers with a shorter share of the batches an empty batch, and fails on it.

    Training computes an earlier batch in its place and ignores the result; here it is skipped.
    """
    return (0.0, 0, {}) if len(sample) == 0 else inner(self, sample, model, criterion)
