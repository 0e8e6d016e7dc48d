"""Several workers under torchrun, on GPUs and on the CPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rhhn_fairseq.compat import in_place_of, mentions
from rhhn_fairseq.errors import UsageError

# torchrun sets all of these for each worker; cluster scripts that set some of them for other
# purposes rarely set LOCAL_RANK.
NUMBERS = ("MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
ENVIRONMENT = ("MASTER_ADDR", *NUMBERS)

# Programs that give each worker a share of the data and report only on that share.
REPORTS_ITS_SHARE = {"eval_lm.py": "fairseq-eval-lm", "generate.py": "fairseq-generate"}


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
    worker needs no process group and remains a plain process. Raises UsageError if there are more
    workers on this node than GPUs, or a variable is not a number.
    """
    training = cfg.distributed_training
    for name in NUMBERS:
        if not os.environ[name].isdecimal():
            raise UsageError(f"{name}={os.environ[name]} is not a number; torchrun sets this variable")
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and not cfg.common.cpu
    if on_gpu and local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"torchrun started worker {local_rank} (counted from 0) on a node with "
            f"{torch.cuda.device_count()} GPU(s): lower --nproc-per-node, or add --cpu"
        )
    training.distributed_world_size = int(os.environ["WORLD_SIZE"])
    training.distributed_rank = int(os.environ["RANK"])
    training.device_id = local_rank if on_gpu else 0
    training.distributed_no_spawn = True
    if training.distributed_world_size > 1:
        training.distributed_init_method = "env://"
        if not on_gpu and training.distributed_backend == "nccl":
            training.distributed_backend = "gloo"


def no_gpu() -> bool:
    """Replaces `torch.cuda.is_available` in a run with --cpu."""
    return False


def leave(utils) -> None:
    """Destroys the process group; otherwise PyTorch warns at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        vars(utils.get_global_group).pop("_global_group", None)


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
        refuse_partial_report(main, cfg.distributed_training.distributed_world_size)
    yield
    if launched:
        leave(utils)


@contextmanager
def off_gpu(cfg) -> Iterator[None]:
    """fairseq checks for a GPU in places where --cpu should take precedence.

    On a machine with GPUs a run with --cpu opens its process group with an all-reduce on the GPU
    and puts the gradient norm there, which cannot scale gradients on the CPU. During such a run
    `torch.cuda.is_available` returns False.
    """
    is_available = torch.cuda.is_available
    if cfg.common.cpu:
        torch.cuda.is_available = no_gpu
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


def refuse_partial_report(main, workers: int) -> None:
    """Raises UsageError if rank 0 would print the score of its share as if it were the total."""
    code = getattr(main, "__code__", None)
    program = REPORTS_ITS_SHARE.get(os.path.basename(code.co_filename)) if code else None
    if program is not None and workers > 1:
        raise UsageError(
            f"{program} reports on each worker's share and never adds the {workers} shares up: "
            "run it without torchrun"
        )


def join_late_under_hydra() -> bool:
    """fairseq-hydra-train imports the user directory when `call_main` is already running.

    By then it has decided that there is one process. Directly after the import it calls
    `add_defaults` with the whole configuration, so that is where the worker joins.
    """
    from fairseq.distributed import utils

    train = sys.modules.get("fairseq_cli.train")
    if mentions(utils._infer_torch_distributed_launch_init, "LOCAL_RANK"):
        return False
    # If the plugin is loaded with fairseq, that module is still empty, and `call_main` is early enough.
    if not hasattr(train, "add_defaults"):
        return False

    @in_place_of(train, "add_defaults")
    def add_defaults(inner, cfg):
        inner(cfg)
        if dist.is_initialized() or not launched_by_torchrun(cfg.distributed_training):
            return
        join(cfg)
        if cfg.common.cpu:
            # `call_main` was not wrapped when it was called, so this holds until the process ends.
            torch.cuda.is_available = no_gpu
        training = cfg.distributed_training
        if training.distributed_world_size > 1:
            if torch.cuda.is_available():
                torch.cuda.set_device(training.device_id)
            utils.distributed_init(cfg)

    return True


def wrap_cpu_modules() -> bool:
    """--ddp-backend pytorch_ddp, the default, passes a GPU to DistributedDataParallel on the CPU too.

    PyTorch refuses that for a module on the CPU, so there the device arguments are omitted.
    """
    from fairseq.models import distributed_fairseq_model

    inner = distributed_fairseq_model.DistributedDataParallel

    def wrap(module, device_ids=None, output_device=None, **options):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        return inner(module, device_ids=device_ids, output_device=output_device, **options)

    distributed_fairseq_model.DistributedDataParallel = wrap
    return True


def broadcast_objects() -> bool:
    """When training resumes, rank 0 sends the checkpoint it has read to the other workers.

    fairseq uses `torch.save` and `torch.load` for this, and the latter refuses the configuration,
    an OmegaConf object. PyTorch's own `broadcast_object_list` unpickles it instead, which is safe:
    the data comes from rank 0 of the same job, which has read the file with `weights_only`.
    """
    from fairseq.distributed import utils

    if mentions(utils._broadcast_object_slow, "broadcast_object_list"):
        return False

    def broadcast(obj, src_rank, group, dist_device):
        holder = [obj]
        dist.broadcast_object_list(holder, src=src_rank, group=group, device=dist_device)
        return holder[0]

    utils._broadcast_object_slow = broadcast
    return True


def gather_objects_on_cpu() -> bool:
    """fairseq gathers objects (logging outputs that are no plain sums) through CUDA buffers of only 16 KB.

    fairseq-validate always does so, and about twenty batches exceed them. `all_gather_object` replaces it.
    """
    from fairseq.distributed import utils
    from fairseq.utils import move_to_cpu

    if not mentions(utils.all_gather_list, "cuda"):
        return False

    @in_place_of(utils, "all_gather_list")
    def all_gather_list(inner, data, group=None, max_size=16384):
        if utils.use_xla():
            return inner(data, group=group, max_size=max_size)
        group = utils.get_global_group() if group is None else group
        gathered = [None] * utils.get_world_size(group)
        dist.all_gather_object(gathered, move_to_cpu(data), group=group)
        return gathered

    return True


def validate_on_uneven_shares() -> bool:
    """fairseq-validate gives workers with a shorter share of the batches an empty batch, and fails on it.

    Training computes an earlier batch in its place and ignores the result; here it is skipped.
    """
    from fairseq.tasks import FairseqTask

    if mentions(FairseqTask.valid_step, "len"):
        return False

    @in_place_of(FairseqTask, "valid_step")
    def valid_step(inner, self, sample, model, criterion):
        if len(sample) == 0:
            return 0.0, 0, {}
        return inner(self, sample, model, criterion)

    return True
