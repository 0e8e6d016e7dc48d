"""Training that is killed and started again loses nothing: neither its last checkpoint nor sentences."""

import functools

from rhhn_fairseq.adaptations import mentions


def copy_whole() -> bool:
    """A worker killed while it saves must not leave a damaged checkpoint_last.pt.

    fairseq writes a checkpoint beside its place and renames it, but under one of its names only, such as
    checkpoint_1_500.pt. It is then copied to the others, and checkpoint_last.pt, from which every restart
    goes on, is always the last of these. A copy that was cut short there ends all restarts. Here copies
    that replace a file are made beside it and renamed as well.
    """
    from fairseq.file_io import PathManager

    inner = PathManager.copy
    if mentions(inner, "rename"):
        return False

    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if not (overwrite and PathManager.supports_rename(dst_path)):
            return inner(src_path, dst_path, overwrite)
        stage = dst_path + ".tmp"
        done = inner(src_path, stage, overwrite)
        if done:
            PathManager.rename(stage, dst_path)
        return done

    PathManager.copy = staticmethod(copy)
    return True


def batch_alike_in_every_start() -> bool:
    """A run that is started again in mid-epoch must go through the batches that it has not seen.

    fairseq groups sentences into batches once a start, by random numbers of the epoch in which it starts,
    and keeps these batches for the epochs that follow. A restart in another epoch grouped them otherwise:
    of that epoch, some sentences were seen twice and others never. Here batches that are kept are those
    of epoch 1, whenever the run was started. Their order is drawn for every epoch, as before.
    """
    from fairseq.tasks import FairseqTask

    inner = FairseqTask.get_batch_iterator

    @functools.wraps(inner)
    def get_batch_iterator(self, dataset, *args, epoch=1, **options):
        kept = not (options.get("disable_iterator_cache") or options.get("update_epoch_batch_itr"))
        if not kept or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
            return inner(self, dataset, *args, epoch=epoch, **options)
        iterator = inner(self, dataset, *args, epoch=1, **options)
        iterator.epoch = epoch
        dataset.set_epoch(epoch)
        return iterator

    FairseqTask.get_batch_iterator = get_batch_iterator
    return True
