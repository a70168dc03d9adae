"""Medusa heads and MTP's independent and cascaded ones as folders: what is written, told apart, and read."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.heads.checkpoints import Checkpoint, TargetConfig, filled, require_target
from foredraft.heads.layouts import Written
from foredraft.heads.parallel import FORMS, MedusaHead, MTPHead, ParallelHead

MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
_IDS = "draft_ids"  # `[V_draft]`, of heads that do not draft all tokens
_FORM = "foredraft_mtp_form"


def write_medusa(head: ParallelHead, target: TargetConfig) -> Written:
    """Medusa's own layout. Its programs want a matrix for each depth; here the target's serves where there is none."""
    assert isinstance(head, MedusaHead)
    config = {
        "medusa_num_heads": head.depth,
        "medusa_num_layers": head.blocks_of_each,
        "base_model_name_or_path": target.reference,
        "hidden_size": head.hidden,
        "vocab_size": target.vocab_size,
    }
    named = _medusa_names(head.blocks_of_each)
    return Written(config, {named(name): tensor for name, tensor in _tensors(head).items()})


def is_medusa(checkpoint: Checkpoint) -> bool:
    """By its settings, or by how its tensors are called."""
    return "medusa_num_heads" in checkpoint.config or "0.0.linear.weight" in checkpoint.tensors


def read_medusa(checkpoint: Checkpoint, target: Backend) -> MedusaHead:
    """A Medusa checkpoint, with or without matrices of its own.

    Raises:
        ModelError: Its tensors are not what its settings say.
        UnsupportedError: It was made for a target of other sizes.
    """
    depth, blocks = (_count(checkpoint, name) for name in ("medusa_num_heads", "medusa_num_layers"))
    first = checkpoint.tensors.get("0.0.linear.weight")
    if first is None or first.ndim != 2:
        raise checkpoint.refused("it has no tensor '0.0.linear.weight' of two dimensions")
    ids, matrix = checkpoint.tensors.get(_IDS), checkpoint.tensors.get(f"0.{blocks}.weight")
    vocab_size = len(matrix) if matrix is not None and ids is None else None
    require_target(checkpoint._replace(config={**checkpoint.config, "hidden_size": len(first)}), target, vocab_size)
    own = None if matrix is None else len(matrix)
    return filled(
        lambda: MedusaHead(len(first), target.layers, depth, blocks=blocks, own_matrices=own, draft_ids=_known(ids)),
        checkpoint,
        _medusa_names(blocks),
        target,
        ignored=(_IDS,),
    )


def write_mtp_heads(head: ParallelHead, target: TargetConfig) -> Written:
    """Independent and cascaded MTP heads, for which there is no layout that other programs read."""
    assert isinstance(head, MTPHead)
    config = {
        _FORM: head.form,
        "depth": head.depth,
        "hidden_size": head.hidden,
        "intermediate_size": head.mlp,
        "rms_norm_eps": head.epsilon,
        "vocab_size": target.vocab_size,
        "base_model_name_or_path": target.reference,
    }
    return Written(config, _tensors(head))


def is_mtp_heads(checkpoint: Checkpoint) -> bool:
    """By its settings."""
    return _FORM in checkpoint.config


def read_mtp_heads(checkpoint: Checkpoint, target: Backend) -> MTPHead:
    """What `write_mtp_heads` wrote.

    Raises:
        ModelError: Its tensors are not what its settings say.
        UnsupportedError: It was made for a target of other sizes.
    """
    require_target(checkpoint, target)
    config, ids = checkpoint.config, checkpoint.tensors.get(_IDS)
    if config[_FORM] not in FORMS:
        raise checkpoint.refused(f"its form is '{config[_FORM]}', and only {', '.join(FORMS)} are known")
    depth, mlp = _count(checkpoint, "depth"), _count(checkpoint, "intermediate_size")
    return filled(
        lambda: MTPHead(
            target.hidden_size,
            target.layers,
            depth,
            form=config[_FORM],
            mlp=mlp,
            epsilon=float(config.get("rms_norm_eps", 1e-5)),
            draft_ids=_known(ids),
        ),
        checkpoint,
        lambda name: name,
        target,
        ignored=(_IDS,),
    )


def _tensors(head: ParallelHead) -> dict[str, Tensor]:
    found = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    if head.draft_ids is not None:
        found[_IDS] = head.draft_ids.cpu()
    return found


def _known(ids: Tensor | None) -> Tensor | None:
    """The ids in memory, where a head is made without any."""
    with torch.device("cpu"):
        return None if ids is None else ids.clone()


def _medusa_names(blocks: int) -> Callable[[str], str]:
    """What a tensor of a head is called there: block j of depth i is `i.j.linear`, the matrix `i.n`."""

    def named(name: str) -> str:
        name = re.sub(r"^blocks\.(\d+)\.(\d+)\.", r"\1.\2.", name)
        return re.sub(r"^lm_heads\.(\d+)\.", rf"\g<1>.{blocks}.", name)

    return named


def _count(checkpoint: Checkpoint, name: str) -> int:
    value = checkpoint.config.get(name)
    if not isinstance(value, int) or value < 1:
        raise checkpoint.refused(f"its config.json has {name} = {value!r}, but must have an integer >= 1")
    return value
