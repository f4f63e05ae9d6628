"""Make a tiny Llama target and its EAGLE-3 draft whose greedy output is known.

Runs by path in the lab's base environment (torch, transformers, tokenizers, safetensors), not in sgdiag's:

    python make_models.py OUT [--layers 4] [--accept 0.8] [--seed 0]

writes OUT/target (LlamaForCausalLM and a byte-level tokenizer), OUT/draft (LlamaForCausalLMEagle3) and
OUT/expected_next.json: a list p of 512 token ids, where p[t] is the token that follows t.

Every block of the target adds nothing to the residual stream, embeddings are one-hot and the head is the permutation
p, so greedy output is exact. The draft's block maps the one-hot of s to that of q(s), where q equals p on the share
`--accept` of the tokens. Attention, cache writes and batching run as for any Llama; only the arithmetic is known.
Greedy output is therefore the same with and without speculation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = HIDDEN = INTERMEDIATE = 512
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
BOS, EOS = 0, 1
BOS_TEXT, EOS_TEXT = "<s>", "</s>"
CONTEXT = 8192
WORDS = ("model", "server", "worker", "kernel")

# torch is not installed where this file is type-checked.
Tensor = Any


def successors(accept: float, generator: Any) -> tuple[Tensor, Tensor]:
    """The target's successor of every token and the draft's, int64 [VOCAB] each.

    The target's is one cycle over the ordinary tokens (2 and up), so that no generation ever reaches the end token.
    """
    order = torch.randperm(VOCAB - 2, generator=generator) + 2
    target = torch.arange(VOCAB)
    target[order] = order.roll(-1)
    target[:2] = order[:2]
    draft = target.clone()
    wrong = order[torch.randperm(len(order), generator=generator)[: round((1 - accept) * len(order))]]
    draft[wrong] = target[wrong.roll(1)]
    return target, draft


def head(successor: Tensor) -> Tensor:
    """Weights [VOCAB, HIDDEN] that turn the one-hot of a token into that of its successor."""
    return torch.zeros(VOCAB, HIDDEN).index_put((successor, torch.arange(VOCAB)), torch.ones(VOCAB))


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with VOCAB entries at most, and a plain chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS_TEXT, EOS_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [f"{word} {word}s the and of request token batch graph cache draft verify" for word in WORDS * 40]
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS_TEXT, eos_token=EOS_TEXT)
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)
    # transformers 4 and 5 name the class differently; this name loads in both.
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def save_target(folder: Path, layers: int, successor: Tensor) -> None:
    """A Llama whose blocks add nothing and whose head is the successor table."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.lm_head.weight.copy_(head(successor))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)


def save_draft(folder: Path, target_successor: Tensor, successor: Tensor, generator: Any) -> None:
    """An EAGLE-3 draft that shares the target's head and whose one block applies its own successor table."""
    eye, ones = torch.eye(VOCAB), torch.ones(HIDDEN)
    # The block sees sqrt(H) * onehot(s), so silu(gate x) * (up x) is H * onehot(s); down turns the residual onehot(s)
    # into onehot(q(s)) at the same length, so that drafting any number of steps stays exact.
    down = (head(successor) - eye) / HIDDEN

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    weights = {
        "fc.weight": torch.cat([eye, torch.zeros(HIDDEN, 2 * HIDDEN)], 1),
        "norm.weight": ones,
        "lm_head.weight": head(target_successor),
        "midlayer.hidden_norm.weight": ones,
        "midlayer.input_layernorm.weight": ones,
        "midlayer.post_attention_layernorm.weight": ones,
        "midlayer.self_attn.q_proj.weight": noise(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": noise(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": noise(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": torch.zeros(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": eye,
        "midlayer.mlp.up_proj.weight": eye,
        "midlayer.mlp.down_proj.weight": down,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Cloned, because safetensors refuses tensors that share memory.
    save_file(
        {name: w.to(torch.bfloat16).contiguous().clone() for name, w in weights.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny target and draft with known greedy output.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--accept", type=float, default=0.8, help="share of tokens whose draft is right")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    target, draft = successors(args.accept, generator)
    save_target(args.out / "target", args.layers, target)
    save_draft(args.out / "draft", target, draft, generator)
    (args.out / "expected_next.json").write_text(json.dumps(target.tolist()))


if __name__ == "__main__":
    main()
