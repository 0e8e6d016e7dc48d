"""Configurations of fairseq's components as the dataclasses that they were registered with."""

import dataclasses

from omegaconf import OmegaConf


def typed_config(cfg, component: type):
    """Returns the configuration of a task or model as a dataclass.

    fairseq passes a dictionary without types if the component comes from a checkpoint, and for names that
    ``register_model_architecture`` defined. Keys that the dataclass does not have are left out.

    Args:
        component: the class of the task or model. If it was registered without a dataclass, that of its base
            class is used.
    """
    if not OmegaConf.is_config(cfg):
        return cfg
    kind = OmegaConf.get_type(cfg)
    if not dataclasses.is_dataclass(kind):
        registered = (vars(base).get("__dataclass") for base in component.__mro__)
        kind = next(own for own in registered if own is not None)
    # Missing values stay, and are named where they are needed.
    values = OmegaConf.to_container(cfg, resolve=True)
    known = {spec.name for spec in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in values.items() if key in known})
