"""Recurrent heads as public tools store them: the `speculators` format, which vLLM serves, and SafeAILab's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.errors import InvalidInputError, UnsupportedError
from foredraft.heads.block import BlockShape
from foredraft.heads.checkpoints import Checkpoint, TargetConfig, block_shape, filled, require_shared, require_target
from foredraft.heads.recurrent import Eagle3Head, Eagle3Norms, EagleHead, RecurrentHead, SequentialMTPHead

_FORMAT_VERSION = "0.9.0"  # of the `speculators` library whose layout this is
_MODEL_TYPE = "speculators_model_type"
_STEPS = {"eagle3": 5, "mtp": 3}  # tokens that other programs draft unless they are told
_CONTEXT = 4096  # where the target says none

# What begins a tensor's name in our heads, and in the files.
_EAGLE3 = (
    ("block.", "layers.0."),
    ("input_layernorm.", "layers.0.input_layernorm."),
    ("hidden_norm.", "layers.0.hidden_norm."),
)
_EAGLE = (("block.", "layers.0."),)
_MTP = (
    ("block.", "mtp_layers.0."),
    ("input_layernorm.", "mtp_layers.0.input_layernorm."),
    ("enorm.", "mtp_layers.0.token_layernorm."),
    ("hnorm.", "mtp_layers.0.hidden_layernorm."),
    ("eh_proj.", "mtp_layers.0.input_proj."),
    ("norm.", "mtp_layers.0.final_layernorm."),
)


class Written(NamedTuple):
    """What a head's folder holds."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def renamed(pairs: Sequence[tuple[str, str]]) -> Callable[[str], str]:
    """What a tensor of a head is called in the files, by how its name begins."""

    def named(name: str) -> str:
        return next((theirs + name.removeprefix(ours) for ours, theirs in pairs if name.startswith(ours)), name)

    return named


# Writing


def write_eagle3(head: RecurrentHead, target: TargetConfig) -> Written:
    """EAGLE-3 in the `speculators` format."""
    assert isinstance(head, Eagle3Head)
    if max(head.feature_layers) >= target.layers:
        raise InvalidInputError(
            f"An EAGLE-3 head that reads layer {max(head.feature_layers)} of {target.layers} cannot be written: other "
            "programs give it that layer before the final norm. Train it on layers below."
        )
    config = {
        **_speculator("eagle3", "Eagle3DraftModel", head.shape, target, layers=1),
        **asdict(head.norms),
        "draft_vocab_size": len(head.draft_ids),
        "eagle_aux_hidden_state_layer_ids": list(head.feature_layers),
        "target_hidden_size": None,
        "embed_requires_grad": False,
    }
    tensors = _named(head, _EAGLE3)
    if len(head.draft_ids) < target.vocab_size:
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return Written(config, tensors)


def write_mtp(head: RecurrentHead, target: TargetConfig) -> Written:
    """The sequential MTP module in the `speculators` format.

    The library loads those whose block has norms of queries and keys and whose steps start from the normed state.
    """
    assert isinstance(head, SequentialMTPHead)
    config = {
        **_speculator("mtp", "MTPDraftModel", head.shape, target, layers=target.layers),
        "num_nextn_predict_layers": 1,
        "norm_output": head.norm_output,
    }
    return Written(config, _named(head, _MTP))


def write_eagle(head: RecurrentHead, target: TargetConfig) -> Written:
    """EAGLE-1 in SafeAILab's layout."""
    config = {"architectures": ["LlamaForCausalLM"], "bias": True, **_layer(head.shape, target, layers=1)}
    return Written(config, _named(head, _EAGLE))


def _named(head: RecurrentHead, pairs: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    named = renamed(pairs)
    return {named(name): tensor.detach().cpu() for name, tensor in head.state_dict().items()}


def _speculator(kind: str, architecture: str, shape: BlockShape, target: TargetConfig, layers: int) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": _STEPS[kind],
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        _MODEL_TYPE: kind,
        "speculators_version": _FORMAT_VERSION,
        "architectures": [architecture],
        "transformer_layer_config": _layer(shape, target, layers),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.reference, "architectures": list(target.architectures)},
        },
        "tie_word_embeddings": False,
    }


def _layer(shape: BlockShape, target: TargetConfig, layers: int) -> dict[str, Any]:
    if shape.frequencies:
        raise InvalidInputError(
            "A head whose rotary frequencies are scaled cannot be written: keep the files it is from."
        )
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.context or _CONTEXT,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


# Reading


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether it is EAGLE-3, in either layout."""
    kind = checkpoint.config.get(_MODEL_TYPE)
    own_names = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    return kind == "eagle3" or (kind is None and any(name in checkpoint.tensors for name in own_names))


def is_mtp(checkpoint: Checkpoint) -> bool:
    """Whether it is a sequential MTP module in the `speculators` format."""
    return checkpoint.config.get(_MODEL_TYPE) == "mtp"


def is_eagle(checkpoint: Checkpoint) -> bool:
    """Whether it is EAGLE-1, in either layout."""
    kind = checkpoint.config.get(_MODEL_TYPE)
    plain = "layers.0.self_attn.q_proj.weight" in checkpoint.tensors and "fc.weight" in checkpoint.tensors
    return kind == "eagle" or (kind is None and plain)


def read_eagle3(checkpoint: Checkpoint, target: Backend) -> Eagle3Head:
    """EAGLE-3 in the `speculators` format, or in SafeAILab's: its layer is called `midlayer` there."""
    config, tensors = checkpoint.config, checkpoint.tensors
    vocab_size = checkpoint.layer.get("vocab_size")
    require_target(checkpoint, target, vocab_size)
    _refuse_more_layers(checkpoint)
    require_shared(checkpoint, "embed_tokens.weight", target.embed, "an embedding")
    prefix = "midlayer." if "midlayer.self_attn.q_proj.weight" in tensors else "layers.0."
    qk_norm = f"{prefix}self_attn.q_norm.weight" in tensors
    pairs = tuple((ours, theirs.replace("layers.0.", prefix)) for ours, theirs in _EAGLE3)
    ids, order = _draft_vocabulary(checkpoint, target, int(vocab_size or target.embedding_rows))
    matrix = tensors.get("lm_head.weight")
    if matrix is None or len(matrix) <= int(order.max()):
        raise checkpoint.refused(f"its lm_head.weight must have a row for each of {len(ids)} ids that it drafts")
    norms = Eagle3Norms(**{name: bool(config.get(name, False)) for name in asdict(Eagle3Norms())})
    shape, layers = block_shape(checkpoint, qk_norm=qk_norm), _feature_layers(checkpoint, target)
    return filled(
        lambda: Eagle3Head(shape, layers, ids, norms),
        checkpoint,
        renamed(pairs),
        target,
        ignored=("embed_tokens.weight", "d2t", "t2d"),
        replaced={"lm_head.weight": matrix[order]},
    )


def read_mtp(checkpoint: Checkpoint, target: Backend) -> SequentialMTPHead:
    """A sequential MTP module in the `speculators` format."""
    kind = checkpoint.layer.get("model_type")
    if kind not in ("llama", "qwen3"):
        raise checkpoint.refused(f"its layer is of model type {kind!r}, and only llama and qwen3 are known")
    require_target(checkpoint, target, checkpoint.layer.get("vocab_size"))
    shape = block_shape(checkpoint, qk_norm=kind == "qwen3")
    norm_output = bool(checkpoint.config.get("norm_output", True))
    return filled(
        lambda: SequentialMTPHead(shape, target.layers, norm_output=norm_output),
        checkpoint,
        renamed(_MTP),
        target,
        ignored=("embed_tokens.weight", "lm_head.weight"),
    )


def read_eagle(checkpoint: Checkpoint, target: Backend) -> EagleHead:
    """EAGLE-1 in the `speculators` format or in SafeAILab's. Where `fc` has no bias, it is 0."""
    if checkpoint.config.get("layernorms"):
        raise checkpoint.refused("it has norms before its layer (layernorms = true), which EAGLE-1 has not")
    require_target(checkpoint, target, checkpoint.layer.get("vocab_size"))
    _refuse_more_layers(checkpoint)
    require_shared(checkpoint, "embed_tokens.weight", target.embed, "an embedding")
    require_shared(checkpoint, "lm_head.weight", target.head_rows, "an output matrix")
    shape = block_shape(checkpoint)
    bias = {} if "fc.bias" in checkpoint.tensors else {"fc.bias": torch.zeros(shape.hidden)}
    return filled(
        lambda: EagleHead(shape, target.layers),
        checkpoint,
        renamed(_EAGLE),
        target,
        ignored=("embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq"),
        replaced=bias,
    )


def _refuse_more_layers(checkpoint: Checkpoint) -> None:
    count = checkpoint.layer.get("num_hidden_layers", 1)
    if count != 1:
        raise checkpoint.refused(f"it has {count} decoder layers, and only one is known")


def _feature_layers(checkpoint: Checkpoint, target: Backend) -> tuple[int, ...]:
    """Layers of the target that an EAGLE-3 head reads: i is the state after i of them, in vLLM as well as here.

    SGLang counts those in `eagle_config` from 0 on, as the layers that give the state out.
    """
    count = target.layers
    layers = checkpoint.config.get("eagle_aux_hidden_state_layer_ids")
    nested = checkpoint.config.get("eagle_config")
    if not layers and isinstance(nested, Mapping):
        layers = [layer + 1 for layer in nested.get("eagle_aux_hidden_state_layer_ids") or ()]
    layers = tuple(layers or (2, count // 2, count - 3))
    if any(not isinstance(layer, int) or not 0 <= layer < count for layer in layers) or len(set(layers)) < len(layers):
        raise UnsupportedError(
            f"The head in {checkpoint.folder} reads layers {', '.join(map(str, layers))} of its target, and this "
            f"target has layers 0 to {count - 1} to read: use it with the model it was trained for."
        )
    return layers


def _draft_vocabulary(checkpoint: Checkpoint, target: Backend, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids `[V_draft]` of the target that the head drafts, ascending, and which row of its matrix each one has.

    Files have offsets (target's id less the row) in any order. Rows of ids that only pad the vocabulary are left out.
    """
    offsets, mask = checkpoint.tensors.get("d2t"), checkpoint.tensors.get("t2d")
    count = int(checkpoint.config.get("draft_vocab_size") or vocab_size)
    if offsets is None and count != vocab_size:
        raise checkpoint.refused(f"it lacks tensor 'd2t', which says what its {count} ids are in the target")
    if offsets is None:
        offsets = torch.zeros(count, dtype=torch.int64)
    if offsets.shape != (count,):
        raise checkpoint.refused(f"its tensor 'd2t' is {list(offsets.shape)}, but by its config.json must be [{count}]")
    found, order = (torch.arange(count) + offsets.to(torch.int64)).sort()
    wrong = found[0] < 0 or found[-1] >= vocab_size or bool((found.diff() == 0).any())
    if wrong or (mask is not None and not torch.equal(mask.bool().nonzero()[:, 0], found)):
        raise checkpoint.refused(f"its tensors 'd2t' and 't2d' do not name {count} different ids below {vocab_size}")
    known = found < target.vocab_size
    return found[known], order[known]
