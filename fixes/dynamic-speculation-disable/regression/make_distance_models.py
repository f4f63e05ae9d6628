"""Make a target and an EAGLE-3 draft that must look a known number of tokens back in their KV caches.

Runs by path in the lab's base environment (torch, transformers, tokenizers, safetensors):

    python make_distance_models.py OUT DISTANCE...     8 of them, each 1 or more

writes OUT/target, OUT/draft and OUT/expected_next.json: a list p of 512 token ids. The ordinary tokens (2 and up) fall
into 8 classes, token t into class (t - 2) % 8, and p stays within a class. After tokens of class c the target says
p[the token DISTANCE[c] before the last one], so that the prompt chooses the distance, and a generation keeps it.

How: a token is embedded as a code of 64 signs. Head c of the target's first layer turns its query with the rotary
embedding so that it meets the key exactly DISTANCE[c] back, and writes the code found there where the head looks for
the tokens of class c. The other layers add nothing. The draft's one layer does the same with its own cache. Its heads
0 to 3 read the tokens in it, the heads 4 to 7 the hidden states that the target gave it. What a head reads from a key
that is not there or not its own is another token's code, and the draft is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
# The residual stream: a token's code, one code found by each head, and a constant.
CODE = HEAD_DIM
SLOTS = CODE
CONSTANT = SLOTS + HEADS * CODE
HIDDEN = CONSTANT + CODE
LAYERS, AUX_LAYERS = 4, 3
CONTEXT, ROPE_BASE = 8192, 10000.0
# Scores fall by about this much from the key that is looked for to its neighbour.
SHARPNESS = 40.0
# The draft's last norm makes what it carries to its next step small beside what that step finds.
CARRIED = 1e-3

# torch is not installed where this file is type-checked.
Tensor = Any


def class_of(token: int) -> int:
    """The head that predicts what follows the token; the two special tokens have none of their own."""
    return (token - 2) % HEADS


def successors(generator: Any) -> list[int]:
    """One cycle over the tokens of each class, and the identity on the special ones."""
    table = list(range(VOCAB))
    for head in range(HEADS):
        members = [token for token in range(2, VOCAB) if class_of(token) == head]
        order = [members[i] for i in torch.randperm(len(members), generator=generator).tolist()]
        for token, following in zip(order, order[1:] + order[:1], strict=True):
            table[token] = following
    return table


def embedding(codes: Tensor) -> Tensor:
    """Weights [VOCAB, HIDDEN] of plus and minus one: the code, empty slots, the constant."""
    weights = torch.zeros(VOCAB, HIDDEN)
    weights[:, :CODE] = codes
    weights[:, CONSTANT:] = 1.0
    return weights


def norm_that_keeps(share: float) -> Tensor:
    """Weights [HIDDEN] of an RMS norm that leaves a vector as it is where ``share`` of it is plus or minus one."""
    return torch.full((HIDDEN,), math.sqrt(share))


def queries(distances: list[int], inputs: int) -> Tensor:
    """Weights [HEADS * HEAD_DIM, inputs] that make of the constant a query for the key so many positions back."""
    half = HEAD_DIM // 2
    angles = torch.tensor(distances)[:, None] * ROPE_BASE ** (-torch.arange(half) / half)
    turned = torch.cat([angles.cos(), -angles.sin()], 1) * SHARPNESS * math.sqrt(HEAD_DIM)
    weights = torch.zeros(HEADS * HEAD_DIM, inputs)
    weights[:, CONSTANT] = turned.flatten()
    return weights


def keys(inputs: int) -> Tensor:
    """Weights [KV_HEADS * HEAD_DIM, inputs] of keys that differ in their position only."""
    weights = torch.zeros(KV_HEADS, HEAD_DIM, inputs)
    weights[:, : HEAD_DIM // 2, CONSTANT] = 1.0
    return weights.view(-1, inputs)


def values(inputs: int, begins: tuple[int, int]) -> Tensor:
    """Weights [KV_HEADS * HEAD_DIM, inputs]: each KV head reads the code that begins there."""
    weights = torch.zeros(KV_HEADS, HEAD_DIM, inputs)
    for kv_head, begin in enumerate(begins):
        weights[kv_head, :, begin : begin + CODE] = torch.eye(CODE)
    return weights.view(-1, inputs)


def into_slots() -> Tensor:
    """Weights [HIDDEN, HEADS * HEAD_DIM] that write what each head found into its slot."""
    weights = torch.zeros(HIDDEN, HEADS * HEAD_DIM)
    weights[SLOTS:CONSTANT] = torch.eye(HEADS * HEAD_DIM)
    return weights


def head(codes: Tensor, table: list[int]) -> Tensor:
    """Weights [VOCAB, HIDDEN]: a token is likely as the code in its class's slot is that of its predecessor."""
    weights = torch.zeros(VOCAB, HIDDEN)
    for token, following in enumerate(table):
        begin = SLOTS + class_of(following) * CODE
        if token >= 2:
            weights[following, begin : begin + CODE] = codes[token]
    return weights


def save_target(folder: Path, distances: list[int], codes: Tensor, table: list[int]) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=CODE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding(codes))
        model.lm_head.weight.copy_(head(codes, table))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        first = model.model.layers[0]
        first.input_layernorm.weight.copy_(norm_that_keeps(2 * CODE / HIDDEN))
        first.self_attn.q_proj.weight.copy_(queries(distances, HIDDEN))
        first.self_attn.k_proj.weight.copy_(keys(HIDDEN))
        first.self_attn.v_proj.weight.copy_(values(HIDDEN, (0, 0)))
        first.self_attn.o_proj.weight.copy_(into_slots())
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"<{token}>": token for token in range(VOCAB)}, unk_token="<0>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<0>", eos_token="<1>").save_pretrained(folder)  # noqa: S106
    # transformers 4 and 5 name the class differently; this name loads in both.
    written = folder / "tokenizer_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def save_draft(folder: Path, distances: list[int], codes: Tensor, table: list[int]) -> None:
    # At one position the draft has a token and the hidden state of the token before it, so that what the target finds
    # d back in its cache is d back among the tokens of the draft's, and d - 1 among its hidden states.
    by_token = HEADS // KV_HEADS
    behind = distances[:by_token] + [distance - 1 for distance in distances[by_token:]]
    from_target = torch.zeros(HIDDEN, AUX_LAYERS * HIDDEN)
    from_target[:CODE, :CODE] = torch.eye(CODE)
    weights = {
        "fc.weight": from_target,
        "norm.weight": torch.full((HIDDEN,), CARRIED),
        "lm_head.weight": head(codes, table) / CARRIED,
        "midlayer.hidden_norm.weight": norm_that_keeps(CODE / HIDDEN),
        "midlayer.input_layernorm.weight": norm_that_keeps(2 * CODE / HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.self_attn.q_proj.weight": queries(behind, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": keys(2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": values(2 * HIDDEN, (0, HIDDEN)),
        "midlayer.self_attn.o_proj.weight": into_slots(),
        "midlayer.mlp.gate_proj.weight": torch.zeros(CODE, HIDDEN),
        "midlayer.mlp.up_proj.weight": torch.zeros(CODE, HIDDEN),
        "midlayer.mlp.down_proj.weight": torch.zeros(HIDDEN, CODE),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": CODE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": ROPE_BASE,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "norm_output": True,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(range(AUX_LAYERS)),
            "use_aux_hidden_state": True,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a target and a draft that look back a known way.")
    parser.add_argument("out", type=Path)
    parser.add_argument("distances", type=int, nargs=HEADS)
    args = parser.parse_args()
    if min(args.distances) < 1:
        parser.error("a distance is 1 or more")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (VOCAB, CODE), generator=generator) * 2.0 - 1.0
    table = successors(generator)
    save_target(args.out / "target", args.distances, codes, table)
    save_draft(args.out / "draft", args.distances, codes, table)
    (args.out / "expected_next.json").write_text(json.dumps(table))


if __name__ == "__main__":
    main()
