"""Let the target model write its own training conversations (on-policy, nobody else's text).

The user's turn is sampled from the model after the chat template's opening, as Magpie does
(arXiv 2406.08464); the answer is the model's own greedy continuation.  Both are kept as token
ids.  A small batched Llama decoder with preallocated KV caches is used instead of ``generate``:
at 128 conversations a step it writes several times as many tokens per CPU second.

    python write_conversations.py TARGET_DIR OUT.jsonl --seed 1 --minutes 20

Each line: ``{"prompt_ids", "answer_ids", "user_tokens", "ended"}``.  ``prompt_ids`` ends with the
assistant's opening; ``user_tokens`` counts the ids of the user's turn before its end marker;
``ended`` says whether the answer ends with the end marker (otherwise it was cut at 200 tokens).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

MAX_USER, MAX_ANSWER = 64, 200
TEMPERATURE, TOP_P = 1.0, 0.95
NEG = float("-inf")


class BatchedLlama:
    """A Llama decoder over fixed-size KV caches.  Legend: B batch, Q new tokens, E cached + new."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(directory)
        weights = load_file(directory / "model.safetensors")
        get = lambda name: weights[f"model.{name}.weight"].to(dtype).contiguous()  # noqa: E731
        self.dtype, self.eps = dtype, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = config.hidden_size // self.heads
        self.embedding, self.final_norm = get("embed_tokens"), get("norm")
        self.layers = []
        for index in range(config.num_hidden_layers):
            at = f"layers.{index}."
            qkv = torch.cat([get(f"{at}self_attn.{x}_proj") for x in "qkv"])
            gate_up = torch.cat([get(f"{at}mlp.{x}_proj") for x in ("gate", "up")])
            norms = get(f"{at}input_layernorm"), get(f"{at}post_attention_layernorm")
            out, down = get(f"{at}self_attn.o_proj"), get(f"{at}mlp.down_proj")
            self.layers.append((norms, qkv, out, gate_up, down))
        theta = config.rope_parameters["rope_theta"]
        inverse = 1 / theta ** (torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.outer(torch.arange(1024).float(), inverse).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def reserve(self, batch: int, length: int) -> None:
        shape = (len(self.layers), batch, self.kv_heads, length, self.width)
        self.keys, self.values = torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, start: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """Last-position logits [B, V] of ids [B, Q] written at start; mask additive [B, Q, E]."""
        batch, new = ids.shape
        end, groups = start + new, self.heads // self.kv_heads
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

        def rotate(x: torch.Tensor) -> torch.Tensor:  # [B, H, Q, D]
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        x = F.embedding(ids, self.embedding)
        for index, ((norm_in, norm_mid), qkv, out, gate_up, down) in enumerate(self.layers):
            h = F.linear(F.rms_norm(x, x.shape[-1:], norm_in, self.eps), qkv)
            sizes = [self.heads * self.width] + [self.kv_heads * self.width] * 2
            q, k, v = (part.view(batch, new, -1, self.width).transpose(1, 2) for part in h.split(sizes, -1))
            self.keys[index, :, :, start:end] = rotate(k)
            self.values[index, :, :, start:end] = v
            cached_k, cached_v = self.keys[index, :, :, :end], self.values[index, :, :, :end]
            # Queries that share a KV head are stacked as rows: no repeated keys.
            q = rotate(q).reshape(batch, self.kv_heads, groups * new, self.width)
            scores = (q @ cached_k.transpose(-1, -2)) * self.width**-0.5
            scores = scores.view(batch, self.kv_heads, groups, new, end) + mask[:, None, None]
            attended = scores.softmax(-1).view(batch, self.kv_heads, groups * new, end) @ cached_v
            attended = attended.view(batch, self.heads, new, self.width).transpose(1, 2)
            x = x + F.linear(attended.reshape(batch, new, -1), out)
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], norm_mid, self.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x[:, -1], x.shape[-1:], self.final_norm, self.eps), self.embedding)


def sample_nucleus(logits: torch.Tensor) -> torch.Tensor:
    """One id per row of logits [B, V] from the smallest set holding TOP_P of the mass."""
    p, ids = (logits.float() / TEMPERATURE).softmax(-1).topk(2048)
    p = p * ((p.cumsum(-1) - p) < TOP_P)
    return ids.gather(1, torch.multinomial(p, 1))[:, 0]


def user_turns(model: BatchedLlama, opening: list[int], end: int, batch: int) -> list[list[int]]:
    """Sample up to ``batch`` user turns after the template's opening."""
    n = len(opening)
    model.reserve(batch, n + MAX_USER)
    ids, positions = torch.tensor([opening] * batch), torch.arange(n).expand(batch, n)
    causal = torch.full((n, n), NEG, dtype=model.dtype).triu(1).expand(batch, n, n)
    logits = model.logits(ids, positions, 0, causal)
    logits[:, end] = NEG  # an empty question is none
    drawn = []
    for step in range(MAX_USER):
        drawn.append(sample_nucleus(logits))
        at = n + step
        mask = torch.zeros(batch, 1, at + 1, dtype=model.dtype)
        logits = model.logits(drawn[-1][:, None], torch.full((batch, 1), at), at, mask)
    turns = []
    for row in torch.stack(drawn, 1).tolist():
        if end in row and row.index(end) >= 4:
            turns.append(row[: row.index(end)])
    return turns


def greedy_answers(model: BatchedLlama, prompts: list[list[int]], end: int) -> list[list[int]]:
    """Greedy answers to left-padded prompts, each cut after ``end`` or at MAX_ANSWER tokens."""
    batch, longest = len(prompts), max(map(len, prompts))
    model.reserve(batch, longest + MAX_ANSWER)
    ids = torch.zeros(batch, longest, dtype=torch.long)
    positions = torch.zeros_like(ids)
    pad = torch.zeros(batch, longest, dtype=model.dtype)
    causal = torch.full((longest, longest), NEG, dtype=model.dtype).triu(1).repeat(batch, 1, 1)
    for row, prompt in enumerate(prompts):
        skip = longest - len(prompt)
        ids[row, skip:], positions[row, skip:] = torch.tensor(prompt), torch.arange(len(prompt))
        pad[row, :skip] = NEG
        causal[row, skip:, :skip] = NEG  # padding rows attend among themselves and are ignored
    next_ids = model.logits(ids, positions, 0, causal).argmax(-1)
    last, written, done = positions[:, -1], [next_ids], next_ids == end
    for step in range(MAX_ANSWER - 1):
        if done.float().mean() > 0.95:
            break  # a few long answers are cut rather than holding the batch
        mask = torch.cat([pad, torch.zeros(batch, step + 1, dtype=model.dtype)], 1)[:, None]
        at = (last + 1 + step)[:, None]
        next_ids = model.logits(next_ids[:, None], at, longest + step, mask).argmax(-1)
        written.append(next_ids)
        done |= next_ids == end
    rows = torch.stack(written, 1).tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def template_parts(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], int]:
    """Ids before a user's turn, ids from its end to the assistant's opening, and the end marker."""
    mark = "\x00turn\x00"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(mark)
    end = tokenizer.eos_token_id
    encode = lambda part: tokenizer(part, add_special_tokens=False)["input_ids"]  # noqa: E731
    return encode(before), encode(after), end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="directory of a Llama-type chat model")
    parser.add_argument("out", type=Path, help="JSONL to append to")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = BatchedLlama(args.target, getattr(torch, args.dtype))
    opening, closing, end = template_parts(tokenizer)
    started, tokens, conversations = time.time(), 0, 0
    with torch.inference_mode(), args.out.open("a") as out:
        while time.time() - started < 60 * args.minutes:
            turns = user_turns(model, opening, end, args.batch)
            turns.sort(key=len)  # less padding is not the point: equal lengths end together
            prompts = [opening + turn + closing for turn in turns]
            for turn, prompt, answer in zip(turns, prompts, greedy_answers(model, prompts, end), strict=True):
                line = {
                    "prompt_ids": prompt,
                    "answer_ids": answer,
                    "user_tokens": len(turn),
                    "ended": answer[-1] == end,
                }
                out.write(json.dumps(line) + "\n")
                tokens += len(answer)
                conversations += 1
            out.flush()
            rate = tokens / (time.time() - started)
            print(f"{conversations} conversations, {tokens} answer tokens, {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
