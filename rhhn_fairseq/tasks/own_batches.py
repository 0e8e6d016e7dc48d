"""Tasks that cut their own batches, and fairseq's iterator over them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from fairseq.data import FairseqDataset, iterators

from rhhn_fairseq.errors import UsageError


class BatchDataset(FairseqDataset):
    """The batches of a cutter, such as ``Lanes`` or ``FreshBatches``; one item is one batch.

    Args:
        cutter: has a length and ``batch(index)``. to_sample: makes fairseq's sample of a batch.
    """

    def __init__(self, cutter, to_sample: Callable[..., dict]):
        self.cutter, self.to_sample = cutter, to_sample

    def __len__(self):
        return len(self.cutter)

    def __getitem__(self, index):
        return self.cutter.batch(index)

    def collater(self, samples: list) -> dict:
        """Returns the one batch as fairseq's sample."""
        return self.to_sample(*samples) if samples else {}


class OrderedBatchIterator(iterators.EpochBatchIterator):
    """An iterator that never shuffles, and that numbers batches across epochs if epochs differ.

    Args:
        dataset: an item is a batch.
        numbered_by_epoch: batch b of epoch e is item e * len(dataset) + b (``RandomWindows``).
    """

    def __init__(self, dataset: FairseqDataset, numbered_by_epoch: bool = False, **options):
        self.numbered_by_epoch = numbered_by_epoch
        batches = [[i] for i in range(len(dataset))]
        super().__init__(dataset=dataset, collate_fn=dataset.collater, batch_sampler=batches, **options)

    def ordered_batches(self, epoch, fix_batches_to_gpus, shuffle):
        """This worker's batches in order; ``shuffle`` is ignored, because the state is carried along them."""
        batches = super().ordered_batches(epoch, fix_batches_to_gpus, shuffle=False)
        if not self.numbered_by_epoch:
            return batches
        return [[epoch * len(self.dataset) + i for i in batch] for batch in batches]


class CutsOwnBatches(ABC):
    """A task whose splits are cut into batches by ``cut_batches``, in a fixed order."""

    @property
    @abstractmethod
    def row_steps(self) -> int:
        """The steps in a row of a batch, which convert --max-tokens to a number of rows."""

    @abstractmethod
    def cut_batches(
        self, dataset, B: int, workers: int, rank: int, training: bool
    ) -> tuple[FairseqDataset, bool]:
        """Returns the batches of a split, and whether their numbers continue from epoch to epoch.

        Args:
            dataset: what ``load_dataset`` made. B: rows of a batch. workers, rank: of this worker.
            training: whether the batches are trained on; a training split may also be validated.
        """

    def get_batch_iterator(
        self,
        dataset,
        max_tokens=None,
        max_sentences=None,
        num_shards=1,
        shard_id=0,
        num_workers=0,
        epoch=1,
        data_buffer_size=0,
        seed=1,
        **others,
    ) -> OrderedBatchIterator:
        """Returns the iterator over a split, the same one in every epoch.

        fairseq's other options choose or group sentences, which do not exist here.
        """
        # Of all callers, only the trainer gives this option, and only for the batches of training.
        training = "grouped_shuffling" in others
        allowed = max(1, (max_tokens or 0) // self.row_steps)
        B = allowed if max_sentences is None else min(max_sentences, allowed if max_tokens else max_sentences)
        # Dropping an iterator takes up to ten seconds: garbage collection closes the queues of its processes
        # before it ends them.
        key = (dataset, B, num_shards, shard_id, training)
        if key not in self.dataset_to_epoch_iter:
            batches, numbered_by_epoch = self.cut_batches(dataset, B, num_shards, shard_id, training)
            self.dataset_to_epoch_iter[key] = OrderedBatchIterator(
                batches,
                numbered_by_epoch,
                seed=seed,
                num_shards=num_shards,
                shard_id=shard_id,
                num_workers=num_workers,
                epoch=epoch,
                buffer_size=data_buffer_size,
                reuse_dataloader=True,
                persistent_workers=True,
            )
        return self.dataset_to_epoch_iter[key]


def frequency_of(update_freq: Sequence[int], why: str) -> int:
    """Returns --update-freq; UsageError says ``why`` it must be the same for all epochs."""
    if len(set(update_freq)) != 1:
        given = ",".join(map(str, update_freq))
        raise UsageError(f"--update-freq {given}: {why}, so every epoch needs the same value")
    return update_freq[0]
