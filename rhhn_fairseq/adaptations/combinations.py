"""Which tasks, architectures and losses go together: one table, read when a configuration is complete.

A wrong combination otherwise ends where the first of them misses something of another: a missing attribute,
an unexpected argument, or a loss over what is no target.
"""

from collections.abc import Collection

from rhhn_fairseq.adaptations.mistakes import nearest
from rhhn_fairseq.errors import UsageError

# Tasks whose batches only their own models read, with the base class of these and the losses that fit.
PARTNERS = {
    "char_lm": ("CharLM", None),
    "synthetic": ("Classifier", ("problem_loss",)),
    "handwriting": ("Handwriting", ("mixture_density",)),
}
TRANSLATION = "GNMT"


def check_combination(task: str | None, arch: str | None, criterion: str | None = None) -> None:
    """Raises UsageError for names that exist and do not go together; None is not looked at.

    What other packages registered is theirs to combine, with their tasks.
    """
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.translation import TranslationTask

    own, losses = PARTNERS.get(task, (None, None))
    if losses and criterion and criterion not in losses:
        raise UsageError(f"--task {task} needs --criterion {losses[0]}, not {criterion}")
    for home, (_, fitting) in PARTNERS.items():
        if task and fitting and criterion in fitting and task != home:
            raise UsageError(f"--criterion {criterion} needs --task {home}, not {task}")
    model = ARCH_MODEL_REGISTRY.get(arch) or MODEL_REGISTRY.get(arch)
    if task is None or model is None:
        return
    kinds = {kind.__name__ for kind in model.__mro__ if kind.__module__.startswith("rhhn_fairseq.")}
    if own and own not in kinds:
        raise UsageError(f"--task {task} needs a {own} architecture, and {arch} is none")
    for home, (kind, _) in PARTNERS.items():
        if kind in kinds and task != home:
            raise UsageError(f"--arch {arch} needs --task {home}, not {task}")
    if TRANSLATION in kinds and not issubclass(TASK_REGISTRY[task], TranslationTask):
        raise UsageError(f"--arch {arch} needs --task gnmt_translation or translation, not {task}")


def require_known(kind: str, name: object, known: Collection[str]) -> None:
    """Raises UsageError unless a task or model is named, and by a name that exists."""
    if not name:
        raise UsageError(f"the configuration names no {kind}: its {kind}._name is missing")
    if name not in known:
        raise UsageError(f"there is no {kind} {name!r}: {nearest(name, known) or 'see --help'}")
