#!/usr/bin/env bash
# x-transformers 2.31.10, torch 2.13.0, CPU. Our guess: greedy generate() writes the same text with and without the
# cache of keys and values (cache_kv=True is its default), and a model with an option that needs more than the cache
# says can_cache_kv=False and goes without it, as one with memory tokens does.
# Seen: with shift_tokens=1, an option of the README for autoregressive models, can_cache_kv says True, but the shift
# finds no earlier token once tokens come one by one, and shifts in zeros. A model that has learnt to go on with a
# period of 5 tokens writes at the level of guessing (1 of 8) by default, and nearly without fault with
# cache_kv=False. attn_data_dependent_alibi=True loses the distances to cached tokens in the same way, and
# writes worse. No error and no warning: the loss is fine, only the text is bad.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q x-transformers==2.31.10 torch==2.13.0 numpy==2.3.5 einops==0.8.2 einx==0.4.3 \
    torch-einops-utils==0.2.0 2>/dev/null
OMP_NUM_THREADS=1 "$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

print("x-transformers", importlib.metadata.version("x-transformers"), "torch", torch.__version__)

def right(option):
    """the shares of tokens that a small trained model continues rightly: by default, and with cache_kv=False"""
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=2, attn_dim_head=32, rotary_pos_emb=True, verbose=False, **option)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=8, max_seq_len=64, attn_layers=layers))
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        loss = model(torch.randint(0, 8, (16, 5)).repeat(1, 5))   # 5 random tokens, five times
        loss.backward()
        adam.step()
        adam.zero_grad()
    model.eval()
    period = torch.randint(0, 8, (64, 5))
    shares = []
    for choice in dict(), dict(cache_kv=False):
        text = model.generate(period.repeat(1, 2), 20, temperature=0., **choice)
        shares.append((text == period.repeat(1, 4)).float().mean().item())
    print(f"{', '.join(option) or 'no option':26} loss {loss.item():.2f}, can_cache_kv {model.net.can_cache_kv}, "
          f"right by default {shares[0]:.1%}, with cache_kv=False {shares[1]:.1%}")
    return shares

plain, shift, alibi = right({}), right(dict(shift_tokens=1)), right(dict(attn_data_dependent_alibi=True))
assert min(plain) > 0.95, "this has changed"
assert shift[0] < 0.3 < 0.95 < shift[1] and alibi[0] < alibi[1] - 0.02, "this has changed"
PYTHON
