"""Whether the `speculators` library reads the heads that foredraft writes, and says the same with them.

    pip install speculators && python benchmarks/speculators_check.py

Tiny seeded EAGLE-3 and MTP heads are written for a tiny Llama, loaded by `SpeculatorModel.from_pretrained`, and run by
both over the same features and tokens, three steps on; then what the library saves is read back. Prints a row for each
head with the largest difference of a logit, then one JSON line. Ends with status 1 if one is above 1e-4.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.backends.transformers import TransformersBackend
from foredraft.heads.block import BlockShape
from foredraft.heads.checkpoints import TargetConfig
from foredraft.heads.files import load_head, save_head
from foredraft.heads.recurrent import Eagle3Head, Eagle3Norms, RecurrentHead, SequentialMTPHead
from foredraft.train.rollout import Rollout

TOLERANCE = 1e-4
LAYERS, VOCABULARY, STEPS = 4, 64, 3
TOKENS = 129  # the library masks attention in blocks of 128, and drops the first token
LLAMA = BlockShape(hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, rope_theta=50000.0)
QWEN = BlockShape(hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48, epsilon=1e-6, qk_norm=True)
SOME, ALL = torch.arange(1, VOCABULARY, 3), torch.arange(VOCABULARY)

HEADS: dict[str, Callable[[], RecurrentHead]] = {
    "eagle3": lambda: Eagle3Head(LLAMA, (1, 2, 3), SOME),
    "eagle3, all tokens": lambda: Eagle3Head(LLAMA, (0, 3), ALL),
    "eagle3, q/k norms": lambda: Eagle3Head(QWEN, (1, 2, 3), SOME),
    "eagle3, norm_before_residual": lambda: Eagle3Head(LLAMA, (1, 2, 3), SOME, Eagle3Norms(norm_before_residual=True)),
    "eagle3, norm_before_fc": lambda: Eagle3Head(LLAMA, (1, 2, 3), SOME, Eagle3Norms(norm_before_fc=True)),
    "eagle3, fc_norm, norm_output": lambda: Eagle3Head(
        LLAMA, (1, 2, 3), SOME, Eagle3Norms(fc_norm=True, norm_output=True)
    ),
    "mtp": lambda: SequentialMTPHead(QWEN, LAYERS, norm_output=True),
}


def tiny_target(folder: Path) -> TransformersBackend:
    """A Llama with random weights, saved where the library finds it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return TransformersBackend(model)


def seeded(make: Callable[[], RecurrentHead]) -> RecurrentHead:
    """A head whose norms are not all ones either."""
    torch.manual_seed(1)
    head = make()
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3 if weight.ndim == 1 else 0.1)
    return head.eval()


def features(target: TransformersBackend, ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """`[n, layers, H]`."""
    cache = target.new_cache()
    kept = cache.keep_features(layers)
    target.prefill(cache, ids)
    rows = kept.take()[1]
    assert rows is not None
    return rows


@torch.no_grad()
def ours(head: RecurrentHead, target: TransformersBackend, ids: list[int]) -> list[Tensor]:
    """Logits `[n - 1 - step, V_draft]` of each step."""
    rows, embeddings = features(target, ids, head.feature_layers)[None], target.embed(ids)[None]
    found = []
    for step in range(STEPS):
        if step == 0:
            roll = Rollout(head, rows, embeddings)
        elif isinstance(head, Eagle3Head):
            roll.go_on(torch.arange(len(ids))[None])
        else:  # the library starts each step of MTP anew, from the states of the one before
            embeddings = embeddings[:, 1:]
            roll = Rollout(head, roll.state[:, :-1, None], embeddings)
        state = roll.state
        read = head.readout(state)[0]
        logits = target.head(read) if head.lm_head is None else head.lm_head(read)
        found.append(logits[: len(ids) - 1 - step])
    return found


@torch.no_grad()
def theirs(model: Any, head: RecurrentHead, target: TransformersBackend, ids: list[int]) -> list[Tensor]:
    """The same by the library."""
    rows, tokens = features(target, ids, head.feature_layers), torch.tensor([ids])
    if head.kind == "mtp":
        return [part[0] for part in model(input_ids=tokens, hidden_states=rows[None, :, 0])[0]]
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, given, made: found.append(made[0]))
    fused = rows.flatten(-2)[None, :-1]
    model(hidden_states=fused, input_ids=tokens[:, 1:], document_ids=torch.zeros_like(tokens[:, 1:]), ttt_steps=STEPS)
    hook.remove()
    return found


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest, over the places that all have."""
    assert len(a) == len(b) == STEPS
    rows = [min(len(x), len(y), TOKENS - 1 - step) for step, (x, y) in enumerate(zip(a, b, strict=True))]
    return max(float((x[:n] - y[:n]).abs().max()) for x, y, n in zip(a, b, rows, strict=True))


def check(name: str, folder: Path, target: TransformersBackend) -> dict[str, Any]:
    """Write, load and compare one head."""
    from speculators import SpeculatorModel

    head = seeded(HEADS[name])
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()
    about = TargetConfig.of(target, str(folder / "target"))
    embedding = None if head.kind == "mtp" else target.embed(range(VOCABULARY))
    save_head(head, folder / "head", target_config=about, embedding=embedding, dtype=torch.float32)
    model = SpeculatorModel.from_pretrained(folder / "head").float().eval()
    model.save_pretrained(folder / "theirs")
    read_back = load_head(folder / "theirs", target)
    assert isinstance(read_back, RecurrentHead)
    wanted = ours(head, target, ids)
    return {
        "head": name,
        "largest_logit": max(float(part.abs().max()) for part in wanted),
        "difference": difference(wanted, theirs(model, head, target, ids)),
        "difference_read_back": difference(wanted, ours(read_back, target, ids)),
    }


def main() -> int:
    """Check all heads."""
    rows = []
    for name in HEADS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            rows.append(check(name, folder, tiny_target(folder / "target")))
        row = rows[-1]
        print(
            f"{name:32s} logits up to {row['largest_logit']:5.1f}  difference {row['difference']:.1e}  "
            f"read back {row['difference_read_back']:.1e}"
        )
    good = all(max(row["difference"], row["difference_read_back"]) <= TOLERANCE for row in rows)
    print(json.dumps({"speculators": version("speculators"), "tolerance": TOLERANCE, "good": good, "heads": rows}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
