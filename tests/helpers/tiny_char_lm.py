"""A tiny corpus for character language models, and tasks, models and batches on it."""

import dataclasses
import math

import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.data.text.corpora import text_files
from rhhn_fairseq.data.text.prepare import prepare
from rhhn_fairseq.data.text.vocabulary import UNK
from rhhn_fairseq.tasks.char_lm import CharLMTask, CharLMTaskConfig

TRAIN = "the cat sat on the mat\nand the dog sat on the log\n" * 12
# The valid split has a symbol that training lacks.
VALID = "the cow sat on the cat\n" * 8 + "so it was!\n"
TEST = "a dog and a cat sat on the log and on the mat\n" * 9


def write_corpus(folder) -> str:
    """Prepares the three texts; the data directory."""
    files = {}
    for split, text in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        files[split] = [folder / f"{split}.txt"]
        files[split][0].write_text(text)
    prepare(text_files(files, as_bytes=False), folder / "data")
    return str(folder / "data")


def build_task(corpus, **options):
    values = {"data": corpus, "seed": 1, "train_subset": "train", "update_freq": [1]} | options
    return CharLMTask.setup_task(CharLMTaskConfig(**values))


def build_model(task, arch="char_lm", seed=0, **options):
    torch.manual_seed(seed)
    small = {"hidden_size": 12, "cell": "ln_hyperlstm", "hyper_size": 5, "hyper_embed_size": 2}
    config = dataclasses.replace(MODEL_DATACLASS_REGISTRY[arch](), **small | options)
    return MODEL_REGISTRY[arch].build_model(config, task)


def save(model, corpus, path, updates=1, **options) -> None:
    """A checkpoint as fairseq writes it, as far as loading asks for it; options as for ``build_model``."""
    small = {"hidden_size": 12, "cell": "ln_hyperlstm", "hyper_size": 5, "hyper_embed_size": 2} | options
    config = dataclasses.asdict(MODEL_DATACLASS_REGISTRY["char_lm"](**small)) | {"_name": "char_lm"}
    task = {"_name": "char_lm", "data": corpus, "seed": 1, "train_subset": "train", "update_freq": [1]}
    cfg = {"model": config, "task": task}
    history = [{"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": updates}]
    state = {"cfg": cfg, "args": None, "model": model.state_dict(), "optimizer_history": history}
    state |= {"task_state": {}, "extra_state": {"train_iterator": {"epoch": 1}}, "last_optimizer_state": {}}
    torch.save(state, path)


def iterator(task, split="train", B=3, workers=1, rank=0, epoch=1):
    task.load_dataset(split)
    training = {"grouped_shuffling": False} if split == "train" else {}
    return task.get_batch_iterator(
        task.dataset(split), max_sentences=B, num_shards=workers, shard_id=rank, epoch=epoch, **training
    )


def direct_bpc(task, model, text):
    """One pass over the whole text in float64, without any of the batching."""
    entries = torch.from_numpy(task.vocabulary.encode(text))
    inputs = torch.cat([torch.tensor([task.first_input]), entries[:-1]])
    model = model.double().eval()
    with torch.no_grad():
        logs = model(inputs.unsqueeze(0))[0][0].log_softmax(-1)
    known = entries != UNK
    return -logs[known, entries[known]].mean().item() / math.log(2)
